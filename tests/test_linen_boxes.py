"""Flax's own annotations: `nn.with_partitioning`, logical names, boxes in scans."""

from __future__ import annotations

import functools
from typing import Any

import flax.errors
import jax
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.linen.spmd import with_logical_constraint
from helpers import local_shape, make_mesh, rows
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from linen_models import abstract, assert_as_unsharded, create, fast_compiler, init, scan

import jfsdp

X = rows(16, 16)
DIMS = jfsdp.DataParallelMeshDims(shard="S")
NORMAL = nn.initializers.lecun_normal()


@pytest.fixture(scope="module", autouse=True)
def compiler():
    with fast_compiler():
        yield


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(S=4, T=2)


class Annotated(nn.Module):
    """A dense layer whose kernel (16,32) carries names."""

    names: tuple[Any, ...]
    logical: bool = False
    rules: Any = None

    @nn.compact
    def __call__(self, x):
        if self.logical:
            box = nn.with_logical_partitioning(NORMAL, self.names, rules=self.rules)
        else:
            box = nn.with_partitioning(NORMAL, self.names)
        return nn.Dense(32, kernel_init=box)(x)


def kernel_spec(module: nn.Module, mesh: Any, **settings: Any) -> P:
    model = jfsdp.shard(module, mesh, dp_mesh_dims=DIMS, **settings)
    box = abstract(model, X)["params"]["Dense_0"]["kernel"]
    return jax.tree.leaves(box)[0].sharding.spec


@pytest.mark.parametrize("units", [(), nn.Dense])
@pytest.mark.parametrize("names", [(None, "T"), ("T", None)], ids=str)
def test_tensor_axis_is_composed_with_the_shard_axis(mesh, names, units):
    settings = {"dp_mesh_dims": DIMS, "units": units}
    model, _ = assert_as_unsharded(Annotated(names), mesh, X, **settings)
    kernel = abstract(model, X)["params"]["Dense_0"]["kernel"]
    assert isinstance(kernel, nn.Partitioned)
    assert kernel.names == names
    assert set(kernel.value.sharding.spec) == {"S", "T"}
    real = init(model, X)["params"]["Dense_0"]["kernel"]
    assert real.names == names
    assert local_shape(real.value) == ((4, 16) if names == (None, "T") else (8, 8))


def test_moments_of_a_boxed_parameter_lie_as_it_does(mesh):
    """B02: optax keeps the boxes."""
    model = jfsdp.shard(Annotated((None, "T")), mesh, dp_mesh_dims=DIMS)
    make = functools.partial(create, model, X, optax.adam(1e-3))
    state = jfsdp.init(make)
    moment = state.opt_state[0].mu["Dense_0"]["kernel"]
    assert isinstance(moment, nn.Partitioned)
    assert moment.value.sharding == NamedSharding(mesh, P("S", "T"))
    assert jfsdp.shardings(state) == jfsdp.shardings(jfsdp.init(make, abstract=True))


def test_shard_axis_that_the_user_placed_stays_where_it_is(mesh):
    assert kernel_spec(Annotated(("S", None)), mesh) == P("S")
    assert kernel_spec(Annotated((None, ("S", "T"))), mesh) == P(None, ("S", "T"))


def test_axis_that_the_mesh_lacks_is_refused(mesh):
    with pytest.raises(ValueError) as error:
        kernel_spec(Annotated((None, "model")), mesh)
    assert str(error.value).startswith("Dense_0.kernel: its PartitionSpec P(None, 'model') names")
    assert str(error.value).endswith("which the mesh does not have. Its axes: S=4, T=2.")


# --------------------------------------------------------------------------------------------------
# Logical names


RULES = (("embed", "S"), ("mlp", "S"), ("heads", "T"), ("mlp", "T"))


@pytest.mark.parametrize(
    "names, spec",
    [
        (("embed", "heads"), P("S", "T")),
        (("embed", "mlp"), P("S", "T")),  # "mlp" finds S taken and T free
        (("mlp", "heads"), P("S", "T")),
        ((None, "heads"), P("S", "T")),
        (("other", None), P(None, "S")),
    ],
    ids=str,
)
def test_logical_names_become_axes_by_the_first_rule_that_fits(mesh, names, spec):
    """B49: rules in the box."""
    assert kernel_spec(Annotated(names, True, RULES), mesh) == spec


