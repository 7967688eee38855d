"""Linen models compiled for GPUs and TPUs that are not here are what their policies state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jfsdp
import jfsdp.testing

WIDTH, DEPTH = 512, 4
POLICY = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)


class Block(nn.Module):
    """A residual block of 2.1 million parameters."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = nn.gelu(nn.Dense(4 * WIDTH, name="up")(nn.LayerNorm(name="norm")(x)))
        return x + nn.Dense(WIDTH, name="down")(hidden)


class Layer(nn.Module):
    """What nn.scan runs over."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return nn.remat(Block)(name="block")(x), None


class Stack(nn.Module):
    """Blocks under nn.remat, one by one or stacked by nn.scan, and a head."""

    scan: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.scan:
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            x, _ = nn.scan(Layer, length=DEPTH, **axes)(name="layers")(x, None)  # pyright: ignore
        else:
            for _ in range(DEPTH):
                x = nn.remat(Block)()(x)
        return nn.Dense(256, name="head")(x)


def train_step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    def loss(params: Any) -> jax.Array:
        return jnp.mean(state.apply_fn({"params": params}, x).astype(jnp.float32) ** 2)

    value, gradients = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradients), value


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
@pytest.mark.parametrize("sizes", [(1, 8), (2, 4)], ids=["S8", "R2xS4"])
@pytest.mark.parametrize("target", ["h100:8", "v5e:2x4"])
def test_a_train_state_of_linen_keeps_its_policies(target: str, sizes: Any, scan: bool):
    """Gates 1 to 6: bytes, dtypes and groups of every collective, remat, donation."""
    devices = jfsdp.testing.topology_or_skip(target)
    mesh = jax.make_mesh(sizes, ("replica", "fsdp"), (AxisType.Auto,) * 2, devices=devices)
    model = jfsdp.shard(Stack(scan), mesh, units=Block, mp_policy=POLICY)

    def create() -> TrainState:
        params = model.init(jax.random.key(0), jnp.ones((1, 128, WIDTH)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    batch = jax.ShapeDtypeStruct(
        (32, 128, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P(("replica", "fsdp")))
    )
    step = jax.jit(train_step, donate_argnums=0)
    report = jfsdp.testing.check_step(step, jfsdp.init(create), batch, gather_dtype="bfloat16")
    assert report.count("all-gather", "fsdp", "bfloat16") == report.count("all-gather")
    assert report.memory is not None and report.memory.aliased > 0
