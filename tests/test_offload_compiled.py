"""Whole training steps with everything on the host, compiled for TPUs and GPUs that are not here."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jfsdp
from jfsdp.testing import topology_or_skip

pytestmark = pytest.mark.slow

WIDTH, DEPTH, ROWS = 1024, 4, 512
HOST = jfsdp.CPUOffloadPolicy()
MIXED = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)
PARAMETERS = DEPTH * (8 * WIDTH * WIDTH + 5 * WIDTH) + WIDTH * WIDTH + WIDTH
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

targets = pytest.mark.parametrize("target", ["v5e:2x4", "h100:8"])
fronts = pytest.mark.parametrize("front", ["nnx", "linen"])
kinds = pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.down(nnx.gelu(self.up(x)))


class Model(nnx.Module):
    blocks: Any

    def __init__(self, depth: int, scan: bool, rngs: nnx.Rngs):
        self.first, self.scan = nnx.Linear(WIDTH, WIDTH, rngs=rngs), scan
        if scan:
            self.blocks = nnx.split_rngs(splits=depth)(nnx.vmap(Block))(rngs)
        else:
            self.blocks = nnx.List([Block(rngs) for _ in range(depth)])

    def __call__(self, x: Any) -> Any:
        x = self.first(x)
        if self.scan:
            axes: Any = {"in_axes": (nnx.Carry, 0), "out_axes": nnx.Carry}
            return nnx.scan(nnx.remat(lambda x, block: block(x)), **axes)(x, self.blocks)
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x)
        return x


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        up = nn.gelu(nn.Dense(4 * WIDTH, dtype=jnp.bfloat16)(x))
        return x + nn.Dense(WIDTH, dtype=jnp.bfloat16)(up), None


class LinenModel(nn.Module):
    depth: int
    scan: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(WIDTH, dtype=jnp.bfloat16)(x)
        block: Any = nn.remat(LinenBlock)
        if self.scan:
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            return nn.scan(block, length=self.depth, **axes)(name="blocks")(x, None)[0]
        for index in range(self.depth):
            x, _ = block(name=f"block{index}")(x)
        return x


def nnx_step(mesh: Any, scan: bool, depth: int, policy: Any, **settings: Any) -> tuple[Any, ...]:
    settings |= {"mp_policy": MIXED, "offload_policy": policy}

    def make() -> Model:
        model = Model(depth, scan, nnx.Rngs(0))
        if scan:
            jfsdp.shard(model.blocks, mesh, stacked_axis=0, **settings)
        return jfsdp.shard(model, mesh, units=() if scan else Block, **settings)

    model = jfsdp.init(make)
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    def loss(model: Any, x: Any) -> Any:
        return jnp.mean(model(x).astype(jnp.float32) ** 2)

    @jfsdp.jit
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        value, gradients = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, gradients)
        return value

    return step, model, optimizer, None


def linen_step(mesh: Any, scan: bool, depth: int, policy: Any, **settings: Any) -> tuple[Any, ...]:
    model = jfsdp.shard(
        LinenModel(depth, scan),
        mesh,
        units=LinenBlock,
        mp_policy=MIXED,
        offload_policy=policy,
        **settings,
    )
    init = functools.partial(model.init, jax.random.key(0), jnp.ones((8, WIDTH)))
    params: Any = jfsdp.init(lambda: init()["params"])
    state = jfsdp.init_optimizer(TX, params)

    def loss(params: Any, x: Any) -> Any:
        y: Any = model.apply({"params": params}, x)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x)
        return *jfsdp.update_optimizer(TX, gradients, state, params), value

    return step, params, state, model


@functools.cache
def report(
    target: str, front: str, scan: bool, depth: int = DEPTH, policy: Any = HOST
) -> jfsdp.inspect.Report:  # pyright: ignore
    axis_types = (AxisType.Auto,)
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types, devices=topology_or_skip(target))
    make = nnx_step if front == "nnx" else linen_step
    step, params, state, model = make(mesh, scan, depth, policy)
    sharding = NamedSharding(mesh, P("fsdp"))
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=sharding)
    return jfsdp.inspect(step, params, state, x, model=model, compile=True)


@targets
@fronts
@kinds
def test_nothing_that_is_offloaded_lies_on_the_device_between_steps(target, front, scan):
    memory = report(target, front, scan).memory
    least = PARAMETERS * 4 // 8
    assert memory.parameters == 0
    assert memory.optimizer <= 2 * 512  # counters; a tile each on TPUs
    assert least <= memory.host_parameters <= 1.01 * least
    assert 2 * least <= memory.host_optimizer <= 1.01 * 2 * least


@targets
@fronts
@kinds
def test_the_program_is_what_the_policies_state(target, front, scan):
    report(target, front, scan).check()


@targets
@fronts
@kinds
def test_a_step_moves_the_least_bytes_and_the_gradients_once_more_for_their_norm(
    target, front, scan
):
    traffic = report(target, front, scan).traffic
    assert traffic.least is not None
    to_device, to_host = traffic.least
    assert traffic.to_device <= 1.01 * (to_device + PARAMETERS * 4 / 8)
    assert traffic.to_host <= 1.01 * to_host


@targets
@fronts
def test_what_a_step_needs_of_the_device_hardly_grows_with_depth(target, front):
    few, many = (report(target, front, False, depth).memory.temporaries for depth in (4, 12))
    shards = (8 * WIDTH * WIDTH + 5 * WIDTH) * 4 // 8  # of a block; 4 of these are on the host
    assert many - few <= 8 * shards / 2
