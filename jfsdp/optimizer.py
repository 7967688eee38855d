"""Optimizer state that lies as its parameters, or more finely; everything else whole on the mesh.

optax makes moments with `zeros_like`, which depends on no input: under jit XLA has nothing to propagate
and leaves them whole on one device. So their places are read off the parameters, by path and shape, and
one program computes the state with them as `out_shardings`.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from jfsdp.layout import axes_of_entry, lay, named_sharding, one_mesh, to_spec
from jfsdp.mesh import AnyMesh, describe_mesh
from jfsdp.offload import PINNED, is_on_host, memory_kind_of, to_device
from jfsdp.policies import CPUOffloadPolicy, OffloadPolicy

__all__ = [
    "Parameter",
    "checked_axes",
    "describe",
    "finer_spec",
    "init_like",
    "init_optimizer",
    "is_of_optax",
    "names_of",
    "owner_of",
    "shardings_like",
    "spec_in_shape",
    "state_kind",
]

Parameter = tuple[tuple[str, ...], tuple[int, ...], PartitionSpec]
"""Where a parameter lies: the names of its path, its shape, its spec."""

Kinds = Mapping[tuple[str, ...], str | None]
"""The kind of host memory for what lies as a parameter, by the names of its path; None: the device's own."""


def init_optimizer(
    tx: Any,
    params: Any,
    *,
    shard_over: str | Sequence[str] | None = None,
    offload_policy: OffloadPolicy | None = None,
) -> Any:
    """The state of an optax optimizer for a pytree of parameters: see `jfsdp.init_optimizer`."""
    leaves = _checked_leaves(params)
    kinds = {path: _kind(leaf, offload_policy) for path, leaf in leaves.items()}
    if any(isinstance(leaf, Tracer) for leaf in leaves.values()):
        mesh, specs = _typed(leaves)
    else:
        mesh = one_mesh("init_optimizer", jax.tree_util.tree_leaves_with_path(params))
        assert mesh is not None
        specs = [leaf.sharding.spec for leaf in leaves.values()]
    parameters = [
        (path, leaf.shape, spec) for (path, leaf), spec in zip(leaves.items(), specs, strict=True)
    ]
    if isinstance(params, optax.LookaheadParams):  # the state is that of `fast` alone
        parameters = [(path[1:], shape, spec) for path, shape, spec in parameters]
        kinds = {path[1:]: kind for path, kind in kinds.items()}
    axes = () if shard_over is None else checked_axes(shard_over, mesh)
    return init_like(tx, params, parameters, mesh, axes, kinds)


def state_kind(offload_policy: OffloadPolicy) -> str | None:
    """The kind of host memory in which a policy keeps optimizer state; None for the device's own.

    Raises:
        TypeError: it is no offload policy.
    """
    if not isinstance(offload_policy, OffloadPolicy):
        raise TypeError(
            "init_optimizer: offload_policy must be jfsdp.OffloadPolicy() or jfsdp.CPUOffloadPolicy(), got "
            f"{offload_policy!r}."
        )
    if not isinstance(offload_policy, CPUOffloadPolicy) or not offload_policy.optimizer_state:
        return None
    return offload_policy.memory_kind


def _kind(parameter: Any, offload_policy: OffloadPolicy | None) -> str | None:
    if offload_policy is not None:
        return state_kind(offload_policy)
    if isinstance(parameter, Tracer):
        return PINNED if is_on_host(parameter) else None
    return memory_kind_of(parameter)


