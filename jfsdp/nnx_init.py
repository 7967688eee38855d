"""NNX modules whose parameters are born sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jfsdp.inspect.topology import is_absent
from jfsdp.layout import lay, named_sharding
from jfsdp.mesh import AnyMesh, mesh_known_to_traced_code, with_axis_types
from jfsdp.nnx_tree import mesh_of, placement_of, walk

__all__ = ["init_module", "init_program"]


def init_module(fn: Callable[[], Any], shard: Callable[[Any], Any]) -> Any:
    """Make `fn()` under jit with every parameter laid where `shard` puts it.

    Args:
        fn: makes the module; it may call `jfsdp.shard` itself.
        shard: makes the abstract module a unit.

    Returns:
        The module, of arrays; where the mesh has no devices to hold them, the abstract one.
    """
    abstract, mesh = _abstract_module(fn, shard)
    if isinstance(mesh, AbstractMesh) or is_absent(mesh):
        return abstract
    jitted = _program(fn, abstract, mesh)
    graphdef, state = nnx.split(abstract, graph=True)
    leaves, treedef = jax.tree.flatten(state)
    made = jitted()
    arrays = [lay(x, leaf.sharding) for x, leaf in zip(made, leaves, strict=True)]
    return nnx.merge(graphdef, jax.tree.unflatten(treedef, arrays))


def init_program(
    fn: Callable[[], nnx.Module], shard: Callable[[Any], Any]
) -> tuple[Any, nnx.Module]:
    """The jitted function that `init_module` runs, which returns the arrays, and the abstract module."""
    abstract, mesh = _abstract_module(fn, shard)
    return _program(fn, abstract, mesh), abstract


def _abstract_module(
    fn: Callable[[], nnx.Module], shard: Callable[[Any], Any]
) -> tuple[nnx.Module, AnyMesh]:
    with mesh_known_to_traced_code():
        abstract = nnx.eval_shape(fn)
        shard(abstract)
        mesh = mesh_of(abstract)
        assert mesh is not None
        for _, node in walk(abstract):
            if isinstance(node, nnx.Variable):  # eval_shape drops what fn laid itself
                node.set_raw_value(_abstract(node, mesh))
    return abstract, mesh


def _program(fn: Callable[[], nnx.Module], abstract: nnx.Module, mesh: AnyMesh) -> Any:
    # On an Explicit mesh a random array is replicated unless told otherwise; on an Auto one XLA computes
    # each device's part of it only.
    auto = with_axis_types(mesh, (AxisType.Auto,) * len(mesh.axis_names))
    leaves = jax.tree.leaves(nnx.split(abstract, graph=True)[1])
    shardings = [named_sharding(auto, leaf.sharding.spec, leaf.ndim) for leaf in leaves]

    def make() -> list[Any]:
        context = jax.sharding.get_abstract_mesh()
        with jax.sharding.use_abstract_mesh(context if context.empty else auto.abstract_mesh):
            return jax.tree.leaves(nnx.split(fn(), graph=True)[1])

    return jax.jit(make, out_shardings=shardings)


def _abstract(variable: nnx.Variable, mesh: AnyMesh) -> Any:
    placement = placement_of(variable)
    spec = PartitionSpec() if placement is None else placement.spec

    def describe(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = named_sharding(mesh, spec, len(leaf.shape))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(describe, variable.get_raw_value())
