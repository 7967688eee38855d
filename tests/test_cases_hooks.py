"""Collectives of the user's own: called for every leaf, checked, and what the unit computes with."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import linen_models
import numpy as np
import pytest
from flax import nnx
from helpers import (
    MeshOf,
    both_axis_types,
    count_ops,
    make_mesh,
    mean_square,
    rows,
)

import jfsdp
from jfsdp.comm import DefaultAllGather, DefaultReduceScatter


class Int8Gather(DefaultAllGather):
    """Sends a weight within [-1, 1] as int8 and notes what it was called for."""

    def __init__(self):
        self.calls: list[tuple[int, ...]] = []

    def __call__(
        self, output_tensor: Any, input_tensor: jax.Array, group: Any, async_op: bool = False
    ) -> jax.Array:
        self.calls.append(output_tensor.shape)
        sent = jnp.round(input_tensor * 127).astype(jnp.int8)
        gathered = jax.lax.all_gather(sent, group, axis=0, tiled=True)
        return gathered.astype(output_tensor.dtype) / 127


class Bf16Reduce(DefaultReduceScatter):
    """Reduces in bf16 whatever it is given and notes what it was called for."""

    def __init__(self):
        self.calls: list[tuple[int, ...]] = []

    def __call__(
        self,
        output_tensor: Any,
        input_tensor: jax.Array,
        group: Any,
        op: str,
        async_op: bool = False,
    ) -> jax.Array:
        self.calls.append(input_tensor.shape)
        sent = super().__call__(output_tensor, input_tensor.astype(jnp.bfloat16), group, op)
        return sent.astype(output_tensor.dtype)


def hooked(gather: Any, reduce: Any, *, reshard: bool = False, mesh: Any = None) -> nnx.Sequential:
    """Four layers of different widths, the first three with hooks."""
    rngs = nnx.Rngs(0)
    widths = (8, 16, 24, 32, 40)
    model = nnx.Sequential(
        *(nnx.Linear(a, b, use_bias=False, rngs=rngs) for a, b in itertools.pairwise(widths))
    )
    mesh = mesh or make_mesh(S=8)
    for layer in model.layers[:3]:
        hooks = {"all_gather": gather, "reduce_scatter": reduce}
        jfsdp.shard(layer, mesh, reshard_after_forward=reshard, **hooks)
    return jfsdp.shard(model, mesh, reshard_after_forward=reshard)


@both_axis_types
def test_a_hook_is_called_for_every_sharded_leaf_of_its_units(mesh_of: MeshOf):
    """B29: int8 gather and bf16 reduction for 3 of 4 parameters: 3 calls in each direction."""
    gather, reduce = Int8Gather(), Bf16Reduce()
    with mesh_of(S=8) as mesh:
        model = hooked(gather, reduce, mesh=mesh)
        lowered = nnx.jit(nnx.grad(mean_square)).lower(model, rows(8, 8)).lowered
    shapes = [(16, 8), (24, 16), (32, 24)]  # the sharded dimension, the larger one, first
    assert sorted(gather.calls) == shapes
    assert sorted(reduce.calls) == shapes
    assert count_ops(lowered, "all_gather", "i8") == 3
    assert count_ops(lowered, "all_gather", "f32") == 1
    assert count_ops(lowered, "reduce_scatter", "bf16") == 3
    assert count_ops(lowered, "reduce_scatter", "f32") == 1


def test_in_linen_a_hook_is_called_for_every_sharded_leaf():
    """B29: of 4 leaves the bias of 10 divides by no mesh and is replicated; 3 calls in each direction."""
    gather, reduce = Int8Gather(), Bf16Reduce()
    case = linen_models.CASES["mlp"]
    hooks = {"all_gather": gather, "reduce_scatter": reduce, "reshard_after_forward": False}
    model = case.sharded(make_mesh(S=8), **hooks)
    variables = linen_models.abstract(model, case.batch)
    gather.calls, reduce.calls = [], []
    loss = functools.partial(linen_models.mean_square, model)
    lowered = jax.jit(jax.grad(loss)).lower(variables, case.batch)
    assert sorted(gather.calls) == sorted(reduce.calls) == [(32,), (32, 10), (32, 16)]
    assert count_ops(lowered, "all_gather", "i8") == count_ops(lowered, "all_gather") == 3
    assert count_ops(lowered, "reduce_scatter", "bf16") == count_ops(lowered, "reduce_scatter") == 3


def test_a_hook_gathers_again_in_the_backward_where_its_unit_reshards():
    """B29: the re-gather is int8 as well (the first layer's is dead)."""
    model = hooked(Int8Gather(), Bf16Reduce(), reshard=True)
    report = jfsdp.inspect(nnx.grad(mean_square), model, rows(8, 8))
    assert report.count("all-gather", dtype="int8") == 3 + 2
    assert report.count("reduce-scatter", dtype="bfloat16") == 3


def test_what_a_hook_returns_is_what_the_unit_computes_with():
    """B29: int8 steps of 1/127 in the weights of the first three layers, and in no others."""
    model = hooked(Int8Gather(), Bf16Reduce())
    plain = hooked(DefaultAllGather(), DefaultReduceScatter())
    for layer in plain.layers[:3]:
        layer.kernel[...] = jnp.round(layer.kernel[...] * 127) / 127
    x = rows(8, 8)
    np.testing.assert_allclose(model(x), plain(x), rtol=1e-5, atol=1e-6)


class Transposing(DefaultAllGather):
    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        return super().__call__(*args, **kwargs).T


class Halving(DefaultReduceScatter):
    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        return super().__call__(*args, **kwargs)[:1]


@pytest.mark.parametrize(
    "hooks", [(Transposing(), None), (None, Halving())], ids=["all_gather", "reduce_scatter"]
)
def test_a_hook_that_returns_another_shape_raises_with_the_parameters_path(hooks: Any):
    """B29: the error names the parameter and the hook."""
    model = hooked(*hooks)
    name = type(hooks[0] or hooks[1]).__name__
    with pytest.raises(ValueError, match=rf"kernel: {name} must return an array of shape"):
        nnx.jit(nnx.grad(mean_square))(model, rows(8, 8))
