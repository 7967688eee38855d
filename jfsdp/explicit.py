"""Explicit axes: an array there is typed with its spec, and must be of the type that its user takes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jfsdp.layout import axes_of_entry
from jfsdp.mesh import DataParallelMesh, with_axis_types

__all__ = ["enter", "leave", "mesh_at_hand"]


def mesh_at_hand(dp: DataParallelMesh) -> Any:
    """The mesh that a region opened here maps over: the one in context, else the unit's."""
    context = jax.sharding.get_abstract_mesh()
    return dp.mesh if context.empty else context


def enter(value: jax.Array, spec: PartitionSpec, dp: DataParallelMesh) -> jax.Array:
    """`value` with `spec` on the data-parallel axes, typed as the region takes it.

    It is a no-op on Auto axes, where XLA moves what has to be moved.
    """
    mesh, typed = mesh_at_hand(dp), jax.typeof(value).sharding
    if AxisType.Explicit not in (*mesh.axis_types, *typed.mesh.axis_types):
        return value
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    to_explicit = AxisType.Explicit in mesh.axis_types
    entries = []
    for dim in range(value.ndim):
        ours = axes_of_entry(spec[dim]) if dim < len(spec) else ()
        theirs = axes_of_entry(typed.spec[dim]) if dim < len(typed.spec) else ()
        axes = [a for a in ours if types[a] == AxisType.Explicit or not to_explicit]
        entries.append(tuple(axes + [a for a in theirs if a not in dp.axes]) or None)
    target = PartitionSpec(*entries)
    sharding = NamedSharding(dp.mesh, target)  # pyright: ignore[reportArgumentType]
    if to_explicit:
        return jax.sharding.reshard(value, sharding)
    explicit = with_axis_types(dp.mesh, typed.mesh.axis_types)
    origin = NamedSharding(explicit, typed.spec)  # pyright: ignore[reportArgumentType]
    return _to_auto(value, sharding, origin)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _to_auto(value: jax.Array, sharding: NamedSharding, origin: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(value, sharding)


# The transpose of a constraint from Explicit to Auto axes is not typed as its argument was.
_to_auto.defvjp(
    lambda value, sharding, origin: (_to_auto(value, sharding, origin), None),
    lambda sharding, origin, _, cotangent: (jax.sharding.reshard(cotangent, origin),),
)


def leave(
    value: jax.Array, spec: PartitionSpec, dp: DataParallelMesh, inputs: Sequence[jax.Array]
) -> jax.Array:
    """A result in the type system of the inputs, so that the two can be computed with."""
    if AxisType.Explicit in mesh_at_hand(dp).axis_types:
        return value
    meshes = [jax.typeof(x).sharding.mesh for x in inputs]
    types = [mesh.axis_types for mesh in meshes if AxisType.Explicit in mesh.axis_types]
    if not types:
        return value
    mesh = with_axis_types(dp.mesh, types[0])
    target = PartitionSpec(*spec, *(None,) * (value.ndim - len(spec)))
    return jax.sharding.reshard(value, NamedSharding(mesh, target))  # pyright: ignore
