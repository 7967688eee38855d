"""What a Linen unit does with its parameters, whichever view it is called in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jfsdp import auto
from jfsdp import tape as tapes
from jfsdp.activations import names_of, naming
from jfsdp.hidden import Shard, gathered_types
from jfsdp.linen_lift import Arrays, LiftedCall
from jfsdp.linen_plan import ModulePlan, Names
from jfsdp.offload import to_device
from jfsdp.placement import Placement
from jfsdp.remat import refuse_gathered
from jfsdp.schedule import call_scheduled
from jfsdp.units import Unit, cast_floating
from jfsdp.weights import Weight

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
    shards: list[tuple[Names, Shard] | None] = []
    for place, leaf, hidden in zip(call.places, leaves, call.hidden, strict=True):
        names = call.parameter(place)
        if names and hidden is not None:
            shards.append((names, hidden))
        else:
            shards.append(
                (names, Shard(leaf, plan.placements[names])) if names and is_root else None
            )
    unreduced = [None if found is None else found[1].whole_gradient for found in shards]

    def gathering(groups: Mapping[int, int]) -> tapes.Body:
        def wholes(values: Sequence[Any]) -> list[Any]:
            further = iter(values[len(shards) :])
            gradients = [None if x is None else next(further) for x in unreduced]
            return [
                whole(leaf, found, gradient, groups.get(index))
                for index, (leaf, found, gradient) in enumerate(
                    zip(values[: len(shards)], shards, gradients, strict=True)
                )
            ]

        return _body(call, unit, wholes, lambda tree: tree)

    def whole(leaf: Any, found: Any, whole_gradient: Any, group: int | None) -> Any:
        if found is None:
            return leaf
        names, shard = found
        shard = dataclasses.replace(shard, array=leaf, whole_gradient=whole_gradient)
        if group is not None:
            shard = Shard(leaf, shard.placement, group=group)
        return shard.unsharded(unit) if plan.owners[names] == path else shard

    values = [*leaves, *(x for x in unreduced if x is not None)]
    named = any(names_of(u.offload_policy) for u in plan.units.values())
    if is_root:
        weights = _weights(leaves, shards, plan, path)
        if weights or named:

            def scheduled(values: Sequence[Any], groups: Mapping[int, int]) -> tapes.Rows:
                return gathering(groups)(values)

            arrays, written = call_scheduled(scheduled, values, weights, prefetch=unit.prefetch)
            return arrays, written
    body = run = gathering({})
    own = [
        dataclasses.replace(found[1], array=leaf)
        for leaf, found in zip(leaves, shards, strict=True)
        if found is not None and plan.owners[found[0]] == path
    ]
    types, whole_types = gathered_types(own, unit)
    if types and unit.reshards(is_root):
        run = jax.checkpoint(
            lambda leaves: tapes.call_here(body, leaves, named),
            policy=refuse_gathered(types, whole_types),
        )
    arrays, written = run([to_device(x) for x in values])
    return arrays, written


def _weights(
    leaves: Sequence[Any],
    shards: Sequence[tuple[Names, Shard] | None],
    plan: ModulePlan,
    path: Names,
) -> list[Weight]:
    """What the schedule of the outermost unit's call may gather."""
    numbers = {path: 0}
    further = len(leaves)
    weights = []
    for index, (leaf, found) in enumerate(zip(leaves, shards, strict=True)):
        if found is None:
            continue
        names, shard = found
        target = None
        if shard.whole_gradient is not None:
            target, further = further, further + 1
        owner = plan.owners[names]
        group = numbers.setdefault(owner, len(numbers))
        places = dataclasses.replace(shard, array=index, whole_gradient=target)
        shard = dataclasses.replace(shard, array=leaf)
        weight = shard.weight(plan.units[owner], group == 0, group, places)
        if weight is not None:
            weights.append(weight)
    return weights


def call_auto(call: LiftedCall, unit: Unit, owned: dict[Names, Placement], is_root: bool) -> Arrays:
    """Call a unit in the global view with casts and sharding constraints; XLA communicates."""
    placements = [owned.get(call.parameter(place) or ()) for place in call.places]

    def wholes(leaves: Sequence[Any]) -> list[Any]:
        return [
            leaf if placement is None else auto.whole(leaf, placement, unit)
            for leaf, placement in zip(leaves, placements, strict=True)
        ]

    def pin(tree: Any) -> Any:
        return auto.pin_batch(tree, unit.dp, lambda leaf: False)

    body = _body(call, unit, wholes, pin)
    leaves = [to_device(x) for x in call.leaves]
    both = zip(leaves, placements, strict=True)
    parameters = [(leaf, placement) for leaf, placement in both if placement is not None]
    if any(placement.dims for _, placement in parameters) and unit.reshards(is_root):
        arrays, written = auto.call_gathered_again(body, leaves, parameters, unit)
    else:
        arrays, written = body(leaves)
    return arrays, written


def _body(
    call: LiftedCall,
    unit: Unit,
    wholes: Callable[[Sequence[Any]], list[Any]],
    pin: Callable[[Any], Any],
) -> tapes.Body:
    """The forward with casts, as a function of arrays, of which `wholes` makes whole weights."""
    policy = unit.mp_policy

    def cast(arguments: Any) -> Any:
        if policy.cast_forward_inputs:
            arguments = cast_floating(arguments, policy.param_dtype)
        return pin(arguments)

    def body(leaves: Sequence[Any]) -> tapes.Rows:
        with naming(call.name.partition(".")[0], unit.offload_policy):
            return call.run(
                wholes(leaves), cast, lambda x: pin(cast_floating(x, policy.output_dtype))
            )

    return body
