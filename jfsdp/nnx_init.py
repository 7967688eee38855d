"""NNX modules whose parameters are born sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from jfsdp.born import born_sharded, program
from jfsdp.layout import named_sharding
from jfsdp.mesh import AnyMesh, mesh_known_to_traced_code
from jfsdp.nnx_tree import mesh_of, placement_of, walk

__all__ = ["init_module", "init_program"]


def init_module(
    fn: Callable[[], Any], module: Any, shard: Callable[[Any], Any], *, abstract: bool
) -> Any:
    """Make `fn()` under jit with every parameter laid where `shard` puts it.

    Args:
        fn: makes the module; it may call `jfsdp.shard` itself.
        module: what `nnx.eval_shape(fn)` gives; it is sharded in place.
        shard: makes the abstract module a unit.
        abstract: whether to leave it at that.

    Returns:
        The module, of arrays; where the mesh has no devices to hold them, the abstract one.
    """
    mesh = _shard_abstract(module, shard)
    if abstract:
        return module
    graphdef, state = nnx.split(module, graph=True)
    made = born_sharded(lambda: nnx.split(fn(), graph=True)[1], state, mesh)
    return nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(made)))


def init_program(
    fn: Callable[[], nnx.Module], shard: Callable[[Any], Any]
) -> tuple[Any, nnx.Module]:
    """The jitted function that `init_module` runs, which returns the arrays, and the abstract module."""
    abstract = nnx.eval_shape(fn)
    mesh = _shard_abstract(abstract, shard)
    state = nnx.split(abstract, graph=True)[1]
    return program(lambda: nnx.split(fn(), graph=True)[1], state, mesh), abstract


def _shard_abstract(abstract: nnx.Module, shard: Callable[[Any], Any]) -> AnyMesh:
    with mesh_known_to_traced_code():
        shard(abstract)
    mesh = mesh_of(abstract)
    assert mesh is not None
    for _, node in walk(abstract):
        if isinstance(node, nnx.Variable):  # eval_shape drops what fn laid itself
            node.set_raw_value(_abstract(node, mesh))
    return mesh


def _abstract(variable: nnx.Variable, mesh: AnyMesh) -> Any:
    placement = placement_of(variable)

    def describe(leaf: Any) -> jax.ShapeDtypeStruct:
        if placement is not None:
            sharding = placement.sharding(mesh)
        else:
            sharding = named_sharding(mesh, PartitionSpec(), len(leaf.shape))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(describe, variable.get_raw_value())
