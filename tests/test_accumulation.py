"""`jfsdp.value_and_grad` of NNX modules: gradients over microbatches are those of one batch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    assert_close,
    auto,
    batch_on,
    compilations,
    explicit_set,
    linears,
    make_mesh,
    repeated,
    rows,
    train,
    uneven_weights,
)
from jax.sharding import PartitionSpec as P

import jfsdp

EVERY_SYNC = pytest.mark.parametrize("sync", ["every", "last"])
COUNTS = pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
MESHES = pytest.mark.parametrize("sizes", [{"S": 8}, {"R": 2, "S": 4}], ids=["S8", "R2xS4"])


def weighted(model: Any, x: Any, weights: Any) -> tuple[jax.Array, jax.Array]:
    """The sum of the rows' losses by their weights, and the sum of the weights."""
    each = jnp.mean(model(x).astype(jnp.float32) ** 2, axis=-1)
    while each.ndim > 1:
        each = each.mean(-1)
    return jnp.sum(each * weights), jnp.sum(weights)


def mean(model: Any, x: Any) -> jax.Array:
    return jnp.mean(model(x).astype(jnp.float32) ** 2)


def mean_of_weighted(model: Any, x: Any, weights: Any) -> jax.Array:
    """What `weighted` says of one batch."""
    total, weight = weighted(model, x, weights)
    return total / weight


@functools.cache
def reference(name: str) -> tuple[Any, Any]:
    """The loss and gradients of the unsharded model on one batch."""
    case = models.CASES[name]
    both = nnx.value_and_grad(mean_of_weighted)
    return nnx.jit(both)(case.make(), repeated(case.batch), uneven_weights())


# --------------------------------------------------------------------------------------------------
# Equal to one batch


@MESHES
@COUNTS
@EVERY_SYNC
def test_masked_means_are_those_of_one_batch(sizes, microbatches, sync):
    """With unequal weights, and a bias that no mesh divides."""
    case, mesh = models.CASES["mlp"], make_mesh(**sizes)
    both = jfsdp.value_and_grad(weighted, microbatches=microbatches, sync=sync)
    x, weights = batch_on(mesh, repeated(case.batch)), batch_on(mesh, uneven_weights())
    loss, grads = nnx.jit(both)(case.sharded(mesh), x, weights)
    expected, expected_grads = reference("mlp")
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert_close(grads, expected_grads)


@EVERY_SYNC
@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.slow) for n in ("attention", "tied")), "scanned"]
)
def test_every_kind_of_model_is_as_on_one_batch(name, sync):
    case, mesh = models.CASES[name], make_mesh(R=2, S=4)
    both = jfsdp.value_and_grad(weighted, microbatches=4, sync=sync)
    loss, grads = nnx.jit(both)(case.sharded(mesh), repeated(case.batch), uneven_weights())
    expected, expected_grads = reference(name)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert_close(grads, expected_grads, rtol=1e-5, atol=1e-6)


@EVERY_SYNC
@pytest.mark.parametrize("mesh_of", [auto, explicit_set], ids=["auto", "explicit_set"])
def test_it_runs_beside_a_tensor_axis(mesh_of, sync):
    case = models.CASES["mlp"]
    with mesh_of(S=4, T=2) as mesh:
        dims = jfsdp.DataParallelMeshDims(shard="S")
        model = case.sharded(mesh, dp_mesh_dims=dims)
        both = jfsdp.value_and_grad(weighted, microbatches=2, sync=sync)
        x, weights = jnp.asarray(repeated(case.batch)), uneven_weights()
        if mesh_of is explicit_set:
            x, weights = (jax.device_put(a, jax.NamedSharding(mesh, P("S"))) for a in (x, weights))
        loss, grads = nnx.jit(both)(model, x, weights)
    expected, expected_grads = reference("mlp")
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert_close(jax.device_get(grads), expected_grads)


@EVERY_SYNC
@pytest.mark.parametrize("reshard", [True, False])
def test_the_users_remat_and_either_reshard(sync, reshard):
    mesh = make_mesh(R=2, S=4)
    plain = models.Stack(3, 16, nnx.Rngs(0), remat=True)
    x = rows(32, 16)
    expected = nnx.jit(nnx.value_and_grad(mean))(plain, x)
    model = jfsdp.shard(plain, mesh, units=models.Block, reshard_after_forward=reshard)
    both = jfsdp.value_and_grad(mean, microbatches=4, sync=sync)
    loss, grads = nnx.jit(both)(model, x)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    assert_close(grads, expected[1])


def test_one_device_accumulates_too():
    case, mesh = models.CASES["mlp"], make_mesh(S=1)
    both = jfsdp.value_and_grad(weighted, microbatches=4)
    loss, grads = nnx.jit(both)(case.sharded(mesh), repeated(case.batch), uneven_weights())
    expected, expected_grads = reference("mlp")
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert_close(grads, expected_grads)


