"""What `place` refuses, the reasons it gives for a replicated leaf, and the texts of both."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import jfsdp
from jfsdp.mesh import DataParallelMesh
from jfsdp.placement import place

P = PartitionSpec


def data_parallel(shard, replicate=None, **sizes: int) -> DataParallelMesh:
    types = (AxisType.Auto,) * len(sizes)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)
    return DataParallelMesh(mesh, jfsdp.DataParallelMeshDims(shard, replicate))


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


ERRORS = {
    "asked for nothing that is an int": (
        (8, 6),
        {"asked": "0"},
        TypeError,
        "must return a dimension (int), {dimension: axes}, (dimension, jfsdp.DataParallelMeshDims(...)) or "
        "None, got '0'",
    ),
    "asked for a bool": (
        (8, 6),
        {"asked": True},
        TypeError,
        "(dimension, jfsdp.DataParallelMeshDims(...)) or None, got True",
    ),
    "asked for no dimension": (
        (8, 6),
        {"asked": 2},
        ValueError,
        "shard_placement_fn chose dimension 2, but the shape (8, 6) has 2 dimensions",
    ),
    "asked for a dimension that does not divide": (
        (8, 6),
        {"asked": 1},
        ValueError,
        "shard_placement_fn shards dimension 1 of shape (8, 6) over x=2 x y=4, but 6 does not "
        "divide by 8. Choose a dimension that does, or return None to let jfsdp choose",
    ),
    "asked for the layers": (
        (8, 8),
        {"asked": -2, "stacked_axis": 0},
        ValueError,
        "chose dimension 0 of (8, 8), which is the stacked (layer) axis: every layer would be "
        "gathered at once. Choose another",
    ),
    "asked for a held dimension": (
        (8, 8),
        {"asked": 0, "own_spec": P("tensor")},
        ValueError,
        "chose dimension 0 of (8, 8), which already lies on tensor. Choose another dimension",
    ),
    "asked against its own spec": (
        (8, 8),
        {"asked": 1, "own_spec": P(("x", "y"))},
        ValueError,
        "chose dimension 1, but the parameter's own PartitionSpec P(('x', 'y'),) "
        "already uses x, y. Drop",
    ),
    "own spec of more entries": (
        (8,),
        {"own_spec": P("tensor", "x")},
        ValueError,
        "its PartitionSpec P('tensor', 'x') has 2 entries but its shape (8,) has 1 dimensions",
    ),
    "own spec of some shard axes": (
        (8, 8),
        {"own_spec": P(None, "x")},
        ValueError,
        "its own PartitionSpec P(None, 'x') uses ['x'] of the shard axes ['x', 'y']. "
        "Name all of them",
    ),
    "own spec with another axis first": (
        (8, 16),
        {"own_spec": P(None, ("tensor", "x", "y"))},
        ValueError,
        "puts ('tensor', 'x', 'y') on dimension 1; the shard axes ('x', 'y') must come first there",
    ),
    "own spec that does not divide": (
        (8, 6),
        {"own_spec": P("x", "y")},
        ValueError,
        "its own PartitionSpec shards dimension 1 of shape (8, 6) over y=4, but 6 does not "
        "divide by 4",
    ),
    "own spec of an unknown axis": (
        (8, 6),
        {"own_spec": P("model")},
        ValueError,
        "names the axis 'model', which the mesh does not have. Its axes: x=2, y=4, "
        "tensor=2, copies=2",
    ),
    "own spec of a replicate axis": (
        (8, 6),
        {"own_spec": P("copies")},
        ValueError,
        "P('copies',) uses 'copies', but DataParallelMeshDims says that axis holds copies. Drop it",
    ),
    "layers that do not exist": (
        (8, 6),
        {"stacked_axis": 2},
        ValueError,
        "stacked_axis=2 does not exist in shape (8, 6)",
    ),
}


@pytest.mark.parametrize(("shape", "settings", "kind", "text"), ERRORS.values(), ids=ERRORS)
def test_error_names_the_path_and_the_remedy(shape, settings, kind, text):
    dp = data_parallel(("x", "y"), "copies", x=2, y=4, tensor=2, copies=2)
    with pytest.raises(kind) as error:
        place("block.w", f32(*shape), dp, **settings)
    assert str(error.value).startswith("block.w: ")
    assert text in str(error.value)


REASONS = {
    "scalar": ((), {}, "a scalar"),
    "empty": ((0, 3), {"stacked_axis": 1}, "it has no elements"),
    "layers only": ((8,), {"stacked_axis": 0}, "only the stacked (layer) axis is left"),
    "held": ((8, 8), {"own_spec": P("tensor", "other")}, "other mesh axes hold its dimensions"),
    "odd": ((3, 7), {}, "no free dimension (3, 7) divides by 8"),
}


@pytest.mark.parametrize(("shape", "settings", "reason"), REASONS.values(), ids=REASONS)
def test_reason_says_why_a_leaf_is_replicated(shape, settings, reason):
    dp = data_parallel(("x", "y"), x=2, y=4, tensor=2, other=2)
    assert place("w", f32(*shape), dp, **settings).reason == reason


def test_reason_without_shard_axis_is_the_mesh():
    placement = place("w", f32(8), data_parallel(None, "x", x=8))
    assert placement.reason == "the mesh has no shard axis larger than 1"


def test_slice_of_another_rank_is_refused_with_the_stacked_axis_to_pass():
    placement = place("w", f32(3, 8, 8), data_parallel("x", x=2))
    with pytest.raises(ValueError) as error:
        placement.dims_at_rank(2)
    assert "w: sharded with shape (3, 8, 8)" in str(error.value)
    assert "an array of 2 dimensions" in str(error.value)
    assert "jfsdp.shard(..., stacked_axis=0)" in str(error.value)
