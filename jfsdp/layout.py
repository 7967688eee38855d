"""PartitionSpecs and shardings in the forms that jax compares equal, and arrays laid by them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jfsdp.mesh import AnyMesh, describe_mesh
from jfsdp.offload import PINNED, UNPINNED, to_device, to_host

__all__ = [
    "TILE",
    "Dims",
    "axes_of_entry",
    "lay",
    "named_sharding",
    "one_mesh",
    "shardings",
    "spec_of",
    "to_spec",
    "whole",
]


TILE = 128
"""TPUs keep the last dimension of an array in tiles of this width."""

Dims = tuple[tuple[int, tuple[str, ...]], ...]
"""Sharded dimensions and the mesh axes they lie on: ((dim, axes), ...)."""


def spec_of(array: Any) -> PartitionSpec | None:
    """The PartitionSpec that an array, a tracer or an abstract array carries, or None."""
    sharding = jax.typeof(array).sharding if isinstance(array, Tracer) else None
    sharding = sharding or getattr(array, "sharding", None)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else None
    return spec if spec is not None and any(spec) else None


def named_sharding(
    mesh: AnyMesh, spec: PartitionSpec, ndim: int, memory_kind: str | None = None
) -> NamedSharding:
    """A sharding in the form in which a compiled step returns it.

    jit's cache tells P("x") from P("x", None). On Auto axes XLA leaves trailing Nones out; on Explicit
    ones the array's type names every dimension. In another form the second step would compile again.
    """
    if AxisType.Explicit in mesh.axis_types:
        spec = PartitionSpec(*spec, *(None,) * (ndim - len(spec)))
    if memory_kind is None:
        return NamedSharding(mesh, spec)  # pyright: ignore[reportArgumentType]
    sharding = NamedSharding(mesh, spec, memory_kind=memory_kind)  # pyright: ignore[reportArgumentType]
    if sharding.memory_kind is None and isinstance(mesh, Mesh):
        # GPUs that are not here list no memories, and jax forgets the kind on them. It keeps it on an
        # abstract mesh; what else the step takes says for which devices it is compiled.
        return NamedSharding(mesh.abstract_mesh, spec, memory_kind=memory_kind)
    return sharding


def lay(value: Any, sharding: NamedSharding) -> Any:
    """Lay an array, a tracer or an abstract array as `sharding` says; other values pass."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    if isinstance(value, Tracer):
        if sharding.memory_kind == UNPINNED:
            return jax.device_put(value, sharding)
        value = to_host(value) if sharding.memory_kind == PINNED else to_device(value)
        if sharding.mesh.are_all_axes_explicit:
            return jax.sharding.reshard(value, sharding)
        return jax.lax.with_sharding_constraint(value, sharding)
    return jax.device_put(value, sharding) if hasattr(value, "dtype") else value


def axes_of_entry(entry: Any) -> tuple[str, ...]:
    """The axes that one entry of a PartitionSpec names."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def to_spec(entries: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """A PartitionSpec in the one form that jit's cache compares equal: no trailing None."""
    parts = [axes if len(axes) > 1 else axes[0] if axes else None for axes in entries]
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


