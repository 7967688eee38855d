"""Parameters that a step does not use, and frozen ones that are trained later."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from helpers import (
    MeshOf,
    Op,
    assert_close,
    batch_on,
    both_axis_types,
    both_axis_types_and_partitionings,
    count_ops,
    local_shape,
    make_mesh,
    mean_square,
    rows,
    stablehlo_ops,
)

import jfsdp

BF16_REDUCED_IN_F32 = jfsdp.MixedPrecisionPolicy(param_dtype="bfloat16", reduce_dtype="float32")


class Late(nnx.Module):
    """Two layers, of which the second is used only if asked."""

    def __init__(self, param_dtype: Any = jnp.float32):
        self.first = nnx.Linear(8, 8, param_dtype=param_dtype, rngs=nnx.Rngs(0))
        self.second = nnx.Linear(8, 8, param_dtype=param_dtype, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array, both: bool = False) -> jax.Array:
        x = self.first(x)
        return self.second(x) if both else x


# --------------------------------------------------------------------------------------------------
# Unused


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@both_axis_types_and_partitionings
def test_the_gradient_of_an_unused_parameter_is_zeros_as_its_parameter(
    mesh_of: MeshOf, partitioning: str, param_dtype: str
):
    """B27: of its dtype and in its shards, whatever the others compute and reduce in."""
    policy = jfsdp.MixedPrecisionPolicy(param_dtype="bfloat16")
    with mesh_of(S=8) as mesh:
        model = jfsdp.shard(
            Late(jnp.dtype(param_dtype)),
            mesh,
            units=nnx.Linear,
            mp_policy=policy,
            partitioning=partitioning,
        )
        grads = nnx.jit(nnx.grad(mean_square))(model, batch_on(mesh, rows(8, 8)))
        for name, local in (("kernel", (1, 8)), ("bias", (1,))):
            unused, used = (grads[unit][name][...] for unit in ("second", "first"))
            assert unused.dtype == used.dtype == jnp.dtype(param_dtype)
            assert local_shape(used) == local
            assert not np.any(unused)
            assert np.any(used)


def test_what_is_not_used_is_neither_gathered_nor_reduced():
    """B27: the first layer's two leaves alone."""
    mesh = make_mesh(S=8)
    model = jfsdp.shard(Late(), mesh, units=nnx.Linear)
    lowered = nnx.jit(nnx.grad(mean_square)).lower(model, batch_on(mesh, rows(8, 8))).lowered
    assert count_ops(lowered, "all_gather") == 2
    assert count_ops(lowered, "reduce_scatter") == 2


def test_an_unused_parameter_is_trained_as_in_the_unsharded_model():
    """B27, FSDP2's N13 is another: there its optimizer state stays as it was. Here Adam sees zeros."""

    @nnx.jit(static_argnums=3)
    def step(model: Any, optimizer: Any, x: jax.Array, both: bool) -> None:
        grads = nnx.grad(lambda model: jnp.mean(model(x, both) ** 2))(model)
        optimizer.update(model, grads)

    mesh = make_mesh(S=8)
    models = jfsdp.shard(Late(), mesh, units=nnx.Linear), Late()
    for model in models:
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
        x = batch_on(mesh, rows(8, 8)) if model is models[0] else rows(8, 8)
        for both in (True, False, True):
            step(model, optimizer, x, both)
    assert_close(*(nnx.as_pure(nnx.state(model)) for model in models), rtol=1e-5, atol=1e-6)


class Heads(nn.Module):
    """Two Dense(8), of which the second is used only if asked."""

    def setup(self):
        self.first, self.second = nn.Dense(8), nn.Dense(8)

    def __call__(self, x: jax.Array, both: bool = False) -> jax.Array:
        x = self.first(x)
        return self.second(x) if both or self.is_initializing() else x


def test_the_gradient_of_an_unused_linen_parameter_is_zeros_as_its_parameter():
    mesh = make_mesh(S=8)
    model: Any = jfsdp.shard(Heads(), mesh, units=nn.Dense, mp_policy=BF16_REDUCED_IN_F32)
    params = model.init(jax.random.key(0), rows(8, 8))["params"]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(model.apply({"params": params}, x).astype(jnp.float32))

    grads = jax.jit(jax.grad(loss))(params, batch_on(mesh, rows(8, 8)))
    for used, unused in zip(*(jax.tree.leaves(grads[n]) for n in ("first", "second")), strict=True):
        assert unused.dtype == used.dtype == jnp.float32
        assert unused.shape == used.shape
        assert not np.any(unused)
        assert np.any(used)


# --------------------------------------------------------------------------------------------------
# Frozen, then trained


class Two(nnx.Module):
    """x @ w + x @ v with w and v (1, 8) of zeros, computed in the weights' dtype."""

    def __init__(self):
        self.w, self.v = nnx.Param(jnp.zeros((1, 8))), nnx.Param(jnp.zeros((1, 8)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w[...] + x @ self.v[...]


FIRST = nnx.All(nnx.Param, nnx.PathContains("w"))
X = jnp.array([256.0, 1, 1, 1, 1, 1, 1, 1])[:, None]


def gradient_of(wrt: Any) -> Any:
    def total(model: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(model(x))

    return nnx.jit(nnx.grad(total, argnums=nnx.DiffState(0, wrt)))


@pytest.mark.parametrize("dtype, exact", [("float32", 263.0), ("bfloat16", 264.0)])
@both_axis_types
def test_a_parameter_that_is_trained_later_is_reduced_in_the_reduce_dtype(
    mesh_of: MeshOf, dtype: str, exact: float
):
    """B27: the step is traced again; 256 + 7 ones, computed in bf16, are 263 when reduced in f32."""
    policy = jfsdp.MixedPrecisionPolicy(param_dtype="bfloat16", reduce_dtype=dtype)
    short = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    with mesh_of(S=8) as mesh:
        model = jfsdp.shard(Two(), mesh, mp_policy=policy)
        x = batch_on(mesh, X)
        for wrt, trained in ((FIRST, {"w"}), (nnx.Param, {"w", "v"}), (FIRST, {"w"})):
            step = gradient_of(wrt)
            lowered = step.lower(model, x).lowered
            scattered = Op("reduce_scatter", short, (1, 1))
            ops = {op: n for op, n in stablehlo_ops(lowered).items() if op.kind != "all_gather"}
            assert ops == {scattered: len(trained)}
            grads = nnx.as_pure(step(model, x))
            assert set(grads) == trained
            for grad in grads.values():
                assert grad.dtype == jnp.float32
                np.testing.assert_array_equal(grad, np.full((1, 8), exact))


def test_moments_of_a_parameter_that_is_trained_later_lie_as_it_does():
    """B27: a second optimizer of all parameters, built when they are unfrozen."""
    mesh = make_mesh(S=8)
    model = jfsdp.shard(Two(), mesh)
    for wrt, count in ((FIRST, 1), (nnx.Param, 2)):
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=wrt)
        optimizer.update(model, gradient_of(wrt)(model, batch_on(mesh, X)))
        moments = jax.tree.leaves(nnx.as_pure(optimizer.opt_state[0].mu))
        assert [local_shape(moment) for moment in moments] == [(1, 1)] * count