def test_two_names_of_one_axis_leave_the_second_dimension_whole(mesh):
    """B49: embed->S, mlp->S: P('S', None)."""
    rules = (("embed", "S"), ("mlp", "S"))
    assert kernel_spec(Annotated(("embed", "mlp"), True, rules), mesh) == P("S")


def test_rules_in_context_are_taken(mesh):
    with nn.logical_axis_rules((("mlp", "T"),)):
        assert kernel_spec(Annotated(("embed", "mlp"), True), mesh) == P("S", "T")


def test_logical_names_train_as_unsharded(mesh):
    module = Annotated(("embed", "mlp"), True, (("mlp", "T"),))
    assert_as_unsharded(module, mesh, X, dp_mesh_dims=DIMS)


def test_logical_constraints_leave_the_data_parallel_axes_alone(mesh):
    """Inside the region they are manual already; "T" is the compiler's."""

    class Constrained(nn.Module):
        @nn.compact
        def __call__(self, x):
            return with_logical_constraint(nn.Dense(32)(x), ("batch", "mlp"))

    with jax.set_mesh(mesh), nn.logical_axis_rules((("batch", "S"), ("mlp", "T"))):
        assert_as_unsharded(Constrained(), mesh, X, dp_mesh_dims=DIMS)


# --------------------------------------------------------------------------------------------------
# Stacks


class Body(nn.Module):
    """One layer with an annotated kernel."""

    @nn.compact
    def __call__(self, x):
        box = nn.with_partitioning(NORMAL, (None, "T"))
        return nn.tanh(nn.Dense(16, kernel_init=box)(x)), None


class Boxed(nn.Module):
    """As many layers as the mesh has shards."""

    settings: Any

    @nn.compact
    def __call__(self, x):
        return scan(Body, 4, **dict(self.settings))(name="layers")(x)[0]


def test_boxes_in_a_scan_have_specs_of_their_arrays_rank(mesh):
    """B06: nn.scan tells the box of the new axis; the layer axis stays whole."""
    module = Boxed((("metadata_params", FrozenNone()),))
    model, _ = assert_as_unsharded(module, mesh, X, dp_mesh_dims=DIMS)
    box = init(model, X)["params"]["layers"]["Dense_0"]["kernel"]
    assert box.names == (None, None, "T")
    assert box.value.sharding == NamedSharding(mesh, P(None, "S", "T"))


class FrozenNone(dict):
    """{nn.PARTITION_NAME: None} as an attribute of a module, which is hashed."""

    def __init__(self):
        super().__init__({nn.PARTITION_NAME: None})

    def __hash__(self):  # pyright: ignore
        return 0


def test_boxes_in_a_scan_that_says_nothing_of_them_are_refused_by_flax(mesh):
    """B06: not silently another spec."""
    with pytest.raises(flax.errors.PartitioningUnspecifiedError):
        abstract(jfsdp.shard(Boxed(()), mesh, dp_mesh_dims=DIMS), X)


def test_parameters_of_a_bridged_scan_have_specs_of_their_arrays_rank(mesh):
    """B06: an NNX layer in a Linen scan; the layer axis is not sharded."""

    class Bridged(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nnx.bridge.to_linen(nnx.Linear, 16, 16, name="linear")
            return nn.tanh(layer(x)), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            settings = {"variable_axes": {True: 0}, "split_rngs": {"params": True}, "length": 4}
            return nn.scan(Bridged, **settings)(name="layers")(x)[0]

    model = jfsdp.shard(Model(), mesh, dp_mesh_dims=DIMS)
    params = abstract(model, X)["params"]
    for leaf in jax.tree.leaves(params):
        assert len(leaf.sharding.spec) <= leaf.ndim
        assert leaf.sharding.spec[0] is None
        assert "S" in leaf.sharding.spec
