"""Numbers that must be those of the unsharded run, on every mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    AUTO,
    EXPLICIT,
    MeshOf,
    assert_close,
    assert_spec,
    auto,
    batch_on,
    both_axis_types,
    both_axis_types_and_partitionings,
    both_partitionings,
    explicit_set,
    gradients,
    leaves,
    make_mesh,
    mlp,
    rows,
)
from jax.sharding import AxisType

import jfsdp

# --------------------------------------------------------------------------------------------------
# Initial values


@pytest.mark.parametrize(
    "mesh_of, sizes",
    [
        (auto, {"S": 1}),
        (auto, {"S": 2}),
        (auto, {"S": 8}),
        (auto, {"R": 2, "S": 4}),
        (explicit_set, {"R": 2, "S": 4}),
    ],
)
def test_initial_values_do_not_depend_on_the_mesh(mesh_of: MeshOf, sizes: dict[str, int]):
    """B31: MLP 64-496-4, the same key: the same parameters to 1e-6."""
    with mesh_of(**sizes) as mesh:
        model = jfsdp.init(lambda: mlp(64, 496, 4), mesh, units=nnx.Linear)
    assert_close(model, mlp(64, 496, 4), rtol=0, atol=1e-6)


@both_axis_types
def test_initial_values_do_not_depend_on_where_shard_is_called(mesh_of: MeshOf):
    """B31: shard inside the function that makes the model, bottom-up."""

    def make() -> Any:
        model = mlp(64, 496, 4)
        for layer in (model.layers[0], model.layers[2], model):
            jfsdp.shard(layer, mesh)
        return model

    with mesh_of(S=8) as mesh:
        model = jfsdp.init(make)
    assert_close(model, mlp(64, 496, 4), rtol=0, atol=1e-6)
    assert_spec(model.layers[0].kernel, None, "S")


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=lambda t: t.name)
def test_initial_values_do_not_depend_on_the_mesh_in_context(axis_type: AxisType):
    """B31: shard inside the function, the mesh taken from `jax.set_mesh`."""
    with jax.set_mesh(make_mesh(axis_type, S=8)):
        model = jfsdp.init(lambda: jfsdp.shard(nnx.Linear(16, 8, rngs=nnx.Rngs(0))))
    assert_close(model, nnx.Linear(16, 8, rngs=nnx.Rngs(0)), rtol=0, atol=1e-6)
    assert_spec(model.kernel, "S")


# --------------------------------------------------------------------------------------------------
# Factors


class Product(nnx.Module):
    """x @ w, w of ones."""

    def __init__(self, *shape: int):
        self.w = nnx.Param(jnp.ones(shape))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w[...]


def mean(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x))


SHARDED = jfsdp.DataParallelMeshDims(shard="S", replicate="R")
COPIED = jfsdp.DataParallelMeshDims(replicate=("R", "S"))


@pytest.mark.parametrize(
    "sizes, dims, width, expected",
    [
        ({"R": 2, "S": 4}, SHARDED, 4, 0.875),
        ({"R": 8, "S": 1}, SHARDED, 4, 0.875),
        ({"R": 1, "S": 1}, SHARDED, 4, 0.875),
        ({"R": 2, "S": 4}, COPIED, 4, 0.875),
        ({"R": 1, "S": 8}, SHARDED, 8, 0.4375),
        ({"R": 2, "S": 4}, SHARDED, 3, 3.5 / 3),
    ],
    ids=["R2xS4", "R8xS1", "S1", "copies_on_8", "S8", "does_not_divide"],
)
@both_axis_types_and_partitionings
def test_gradients_have_no_factor_of_the_mesh(
    mesh_of: MeshOf, partitioning: str, sizes: Any, dims: Any, width: int, expected: float
):
    """B32: x = 0..7, w of ones (1,4), mean(x @ w): 0.875; (1,8): 0.4375. No user-set divide factor yet."""
    with mesh_of(**sizes) as mesh:
        model = jfsdp.shard(Product(1, width), mesh, dp_mesh_dims=dims, partitioning=partitioning)
        loss, grads = gradients(model, batch_on(mesh, jnp.arange(8.0)[:, None]), mean)
        assert loss == 3.5
        np.testing.assert_allclose(grads.w[...], np.full((1, width), expected), rtol=1e-6)


@both_axis_types
def test_gradients_of_the_input_have_no_factor_either(mesh_of: MeshOf):
    """B32: d mean(x @ w) / dx = 1/8 everywhere."""
    with mesh_of(R=2, S=4) as mesh:
        model = jfsdp.shard(Product(1, 4), mesh)
        x = batch_on(mesh, jnp.arange(8.0)[:, None])
        np.testing.assert_array_equal(
            nnx.jit(nnx.grad(mean, argnums=1))(model, x), np.full((8, 1), 0.125)
        )


@both_partitionings
def test_a_gradient_comes_from_the_data_of_all_replicas(partitioning: str):
    """B33: R2xS4, zeros for replica 0 and ones for replica 1: 0.125, one replica alone has 0.25."""
    mesh = make_mesh(R=2, S=4)
    model = jfsdp.shard(Product(4, 4), mesh, partitioning=partitioning)
    x = batch_on(mesh, jnp.repeat(jnp.array([0.0, 1.0]), 4)[:, None] * jnp.ones((1, 4)))
    _, grads = gradients(model, x, mean)
    np.testing.assert_array_equal(grads.w[...], np.full((4, 4), 0.125))


@both_axis_types
def test_replicas_hold_the_same_bits_after_training(mesh_of: MeshOf):
    """B33: after 5 adam steps; each replica saw other data."""
    with mesh_of(R=2, S=4) as mesh:
        model = jfsdp.shard(Product(4, 4), mesh)
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

        @nnx.jit
        def step(model: Any, optimizer: Any, x: jax.Array) -> None:
            optimizer.update(model, nnx.grad(lambda model, x: jnp.mean(model(x) ** 2))(model, x))

        for seed in range(5):
            step(model, optimizer, batch_on(mesh, rows(8, 4, seed)))
        adam = optimizer.opt_state[0]
        arrays = jax.tree.leaves((nnx.state(model), adam.mu, adam.nu))
        assert [array.shape for array in arrays] == [(4, 4)] * 3
        for array in arrays:
            copies: dict[Any, list[np.ndarray]] = {}
            for shard in array.addressable_shards:
                copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
            for values in copies.values():
                assert len(values) >= 2
                assert all(np.array_equal(values[0], other) for other in values[1:])


# --------------------------------------------------------------------------------------------------
# Means


@both_partitionings
def test_a_masked_mean_is_the_global_one(partitioning: str):
    """B35: losses 0..15, the first 8 of them counted: 3.5; means per device, averaged: 1.75."""
    mesh = make_mesh(S=8)
    model = jfsdp.shard(Product(8, 8), mesh, partitioning=partitioning)
    x = batch_on(mesh, jnp.arange(16.0)[:, None] * jnp.ones((1, 8)) / 8)
    mask = batch_on(mesh, jnp.arange(16) < 8)

    def loss(model: Any, x: jax.Array) -> jax.Array:
        losses = model(x)[:, 0]
        return jnp.sum(jnp.where(mask, losses, 0)) / jnp.sum(mask)

    value, grads = gradients(model, x, loss)
    assert value == 3.5
    np.testing.assert_allclose(grads.w[...], gradients(Product(8, 8), x, loss)[1].w[...], rtol=1e-6)


class Norm(nnx.Module):
    """BatchNorm(4) alone."""

    def __init__(self, axis_name: Any = None):
        self.norm = nnx.BatchNorm(4, axis_name=axis_name, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x)


@pytest.mark.parametrize("sizes", [{"S": 8}, {"R": 2, "S": 4}], ids=str)
@both_axis_types_and_partitionings
def test_batch_norm_has_global_statistics(mesh_of: MeshOf, partitioning: str, sizes: Any):
    """B35: arange(32) as (8,4): running mean 0.14 to 0.17, variance 1.83."""
    with mesh_of(**sizes) as mesh:
        model = jfsdp.shard(Norm(), mesh, partitioning=partitioning)
        reference = Norm()
        x = jnp.arange(32.0).reshape(8, 4)
        y = nnx.jit(lambda model, x: model(x))(model, batch_on(mesh, x))
        np.testing.assert_allclose(model.norm.mean[...], [0.14, 0.15, 0.16, 0.17], rtol=1e-5)
        np.testing.assert_allclose(model.norm.var[...], [1.83] * 4, rtol=1e-5)
        np.testing.assert_allclose(y, reference(x), rtol=1e-5, atol=1e-5)


@both_axis_types
def test_batch_norm_has_the_gradients_of_global_statistics(mesh_of: MeshOf):
    """B35: of its scale, its bias and its input."""
    with mesh_of(R=2, S=4) as mesh:

        def loss(model: Any, x: jax.Array) -> jax.Array:
            return jnp.mean(model(x) ** 3)

        def grad(model: Any, x: jax.Array) -> Any:
            return nnx.jit(nnx.grad(loss, argnums=(0, 1)))(model, x)

        x = rows(8, 4)
        got = grad(jfsdp.shard(Norm(), mesh), batch_on(mesh, x))
        assert_close(got, grad(Norm(), x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "axis_name, sizes, variance",
    [((), {"S": 8}, 0.0), ("S", {"R": 2, "S": 4}, 20.0), ("R", {"R": 2, "S": 4}, 64.0)],
    ids=["per_device", "per_replica", "across_replicas"],
)
def test_batch_norm_has_the_statistics_of_the_axes_its_user_names(
    axis_name: Any, sizes: Any, variance: float
):
    """B35: the option for others than global ones: BatchNorm's own `axis_name`, () for none."""
    mesh = make_mesh(**sizes)
    model = jfsdp.shard(Norm(axis_name), mesh)
    x = batch_on(mesh, jnp.arange(32.0).reshape(8, 4))
    nnx.jit(lambda model, x: model(x))(model, x)
    np.testing.assert_allclose(model.norm.mean[...], [0.14, 0.15, 0.16, 0.17], rtol=1e-5)
    np.testing.assert_allclose(model.norm.var[...], [0.99 + 0.01 * variance] * 4, rtol=1e-5)


