"""Where one parameter lies: the rule as properties, over random shapes, meshes and own specs."""

import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import jfsdp
from jfsdp.layout import to_spec
from jfsdp.mesh import DataParallelMesh
from jfsdp.placement import place

P = PartitionSpec
SIZES = (1, 2, 3, 4, 8)


def abstract(sizes: dict[str, int]) -> AbstractMesh:
    return AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


@st.composite
def data_parallel_meshes(draw: st.DrawFn, sizes: tuple[int, ...] = SIZES) -> DataParallelMesh:
    """One to three axes, each a shard axis, a replicate axis or the user's own."""
    names = draw(st.permutations(("x", "y", "z")))[: draw(st.integers(1, 3))]
    mesh = abstract({name: draw(st.sampled_from(sizes)) for name in names})
    roles = {name: draw(st.sampled_from(("shard", "replicate", "own"))) for name in names}
    if "shard" not in roles.values() and (1 not in sizes or "replicate" not in roles.values()):
        roles[names[0]] = "shard"
    shard, replicate = (
        tuple(name for name in names if roles[name] == role) or None
        for role in ("shard", "replicate")
    )
    return DataParallelMesh(mesh, jfsdp.DataParallelMeshDims(shard, replicate))


@st.composite
def leaves(
    draw: st.DrawFn, fits: bool = False, stacked: bool = False
) -> tuple[jax.ShapeDtypeStruct, DataParallelMesh, dict]:
    """A leaf, a mesh, and the settings of `place`: own spec over the user's axes, stacked axis.

    `fits`: a free dimension divides by all shard axes, which have more than one device. `stacked`:
    there is a stacked axis.
    """
    dp = draw(data_parallel_meshes(SIZES[1:] if fits else SIZES))
    sizes = st.sampled_from((0, 1, 2, 3, 4, 6, 8, 12, 24, 32))
    shape = draw(st.lists(sizes, min_size=fits + stacked, max_size=4))
    dims = draw(st.permutations(range(len(shape))))
    kept_free = dims[:1] if fits else []
    for dim in kept_free:
        shape[dim] = dp.size_of(dp.shard_axes) * draw(st.integers(1, 8))
    layers = dims[-1] if len(dims) > fits and (stacked or draw(st.booleans())) else None
    entries: list[tuple[str, ...]] = [() for _ in shape]
    for axis in dp.mesh.axis_names:
        held = [dim for dim in dims if dim not in kept_free]
        if axis not in dp.axes and held and draw(st.booleans()):
            dim = draw(st.sampled_from(held))
            entries[dim] += (axis,)
            shape[dim] *= dp.mesh.shape[axis]
    leaf = jax.ShapeDtypeStruct(tuple(shape), jnp.float32)
    own = P(*(axes or None for axes in entries)) if any(entries) else None
    if layers is not None and draw(st.booleans()):
        layers -= len(shape)
    return leaf, dp, {"own_spec": own, "stacked_axis": layers}


def free_dims(leaf, dp, own_spec, stacked_axis) -> list[int]:
    """Dimensions that neither the layers nor an axis of the user holds."""
    held = [
        entry is not None and dp.size_of((entry,) if isinstance(entry, str) else entry) > 1
        for entry in own_spec or ()
    ]
    held += [False] * (leaf.ndim - len(held))
    stacked = None if stacked_axis is None else stacked_axis % leaf.ndim
    return [d for d in range(leaf.ndim) if not held[d] and d != stacked and leaf.shape[d]]


def legal_choices(leaf, dp, own_spec, stacked_axis) -> list[tuple]:
    """By brute force: each shard axis on any free dimension, of three also two on one and one apart."""
    free = free_dims(leaf, dp, own_spec, stacked_axis)
    found = []
    for dims in itertools.product(free, repeat=len(dp.shard_axes)):
        parts = dict.fromkeys(dims, 1)
        for dim, axis in zip(dims, dp.shard_axes, strict=True):
            parts[dim] *= dp.mesh.shape[axis]
        if dims and all(leaf.shape[dim] % n == 0 for dim, n in parts.items()):
            found.append(dims)
    return found


@given(leaves())
def test_shards_tile_the_whole(drawn):
    leaf, dp, settings = drawn
    placement = place("w", leaf, dp, **settings)
    shard = placement.shard_shape(dp.mesh)
    parts = [dp.size_of(axes) for axes in placement.entries]
    assert tuple(n * parts for n, parts in zip(shard, parts, strict=True)) == leaf.shape


