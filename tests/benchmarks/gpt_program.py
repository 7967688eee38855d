"""What the suite measures: one training step and its arguments, whoever wrote the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from gpt_shape import Shape
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jfsdp
from jfsdp.inspect.topology import is_absent

MESHES = {"S8": ((8,), ("fsdp",)), "R2xS4": ((2, 4), ("replica", "fsdp"))}


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted step and what to call it with.

    Attributes:
        step: `step(state, tokens)` returns the new state and the loss; donates the state.
        state: parameters and optimizer state, abstract where the devices are absent.
        tokens: (rows, context + 1) of int32, rows split over all devices.
        mesh: the mesh.
    """

    step: Callable[..., Any]
    state: Any
    tokens: Any
    mesh: Mesh


def make_mesh(name: str, target: str = "cpu") -> Mesh:
    """One of `MESHES` on simulated CPU devices ("cpu") or on those of a topology."""
    sizes, names = MESHES[name]
    devices = None if target == "cpu" else jfsdp.topology(target)
    return jax.make_mesh(sizes, names, (AxisType.Auto,) * len(sizes), devices=devices)


def make_tokens(shape: Shape, mesh: Mesh) -> Any:
    """A batch; only its description where the devices are absent."""
    size, lying = (shape.rows, shape.context + 1), NamedSharding(mesh, P(mesh.axis_names))
    if is_absent(mesh):
        return jax.ShapeDtypeStruct(size, jnp.int32, sharding=lying)
    tokens = np.random.default_rng(0).integers(0, shape.vocabulary, size, dtype=np.int32)
    return jax.device_put(tokens, lying)


def make_arrays(shapes: Any, shardings: Any, mesh: Mesh) -> Any:
    """Small random float32 arrays; only their descriptions where the devices are absent."""
    random = np.random.default_rng(0)

    def make(sharding: NamedSharding, size: tuple[int, ...]) -> Any:
        if is_absent(mesh):
            return jax.ShapeDtypeStruct(size, jnp.float32, sharding=sharding)
        return jax.device_put(random.normal(0, 0.02, size).astype(np.float32), sharding)

    return jax.tree.map(make, shardings, shapes)


def init_state(tx: Any, params: Any, mesh: Mesh) -> Any:
    """The state of an optimizer, each moment where its parameter lies."""
    whole = NamedSharding(mesh, P())
    abstract = jax.eval_shape(tx.init, params)
    shardings = optax.tree_map_params(
        tx,
        lambda _, parameter: parameter.sharding,
        abstract,
        params,
        transform_non_params=lambda _: whole,
    )
    if is_absent(mesh):
        return jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            abstract,
            shardings,
        )
    return jax.jit(tx.init, out_shardings=shardings)(params)