# --------------------------------------------------------------------------------------------------
# Dropout


class Dropped(nnx.Module):
    """Dropout(0.5) of x * w, key(0)."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones(16))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=jax.random.key(0)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(x * self.w[...][None])


class Rematerialized(nnx.Module):
    """`Dropped`, its activations recomputed in the backward pass."""

    def __init__(self):
        self.inner = Dropped()

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.remat(lambda inner, x: inner(x))(self.inner, x)


def call(model: Any, mesh: Any) -> np.ndarray:
    return np.asarray(nnx.jit(lambda model, x: model(x))(model, batch_on(mesh, jnp.ones((8, 16)))))


@pytest.mark.parametrize("sizes", [{"S": 8}, {"R": 2, "S": 4}, {"R": 8, "S": 1}], ids=str)
@both_axis_types
def test_no_two_shards_draw_the_same_dropout_mask(mesh_of: MeshOf, sizes: Any):
    """B36: ones (8,16), a row for each device: 8 different rows."""
    with mesh_of(**sizes) as mesh:
        y = call(jfsdp.shard(Dropped(), mesh), mesh)
        assert set(np.unique(y)) == {0.0, 2.0}
        assert len(np.unique(y, axis=0)) == 8


def test_dropout_masks_come_from_the_key_and_its_count():
    """B36: the same key again, the same mask; the next call, another; counts as unsharded."""
    mesh = make_mesh(S=8)
    one, two, plain = jfsdp.shard(Dropped(), mesh), jfsdp.shard(Dropped(), mesh), Dropped()
    first = call(one, mesh)
    np.testing.assert_array_equal(first, call(two, mesh))
    assert not np.array_equal(first, call(one, mesh))
    plain(jnp.ones((8, 16)))
    plain(jnp.ones((8, 16)))
    assert_close(nnx.state(one, nnx.RngState), nnx.state(plain, nnx.RngState))


@both_axis_types
def test_auto_partitioning_draws_the_unsharded_mask(mesh_of: MeshOf):
    """B36: bit by bit, and the counts are the unsharded ones."""
    with mesh_of(S=8) as mesh:
        model, plain = jfsdp.shard(Dropped(), mesh, partitioning="auto"), Dropped()
        np.testing.assert_array_equal(call(model, mesh), plain(jnp.ones((8, 16))))
        assert_close(nnx.state(model, nnx.RngState), nnx.state(plain, nnx.RngState))


@both_partitionings
@pytest.mark.parametrize("reshard", [False, True])
def test_rematerialized_dropout_has_the_mask_of_the_forward(reshard: bool, partitioning: str):
    """B36: gradients with and without remat, and with resharding, are equal bit by bit."""
    mesh = make_mesh(S=8)
    x = batch_on(mesh, rows(8, 16))
    settings = {"reshard_after_forward": reshard, "partitioning": partitioning}
    plain = jfsdp.shard(Dropped(), mesh, reshard_after_forward=False, partitioning=partitioning)
    again = jfsdp.shard(Rematerialized(), mesh, **settings)
    loss, grads = gradients(plain, x)
    other, remat = gradients(again, x)
    assert loss == other
    np.testing.assert_array_equal(remat.inner.w[...], grads.w[...])
    assert [int(n) for n in leaves(nnx.state(again, nnx.RngCount)).values()] == [1]