@given(leaves())
def test_a_leaf_is_sharded_exactly_if_some_legal_choice_exists(drawn):
    leaf, dp, settings = drawn
    assert bool(place("w", leaf, dp, **settings).dims) == bool(legal_choices(leaf, dp, **settings))


@given(leaves(fits=True))
def test_largest_dimension_that_divides_is_chosen_and_the_first_of_equals(drawn):
    leaf, dp, settings = drawn
    assume(math.prod(leaf.shape) < 2**18)  # larger ones are not cut inside tiles, if that can be
    shards = dp.size_of(dp.shard_axes)
    fits = [d for d in free_dims(leaf, dp, **settings) if leaf.shape[d] % shards == 0]
    best = min(fits, key=lambda dim: (-leaf.shape[dim], dim))
    assert place("w", leaf, dp, **settings).dims == ((best, dp.shard_axes),)


@given(leaves())
def test_stacked_axis_and_held_dimensions_are_never_chosen(drawn):
    leaf, dp, settings = drawn
    chosen = {dim for dim, _ in place("w", leaf, dp, **settings).dims}
    assert chosen <= set(free_dims(leaf, dp, **settings))


@given(leaves())
def test_a_sharded_leaf_lies_on_every_shard_axis_once(drawn):
    leaf, dp, settings = drawn
    placement = place("w", leaf, dp, **settings)
    named = [axis for _, axes in placement.dims for axis in axes]
    assert sorted(named) == (sorted(dp.shard_axes) if placement.dims else [])


@given(leaves())
def test_axes_of_size_one_are_never_named(drawn):
    leaf, dp, settings = drawn
    placement = place("w", leaf, dp, **settings)
    assert all(dp.mesh.shape[axis] > 1 for axes in placement.entries for axis in axes)


@given(leaves())
def test_replicate_axes_are_never_named(drawn):
    leaf, dp, settings = drawn
    placement = place("w", leaf, dp, **settings)
    assert not {axis for axes in placement.entries for axis in axes} & set(dp.dims.replicate_names)


@given(leaves())
def test_axes_of_the_user_s_own_spec_are_kept(drawn):
    leaf, dp, settings = drawn
    placement = place("w", leaf, dp, **settings)
    others = [tuple(a for a in axes if a not in dp.axes) for axes in placement.entries]
    given = [(e,) if isinstance(e, str) else e or () for e in settings["own_spec"] or ()]
    kept = [dp.larger_than_one(axes) for axes in given]
    assert to_spec(others) == to_spec(kept)


@given(leaves())
def test_there_is_a_reason_exactly_if_a_leaf_is_not_sharded(drawn):
    leaf, dp, settings = drawn
    placement = place("w", leaf, dp, **settings)
    assert bool(placement.reason) != bool(placement.dims)


@given(leaves(stacked=True))
def test_dims_of_a_layer_s_slice_are_those_of_the_stack(drawn):
    leaf, dp, settings = drawn
    placement = place("w", leaf, dp, **settings)
    layer = list(leaf.shape)
    del layer[settings["stacked_axis"]]
    moved = placement.dims_at_rank(leaf.ndim - 1)
    assert [(layer[d], axes) for d, axes in moved] == [
        (leaf.shape[d], axes) for d, axes in placement.dims
    ]


@given(leaves())
def test_manual_spec_is_the_shard_axes_part_of_the_spec(drawn):
    leaf, dp, settings = drawn
    placement = place("w", leaf, dp, **settings)
    ours = [tuple(a for a in axes if a in dp.shard_axes) for axes in placement.entries]
    assert placement.manual_spec() == to_spec(ours)


@given(leaves())
def test_spec_has_no_trailing_none_and_no_tuple_of_one(drawn):
    leaf, dp, settings = drawn
    spec = place("w", leaf, dp, **settings).spec
    assert not spec or spec[-1] is not None
    assert not any(isinstance(entry, tuple) and len(entry) < 2 for entry in spec)


@given(leaves())
def test_bytes_of_the_shards_are_the_bytes_of_the_whole(drawn):
    leaf, dp, settings = drawn
    placement = place("w", leaf, dp, **settings)
    shards = math.prod(dp.size_of(axes) for axes in placement.entries)
    assert placement.bytes == 4 * math.prod(leaf.shape)
    assert placement.shard_bytes(dp.mesh) * shards == placement.bytes


