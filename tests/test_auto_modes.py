"""Auto partitioning: gradients of every order and kind, remat, and forwards that no region holds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import make_mesh
from jax.sharding import PartitionSpec as P
from models import CASES, Block, Stack
from test_parity import arrays, loss_fn, mesh_and_dims

import jfsdp

BATCH = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
BFLOAT16 = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)


def stack(depth: int = 2, remat: bool = False, **settings) -> Stack:
    settings = {"units": Block, "partitioning": "auto", **settings}
    return jfsdp.shard(Stack(depth, 64, nnx.Rngs(0), remat), make_mesh(fsdp=8), **settings)


SLOW = [("attention", "S8"), *((case, "R2xS4") for case in CASES)]  # "tied" has attention as well


@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        *((case, "S8") for case in CASES if case != "attention"),
        *(pytest.param(*both, marks=pytest.mark.slow) for both in SLOW),
    ],
)
def test_loss_and_gradients_equal_those_of_manual_partitioning(case, mesh):
    mesh, dims = mesh_and_dims(mesh, "auto")
    results = {}
    for partitioning in ("manual", "auto"):
        model = CASES[case].sharded(mesh, dp_mesh_dims=dims, partitioning=partitioning)
        loss, grads = nnx.jit(nnx.value_and_grad(loss_fn))(model, CASES[case].batch)
        results[partitioning] = float(loss), arrays(grads), grads
    (manual_loss, manual, _), (auto_loss, auto, grads) = results["manual"], results["auto"]
    assert abs(auto_loss - manual_loss) < 1e-5
    assert auto.keys() == manual.keys()
    for name, expected in manual.items():
        np.testing.assert_allclose(auto[name], expected, rtol=0, atol=1e-5, err_msg=name)
    laid = jax.tree.map(lambda g, p: g.sharding == p.sharding, grads, nnx.state(model, nnx.Param))
    assert all(jax.tree.leaves(laid))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_forward_mode_and_second_derivatives(jit):
    graph, state = nnx.split(stack())
    plain_graph, plain_state = nnx.split(Stack(2, 64, nnx.Rngs(0)))

    def derivatives(graph, state):
        def loss(state):
            return loss_fn(nnx.merge(graph, state), BATCH)

        def along(state):
            return jax.jvp(loss, (state,), (state,))[1]

        return along(state), jax.grad(along)(state), jax.jvp(jax.grad(loss), (state,), (state,))[1]

    expected = derivatives(plain_graph, plain_state)
    compute = jax.jit(derivatives, static_argnums=0) if jit else derivatives
    for found, wanted in zip(
        jax.tree.leaves(compute(graph, state)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


def text_of(function, *args) -> str:
    return nnx.jit(function).lower(*args).lowered.as_text()


def casts(function, *args) -> int:
    """How often a weight is cast to bfloat16, which is how often it is gathered."""
    return text_of(function, *args).count("tensor<64x64xf32>) -> tensor<64x64xbf16>")


@pytest.mark.parametrize(("reshard", "gathers"), [(True, 2), (None, 2), (False, 1)])
def test_weights_are_gathered_again_for_the_backward(reshard, gathers):
    step = nnx.value_and_grad(loss_fn, argnums=(0, 1))
    model = stack(mp_policy=BFLOAT16, reshard_after_forward=reshard)
    assert casts(step, model, BATCH) == gathers * 2


def test_a_remat_round_each_unit_gathers_again_by_itself():
    step = nnx.value_and_grad(loss_fn, argnums=(0, 1))
    model = stack(remat=True, mp_policy=BFLOAT16, reshard_after_forward=False)
    assert casts(step, model, BATCH) == 2 * 2


def test_frozen_weights_are_gathered_again_too():
    step = nnx.grad(loss_fn, argnums=1)
    again, kept = (
        casts(step, stack(mp_policy=BFLOAT16, reshard_after_forward=reshard), BATCH)
        for reshard in (True, False)
    )
    assert (again, kept) == (4, 2)


@pytest.mark.parametrize("units", [(), Block], ids=["in the root", "round units"])
def test_the_users_remat_inside_of_a_unit_still_recomputes(units):
    step = nnx.value_and_grad(loss_fn, argnums=(0, 1))

    def matmuls(remat: bool) -> int:
        model = stack(remat=remat, units=units, reshard_after_forward=True)
        return text_of(step, model, BATCH).count("stablehlo.dot_general")

    plain = text_of(step, Stack(2, 64, nnx.Rngs(0), remat=True), BATCH)
    assert matmuls(remat=True) == plain.count("stablehlo.dot_general") == 8
    assert matmuls(remat=False) == 6


@pytest.mark.parametrize("axes", ["auto", "explicit_set"])
@pytest.mark.parametrize("size", [1, 3])
def test_a_batch_that_does_not_divide_is_trained(size, axes):
    mesh, dims = mesh_and_dims("R2xS4", axes)
    batch = CASES["mlp"].batch[:size]
    plain = CASES["mlp"].make()
    expected_loss, expected = nnx.value_and_grad(loss_fn)(plain, batch)
    with jax.set_mesh(mesh):
        model = CASES["mlp"].sharded(mesh, dp_mesh_dims=dims, partitioning="auto")
        loss, grads = nnx.jit(nnx.value_and_grad(loss_fn))(model, batch)
    assert abs(float(loss) - float(expected_loss)) < 1e-6
    for name, gradient in arrays(grads).items():
        np.testing.assert_allclose(gradient, arrays(expected)[name], rtol=0, atol=1e-6)


def test_a_call_outside_of_jit_equals_the_unsharded_model():
    for model in (stack(), stack(units=())):
        for batch in (BATCH, jnp.asarray(BATCH), BATCH[:3]):
            np.testing.assert_allclose(
                model(batch), Stack(2, 64, nnx.Rngs(0))(batch), rtol=0, atol=1e-6
            )


# --------------------------------------------------------------------------------------------------
# Forwards that a region runs otherwise, or not at all


class Dropout(nnx.Module):
    """In a region each device has its own masks."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(64, 64, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.linear(x))


class Similarity(nnx.Module):
    """Each example against every other one of the batch."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x):
        x = self.linear(x)
        return nnx.softmax(x @ x.T, axis=0)


class Table(nnx.Module):
    """The first of two arrays is no batch, but divides by the devices like one."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, arrays):
        table, x = arrays
        return self.linear(x) @ table.T


class OwnShardMap(nnx.Module):
    """A ring over the data-parallel axis."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x):
        def shift(x):
            return jax.lax.ppermute(x, "fsdp", [(i, (i + 1) % 8) for i in range(8)])

        ring = jax.shard_map(shift, mesh=make_mesh(fsdp=8), in_specs=P("fsdp"), out_specs=P("fsdp"))
        return ring(self.linear(x))


@pytest.mark.parametrize("kind", [Dropout, Similarity, Table, OwnShardMap])
def test_forwards_that_a_region_runs_otherwise_equal_those_of_the_unsharded_model(kind):
    step = nnx.jit(nnx.value_and_grad(loss_fn))
    batch = (BATCH[:8], BATCH) if kind is Table else BATCH
    expected_loss, expected = step(kind(nnx.Rngs(0)), batch)
    model = jfsdp.shard(kind(nnx.Rngs(0)), make_mesh(fsdp=8), partitioning="auto")
    loss, grads = step(model, batch)
    assert abs(float(loss) - float(expected_loss)) < 1e-6
    for name, gradient in arrays(grads).items():
        np.testing.assert_allclose(gradient, arrays(expected)[name], rtol=0, atol=1e-5)
