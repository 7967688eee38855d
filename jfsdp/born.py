"""Arrays that are born sharded: made by one jitted program in which each device makes its own part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from jfsdp.inspect.topology import is_absent
from jfsdp.layout import lay, named_sharding
from jfsdp.mesh import AnyMesh, with_axis_types
from jfsdp.offload import memory_kind_of
from jfsdp.units import is_array

__all__ = ["born_sharded", "program"]


def born_sharded(
    function: Callable[..., Any], abstract: Any, mesh: AnyMesh, *args: Any, **kwargs: Any
) -> Any:
    """What `function(*args, **kwargs)` returns, every array laid as `abstract` says from the start.

    Args:
        function: makes a pytree of arrays.
        abstract: that pytree, of `jax.ShapeDtypeStruct`s; those without a sharding lie as XLA likes.
        mesh: the mesh of the shardings.
        *args: arrays are arguments of the program, all else is fixed in it.
        **kwargs: likewise.

    Returns:
        The pytree of arrays; where the mesh has no devices to hold them, `abstract`.
    """
    if isinstance(mesh, AbstractMesh) or is_absent(mesh):
        return abstract
    flat, treedef = jax.tree.flatten((args, kwargs))

    def call(arrays: list[Any]) -> Any:
        given = iter(arrays)
        leaves = [next(given) if is_array(x) else x for x in flat]
        args, kwargs = jax.tree.unflatten(treedef, leaves)
        return function(*args, **kwargs)

    arrays = [x for x in flat if is_array(x)]
    with _auto_axes(mesh):
        made = program(call, abstract, mesh)([_untyped(x, mesh) for x in arrays])
    leaves, structure = jax.tree.flatten(abstract)
    laid = [
        x if leaf.sharding is None else lay(x, leaf.sharding)
        for x, leaf in zip(made, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, laid)


@contextlib.contextmanager
def _auto_axes(mesh: Mesh) -> Iterator[None]:
    """Explicit axes that are set, as Auto ones: the program is traced with these."""
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        yield
        return
    with jax.set_mesh(_auto_twin(mesh)):
        yield


def _untyped(array: Any, mesh: Mesh) -> Any:
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
        return array
    return jax.device_put(array, _on(_auto_twin(mesh), array))


def _on(mesh: AnyMesh, array: Any) -> NamedSharding:
    """The sharding of an array on a mesh of other types."""
    return named_sharding(mesh, array.sharding.spec, array.ndim, memory_kind_of(array))


def _auto_twin(mesh: AnyMesh) -> Any:
    return with_axis_types(mesh, (AxisType.Auto,) * len(mesh.axis_names))


def program(function: Callable[..., Any], abstract: Any, mesh: AnyMesh) -> Any:
    """The jitted function that returns the leaves of what `function` returns."""
    # On an Explicit mesh a random array is replicated unless told otherwise; on an Auto one XLA computes
    # each device's part of it only.
    auto = _auto_twin(mesh)
    shardings = [
        None if leaf.sharding is None else _on(auto, leaf) for leaf in jax.tree.leaves(abstract)
    ]

    def make(*args: Any) -> list[Any]:
        context = jax.sharding.get_abstract_mesh()
        with jax.sharding.use_abstract_mesh(context if context.empty else auto.abstract_mesh):
            return jax.tree.leaves(function(*args))

    return jax.jit(make, out_shardings=shardings)