def init_like(
    tx: Any,
    params: Any,
    parameters: Iterable[Parameter],
    mesh: AnyMesh,
    axes: Sequence[str] = (),
    kinds: Kinds = MappingProxyType({}),
) -> Any:
    """`tx.init(params)`, laid by `parameters`, over `axes` too, in memory of these kinds.

    Raises:
        ValueError: there are axes, and no array of the state can be sharded over them.
    """
    leaves = jax.tree.leaves(params)
    traced = any(isinstance(leaf, Tracer) for leaf in leaves)

    def init(params: Any) -> Any:
        return tx.init(jax.tree.map(to_device, params))

    state = init(params) if traced else jax.eval_shape(init, params)
    finer = [(path, shape, finer_spec(spec, shape, axes, mesh)) for path, shape, spec in parameters]
    shardings = shardings_like(state, finer, mesh, kinds)
    _check_sharded(axes, mesh, shardings, state)
    if traced:
        return jax.tree.map(lay, state, shardings)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return jax.tree.map(describe, state, shardings)
    if not jax.tree.leaves(state):
        return state
    # By leaves: a state holds boxes and masks that no tree of shardings would match.
    make = jax.jit(
        lambda params: jax.tree.leaves(init(params)), out_shardings=jax.tree.leaves(shardings)
    )
    return jax.tree.unflatten(jax.tree.structure(state), make(params))


