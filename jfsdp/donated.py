"""Arrays that a program is given and that it puts its results in the place of: where they lie, each once."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

__all__ = ["abstract_put", "apart", "place", "settled", "shardings"]

_sharding = operator.attrgetter("sharding")


def place(x: Any) -> Any:
    """Where an array lies for good; None if JAX may move it, or if it is being traced."""
    if isinstance(x, jax.core.Tracer):
        return None
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.sharding
    return x.sharding if isinstance(x, jax.Array) and x.committed else None


def abstract_put(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """What `jax.device_put` would make, as a description."""
    return jax.ShapeDtypeStruct(
        jax.numpy.shape(x),
        jax.numpy.result_type(x),
        sharding=sharding,
        weak_type=getattr(x, "weak_type", False),
    )


def shardings(values: list[Any]) -> list[Any]:
    """How they lie; None for what is no array."""
    try:
        return list(map(_sharding, values))
    except AttributeError:
        return [getattr(value, "sharding", None) for value in values]


def settled(values: list[Any], beside: Any, put: Callable[[Any, NamedSharding], Any]) -> list[Any]:
    """The arrays, those without a place of their own put on every device of the mesh that others lie on.

    JAX does so when it runs the program, and the result is at home there: that is another input than the
    first call's, for which the program would be compiled a second time.

    Args:
        values: arrays, or pytrees of arrays.
        beside: the program's other arguments.
        put: `jax.device_put` or `abstract_put`.
    """
    places = [place(x) for x in jax.tree.leaves((values, beside))]
    meshes = [
        where.mesh
        for where in places
        if isinstance(where, NamedSharding) and isinstance(where.mesh, Mesh)
    ]
    if not meshes:
        return values
    everywhere = NamedSharding(max(meshes, key=lambda mesh: mesh.size), PartitionSpec())

    def settle(x: Any) -> Any:
        return x if isinstance(x, jax.core.Tracer) or place(x) is not None else put(x, everywhere)

    return jax.tree.map(settle, values)


def apart(values: list[Any]) -> list[Any]:
    """The arrays, each copied that was there before: it can be donated once. `values` itself if none was."""
    leaves, treedef = jax.tree.flatten(values)
    seen: set[int] = set()
    copied = False
    for number, leaf in enumerate(leaves):
        if id(leaf) in seen and isinstance(leaf, jax.Array):
            leaves[number] = jax.device_put(leaf, leaf.sharding, may_alias=False)
            copied = True
        seen.add(id(leaf))
    return jax.tree.unflatten(treedef, leaves) if copied else values
