"""What `shard_placement_fn` may answer: where the parameter lies then, and what is refused."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jfsdp import DataParallelMeshDims
from jfsdp.mesh import DataParallelMesh
from jfsdp.placement import place

P = PartitionSpec
SIZES = {"a": 2, "b": 4, "copies": 2, "tensor": 2, "one": 1}


def unit_of(**dims) -> DataParallelMesh:
    types = (AxisType.Auto,) * len(SIZES)
    mesh = AbstractMesh(tuple(SIZES.values()), tuple(SIZES), axis_types=types)
    return DataParallelMesh(mesh, DataParallelMeshDims(**dims))


UNIT = unit_of(shard=("a", "b"), replicate="copies")


def answered(answer, shape=(8, 16, 32), own_spec=None, unit=UNIT, **settings):
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
    return place("block.w", leaf, unit, own_spec=own_spec, asked=answer, **settings)


SPECS = {
    "negative dimension": (-1, None, P(None, None, ("a", "b"))),
    "two axes on two dimensions": ({0: "a", 2: "b"}, None, P("a", None, "b")),
    "two axes in another order": ({1: ("b", "a")}, None, P(None, ("b", "a"))),
    "negative dimension in a mapping": ({-1: "a", 0: "b"}, None, P("b", None, "a")),
    "mapping beside a tensor axis": ({0: "a", 2: "b"}, P(None, "tensor"), P("a", "tensor", "b")),
    "mapping that its own spec says too": ({0: "a", 1: "b"}, P("a", "b"), P("a", "b")),
    "experts": ((1, DataParallelMeshDims("b", "copies")), P("a"), P("a", "b")),
    "experts and shards on one dimension": (
        (0, DataParallelMeshDims("b", "copies")),
        P("a"),
        P(("a", "b")),
    ),
    "experts by the rule": ((None, DataParallelMeshDims("b", "copies")), P("a"), P("a", None, "b")),
    "experts not sharded beside that": (
        (None, DataParallelMeshDims(None, ("b", "copies"))),
        P("a"),
        P("a"),
    ),
    "experts and a mapping": (
        ({1: "b", 2: "copies"}, DataParallelMeshDims(("b", "copies"))),
        P("a"),
        P("a", "b", "copies"),
    ),
    "experts over a replicate axis of the unit": (
        (1, DataParallelMeshDims(("a", "b"))),
        P("copies"),
        P("copies", ("a", "b")),
    ),
    "experts beside a tensor axis": (
        (1, DataParallelMeshDims("b", "copies")),
        P("a", None, "tensor"),
        P("a", "b", "tensor"),
    ),
    "fewer shards than the unit": ((2, DataParallelMeshDims("b", ("a", "copies"))), None, P(None, None, "b")),
}  # fmt: skip


@pytest.mark.parametrize(("answer", "own_spec", "spec"), SPECS.values(), ids=SPECS)
def test_answer_is_where_the_parameter_lies(answer, own_spec, spec):
    assert answered(answer, own_spec=own_spec).spec == spec


def test_axes_of_size_one_are_left_out():
    unit = unit_of(shard=("a", "one"), replicate="b")
    assert answered({0: "one", 1: "a"}, unit=unit).spec == P(None, "a")
    assert answered({1: "a"}, unit=unit).spec == P(None, "a")


def test_parameter_with_axes_of_its_own_is_summed_over_its_copies_alone():
    placement = answered((1, DataParallelMeshDims("b", "copies")), own_spec=P("a"))
    assert placement.dims == ((1, ("b",)),)
    assert placement.local == ((0, ("a",)),)
    assert placement.copies(UNIT) == ("copies",)
    assert placement.whole_shape == (4, 16, 32)


def test_size_on_a_device_counts_every_axis():
    placement = answered((1, DataParallelMeshDims("b", "copies")), own_spec=P("a"))
    assert placement.shard_shape(UNIT.mesh) == (4, 4, 32)
    assert placement.shard_bytes(UNIT.mesh) == 4 * 4 * 32 * 4


def test_stack_of_experts_keeps_its_layers_whole():
    answer = (None, DataParallelMeshDims("b", "copies"))
    placement = answered(answer, (8, 8, 16, 4), P(None, "a"), stacked_axis=0)
    assert placement.spec == P(None, "a", "b")
    assert placement.dims_at_rank(3) == ((1, ("b",)),)
    assert placement.part_at_rank(3, UNIT) == (4, 4, 4)


def test_reason_of_what_shards_nothing_is_the_answer():
    placement = answered((None, DataParallelMeshDims(None, ("b", "copies"))), own_spec=P("a"))
    assert placement.reason == "shard_placement_fn names no shard axis larger than 1"


ERRORS = {
    "not all shard axes": (
        {0: "a"},
        {},
        ValueError,
        "returned {0: 'a'}, but each of the shard axes 'a', 'b' must be on one dimension of (8, 16, 32), "
        "and no other axis. To shard it over fewer, return (dimension, jfsdp.DataParallelMeshDims(...)).",
    ),
    "an axis twice": ({0: "a", 1: ("a", "b")}, {}, ValueError, "each of the shard axes 'a', 'b' must"),
    "an axis that does not shard": (
        {0: ("a", "b"), 1: "tensor"},
        {},
        ValueError,
        "must be on one dimension of (8, 16, 32), and no other axis",
    ),
    "a dimension twice": ({0: "a", -3: "b"}, {}, ValueError, "names dimension 0 of (8, 16, 32) twice"),
    "no such dimension": ({3: "a", 1: "b"}, {}, ValueError, "chose dimension 3, but the shape (8, 16, 32)"),
    "mapping that does not divide": (
        {0: "a", 1: "b"},
        {"shape": (8, 6)},
        ValueError,
        "shards dimension 1 of shape (8, 6) over b=4, but 6 does not divide by 4. Choose a dimension that",
    ),
    "mapping onto the layers": (
        {0: "a", 1: "b"},
        {"stacked_axis": 0},
        ValueError,
        "chose dimension 0 of (8, 16, 32), which is the stacked (layer) axis",
    ),
    "mapping onto a held dimension": (
        {0: "a", 1: "b"},
        {"own_spec": P("tensor")},
        ValueError,
        "chose dimension 0 of (8, 16, 32), which already lies on tensor",
    ),
    "mapping against its own spec": (
        {0: "a", 1: "b"},
        {"own_spec": P(("a", "b"))},
        ValueError,
        "chose {0: 'a', 1: 'b'}, but the parameter's own PartitionSpec P(('a', 'b'),) already uses a, b",
    ),
    "mapping by name": (
        {"rows": "a"},
        {},
        TypeError,
        "must return axis names by dimension, such as {0: \"a\"}, got {'rows': 'a'}",
    ),
    "mapping to a number": ({0: 1}, {}, TypeError, "must return axis names by dimension"),
    "a spec": (P("a", "b"), {}, TypeError, "must return a dimension (int), {dimension: axes}, (dimension, "),
    "an axis that is not data-parallel": (
        (0, DataParallelMeshDims("tensor")),
        {},
        ValueError,
        "returned DataParallelMeshDims(shard='tensor', replicate=None), but 'tensor' is no data-parallel "
        "axis of its unit, whose axes are 'copies', 'a', 'b'. Name some of these.",
    ),
    "a dimension and no shard axis": (
        (0, DataParallelMeshDims(None, ("a", "b", "copies"))),
        {},
        ValueError,
        "chose dimension 0, but DataParallelMeshDims(shard=None, replicate=('a', 'b', 'copies')) has no axis "
        "to shard it over. Name one as shard=, or return None in place of the dimension.",
    ),
    "an axis in neither": (
        (0, DataParallelMeshDims("b")),
        {"own_spec": P(None, "a")},
        ValueError,
        "block.w (shape (8, 16, 32)): shard_placement_fn returned data-parallel axes without 'copies' "
        "(a=2, b=4, copies=2, tensor=2, one=1), so that nothing says what its devices hold. Either\n"
        "  1. name 'copies' in DataParallelMeshDims, as shard= or replicate=, or\n"
        "  2. if each device along it has its own part, such as its experts, say so in the parameter's own "
        "PartitionSpec: out_sharding=('copies',) in NNX, nn.with_partitioning in Linen.",
    ),
    "own experts on the layers": (
        (1, DataParallelMeshDims("b", "copies")),
        {"own_spec": P("a"), "stacked_axis": 0},
        ValueError,
        "its own PartitionSpec puts 'a' on dimension 0 of (8, 16, 32), which is the stacked (layer) axis",
    ),
    "own experts that do not divide": (
        (1, DataParallelMeshDims("b", "copies")),
        {"own_spec": P("a"), "shape": (3, 16)},
        ValueError,
        "its own PartitionSpec shards dimension 0 of shape (3, 16) over a=2, but 3 does not divide by 2",
    ),
    "experts and shards that do not divide": (
        (0, DataParallelMeshDims("b", "copies")),
        {"own_spec": P("a"), "shape": (4, 16)},
        ValueError,
        "shards dimension 0 of shape (4, 16) over a=2 x b=4, but 4 does not divide by 8",
    ),
    "own spec on its copies": (
        (1, DataParallelMeshDims("b", ("a", "copies"))),
        {"own_spec": P("a")},
        ValueError,
        "its PartitionSpec P('a',) uses 'a', but DataParallelMeshDims says that axis holds copies",
    ),
    "own parts where XLA communicates": (
        (1, DataParallelMeshDims("b", "copies")),
        {"own_spec": P("a"), "auto": True},
        ValueError,
        "its data-parallel axes leave out 'a', along which each device would compute with its own part. With "
        'partitioning="auto" the forward sees whole arrays only: use partitioning="manual".',
    ),
}  # fmt: skip


@pytest.mark.parametrize(("answer", "settings", "kind", "text"), ERRORS.values(), ids=ERRORS)
def test_answer_is_refused_with_its_path_and_the_remedy(answer, settings, kind, text):
    with pytest.raises(kind) as error:
        answered(answer, **settings)
    assert str(error.value).startswith("block.w")
    assert text in str(error.value)


def test_own_spec_on_some_shard_axes_says_how_to_stay_split():
    with pytest.raises(
        ValueError, match="or if it is to stay split over them in the forward, return"
    ):
        answered(None, own_spec=P("a"))
