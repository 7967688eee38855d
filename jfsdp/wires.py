"""What a user's collectives state that they send for a parameter: see `Comm.wire`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jfsdp.comm import AllGather, Comm, Group, Message, ReduceScatter
from jfsdp.inspect import Wire
from jfsdp.placement import Placement
from jfsdp.units import Unit
from jfsdp.unshard import Gathering, reduce, unshard

__all__ = ["own_wires"]


def own_wires(unit: Unit, placement: Placement, is_root: bool) -> dict[str, Wire]:
    """What the unit's own collectives send for a parameter in one step that trains it.

    Args:
        unit: the unit that gathers it.
        placement: where it lies.
        is_root: whether that unit is the outermost one.

    Returns:
        "all-gather": what all gathers send, "again": those of the backward among them, "reduce-scatter". Only
        those that the unit has a collective of its own for which states what it sends.

    Raises:
        ValueError: it states an unknown kind of collective.
    """
    if not placement.dims or not (unit.all_gather or unit.reduce_scatter):
        return {}
    shape, stacked = placement.shape, placement.stacked_axis
    layers = 1 if stacked is None else shape[stacked]
    rank = len(shape) - (stacked is not None)
    part = list(placement.part_at_rank(rank, unit.dp))
    for dim, axes in placement.others_at_rank(rank):
        part[dim] //= unit.dp.size_of(axes)
    shard = jax.ShapeDtypeStruct(tuple(part), placement.dtype)
    how = unit.gathering(placement, shard)
    whole, calls = _calls(unit, unshard, shard, how)
    found: dict[str, Sequence[_Call]] = {}
    if unit.all_gather:
        once = _calls(unit, unshard, shard, how.first)[1] if how.once else []
        again = calls[len(once) :] if unit.reshards(is_root) else []
        found = {"all-gather": [*calls, *again], "again": again}
    if unit.reduce_scatter and jnp.issubdtype(placement.dtype, jnp.inexact):
        found["reduce-scatter"] = _calls(unit, reduce, whole, how)[1]
    wires = {name: _wire(calls, layers) for name, calls in found.items()}
    return {name: wire for name, wire in wires.items() if wire is not None}


class _Call(NamedTuple):
    """One call of a user's collective: shape and dtype of its result, and its axes with their sizes."""

    comm: Comm
    size: tuple[int, ...]
    dtype: Any
    group: dict[str, int]


@dataclasses.dataclass(eq=False)
class _Noting(AllGather, ReduceScatter):
    """Stands for a user's collective where only its calls matter, and notes them."""

    comm: Comm
    calls: list[_Call]

    def allocate(self, size: Sequence[int], *, dtype: Any, device: Any) -> jax.ShapeDtypeStruct:
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: jax.ShapeDtypeStruct,
        input_tensor: jax.Array,
        group: Group,
        op: Any = None,
        async_op: bool = False,
    ) -> jax.Array:
        sizes = {axis: jax.lax.axis_size(axis) for axis in group}
        self.calls.append(_Call(self.comm, output_tensor.shape, output_tensor.dtype, sizes))
        return jnp.zeros(output_tensor.shape, output_tensor.dtype)


def _calls(
    unit: Unit, function: Callable[..., Any], array: jax.ShapeDtypeStruct, how: Gathering
) -> tuple[jax.ShapeDtypeStruct, list[_Call]]:
    """Trace `function(array, how)` in the per-device view; its result, and the collectives it would call."""
    calls: list[_Call] = []
    noting = dataclasses.replace(
        how,
        all_gather=how.all_gather and _Noting(how.all_gather, calls),
        reduce_scatter=how.reduce_scatter and _Noting(how.reduce_scatter, calls),
    )
    mapped = jax.shard_map(
        functools.partial(function, how=noting),
        mesh=unit.dp.mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return jax.eval_shape(mapped, array), calls


def _wire(calls: Iterable[_Call], layers: int) -> Wire | None:
    """The collectives of these calls, of the same kind, dtype and axes as one; None if not all are stated."""
    sums: dict[tuple[str, str, tuple[str, ...]], float] = {}
    for call in calls:
        messages = call.comm.wire(call.size, dtype=call.dtype, group=call.group)
        if messages is None:
            return None
        for kind, dtype, axes, size in map(Message._make, messages):
            key = (kind, jnp.dtype(dtype).name, tuple(axes))
            sums[key] = sums.get(key, 0.0) + layers * size
    if not sums:
        return None
    axes = tuple(dict.fromkeys(axis for _, _, axes in sums for axis in axes))
    parts = tuple((kind, Wire(axes, dtype, size)) for (kind, dtype, axes), size in sums.items())
    return Wire(axes, parts[0][1].dtype, sum(sums.values()), parts)
