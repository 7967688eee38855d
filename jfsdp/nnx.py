"""The Flax NNX front end: modules become units in place, as in FSDP2."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import nnx
from flax.core import spmd
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jfsdp.inspect.target import first_device
from jfsdp.inspect.topology import is_absent
from jfsdp.layout import lay, named_sharding, spec_of, whole
from jfsdp.mesh import DataParallelMesh, describe_mesh
from jfsdp.nnx_optimizer import watch_optimizers
from jfsdp.nnx_region import call_unit
from jfsdp.nnx_tree import (
    PLACEMENT,
    UNIT,
    FSDPModule,
    check_axes,
    class_name,
    owned,
    placement_of,
    unit_of,
    walk,
)
from jfsdp.placement import Placement, place
from jfsdp.units import Unit, is_array, matcher

__all__ = ["register_forward_method", "shard_module", "unsharded_module"]


def shard_module(
    module: nnx.Module,
    unit: Unit,
    *,
    units: Any,
    stacked_axis: int | None,
    shard_placement_fn: Callable[[str, Any], int | None] | None,
) -> nnx.Module:
    """Make `module`, and first every module inside that `units` selects, a unit in place.

    Raises: see `jfsdp.shard`.
    """
    targets = [*_selected(module, units), ("", module)]
    for path, target in targets:
        _check_module(path, target)
    check_axes(module, unit.dp)
    _check_devices(module, unit.dp)
    inner = dataclasses.replace(unit, in_specs=(), out_specs=None)  # those speak of `module`
    # Every error is raised before the first module changes.
    plans: list[tuple[str, nnx.Module, dict[str, tuple[nnx.Variable, Placement]]]] = []
    claimed: set[int] = {id(target) for _, target in targets}
    for path, target in targets:
        own = _owned_below(target, claimed)
        plans.append((path, target, _plan(path, own, unit.dp, stacked_axis, shard_placement_fn)))
    for _, target, plan in plans:
        for variable, placement in plan.values():
            _move(variable, placement, unit.dp)
        _make_unit(target, unit if target is module else inner)
    for path, node in walk(module):
        if not isinstance(node, nnx.Variable):
            continue
        placement = placement_of(node)
        if placement is None:
            _replicate(node, unit.dp)
        elif path.endswith(f".{placement.path}"):  # of a unit that was sharded before, by itself
            node.set_metadata(PLACEMENT, dataclasses.replace(placement, path=path))
    watch_optimizers()
    return module


def register_forward_method(module: nnx.Module, name: str) -> None:
    """See `jfsdp.register_forward_method`."""
    if not isinstance(module, FSDPModule):
        return
    if not callable(getattr(type(module), name, None)):
        raise ValueError(f"register_forward_method: {class_name(module)} has no method {name!r}.")
    _swap_class(module, (*type(module)._jfsdp_methods, name))


def unsharded_module(module: nnx.Module) -> nnx.Module:
    """A copy of a module as it was before `shard`, its weights whole on every device."""
    copy: Any = nnx.clone(module, graph=True)
    for _, node in list(walk(copy)):
        if isinstance(node, FSDPModule):
            object.__setattr__(node, "__class__", type(node).__mro__[1])
            delattr(node, UNIT)
        elif isinstance(node, nnx.Variable):
            if placement_of(node) is not None:
                node.del_metadata(PLACEMENT)
            node.set_raw_value(whole(node.get_raw_value()))
    return copy


def _selected(module: nnx.Module, units: Any) -> list[tuple[str, nnx.Module]]:
    """The modules inside `module` that `units` selects, innermost first."""
    inside = [
        (path, node)
        for path, node in walk(module)
        if isinstance(node, nnx.Module) and node is not module
    ]
    found: dict[int, tuple[str, nnx.Module]] = {}
    for selector, matches in matcher(units):
        hits = [(path, node) for path, node in inside if matches(path, node)]
        if not hits and (isinstance(selector, type) or not callable(selector)):
            kinds = sorted({type(node).__name__ for _, node in inside})
            paths = [path for path, _ in inside][:20]
            raise ValueError(
                f"units={selector!r} matches no module inside {class_name(module)}. It has modules "
                f"of the classes {', '.join(kinds) or '(none)'}, at the paths {', '.join(paths) or '(none)'}."
            )
        found.update((id(node), (path, node)) for path, node in hits)
    return sorted(found.values(), key=lambda item: -item[0].count("."))


def _check_module(path: str, module: Any) -> None:
    name = f"{path or 'the module'} ({class_name(module)})"
    if isinstance(module, FSDPModule):
        raise ValueError(
            f"{name} is a unit already: jfsdp.shard was applied to it before. Apply it once to each "
            "module, the inner ones first."
        )
    if not callable(module) or not isinstance(module, nnx.Module):
        raise ValueError(
            f"{name} is a container without a forward (__call__), so there is nothing to gather its "
            "parameters for. Shard the modules in it, or the module that calls them."
        )
    placed = [(p, placement_of(v)) for p, v in owned(module).items() if isinstance(v, nnx.Param)]
    if placed and all(p is not None and p.path.endswith(f".{path}") for path, p in placed):
        raise ValueError(
            f"{name} lies in a module that was made a unit before, which owns its parameters. Apply "
            "jfsdp.shard to the inner ones first, then to the outer one."
        )


def _check_devices(module: nnx.Module, dp: DataParallelMesh) -> None:
    values = jax.tree.leaves(nnx.state(module))
    if all(isinstance(x, jax.ShapeDtypeStruct | Tracer) for x in values):
        return
    remedy = (
        "to get an abstract model write\n"
        f"  model = jfsdp.init(lambda: {class_name(module)}(...), mesh, ...)\n"
        f"or shard an abstract one: nnx.eval_shape(lambda: {class_name(module)}(...))."
    )
    if isinstance(dp.mesh, AbstractMesh):
        raise ValueError(
            "the mesh is an AbstractMesh, which has no devices to lay these arrays on. Make one with "
            f"jax.make_mesh; or {remedy}"
        )
    device = first_device(dp.mesh)
    if device is not None and is_absent(device):
        raise ValueError(
            f"the devices of the mesh ({describe_mesh(dp.mesh)}; {device.device_kind}) are not here: they "
            f"are to compile for, and the arrays of this {class_name(module)} cannot lie on them; {remedy}"
        )


def _owned_below(module: nnx.Module, claimed: set[int]) -> dict[str, nnx.Variable]:
    stop = claimed - {id(module)}
    found = walk(module, descend=lambda node: unit_of(node) is None and id(node) not in stop)
    return {path: node for path, node in found if isinstance(node, nnx.Variable)}


# --------------------------------------------------------------------------------------------------
# Parameters


def _plan(
    prefix: str,
    variables: dict[str, nnx.Variable],
    dp: DataParallelMesh,
    stacked_axis: int | None,
    shard_placement_fn: Callable[[str, Any], int | None] | None,
) -> dict[str, tuple[nnx.Variable, Placement]]:
    plan: dict[str, tuple[nnx.Variable, Placement]] = {}
    for path, variable in variables.items():
        full = f"{prefix}.{path}" if prefix else path
        value = variable.get_raw_value()
        if not isinstance(variable, nnx.Param):
            continue
        if not is_array(value):
            raise TypeError(
                f"{full}: an nnx.Param must hold one array to be sharded, got {type(value).__name__}. Make "
                "each array a Param of its own, or use another Variable type."
            )
        if placement_of(variable) is not None:  # tied to a parameter of an earlier unit
            continue
        asked = shard_placement_fn(full, variable) if shard_placement_fn else None
        own = _own_spec(full, variable, value.ndim, stacked_axis)
        plan[full] = (
            variable,
            place(full, value, dp, own_spec=own, stacked_axis=stacked_axis, asked=asked),
        )
    return plan


_KNOWN_METADATA = {"out_sharding", "sharding", "sharding_names", "sharding_rules", "eager_sharding",
                   "optimizer_sharding"}  # fmt: skip


def _own_spec(
    path: str, variable: nnx.Variable, ndim: int, stacked_axis: int | None
) -> PartitionSpec | None:
    """The parameter's own PartitionSpec: the array's, else what its annotation says.

    The array goes first because flax's transforms add a layer axis to the array but leave the
    annotation as it was (google/flax#5112).
    """
    metadata = variable.get_metadata()
    unknown = [
        k for k in metadata if ("shard" in k or "partition" in k) and k not in _KNOWN_METADATA
    ]
    if unknown:
        raise ValueError(
            f"{path}: its metadata {unknown} looks like a sharding annotation that this version of jfsdp "
            "does not know. Use out_sharding=."
        )
    spec = spec_of(variable.get_raw_value())
    if spec is not None:
        return spec
    names = [
        metadata.get(k) for k in ("out_sharding", "sharding", "sharding_names") if metadata.get(k)
    ]
    if not names:
        return None
    given: Any = names[0]
    spec = given.spec if isinstance(given, NamedSharding) else PartitionSpec(*given)
    spec = spmd.get_pspec(spec, metadata.get("sharding_rules"))
    if stacked_axis is not None and len(spec) == ndim - 1:
        entries = list(spec)
        entries.insert(stacked_axis % ndim, None)
        spec = PartitionSpec(*entries)
    return spec


def _move(variable: nnx.Variable, placement: Placement, dp: DataParallelMesh) -> None:
    for stale in ("out_sharding", "sharding", "sharding_names"):
        if variable.has_metadata(stale):
            # From here on the array's own sharding is the truth: flax would put moments by the annotation.
            variable.del_metadata(stale)
    variable.set_metadata(PLACEMENT, placement)
    variable.set_raw_value(lay(variable.get_raw_value(), placement.sharding(dp.mesh)))


def _replicate(variable: nnx.Variable, dp: DataParallelMesh) -> None:
    def move(value: Any) -> Any:
        spec = spec_of(value) if is_array(value) else None
        if not is_array(value) or spec is not None:
            return value
        return lay(value, named_sharding(dp.mesh, PartitionSpec(), value.ndim))

    variable.set_raw_value(jax.tree.map(move, variable.get_raw_value()))


# --------------------------------------------------------------------------------------------------
# Classes


def _make_unit(module: nnx.Module, unit: Unit) -> None:
    setattr(module, UNIT, nnx.static(unit))
    _swap_class(module, ("__call__",))


def _swap_class(module: Any, methods: Iterable[str]) -> None:
    own = type(module)
    original = own.__mro__[1] if issubclass(own, FSDPModule) else own
    object.__setattr__(module, "__class__", _unit_class(original, tuple(dict.fromkeys(methods))))


@functools.cache
def _unit_class(original: type, methods: tuple[str, ...]) -> type:
    body: dict[str, Any] = {name: _forward(getattr(original, name)) for name in methods}
    body |= {
        "_jfsdp_methods": methods,
        "__doc__": original.__doc__,
        "__module__": original.__module__,
    }
    return type(f"FSDP{original.__name__}", (original, FSDPModule), body)


def _forward(method: Callable) -> Callable:
    @functools.wraps(method)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call_unit(self, method, args, kwargs)

    return forward
