"""What a program communicates and how much memory it needs, as data and as tables."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from .collective import KINDS, Collective, check_kind
from .contract import Departure, PolicyViolation, Promise
from .difference import Difference, difference
from .memory import Argument, Memory
from .memory_table import memory_table
from .networks import Networks, is_slow
from .networks_table import bytes_by_network, network_table
from .overlap import PHASES, overlap, overlap_by_kind, overlap_line
from .rows import Minimum, Row, kind_rows, kind_total
from .selection import selected
from .sizes import parse_bytes
from .stored import stored_departures
from .table import render
from .transfers import Traffic, traffic_line
from .verify import departures
from .verify_host import host_departures

__all__ = ["Report"]


@dataclasses.dataclass(frozen=True)
class Report:
    """The collectives of one step and, once it is compiled, its memory.

    `str(report)` is a table for a terminal. Reports with the same content are equal.

    Attributes:
        collectives: one record per collective and call, in program order; of the compiled program if
            there is one. Empty if the compiler refused the program for want of memory.
        minima: the least bytes to hold the program against, per kind.
        mesh_axes: names and sizes of the mesh's axes, in its order.
        jax_version: the version that lowered the program.
        target: the devices, such as "8 x TPU v5 lite"; "" before compilation.
        promises: what the policies say of each parameter.
        other_axes: the mesh axes of which they say nothing, such as tensor axes.
        memory: bytes per device; None before compilation.
        constants: bytes of arrays that are written into the program.
        lowered: the report of the same step as it was written, if this one is of the compiled program.
        networks: what joins the devices; None where that is not known.
        arguments: of the step, as far as they were named.
        results: the arrays that it returns.
        traffic: what one step moves to and from host memory. For CPU, whose programs have one memory, it is
            that of the program as it is written; None if that was lowered already.
    """

    collectives: tuple[Collective, ...]
    minima: tuple[Minimum, ...] = ()
    mesh_axes: tuple[tuple[str, int], ...] = ()
    jax_version: str = jax.__version__
    target: str = ""
    promises: tuple[Promise, ...] = ()
    other_axes: tuple[str, ...] = ()
    memory: Memory | None = None
    constants: int = 0
    lowered: Report | None = None
    networks: Networks | None = None
    arguments: tuple[Argument, ...] = ()
    results: tuple[Argument, ...] = ()
    traffic: Traffic | None = None

    def check(
        self, *, calls: int = 1, tolerance: float = 0.01, memory: int | str | None = None
    ) -> None:
        """Hold the program against what the policies promise.

        Checked are, of the compiled program if there is one: that every gather of a parameter is in its
        `param_dtype` and every reduction of a gradient in its `reduce_dtype`, over the stated axes; that
        the bytes are at most the least ones; that nothing else of 1 MiB or more is communicated, no
        gradient of that size all-reduced in place of a reduce-scatter; that no gather or reduce-scatter
        crosses TPU slices or GPU hosts if its shard axes lie inside one; that no parameters are constants
        of the program; that parameters and optimizer state take the stated bytes and, if they are donated,
        that all of them are reused; that the step fits; that what is to lie in host memory does, as it comes
        and as it goes, and nothing else; that the device only copies there, and the host computes only what
        `compute_on` asks for. Compilers for CPU turn bfloat16 collectives into float32 ones: there dtypes and
        bytes are read from the program before compilation.

        Args:
            calls: how often the step calls the model, for example on microbatches.
            tolerance: by which fraction bytes may exceed the least ones.
            memory: what a device has, in bytes or as text such as "16 GiB". None: what is known of the
                target; nothing is checked if nothing is.

        Raises:
            PolicyViolation: it departs from them; all departures are listed.
            ValueError: there are no policies to hold it against, or no memory figures to hold against
                `memory`.
        """
        found = self.departures(calls=calls, tolerance=tolerance, memory=memory)
        if found:
            raise PolicyViolation(
                f"{self._title()}\nThe program is not what the policies state, in {len(found)} "
                f"point{'s' if len(found) > 1 else ''}:",
                found,
            )

    def departures(
        self, *, calls: int = 1, tolerance: float = 0.01, memory: int | str | None = None
    ) -> list[Departure]:
        """What `check` would raise, as a list.

        Args:
            calls: as for `check`.
            tolerance: as for `check`.
            memory: as for `check`.

        Returns:
            The departures; none if the program is what the policies state.

        Raises:
            ValueError: as for `check`.
        """
        if not self.promises:
            raise ValueError(
                "jfsdp.inspect: there are no policies to hold this program against: none of the step's "
                "arguments holds a sharded model. Pass one, or `model=` with the model whose policies the "
                "step should keep."
            )
        if memory is not None and self.memory is None:
            raise ValueError(
                "jfsdp.inspect: memory is known of compiled programs only: "
                "jfsdp.inspect(step, ..., compile=True)"
            )
        program = self._readable()
        found = departures(
            program.collectives,
            self.promises,
            calls=calls,
            tolerance=tolerance,
            other_axes=self.other_axes,
            networks=self.networks,
        )
        available = parse_bytes(memory) if memory is not None else None
        found += host_departures(
            self.promises,
            self.arguments,
            self.results,
            self.traffic,
            self.traffic if self.lowered is None else self.lowered.traffic,
            self.memory,
        )
        return [*found, *stored_departures(self.constants, self.memory, available)]

    def _readable(self) -> Report:
        """The compiled program, unless there is none or it does not tell dtypes."""
        refused = self.memory is not None and self.memory.refused
        widened = "cpu" in self.target
        return self.lowered if self.lowered is not None and (refused or widened) else self

    def difference(self, other: Report) -> Difference:
        """What changes from this report to another.

        Args:
            other: the later report.

        Returns:
            Every figure that is not the same: collectives by kind, axes, dtype and phase, and memory.
        """
        own, others = ({} if r.memory is None else r.memory.by_place() for r in (self, other))
        return difference(self.collectives, other.collectives, own, others)

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
        network: str | None = None,
    ) -> float:
        """How many bytes one device receives in one step.

        Args:
            kind: as for `count`.
            axes: as for `count`.
            dtype: as for `count`.
            network: only what comes over this network: "ICI" or "DCN" (inside and between TPU slices),
                "NVLink" or "network" (inside and between hosts of GPUs), in any case.

        Returns:
            The bytes, summed over all executions; a whole number wherever each array divides by
            its group's size.

        Raises:
            ValueError: as for `count`; the devices are not known, or have no such network.
            TypeError: as for `count`.
        """
        records = self._select(kind, axes, dtype)
        if network is None:
            return sum((record.total_bytes for record in records), 0.0)
        slow = is_slow(network, self.networks)
        return sum((r.crossing_bytes if slow else r.inside_bytes for r in records), 0.0)

    def overlap(self, kind: str, phase: str | None = None) -> float | None:
        """Which share of a kind's bytes travels while a matrix multiplication is scheduled to run.

        Args:
            kind: as for `count`.
            phase: "forward", "backward" or "update"; None for all.

        Returns:
            From 0.0 to 1.0; None if the program has no such bytes.

        Raises:
            ValueError: there is no such kind or phase, or the program is not compiled and has no schedule.
        """
        check_kind(kind)
        if phase not in (None, *PHASES):
            raise ValueError(f"jfsdp.inspect: no phase {phase!r}; there are {list(PHASES)}")
        if not self.target:
            raise ValueError(
                "jfsdp.inspect: a schedule is known of compiled programs only: "
                "jfsdp.inspect(step, ..., compile=True)"
            )
        return overlap(self.collectives, kind, phase)

    def to_json(self) -> str:
        """The report as a JSON object: what `as_dict` has."""
        return json.dumps(self.as_dict(), indent=2)

    def to_html(self, title: str = "") -> str:
        """The report as a page that needs no other file; see `jfsdp.inspect.html.to_html`."""
        from .html import to_html

        return to_html(self, title)

    def as_dict(self) -> dict[str, Any]:
        """All of it for JSON, with sums and the bytes of each network."""
        return {
            "jax_version": self.jax_version,
            "target": self.target,
            "mesh": dict(self.mesh_axes),
            "total_bytes": self.total_bytes,
            "totals": [_row_as_dict(row) for row in self.totals],
            "rows": [_row_as_dict(row) for row in self.rows],
            "minima": [dataclasses.asdict(minimum) for minimum in self.minima],
            "networks": bytes_by_network(self.collectives, self.promises, self.networks),
            "overlap": overlap_by_kind(self.collectives),
            "memory": None if self.memory is None else self.memory.as_dict(),
            "constants": self.constants,
            "host_traffic": None if self.traffic is None else self.traffic.as_dict(),
            "collectives": [dataclasses.asdict(record) for record in self.collectives],
            "lowered": None if self.lowered is None else self.lowered.as_dict(),
        }

    def __str__(self) -> str:
        if self.memory is not None and self.memory.refused:
            parts = [f"{self._title()}: the compiler refused the program for want of memory"]
        else:
            title = f"{self._title()}; bytes received per device and step"
            table = render(title, self.rows, self.totals, self.minima)
            parts = ["\n".join(filter(None, [table, overlap_line(self.collectives)]))]
            parts += filter(None, [network_table(self.collectives, self.promises, self.networks)])
        parts += filter(None, [traffic_line(self.traffic)])
        if self.memory is not None:
            parts.append(memory_table(self.memory))
        return "\n\n".join(parts)

    def _title(self) -> str:
        mesh = " x ".join(f"{axis}={size}" for axis, size in self.mesh_axes) or "none"
        stage = (
            f"compiled for {self.target}" if self.target else "as lowered, before compiler passes"
        )
        return f"jax {self.jax_version}, mesh {mesh}: {stage}"

    def _select(
        self, kind: str | None, axes: str | Sequence[str] | None, dtype: Any
    ) -> Iterator[Collective]:
        return selected(self.collectives, [axis for axis, _ in self.mesh_axes], kind, axes, dtype)


def _row_as_dict(row: Row) -> dict[str, Any]:
    return dataclasses.asdict(row) | {"ratio": row.ratio}
