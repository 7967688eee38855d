"""Sharded modules in the user's own shard_map or pmap: the gradients are the unsharded ones all the same."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, batch_on, make_mesh, rows
from jax.sharding import PartitionSpec as P
from models import CASES

import jfsdp

DATA = ("R", "S")


def loss_fn(model: Any, batch: jax.Array, share: float = 1.0) -> jax.Array:
    """A mean over the batch; each of 8 devices takes its share of it."""
    return share * jnp.mean(jnp.sin(model(batch).astype(jnp.float32)) ** 2)


@pytest.mark.parametrize("check_vma", [False, True], ids=["unchecked", "check_vma"])
@pytest.mark.parametrize(
    "case", ["mlp", "attention", "tied", pytest.param("scanned", marks=pytest.mark.slow)]
)
def test_gradients_in_a_shard_map_are_summed_once(case: str, check_vma: bool):
    """HSDP, with replicated leaves too: jax, which sums what it takes for copies, must not do so again."""
    mesh = make_mesh(R=2, S=4)
    model, batch = CASES[case].sharded(mesh), CASES[case].batch
    graphdef, state = nnx.split(model)
    specs = jax.tree.map(lambda x: x.sharding.spec, state)

    def per_device(state: Any, batch: jax.Array) -> Any:
        gradient = jax.grad(lambda s: loss_fn(nnx.merge(graphdef, s), batch, share=1 / 8))
        return gradient(state)

    step = jax.shard_map(
        per_device, mesh=mesh, in_specs=(specs, P(DATA)), out_specs=specs, check_vma=check_vma
    )
    found = jax.jit(step)(state, batch_on(mesh, batch))
    expected = nnx.grad(loss_fn)(CASES[case].make(), jnp.asarray(batch))
    assert_close(jax.tree.leaves(found), jax.tree.leaves(expected))


class Talkative(nnx.Module):
    """A block with results that nobody uses, and that have no cotangent then."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        y = self.linear(x)
        return y, jnp.sum(y), 2 * x


class Listener(nnx.Module):
    """Two talkative blocks."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([Talkative(rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x, *_ = block(x)
        return x


@pytest.mark.parametrize("check_vma", [False, True], ids=["unchecked", "check_vma"])
def test_results_without_cotangent_are_no_trouble(check_vma: bool):
    mesh, x = make_mesh(R=2, S=4), rows(16, 16)
    model = jfsdp.shard(Listener(nnx.Rngs(0)), mesh, units=Talkative)
    graphdef, state = nnx.split(model)
    specs = jax.tree.map(lambda x: x.sharding.spec, state)

    def per_device(state: Any, x: jax.Array) -> Any:
        return jax.grad(lambda s: loss_fn(nnx.merge(graphdef, s), x, share=1 / 8))(state)

    step = jax.shard_map(
        per_device, mesh=mesh, in_specs=(specs, P(DATA)), out_specs=specs, check_vma=check_vma
    )
    found = jax.jit(step)(state, batch_on(mesh, x))
    expected = nnx.grad(loss_fn)(Listener(nnx.Rngs(0)), x)
    assert_close(jax.tree.leaves(found), jax.tree.leaves(expected))


def test_the_collectives_are_those_of_the_region():
    mesh = make_mesh(R=2, S=4)
    policy = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)
    model = CASES["attention"].sharded(mesh, mp_policy=policy)
    graphdef, state = nnx.split(model)
    specs = jax.tree.map(lambda x: x.sharding.spec, state)
    batch = batch_on(mesh, CASES["attention"].batch)

    def per_device(state: Any, batch: jax.Array) -> Any:
        return jax.grad(lambda s: loss_fn(nnx.merge(graphdef, s), batch, share=1 / 8))(state)

    step = jax.shard_map(
        per_device, mesh=mesh, in_specs=(specs, P(DATA)), out_specs=specs, check_vma=False
    )
    inside = jfsdp.inspect(jax.jit(step), state, batch, model=model)
    region = jfsdp.inspect(nnx.jit(nnx.grad(loss_fn)), model, batch)
    assert inside.rows == region.rows
    inside.check()


def test_the_state_of_an_nnx_model_goes_into_a_pmap_by_its_shards():
    """The leading axis of pmap is that of the devices; the shards of a leaf are stacked along it."""
    mesh = make_mesh(batch=8)
    case = CASES["mlp"]
    graphdef, state = nnx.split(case.sharded(mesh))
    stacked = jax.tree.map(
        lambda x: jnp.stack([np.asarray(s.data) for s in x.addressable_shards]), state
    )

    def per_device(state: Any, batch: jax.Array) -> Any:
        return jax.grad(lambda s: loss_fn(nnx.merge(graphdef, s), batch, share=1 / 8))(state)

    parts = case.batch.reshape(8, 2, -1)
    found = jax.pmap(per_device, axis_name="batch")(stacked, parts)
    expected = nnx.grad(loss_fn)(case.make(), jnp.asarray(case.batch))
    for path, gradient in nnx.to_flat_state(expected):
        whole = np.asarray(gradient.get_raw_value())
        local = np.asarray(dict(nnx.to_flat_state(found))[path].get_raw_value())
        dims = [d for d in range(whole.ndim) if whole.shape[d] != local.shape[d + 1]]
        joined = np.concatenate(list(local), axis=dims[0]) if dims else local[0]
        np.testing.assert_allclose(joined, whole, rtol=0, atol=1e-6)