def describe(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """An abstract array with a sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)


def shardings_like(
    tree: Any,
    parameters: Iterable[Parameter],
    mesh: AnyMesh,
    kinds: Kinds = MappingProxyType({}),
) -> Any:
    """Where each array of a train state lies, by the parameters it belongs to.

    A leaf belongs to the parameter whose path its own path ends with, to the longest of several. If it
    has that shape, with or without dimensions in front, it lies as the parameter; else it is replicated.

    Args:
        tree: arrays, abstract arrays and Python numbers, in any pytree.
        parameters: the names of the path (see `names_of`), the shape and the spec of each.
        mesh: the mesh of all of them.
        kinds: the kind of host memory for what lies as a parameter; the others lie in the device's own.

    Returns:
        `tree` with a NamedSharding in place of every leaf.
    """
    known = {path: (tuple(shape), spec) for path, shape, spec in parameters}

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        shape = tuple(getattr(leaf, "shape", ()))
        end = owner_of(names_of(path), known)
        spec = None if end is None else spec_in_shape(known[end][1], known[end][0], shape)
        if end is None or spec is None:
            return named_sharding(mesh, PartitionSpec(), len(shape))
        return named_sharding(mesh, spec, len(shape), kinds.get(end))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def owner_of(names: tuple[str, ...], paths: Container[tuple[str, ...]]) -> tuple[str, ...] | None:
    """The longest of some paths that `names` ends with; None if it ends with none."""
    ends = (names[start:] for start in range(len(names) + 1))
    return next((end for end in ends if end in paths), None)


def spec_in_shape(
    spec: PartitionSpec, of: Sequence[int], shape: Sequence[int]
) -> PartitionSpec | None:
    """The spec of an array that is `of` with dimensions in front, or none; None for other arrays."""
    front = len(shape) - len(of)
    if front < 0 or tuple(shape[front:]) != tuple(of):
        return None
    return to_spec([()] * front + [axes_of_entry(entry) for entry in spec])


def is_of_optax(node: Any) -> bool:
    """Whether a node of a train state is optimizer state, as optax makes it."""
    return type(node).__module__.partition(".")[0] == "optax"


def names_of(path: Iterable[Any]) -> tuple[str, ...]:
    """The names along a path of `jax.tree_util`, without the boxes of Flax that hold the arrays.

    `nn.Partitioned` and `nnx.Param` keep their array in the attribute `value`; a parameter is found with
    and without its box.
    """
    return tuple(_name(key) for key in path if getattr(key, "name", None) != "value")


def _name(key: Any) -> str:
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def finer_spec(
    spec: PartitionSpec, shape: Sequence[int], axes: Sequence[str], mesh: AnyMesh
) -> PartitionSpec:
    """`spec` over `axes` too, as far as dimensions divide.

    An axis comes last on its dimension: then a device's part of the state belongs to the part of the
    parameter that it holds, and slicing the gradient moves nothing.
    """
    if not axes:
        return spec
    entries = [axes_of_entry(entry) for entry in spec]
    entries += [()] * (len(shape) - len(entries))
    for axis in axes:
        if any(axis in entry for entry in entries):
            continue
        sharded_first = sorted(range(len(shape)), key=lambda dim: (not entries[dim], -shape[dim]))
        for dim in sharded_first:
            parts = math.prod(mesh.shape[name] for name in (*entries[dim], axis))
            if shape[dim] and shape[dim] % parts == 0:
                entries[dim] += (axis,)
                break
    return to_spec(entries)


def checked_axes(shard_over: Any, mesh: AnyMesh) -> tuple[str, ...]:
    """The axes that `shard_over` names, without those of size 1.

    Raises:
        TypeError: it is no name and no sequence of names.
        ValueError: the mesh lacks an axis, or none of them is larger than 1.
    """
    names = (shard_over,) if isinstance(shard_over, str) else shard_over
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"shard_over takes names of mesh axes (str or several), got {shard_over!r}."
        )
    for name in names:
        if name not in mesh.axis_names:
            raise ValueError(
                f"shard_over names the axis {name!r}, which the mesh does not have. Its axes: "
                f"{describe_mesh(mesh)}."
            )
    axes = tuple(name for name in dict.fromkeys(names) if mesh.shape[name] > 1)
    if not axes:
        raise ValueError(
            f"shard_over={shard_over!r} shards nothing: it names no axis larger than 1 of the mesh "
            f"{describe_mesh(mesh)}. Name one, or leave shard_over out."
        )
    return axes


def _check_sharded(axes: Sequence[str], mesh: AnyMesh, shardings: Any, state: Any) -> None:
    """Check that an array of the state lies on one of the axes, if there are any.

    Raises:
        ValueError: none does; the arrays are listed.
    """
    specs = [sharding.spec for sharding in jax.tree.leaves(shardings)]
    if not axes or any(axis in axes_of_entry(e) for spec in specs for e in spec for axis in axes):
        return
    leaves = jax.tree_util.tree_leaves_with_path(state)
    listed = "".join(f"\n  {'.'.join(names_of(path))} {leaf.shape}" for path, leaf in leaves)
    raise ValueError(
        f"shard_over={tuple(axes)!r} shards nothing on the mesh {describe_mesh(mesh)}: the optimizer keeps "
        "no array in the shape of a parameter that has a dimension to divide by that. Leave shard_over "
        f"out, or take an optimizer with moments. Its state: {listed or 'empty.'}"
    )


def _checked_leaves(params: Any) -> dict[tuple[str, ...], Any]:
    """The parameters by path."""
    leaves = {names_of(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    if not leaves:
        raise ValueError("init_optimizer: there are no parameters.")
    for path, leaf in leaves.items():
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise TypeError(
                f"init_optimizer: the parameter {'.'.join(path)} is of type {type(leaf).__name__}, which "
                "lies on no mesh. Put it there with jax.device_put."
            )
    elsewhere = [
        f"\n  {'.'.join(path)} {leaf.shape}: {getattr(leaf, 'sharding', None)}"
        for path, leaf in leaves.items()
        if not isinstance(leaf, Tracer) and not isinstance(leaf.sharding, NamedSharding)
    ]
    if elsewhere:
        raise ValueError(
            "init_optimizer: these parameters lie on no mesh, so it cannot be said where their state "
            "belongs. Make them sharded with jfsdp.init, or put them on the mesh with jax.device_put:"
            f"{''.join(elsewhere)}"
        )
    return leaves


def _typed(leaves: Mapping[tuple[str, ...], Any]) -> tuple[AnyMesh, list[PartitionSpec]]:
    """The mesh and the specs in the types of traced parameters."""
    shardings = [jax.typeof(leaf).sharding for leaf in leaves.values()]
    for path, sharding in zip(leaves, shardings, strict=True):
        if not sharding.mesh.are_all_axes_explicit:
            raise ValueError(
                f"init_optimizer: inside jit the sharding of {'.'.join(path)} is not known, and XLA would "
                "leave its state whole on one device. Call init_optimizer outside of jit, or make the "
                "whole train state with jfsdp.init(fn). (With Explicit mesh axes it is known.)"
            )
    return shardings[0].mesh, [sharding.spec for sharding in shardings]
