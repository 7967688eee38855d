"""Initializing Linen modules: parameters that are born sharded."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from jfsdp import region as regions
from jfsdp.born import born_sharded
from jfsdp.layout import lay, named_sharding
from jfsdp.linen_discovery import discover, discover_alone
from jfsdp.linen_plan import PARAMS, ModulePlan, Names, record, state_spec
from jfsdp.mesh import AnyMesh, DataParallelMesh, describe_mesh
from jfsdp.offload import PINNED, to_host
from jfsdp.optimizer import describe, is_of_optax, shardings_like
from jfsdp.units import Unit

__all__ = ["describe_state", "initialize", "initialize_inside", "taking_care"]

_taken_care_of: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "taken_care_of", default=False
)


@contextlib.contextmanager
def taking_care() -> Iterator[None]:
    """While this lasts, modules leave where their parameters lie to who makes them."""
    token = _taken_care_of.set(True)
    try:
        yield
    finally:
        _taken_care_of.reset(token)


def initialize(
    module: Any, run: Callable[..., Any], rngs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Initialize a module that `shard` returned.

    Args:
        module: the module, unbound.
        run: Flax's own initialization, of the other arguments.
        rngs: what `init` takes.
        args: its arguments.
        kwargs: likewise.

    Returns:
        (result, variables) with every array where it belongs: its parameters born sharded; constrained under
        jit; in the per-device view this device's shards, cut from whole ones.
    """
    unit: Unit = module.jfsdp.unit
    if _taken_care_of.get():
        return run(rngs, *args, **kwargs)
    with taking_care():
        plan, (output, variables) = discover(module, run, rngs, args, kwargs)
        module.jfsdp.keep(module, plan)
        record(plan)
        if regions.in_per_device_view(unit.dp, f"{type(module).__name__}.init"):
            output, variables = run(rngs, *args, **kwargs)
            return output, _local_parts(variables, plan, unit.dp)
        if any(isinstance(x, Tracer) for x in jax.tree.leaves((rngs, args, kwargs))):
            output, variables = run(rngs, *args, **kwargs)
            return output, jax.tree.map(lay, variables, _shardings(variables, plan, unit))
        described = jax.tree.map(lay, variables, _shardings(variables, plan, unit))
        return born_sharded(run, (output, described), unit.dp.mesh, rngs, *args, **kwargs)


def initialize_inside(module: Any, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Call a bound module that is being initialized, as a part of a module that is not sharded.

    Its parameters are laid once they are made; what makes the outermost module decides whether they are
    born so (under jit) or whole first.
    """
    if _taken_care_of.get():
        return function(module, *args, **kwargs)
    unit: Unit = module.jfsdp.unit
    with taking_care():
        plan = discover_alone(module, function, args, kwargs)
        result = function(module, *args, **kwargs)
    module.jfsdp.keep(module, plan)
    record(plan.under(module.path))
    variables = {PARAMS: dict(module.scope.variables().get(PARAMS, {}))}
    if regions.in_per_device_view(unit.dp, f"{type(module).__name__}.init"):
        laid = _local_parts(variables, plan, unit.dp)
    else:
        laid = jax.tree.map(lay, variables, _shardings(variables, plan, unit))
    if module.scope.is_mutable_collection(PARAMS):
        for name, value in laid[PARAMS].items():
            module.scope.put_variable(PARAMS, name, value)
    return result


def _names(path: Any) -> tuple[str, Names]:
    """The collection and the path of a variable; what lies in boxes has the path of its box."""
    collection, *names = (key.key for key in path if isinstance(key, jax.tree_util.DictKey))
    return collection, tuple(names)


def _local_parts(variables: Any, plan: ModulePlan, dp: DataParallelMesh) -> Any:
    """This device's parts of whole parameters, in the per-device view."""

    def part(path: Any, value: Any) -> Any:
        collection, names = _names(path)
        if collection != PARAMS:
            return value
        for dim, axes in plan.placements[names].split:
            size = value.shape[dim] // dp.size_of(axes)
            index = jax.lax.axis_index(axes)
            value = jax.lax.dynamic_slice_in_dim(value, index * size, size, dim)
        return to_host(value) if plan.placements[names].memory_kind == PINNED else value

    return jax.tree_util.tree_map_with_path(part, variables)


def _shardings(variables: Any, plan: ModulePlan, unit: Unit) -> Any:
    mesh = unit.dp.mesh

    def sharding(path: Any, value: Any) -> NamedSharding:
        collection, names = _names(path)
        if collection == PARAMS:
            return plan.placements[names].sharding(mesh)
        spec = state_spec((collection, *names), value, unit) or PartitionSpec()
        lies = named_sharding(mesh, spec, value.ndim)
        try:
            lies.shard_shape(value.shape)
        except ValueError:  # a cache made with a dummy batch
            lies = named_sharding(mesh, PartitionSpec(), value.ndim)
        return lies

    return jax.tree_util.tree_map_with_path(sharding, variables)


def describe_state(abstract: Any, plans: list[ModulePlan]) -> tuple[Any, AnyMesh]:
    """An abstract train state with shardings: each array lies as the parameter that it belongs to.

    Args:
        abstract: any pytree of `jax.ShapeDtypeStruct`s.
        plans: of the modules that were initialized to make it.

    Returns:
        `abstract` with the shardings, and their mesh.

    Raises:
        ValueError: the modules lie on different meshes.
    """
    meshes = {unit.dp.mesh for plan in plans for unit in plan.units.values()}
    if len(meshes) > 1:
        raise ValueError(
            "jfsdp.init: the modules in it are sharded over different meshes: "
            f"{'; '.join(describe_mesh(mesh) for mesh in meshes)}. Give all the same, or make one at a time."
        )
    (mesh,) = meshes
    placed = [item for plan in plans for item in plan.placements.items()]
    parameters = [(path, placement.shape, placement.spec) for path, placement in placed]
    kinds = {path: placement.memory_kind for path, placement in placed}
    state_kinds = {path: placement.state_memory_kind for path, placement in placed}
    shardings = jax.tree.map(
        lambda node, own, of_state: of_state if is_of_optax(node) else own,
        abstract,
        shardings_like(abstract, parameters, mesh, kinds),
        shardings_like(abstract, parameters, mesh, state_kinds),
        is_leaf=is_of_optax,
    )
    return jax.tree.map(describe, abstract, shardings), mesh