def shardings(tree: Any) -> Any:
    """The shardings of a train state, module, optimizer or any pytree of arrays, in the same structure.

    Use it as `in_shardings` and `out_shardings` of `jax.jit`, or as a restore target. What lies nowhere
    yet, such as optax's counts and a step that is a Python number, is given the place where a step returns
    it, whole on every device of the mesh. Put an ordinary train state there before the first step,
    `state = jax.device_put(state, jfsdp.shardings(state))`, and the step compiles once: even with
    `in_shardings` JAX traces arrays that lie on no mesh as another type than those it returns.

    Args:
        tree: arrays or abstract arrays that carry a sharding, and beside them numbers and uncommitted
            arrays of one device.

    Returns:
        `tree` with a `jax.sharding.Sharding` in place of every leaf.

    Raises:
        TypeError: a leaf has no sharding, and is no number beside arrays on a mesh; its path is named.
        ValueError: a leaf lies nowhere yet, and the others on two meshes; their paths are named.

    Cost: none; nothing is moved.

    Example:
        >>> import jax, jfsdp
        >>> from jax.sharding import NamedSharding, PartitionSpec
        >>> sharding = NamedSharding(jax.make_mesh((1,), ("fsdp",)), PartitionSpec("fsdp"))
        >>> state = {"step": 0, "w": jax.device_put(jax.numpy.ones(8), sharding)}
        >>> {name: leaf.spec for name, leaf in jfsdp.shardings(state).items()}
        {'step': P(), 'w': P('fsdp',)}
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    mesh = None
    if any(_lies_nowhere(leaf) for _, leaf in leaves):
        mesh = one_mesh("shardings", leaves)

    def sharding(path: Any, leaf: Any) -> Any:
        if mesh is not None and _lies_nowhere(leaf):
            return named_sharding(mesh, PartitionSpec(), np.ndim(leaf))
        if getattr(leaf, "sharding", None) is None:
            raise TypeError(
                f"shardings: {jax.tree_util.keystr(path)} ({type(leaf).__name__}) has no sharding. Put it "
                "on the mesh with jax.device_put, or leave it out."
            )
        return leaf.sharding

    return jax.tree.unflatten(treedef, [sharding(path, leaf) for path, leaf in leaves])


def whole(tree: Any) -> Any:
    """Every array of a tree whole on every device of its mesh; what lies on no mesh passes.

    Raises:
        ValueError: a leaf is traced, and its type does not say on which mesh it lies.
    """

    def spread(path: Any, leaf: Any) -> Any:
        traced = isinstance(leaf, Tracer)
        sharding: Any = jax.typeof(leaf).sharding if traced else getattr(leaf, "sharding", None)
        if traced and sharding.mesh.empty:
            raise ValueError(
                f"unshard: {jax.tree_util.keystr(path)} (shape {leaf.shape}) is traced, and its type does "
                "not say on which mesh it lies. Call jfsdp.unshard outside of jit."
            )
        if not isinstance(sharding, NamedSharding):
            return leaf
        return lay(leaf, named_sharding(sharding.mesh, PartitionSpec(), leaf.ndim))

    return jax.tree_util.tree_map_with_path(spread, tree)


def _lies_nowhere(leaf: Any) -> bool:
    """Whether a leaf is a number, or an array that jax may move because nobody has placed it."""
    if isinstance(leaf, jax.Array):
        return not isinstance(leaf, Tracer) and not leaf.committed
    return isinstance(leaf, bool | int | float | complex | np.generic | np.ndarray) and (
        np.ndim(leaf) == 0
    )


def one_mesh(who: str, leaves: Iterable[tuple[Any, Any]]) -> AnyMesh | None:
    """The mesh on which arrays lie, or None if none lies on a mesh.

    What lies on the same mesh without its devices is on that mesh (see `named_sharding`).

    Args:
        who: the caller, for the message.
        leaves: arrays with their paths, as `jax.tree_util.tree_flatten_with_path` gives them.

    Raises:
        ValueError: there are two meshes; a path is named for each.
    """
    first: tuple[Any, AnyMesh] | None = None
    for path, leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            continue
        first = first or (path, sharding.mesh)
        if isinstance(sharding.mesh, Mesh) and sharding.mesh.abstract_mesh == first[1]:
            first = path, sharding.mesh
        if sharding.mesh not in (first[1], first[1].abstract_mesh):
            raise ValueError(
                f"{who}: {jax.tree_util.keystr(first[0])} lies on the mesh {_full(first[1])}, "
                f"{jax.tree_util.keystr(path)} on {_full(sharding.mesh)}. Put all on one mesh, or call "
                f"{who} for each mesh."
            )
    return None if first is None else first[1]


def _full(mesh: AnyMesh) -> str:
    """Axes, their types, and the devices: meshes that differ in one of them are two."""
    types = ", ".join(sorted({kind.name for kind in mesh.axis_types}))
    abstract = isinstance(mesh, AbstractMesh)
    devices = "none" if abstract else str([device.id for device in mesh.devices.flat])
    return f"{describe_mesh(mesh)} ({types} axes, devices: {devices})"
