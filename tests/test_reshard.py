"""What `reshard_after_forward` means on a mesh, and what is stated of it; no device is asked."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

import jfsdp
from jfsdp.mesh import DataParallelMesh
from jfsdp.placement import place
from jfsdp.reshard import resolved
from jfsdp.units import Unit


def dp_of(shard=("a", "b", "c"), replicate="r", **sizes: int) -> DataParallelMesh:
    sizes = sizes or {"r": 2, "a": 2, "b": 4, "c": 8, "t": 2}
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))
    return DataParallelMesh(mesh, jfsdp.DataParallelMeshDims(shard, replicate))


@pytest.mark.parametrize(
    ("given", "meaning"),
    [
        (None, None),
        (True, True),
        (False, False),
        ("c", ("c",)),
        ("a", ("a",)),
        (("b", "c"), ("b", "c")),
        (("c", "a"), ("a", "c")),
        (("c", "b", "a"), True),
        (8, ("c",)),
        (32, ("b", "c")),
        (64, True),
        (1, False),
    ],
)
def test_meaning_on_a_mesh_of_2_4_8(given, meaning):
    assert resolved(given, dp_of()) == meaning


@pytest.mark.parametrize(
    ("given", "meaning"),
    [("one", False), ("c", True), (("one", "c"), True), (8, True), (1, False)],
)
def test_axes_of_size_1_are_no_parts(given, meaning):
    assert resolved(given, dp_of(("one", "c"), None, one=1, c=8)) == meaning


@pytest.mark.parametrize("given", [1, "c"])
def test_on_one_device_all_shards_are_one(given):
    assert resolved(given, dp_of("c", None, c=1)) is True


@pytest.mark.parametrize("given", [0, -8, 2, 4, 16, 128])
def test_int_that_no_last_axes_have_is_refused(given):
    text = (
        f"reshard_after_forward={given}: a weight can stay in 1, 8, 32 or 64 parts here, the sizes of the "
        "last shard axes together (a=2, b=4, c=8)."
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        resolved(given, dp_of())


@pytest.mark.parametrize(
    ("given", "what"),
    [("r", "a replicate axis"), ("t", "no data-parallel axis"), ("x", "no axis of the mesh")],
)
def test_axis_that_does_not_shard_is_refused(given, what):
    text = (
        f"reshard_after_forward=('c', '{given}'): '{given}' is {what} (r=2, a=2, b=4, c=8, t=2). Weights "
        "can stay sharded over shard axes only: 'a', 'b', 'c'."
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        resolved(("c", given), dp_of())


@pytest.mark.parametrize(
    ("reshard", "again"),
    [
        (True, (("a", "b", "c"), 63 / 64)),
        (("b", "c"), (("b", "c"), 31 / 32)),
        (("c",), (("c",), 7 / 8)),
        (("a",), (("a",), 1 / 2)),
        (False, None),
    ],
)
def test_what_is_stated_of_the_backward_is_the_formula(reshard, again):
    unit = Unit(dp_of(), jfsdp.MixedPrecisionPolicy("bfloat16"), reshard)
    placement = place("w", jax.ShapeDtypeStruct((64, 3), jnp.float32), unit.dp)
    size = 64 * 3 * 2
    wanted = again and (again[0], "bfloat16", size * again[1])
    assert unit.stated_again(placement, is_root=False) == wanted
    total = size * 63 / 64 + (size * again[1] if again else 0)
    assert unit.stated(placement, is_root=False)["all-gather"] == (
        ("a", "b", "c"),
        "bfloat16",
        total,
    )
