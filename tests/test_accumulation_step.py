"""What a step over microbatches communicates, keeps, returns beside the loss, and refuses."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx
from helpers import batch_on, linears, make_mesh, rows
from jax.sharding import PartitionSpec as P

import jfsdp

MICROBATCHES = 4
POLICY = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)
EVERY_SYNC = pytest.mark.parametrize("sync", ["every", "last"])


def mean(model: Any, x: Any) -> jax.Array:
    return jnp.mean(model(x).astype(jnp.float32) ** 2)


def report_of(sync: str, **sizes: int) -> jfsdp.inspect.Report:
    """Of a step over 4 microbatches that trains 6 Linear(64, 64) without bias."""
    model = jfsdp.shard(linears(6, 64), make_mesh(**sizes), units=nnx.Linear, mp_policy=POLICY)
    both = jfsdp.value_and_grad(mean, microbatches=MICROBATCHES, sync=sync)
    return jfsdp.inspect(nnx.jit(both), model, rows(64, 64))


# --------------------------------------------------------------------------------------------------
# Collectives


def test_every_scatters_in_the_loop_and_sums_the_replicas_once_after_it():
    """B18, in the dtypes of the policy."""
    report = report_of("every", R=2, S=4)
    assert report.count("reduce-scatter", "S", "float32") == 6 * MICROBATCHES
    assert report.count("all-gather", "S", "bfloat16") == report.count("all-gather")
    summed = [c for c in report.collectives if c.kind == "all-reduce" and c.shape]
    large = [c for c in summed if c.axes == ("R",)]
    assert [(c.executions, c.in_loop, c.dtype, c.shape) for c in large] == [
        (1, False, "float32", (16, 64))
    ] * 6


def test_last_reduces_nothing_in_the_loop():
    report = report_of("last", R=2, S=4)
    assert report.count("reduce-scatter", "S", "float32") == 6
    assert report.count("all-reduce", "R", "float32") == 6
    assert {c.kind for c in report.collectives if c.in_loop} == {"all-gather"}


@EVERY_SYNC
def test_the_loss_costs_one_all_reduce_of_two_numbers(sync):
    report = report_of(sync, S=8)
    (loss,) = [c for c in report.collectives if c.kind == "all-reduce"]
    assert (loss.shape, loss.executions, loss.in_loop) == ((2,), 1, False)


@EVERY_SYNC
def test_weights_are_gathered_for_each_microbatch_and_not_taken_out_of_the_loop(sync):
    """As compiled: else the whole weights of all units would be alive for the whole step."""
    model = jfsdp.shard(linears(6, 64), make_mesh(S=8), units=nnx.Linear)
    both = jfsdp.value_and_grad(mean, microbatches=MICROBATCHES, sync=sync)
    report = jfsdp.inspect(nnx.jit(both), model, rows(64, 64), compile=True)
    assert report.lowered is not None
    # The first unit's input has no gradient.
    assert report.lowered.count("all-gather") == 11 * MICROBATCHES
    gathers = [c for c in report.collectives if c.kind == "all-gather"]
    assert gathers and all(c.in_loop and c.executions == MICROBATCHES for c in gathers)


@EVERY_SYNC
def test_check_holds_the_step_to_its_microbatches(sync):
    report = report_of(sync, R=2, S=4)
    report.check()
    scatter = next(row for row in report.minima if row.kind == "reduce-scatter")
    once = 6 * 64 * 64 * 4 * 3 / 4
    assert scatter.bytes_per_device == once * (MICROBATCHES if sync == "every" else 1)


def test_check_refuses_whole_gradients_added_up_where_shards_are_stated():
    """As XLA for TPUs makes it of a scatter whose result is added up in a loop."""
    report = dataclasses.replace(
        report_of("last", R=2, S=4), promises=report_of("every", R=2, S=4).promises
    )
    with pytest.raises(jfsdp.PolicyViolation, match="whole gradients are added up"):
        report.check()


def test_check_refuses_replicas_summed_in_every_microbatch():
    """A hand-made loop round the ordinary gradient, with the scope of ours round it."""
    model = jfsdp.shard(linears(6, 64), make_mesh(R=2, S=4), units=nnx.Linear)
    graphdef, state = nnx.split(model)

    def step(state: Any, x: Any) -> Any:
        def add(total: Any, x: Any) -> Any:
            grads = jax.grad(lambda state: mean(nnx.merge(graphdef, state), x))(state)
            return jax.tree.map(jnp.add, total, grads), None

        zeros = jax.tree.map(jnp.zeros_like, state)
        with jax.named_scope("jfsdp_microbatches[4,every]"):
            return jax.lax.scan(add, zeros, x.reshape(4, 16, 64))[0]

    report = jfsdp.inspect(jax.jit(step), state, rows(64, 64), model=model)
    with pytest.raises(jfsdp.PolicyViolation, match="bytes of the reductions"):
        report.check()


def test_last_keeps_whole_gradients_where_every_keeps_shards():
    """12 layers of 128x128, to 5 %: the shards of "every" are added up where the results are.

    Without looking ahead, as "every" then has a layer's whole gradient on its way.
    """
    model = jfsdp.shard(linears(12, 128), make_mesh(S=8), units=nnx.Linear, prefetch=0)
    x = batch_on(make_mesh(S=8), rows(64, 128))
    temporaries = {}
    for sync in ("every", "last"):
        both = jfsdp.value_and_grad(mean, microbatches=MICROBATCHES, sync=sync)
        report = jfsdp.inspect(nnx.jit(both), model, x, compile=True)
        assert report.memory is not None
        temporaries[sync] = report.memory.temporaries
    more = temporaries["last"] - temporaries["every"]
    assert more == pytest.approx(12 * 128 * 128 * 4, rel=0.05)


@EVERY_SYNC
def test_the_users_own_collectives_are_called(sync):
    calls: list[str] = []

    class Gather(jfsdp.AllGather):
        def allocate(self, size, *, dtype, device):
            return jax.ShapeDtypeStruct(tuple(size), dtype)

        def __call__(self, output_tensor, input_tensor, group, async_op=False):
            calls.append("gather")
            return jax.lax.all_gather(input_tensor, group, axis=0, tiled=True)

    class Scatter(jfsdp.ReduceScatter):
        def allocate(self, size, *, dtype, device):
            return jax.ShapeDtypeStruct(tuple(size), dtype)

        def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
            calls.append("reduce")
            return jax.lax.psum_scatter(input_tensor, group, scatter_dimension=0, tiled=True)

    model = jfsdp.shard(
        linears(2, 16), make_mesh(S=8), all_gather=Gather(), reduce_scatter=Scatter()
    )
    both = jfsdp.value_and_grad(mean, microbatches=2, sync=sync)
    _, grads = nnx.jit(both)(model, rows(32, 16))
    _, expected = nnx.value_and_grad(mean)(linears(2, 16), rows(32, 16))
    for got, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert {"gather", "reduce"} == set(calls)


# --------------------------------------------------------------------------------------------------
# State and keys


def test_batch_statistics_go_from_microbatch_to_microbatch():
    """Over all devices' rows of one microbatch, as if they came one after the other."""
    case, mesh = models.CASES["conv"], make_mesh(S=8)
    x = np.concatenate([case.batch, 2 * case.batch, case.batch - 1, 3 * case.batch])
    model = case.sharded(mesh)
    loss, _ = nnx.jit(jfsdp.value_and_grad(mean, microbatches=4))(model, x)
    plain = case.make()
    parts = x.reshape(8, 4, 2, *x.shape[1:]).swapaxes(0, 1).reshape(4, 16, *x.shape[1:])
    expected = np.mean([float(mean(plain, part)) for part in parts])
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for name in ("mean", "var"):
        got, wanted = getattr(model.norm, name), getattr(plain.norm, name)
        np.testing.assert_allclose(got[...], wanted[...], rtol=1e-5, atol=1e-6)


