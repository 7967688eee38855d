"""Means, statistics and random masks over the whole batch: B35 and B36 for Linen."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers import (
    assert_close,
    assert_spec,
    batch_on,
    both_axis_types,
    both_axis_types_and_partitionings,
    both_partitionings,
    explicit_set,
    make_mesh,
    rows,
)
from linen_models import (
    KEY,
    abstract,
    assert_same,
    fast_compiler,
    filled,
    gradients,
    init,
    scan,
)
from test_linen_cases import Product, ones

import jfsdp


@pytest.fixture(scope="module", autouse=True)
def compiler():
    with fast_compiler():
        yield


# --------------------------------------------------------------------------------------------------
# Means


@both_partitionings
def test_a_masked_mean_is_the_global_one(partitioning):
    """B35: losses 0..15, the first 8 of them counted: 3.5; means per device, averaged: 1.75."""
    mesh = make_mesh(S=8)
    model: Any = jfsdp.shard(Product(8), mesh, partitioning=partitioning)
    x = batch_on(mesh, jnp.arange(16.0)[:, None] * jnp.ones((1, 8)) / 8)
    mask = batch_on(mesh, jnp.arange(16) < 8)

    @jax.jit
    def loss(variables: Any) -> Any:
        return jnp.sum(jnp.where(mask, model.apply(variables, x)[:, 0], 0)) / jnp.sum(mask)

    assert loss(ones(8, 8)) == 3.5


def batch_norm(axis_name: Any = None) -> nn.BatchNorm:
    return nn.BatchNorm(use_running_average=False, axis_name=axis_name)


def statistics(model: Any, variables: Any, x: Any) -> tuple[Any, Any]:
    y, updates = jax.jit(functools.partial(model.apply, mutable=["batch_stats"]))(variables, x)
    return y, updates["batch_stats"]


@pytest.mark.parametrize("sizes", [{"S": 8}, {"R": 2, "S": 4}], ids=str)
@both_axis_types_and_partitionings
def test_batch_norm_has_global_statistics(mesh_of, partitioning, sizes):
    """B35: arange(32) as (8,4): running mean 0.14 to 0.17, variance 1.83."""
    x = jnp.arange(32.0).reshape(8, 4)
    variables = jax.tree.map(np.asarray, init(batch_norm(), x))
    expected, _ = statistics(batch_norm(), variables, x)
    with mesh_of(**sizes) as mesh:
        model: Any = jfsdp.shard(batch_norm(), mesh, partitioning=partitioning)
        y, stats = statistics(model, variables, batch_on(mesh, x))
    np.testing.assert_allclose(stats["mean"], [0.14, 0.15, 0.16, 0.17], rtol=1e-5)
    np.testing.assert_allclose(stats["var"], [1.83] * 4, rtol=1e-5)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    assert_spec(stats["mean"])


@pytest.mark.parametrize(
    "axis_name, sizes, variance",
    [((), {"S": 8}, 0.0), ("S", {"R": 2, "S": 4}, 20.0), ("R", {"R": 2, "S": 4}, 64.0)],
    ids=["per_device", "per_replica", "across_replicas"],
)
def test_batch_norm_has_the_statistics_of_the_axes_its_user_names(axis_name, sizes, variance):
    """B35: the option for others than global ones: BatchNorm's own `axis_name`, () for none."""
    mesh = make_mesh(**sizes)
    model: Any = jfsdp.shard(batch_norm(axis_name), mesh)
    x = batch_on(mesh, jnp.arange(32.0).reshape(8, 4))
    _, stats = statistics(model, init(batch_norm(), x), x)
    np.testing.assert_allclose(stats["mean"], [0.14, 0.15, 0.16, 0.17], rtol=1e-5)
    np.testing.assert_allclose(stats["var"], [0.99 + 0.01 * variance] * 4, rtol=1e-5)


class Normed(nn.Module):
    """The body of a loop, with statistics."""

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
        return nn.tanh(x), None


