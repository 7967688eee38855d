"""A sharded Linen module is used through every entry point of Flax as the module it was made of."""

from __future__ import annotations

import copy
import functools
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn
from helpers import assert_spec, local_shape, make_mesh, rows
from jax.sharding import PartitionSpec as P
from linen_models import KEY, abstract, assert_same, fast_compiler, filled

import jfsdp

X = rows(8, 16)


@pytest.fixture(scope="module", autouse=True)
def compiler():
    with fast_compiler():
        yield


class Encoder(nn.Module):
    """A dense layer and its activation."""

    features: int

    @nn.compact
    def __call__(self, x):
        return nn.tanh(nn.Dense(self.features)(x))


class Holder(nn.Module):
    """A module that was given its part, which Flax can call by name from outside."""

    part: nn.Module

    def __call__(self, x):
        return self.part(x) + x


class Net(nn.Module):
    """An encoder, a dropout, a head, and more methods than one."""

    width: int = 8
    train: bool = False

    def setup(self):
        self.encoder = Encoder(self.width)
        self.dropout = nn.Dropout(0.5, deterministic=not self.train)
        self.head = nn.Dense(16)

    def __call__(self, x, scale=1.0):
        return self.head(self.dropout(self.encode(x))) * scale

    def encode(self, x):
        """The first half."""
        return self.encoder(x)

    @staticmethod
    def helper(x):
        return 2 * x

    def _hidden(self, x):
        return self.encoder(x) + 1

    @property
    def half(self):
        return self.width // 2


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(S=8)


@pytest.fixture(scope="module")
def model(mesh) -> Any:
    return jfsdp.shard(Net(), mesh, units=(Encoder, nn.Dense))


@pytest.fixture(scope="module")
def variables(model):
    return filled(abstract(model, X))


@pytest.fixture(scope="module")
def whole():
    """The same values, unsharded."""
    return filled(abstract(Net(), X))


# --------------------------------------------------------------------------------------------------
# Initialization


def test_init_makes_the_values_of_the_unsharded_module_in_shards(model):
    variables = model.init(KEY(0), X)
    assert_same(variables, Net().init(KEY(0), X))
    kernel = variables["params"]["head"]["kernel"]
    assert_spec(kernel, None, "S")
    assert local_shape(kernel) == (8, 2)


def test_init_with_output_returns_the_output_too(model):
    output, variables = model.init_with_output({"params": KEY(0)}, X, scale=2.0)
    expected, whole = Net().init_with_output({"params": KEY(0)}, X, scale=2.0)
    assert_same((output, variables), (expected, whole))


@pytest.mark.parametrize("method", ["encode", Net.encode], ids=["name", "function"])
def test_init_of_another_method_makes_what_that_needs(mesh, method):
    model = jfsdp.shard(Net(), mesh, units=Encoder)
    variables = model.init(KEY(0), X, method=method)
    assert_same(variables, Net().init(KEY(0), X, method=method))
    assert set(variables["params"]) == {"encoder"}


def test_module_that_initializes_its_parts_first_serves_the_whole_later(mesh, whole):
    """A plan that knows too few parameters is not taken for the call."""
    model = jfsdp.shard(Net(), mesh, units=(Encoder, nn.Dense))
    model.init(KEY(0), X, method="encode")
    assert_same(jax.jit(model.apply)(whole, X), Net().apply(whole, X))


def test_init_may_be_jitted(model):
    variables = jax.jit(model.init)(KEY(0), X)
    assert_same(variables, Net().init(KEY(0), X))
    assert_spec(variables["params"]["head"]["kernel"], None, "S")


def test_lazy_init_needs_no_data(model):
    variables = model.lazy_init(KEY(0), jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert_same(variables, Net().init(KEY(0), X))
    assert_spec(variables["params"]["head"]["kernel"], None, "S")


def test_abstract_init_has_the_shapes_of_the_real_one(model):
    shapes = jax.eval_shape(model.init, KEY(0), X)
    assert_same(shapes, jax.eval_shape(Net().init, KEY(0), X))


def test_abstract_variables_lie_as_the_real_ones(model):
    """B53: a NamedSharding on every leaf, equal to that of the arrays."""
    described = jfsdp.init(lambda: model.init(KEY(0), X), abstract=True)
    real = model.init(KEY(0), X)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(described))
    assert jfsdp.shardings(described) == jfsdp.shardings(real)


