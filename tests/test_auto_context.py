"""`auto_partitioning()`: a model of manual partitioning whose collectives XLA places, for a while."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import make_mesh
from models import CASES, Block, Scanned, Stack

import jfsdp

BATCH = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
ODD = BATCH[:3]


def sharded(**settings) -> Stack:
    """Two blocks of Linear(64, 64), each a unit."""
    settings = {"units": Block, **settings}
    return jfsdp.shard(Stack(2, 64, nnx.Rngs(0)), make_mesh(fsdp=8), **settings)


def policy(**dtypes) -> jfsdp.MixedPrecisionPolicy:
    return jfsdp.MixedPrecisionPolicy(**dtypes)


@pytest.mark.parametrize("jit", [jax.jit, nnx.jit], ids=["jax.jit", "nnx.jit"])
def test_a_jitted_function_is_traced_once_outside_and_once_inside(jit):
    traced = []

    @jit
    def forward(state, x):
        model = nnx.merge(graph, state)
        traced.append(1)
        return model(x)

    graph, state = nnx.split(sharded())
    expected = Stack(2, 64, nnx.Rngs(0))(BATCH)

    def manual() -> bool:
        text = forward.lower(state, BATCH)
        text = getattr(text, "lowered", text).as_text()
        assert ("all_gather" in text) != ("sharding_constraint" in text.lower())
        return "all_gather" in text

    assert manual()
    np.testing.assert_allclose(forward(state, BATCH), expected, atol=1e-6)
    before = len(traced)
    with jfsdp.auto_partitioning():
        np.testing.assert_allclose(forward(state, BATCH), expected, atol=1e-6)
        assert len(traced) == before + 1
        assert not manual()
    np.testing.assert_allclose(forward(state, BATCH), expected, atol=1e-6)
    with jfsdp.auto_partitioning():
        forward(state, BATCH)
    assert len(traced) == before + 1
    assert manual()


def test_batches_that_no_region_holds_are_called_inside():
    model, forward = sharded(), nnx.jit(lambda model, x: model(x))
    with pytest.raises(ValueError, match="3"):
        forward(model, ODD)
    with jfsdp.auto_partitioning():
        found = forward(model, ODD)
    np.testing.assert_allclose(found, Stack(2, 64, nnx.Rngs(0))(ODD), atol=1e-6)
    with pytest.raises(ValueError, match="3"):
        forward(model, ODD)


def test_it_reaches_units_inside_units_and_loops():
    model = Scanned(nnx.Rngs(0))
    jfsdp.shard(model.layers, make_mesh(fsdp=8), stacked_axis=0)
    jfsdp.shard(model, make_mesh(fsdp=8))
    batch = CASES["scanned"].batch[:3]
    with jfsdp.auto_partitioning():
        lowered = nnx.jit(lambda model, x: model(x)).lower(model, batch).lowered.as_text()
        found = model(batch)
    assert "shard_map" not in lowered and "manual" not in lowered
    np.testing.assert_allclose(found, Scanned(nnx.Rngs(0))(batch), atol=1e-6)


def test_it_ends_with_an_error_and_nests():
    with jfsdp.auto_partitioning(), pytest.raises(RuntimeError), jfsdp.auto_partitioning():
        raise RuntimeError
    with pytest.raises(ValueError, match="3"):
        sharded()(ODD)


def test_a_unit_in_the_per_device_view_communicates_by_name_inside_as_well():
    model, mesh = sharded(), make_mesh(fsdp=8)
    graph, state = nnx.split(model)
    spec = jax.sharding.PartitionSpec
    specs = jax.tree.map(lambda x: x.sharding.spec, state)
    per_device = jax.shard_map(
        lambda state, x: nnx.merge(graph, state)(x),
        mesh=mesh,
        in_specs=(specs, spec("fsdp")),
        out_specs=spec("fsdp"),
        check_vma=False,
    )
    with jfsdp.auto_partitioning():
        found = jax.jit(per_device)(state, BATCH)
    np.testing.assert_allclose(found, Stack(2, 64, nnx.Rngs(0))(BATCH), atol=1e-6)


# --------------------------------------------------------------------------------------------------
# What cannot be kept inside


def loss_fn(model, x):
    return jnp.sum(model(x).astype(jnp.float32) ** 2)


class Sum(jfsdp.ReduceScatter):
    def allocate(self, size, *, dtype, device):
        return jax.ShapeDtypeStruct(size, dtype)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        return jax.lax.psum_scatter(input_tensor, group, tiled=True)


class Gather(jfsdp.AllGather):
    def allocate(self, size, *, dtype, device):
        return jax.ShapeDtypeStruct(size, dtype)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return jax.lax.all_gather(input_tensor, group, tiled=True)


REDUCTIONS = [
    ({"mp_policy": policy(param_dtype="bfloat16", reduce_dtype="float32")}, "reduce_dtype=float32"),
    ({"mp_policy": policy(reduce_dtype="float32")}, "reduce_dtype=float32"),
    ({"reduce_scatter": Sum()}, "reduce_scatter=Sum"),
]


@pytest.mark.parametrize("differentiate", ["grad", "jvp"])
@pytest.mark.parametrize(
    ("settings", "text"), REDUCTIONS, ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_stated_reduction_is_run_forward_but_not_differentiated(settings, text, differentiate):
    model = sharded(**settings)
    graph, state = nnx.split(model)
    loss = jax.jit(lambda state: loss_fn(nnx.merge(graph, state), BATCH))
    with jfsdp.auto_partitioning():
        assert jnp.isfinite(loss(state))
        with pytest.raises(NotImplementedError, match=f"blocks.*kernel .*{text}.*\n.*outside"):
            if differentiate == "grad":
                jax.grad(loss)(state)
            else:
                jax.jvp(loss, (state,), (state,))
    jax.grad(loss)(state)


def test_a_stated_reduction_lets_inputs_be_differentiated():
    model = sharded(mp_policy=policy(reduce_dtype="float32"))
    expected = jax.grad(functools.partial(loss_fn, Stack(2, 64, nnx.Rngs(0))))(BATCH)
    with jfsdp.auto_partitioning():
        found = jax.grad(lambda x: loss_fn(model, x))(BATCH)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_stated_reduction_is_not_differentiated_where_only_the_call_is_inside():
    model = sharded(mp_policy=policy(reduce_dtype="float32"))

    def loss(model):
        with jfsdp.auto_partitioning():
            return loss_fn(model, BATCH)

    with pytest.raises(NotImplementedError, match="reduce_dtype=float32"):
        nnx.jit(nnx.grad(loss))(model)


def test_a_gather_of_the_users_own_is_refused_at_the_call():
    model = sharded(all_gather=Gather())
    model(BATCH)
    with jfsdp.auto_partitioning(), pytest.raises(ValueError, match=r"all_gather=Gather.*outside"):
        model(BATCH)
