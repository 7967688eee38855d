"""Train states of Linen: born sharded, and a fixed point of the step."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from helpers import (
    assert_spec,
    auto,
    batch_on,
    compilations,
    explicit,
    explicit_set,
    local_bytes,
    local_shape,
    make_mesh,
    rows,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from linen_models import (
    KEY,
    Scanned,
    TrainState,
    assert_same,
    create,
    fast_compiler,
)

import jfsdp

X = rows(16, 8)


@pytest.fixture(scope="module", autouse=True)
def compiler():
    with fast_compiler():
        yield


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(S=8)


@pytest.mark.parametrize("mesh_of", [auto, explicit, explicit_set])
def test_moments_lie_as_their_parameter_and_the_count_on_the_mesh(mesh_of):
    """B02: w (8,16), adam, in TrainState.create."""
    with mesh_of(S=8) as mesh:
        model: Any = jfsdp.shard(nn.Dense(16, use_bias=False), mesh)
        state = jfsdp.init(lambda: create(model, X, optax.adam(1e-3)))
        adam = state.opt_state[0]
        kernel = state.params["kernel"]
        assert_spec(kernel, None, "S")
        for moment in (adam.mu["kernel"], adam.nu["kernel"]):
            assert moment.sharding == kernel.sharding
            assert local_shape(moment) == (8, 2)
        for scalar in (adam.count, state.step):
            assert scalar.sharding == NamedSharding(kernel.sharding.mesh, P())


@pytest.mark.parametrize("mesh_of", [auto, explicit, explicit_set])
def test_the_train_state_is_a_fixed_point_of_the_step(mesh_of):
    """B13: adam and a dropout key in the state: 4 steps compile once and change no sharding."""

    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dropout(0.5, deterministic=False)(nn.Dense(16)(x))

    with mesh_of(S=8) as mesh:
        model: Any = jfsdp.shard(Noisy(), mesh)

        def make() -> TrainState:
            rngs = {"params": KEY(0), "dropout": KEY(1)}
            parts = {"params": model.init(rngs, X)["params"], "tx": optax.adam(1e-3)}
            return TrainState.create(apply_fn=model.apply, others=KEY(2), **parts)

        @jax.jit
        def unique_step(state: Any, x: jax.Array) -> Any:
            key, now = jax.random.split(state.others)

            def loss(params: Any) -> jax.Array:
                y = state.apply_fn({"params": params}, x, rngs={"dropout": now})
                return jnp.mean(y**2)

            return state.apply_gradients(grads=jax.grad(loss)(state.params), others=key)

        state = jfsdp.init(make)
        before, x = jfsdp.shardings(state), batch_on(mesh, X)
        with compilations() as compiled:
            for _ in range(4):
                state = unique_step(state, x)
        assert compiled["unique_step"] == 1
        assert jfsdp.shardings(state) == before
        assert state.step == 4


@pytest.mark.parametrize("donate", [False, True])
def test_a_train_state_is_jitted_with_its_own_shardings(mesh, donate):
    """`jfsdp.shardings` as in_shardings and out_shardings; a donated state is used up."""
    model: Any = jfsdp.shard(nn.Dense(16), mesh)
    state = jfsdp.init(lambda: create(model, X, optax.adam(1e-3)))

    def step(state: Any, x: jax.Array) -> Any:
        loss = lambda params: jnp.mean(model.apply({"params": params}, x) ** 2)  # noqa: E731
        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    shardings = jfsdp.shardings(state)
    jitted = jax.jit(
        step,
        in_shardings=(shardings, NamedSharding(mesh, P("S"))),
        out_shardings=shardings,
        donate_argnums=0 if donate else (),
    )
    after = jitted(state, X)
    assert jfsdp.shardings(after) == shardings
    assert all(x.is_deleted() == donate for x in jax.tree.leaves(state.params))


def test_an_abstract_train_state_is_that_of_arrays(mesh):
    """B53: the same shapes, dtypes and shardings, nothing allocated."""
    model: Any = jfsdp.shard(Scanned(2), mesh)
    make = functools.partial(create, model, rows(16, 16), optax.adamw(1e-3))
    described, real = jfsdp.init(make, abstract=True), jfsdp.init(make)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(described))
    assert_same(real, described)
    assert jfsdp.shardings(described) == jfsdp.shardings(real)


def test_every_byte_is_on_one_device_only(mesh):
    """B14: Dense(16), adam: parameters, moments and gradients are held once, and nothing is replicated."""
    model: Any = jfsdp.shard(nn.Dense(16), mesh)
    state = jfsdp.init(lambda: create(model, X, optax.adam(1e-3)))

    @jax.jit
    def step(state: Any, x: jax.Array) -> Any:
        loss = lambda params: jnp.mean(model.apply({"params": params}, x) ** 2)  # noqa: E731
        grads = jax.grad(loss)(state.params)
        return state.apply_gradients(grads=grads), grads

    grads = None
    for _ in range(3):
        state, grads = step(state, batch_on(mesh, X))
    adam = state.opt_state[0]
    for array in jax.tree.leaves((state.params, adam.mu, adam.nu, grads)):
        assert local_bytes(array) == array.nbytes
    assert jfsdp.plan(model).replicated == ()


def test_the_plan_lists_what_is_replicated_and_why(mesh):
    """B14: Dense(3): the bias (3,) does not divide by 8."""
    model: Any = jfsdp.shard(nn.Dense(3), mesh)
    bias: Any = model.init(KEY(0), X)["params"]["bias"]
    (row,) = jfsdp.plan(model).replicated
    assert (row.path, row.reason) == ("bias", "no free dimension (3) divides by 8")
    assert local_bytes(bias) == 8 * 12


def test_optimizer_made_outside_of_init_is_laid_by_the_shardings_of_an_abstract_one(mesh):
    """B02: `tx.init` under jit alone puts moments where XLA likes."""
    model: Any = jfsdp.shard(nn.Dense(16), mesh)
    make = functools.partial(create, model, X, optax.adam(1e-3))
    shardings = jfsdp.shardings(jfsdp.init(make, abstract=True))
    state = jax.jit(make, out_shardings=shardings)()
    assert jfsdp.shardings(state) == jfsdp.shardings(jfsdp.init(make))
