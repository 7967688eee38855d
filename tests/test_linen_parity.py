"""A sharded Linen model trains as the same model unsharded, and as its NNX twin."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import linen_models
import models
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from helpers import batch_on, make_mesh, rows
from hypothesis import given, settings
from hypothesis import strategies as st
from linen_models import CASES, TrainState, assert_same, fast_compiler, gradients, init, nested
from test_parity import AXES, MESHES, OPTIMIZER, STEPS, mesh_and_dims

import jfsdp
from jfsdp.inspect import Report


@pytest.fixture(scope="module", autouse=True)
def compiler():
    with fast_compiler():
        yield


QUICK = {
    ("S8", "auto", "tied"),  # it holds an attention block
    ("S8", "auto", "conv"),
    ("R2xS4", "explicit_set", "mlp"),
    ("R2xS4", "explicit_set", "scanned"),
}


def sine_loss(y: jax.Array) -> jax.Array:
    """Neither linear nor symmetric in the outputs."""
    return jnp.mean(jnp.sin(y.astype(jnp.float32)) ** 2)


def train_step(model: Any, state: TrainState, batch: Any) -> tuple[TrainState, jax.Array, Any]:
    """An ordinary step: what `apply` mutates goes into the next state."""

    def loss(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, **state.others}
        y, updates = model.apply(variables, batch, mutable=list(state.others))
        return sine_loss(y), updates

    (value, others), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, others=others), value, grads


def train(model: Any, make: Callable[[], TrainState], batch: Any, steps: int = STEPS) -> Any:
    """Losses, the first step's gradients, the state afterwards."""
    step = jax.jit(functools.partial(train_step, model))
    state, losses, first = make(), [], None
    for _ in range(steps):
        state, loss, grads = step(state, batch)
        first = grads if first is None else first
        losses.append(float(loss))
    return losses, first, (state.params, state.others)


def create(model: Any, batch: Any) -> TrainState:
    return linen_models.create(model, batch, OPTIMIZER)


def filled(abstract: TrainState) -> TrainState:
    """A train state with parameters that no two layers share; numpy costs no compilation."""
    random = np.random.default_rng(0)

    def parameter(path: Any, leaf: Any) -> np.ndarray:
        near = float("scale" in str(path[-1]))
        return (near + random.normal(size=leaf.shape) / 10).astype(leaf.dtype)

    params = jax.tree_util.tree_map_with_path(parameter, abstract.params)
    others = jax.tree.map(lambda x: np.full(x.shape, 0.5, x.dtype), abstract.others)
    moments = OPTIMIZER.init(params)
    return abstract.replace(step=np.int32(0), params=params, others=others, opt_state=moments)


@functools.cache
def reference(name: str) -> Any:
    """The same training, unsharded."""
    model, batch = CASES[name].make(), CASES[name].batch
    make = functools.partial(filled, jax.eval_shape(functools.partial(create, model, batch)))
    return train(model, make, batch)


def combinations():
    """Every mesh, axis type and model; the quick part has each model once."""
    for mesh in MESHES:
        for axes in AXES:
            for case in CASES:
                marks = () if (mesh, axes, case) in QUICK else (pytest.mark.slow,)
                yield pytest.param(mesh, axes, case, marks=marks, id=f"{mesh}-{axes}-{case}")


