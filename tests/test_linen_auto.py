"""Auto partitioning of Linen modules: XLA places the collectives."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from helpers import auto, batch_on, explicit_set, make_mesh, rows
from jax.sharding import PartitionSpec as P
from linen_models import (
    CASES,
    MLP,
    Block,
    abstract,
    assert_same,
    fast_compiler,
    filled,
    init,
    mean_square,
)

import jfsdp

X = rows(16, 16)


@pytest.fixture(scope="module", autouse=True)
def compiler():
    with fast_compiler():
        yield


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(R=2, S=4)


QUICK = {("mlp", auto), ("conv", auto), ("scanned", explicit_set)}


@pytest.mark.parametrize(
    "case, mesh_of",
    [
        pytest.param(case, mesh_of, marks=() if (case, mesh_of) in QUICK else pytest.mark.slow)
        for case in CASES
        for mesh_of in (auto, explicit_set)
        # Flax's own nn.Embed refuses tokens that are typed by Explicit axes.
        if (case, mesh_of) != ("tied", explicit_set)
    ],
)
def test_auto_partitioning_has_the_loss_and_gradients_of_the_unsharded_model(case, mesh_of):
    plain, batch = CASES[case].make(), CASES[case].batch

    def run(model: Any, variables: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            y, updates = model.apply(
                {**variables, "params": params}, batch, mutable=["batch_stats"]
            )
            return jnp.mean(jnp.sin(y.astype(jnp.float32)) ** 2), updates

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"])

    with mesh_of(R=2, S=4) as mesh:
        model = CASES[case].sharded(mesh, partitioning="auto")
        got = run(model, filled(abstract(model, batch)), batch_on(mesh, batch))
    assert_same(got, run(plain, filled(abstract(plain, batch)), batch), 1e-5)


def test_auto_partitioning_writes_no_collective_itself(mesh):
    model = jfsdp.shard(MLP(), mesh, units=nn.Dense, partitioning="auto")
    step = jax.jit(jax.value_and_grad(functools.partial(mean_square, model)))
    assert not jfsdp.inspect(step, abstract(model, X), X, model=model).collectives


def test_auto_partitioning_takes_a_second_derivative(mesh):
    """What a region refuses."""
    model = jfsdp.shard(Block(16), mesh, partitioning="auto")
    expected = filled(abstract(Block(16), X))

    def curvature(model: Any) -> Any:
        grad = lambda v: jax.grad(lambda v: mean_square(model, v, X))(v)  # noqa: E731
        return jax.jit(lambda v: jax.jvp(grad, (v,), (v,))[1])(expected)

    assert_same(curvature(model), curvature(Block(16)), 1e-5)


def test_initial_values_of_auto_partitioning_are_sharded_too(mesh):
    model = jfsdp.shard(MLP(), mesh, partitioning="auto")
    assert init(model, X)["params"]["fc1"]["kernel"].sharding.spec == P(None, "S")
