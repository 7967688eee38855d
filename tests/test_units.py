"""Units: how modules are selected, what settings a leaf gets, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import jfsdp
from jfsdp.comm import DefaultAllGather, DefaultReduceScatter
from jfsdp.mesh import DataParallelMesh
from jfsdp.placement import place
from jfsdp.selectors import matcher
from jfsdp.units import Unit, cast_floating, is_array, validate

P = PartitionSpec


# --------------------------------------------------------------------------------------------------
# Selectors


class Block:
    pass


class SubBlock(Block):
    pass


def selects(selector, path: str, module: object = None) -> bool:
    ((given, matches),) = matcher(selector)
    assert given is selector
    return matches(path, module)


GLOBS = [
    ("blocks.*", "blocks.0", True),
    ("blocks.*", "blocks.10", True),
    ("blocks.*", "blocks", False),
    ("blocks.*", "blocks.0.mlp", False),
    ("blocks.*", "encoder.blocks.0", False),
    ("*", "blocks", True),
    ("*", "blocks.0", False),
    ("**", "blocks.0.mlp", True),
    ("**.mlp", "mlp", True),
    ("**.mlp", "blocks.0.mlp", True),
    ("**.mlp", "blocks.0.mlp.inner", False),
    ("blocks.**", "blocks", True),
    ("blocks.**", "blocks.0.mlp", True),
    ("blocks.**.proj", "blocks.0.attention.proj", True),
    ("**.blocks.*", "encoder.blocks.3", True),
    ("blocks.[0-2]", "blocks.1", True),
    ("blocks.[0-2]", "blocks.3", False),
    ("blocks.?", "blocks.12", False),
    ("Blocks.*", "blocks.0", False),
    ("blocks", "blocks", True),
    ("block", "blocks", False),
]


@pytest.mark.parametrize(("glob", "path", "expected"), GLOBS)
def test_glob_is_over_dotted_names(glob, path, expected):
    assert selects(glob, path) is expected


def test_class_selects_its_instances_and_those_of_subclasses():
    assert selects(Block, "", SubBlock())
    assert not selects(SubBlock, "", Block())


def test_predicate_gets_path_and_module():
    module = Block()
    assert selects(lambda path, node: path == "a" and node is module, "a", module)


def test_several_selectors_are_taken_in_order():
    assert [selector for selector, _ in matcher([Block, "blocks.*"])] == [Block, "blocks.*"]


def test_no_selectors_select_nothing():
    assert matcher(()) == []


UNITS_TEXT = (
    r"units takes a module class, a glob over paths such as 'blocks\.\*', a predicate "
    r"f\(path, module\) -> bool, or several of them, got "
)


def test_selector_of_another_type_is_refused():
    with pytest.raises(TypeError, match=UNITS_TEXT + "3"):
        matcher([Block, 3])


@pytest.mark.parametrize("units", [3, None, True])
def test_units_of_another_type_are_refused(units):
    with pytest.raises(TypeError, match=UNITS_TEXT + str(units)):
        matcher(units)


# --------------------------------------------------------------------------------------------------
# Settings of a leaf


def unit(policy: jfsdp.MixedPrecisionPolicy | None = None, **settings) -> Unit:
    mesh = AbstractMesh((2, 4), ("r", "s"), axis_types=(AxisType.Auto,) * 2)
    dp = DataParallelMesh(mesh, jfsdp.DataParallelMeshDims("s", "r"))
    return Unit(dp, policy or jfsdp.MixedPrecisionPolicy(), **settings)


def gathering(of: Unit, shape: tuple[int, ...], dtype: str = "float32", **settings):
    leaf = jax.ShapeDtypeStruct(shape, dtype)
    return of.gathering(place("w", leaf, of.dp, **settings), leaf)


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("is_root", [True, False])
def test_reshard_after_forward_given_holds_for_every_unit(asked, is_root):
    assert unit(reshard_after_forward=asked).reshards(is_root) is asked


def test_every_unit_but_the_root_reshards_by_default():
    assert unit().reshards(is_root=False)
    assert not unit().reshards(is_root=True)


def test_sharded_leaf_is_summed_over_the_replicate_axes():
    how = gathering(unit(), (8, 3))
    assert (how.dims, how.summed_axes) == (((0, ("s",)),), ("r",))


def test_replicated_leaf_is_summed_over_all_data_parallel_axes():
    how = gathering(unit(), (3,))
    assert (how.dims, how.summed_axes) == ((), ("r", "s"))


def test_leaf_without_policy_keeps_its_dtype():
    how = gathering(unit(), (8,), "bfloat16")
    assert {how.dtype, how.param_dtype, how.reduce_dtype} == {jnp.dtype("bfloat16")}


def test_reduce_dtype_unset_is_the_parameter_s_whatever_param_dtype_is():
    how = gathering(unit(jfsdp.MixedPrecisionPolicy("bfloat16")), (8,))
    assert (how.param_dtype, how.reduce_dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_leaf_that_is_not_real_floating_is_never_cast(dtype):
    how = gathering(unit(jfsdp.MixedPrecisionPolicy("bfloat16", "float32")), (8,), dtype)
    assert {how.dtype, how.param_dtype, how.reduce_dtype} == {jnp.dtype(dtype)}


def test_collectives_of_the_unit_are_those_of_its_leaves():
    gather, scatter = DefaultAllGather(), DefaultReduceScatter()
    how = gathering(unit(all_gather=gather, reduce_scatter=scatter), (8,))
    assert (how.all_gather, how.reduce_scatter) == (gather, scatter)


def test_layer_of_a_stack_is_gathered_on_the_dimension_it_has_there():
    of = unit()
    stack = jax.ShapeDtypeStruct((4, 3, 8), jnp.float32)
    how = of.gathering(place("w", stack, of.dp, stacked_axis=0), jax.ShapeDtypeStruct((3, 8), "f4"))
    assert how.dims == ((1, ("s",)),)


@pytest.mark.parametrize(("reshard", "gathers"), [(True, 2), (False, 1)])
def test_what_is_stated_of_a_sharded_leaf_is_the_formula(reshard, gathers):
    of = unit(jfsdp.MixedPrecisionPolicy("bfloat16"), reshard_after_forward=reshard)
    placement = place("w", jax.ShapeDtypeStruct((16, 8), jnp.float32), of.dp)
    assert of.stated(placement, is_root=False) == {
        "all-gather": (("s",), "bfloat16", gathers * 128 * 2 * 3 / 4),
        "reduce-scatter": (("s",), "float32", 128 * 4 * 3 / 4),
        "all-reduce": (("r",), "float32", 2 * (128 / 4) * 4 * 1 / 2),
    }


def test_what_is_stated_of_a_replicated_leaf_is_one_all_reduce():
    of = unit()
    placement = place("w", jax.ShapeDtypeStruct((3,), jnp.float32), of.dp)
    stated = of.stated(placement, is_root=False)
    assert stated == {"all-reduce": (("r", "s"), "float32", 2 * 3 * 4 * 7 / 8)}


def test_no_gradient_is_stated_of_an_integer_leaf():
    of = unit()
    placement = place("w", jax.ShapeDtypeStruct((8,), jnp.int32), of.dp)
    assert of.stated(placement, is_root=True) == {"all-gather": (("s",), "int32", 24)}


def test_no_dtype_is_stated_of_a_collective_of_the_users():
    of = unit(all_gather=DefaultAllGather(), reduce_scatter=DefaultReduceScatter())
    placement = place("w", jax.ShapeDtypeStruct((16, 8), jnp.float32), of.dp)
    stated = of.stated(placement, is_root=False)
    assert [stated[kind][1] for kind in ("all-gather", "reduce-scatter")] == ["", ""]


def test_unit_is_hashable():
    """It is part of its module's structure, which jit hashes."""
    assert hash(unit()) == hash(dataclasses.replace(unit()))