@pytest.mark.parametrize(("mesh", "axes", "case"), list(combinations()))
def test_training_equals_the_unsharded_model(mesh, axes, case):
    mesh, dims = mesh_and_dims(mesh, axes)
    expected_losses, expected_grads, expected_state = reference(case)
    with jax.set_mesh(mesh) if axes == "explicit_set" else contextlib.nullcontext():
        model, batch = CASES[case].sharded(mesh, dp_mesh_dims=dims), CASES[case].batch
        abstract = jfsdp.init(functools.partial(create, model, batch), abstract=True)
        state = jax.device_put(filled(abstract), jfsdp.shardings(abstract))
        losses, grads, state = train(model, lambda: state, batch)
    assert_same(grads, expected_grads, 1e-6)
    np.testing.assert_allclose(losses[0], expected_losses[0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=1e-5)
    assert_same(state, expected_state, 1e-5)


def test_training_moves_the_parameters():
    """So that the comparison above is one."""
    model, batch = CASES["mlp"].make(), CASES["mlp"].batch
    before = filled(jax.eval_shape(functools.partial(create, model, batch))).params
    moved = jax.tree.map(lambda a, b: abs(a - b).max(), before, reference("mlp")[2][0])
    assert all(distance > 1e-4 for distance in jax.tree.leaves(moved)), moved


# --------------------------------------------------------------------------------------------------
# Shapes and meshes that nobody chose


class Wide(nn.Module):
    """Two layers of widths that need not divide by anything."""

    widths: tuple[int, int]

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.widths[1])(jnp.tanh(nn.Dense(self.widths[0])(x)))


SIZES = st.sampled_from([{"S": 1}, {"S": 2}, {"S": 8}, {"R": 2, "S": 4}, {"R": 4, "S": 2}])
WIDTH = st.integers(1, 17)


@settings(max_examples=4)
@given(sizes=SIZES, widths=st.tuples(WIDTH, WIDTH), inputs=WIDTH, per_device=st.integers(1, 2))
def test_loss_and_gradients_are_exact_for_any_shape_on_any_mesh(sizes, widths, inputs, per_device):
    mesh = make_mesh(**sizes)
    plain = Wide(widths)
    x = rows(per_device * mesh.size, inputs)
    variables = init(plain, x)
    expected = gradients(plain, variables, x)
    model = jfsdp.shard(plain, mesh, units=nn.Dense)
    got = gradients(model, init(model, x), batch_on(mesh, x))
    assert_same(got, expected, 1e-5)


# --------------------------------------------------------------------------------------------------
# Beside NNX


def losses_and_report(step: Any, state: tuple, batch: Any) -> tuple[list[float], Report]:
    """Losses of 3 steps, and what a step communicates."""
    report, losses = jfsdp.inspect(step, *state, batch), []
    for _ in range(3):
        results = step(*state, batch)
        state = results[:-1]
        losses.append(float(results[-1]))
    return losses, report


def nnx_run(model: Any, batch: Any) -> tuple[list[float], Report]:
    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda m, x: sine_loss(m(x)))(model, batch)
        optimizer.update(model, grads)
        return model, optimizer, loss

    state = (model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param))
    return losses_and_report(step, state, batch)


def linen_run(model: Any, variables: Any, batch: Any) -> tuple[list[float], Report]:
    @jax.jit
    def step(state, batch):
        return train_step(model, state, batch)[:2]

    jax.eval_shape(functools.partial(init, model), batch)  # the plan
    parts = {"params": variables["params"], "others": variables["others"], "tx": optax.sgd(0.1)}
    state = TrainState.create(apply_fn=model.apply, **parts)
    return losses_and_report(step, (state,), batch)


SLOW_TWINS = ("attention", "conv", "tied")


@pytest.mark.parametrize(
    "case", ["mlp", "scanned", *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW_TWINS)]
)
def test_linen_and_nnx_communicate_the_same_and_lose_the_same(case):
    mesh, batch = make_mesh(R=2, S=4), CASES[case].batch
    twin = models.CASES[case].sharded(mesh)
    statistics = nested(twin, nnx.BatchStat)
    others = {"batch_stats": statistics} if statistics else {}
    variables = {"params": nested(twin, nnx.Param), "others": others}
    got, report = linen_run(CASES[case].sharded(mesh), variables, batch)
    losses, expected = nnx_run(twin, batch)
    assert report.totals == expected.totals
    np.testing.assert_allclose(got, losses, rtol=0, atol=1e-6)
