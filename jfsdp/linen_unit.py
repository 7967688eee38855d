"""What a Linen unit does with its parameters, whichever view it is called in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jfsdp import auto
from jfsdp import region as regions
from jfsdp.hidden import Shard
from jfsdp.linen_lift import Arrays, LiftedCall
from jfsdp.linen_plan import ModulePlan, Names
from jfsdp.placement import Placement
from jfsdp.remat import refuse_gathered
from jfsdp.units import Unit, cast_floating
from jfsdp.unshard import unshard

__all__ = ["call_auto", "call_here"]


def call_here(
    call: LiftedCall,
    leaves: Sequence[Any],
    unit: Unit,
    plan: ModulePlan,
    path: Names,
    is_root: bool,
) -> Arrays:
    """Call a unit in the per-device view: gather its parameters, run its forward.

    Args:
        call: the call.
        leaves: arrays in place of `call.leaves`.
        unit: the unit's settings.
        plan: all parameters.
        path: the unit's path.
        is_root: whether it is the outermost unit.
    """
    # Outside of all units everything is a shard, inside only what is hidden: the rest is gathered already.
    shards = [
        (names, plan.placements[names]) if names and (is_root or hidden) else None
        for names, hidden in zip(map(call.parameter, call.places), call.hidden, strict=True)
    ]

    def whole(index: int, leaf: Any) -> Any:
        found = shards[index]
        if found is None:
            return leaf
        names, placement = found
        if plan.owners[names] != path:
            return Shard(leaf, placement)
        return unshard(leaf, unit.gathering(placement, leaf))

    body = run = _body(call, unit, whole, lambda tree: tree)
    own = [
        (leaf, found[1])
        for leaf, found in zip(leaves, shards, strict=True)
        if found is not None and plan.owners[found[0]] == path
    ]
    types, wholes = _gathered_types(own, unit)
    if types and unit.reshards(is_root):
        run = jax.checkpoint(
            lambda leaves: regions.call_here(body, leaves), policy=refuse_gathered(types, wholes)
        )
    arrays, written = run(list(leaves))
    return arrays, written


def call_auto(call: LiftedCall, unit: Unit, owned: dict[Names, Placement], is_root: bool) -> Arrays:
    """Call a unit in the global view with casts and sharding constraints; XLA communicates."""
    placements = [owned.get(call.parameter(place) or ()) for place in call.places]

    def whole(index: int, leaf: Any) -> Any:
        placement = placements[index]
        return leaf if placement is None else auto.whole(leaf, placement, unit)

    def pin(tree: Any) -> Any:
        return auto.pin_batch(tree, unit.dp, lambda leaf: False)

    body = _body(call, unit, whole, pin)
    both = zip(call.leaves, placements, strict=True)
    parameters = [(leaf, placement) for leaf, placement in both if placement is not None]
    if any(placement.dims for _, placement in parameters) and unit.reshards(is_root):
        arrays, written = auto.call_gathered_again(body, call.leaves, parameters, unit)
    else:
        arrays, written = body(call.leaves)
    return arrays, written


def _body(
    call: LiftedCall, unit: Unit, whole: Callable[[int, Any], Any], pin: Callable[[Any], Any]
) -> regions.Body:
    """The forward with casts, as a function of arrays."""
    policy = unit.mp_policy

    def cast(arguments: Any) -> Any:
        if policy.cast_forward_inputs:
            arguments = cast_floating(arguments, policy.param_dtype)
        return pin(arguments)

    def body(leaves: Sequence[Any]) -> regions.Rows:
        values = [whole(index, leaf) for index, leaf in enumerate(leaves)]
        return call.run(values, cast, lambda x: pin(cast_floating(x, policy.output_dtype)))

    return body


def _gathered_types(
    parameters: Sequence[tuple[Any, Placement]], unit: Unit
) -> tuple[list[Any], list[Any]]:
    """The shards that a call will gather, and the shapes and dtypes they will have then."""
    shards, wholes = [], []
    for shard, placement in parameters:
        how = unit.gathering(placement, shard)
        if not how.dims:
            continue
        shape = list(shard.shape)
        for dim, axes in how.dims:
            shape[dim] *= unit.dp.size_of(axes)
        shards.append(shard)
        wholes.append(jax.ShapeDtypeStruct(tuple(shape), how.param_dtype))
    return shards, wholes
