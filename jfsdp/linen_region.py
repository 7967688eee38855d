"""A Linen unit called in the global view: what crosses the border of its region, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jfsdp import region as regions
from jfsdp.borders import Row, fold_key, input_specs, is_key, output_rows, row_of_output
from jfsdp.calls import through_region
from jfsdp.linen_lift import LiftedCall
from jfsdp.linen_plan import ModulePlan, Names, state_spec
from jfsdp.linen_unit import call_here
from jfsdp.units import Unit

__all__ = ["call_in_region"]


def call_in_region(
    call: LiftedCall,
    unit: Unit,
    plan: ModulePlan,
    path: Names,
    function: Callable[..., Any],
    statistics: set[Names],
) -> Any:
    """Open the region over the data-parallel axes and call the unit inside.

    Args:
        call: the call.
        unit: the unit's settings.
        plan: the parameters that it and the units inside may gather.
        path: the unit's path.
        function: the method, for the names of its arguments.
        statistics: the paths of the BatchNorms that average over the region's axes, once they were called.
    """
    dp = unit.dp
    specs, reduced, keys, local_batch = _leaf_specs(call, unit, plan, function)
    asked = (*(unit.out_specs[1] if unit.out_specs else ()), *dict(unit.state_specs).values())
    others = [spec for spec in asked if isinstance(spec, PartitionSpec)]
    region = regions.Region(dp, tuple(specs), tuple(reduced), output_rows(dp, others))

    def body(leaves: Sequence[jax.Array]) -> tuple[list[Any], list[Any], list[Row]]:
        values = [fold_key(x, dp) if is_key else x for x, is_key in zip(leaves, keys, strict=True)]
        arrays, written = call_here(call, values, unit, plan, path, is_root=True)
        wanted = call.result.spread(call.name, unit.out_specs)
        kinds = [
            row_of_output(call.name, name, x, local_batch, dp, spec)
            for (name, _), x, spec in zip(call.result.arrays, arrays, wanted, strict=True)
        ]
        kinds += [
            _row_of_state(call, path, x, local_batch, unit, statistics)
            for path, x in zip(call.written_paths, written, strict=True)
        ]
        return arrays, written, kinds

    placements = [plan.placements.get(call.parameter(place) or ()) for place in call.places]
    entering = [
        x if placement is None else placement.tied(x, dp)
        for x, placement in zip(call.leaves, placements, strict=True)
    ]
    return call.finish(*through_region(body, entering, region))


def _leaf_specs(
    call: LiftedCall, unit: Unit, plan: ModulePlan, function: Callable[..., Any]
) -> tuple[list[PartitionSpec], list[bool], list[bool], int | None]:
    """For each leaf its spec, whether a unit reduces its gradient, whether it is a key to fold."""
    inputs = {
        index: (name, leaf)
        for index, (place, leaf) in enumerate(zip(call.places, call.leaves, strict=True))
        if (name := call.argument(place, function)) is not None
    }
    given, local_batch = input_specs(call.name, list(inputs.values()), unit.dp, dict(unit.in_specs))
    spec_of_input = dict(zip(inputs, given, strict=True))
    specs, reduced, keys = [], [], []
    for index, (place, leaf) in enumerate(zip(call.places, call.leaves, strict=True)):
        parameter, variable = call.parameter(place), call.variable(place)
        placement = plan.placements.get(parameter or ())
        if placement is not None:
            spec = placement.manual_spec()
        elif variable is not None:
            spec = _spec_of_state(call, variable, leaf, unit)
        else:
            spec = spec_of_input.get(index, PartitionSpec())
        specs.append(spec)
        reduced.append(placement is not None)
        # A key that all devices share would give every shard the same dropout mask.
        is_rng = place[0].idx == 1 or (index in inputs and is_key(leaf))
        keys.append(is_rng and not any(spec))
    return specs, reduced, keys, local_batch


def _spec_of_state(call: LiftedCall, path: Names, leaf: Any, unit: Unit) -> PartitionSpec:
    asked = state_spec(path, leaf, unit)
    if asked is None and path[0] == "cache" and leaf.ndim:
        raise ValueError(
            f"{call.name}: {'.'.join(path)} (shape {tuple(leaf.shape)}) is a decode cache, with one row "
            "for each element of the batch. Say how it lies with "
            f'jfsdp.shard(..., state_specs={{"cache": PartitionSpec('
            f"{', '.join(map(repr, unit.dp.batch_spec))})}}), or call it under jfsdp.auto_partitioning()."
        )
    if asked is not None:
        _check_entries(call, path, leaf, asked)
    return asked or PartitionSpec()


def _check_entries(call: LiftedCall, path: Names, array: Any, asked: PartitionSpec) -> None:
    if len(asked) > array.ndim:
        raise ValueError(
            f"{call.name}: state_specs has {asked} for {'.'.join(path)}, whose shape is "
            f"{tuple(array.shape)}: more entries than dimensions."
        )


def _row_of_state(
    call: LiftedCall,
    path: Names,
    array: Any,
    local_batch: int | None,
    unit: Unit,
    statistics: set[Names],
) -> Row:
    asked = state_spec(path, array, unit)
    if asked is not None:
        _check_entries(call, path, array, asked)
        floating = jnp.issubdtype(array.dtype, jnp.inexact)
        return Row(asked, mean=floating and asked != unit.dp.batch_spec)
    if path[0] == "batch_stats":
        return Row(PartitionSpec(), mean=path[1:-1] not in statistics)
    if path[0] == "cache" and not array.ndim:
        return Row(PartitionSpec())
    try:
        return row_of_output(call.name, "", array, local_batch, unit.dp, None)
    except ValueError as error:
        name = ".".join(path)
        raise ValueError(
            f"{call.name} writes {name} (shape {tuple(array.shape)} and dtype {array.dtype} on each of "
            f"{unit.dp.size} data-parallel devices, whose local batch is {local_batch}), and jfsdp cannot "
            "know how it lies. Say so with jfsdp.shard(..., "
            f"state_specs={{{path[0]!r}: PartitionSpec(...)}}), or for this variable alone "
            f"{{{name!r}: ...}}: the data-parallel axes at the dimension that is the batch, "
            "PartitionSpec() where every device computes the same value."
        ) from error
