"""How often a collective runs: loops, calls, branches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from programs import (
    ARRAY,
    AXES,
    all_reduce,
    executions,
    loop_to,
    lower,
    make_mesh,
    psum,
    read,
    read_text,
)

from jfsdp.inspect import collectives
from jfsdp.inspect.read import inspect

# How often.


def scanned(body: Callable[..., Any], length: int) -> Callable[..., Any]:
    return lambda x: lax.scan(lambda carry, _: (body(carry), None), x, length=length)[0]


def counted(first: Any, condition: Callable[..., Any], step: int) -> Callable[..., Any]:
    """A while loop that keeps its counter and its bound of 8 as operands."""
    return lambda x: lax.while_loop(
        lambda carry: condition(carry[0], carry[1]),
        lambda carry: (carry[0] + step, carry[1], psum(carry[2])),
        (jnp.int32(first), jnp.int32(8), x),
    )[2]


@pytest.mark.parametrize(
    ("per_device", "expected"),
    [
        pytest.param(psum, [1], id="no loop"),
        pytest.param(scanned(psum, 5), [5], id="scan"),
        pytest.param(scanned(scanned(psum, 3), 5), [15], id="scan in scan"),
        pytest.param(scanned(jax.jit(scanned(psum, 3)), 5), [15], id="jitted scan in scan"),
        pytest.param(scanned(jax.checkpoint(psum), 5), [5], id="checkpoint in scan"),
        pytest.param(
            lambda x: lax.scan(lambda c, _: (psum(c), None), x, length=7, unroll=2)[0],
            [3, 3, 1],
            id="unrolled scan",
        ),
        pytest.param(lambda x: lax.map(psum, x), [8], id="map"),
        pytest.param(lambda x: lax.fori_loop(2, 9, lambda _, c: psum(c), x), [7], id="fori_loop"),
        pytest.param(lambda x: loop_to(jnp.int32(4), x), [4], id="bound as operand"),
        pytest.param(lambda x: jax.jit(loop_to)(jnp.int32(4), x), [4], id="bound as argument"),
        pytest.param(
            lambda x: lax.fori_loop(
                0, 5, lambda _, c: (c[0], loop_to(c[0], c[1])), (jnp.int32(3) + 1, x)
            )[1],
            [20],
            id="bound carried by the outer loop",
        ),
        pytest.param(
            lambda x: loop_to(jax.jit(lambda n: n + 1)(jnp.int32(3)), x),
            [4],
            id="bound from a function",
        ),
        pytest.param(
            lambda x: loop_to(
                *lax.while_loop(
                    lambda c: c[2] < 5,
                    lambda c: (c[0], psum(c[1]), c[2] + 1),
                    (jnp.int32(4), x, jnp.int32(0)),
                )[:2]
            ),
            [5, 4],
            id="bound out of another loop",
        ),
        pytest.param(
            lambda x: loop_to(lax.optimization_barrier((x, jnp.int8(4)))[1].astype(jnp.int32), x),
            [4],
            id="bound behind a barrier and a cast",
        ),
        pytest.param(lambda x: jax.jit(psum)(jax.jit(psum)(x)), [1, 1], id="called twice"),
        pytest.param(counted(2, lambda i, n: i < n, 3), [2], id="less than"),
        pytest.param(counted(2, lambda i, n: i <= n, 3), [3], id="at most"),
        pytest.param(counted(2, lambda i, n: n > i, 3), [2], id="bound on the left"),
        pytest.param(counted(12, lambda i, n: i > n, -3), [2], id="greater than"),
        pytest.param(counted(14, lambda i, n: i >= n, -3), [3], id="at least"),
        pytest.param(counted(2, lambda i, n: i != n, 3), [2], id="not equal"),
        pytest.param(counted(2, lambda i, n: i - 4 < n, 3), [4], id="counter minus a constant"),
        pytest.param(counted(2, lambda i, n: 4 + i < n, 3), [1], id="constant plus a counter"),
        pytest.param(counted(9, lambda i, n: i < n, 3), [], id="no trip"),
    ],
)
def test_a_loop_of_known_length_multiplies(
    per_device: Callable[..., Any], expected: Sequence[int]
) -> None:
    records = read(per_device, make_mesh(8), (8,))
    assert [record.executions for record in records] == expected
    assert not any(record.unknown_trips for record in records)


@pytest.mark.parametrize(
    ("per_device", "known_part"),
    [
        pytest.param(lambda x: lax.while_loop(lambda c: c.sum() < 3, psum, x), 1, id="data"),
        pytest.param(lambda x: loop_to(x[0].astype(jnp.int32), x), 1, id="bound from data"),
        pytest.param(
            lambda x: lax.fori_loop(0, 5, lambda i, c: loop_to(i, c), x), 5, id="outer counter"
        ),
        pytest.param(counted(2, lambda i, n: i > n - 9, 3), 1, id="never ends"),
        pytest.param(counted(2, lambda i, n: i != n, 5), 1, id="steps over its bound"),
        pytest.param(counted(2, lambda i, n: (i < n) & (n > 1), 3), 1, id="two conditions"),
        pytest.param(counted(8, lambda i, n: i == n, 1), 1, id="equal"),
        pytest.param(
            lambda x: lax.while_loop(
                lambda c: c[0] < c[1],
                lambda c: (c[1] + 1, c[1], psum(c[2])),
                (jnp.int32(1), jnp.int32(8), x),
            )[2],
            1,
            id="counter set from the bound",
        ),
        pytest.param(
            lambda x: lax.while_loop(
                lambda c: c[0] < 8, lambda c: (c[0] + c[0], psum(c[1])), (jnp.int32(1), x)
            )[1],
            1,
            id="doubles",
        ),
    ],
)
def test_a_loop_of_unknown_length_counts_once_and_says_so(
    per_device: Callable[..., Any], known_part: int
) -> None:
    (record,) = read(per_device, make_mesh(8))
    assert (record.in_loop, record.unknown_trips, record.executions) == (True, True, known_part)


def test_a_bound_is_followed_into_a_region() -> None:
    mesh = make_mesh(8)
    region = jax.shard_map(loop_to, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    lowered = jax.jit(lambda x: region(jnp.int32(4), x)).lower(jnp.ones(8))
    assert [record.executions for record in collectives(lowered, mesh)] == [4]


def test_a_loop_in_a_region_beside_explicit_axes_is_counted() -> None:
    mesh = make_mesh(2, 4, axis_type=AxisType.Explicit)
    region = jax.shard_map(
        scanned(psum, 5), mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"a"}, check_vma=False
    )
    with jax.set_mesh(mesh):
        records = collectives(jax.jit(region).lower(jnp.ones(8)), mesh)
    assert [record.executions for record in records] == [5]


def test_only_what_is_in_a_loop_is_marked_so() -> None:
    records = read(lambda x: psum(scanned(psum, 2)(x)), make_mesh(8))
    assert [record.in_loop for record in records] == [True, False]


def test_the_condition_of_a_loop_runs_once_more_than_its_body() -> None:
    records = read_text(f"""
      %zero = stablehlo.constant dense<0> : tensor<i32>
      %loop = stablehlo.while(%i = %zero) : tensor<i32> cond {{
        {all_reduce()}
        %three = stablehlo.constant dense<3> : tensor<i32>
        %more = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %more : tensor<i1>
      }} do {{
        {all_reduce()}
        %one = stablehlo.constant dense<1> : tensor<i32>
        %next = stablehlo.add %i, %one : tensor<i32>
        stablehlo.return %next : tensor<i32>
      }}""")
    assert [record.executions for record in records] == [4, 3]


def test_every_branch_of_a_conditional_counts() -> None:
    assert executions(lambda x: lax.cond(x[0] > 0, psum, lambda x: psum(psum(x)), x)) == [1] * 3


def test_a_function_that_nobody_calls_does_not_count() -> None:
    assert not read_text("", f"func.func private @dead(%x: {ARRAY}) {{ {all_reduce()} return }}")


def test_the_body_of_a_composite_counts() -> None:
    assert executions(lax.composite(psum, name="my.psum")) == [1]


def test_checkpoint_gathers_again_in_the_backward() -> None:
    block = jax.checkpoint(lambda x: jnp.sin(lax.all_gather(x, "a", tiled=True))[:8])
    records = read(jax.value_and_grad(lambda x: block(x).sum()), make_mesh(8))
    assert sorted(record.kind for record in records) == ["all-gather"] * 2 + ["reduce-scatter"]


def test_a_program_without_collectives_is_empty() -> None:
    assert collectives(jax.jit(jnp.sin).lower(1.0), make_mesh(2, 4)) == []


@hypothesis.given(
    sizes=st.sampled_from([(8,), (2, 4), (4, 2), (2, 2, 2), (1, 8)]),
    chosen=st.sets(st.integers(0, 2), min_size=1),
    dims=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    dtype=st.sampled_from([jnp.bfloat16, jnp.float32, jnp.int8]),
    length=st.integers(1, 4),
    calls=st.integers(1, 3),
)
def test_counts_and_bytes_follow_the_formulae(
    sizes: tuple[int, ...],
    chosen: set[int],
    dims: list[int],
    dtype: Any,
    length: int,
    calls: int,
) -> None:
    axes = tuple(AXES[index] for index in sorted({index % len(sizes) for index in chosen}))
    group = math.prod(sizes[AXES.index(axis)] for axis in axes)

    @jax.jit
    def unit(x: jax.Array) -> jax.Array:
        whole = lax.all_gather(x, axes, tiled=True)
        return lax.psum(lax.psum_scatter(whole, axes, tiled=True), axes)

    def per_device(x: jax.Array) -> jax.Array:
        for _ in range(calls):
            x = unit(x)
        return x

    mesh = make_mesh(*sizes)
    report = inspect(lower(scanned(per_device, length), mesh, tuple(dims), dtype=dtype), mesh=mesh)
    shard = math.prod(dims) * jnp.dtype(dtype).itemsize
    for kind, passes in (("all-gather", group), ("reduce-scatter", group), ("all-reduce", 2)):
        assert report.count(kind) == calls * length
        expected = calls * length * passes * shard * (group - 1) / group
        assert report.bytes(kind) == pytest.approx(expected, rel=1e-12)
