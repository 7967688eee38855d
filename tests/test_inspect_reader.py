"""What the inspector reads from lowered programs: kinds, axes, dtypes and bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import (
    ARRAY,
    all_reduce,
    lower,
    make_mesh,
    psum,
    read,
    read_text,
)

from jfsdp.inspect import Collective, collectives

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