def test_a_mean_of_means_is_what_a_scalar_loss_gives():
    """And the sum with its weight what it does not."""
    model = jfsdp.shard(linears(1, 8), make_mesh(S=8))
    x, weights = rows(64, 8), uneven_weights()
    apart = jfsdp.value_and_grad(lambda m, x, w: mean_of_weighted(m, x, w + 1e-3), microbatches=2)
    exact = jfsdp.value_and_grad(lambda m, x, w: weighted(m, x, w + 1e-3), microbatches=2)
    expected = mean_of_weighted(linears(1, 8), x, weights + 1e-3)
    np.testing.assert_allclose(nnx.jit(exact)(model, x, weights)[0], expected, rtol=1e-6)
    assert abs(nnx.jit(apart)(model, x, weights)[0] - expected) > 1e-3


# --------------------------------------------------------------------------------------------------
# In a training step


@EVERY_SYNC
def test_a_step_trains_as_on_one_batch_and_compiles_once(sync):
    mesh, x = make_mesh(R=2, S=4), rows(32, 16)
    expected = train(models.CASES["mlp"].make(), x, tx=optax.sgd(0.1), steps=3)
    model = models.CASES["mlp"].sharded(mesh)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> jax.Array:
        loss, grads = jfsdp.value_and_grad(mean, microbatches=4, sync=sync)(model, x)
        optimizer.update(model, grads)
        return loss

    with compilations() as counts:
        losses = [float(step(model, optimizer, x)) for _ in range(3)]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert counts["step"] == 1


@pytest.mark.parametrize("tracked", [True, False])
@EVERY_SYNC
def test_it_runs_in_the_users_own_shard_map(tracked, sync):
    case, mesh = models.CASES["mlp"], make_mesh(R=2, S=4)
    graphdef, state = nnx.split(case.sharded(mesh))
    specs = jax.tree.map(lambda x: x.sharding.spec, state)
    both = jfsdp.value_and_grad(weighted, microbatches=2, sync=sync)

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(specs, P(("R", "S")), P(("R", "S"))),
        out_specs=(P(), specs),
        check_vma=tracked,
    )
    def step(state: Any, x: Any, weights: Any) -> Any:
        return both(nnx.merge(graphdef, state), x, weights)

    loss, grads = step(state, jnp.asarray(repeated(case.batch)), uneven_weights())
    expected, expected_grads = reference("mlp")
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert_close(grads, expected_grads)


# --------------------------------------------------------------------------------------------------
# In which dtype


