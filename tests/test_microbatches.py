"""Gradient accumulation in the per-device view: what is reduced in the loop, and what once after it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from helpers import batch_on, make_mesh, rows
from jax.sharding import PartitionSpec as P

import jfsdp

MICROBATCHES = 4


class Stack(nn.Module):
    """Two Dense(64) without biases."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(64, use_bias=False)(jnp.tanh(nn.Dense(64, use_bias=False)(x)))


def mean_square(model: Any, params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model.apply({"params": params}, x) ** 2)


def accumulating_step(replicas_reduce_once: bool):
    """A step on R2xS4 that scans over 4 microbatches of the local batch, its parameters and a batch.

    With `replicas_reduce_once` the module shards over S alone: what it reduces in the loop are shards over S,
    and the script sums them over R after it.
    """
    mesh = make_mesh(R=2, S=4)
    replicate = None if replicas_reduce_once else "R"
    dims = jfsdp.DataParallelMeshDims(shard="S", replicate=replicate)
    model = jfsdp.shard(Stack(), mesh, dp_mesh_dims=dims, units=nn.Dense)
    params = model.init(jax.random.key(0), jnp.ones((1, 64)))["params"]
    specs = jax.tree.map(lambda x: x.sharding.spec, params)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(specs, P(("R", "S"))), out_specs=specs, check_vma=False
    )
    def step(params: Any, x: jax.Array) -> Any:
        share = 1 / (MICROBATCHES * 8)  # of the mean over all microbatches and devices

        def add(total: Any, x: jax.Array) -> tuple[Any, None]:
            gradient = jax.grad(lambda p: share * mean_square(model, p, x))(params)
            return jax.tree.map(jnp.add, total, gradient), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(add, zeros, x.reshape(MICROBATCHES, -1, 64))
        return jax.lax.psum(total, "R") if replicas_reduce_once else total

    return step, model, params, batch_on(mesh, rows(64, 64))


def test_accumulated_gradients_are_those_of_one_batch():
    """B18: 4 microbatches equal one big batch (1e-6), whichever way the replicas are reduced."""
    for once in (False, True):
        step, _, params, x = accumulating_step(once)
        expected = jax.grad(functools.partial(mean_square, Stack()))(
            jax.device_get(params), np.asarray(x)
        )
        for got, wanted in zip(
            jax.tree.leaves(step(params, x)), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6)


def test_the_replicas_are_reduced_once_outside_of_the_loop():
    """B18: reduce-scatters over S in the loop, one all-reduce over R of each shard after it."""
    step, model, params, x = accumulating_step(replicas_reduce_once=True)
    found = jfsdp.inspect(step, params, x, model=model)
    assert found.count("reduce-scatter", "S", "float32") == 2 * MICROBATCHES
    reduced = [c for c in found.collectives if c.kind == "all-reduce"]
    assert [(c.axes, c.executions, c.in_loop) for c in reduced] == [(("R",), 1, False)] * 2
    assert {c.shape for c in reduced} == {(16, 64)}


def test_a_module_that_knows_its_replicas_reduces_them_in_every_microbatch():
    """B18: the counts without it, said by inspect."""
    step, model, params, x = accumulating_step(replicas_reduce_once=False)
    found = jfsdp.inspect(step, params, x, model=model)
    assert found.count("all-reduce", "R", "float32") == 2 * MICROBATCHES
