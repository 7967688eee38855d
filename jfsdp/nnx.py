"""The Flax NNX front end: modules become units in place, as in FSDP2."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from jfsdp.ignored import Ignored
from jfsdp.layout import whole
from jfsdp.nnx_checks import (
    Members,
    check_devices,
    check_module,
    check_placed_before,
    members_of,
    names_of,
)
from jfsdp.nnx_class import make_unit, swap_class, unmake_unit
from jfsdp.nnx_optimizer import watch_optimizers
from jfsdp.nnx_parameters import Plan, move, plan_of, replicate
from jfsdp.nnx_tree import (
    PLACEMENT,
    FSDPModule,
    check_axes,
    class_name,
    placement_of,
    unit_of,
    variables_of,
    walk,
)
from jfsdp.placement import Placement
from jfsdp.selectors import matcher
from jfsdp.units import Group, Unit

__all__ = ["register_forward_method", "shard_module", "unsharded_module"]


def shard_module(
    module: nnx.Module | Sequence[nnx.Module],
    unit: Unit,
    *,
    units: Any,
    stacked_axis: int | None,
    shard_placement_fn: Callable[[str, Any], Any] | None,
    ignored_params: Any,
) -> None:
    """Make `module`, and first every module inside that `units` selects, a unit in place.

    Raises: see `jfsdp.shard`.
    """
    ignored = Ignored(ignored_params, nnx.Variable)
    members = members_of(module)
    targets = [*_selected(module, members, units), *members.items()]
    for path, target in targets:
        check_module(path, target, in_list="" not in members)
    for member in members.values():
        check_axes(member, unit.dp)
        check_devices(member, unit.dp)
    check_placed_before(module, ignored)
    # Every error is raised before the first module changes.
    claimed = {id(target) for _, target in targets}
    plans: list[tuple[nnx.Module, Plan]] = []
    planned: set[int] = set()  # what two units share belongs to the first
    for path, target in targets:
        own = {
            f"{path}.{below}" if path else below: node
            for below, node in _owned_below(target, claimed).items()
            if id(node) not in planned
        }
        plan = plan_of(own, unit, stacked_axis, shard_placement_fn, ignored)
        planned.update(id(variable) for variable, _ in plan.values())
        plans.append((target, plan))
    parameters = {path: v for path, v in variables_of(module) if isinstance(v, nnx.Param)}
    ignored.check(names_of(members), parameters, (type(v).__name__ for v in parameters.values()))
    inner = dataclasses.replace(unit, in_specs=(), out_specs=None)  # those speak of `module`
    if "" not in members:
        unit = dataclasses.replace(unit, group=Group())
    for target, plan in plans:
        for variable, placement in plan.values():
            move(variable, _below_member(placement, members), unit.dp)
        make_unit(target, unit if id(target) in map(id, members.values()) else inner)
    for path, variable in variables_of(module):
        placement, path = placement_of(variable), _below(path, members)
        if placement is None:
            replicate(variable, unit.dp)
        elif path.endswith(f".{placement.path}"):  # of a unit that was sharded before, by itself
            variable.set_metadata(PLACEMENT, dataclasses.replace(placement, path=path))
    watch_optimizers()


def register_forward_method(module: nnx.Module, name: str) -> None:
    """See `jfsdp.register_forward_method`."""
    if not isinstance(module, FSDPModule):
        return
    if not callable(getattr(type(module), name, None)):
        raise ValueError(f"register_forward_method: {class_name(module)} has no method {name!r}.")
    swap_class(module, (*type(module)._jfsdp_methods, name))


def unsharded_module(module: nnx.Module) -> nnx.Module:
    """A copy of a module as it was before `shard`, its weights whole on every device."""
    copy: Any = nnx.clone(module, graph=True)
    for _, node in list(walk(copy)):
        if isinstance(node, FSDPModule):
            unmake_unit(node)
        elif isinstance(node, nnx.Variable):
            if placement_of(node) is not None:
                node.del_metadata(PLACEMENT)
            node.set_raw_value(whole(node.get_raw_value()))
    return copy


def _below(path: str, members: Members) -> str:
    """The path below the member that it begins with."""
    return path if "" in members else path.partition(".")[2]


def _below_member(placement: Placement, members: Members) -> Placement:
    return dataclasses.replace(placement, path=_below(placement.path, members))


def _selected(module: Any, members: Members, units: Any) -> list[tuple[str, nnx.Module]]:
    """The modules inside the members that `units` selects, innermost first."""
    outer = {id(member) for member in members.values()}
    inside = [
        (path, node)
        for path, node in walk(module)
        if isinstance(node, nnx.Module) and id(node) not in outer
    ]
    found: dict[int, tuple[str, nnx.Module]] = {}
    for selector, matches in matcher(units):
        hits = [(path, node) for path, node in inside if matches(path, node)]
        if not hits and (isinstance(selector, type) or not callable(selector)):
            kinds = sorted({type(node).__name__ for _, node in inside})
            paths = [path for path, _ in inside][:20]
            raise ValueError(
                f"units={selector!r} matches no module inside {names_of(members)}. It has modules "
                f"of the classes {', '.join(kinds) or '(none)'}, at the paths {', '.join(paths) or '(none)'}."
            )
        found.update((id(node), (path, node)) for path, node in hits)
    return sorted(found.values(), key=lambda item: -item[0].count("."))


def _owned_below(module: nnx.Module, claimed: set[int]) -> dict[str, nnx.Variable]:
    stop = claimed - {id(module)}
    found = walk(module, descend=lambda node: unit_of(node) is None and id(node) not in stop)
    return {path: node for path, node in found if isinstance(node, nnx.Variable)}
