"""How values cross the border of a region: what splits, what is copied, what is averaged, refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import jfsdp
from jfsdp.borders import Row, input_specs, output_rows, row_of_output
from jfsdp.mesh import DataParallelMesh

P = PartitionSpec
BATCH = P(("r", "s"))


@pytest.fixture(scope="module")
def dp() -> DataParallelMesh:
    """2 replicas of 4 shards, and a tensor axis of the user."""
    mesh = AbstractMesh((2, 4, 2), ("r", "s", "tensor"), axis_types=(AxisType.Auto,) * 3)
    return DataParallelMesh(mesh, jfsdp.DataParallelMeshDims("s", "r"))


def array(*shape: int, dtype: object = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def inputs(dp, asked=None, **arrays):
    named = [(name.replace("__", "."), x) for name, x in arrays.items()]
    return input_specs("Model.__call__", named, dp, asked or {})


# --------------------------------------------------------------------------------------------------
# Inputs


def test_arrays_split_on_dimension_0_over_all_data_parallel_axes(dp):
    assert inputs(dp, x=array(16, 3), y=array(16)) == ([BATCH, BATCH], 2)


@pytest.mark.parametrize("dtype", ["int32", "bool", "bfloat16"])
def test_batch_of_any_dtype_splits(dp, dtype):
    assert inputs(dp, x=array(8, dtype=dtype)) == ([BATCH], 1)


def test_scalars_are_copied(dp):
    assert inputs(dp, scale=array(), x=array(8)) == ([P(), BATCH], 1)


def test_single_key_is_copied(dp):
    key = jax.eval_shape(lambda: jax.random.key(0))
    assert inputs(dp, key=key) == ([P()], None)


def test_array_of_keys_splits_like_a_batch(dp):
    batch_of_keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))
    assert inputs(dp, keys=batch_of_keys) == ([BATCH], 1)


def test_numpy_arrays_split_too(dp):
    assert inputs(dp, x=np.ones((8, 2))) == ([BATCH], 1)


def test_call_without_arrays_has_no_batch(dp):
    assert inputs(dp) == ([], None)


def test_order_of_the_specs_is_that_of_the_inputs(dp):
    specs, _ = inputs(dp, {"b": P()}, a=array(8), b=array(3), c=array())
    assert specs == [BATCH, P(), P()]


def test_argument_asked_for_is_no_batch(dp):
    assert inputs(dp, {"mask": P()}, x=array(16), mask=array(5, 5)) == ([BATCH, P()], 2)


def test_spec_asked_for_is_taken_as_it_is(dp):
    specs, _ = inputs(dp, {"table": P(None, "s")}, x=array(16), table=array(3, 4))
    assert specs == [BATCH, P(None, "s")]


def test_spec_of_an_argument_holds_for_all_inside_it(dp):
    specs, _ = inputs(dp, {"extra": P()}, x=array(8), extra__a=array(3), extra__b__c=array(5))
    assert specs == [BATCH, P(), P()]


def test_longer_path_goes_before_a_shorter_one(dp):
    asked = {"extra": P(), "extra.b": P("s")}
    specs, _ = inputs(dp, asked, x=array(8), extra__a=array(3), extra__b=array(4))
    assert specs == [BATCH, P(), P("s")]


def test_path_is_matched_by_whole_names(dp):
    specs, _ = inputs(dp, {"mask": P(None, "s")}, masks=array(8))
    assert specs == [BATCH]


def test_batch_asked_for_by_name_is_a_batch(dp):
    """`None` "if nothing splits on dimension 0", says the docstring: this does."""
    assert inputs(dp, {"x": BATCH}, x=array(16)) == ([BATCH], 2)


def test_batch_that_does_not_divide_is_refused_with_the_next_that_does(dp):
    with pytest.raises(ValueError) as error:
        inputs(dp, x=array(12, 3))
    assert str(error.value) == (
        "Model.__call__: the batch is 12, which does not divide over 8 data-parallel devices "
        "(r=2, s=4):\n"
        "  x: shape (12, 3)\n"
        "Use a batch of 16, or if this is no batch, say how it lies with in_specs, for example "
        "jfsdp.shard(..., in_specs={'x': PartitionSpec()}) for a copy on every device."
    )


def test_batches_that_differ_are_all_listed(dp):
    with pytest.raises(ValueError) as error:
        inputs(dp, x=array(16, 3), extra__y=array(16), mask=array(5, 5))
    assert str(error.value) == (
        "Model.__call__: its arguments do not agree on the batch, the size of dimension 0:\n"
        "  x: shape (16, 3)\n"
        "  extra.y: shape (16,)\n"
        "  mask: shape (5, 5)\n"
        "Arguments that are no batch (positions, masks, tables) need in_specs, for example "
        "jfsdp.shard(..., in_specs={'mask': PartitionSpec()}) for a copy on every device."
    )


def test_spec_longer_than_its_array_is_refused(dp):
    with pytest.raises(ValueError) as error:
        inputs(dp, {"mask": P(None, "s")}, mask=array(3))
    text = str(error.value)
    assert text.startswith("Model.__call__: in_specs['mask'] = P(None, 's')")
    assert "more entries than mask of shape (3,)" in text


def test_spec_that_does_not_divide_is_refused(dp):
    with pytest.raises(ValueError) as error:
        inputs(dp, {"extra": BATCH}, extra__a__b=array(12, 2))
    text = str(error.value)
    assert text.startswith("Model.__call__: in_specs['extra'] = P(('r', 's'),)")
    assert "dimension 0 of extra.a.b (shape (12, 2)) does not divide by 8" in text


def test_all_arguments_that_do_not_fit_are_listed(dp):
    with pytest.raises(ValueError) as error:
        inputs(dp, {"a": P("s"), "b": P(None, "s")}, a=array(3), b=array(5))
    assert "in_specs['a']" in str(error.value)
    assert "in_specs['b']" in str(error.value)


# --------------------------------------------------------------------------------------------------
# Results


def row(dp, x, local_batch=2, asked=None) -> Row:
    return row_of_output("Model.__call__", "['logits']", x, local_batch, dp, asked)


@pytest.mark.parametrize("dtype", ["float32", "int32", "bool"])
def test_results_of_the_local_batch_are_concatenated(dp, dtype):
    assert row(dp, array(2, 5, dtype=dtype)) == Row(BATCH)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_floating_scalars_are_averaged(dp, dtype):
    assert row(dp, array(dtype=dtype)) == Row(P(), mean=True)


@pytest.mark.parametrize(
    "x", [array(3, 5), array(16), array(dtype="int32"), array(dtype="bool")], ids=str
)
def test_other_results_are_refused(dp, x):
    with pytest.raises(ValueError) as error:
        row(dp, x)
    assert str(error.value) == (
        f"Model.__call__: its result['logits'] has shape {x.shape} and dtype {x.dtype} on each of 8 "
        "data-parallel devices, whose local batch is 2. It is neither a batch (dimension 0 = local "
        "batch: concatenated) nor a floating scalar (averaged). Say what it is with "
        "jfsdp.shard(..., out_specs=...): PartitionSpec(('r', 's')) where dimension 0 is split, "
        "PartitionSpec() where every device has the same value or its mean is meant."
    )


def test_no_result_is_a_batch_where_no_input_is(dp):
    with pytest.raises(ValueError, match="local batch is None"):
        row(dp, array(2), local_batch=None)


def test_result_asked_to_be_split_is_not_averaged(dp):
    assert row(dp, array(3), asked=BATCH) == Row(BATCH)


def test_floating_result_asked_to_be_a_copy_is_averaged(dp):
    assert row(dp, array(3), asked=P()) == Row(P(), mean=True)


def test_integer_result_asked_to_be_a_copy_is_not_averaged(dp):
    assert row(dp, array(3, dtype="int32"), asked=P()) == Row(P())


def test_floating_result_asked_over_some_axes_is_averaged_over_the_others(dp):
    assert row(dp, array(3), asked=P("s")) == Row(P("s"), mean=True)


def test_every_kind_of_result_has_its_row_once(dp):
    rows = output_rows(dp, [P("s"), P(), BATCH])
    assert set(rows) == {Row(spec, mean) for spec in (BATCH, P(), P("s")) for mean in (True, False)}
    assert len(rows) == 6
