"""What the inspector reads from lowered programs: kinds, axes, dtypes, bytes and how often."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.extend.mlir import ir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jfsdp.inspect import Collective, Minimum, Report, Row, collectives
from jfsdp.inspect.read import inspect
from jfsdp.inspect.table import human_bytes

AXES = ("a", "b", "c")
ARRAY = "tensor<8xf32>"
ALL_DEVICES = "dense<[[0, 1, 2, 3, 4, 5, 6, 7]]> : tensor<1x8xi64>"


def make_mesh(*sizes: int, axis_type: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh(sizes, AXES[: len(sizes)], axis_types=(axis_type,) * len(sizes))


def lower(
    per_device: Callable[..., Any],
    mesh: Mesh,
    *shapes: tuple[int, ...],
    dtype: Any = jnp.float32,
) -> jax.stages.Lowered:
    """A program in which each device runs `per_device` on arrays of just these shapes."""
    region = jax.shard_map(per_device, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(region).lower(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))


def read(
    per_device: Callable[..., Any],
    mesh: Mesh,
    *shapes: tuple[int, ...],
    dtype: Any = jnp.float32,
) -> list[Collective]:
    return collectives(lower(per_device, mesh, *(shapes or ((8,),)), dtype=dtype), mesh)


def executions(per_device: Callable[..., Any]) -> list[int]:
    return [record.executions for record in read(per_device, make_mesh(8))]


def psum(x: jax.Array) -> jax.Array:
    return lax.psum(x, "a")


def read_text(body: str, functions: str = "") -> list[Collective]:
    """Reads hand-written StableHLO, for what JAX does not write. `%x` and `%y` are in scope."""

    class Handwritten:
        def compiler_ir(self, dialect: str) -> ir.Module:
            # A context that has JAX's dialects loaded.
            other = jax.jit(jnp.sin).lower(1.0).compiler_ir(dialect)
            assert isinstance(other, ir.Module)
            with other.context:
                return ir.Module.parse(f"""module {{
                  func.func public @main(%x: {ARRAY}, %y: {ARRAY}) {{ {body} return }}
                  {functions}
                }}""")

    return collectives(Handwritten(), make_mesh(2, 4))  # pyright: ignore[reportArgumentType]


def all_reduce(groups: str = ALL_DEVICES, operands: str = "%x", types: str = ARRAY) -> str:
    results = 1 + operands.count(",")
    return f"""
      %r:{results} = "stablehlo.all_reduce"({operands}) <{{
        replica_groups = {groups}}}> ({{
        ^bb0(%left: tensor<f32>, %right: tensor<f32>):
          stablehlo.return %left : tensor<f32>
      }}) : ({types}) -> ({types})"""


# Kinds, shapes and bytes.


@pytest.mark.parametrize(
    ("per_device", "kind", "shape", "result_shape", "received"),
    [
        (lambda x: lax.all_gather(x, "b", tiled=True), "all-gather", (8, 3), (32, 3), 3 * 96),
        (lambda x: lax.psum_scatter(x, "b", tiled=True), "reduce-scatter", (8, 3), (2, 3), 3 * 24),
        (lambda x: lax.psum(x, "b"), "all-reduce", (8, 3), (8, 3), 2 * 3 * 24),
        (lambda x: lax.all_to_all(x, "b", 0, 1, tiled=True), "all-to-all", (8, 3), (2, 12), 3 * 24),
        (lambda x: lax.ppermute(x, "b", [(0, 1)]), "collective-permute", (8, 3), (8, 3), 96),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_kind_has_its_shapes_and_ring_bytes(
    per_device: Callable[..., Any],
    kind: str,
    shape: tuple[int, ...],
    result_shape: tuple[int, ...],
    received: int,
) -> None:
    expected = Collective(kind, ("b",), "float32", shape, result_shape, 4, 1, received)
    assert read(per_device, make_mesh(2, 4), (8, 3)) == [expected]


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        ("bfloat16", 16),
        ("float16", 16),
        ("float32", 32),
        ("float8_e4m3fn", 8),
        ("float8_e5m2", 8),
        ("float8_e8m0fnu", 8),
        ("float4_e2m1fn", 4),
        ("int4", 4),
        ("uint4", 4),
        ("int8", 8),
        ("uint32", 32),
        ("bool", 8),
        ("complex64", 64),
    ],
)
def test_bytes_follow_the_width_of_the_dtype(dtype: str, bits: int) -> None:
    gather = lambda x: lax.all_gather(x, "a", tiled=True)  # noqa: E731
    (record,) = read(gather, make_mesh(8), (16,), dtype=jnp.dtype(dtype))
    assert (record.dtype, record.bytes_per_device) == (dtype, 7 * 16 * bits / 8)


def test_each_result_of_a_variadic_operation_is_a_record() -> None:
    records = read_text(all_reduce(operands="%x, %y", types=f"{ARRAY}, {ARRAY}"))
    assert [record.shape for record in records] == [(8,), (8,)]


@pytest.mark.parametrize(
    ("kind", "config", "result", "received"),
    [
        ("reduce-scatter", {"replica_groups": [[0, 1, 2, 3], [4, 5, 6, 7]]}, (2,), 24),
        ("collective-permute", {"permutation": [[0, 1], [4, 5]]}, (8,), 32),
    ],
)
def test_the_start_of_an_asynchronous_collective_is_the_collective(
    kind: str, config: dict[str, Any], result: tuple[int], received: int
) -> None:
    escaped = json.dumps(config).replace('"', "\\22")
    records = read_text(f"""
      %start = stablehlo.custom_call @"{kind}-start"(%x) {{
        mhlo.frontend_attributes = {{async_collective_config = "{escaped}"}}
      }} : ({ARRAY}) -> tensor<{result[0]}xf32>
      %done = stablehlo.custom_call @"{kind}-done"(%start) :
        (tensor<{result[0]}xf32>) -> tensor<{result[0]}xf32>""")
    assert records == [Collective(kind, ("b",), "float32", (8,), result, 4, 1, received)]


# Axes.


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (4, 2), (2, 2, 2), (2, 1, 4), (1, 4, 2)])
def test_axes_are_named_in_mesh_order_for_every_combination(sizes: tuple[int, ...]) -> None:
    mesh = make_mesh(*sizes)
    for chosen in range(1, 2 ** len(sizes)):
        axes = [axis for bit, axis in enumerate(mesh.axis_names) if chosen >> bit & 1]
        varying = tuple(axis for axis in axes if mesh.shape[axis] > 1)
        records = read(lambda x, axes=axes: lax.psum(x, tuple(reversed(axes))), mesh)
        found = [(record.axes, record.group_size, record.groups) for record in records]
        assert found == [(varying, math.prod(mesh.shape[axis] for axis in axes), "")]


def test_nothing_travels_where_no_device_has_a_partner() -> None:
    def per_device(x: jax.Array) -> Any:
        gathered = lax.all_gather(x, "b")
        still = lax.ppermute(x, "b", [(0, 0)]), lax.ppermute(x, "a", [])
        return gathered, lax.psum(x, "b"), *still

    records = read(per_device, make_mesh(8, 1))
    found = [(record.axes, record.group_size, record.bytes_per_device) for record in records]
    assert found == [((), 1, 0.0)] * 4


def test_a_permute_is_over_the_axes_it_moves_along() -> None:
    pairs = [(0, 1), (1, 2), (2, 3), (3, 0)]
    (record,) = read(lambda x: lax.ppermute(x, ("a", "c"), pairs), make_mesh(2, 2, 2))
    assert (record.axes, record.group_size) == (("a", "c"), 4)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_axes_of_a_partly_manual_region_are_named(axis_type: AxisType) -> None:
    mesh = make_mesh(2, 2, 2, axis_type=axis_type)
    spec = P(("a", "c"), None)
    region = jax.shard_map(
        lambda x: lax.psum(lax.all_gather(x, "c"), ("a", "c")),
        mesh=mesh,
        in_specs=spec,
        out_specs=P(None, None, None),
        axis_names={"a", "c"},
        check_vma=False,
    )
    argument = jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        records = collectives(jax.jit(region).lower(argument), mesh)
    assert [record.axes for record in records] == [("c",), ("a", "c")]


def test_axes_of_a_nested_region_are_named() -> None:
    def outer(x: jax.Array) -> jax.Array:
        inner = jax.shard_map(
            lambda x: lax.psum(x, ("a", "c")),
            in_specs=P("c"),
            out_specs=P("c"),
            axis_names={"c"},
            check_vma=False,
        )
        return inner(x)

    mesh = make_mesh(2, 2, 2)
    region = jax.shard_map(
        outer, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"}, check_vma=False
    )
    (record,) = collectives(jax.jit(region).lower(jax.ShapeDtypeStruct((8,), jnp.float32)), mesh)
    assert (record.axes, record.shape) == (("a", "c"), (2,))


def test_the_physical_order_of_devices_does_not_matter() -> None:
    mesh = Mesh(np.array(jax.devices())[[3, 1, 7, 0, 2, 6, 4, 5]].reshape(2, 4), ("a", "b"))
    assert [record.axes for record in read(lambda x: lax.psum(x, "b"), mesh)] == [("b",)]


def test_an_abstract_mesh_larger_than_the_machine_is_read() -> None:
    mesh = AbstractMesh((4, 16), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    with jax.sharding.use_abstract_mesh(mesh):
        region = jax.shard_map(
            lambda x: lax.psum(x, "b"), in_specs=P(), out_specs=P(), check_vma=False
        )
        lowered = jax.jit(region).lower(jax.ShapeDtypeStruct((8,), jnp.float32))
    (record,) = collectives(lowered, mesh)
    assert (record.axes, record.group_size) == (("b",), 16)


def test_the_axis_of_a_pmap_is_named() -> None:
    lowered = jax.pmap(lambda x: lax.psum(x, "a"), axis_name="a").lower(jnp.ones((8, 2)))
    assert [record.axes for record in collectives(lowered, make_mesh(8))] == [("a",)]


def test_groups_that_no_axes_explain_are_kept_as_text() -> None:
    mesh = make_mesh(2, 4)
    halves = [[0, 2], [1, 3]]
    (record,) = read(lambda x: lax.all_gather(x, "b", axis_index_groups=halves), mesh)
    assert (record.axes, record.group_size) == ((), 2)
    assert record.groups == "[[0, 2], [1, 3], [4, 6], [5, 7]]"


def test_groups_of_another_mesh_of_the_program_are_kept_as_text() -> None:
    one, two = make_mesh(2, 4), jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def per_device(axis: str, mesh: Mesh) -> Callable[..., Any]:
        return jax.shard_map(
            lambda x: lax.psum(x, axis), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
        )

    step = jax.jit(lambda x: per_device("y", two)(per_device("b", one)(x)))
    records = collectives(step.lower(jax.ShapeDtypeStruct((8,), jnp.float32)), one)
    assert [record.axes for record in records] == [("b",), ()]
    assert records[1].groups == "[[0, 1], [2, 3], [4, 5], [6, 7]]"


def test_a_mesh_that_the_program_does_not_run_on_is_refused() -> None:
    lowered = lower(psum, make_mesh(2, 4), (8,))
    with pytest.raises(ValueError, match=r"not run on the mesh a=4 x b=2, but on a=2 x b=4;"):
        collectives(lowered, make_mesh(4, 2))


def test_no_groups_stand_for_all_devices() -> None:
    (record,) = read_text(all_reduce("dense<> : tensor<0x0xi64>"))
    assert (record.axes, record.group_size) == (("a", "b"), 8)


def test_the_filling_of_short_groups_is_no_device() -> None:
    (record,) = read_text(
        all_reduce("dense<[[0, 1, 2, 3, 4], [5, 6, 7, -1, -1]]> : tensor<2x5xi64>")
    )
    assert (record.axes, record.groups) == ((), "[[0, 1, 2, 3, 4], [5, 6, 7]]")


def test_positions_outside_the_mesh_are_kept_as_text() -> None:
    devices = [list(range(16))]
    (record,) = read_text(all_reduce(f"dense<{devices}> : tensor<1x16xi64>"))
    assert (record.axes, record.groups) == ((), str(devices))


@pytest.mark.parametrize(
    ("mesh", "axes"),
    [
        ('#stablehlo.mesh<axes = [#stablehlo.mesh_axis<name = "b", size = 4>]>', 'name = "b"'),
        ("@mesh", 'name = "b", sub_axis_info = (1)2'),
    ],
    ids=["mesh in place", "part of an axis"],
)
def test_an_unknown_spelling_of_groups_is_refused(mesh: str, axes: str) -> None:
    groups = (
        f"#stablehlo.replica_group_mesh_axes<mesh = {mesh}, axes = [#stablehlo.axis_ref<{axes}>]>"
    )
    with pytest.raises(ValueError, match=r"writes device groups in an unknown way"):
        read_text(all_reduce(groups), 'sdy.mesh @mesh = <["a"=2, "b"=4]>')


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


def loop_to(bound: Any, x: jax.Array) -> jax.Array:
    return lax.fori_loop(jnp.int32(0), bound, lambda _, carry: psum(carry), x)


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


# Reports.


def record(kind: str, axis: str, dtype: str, times: int, received: float) -> Collective:
    return Collective(kind, (axis,), dtype, (), (), 2, times, received)


def example() -> Report:
    return Report(
        collectives=(
            record("all-reduce", "fsdp", "float32", 1, 7),
            record("all-gather", "fsdp", "bfloat16", 3, 1024**2),
            record("all-gather", "fsdp", "bfloat16", 1, 1024**2),
            record("all-reduce", "replica", "float32", 2, 1536),
        ),
        minima=(
            Minimum("all-gather", 4 * 1024**2, "parameters in bfloat16"),
            Minimum("all-reduce", 3072),
            Minimum("reduce-scatter", 100),
        ),
        mesh_axes=(("replica", 2), ("fsdp", 4)),
        jax_version="1.2.3",
    )


def test_rows_add_up_what_has_kind_axes_and_dtype_in_common() -> None:
    assert example().rows == (
        Row("all-gather", ("fsdp",), "bfloat16", 4, 4 * 1024**2, 4 * 1024**2),
        Row("reduce-scatter", (), "", 0, 0, 100),
        Row("all-reduce", ("replica",), "float32", 2, 3072),
        Row("all-reduce", ("fsdp",), "float32", 1, 7),
    )


def test_groups_without_axes_have_rows_of_their_own() -> None:
    one, two = (
        dataclasses.replace(record("all-reduce", "a", "float32", 1, 7), axes=(), groups=groups)
        for groups in ("[[0, 1], [2, 3]]", "[[0, 3], [1, 2]]")
    )
    assert [row.groups for row in Report((one, two, one)).rows] == [one.groups, two.groups]


def test_totals_hold_each_kind_against_its_minimum() -> None:
    ratios = {total.kind: total.ratio for total in example().totals}
    assert ratios == {"all-gather": 1.0, "reduce-scatter": 0.0, "all-reduce": 3079 / 3072}


def test_minima_of_one_kind_add_up() -> None:
    report = Report((), minima=(Minimum("all-gather", 3), Minimum("all-gather", 4)))
    assert [total.minimum for total in report.totals] == [7]


def test_a_minimum_of_zero_has_no_ratio() -> None:
    report = Report((record("all-reduce", "a", "float32", 1, 7),), (Minimum("all-reduce", 0),))
    assert [row.ratio for row in report.rows] == [None]


def test_count_and_bytes_select_by_kind_axes_and_dtype() -> None:
    report = example()
    assert (report.count(), report.total_bytes) == (7, 4 * 1024**2 + 3072 + 7)
    assert (report.count("all-reduce"), report.bytes("all-reduce", axes="fsdp")) == (3, 7)
    assert (report.count(axes=("fsdp",)), report.count(dtype=jnp.bfloat16)) == (5, 4)


@pytest.mark.parametrize(
    ("selection", "error", "message"),
    [
        ({"kind": "all_gather"}, ValueError, "no kind of collective 'all_gather'; there are"),
        ({"axes": "fdsp"}, ValueError, r"no axes \['fdsp'\] in this mesh, which has"),
        ({"dtype": "bf16"}, TypeError, "bf16"),
    ],
)
def test_a_misspelled_selection_is_an_error(
    selection: dict[str, str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        example().count(**selection)


def test_a_minimum_of_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(ValueError, match="no kind of collective 'gather'"):
        Minimum("gather", 1)


def test_a_negative_minimum_is_an_error() -> None:
    with pytest.raises(ValueError, match="is -1 bytes; give a number of bytes from 0 up"):
        Minimum("all-gather", -1)


def test_reports_are_equal_by_value() -> None:
    assert example() == example()


def test_json_has_exact_bytes_and_ratios() -> None:
    content = json.loads(example().to_json())
    assert content["mesh"] == {"replica": 2, "fsdp": 4}
    assert content["total_bytes"] == 4 * 1024**2 + 3072 + 7
    assert content["totals"][2]["ratio"] == 3079 / 3072
    assert [record["executions"] for record in content["collectives"]] == [1, 3, 1, 2]


def test_the_table_is_aligned_and_complete() -> None:
    assert (
        str(example())
        == """\
