"""What the tests of `reshard_after_forward` as axes share: a stack of blocks, and its gathers counted."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from helpers import make_mesh, rows
from models import Block, Stack

import jfsdp

DIMS = jfsdp.DataParallelMeshDims(shard=("outer", "inner"))
HSDP = jfsdp.DataParallelMeshDims(shard=("outer", "inner"), replicate="replica")
BOTH = ("outer", "inner")


def mesh_of(kind: str) -> tuple[jax.sharding.Mesh, jfsdp.DataParallelMeshDims]:
    """S2x4, or R2xS2x2."""
    if kind == "hsdp":
        return make_mesh(replica=2, outer=2, inner=2), HSDP
    return make_mesh(outer=2, inner=4), DIMS


def stack(reshard: Any, kind: str = "fsdp", **settings: Any) -> nnx.Module:
    """4 blocks of Linear(64, 64), each a unit."""
    mesh, dims = mesh_of(kind)
    settings = {"units": Block, "dp_mesh_dims": dims, **settings}
    return jfsdp.shard(Stack(4, 64, nnx.Rngs(0)), mesh, reshard_after_forward=reshard, **settings)


def gradients_of_both(model: nnx.Module, x: jax.Array) -> Any:
    """Of the parameters and of the input, so that every unit's weights are read in the backward."""

    @nnx.jit
    def step(model: nnx.Module, x: jax.Array) -> Any:
        def loss(model: Any, x: jax.Array) -> jax.Array:
            return jnp.mean(model(x).astype(jnp.float32) ** 2)

        return nnx.value_and_grad(loss, argnums=(0, 1))(model, x)

    return step(model, x)


def report(model: nnx.Module, step: Any = gradients_of_both) -> Any:
    return jfsdp.inspect(step, model, rows(16, 64))


def counts(found: Any) -> dict[tuple[str, ...], tuple[int, int]]:
    """All-gathers of the forward and of the backward by axes."""
    gathers = [c for c in found.collectives if c.kind == "all-gather"]
    return {
        axes: tuple(
            sum(c.executions for c in gathers if (c.axes, c.phase) == (axes, phase))
            for phase in ("forward", "backward")
        )
        for axes in sorted({c.axes for c in gathers})
    }
