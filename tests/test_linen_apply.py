"""A sharded Linen module is called through every entry point of Flax."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn
from helpers import batch_on, make_mesh
from linen_models import KEY, abstract, assert_same, fast_compiler, filled
from test_linen_api import Encoder, Holder, Net, X

import jfsdp


@pytest.fixture(scope="module", autouse=True)
def compiler():
    with fast_compiler():
        yield


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


METHODS: dict[str, Any] = {
    "None": None,
    "name": "encode",
    "function of the class": Net.encode,
    "private": Net._hidden,
    "lambda": lambda self, x: self.encoder(x) - self.half,
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_apply_calls_any_method(model, variables, whole, method):
    got = jax.jit(functools.partial(model.apply, method=method))(
        variables, batch_on(model.jfsdp.unit.dp.mesh, X)
    )
    assert_same(got, Net().apply(whole, X, method=method))


def test_apply_calls_a_bound_method_of_the_module(model, variables, whole):
    got = model.apply(variables, X, method=model.encode)
    assert_same(got, Net().apply(whole, X, method="encode"))


@pytest.mark.parametrize(
    "method", ["encode", Net._hidden, METHODS["lambda"]], ids=["name", "method", "function"]
)
def test_every_method_gathers_its_units(model, variables, method):
    apply = jax.jit(functools.partial(model.apply, method=method))
    report = jfsdp.inspect(apply, variables, X, model=model)
    assert report.count("all-gather") == len(report.collectives) == 2  # kernel and bias


@pytest.mark.parametrize(
    "units, initialized",
    [
        ((), False),
        ((), True),
        (Encoder, False),
    ],
)
def test_a_part_is_called_by_its_name(mesh, units, initialized):
    plain = Holder(Encoder(16))
    model = jfsdp.shard(plain, mesh, units=units)
    variables = filled(abstract(model if initialized else plain, X))
    apply = jax.jit(functools.partial(model.apply, method="part"))
    expected = plain.apply(filled(abstract(plain, X)), X, method="part")
    assert_same(apply(variables, X), expected)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_module_that_was_not_initialized_is_called_all_the_same(mesh, whole, method):
    """Its plan comes from an abstract initialization by that method."""
    model = jfsdp.shard(Net(), mesh, units=Encoder)
    got = jax.jit(functools.partial(model.apply, method=method))(whole, X)
    assert_same(got, Net().apply(whole, X, method=method))


def test_apply_outside_of_jit_is_the_same(model, variables, whole):
    assert_same(model.apply(variables, X), Net().apply(whole, X))


def test_static_methods_and_properties_stay(model):
    assert (model.half, model.helper(3), type(model).helper(3)) == (4, 6, 6)


def test_docstrings_and_signatures_stay(model):
    import inspect

    assert type(model).encode.__doc__ == "The first half."
    assert inspect.signature(type(model).__call__) == inspect.signature(Net.__call__)


def test_mutable_true_returns_all_collections(model, variables, whole):
    got = model.apply(variables, X, mutable=True)
    assert_same(got, Net().apply(whole, X, mutable=True))


def test_dropout_rng_is_given_as_always(mesh, variables):
    model = jfsdp.shard(Net(train=True), mesh)
    one, two = (model.apply(variables, X, rngs={"dropout": KEY(seed)}) for seed in (1, 2))
    assert not np.allclose(one, two)
    np.testing.assert_array_equal(one, model.apply(variables, X, rngs={"dropout": KEY(1)}))


@pytest.mark.parametrize(
    "which", [True, lambda module, name: isinstance(module, Encoder)], ids=["all", "some"]
)
def test_captured_intermediates_are_those_of_the_unsharded_module(model, variables, whole, which):
    apply = functools.partial(model.apply, capture_intermediates=which, mutable=["intermediates"])
    expected = Net().apply(whole, X, capture_intermediates=which, mutable=["intermediates"])
    assert_same(jax.jit(apply)(variables, X), expected)


def test_bound_module_is_called_as_a_function(model, variables, whole):
    bound = model.bind(variables)
    assert_same(bound(X), Net().apply(whole, X))
    assert_same(bound.encode(X), Net().apply(whole, X, method="encode"))


def test_submodule_of_a_bound_module_is_called(model, variables, whole):
    got = model.bind(variables).encoder(X)
    assert_same(got, Net().apply(whole, X, method="encode"))


def test_unbind_gives_module_and_variables_back(model, variables):
    module, again = model.bind(variables).unbind()
    assert module == model
    assert again["params"]["head"]["kernel"] is variables["params"]["head"]["kernel"]
    np.testing.assert_array_equal(module.apply(again, X), model.apply(variables, X))


def test_submodule_is_unbound_with_its_variables(model, variables, whole):
    encoder, part = model.bind(variables).encoder.unbind()
    got = encoder.apply(part, X)
    assert_same(got, Net().apply(whole, X, method="encode"))