jax 1.2.3, mesh replica=2 x fsdp=4: as lowered, before compiler passes; \
bytes received per device and step

kind            axes     dtype     count    bytes  minimum  ratio
-----------------------------------------------------------------
all-gather      fsdp     bfloat16      4  4.0 MiB  4.0 MiB  1.000
reduce-scatter  -        -             0      0 B    100 B  0.000
all-reduce      replica  float32       2  3.0 KiB
                fsdp     float32       1      7 B
                total                  3  3.0 KiB  3.0 KiB  1.002
-----------------------------------------------------------------
7 collectives, 4.0 MiB
minimum of all-gather: parameters in bfloat16"""
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1023.6, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (5 * 1024**3, "5.0 GiB"),
        (2048 * 1024**3, "2.0 TiB"),
    ],
)
def test_bytes_are_written_in_the_largest_unit_that_fits(count: float, text: str) -> None:
    assert human_bytes(count) == text


def test_the_table_says_when_counts_are_a_lower_bound() -> None:
    report = inspect(
        lower(lambda x: loop_to(x[0].astype(int), x), make_mesh(8), (8,)), mesh=make_mesh(8)
    )
    assert "all-reduce  a     float32     1+   56 B" in str(report)
    assert str(report).endswith(
        "+ inside a loop whose length the program does not say: counted once"
    )


def test_the_table_of_an_empty_program_says_so() -> None:
    assert str(inspect(jnp.sin, jnp.ones(3), mesh=make_mesh(8))).endswith("\n\nno collectives")


# From a step to its report.


@pytest.mark.parametrize("wrap", [jax.jit, nnx.jit, lambda step: step], ids=["jit", "nnx", "plain"])
def test_a_step_is_lowered_with_its_arguments(wrap: Callable[..., Any]) -> None:
    mesh = make_mesh(2, 4)
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    region = jax.shard_map(
        lambda x: lax.psum(x, "b"), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    step = (lambda model, x: region(model(x))) if wrap is not jax.jit else lambda _, x: region(x)
    argument = 0 if wrap is jax.jit else model
    report = inspect(wrap(step), argument, x=jnp.ones((2, 4)), mesh=mesh)
    assert (report.count("all-reduce", axes="b"), report.jax_version) == (1, jax.__version__)


@pytest.mark.parametrize("jit", [jax.jit, nnx.jit])
def test_a_lowered_program_is_read_as_it_is(jit: Callable[..., Any]) -> None:
    assert inspect(jit(jnp.sin).lower(jnp.ones(3)), mesh=make_mesh(8)).count() == 0


def test_arguments_of_a_lowered_program_are_an_error() -> None:
    with pytest.raises(TypeError, match="the program is lowered already"):
        inspect(jax.jit(jnp.sin).lower(1.0), 1.0, mesh=make_mesh(8))


def test_what_cannot_be_lowered_is_an_error() -> None:
    with pytest.raises(TypeError, match="expected a function or a lowered program, got str"):
        inspect("step", mesh=make_mesh(8))
