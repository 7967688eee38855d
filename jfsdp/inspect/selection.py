"""Some of a program's collectives: those of a kind, over given axes, of a dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from .collective import Collective, check_kind

__all__ = ["selected"]


def selected(
    collectives: Sequence[Collective],
    known_axes: Sequence[str],
    kind: str | None,
    axes: str | Sequence[str] | None,
    dtype: Any,
) -> Iterator[Collective]:
    """The collectives of this kind, over exactly these axes in any order, of this dtype; None is any.

    Args:
        collectives: all of them.
        known_axes: the axes that the mesh has.
        kind: one of `collective.KINDS`.
        axes: names of mesh axes.
        dtype: a name, or anything `jnp.dtype` accepts.

    Raises:
        ValueError: there is no such kind, or the mesh has no such axis: a misspelled name would otherwise
            read as zero.
        TypeError: there is no such dtype.
    """
    if kind is not None:
        check_kind(kind)
    wanted_axes = None if axes is None else _checked_axes(axes, known_axes)
    wanted_dtype = None if dtype is None else jnp.dtype(dtype).name
    for record in collectives:
        if (
            kind in (None, record.kind)
            and wanted_axes in (None, frozenset(record.axes))
            and wanted_dtype in (None, record.dtype)
        ):
            yield record


def _checked_axes(axes: str | Sequence[str], known: Sequence[str]) -> frozenset[str]:
    wanted = frozenset((axes,) if isinstance(axes, str) else axes)
    if unknown := sorted(wanted.difference(known)):
        raise ValueError(f"jfsdp.inspect: no axes {unknown} in this mesh, which has {list(known)}")
    return wanted