@pytest.mark.parametrize("remat", [False, True])
def test_batch_norm_in_a_scan_has_global_statistics(remat):
    """B35: stacked ones, (3, 4); under nn.remat as well."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            body: Any = nn.remat(Normed, prevent_cse=False) if remat else Normed
            return scan(body, 3, variable_axes={"params": 0, "batch_stats": 0})(name="layers")(x)[0]

    x = rows(8, 4)
    plain, model = Model(), jfsdp.shard(Model(), make_mesh(R=2, S=4))
    variables = filled(abstract(plain, x))
    got = statistics(model, variables, x)
    assert got[1]["layers"]["BatchNorm_0"]["mean"].shape == (3, 4)
    assert_same(got, statistics(plain, variables, x))


# --------------------------------------------------------------------------------------------------
# Dropout


class Dropped(nn.Module):
    """Dropout(0.5) of x * w, twice if asked."""

    remat: bool = False

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.ones, (16,))
        dropout: Any = nn.remat(nn.Dropout) if self.remat else nn.Dropout
        return dropout(0.5, deterministic=False, name="dropout")(x * w[None])


def drop(model: Any, mesh: Any, seed: int = 0, **kwargs: Any) -> np.ndarray:
    x = batch_on(mesh, jnp.ones((8, 16)))
    jax.eval_shape(model.init, KEY(0), np.ones((8, 16), np.float32))
    apply = jax.jit(lambda v, x, key: model.apply(v, x, rngs={"dropout": key}, **kwargs))
    return np.asarray(apply({"params": {"w": jnp.ones(16)}}, x, KEY(seed)))


@pytest.mark.parametrize("sizes", [{"S": 8}, {"R": 2, "S": 4}, {"R": 8, "S": 1}], ids=str)
@both_axis_types
def test_no_two_shards_draw_the_same_dropout_mask(mesh_of, sizes):
    """B36: ones (8,16), a row for each device: 8 different rows."""
    with mesh_of(**sizes) as mesh:
        y = drop(jfsdp.shard(Dropped(), mesh), mesh)
    assert set(np.unique(y)) == {0.0, 2.0}
    assert len(np.unique(y, axis=0)) == 8


def test_dropout_masks_come_from_the_key():
    """B36: the same key again, the same mask; another key, another."""
    mesh = make_mesh(S=8)
    first = drop(jfsdp.shard(Dropped(), mesh), mesh)
    np.testing.assert_array_equal(first, drop(jfsdp.shard(Dropped(), mesh), mesh))
    assert not np.array_equal(first, drop(jfsdp.shard(Dropped(), mesh), mesh, seed=1))


def test_auto_partitioning_draws_the_unsharded_mask():
    """B36: bit by bit. (Flax's own Dropout refuses a batch that is typed by Explicit axes.)"""
    mesh = make_mesh(S=8)
    model: Any = jfsdp.shard(Dropped(), mesh, partitioning="auto")
    np.testing.assert_array_equal(drop(model, mesh), drop(Dropped(), mesh))


def test_module_with_dropout_that_was_not_initialized_is_called_on_an_explicit_mesh():
    """B46: Flax's Dropout takes no typed batch; the region gives it none."""
    with explicit_set(S=8) as mesh:
        model: Any = jfsdp.shard(Dropped(), mesh)
        x = batch_on(mesh, jnp.ones((8, 16)))
        model.apply({"params": {"w": jnp.ones(16)}}, x, rngs={"dropout": KEY(0)})


@both_partitionings
@pytest.mark.parametrize("reshard", [False, True])
def test_rematerialized_dropout_has_the_mask_of_the_forward(reshard, partitioning):
    """B36: gradients with and without remat, and with resharding, are equal bit by bit."""
    mesh = make_mesh(S=8)
    x = batch_on(mesh, rows(8, 16))
    settings = {"partitioning": partitioning}
    plain = jfsdp.shard(Dropped(), mesh, reshard_after_forward=False, **settings)
    again = jfsdp.shard(Dropped(remat=True), mesh, reshard_after_forward=reshard, **settings)
    variables = {"params": {"w": jnp.ones(16)}}
    rngs = {"dropout": KEY(0)}
    one, two = (gradients(model, variables, x, rngs=rngs) for model in (plain, again))
    assert_close(one, two, rtol=0, atol=0)


def test_second_random_call_of_one_unit_draws_another_mask():
    """B36: Flax counts the calls; the unit's calls are counted on."""

    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            dropout = nn.Dropout(0.5, deterministic=False)
            return jnp.stack([dropout(x), dropout(x)], axis=1)

    mesh = make_mesh(S=8)
    x = batch_on(mesh, jnp.ones((8, 16)))
    for units in ((), nn.Dropout):
        model: Any = jfsdp.shard(Twice(), mesh, units=units)
        model.init({"dropout": KEY(1)}, x)
        y = jax.jit(lambda x, model=model: model.apply({}, x, rngs={"dropout": KEY(0)}))(x)
        assert len(np.unique(np.asarray(y).reshape(16, 16), axis=0)) == 16