@EVERY_SYNC
def test_gradients_of_a_narrow_parameter_are_added_up_in_reduce_dtype(sync):
    """256 and seven times 1 are 263, in bfloat16 264; added up in bfloat16 they would stay 256."""
    model = nnx.Linear(1, 8, use_bias=False, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    policy = jfsdp.MixedPrecisionPolicy(reduce_dtype=jnp.float32)
    jfsdp.shard(model, make_mesh(S=8), mp_policy=policy)
    x = jnp.zeros((64, 1), jnp.bfloat16).at[:8].set(1).at[0].set(256)  # the rows of one device

    def total(model: Any, x: Any) -> tuple[jax.Array, float]:
        return jnp.sum(model(x).astype(jnp.float32)), 1 / 64

    _, grads = nnx.jit(jfsdp.value_and_grad(total, microbatches=8, sync=sync))(model, x)
    assert grads.kernel.dtype == jnp.bfloat16
    np.testing.assert_array_equal(grads.kernel[...].astype(jnp.float32), 264)


@EVERY_SYNC
def test_small_gradients_survive_a_reduction_in_float16(sync):
    """Each device has 2.5e-8 a microbatch: 0 in float16, if FSDP2's division did not come after the sum."""
    model = nnx.Linear(1, 8, use_bias=False, rngs=nnx.Rngs(0))
    policy = jfsdp.MixedPrecisionPolicy(reduce_dtype=jnp.float16)
    jfsdp.shard(model, make_mesh(S=8), mp_policy=policy)
    x = jnp.full((16, 1), 2.5e-8 * 16)

    def total(model: Any, x: Any) -> tuple[jax.Array, float]:
        return jnp.sum(model(x)), 1 / 16

    _, grads = nnx.jit(jfsdp.value_and_grad(total, microbatches=2, sync=sync))(model, x)
    np.testing.assert_allclose(grads.kernel[...] / 16, 16 * 2.5e-8, rtol=0.25)


class Late(nnx.Module):
    """Two layers, of which the second is used where `late` says so."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.second = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: Any, late: Any) -> Any:
        x = self.first(x)
        return jnp.where(late[:, None], self.second(x), x)


@EVERY_SYNC
def test_a_parameter_that_the_last_microbatch_alone_uses(sync):
    """B27: of float32 from the first, a quarter of what it is where all use it."""
    mesh = make_mesh(S=8)
    policy = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)
    model = jfsdp.shard(Late(nnx.Rngs(0)), mesh, mp_policy=policy)
    x = jnp.tile(rows(8, 8)[:, None], (1, 4, 1)).reshape(32, 8)  # each device's row, four times

    def loss(model: Any, x: Any, late: Any) -> jax.Array:
        return jnp.mean(model(x, late).astype(jnp.float32) ** 2)

    both = nnx.jit(jfsdp.value_and_grad(loss, microbatches=4, sync=sync))
    _, once = both(model, x, jnp.arange(32) % 4 == 3)
    _, always = both(model, x, jnp.ones(32, bool))
    assert {leaf.dtype for leaf in jax.tree.leaves(once)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(once.second.kernel[...], always.second.kernel[...] / 4, rtol=1e-6)
    assert float(jnp.abs(once.second.kernel[...]).max()) > 0


# --------------------------------------------------------------------------------------------------
# What is differentiated


@EVERY_SYNC
def test_only_the_selected_parameters_are_differentiated_and_reduced(sync):
    mesh = make_mesh(S=8)
    model = jfsdp.shard(linears(4, 16), mesh, units=nnx.Linear)
    last = lambda path, _: path[:2] == ("layers", 3)  # noqa: E731
    both = jfsdp.value_and_grad(mean, microbatches=2, sync=sync, wrt=last)
    step = nnx.jit(both)
    _, grads = step(model, rows(32, 16))
    _, expected = nnx.value_and_grad(mean)(linears(4, 16), rows(32, 16))
    assert [path for path, _ in nnx.to_flat_state(grads)] == [("layers", 3, "kernel")]
    np.testing.assert_allclose(
        grads.layers[3].kernel[...], expected.layers[3].kernel[...], rtol=1e-5, atol=1e-6
    )
    report = jfsdp.inspect(step, model, rows(32, 16))
    assert report.count("reduce-scatter") == (2 if sync == "every" else 1)


def test_a_variable_that_is_no_units_is_differentiated_too():
    class Scaled(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.linear = nnx.Linear(8, 8, rngs=rngs)
            self.scale = Scale(jnp.ones(8))

        def __call__(self, x: Any) -> Any:
            return self.linear(x) * self.scale[...][None]

    model = jfsdp.shard(Scaled(nnx.Rngs(0)), make_mesh(R=2, S=4))
    both = jfsdp.value_and_grad(mean, microbatches=2, wrt=(nnx.Param, Scale))
    _, grads = nnx.jit(both)(model, rows(32, 8))
    everything = nnx.DiffState(0, (nnx.Param, Scale))
    _, expected = nnx.value_and_grad(mean, argnums=everything)(Scaled(nnx.Rngs(0)), rows(32, 8))
    assert_close(grads, expected)


class Scale(nnx.Variable):
    """Trained, but no `nnx.Param`."""


# --------------------------------------------------------------------------------------------------
# Parameters that are not sharded like the others


class Mixed(nnx.Module):
    """A dense layer, a table that jfsdp leaves alone, and an expert on each device of an axis."""

    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(16, 16, rngs=rngs)
        self.table = nnx.Param(
            rngs.normal((8, 16)), out_sharding=("data", None), eager_sharding=False
        )
        self.experts = nnx.Param(
            rngs.normal((2, 16, 16)), out_sharding=("expert", None, None), eager_sharding=False
        )

    def __call__(self, x: Any) -> Any:
        x = jnp.tanh(self.dense(x)) + self.table.sum(0, keepdims=True)
        return x @ self.experts[0]  # this device's


@EVERY_SYNC
def test_ignored_and_expert_parameters_have_the_gradients_of_the_ordinary_call(sync):
    mesh = make_mesh(data=4, expert=2)
    experts = jfsdp.DataParallelMeshDims(shard="data")
    model = jfsdp.shard(
        Mixed(nnx.Rngs(0)),
        mesh,
        dp_mesh_dims=jfsdp.DataParallelMeshDims(shard=("data", "expert")),
        ignored_params="table",
        shard_placement_fn=lambda path, _: (1, experts) if path == "experts" else None,
    )
    x = rows(64, 16)
    expected_loss, expected = nnx.jit(nnx.value_and_grad(mean))(model, x)
    loss, grads = nnx.jit(jfsdp.value_and_grad(mean, microbatches=4, sync=sync))(model, x)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert_close(grads, expected, rtol=1e-5, atol=1e-6)
    for got, parameter in zip(
        jax.tree.leaves(grads), jax.tree.leaves(nnx.state(model, nnx.Param)), strict=True
    ):
        assert got.sharding.is_equivalent_to(parameter.sharding, got.ndim)
