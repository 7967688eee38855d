"""What a program communicates, as data and as a table."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .collective import KINDS, Collective, check_kind
from .rows import Minimum, Row, kind_rows, kind_total
from .table import render

__all__ = ["Report"]


@dataclasses.dataclass(frozen=True)
class Report:
    """The collectives of one step.

    `str(report)` is a table for a terminal. Reports with the same content are equal.

    Attributes:
        collectives: one record per collective and call, in program order.
        minima: the least bytes to hold the program against, per kind.
        mesh_axes: names and sizes of the mesh's axes, in its order.
        jax_version: the version that lowered the program.
    """

    collectives: tuple[Collective, ...]
    minima: tuple[Minimum, ...] = ()
    mesh_axes: tuple[tuple[str, int], ...] = ()
    jax_version: str = jax.__version__

    @property
    def rows(self) -> tuple[Row, ...]:
        """One row per kind, axes and dtype; a kind of which there is only a minimum has one too."""
        return tuple(
            row for kind in KINDS for row in kind_rows(kind, self.collectives, self.minima)
        )

    @property
    def totals(self) -> tuple[Row, ...]:
        """One row per kind that occurs or has a minimum."""
        return tuple(
            kind_total(kind, self.collectives, self.minima)
            for kind in dict.fromkeys(row.kind for row in self.rows)
        )

    @property
    def total_bytes(self) -> float:
        """Bytes that one device receives in one step, over all kinds."""
        return self.bytes()

    def count(
        self,
        kind: str | None = None,
        axes: str | Sequence[str] | None = None,
        dtype: Any = None,
    ) -> int:
        """How many collectives one step executes.

        Args:
            kind: only this kind, such as "all-gather".
            axes: only collectives over exactly these mesh axes, in any order. Axes of size 1 are
                not part of any collective's axes.
            dtype: only collectives of this dtype, as a name or as anything `jnp.dtype` accepts.

        Returns:
            The sum of executions. A loop of unknown length counts once.

        Raises:
            ValueError: there is no such kind, or the mesh has no such axis: a misspelled name
                would otherwise read as zero.
            TypeError: there is no such dtype.
        """
        return sum(record.executions for record in self._select(kind, axes, dtype))

    def bytes(
        self,
        kind: str | None = None,
        axes: str | Sequence[str] | None = None,
        dtype: Any = None,
    ) -> float:
        """How many bytes one device receives in one step.

        Args:
            kind: as for `count`.
            axes: as for `count`.
            dtype: as for `count`.

        Returns:
            The bytes, summed over all executions; a whole number wherever each array divides by
            its group's size.

        Raises:
            ValueError: as for `count`.
            TypeError: as for `count`.
        """
        return sum((record.total_bytes for record in self._select(kind, axes, dtype)), 0.0)

    def to_json(self) -> str:
        """The report as a JSON object: version, mesh, collectives, rows, totals, minima, bytes."""
        content = {
            "jax_version": self.jax_version,
            "mesh": dict(self.mesh_axes),
            "total_bytes": self.total_bytes,
            "totals": [_row_as_dict(row) for row in self.totals],
            "rows": [_row_as_dict(row) for row in self.rows],
            "minima": [dataclasses.asdict(minimum) for minimum in self.minima],
            "collectives": [dataclasses.asdict(record) for record in self.collectives],
        }
        return json.dumps(content, indent=2)

    def __str__(self) -> str:
        mesh = " x ".join(f"{axis}={size}" for axis, size in self.mesh_axes) or "none"
        title = (
            f"jax {self.jax_version}, mesh {mesh}: as lowered, before compiler passes; "
            "bytes received per device and step"
        )
        return render(title, self.rows, self.totals, self.minima)

    def _select(
        self, kind: str | None, axes: str | Sequence[str] | None, dtype: Any
    ) -> Iterator[Collective]:
        if kind is not None:
            check_kind(kind)
        wanted_axes = None if axes is None else self._checked_axes(axes)
        wanted_dtype = None if dtype is None else jnp.dtype(dtype).name
        for record in self.collectives:
            if (
                kind in (None, record.kind)
                and wanted_axes in (None, frozenset(record.axes))
                and wanted_dtype in (None, record.dtype)
            ):
                yield record

    def _checked_axes(self, axes: str | Sequence[str]) -> frozenset[str]:
        wanted = frozenset((axes,) if isinstance(axes, str) else axes)
        known = [axis for axis, _ in self.mesh_axes]
        if unknown := sorted(wanted.difference(known)):
            raise ValueError(f"jfsdp.inspect: no axes {unknown} in this mesh, which has {known}")
        return wanted


def _row_as_dict(row: Row) -> dict[str, Any]:
    return dataclasses.asdict(row) | {"ratio": row.ratio}
