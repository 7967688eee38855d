"""Which mesh axes are data-parallel: DataParallelMeshDims, and what it means on a mesh."""

import dataclasses

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import jfsdp
from jfsdp.mesh import DataParallelMesh, describe_mesh, resolve_mesh

P = PartitionSpec
Dims = jfsdp.DataParallelMeshDims


def abstract(**sizes: int) -> AbstractMesh:
    return AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


def test_dims_have_the_seed_s_fields_and_defaults():
    fields = {field.name: field.default for field in dataclasses.fields(Dims)}
    assert fields == {"shard": None, "replicate": None}


def test_dims_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Dims(shard="fsdp").shard = "other"


def test_dims_take_shard_first():
    assert Dims("a", "b") == Dims(shard="a", replicate="b")


@pytest.mark.parametrize(
    ("value", "names"), [(None, ()), ("a", ("a",)), (("a",), ("a",)), (("a", "b"), ("a", "b"))]
)
def test_shard_names_is_always_a_tuple(value, names):
    assert Dims(shard=value, replicate="r").shard_names == names


@pytest.mark.parametrize(
    ("value", "names"), [(None, ()), ("a", ("a",)), (("a",), ("a",)), (("a", "b"), ("a", "b"))]
)
def test_replicate_names_is_always_a_tuple(value, names):
    assert Dims(shard="s", replicate=value).replicate_names == names


def test_dims_of_lists_are_hashable():
    assert hash(Dims(shard=["a", "b"])) == hash(Dims(shard=("a", "b")))


def test_dims_without_any_axis_are_refused():
    with pytest.raises(ValueError, match="needs shard or replicate"):
        Dims()


@pytest.mark.parametrize("field", ["shard", "replicate"])
def test_empty_tuple_is_refused(field):
    with pytest.raises(ValueError, match=f"DataParallelMeshDims.{field} is empty: pass None"):
        Dims(**{field: ()})


@pytest.mark.parametrize("dims", [{"shard": ("a", "a")}, {"shard": ("a", "b"), "replicate": "b"}])
def test_axis_named_twice_is_refused(dims):
    with pytest.raises(ValueError, match="more than once: an axis either shards or replicates"):
        Dims(**dims)


@pytest.mark.parametrize("field", ["shard", "replicate"])
def test_name_that_is_no_string_is_refused(field):
    with pytest.raises(TypeError) as error:
        Dims(**{field: ("a", 3)})
    assert f"DataParallelMeshDims.{field} takes axis names" in str(error.value)
    assert "('a', 3)" in str(error.value)


def test_value_that_is_no_name_is_refused_by_the_field_s_name():
    with pytest.raises(TypeError, match=r"DataParallelMeshDims\.shard takes axis names"):
        Dims(shard=3)


def test_batch_splits_over_replicate_axes_first():
    dp = DataParallelMesh(abstract(s=4, r=2), Dims("s", "r"))
    assert dp.axes == ("r", "s")
    assert dp.batch_spec == P(("r", "s"))


def test_batch_spec_of_one_axis_is_its_name():
    assert DataParallelMesh(abstract(s=8), Dims("s")).batch_spec == P("s")


def test_batch_spec_leaves_axes_of_size_one_out():
    assert DataParallelMesh(abstract(r=1, s=8), Dims("s", "r")).batch_spec == P("s")


def test_batch_spec_of_a_single_device_is_empty():
    assert DataParallelMesh(abstract(s=1), Dims("s")).batch_spec == P()


def test_size_counts_data_parallel_axes_only():
    assert DataParallelMesh(abstract(r=2, s=3, tensor=4), Dims("s", "r")).size == 6


def test_size_one_axes_are_data_parallel_but_not_named():
    dp = DataParallelMesh(abstract(r=1, s=8, t=1), Dims(("s", "t"), "r"))
    assert dp.axes == ("r", "s", "t")
    assert (dp.shard_axes, dp.replicate_axes) == (("s",), ())


@pytest.mark.parametrize(
    ("types", "explicit"),
    [
        ((AxisType.Auto, AxisType.Auto), False),
        ((AxisType.Explicit, AxisType.Auto), True),
        ((AxisType.Auto, AxisType.Explicit), False),
    ],
)
def test_explicit_is_about_data_parallel_axes(types, explicit):
    mesh = AbstractMesh((2, 4), ("s", "tensor"), axis_types=types)
    assert DataParallelMesh(mesh, Dims("s")).explicit is explicit


def test_no_mesh_is_one_axis_over_all_devices():
    dp = resolve_mesh(None, None)
    assert dict(dp.mesh.shape) == {"fsdp": jax.device_count()}
    assert dp.dims == Dims("fsdp")


def test_no_mesh_takes_the_one_in_context():
    mesh = jax.make_mesh((2, 4), ("r", "s"))
    with jax.set_mesh(mesh):
        assert resolve_mesh(None, None).mesh == mesh


def test_no_mesh_under_jit_takes_the_abstract_one_in_context():
    mesh = jax.make_mesh((2, 4), ("r", "s"))
    seen = []
    with jax.set_mesh(mesh):
        jax.eval_shape(jax.jit(lambda x: seen.append(resolve_mesh(None, None)) or x), 1.0)
    assert seen[0].mesh.shape == mesh.shape


def test_mesh_given_goes_before_the_one_in_context():
    given = abstract(x=8)
    with jax.set_mesh(jax.make_mesh((2, 4), ("r", "s"))):
        assert resolve_mesh(given, None).mesh is given


def test_one_dimensional_mesh_shards():
    assert resolve_mesh(abstract(any=8), None).dims == Dims("any")


def test_two_dimensional_mesh_replicates_then_shards():
    assert resolve_mesh(abstract(first=2, second=4), None).dims == Dims("second", "first")


def test_dims_given_decide():
    dims = Dims(shard=("b", "a"))
    assert resolve_mesh(abstract(a=2, b=4), dims).dims is dims


def test_three_dimensional_mesh_needs_dims():
    with pytest.raises(ValueError, match=r"3 axes \(a=2, b=2, c=2\) needs dp_mesh_dims") as error:
        resolve_mesh(abstract(a=2, b=2, c=2), None)
    assert "DataParallelMeshDims(shard='c')" in str(error.value)


@pytest.mark.parametrize("field", ["shard", "replicate"])
def test_unknown_axis_is_named_with_the_mesh_s_own(field):
    with pytest.raises(ValueError) as error:
        resolve_mesh(abstract(a=2, b=4), Dims(**{"shard": "a", field: "model"}))
    assert str(error.value) == (
        f"DataParallelMeshDims.{field} names the axis 'model', which the mesh does not have. Its "
        "axes: a=2, b=4."
    )


def test_what_is_no_mesh_is_refused():
    with pytest.raises(TypeError, match=r"jax\.sharding\.Mesh \(see jax\.make_mesh\), got str"):
        resolve_mesh("fsdp", None)


def test_mesh_without_axes_is_refused():
    with pytest.raises(ValueError, match=r"the mesh is empty.*jax\.make_mesh\(\(8,\)"):
        resolve_mesh(AbstractMesh((), ()), None)


def test_dims_of_another_type_are_refused():
    with pytest.raises(TypeError, match=r"got str; for example DataParallelMeshDims\(shard='b'\)"):
        resolve_mesh(abstract(a=2, b=4), "b")


def test_mesh_is_described_by_names_and_sizes():
    assert describe_mesh(abstract(replica=2, fsdp=4)) == "replica=2, fsdp=4"