@given(leaves(fits=True), st.data())
def test_dimension_asked_for_is_obeyed_from_either_end(drawn, data):
    leaf, dp, settings = drawn
    shards = dp.size_of(dp.shard_axes)
    fits = [d for d in free_dims(leaf, dp, **settings) if leaf.shape[d] % shards == 0]
    dim = data.draw(st.sampled_from(fits))
    asked = place("w", leaf, dp, asked=dim, **settings)
    assert asked.dims == ((dim, dp.shard_axes),)
    assert asked == place("w", leaf, dp, asked=dim - leaf.ndim, **settings)


@given(leaves())
def test_where_the_rule_put_a_leaf_is_taken_as_its_own_spec(drawn):
    leaf, dp, settings = drawn
    first = place("w", leaf, dp, **settings)
    again = place("w", leaf, dp, own_spec=first.spec, stacked_axis=settings["stacked_axis"])
    assert (again.entries, again.dims) == (first.entries, first.dims)


def test_three_shard_axes_may_go_two_and_one():
    dp = DataParallelMesh(
        abstract({"x": 2, "y": 2, "z": 2}), jfsdp.DataParallelMeshDims(("x", "y", "z"))
    )
    assert place("w", jax.ShapeDtypeStruct((4, 2), jnp.float32), dp).dims


def test_own_spec_may_not_shard_the_layers():
    with pytest.raises(ValueError, match="stacked"):
        place(
            "w",
            jax.ShapeDtypeStruct((8, 8), jnp.float32),
            two_axes(),
            own_spec=P(("x", "y")),
            stacked_axis=0,
        )


def two_axes() -> DataParallelMesh:
    return DataParallelMesh(abstract({"x": 2, "y": 4}), jfsdp.DataParallelMeshDims(("x", "y")))


@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((8, 8), ((0, ("x", "y")),)),  # a tie
        ((8, 16), ((1, ("x", "y")),)),
        ((64, 12), ((0, ("x", "y")),)),
        ((4, 6), ((0, ("y",)), (1, ("x",)))),  # no dimension divides by 8
        ((2, 4), ((0, ("x",)), (1, ("y",)))),
        ((3, 7), ()),
    ],
)
def test_rule_on_two_shard_axes(shape, dims):
    assert place("w", jax.ShapeDtypeStruct(shape, jnp.float32), two_axes()).dims == dims


def test_own_spec_over_an_axis_of_size_one_holds_no_dimension():
    dp = DataParallelMesh(abstract({"x": 2, "one": 1}), jfsdp.DataParallelMeshDims("x"))
    leaf = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    assert place("w", leaf, dp, own_spec=P("one")) == place("w", leaf, dp)


def test_layers_that_differ_in_their_path_have_equal_placements():
    """They are in the module's static structure: jit would trace each layer anew otherwise."""
    leaf = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert place("blocks.0.w", leaf, two_axes()) == place("blocks.1.w", leaf, two_axes())


# --------------------------------------------------------------------------------------------------
# Large parameters keep whole tiles


@pytest.mark.parametrize(
    "shape, shards, dim",
    [
        ((4096, 14336), 8, 1),  # 14336 / 8 = 14 x 128
        ((4096, 14336), 64, 0),  # 14336 / 64 = 224 is no multiple of 128
        ((3, 3, 512, 1000), 8, 2),  # 1000 / 8 = 125
        ((4096, 128256), 64, 1),  # the other dimension is far smaller
        ((50257, 768), 8, 1),  # nothing else divides
        ((64, 1000), 8, 1),  # a small parameter
    ],
)
def test_the_last_dimension_of_a_large_parameter_is_sharded_in_whole_tiles(shape, shards, dim):
    dp = DataParallelMesh(abstract({"fsdp": shards}), jfsdp.DataParallelMeshDims("fsdp"))
    placed = place("w", jax.ShapeDtypeStruct(shape, jnp.float32), dp)
    assert placed.dims == ((dim, ("fsdp",)),)


def test_whole_tiles_count_all_shard_axes():
    dp = DataParallelMesh(abstract({"x": 16, "y": 4}), jfsdp.DataParallelMeshDims(("x", "y")))
    placed = place("w", jax.ShapeDtypeStruct((4096, 14336), jnp.float32), dp)
    assert placed.dims == ((0, ("x", "y")),)


def test_a_stacked_axis_is_not_taken_instead():
    dp = DataParallelMesh(abstract({"fsdp": 8}), jfsdp.DataParallelMeshDims("fsdp"))
    placed = place("w", jax.ShapeDtypeStruct((1024, 1000), jnp.float32), dp, stacked_axis=0)
    assert placed.dims == ((1, ("fsdp",)),)
