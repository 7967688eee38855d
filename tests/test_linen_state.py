"""What a Linen module writes beside its parameters: sown values, caches."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from helpers import (
    local_shape,
    make_mesh,
    rows,
)
from jax.sharding import PartitionSpec as P
from linen_models import (
    KEY,
    assert_same,
    fast_compiler,
    scan,
)

import jfsdp

X = rows(16, 8)


@pytest.fixture(scope="module", autouse=True)
def compiler():
    with fast_compiler():
        yield


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(S=8)


def written(model: nn.Module, variables: Any, x: Any, *collections: str, **kwargs: Any) -> Any:
    """What a call writes into these collections."""
    apply = functools.partial(model.apply, mutable=list(collections), **kwargs)
    return jax.jit(lambda variables, x: apply(variables, x)[1])(variables, x)


# --------------------------------------------------------------------------------------------------
# Sown values


class Sowing(nn.Module):
    """A layer that sows what it is told to."""

    what: Any
    collection: str = "intermediates"

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, use_bias=False)(x)
        self.sow(self.collection, "value", self.what(x))
        return x


class Parent(nn.Module):
    """Two of them."""

    what: Any

    @nn.compact
    def __call__(self, x):
        return Sowing(self.what)(Sowing(self.what)(x))


def sown(model: nn.Module, x: Any = X, collection: str = "intermediates") -> Any:
    variables = {"params": {"Dense_0": {"kernel": jnp.eye(8)}}}
    return written(model, variables, x, collection)


@pytest.mark.parametrize(
    "what",
    [lambda x: x, lambda x: x[:, 0] > 0, lambda x: jnp.argmax(x, axis=-1), lambda x: jnp.mean(x)],
    ids=["batch", "booleans", "integers", "scalar"],
)
def test_sown_batches_are_joined_and_floating_scalars_averaged(mesh, what):
    got = sown(jfsdp.shard(Sowing(what), mesh))
    assert_same(got, sown(Sowing(what)))


@pytest.mark.parametrize("units", [(), Sowing])
def test_values_that_units_sow_are_those_of_the_unsharded_module(mesh, units):
    plain = Parent(lambda x: jnp.mean(x**2))
    params = {f"Sowing_{i}": {"Dense_0": {"kernel": jnp.eye(8)}} for i in range(2)}
    got = written(jfsdp.shard(plain, mesh, units=units), {"params": params}, X, "intermediates")
    assert_same(got, written(plain, {"params": params}, X, "intermediates"))


def test_values_sown_in_a_scan_are_stacked_means(mesh):
    class Body(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("losses", "value", jnp.mean(x))
            return nn.Dense(8, use_bias=False)(x), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return scan(Body, 3, variable_axes={"params": 0, "losses": 0})(name="layers")(x)[0]

    variables = {"params": {"layers": {"Dense_0": {"kernel": jnp.stack([jnp.eye(8)] * 3)}}}}
    specs = {"losses": P()}
    got = written(jfsdp.shard(Model(), mesh, state_specs=specs), variables, X, "losses")
    assert_same(got, written(Model(), variables, X, "losses"))


def test_sown_value_of_another_kind_is_refused_with_the_remedy(mesh):
    model = jfsdp.shard(Sowing(lambda x: x.sum(0)), mesh)
    with pytest.raises(ValueError) as error:
        sown(model)
    text = str(error.value)
    assert text.startswith(
        "Sowing.__call__ writes intermediates.value.0 (shape (8,) and dtype float32 on each of 8 "
        "data-parallel devices, whose local batch is 2)"
    )
    assert "jfsdp.shard(..., state_specs={'intermediates': PartitionSpec(...)})" in text
    assert "{'intermediates.value.0': ...}" in text


@pytest.mark.parametrize("key", ["intermediates", "intermediates.value"])
def test_state_specs_say_what_a_sown_value_is(mesh, key):
    """Each device's own row, side by side."""
    model = jfsdp.shard(Sowing(lambda x: x.sum(0)[None]), mesh, state_specs={key: P("S")})
    (value,) = sown(model)["intermediates"]["value"]
    assert_same(value, X.reshape(8, 2, 8).sum(1))


def test_state_specs_with_more_entries_than_dimensions_are_refused(mesh):
    model = jfsdp.shard(
        Sowing(lambda x: x[:, 0]), mesh, state_specs={"intermediates": P(None, "S")}
    )
    with pytest.raises(ValueError, match=r"state_specs .*intermediates\.value.*more entries"):
        sown(model)


def test_nothing_is_written_that_the_user_did_not_ask_for(mesh):
    model = jfsdp.shard(Sowing(lambda x: x.sum(0)), mesh)  # refused if it were written
    variables = {"params": {"Dense_0": {"kernel": jnp.eye(8)}}}
    assert_same(model.apply(variables, X), X)


# --------------------------------------------------------------------------------------------------
# Decode caches


class Cached(nn.Module):
    """Attention with a decode cache."""

    def setup(self):
        self.attention = nn.MultiHeadDotProductAttention(2, decode=True)

    def __call__(self, x):
        return self.attention(x)


def decode(model: nn.Module, variables: Any, x: Any) -> tuple[list[Any], Any]:
    """Token by token."""
    step = jax.jit(functools.partial(model.apply, mutable=["cache"]))
    params, cache = variables["params"], variables["cache"]
    outputs = []
    for token in range(3):
        y, updates = step({"params": params, "cache": cache}, x[:, token : token + 1])
        outputs.append(y)
        cache = updates["cache"]
    return outputs, cache


def test_decode_cache_lies_as_state_specs_say(mesh):
    x = rows(8, 3 * 8).reshape(8, 3, 8)
    plain = Cached()
    variables = plain.init(KEY(0), x)
    model = jfsdp.shard(plain, mesh, state_specs={"cache": P("S")})
    got, cache = decode(model, variables, x)
    assert_same((got, cache), decode(plain, variables, x))
    assert local_shape(cache["attention"]["cached_key"]) == (1, 3, 2, 4)
    assert cache["attention"]["cache_index"] == 3


def test_decode_cache_without_state_specs_is_refused(mesh):
    x = rows(8, 3 * 8).reshape(8, 3, 8)
    model = jfsdp.shard(Cached(), mesh)
    variables = Cached().init(KEY(0), x)
    with pytest.raises(ValueError) as error:
        decode(model, variables, x)
    text = str(error.value)
    assert text.startswith("Cached.__call__: cache.attention.cached_")
    assert "is a decode cache, with one row for each element of the batch" in text
    assert "jfsdp.shard(..., state_specs={\"cache\": PartitionSpec('S')})" in text


def test_decode_cache_of_auto_partitioning_needs_no_specs(mesh):
    x = rows(8, 3 * 8).reshape(8, 3, 8)
    variables = Cached().init(KEY(0), x)
    model = jfsdp.shard(Cached(), mesh, partitioning="auto")
    assert_same(decode(model, variables, x), decode(Cached(), variables, x), 1e-5)
