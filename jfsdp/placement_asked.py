"""What `shard_placement_fn` may say of a parameter, and how it is obeyed."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping
from typing import Any

from jfsdp.layout import Dims, axes_of_entry, to_spec
from jfsdp.mesh import DataParallelMesh, DataParallelMeshDims
from jfsdp.placement_rule import Leaf, check_divides, check_not_stacked

__all__ = ["Answer", "by_answer", "own_axes"]

Answer = int | Mapping[int, str | tuple[str, ...]] | tuple[Any, DataParallelMeshDims] | None
"""A dimension, {dimension: axes}, one of these or None with data-parallel axes of its own, or None."""


def own_axes(path: str, answer: Any, dp: DataParallelMesh) -> tuple[Any, DataParallelMesh]:
    """Take the data-parallel axes of the parameter out of an answer.

    Args:
        path: for messages.
        answer: what `shard_placement_fn` returned.
        dp: the mesh and the unit's data-parallel axes.

    Returns:
        The rest of the answer: an int, a mapping or None; and the parameter's data-parallel axes.

    Raises:
        TypeError: it is nothing that `shard_placement_fn` may return.
        ValueError: it names an axis that is no data-parallel axis of the unit.
    """
    where, dims = answer, None
    if isinstance(answer, tuple) and len(answer) == 2:
        where, dims = answer
    proper = isinstance(dims, DataParallelMeshDims) or dims is None
    if not proper or not (where is None or isinstance(where, Mapping) or _is_integer(where)):
        raise TypeError(
            f"{path}: shard_placement_fn must return a dimension (int), {{dimension: axes}}, (dimension, "
            f"jfsdp.DataParallelMeshDims(...)) or None, got {answer!r}."
        )
    if not isinstance(dims, DataParallelMeshDims):
        return where, dp
    for axis in (*dims.shard_names, *dims.replicate_names):
        if axis not in dp.axes:
            raise ValueError(
                f"{path}: shard_placement_fn returned {_text(dims)}, but {axis!r} is no data-parallel axis "
                f"of its unit, whose axes are {', '.join(map(repr, dp.axes))}. Name some of these."
            )
    if where is not None and not dims.shard_names:
        raise ValueError(
            f"{path}: shard_placement_fn chose dimension {where}, but {_text(dims)} has no axis to shard it "
            "over. Name one as shard=, or return None in place of the dimension."
        )
    return where, DataParallelMesh(dp.mesh, dims)


def by_answer(leaf: Leaf, where: Any, preset: Dims) -> Dims:
    """The dimensions to shard, with their axes, as `shard_placement_fn` said.

    Args:
        leaf: the parameter.
        where: an int or a mapping.
        preset: what the parameter's own spec says; () if nothing.

    Raises:
        TypeError: a key or axis of the mapping is of the wrong type.
        ValueError: a dimension does not exist, does not divide, is the stacked axis or holds another axis;
            the mapping does not name each shard axis once; the parameter's own spec says otherwise.
    """
    if isinstance(where, Mapping):
        chosen, axes_of = _from_mapping(leaf, where)
    else:
        dim = _checked_dim(leaf, where)
        chosen, axes_of = f"dimension {dim}", {dim: leaf.dp.shard_axes}
    dims = tuple(sorted((dim, axes) for dim, axes in axes_of.items() if axes))
    if preset and preset != dims:
        raise ValueError(
            f"{leaf.path}: shard_placement_fn chose {chosen}, but the parameter's own PartitionSpec "
            f"{to_spec(leaf.own)} already uses {', '.join(leaf.dp.shard_axes)}. Drop one of the two."
        )
    for dim, axes in dims:
        if leaf.held(dim) and not preset:
            raise ValueError(
                f"{leaf.path}: shard_placement_fn chose dimension {dim} of {leaf.shape}, which already "
                f"lies on {', '.join(leaf.held(dim))}. Choose another dimension or return None."
            )
        check_divides(leaf, dim, (*dict(leaf.local).get(dim, ()), *axes), "shard_placement_fn")
    return dims


def _from_mapping(leaf: Leaf, where: Mapping[Any, Any]) -> tuple[str, dict[int, tuple[str, ...]]]:
    """The mapping as text, and with dimensions and axes as jfsdp writes them, axes of size 1 left out."""
    names = leaf.dp.dims.shard_names
    axes_of: dict[int, tuple[str, ...]] = {}
    for given, entry in where.items():
        if not _is_integer(given) or not _is_entry(entry):
            raise TypeError(
                f"{leaf.path}: shard_placement_fn must return axis names by dimension, such as "
                f'{{0: "{names[0]}"}}, got {where!r}.'
            )
        dim = _checked_dim(leaf, given)
        if dim in axes_of:
            raise ValueError(
                f"{leaf.path}: shard_placement_fn returned {where!r}, which names dimension {dim} of "
                f"{leaf.shape} twice."
            )
        axes_of[dim] = axes_of_entry(entry)
    named = list(itertools.chain(*axes_of.values()))
    needed = set(leaf.dp.shard_axes)
    if len(set(named)) < len(named) or not needed <= set(named) <= set(names):
        raise ValueError(
            f"{leaf.path}: shard_placement_fn returned {where!r}, but each of the shard axes "
            f"{', '.join(map(repr, names))} must be on one dimension of {leaf.shape}, and no other axis. To "
            "shard it over fewer, return (dimension, jfsdp.DataParallelMeshDims(...))."
        )
    large = {dim: leaf.dp.larger_than_one(axes) for dim, axes in axes_of.items()}
    return repr(dict(where)), large


def _checked_dim(leaf: Leaf, given: Any) -> int:
    dim, ndim = operator.index(given), len(leaf.shape)
    if not -ndim <= dim < ndim:
        raise ValueError(
            f"{leaf.path}: shard_placement_fn chose dimension {dim}, but the shape {leaf.shape} has "
            f"{ndim} dimensions."
        )
    check_not_stacked(leaf, dim % ndim, "shard_placement_fn chose")
    return dim % ndim


def _is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def _is_entry(value: Any) -> bool:
    names = (value,) if isinstance(value, str) else value
    return isinstance(names, tuple) and all(isinstance(name, str) for name in names)


def _text(dims: DataParallelMeshDims) -> str:
    return f"DataParallelMeshDims(shard={dims.shard!r}, replicate={dims.replicate!r})"