def test_batch_of_one_initializes(model):
    """B44: a dummy batch, which does not divide over the 8 devices."""
    assert_same(model.init(KEY(0), X[:1]), Net().init(KEY(0), X[:1]))


def test_batch_of_one_is_refused_by_a_call(model, variables):
    """B44: a short error with the sizes."""
    with pytest.raises(ValueError, match=r"the batch is 1, which does not divide over 8"):
        model.apply(variables, X[:1])


def test_initial_values_may_depend_on_the_variables_shape_alone(mesh):
    """A rng for every collection, as Flax takes them."""
    model = jfsdp.shard(Net(train=True), mesh)
    rngs = {"params": KEY(0), "dropout": KEY(1)}
    assert_same(model.init(rngs, X), Net(train=True).init(rngs, X))


def test_tabulate_writes_the_same_table(model):
    assert model.tabulate(KEY(0), X) == Net().tabulate(KEY(0), X)


# --------------------------------------------------------------------------------------------------
# The module itself


def test_module_is_of_the_class_that_it_was_of(model):
    assert isinstance(model, Net)
    assert (type(model).__name__, type(model).__module__) == ("Net", Net.__module__)
    assert repr(model) == repr(Net())


def test_same_module_with_the_same_settings_is_equal_and_hashes_alike(mesh, model):
    again = jfsdp.shard(Net(), mesh, units=[Encoder, nn.Dense])
    assert again == model
    assert hash(again) == hash(model)


@pytest.mark.parametrize(
    "settings",
    [{}, {"units": Encoder}, {"units": (Encoder, nn.Dense), "reshard_after_forward": True}],
)
def test_other_settings_make_another_module(mesh, model, settings):
    assert jfsdp.shard(Net(), mesh, **settings) != model


def test_sharded_module_is_not_equal_to_the_plain_one(model):
    assert model != Net()


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        lambda m: m.clone(),
        lambda m: m.copy(),
    ],
    ids=["copy", "deepcopy", "clone", "Module.copy"],
)
def test_copies_are_sharded_as_the_original(model, variables, copied):
    other = copied(model)
    assert other == model
    assert jfsdp.inspect(other.apply, variables, X, model=model).count("all-gather") == 4


def test_clone_with_other_attributes_keeps_the_settings(model, mesh):
    wide = model.clone(width=16)
    assert wide.width == 16
    variables = abstract(wide, X)
    assert variables["params"]["head"]["kernel"].sharding.spec == P("S")
    assert wide == jfsdp.shard(Net(16), mesh, units=(Encoder, nn.Dense))


def test_module_is_a_static_argument_of_jit_that_is_traced_once(mesh, variables):
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def forward(model, variables, x):
        traces.append(1)
        return model.apply(variables, x)

    for _ in range(3):
        forward(jfsdp.shard(Net(), mesh, units=Encoder), variables, X)
    assert len(traces) == 1


def test_unshard_gives_the_module_and_the_weights_as_they_were(model, variables, whole):
    plain = jfsdp.unshard(model)
    assert type(plain) is Net
    assert plain == Net()
    got = jfsdp.unshard(variables)
    assert_same(got, whole)
    assert {x.sharding.spec for x in jax.tree.leaves(got)} == {P()}


def test_the_plan_names_units_and_parameters_by_their_paths(model, variables):
    rows = {row.path: (row.unit, row.spec) for row in jfsdp.plan(model).rows}
    assert rows == {
        "encoder.Dense_0.kernel": ("encoder.Dense_0", P("S")),
        "encoder.Dense_0.bias": ("encoder.Dense_0", P("S")),
        "head.kernel": ("head", P(None, "S")),
        "head.bias": ("head", P("S")),
    }


def test_variables_may_come_from_anywhere(model, whole):
    """Arrays of numpy, of one device: a call lays them itself."""
    numpy = jax.tree.map(np.asarray, whole)
    assert_same(model.apply(numpy, X), Net().apply(whole, X))


def test_a_step_is_inspected_before_the_module_was_ever_called(mesh):
    """Its state may come from elsewhere: tracing the step finds the units."""
    model = jfsdp.shard(Net(), mesh, units=lambda path, module: isinstance(module, nn.Dense))
    step = jax.jit(lambda variables, x: model.apply(variables, x))
    report = jfsdp.inspect(step, abstract(Net(), X), X, model=model)
    assert report.count("all-gather") == 4
