"""ZeRO-1, ZeRO-2 and ZeRO-3, each by one setting: what lies where, what moves, the unsharded losses."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from helpers import (
    batch_on,
    compilations,
    count_ops,
    leaves,
    local_bytes,
    make_mesh,
    rows,
    train,
)
from jax.sharding import PartitionSpec as P
from linen_models import KEY, MLP

import jfsdp
from jfsdp.inspect import Report
from jfsdp.testing import topology_or_skip

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
import zero_stages as zero  # pyright: ignore[reportMissingImports]

SMALL = zero.Shape(depth=2, width=16, hidden=32, rows=16)
STAGES = [1, 2, 3]
every_stage = pytest.mark.parametrize("stage", STAGES)


def build(stage: int, tx: Any = None) -> tuple[Any, nnx.Optimizer]:
    """The small model in float32."""
    policy = jfsdp.MixedPrecisionPolicy()
    return zero.build(stage, zero.make_mesh(), SMALL, tx, policy)


def x_on(mesh: Any) -> jax.Array:
    return batch_on(mesh, rows(SMALL.rows, SMALL.width))


# --------------------------------------------------------------------------------------------------
# Where it lies


def copies(array: jax.Array) -> float:
    """How often the array's bytes lie on all devices together."""
    return local_bytes(array) / array.nbytes


@every_stage
def test_moments_are_divided_in_every_stage_and_parameters_from_the_second_on(stage: int):
    model, optimizer = build(stage)
    adam = optimizer.opt_state[0]
    for moment in jax.tree.leaves((nnx.as_pure(adam.mu), nnx.as_pure(adam.nu))):
        assert copies(moment) == 1
    for parameter in jax.tree.leaves(nnx.as_pure(nnx.state(model, nnx.Param))):
        assert copies(parameter) == (8 if stage == 1 else 1)


