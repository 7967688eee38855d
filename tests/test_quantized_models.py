"""Programs whose weights travel in 8 bits: what they send, what it costs, and what check() says of them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import linen_models
import models
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers import count_ops, mean_square, rows
from test_parity import mesh_and_dims

import jfsdp

INT8 = jfsdp.QuantizedAllGather("int8", 64)
FLOAT8 = jfsdp.QuantizedAllGather("float8_e4m3fn", 64)
REDUCE = jfsdp.QuantizedReduceScatter("int8", 64)
POLICY = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)


def inspected(remat: bool = False, reshard: bool = True, **settings: Any) -> Any:
    """A step of 3 blocks of one 64x64 weight on S8; lowered, and its report."""
    mesh, _ = mesh_and_dims("S8", "auto")
    settings = {"mp_policy": POLICY, "reshard_after_forward": reshard, **settings}
    model = models.Stack(3, 64, nnx.Rngs(0), remat=remat)
    jfsdp.shard(model, mesh, units=models.Block, **settings)
    step = nnx.jit(nnx.grad(mean_square))
    return step.lower(model, rows(8, 64)).lowered, jfsdp.inspect(step, model, rows(8, 64))


@pytest.mark.parametrize("remat", [False, True], ids=["plain", "users_remat"])
@pytest.mark.parametrize(
    ("gather", "dtype", "name"), [(INT8, "i8", "int8"), (FLOAT8, "f8E4M3FN", "float8_e4m3fn")]
)
def test_every_gather_is_of_8_bits_the_second_one_too(
    gather: Any, dtype: str, name: str, remat: bool
):
    """3 leaves forward, and again in the backward but for the first, which only a remat needs."""
    lowered, report = inspected(remat, all_gather=gather)
    assert count_ops(lowered, "all_gather") == 2 * count_ops(lowered, "all_gather", dtype)
    assert report.count("all-gather", dtype=name) == 3 + 3 - (not remat)
    assert report.count("reduce-scatter", dtype="float32") == 3
    report.check()


def test_kept_weights_are_gathered_once():
    lowered, report = inspected(reshard=False, all_gather=INT8)
    assert count_ops(lowered, "all_gather", "i8") == 3
    report.check()


def test_weights_that_stay_sharded_over_one_axis_are_quantized_in_both_steps():
    """Over the outer axis in the forward alone, over the inner one again in the backward."""
    mesh, dims = mesh_and_dims("S2xS4", "auto")
    settings = {"dp_mesh_dims": dims, "reshard_after_forward": "inner", "mp_policy": POLICY}
    model = models.Stack(3, 64, nnx.Rngs(0))
    jfsdp.shard(model, mesh, units=models.Block, all_gather=INT8, **settings)
    report = jfsdp.inspect(nnx.grad(mean_square), model, rows(8, 64))
    assert report.count("all-gather", "outer", "int8") == 3
    assert report.count("all-gather", "inner", "int8") == 3 + 2
    report.check()


def test_every_reduction_is_an_all_to_all_of_8_bits():
    lowered, report = inspected(reduce_scatter=REDUCE)
    assert count_ops(lowered, "all_to_all", "i8") == count_ops(lowered, "all_to_all", "f32") == 3
    assert count_ops(lowered, "reduce_scatter") == count_ops(lowered, "all_reduce") == 0
    assert {c.leaf for c in report.collectives if c.kind == "all-to-all"} == {
        f"blocks.{i}.linear.kernel" for i in range(3)
    }
    report.check()


@pytest.mark.parametrize("block", [64, 256, 1000])
def test_bytes_are_those_of_the_elements_and_a_float32_scale_for_each_block(block: int):
    """A device has 512 elements of a weight, and sends or keeps 512 of a gradient for each device."""
    _, plain = inspected(reshard=False)
    settings = {
        "all_gather": jfsdp.QuantizedAllGather(block=block),
        "reduce_scatter": jfsdp.QuantizedReduceScatter(block=block),
    }
    _, report = inspected(reshard=False, **settings)
    share = 1 + 4 * -(-512 // block) / 512  # bytes an element
    assert report.bytes("all-gather") == plain.bytes("all-gather") * share / 2
    assert report.bytes("all-to-all") == plain.bytes("reduce-scatter") * share / 4
    assert [total.ratio for total in report.totals] == [1.0, 1.0]


def test_blocks_of_256_halve_a_bfloat16_gather_and_quarter_a_float32_reduction():
    """Exactly 0.5078 and 0.2539."""
    _, plain = inspected(reshard=False)
    both = {
        "all_gather": jfsdp.QuantizedAllGather(),
        "reduce_scatter": jfsdp.QuantizedReduceScatter(),
    }
    _, report = inspected(reshard=False, **both)
    assert report.bytes("all-gather") / plain.bytes("all-gather") == 0.5 + 4 / (256 * 2)
    assert report.bytes("all-to-all") / plain.bytes("reduce-scatter") == 0.25 + 4 / (256 * 4)


class Widened(jfsdp.QuantizedAllGather):
    """States int8 and gathers what it is given."""

    def __call__(
        self, output_tensor: Any, input_tensor: jax.Array, group: Any, *_: Any
    ) -> jax.Array:
        return jax.lax.all_gather(input_tensor, group, axis=0, tiled=True)


class Unscattered(jfsdp.QuantizedReduceScatter):
    """States int8 and reduces what it is given."""

    def __call__(
        self, output_tensor: Any, input_tensor: jax.Array, group: Any, *_: Any
    ) -> jax.Array:
        return jax.lax.psum_scatter(input_tensor, group, scatter_dimension=0, tiled=True)


@pytest.mark.parametrize("param_dtype", ["bfloat16", "float32"])
def test_a_gather_that_states_int8_and_is_not_is_found(param_dtype: str):
    """In float32 too, in which its scales may travel."""
    policy = jfsdp.MixedPrecisionPolicy(param_dtype=param_dtype)
    _, report = inspected(all_gather=Widened(), mp_policy=policy)
    with pytest.raises(jfsdp.PolicyViolation) as error:
        report.check()
    found = [d for d in error.value.departures if d.leaf]
    assert found[0].leaf == "blocks.0.linear.kernel, blocks.1.linear.kernel, blocks.2.linear.kernel"
    assert found[0].rule == "what its own collective sends to gather"
    assert found[0].expected.startswith("all-gather of int8 over shard (7.0 KiB) and all-gather of")
    assert found[0].found.startswith(f"all-gather of {param_dtype}[64,64] over shard")


def test_a_reduction_that_states_int8_and_is_not_is_found():
    _, report = inspected(reduce_scatter=Unscattered())
    with pytest.raises(jfsdp.PolicyViolation, match="what its own collective sends to reduce"):
        report.check()


def test_a_quantized_linen_stack_under_its_own_remat_is_what_it_states():
    mesh, _ = mesh_and_dims("R2xS4", "auto")
    model = jfsdp.shard(
        linen_models.Scanned(remat=True),
        mesh,
        mp_policy=POLICY,
        all_gather=INT8,
        reduce_scatter=REDUCE,
    )
    x = np.ones((16, 16), np.float32)
    variables = linen_models.abstract(model, x)
    step = jax.jit(jax.value_and_grad(functools.partial(linen_models.mean_square, model)))
    report = jfsdp.inspect(step, variables, x, model=model)
    report.check()
    inside = [c for c in report.collectives if c.in_loop and c.kind in ("all-gather", "all-to-all")]
    assert {c.dtype for c in inside} == {"int8", "float32"}
    assert {c.executions for c in inside} == {7, 6}  # the loops look ahead
    assert report.count("all-reduce", "replica", "float32") >= 4 * 8 + 2


def test_an_integer_parameter_is_gathered_as_it_is():
    class Table(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            codes = self.param("codes", lambda _: jnp.arange(1000, 1016, dtype=jnp.int32))
            return x * codes[None]

    mesh, _ = mesh_and_dims("S8", "auto")
    model, x = jfsdp.shard(Table(), mesh, all_gather=INT8), jnp.ones((8, 16))
    variables = jfsdp.init(lambda: model.init(jax.random.key(0), x))
    np.testing.assert_array_equal(model.apply(variables, x), Table().apply(variables, x))
    report = jfsdp.inspect(model.apply, variables, x, model=model)
    assert report.count("all-gather", dtype="int32") == report.count("all-gather") == 1