# --------------------------------------------------------------------------------------------------
# Casting


def test_only_real_floating_arrays_are_cast():
    tree = {
        "f": jnp.ones(2),
        "numpy": np.ones(2, np.float32),
        "i": jnp.ones(2, int),
        "b": jnp.ones(2, bool),
        "c": jnp.ones(2, complex),
        "key": jax.random.key(0),
    }
    cast = {name: str(x.dtype) for name, x in cast_floating(tree, jnp.bfloat16).items()}
    assert cast == {
        **{name: str(x.dtype) for name, x in tree.items()},
        "f": "bfloat16",
        "numpy": "bfloat16",
    }


@pytest.mark.parametrize("value", [1.5, 2, True, None, "text"])
def test_what_is_no_array_is_not_cast(value):
    assert cast_floating([value], jnp.bfloat16) == [value]


def test_no_dtype_casts_nothing():
    tree = {"f": jnp.ones(2)}
    assert cast_floating(tree, None) is tree


def test_leaves_passed_over_are_not_cast():
    tree = {"f": jnp.ones(2), "module": [jnp.ones(2)]}
    cast = cast_floating(tree, jnp.bfloat16, is_leaf=lambda x: isinstance(x, list))
    assert cast["module"] is tree["module"]
    assert cast["f"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("value", "expected"),
    [(jnp.ones(2), True), (np.ones(2), True), (np.float32(1), True), (1.0, False), ([1.0], False)],
)
def test_arrays_are_told_from_python_values(value, expected):
    assert is_array(value) is expected


# --------------------------------------------------------------------------------------------------
# Arguments that need no module

DEFAULTS = {
    "mp_policy": jfsdp.MixedPrecisionPolicy(),
    "offload_policy": jfsdp.OffloadPolicy(),
    "reshard_after_forward": None,
    "all_gather": None,
    "reduce_scatter": None,
    "partitioning": "manual",
}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"reshard_after_forward": True},
        {"reshard_after_forward": False},
        {"reshard_after_forward": "s"},
        {"reshard_after_forward": ("r", "s")},
        {"reshard_after_forward": 4},
        {"all_gather": DefaultAllGather(), "reduce_scatter": DefaultReduceScatter()},
        {"partitioning": "auto", "mp_policy": jfsdp.MixedPrecisionPolicy("bfloat16")},
    ],
)
def test_valid_arguments_pass(given):
    validate(**(DEFAULTS | given))