class Noisy(nnx.Module):
    """Dropout of its inputs, and a weight."""

    def __init__(self, rngs: nnx.Rngs):
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.linear = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dropout(x), self.linear(x)


def test_each_microbatch_drops_out_something_else_and_the_counts_advance():
    model = jfsdp.shard(Noisy(nnx.Rngs(0)), make_mesh(S=8))

    def loss(model: Any, x: Any) -> Any:
        kept, y = model(x)
        return jnp.mean(y**2), kept

    (_, kept), _ = nnx.jit(jfsdp.value_and_grad(loss, microbatches=4, has_aux=True))(
        model, jnp.ones((32, 16))
    )
    assert len({tuple(row) for row in np.asarray(kept).tolist()}) == 32
    assert int(model.dropout.rngs.count[...]) == 4


def test_a_key_among_the_arguments_is_another_one_in_each_microbatch():
    model = jfsdp.shard(linears(1, 16), make_mesh(S=8))

    def loss(model: Any, x: Any, key: Any) -> Any:
        mask = jax.random.bernoulli(key, 0.5, x.shape)
        return mean(model, x * mask), mask

    both = nnx.jit(jfsdp.value_and_grad(loss, microbatches=4, has_aux=True))
    (_, masks), _ = both(model, jnp.ones((32, 16)), jax.random.key(0))
    assert len({tuple(row) for row in np.asarray(masks).tolist()}) == 32


