"""Optimizers of whole matrices on sharded ones: muon and galore update as if nothing were sharded."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import linen_models
import models
import numpy as np
import optax
import optax.contrib
import pytest
from flax import linen as nn
from flax import nnx
from helpers import (
    assert_close,
    assert_spec,
    batch_on,
    compilations,
    local_shape,
    make_mesh,
    mean_square,
    rows,
)
from linen_models import TrainState, create

import jfsdp

MESHES = [{"S": 8}, {"R": 2, "S": 4}]
every_mesh = pytest.mark.parametrize("sizes", MESHES, ids=["S8", "R2xS4"])

# Newton-Schulz iterations amplify roundings: a tenth of the steps, which are of size 0.02.
TOLERANCE = {"rtol": 0, "atol": 2e-5}


def muon(**settings: Any) -> optax.GradientTransformation:
    return optax.contrib.muon(0.02, **settings)


def square() -> nnx.Linear:
    return nnx.Linear(16, 16, rngs=nnx.Rngs(0))


@nnx.jit
def unique_step(model: Any, optimizer: Any, x: jax.Array) -> None:
    optimizer.update(model, nnx.grad(mean_square)(model, x))


def trained(model: Any, tx: Any, x: jax.Array, **settings: Any) -> Any:
    """Three steps, in place; the optimizer."""
    optimizer = (
        jfsdp.init_optimizer(tx, model, **settings)
        if settings
        else nnx.Optimizer(model, tx, wrt=nnx.Param)
    )
    for _ in range(3):
        unique_step(model, optimizer, x)
    return optimizer


OPTIMIZERS = {
    "muon": muon,
    "muon, decayed and adaptive": lambda: muon(weight_decay=0.1, adaptive=True),
    "galore": lambda: optax.contrib.galore(0.02, rank=4),
}


@pytest.mark.parametrize(
    "name", ["muon", *(pytest.param(n, marks=pytest.mark.slow) for n in list(OPTIMIZERS)[1:])]
)
@every_mesh
def test_a_sharded_matrix_is_updated_as_a_whole_one(sizes: Any, name: str):
    """K: (16,16); the bias, which is no matrix, by adam."""
    mesh = make_mesh(**sizes)
    model = jfsdp.shard(square(), mesh)
    assert_spec(model.kernel, "S")
    trained(model, OPTIMIZERS[name](), batch_on(mesh, rows(16, 16)))
    plain = square()
    trained(plain, OPTIMIZERS[name](), rows(16, 16))
    assert_close(nnx.as_pure(nnx.state(model)), nnx.as_pure(nnx.state(plain)), **TOLERANCE)
    assert np.abs(plain.kernel[...] - square().kernel[...]).max() > 100 * TOLERANCE["atol"]


def test_its_momentum_is_sharded_and_stays_in_place():
    """Three steps compile once."""
    mesh = make_mesh(S=8)
    model = jfsdp.shard(square(), mesh)
    optimizer = nnx.Optimizer(model, muon(), wrt=nnx.Param)
    before = jfsdp.shardings(nnx.state((model, optimizer)))
    with compilations() as compiled:
        for _ in range(3):
            unique_step(model, optimizer, batch_on(mesh, rows(16, 16)))
    assert compiled["unique_step"] == 1
    assert jfsdp.shardings(nnx.state((model, optimizer))) == before
    matrices = [x for x in jax.tree.leaves(nnx.state(optimizer)) if x.ndim == 2]
    assert {local_shape(x) for x in matrices} == {(2, 16)}


def test_a_momentum_that_is_sharded_more_finely_than_its_matrix_gives_the_same_update():
    mesh = make_mesh(R=2, S=4)
    model = jfsdp.shard(square(), mesh)
    optimizer = trained(model, muon(), batch_on(mesh, rows(16, 16)), shard_over="R")
    matrices = [x for x in jax.tree.leaves(nnx.state(optimizer)) if x.ndim == 2]
    assert {local_shape(x) for x in matrices} == {(2, 16)}
    assert local_shape(model.kernel[...]) == (4, 16)
    plain = square()
    trained(plain, muon(), rows(16, 16))
    assert_close(nnx.as_pure(nnx.state(model)), nnx.as_pure(nnx.state(plain)), **TOLERANCE)


# --------------------------------------------------------------------------------------------------
# Stacks: the layer axis is no part of the matrix


def dimensions(params: Any) -> Any:
    """Kernels of a stack (layers, in, out), those of the head (in, out), and what is no matrix."""

    def of(path: Any, leaf: Any) -> Any:
        names = jax.tree_util.keystr(path)
        if "kernel" not in names:
            return None
        return optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)

    return jax.tree_util.tree_map_with_path(of, params)


def test_the_layers_of_a_scanned_stack_are_updated_one_by_one():
    mesh = make_mesh(S=8)
    model = models.CASES["scanned"].sharded(mesh)
    assert_spec(model.layers.up.kernel, None, None, "S")
    tx = muon(muon_weight_dimension_numbers=dimensions)
    trained(model, tx, batch_on(mesh, rows(16, 16)))
    plain = models.Scanned(nnx.Rngs(0))
    trained(plain, tx, rows(16, 16))
    assert_close(nnx.as_pure(nnx.state(model)), nnx.as_pure(nnx.state(plain)), **TOLERANCE)


@pytest.mark.slow
def test_the_update_of_a_stack_is_that_of_each_of_its_layers():
    mesh = make_mesh(S=8)
    model = models.CASES["scanned"].sharded(mesh)
    optimizer = nnx.Optimizer(model, muon(muon_weight_dimension_numbers=dimensions), wrt=nnx.Param)
    grads = jax.jit(nnx.grad(mean_square))(model, batch_on(mesh, rows(16, 16)))
    before = np.array(model.layers.up.kernel[...])
    nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads) and None)(
        model, optimizer, grads
    )
    after = np.array(model.layers.up.kernel[...])
    one = muon()
    for layer in (0, 7):
        params = {"w": jnp.asarray(before[layer])}
        gradient = {"w": jnp.asarray(np.array(grads.layers.up.kernel[...])[layer])}
        updates, _ = one.update(gradient, one.init(params), params)
        np.testing.assert_allclose(after[layer], before[layer] + updates["w"], **TOLERANCE)


# --------------------------------------------------------------------------------------------------
# Linen


@jax.jit
def linen_step(state: TrainState, x: jax.Array) -> TrainState:
    def loss(params: Any) -> jax.Array:
        return jnp.mean(state.apply_fn({"params": params}, x) ** 2)

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(nn.Dense(16), id="matrix"),
        pytest.param(linen_models.Scanned(), id="stack", marks=pytest.mark.slow),
    ],
)
def test_a_linen_train_state_is_updated_as_unsharded(make: Any):
    mesh = make_mesh(S=8)
    tx = muon(muon_weight_dimension_numbers=dimensions)
    model = jfsdp.shard(make, mesh)
    state = jfsdp.init(lambda: create(model, rows(16, 16), tx))
    plain = create(make, rows(16, 16), tx)
    shardings = jfsdp.shardings(state)
    for _ in range(3):
        state = linen_step(state, batch_on(mesh, rows(16, 16)))
        plain = linen_step(plain, rows(16, 16))
    linen_models.assert_same(state.params, plain.params, TOLERANCE["atol"])
    assert jfsdp.shardings(state.params) == shardings.params