OPTIMIZERS = {
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-2),
    "lion": lambda: optax.lion(1e-2),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "accumulating": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "schedule_free": lambda: optax.contrib.schedule_free(optax.sgd(0.1), 0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_first_stage_divides_any_state_of_optax_and_trains_as_unsharded(name: str):
    model, optimizer = build(1, OPTIMIZERS[name]())
    arrays = [x for x in jax.tree.leaves(nnx.state(optimizer.opt_state)) if x.ndim]
    assert arrays
    assert {copies(x) for x in arrays} == {1}
    x = x_on(zero.make_mesh())
    losses = [float(zero.train_step(model, optimizer, x)) for _ in range(4)]
    plain = zero.Stack(SMALL, nnx.Rngs(0))
    expected = train(plain, rows(SMALL.rows, SMALL.width), steps=4, tx=OPTIMIZERS[name]())
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


@every_stage
def test_losses_are_those_of_the_unsharded_model(stage: int):
    """Ten steps of Adam, to 1e-6, so that the stages are equal to each other too."""
    model, optimizer = build(stage)
    x = x_on(zero.make_mesh())
    losses = [float(zero.train_step(model, optimizer, x)) for _ in range(10)]
    plain = zero.Stack(SMALL, nnx.Rngs(0))
    tx = optax.adam(1e-3)
    expected = train(plain, rows(SMALL.rows, SMALL.width), steps=10, tx=tx)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


@every_stage
def test_parameters_and_state_stay_where_they_are(stage: int):
    """Four donated steps compile once; what was replicated stays so, what was divided too."""
    model, optimizer = build(stage)
    before = jfsdp.shardings(nnx.state((model, optimizer)))
    unique_step = nnx.jit(zero.train_step.__wrapped__, donate_argnums=(0, 1))
    with compilations() as compiled:
        for _ in range(4):
            old = jax.tree.leaves(nnx.state((model, optimizer)))
            unique_step(model, optimizer, x_on(zero.make_mesh()))
            assert all(x.is_deleted() for x in old if x.ndim)
    assert compiled["train_step"] == 1
    assert jfsdp.shardings(nnx.state((model, optimizer))) == before


# --------------------------------------------------------------------------------------------------
# What moves


@pytest.mark.parametrize(
    "stage, gathers, scatters, reductions", [(1, 0, 0, 4), (2, 4, 4, 0), (3, 7, 4, 0)]
)
def test_collectives_as_written(stage: int, gathers: int, scatters: int, reductions: int):
    """4 leaves; the first block's re-gather for its input's gradient is not needed; the loss is XLA's."""
    model, optimizer = build(stage)
    lowered = zero.train_step.lower(model, optimizer, x_on(zero.make_mesh())).lowered
    assert count_ops(lowered, "all_gather", "f32") == gathers
    assert count_ops(lowered, "reduce_scatter", "f32") == scatters
    assert count_ops(lowered, "all_reduce", "f32") == reductions


@functools.cache
def report_of(target: str, stage: int) -> Report:
    return zero.measure(stage, topology_or_skip(target))


every_target = pytest.mark.parametrize("target", ["v5e:2x4", "h100:8"])


@pytest.mark.slow
@every_stage
@every_target
def test_compiled_bytes_are_the_least(target: str, stage: int):
    """The gradients of ZeRO-1 are reduce-scattered: each device receives what it updates."""
    report, parameters = report_of(target, stage), zero.Shape().parameters
    least = zero.least_communication(stage, parameters)
    gathered = zero.received(report, "all-gather") / least["all-gather"]
    # The first block's kernels, up or both, are not gathered again: no one asks for the input's gradient.
    assert 1 - 1.01 / 32 <= gathered <= 1.001
    assert zero.received(report, "reduce-scatter") == pytest.approx(least["reduce-scatter"], 1e-3)
    assert zero.received(report, "all-reduce") < 1024


@pytest.mark.slow
@every_stage
@every_target
def test_compiled_state_is_the_least_and_updated_in_place(target: str, stage: int):
    memory, least = (
        report_of(target, stage).memory,
        zero.least_memory(stage, zero.Shape().parameters),
    )
    assert memory is not None
    assert memory.parameters == pytest.approx(least["parameters"], 1e-3)
    assert memory.optimizer == pytest.approx(least["optimizer"], 1e-3)
    assert memory.aliased >= memory.parameters + memory.optimizer


@pytest.mark.slow
@every_stage
@every_target
def test_check_holds_each_stage_to_its_bytes(target: str, stage: int):
    """In ZeRO-1 with the gather of the updated parameters, which no unit does."""
    report = report_of(target, stage)
    report.check()
    assert report.memory is not None
    assert report.memory.optimizer_minimum == pytest.approx(report.memory.optimizer, 1e-3)


@pytest.mark.slow
@every_target
def test_check_knows_state_on_the_replicas_of_hsdp(target: str):
    """Its update is gathered over the replicas, once, in the parameter's dtype."""
    mesh = jax.make_mesh((2, 4), ("replica", "fsdp"), devices=topology_or_skip(target))
    shape = zero.Shape(depth=2)
    model = jfsdp.init(
        lambda: zero.Stack(shape, nnx.Rngs(0)), mesh, units=zero.Block, mp_policy=zero.POLICY
    )
    optimizer = jfsdp.init_optimizer(optax.adam(1e-3), model, shard_over="replica")
    batch = shape.batch(mesh)
    report = jfsdp.inspect(zero.train_step, model, optimizer, batch, compile=True)
    report.check()
    updates = [c for c in report.collectives if c.kind == "all-gather" and c.axes == ("replica",)]
    assert sum(c.total_bytes for c in updates) == pytest.approx(shape.parameters / 4 / 2 * 4, 1e-3)


@pytest.mark.slow
def test_on_a_tpu_the_third_stage_needs_less_than_the_second():
    """Whole bfloat16 weights are 128 MiB. On GPUs XLA joins the reductions: see the table in the README."""
    two, three = (report_of("v5e:2x4", stage).memory for stage in (2, 3))
    assert two is not None and three is not None
    assert three.peak < two.peak - 32 * zero.MIB


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_on_gpus_most_gathered_bytes_travel_beside_matrix_multiplications(stage: int):
    """81 % of the bytes in ZeRO-2, 58 % in ZeRO-3 (jax 0.12.0.1): XLA prefetches by itself in the forward."""
    gathers = [c for c in report_of("h100:8", stage).collectives if c.kind == "all-gather"]
    beside = sum(c.total_bytes for c in gathers if c.overlapped)
    assert beside / sum(c.total_bytes for c in gathers) > 0.5


# --------------------------------------------------------------------------------------------------
# ZeRO-1 of a Linen train state


def linen_state(tx: Any, **settings: Any) -> tuple[Any, Any]:
    """A train state with replicated parameters whose optimizer state is divided, and its shardings."""
    mesh = make_mesh(data=8)
    dims = jfsdp.DataParallelMeshDims(replicate="data")
    model = jfsdp.shard(MLP(), mesh, dp_mesh_dims=dims)
    params = jfsdp.init(lambda: model.init(KEY(0), jnp.ones((1, 16)))["params"])
    state = TrainState(
        step=0,
        apply_fn=model.apply,
        params=params,
        tx=tx,
        opt_state=jfsdp.init_optimizer(tx, params, shard_over="data"),
    )
    shardings = jfsdp.shardings(state)
    return jax.device_put(state, shardings), shardings


def linen_step(state: Any, x: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        return jnp.mean(state.apply_fn({"params": params}, x) ** 2)

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


def test_a_linen_train_state_has_replicated_parameters_and_a_divided_optimizer():
    """Its leaf (10,) does not divide: its moments are whole."""
    tx = optax.adam(1e-2)
    state, shardings = linen_state(tx)

    def unique_step(state: Any, x: jax.Array) -> Any:
        return linen_step(state, x)

    step = jax.jit(unique_step, donate_argnums=0, out_shardings=shardings)
    with compilations() as compiled:
        for _ in range(4):
            state = step(state, batch_on(make_mesh(data=8), rows(16, 16)))
    assert compiled["unique_step"] == 1
    assert jfsdp.shardings(state) == shardings
    assert {x.sharding.spec for x in jax.tree.leaves(state.params)} == {P()}
    moments = {path: copies(x) for path, x in leaves(state.opt_state[0].mu).items()}
    assert moments == {
        "['fc1']['bias']": 1,
        "['fc1']['kernel']": 1,
        "['fc2']['bias']": 8,
        "['fc2']['kernel']": 1,
    }
    plain = MLP()
    params = plain.init(KEY(0), jnp.ones((1, 16)))["params"]
    expected = TrainState.create(apply_fn=plain.apply, params=params, tx=tx)
    for _ in range(4):
        expected = jax.jit(linen_step)(expected, rows(16, 16))
    for got, wanted in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