# --------------------------------------------------------------------------------------------------
# What a loss returns beside


def test_aux_is_joined_in_the_order_of_the_batch_and_scalars_are_averaged():
    model = jfsdp.shard(linears(1, 16), make_mesh(R=2, S=4))

    def loss(model: Any, x: Any) -> Any:
        y = model(x)
        return jnp.mean(y**2), {"y": y, "largest": jnp.max(x[:, 0])}

    x = rows(64, 16)
    both = nnx.jit(jfsdp.value_and_grad(loss, microbatches=4, has_aux=True))
    (_, aux), _ = both(model, x)
    np.testing.assert_allclose(aux["y"], linears(1, 16)(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(aux["largest"], x[:, 0].reshape(32, 2).max(1).mean(), rtol=1e-6)


def test_out_specs_say_what_is_no_batch():
    model = jfsdp.shard(linears(1, 16), make_mesh(S=8))

    def loss(model: Any, x: Any) -> Any:
        return mean(model, x), {"mean": jnp.mean(x, axis=0), "count": jnp.arange(3)}

    x = rows(64, 16)
    both = jfsdp.value_and_grad(loss, microbatches=4, has_aux=True, out_specs=P())
    (_, aux), _ = nnx.jit(both)(model, x)
    np.testing.assert_allclose(aux["mean"], x.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(aux["count"], np.arange(3))


def test_in_specs_copy_what_is_no_batch():
    model = jfsdp.shard(linears(1, 16), make_mesh(S=8))

    def loss(model: Any, x: Any, *, table: Any) -> Any:
        return mean(model, x + table.sum(0, keepdims=True))

    both = jfsdp.value_and_grad(loss, microbatches=4, in_specs={"table": P()})
    x, table = rows(32, 16), rows(5, 16)
    got = nnx.jit(both)(model, x, table=table)[0]
    np.testing.assert_allclose(got, loss(linears(1, 16), x, table=table), rtol=1e-6)


# --------------------------------------------------------------------------------------------------
# What is refused


def refused(
    kind: type[Exception], loss: Any = mean, *args: Any, model: Any = None, **options: Any
) -> str:
    model = model or jfsdp.shard(linears(1, 16), make_mesh(S=8))
    with pytest.raises(kind) as error:
        both = jfsdp.value_and_grad(loss, **options)
        nnx.jit(both)(model, *(args or (rows(32, 16),)))
    return str(error.value)


def test_a_batch_that_does_not_divide_into_microbatches():
    assert refused(ValueError, microbatches=3) == (
        "value_and_grad(mean): the batch is 32, 4 on each of 8 data-parallel devices, which does not divide "
        "into microbatches=3. Use a batch of 48, or a number of microbatches that divides 4."
    )


def test_no_batch_to_split():
    text = refused(
        ValueError, lambda model, scale: scale * mean(model, jnp.ones((2, 16))), 2.0, microbatches=2
    )
    assert "microbatches=2, but none of its arguments is a batch to split" in text


@pytest.mark.parametrize(
    "options, kind, text",
    [
        ({"microbatches": 0}, ValueError, "microbatches must be 1 or more, got 0."),
        ({"microbatches": True}, TypeError, "microbatches must be an int, got True."),
        ({"sync": "never"}, ValueError, 'sync must be "every"'),
        ({"has_aux": 1}, TypeError, "has_aux must be True or False, got 1."),
        ({"in_specs": {"x": 3}}, TypeError, "in_specs['x'] must be a jax.sharding.PartitionSpec"),
        ({"in_specs": {"x": P("T")}}, ValueError, "names the axis 'T'"),
        ({"in_specs": {"y": P()}}, ValueError, "names no argument. Its arguments: x"),
        ({"wrt": nnx.BatchStat}, ValueError, "selects no Variable of the module"),
    ],
)
def test_a_wrong_option(options, kind, text):
    assert text in refused(kind, **options)


def test_a_loss_that_returns_something_else():
    text = refused(TypeError, lambda model, x: model(x))
    assert "must return a floating scalar, or (sum, weight); got float32[4,16]" in text
    assert "pass has_aux=True" in text
    text = refused(TypeError, mean, has_aux=True)
    assert "with has_aux=True it must return (loss, aux)" in text


def test_aux_of_no_known_kind():
    text = refused(
        ValueError, lambda model, x: (mean(model, x), jnp.arange(3)), has_aux=True, microbatches=2
    )
    assert "jfsdp.value_and_grad(..., out_specs=...)" in text


def test_a_model_that_is_not_sharded():
    text = refused(ValueError, model=linears(1, 16))
    assert "this Sequential holds no unit. Apply jfsdp.shard to it first" in text


def test_auto_partitioning():
    model = jfsdp.shard(linears(1, 16), make_mesh(S=8), partitioning="auto")
    assert "has auto partitioning" in refused(ValueError, model=model)


def test_a_parameter_read_outside_of_its_unit():
    text = refused(
        TypeError, lambda model, x: mean(model, x) + jnp.sum(model.layers[0].kernel ** 2)
    )
    assert "layers.0.kernel (shape (16, 16)) is used while it is sharded" in text


def test_a_parameter_that_is_not_floating():
    model = linears(1, 16)
    model.table = nnx.Param(jnp.arange(16))
    text = refused(TypeError, model=jfsdp.shard(model, make_mesh(S=8)))
    assert "not floating:\n  table: int32\nLeave them out by wrt=" in text


def test_a_second_derivative():
    model = jfsdp.shard(linears(1, 16), make_mesh(S=8))
    graphdef, state = nnx.split(model)

    def loss(state: Any) -> Any:
        return jfsdp.value_and_grad(mean)(nnx.merge(graphdef, state), rows(32, 16))[0]

    with pytest.raises(NotImplementedError, match="differentiated twice"):
        jax.grad(loss)(state)


def test_a_partial_function_has_a_name():
    def loss(model: Any, x: Any, scale: float) -> Any:
        return scale * mean(model, x)

    text = refused(ValueError, functools.partial(loss, scale=2.0), microbatches=3)
    assert text.startswith("value_and_grad(loss): the batch is 32")
