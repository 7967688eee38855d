"""What a Linen unit does with its parameters, whichever view it is called in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax.errors import ScopeParamShapeError

from jfsdp import auto
from jfsdp import region as regions
from jfsdp.linen_lift import Arrays, LiftedCall
from jfsdp.linen_plan import Names
from jfsdp.placement import Placement
from jfsdp.remat import refuse_gathered
from jfsdp.units import Unit, cast_floating
from jfsdp.unshard import unshard

__all__ = ["call_auto", "call_here"]


def call_here(
    call: LiftedCall,
    leaves: Sequence[Any],
    unit: Unit,
    owned: dict[Names, Placement],
    is_root: bool,
) -> Arrays:
    """Call a unit in the per-device view: gather its parameters, run its forward.

    Args:
        call: the call.
        leaves: arrays in place of `call.leaves`.
        unit: the unit's settings.
        owned: its parameters.
        is_root: whether it is the outermost unit.
    """

    def whole(placement: Placement, shard: Any) -> Any:
        return unshard(shard, unit.gathering(placement, shard))

    body = run = _body(call, unit, owned, whole, lambda tree: tree)
    shards, wholes = _gathered_types(_parameters(call, leaves, owned), unit)
    if shards and unit.reshards(is_root):
        run = jax.checkpoint(
            lambda leaves: regions.call_here(body, leaves), policy=refuse_gathered(shards, wholes)
        )
    try:
        arrays, written = run(list(leaves))
    except ScopeParamShapeError as error:
        raise ValueError(
            f"{call.name} uses a parameter while it is sharded: it belongs to a unit that is not being "
            f"called.\n  {str(error).partition(' (https')[0]}\nEither\n"
            "  1. call a method of that module instead of reading its parameter, or\n"
            "  2. leave the module out of `units`, so that the caller's unit gathers it."
        ) from error
    return arrays, written


def call_auto(call: LiftedCall, unit: Unit, owned: dict[Names, Placement], is_root: bool) -> Arrays:
    """Call a unit in the global view with casts and sharding constraints; XLA communicates."""

    def whole(placement: Placement, shard: Any) -> Any:
        return auto.whole(shard, placement, unit)

    def pin(tree: Any) -> Any:
        return auto.pin_batch(tree, unit.dp, lambda leaf: False)

    body = _body(call, unit, owned, whole, pin)
    parameters = _parameters(call, call.leaves, owned)
    if any(placement.dims for _, placement in parameters) and unit.reshards(is_root):
        arrays, written = auto.call_gathered_again(body, call.leaves, parameters, unit)
    else:
        arrays, written = body(call.leaves)
    return arrays, written


def _parameters(
    call: LiftedCall, leaves: Sequence[Any], owned: dict[Names, Placement]
) -> list[tuple[Any, Placement]]:
    placed = [
        (leaf, owned.get(call.parameter(place) or ()))
        for leaf, place in zip(leaves, call.places, strict=True)
    ]
    return [(leaf, placement) for leaf, placement in placed if placement is not None]


def _body(
    call: LiftedCall,
    unit: Unit,
    owned: dict[Names, Placement],
    whole: Callable[[Placement, Any], Any],
    pin: Callable[[Any], Any],
) -> regions.Body:
    """The forward with casts, as a function of arrays."""
    placements = [owned.get(call.parameter(place) or ()) for place in call.places]
    policy = unit.mp_policy

    def cast(arguments: Any) -> Any:
        if policy.cast_forward_inputs:
            arguments = cast_floating(arguments, policy.param_dtype)
        return pin(arguments)

    def body(leaves: Sequence[Any]) -> regions.Rows:
        both = zip(leaves, placements, strict=True)
        gathered = [x if placement is None else whole(placement, x) for x, placement in both]
        return call.run(gathered, cast, lambda x: pin(cast_floating(x, policy.output_dtype)))

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
