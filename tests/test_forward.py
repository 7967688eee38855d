"""What users do with modules: call parts, share them, call them twice, pass and return anything."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, make_mesh, rows
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jfsdp

X = rows(16, 16)


def grads_of(model, *args):
    """Gradient of a loss of every floating output, under nnx.jit."""

    def loss(model, *args):
        floating = [
            x for x in jax.tree.leaves(model(*args)) if jnp.issubdtype(x.dtype, jnp.floating)
        ]
        return sum(jnp.mean(jnp.sin(x.astype(jnp.float32)) ** 2) for x in floating)

    return nnx.jit(nnx.grad(loss))(model, *args)


def assert_same_gradients(make, shard, *args):
    """The sharded model has the gradients of the same model unsharded."""
    model = make()
    shard(model)
    assert_close(grads_of(model, *args), grads_of(make(), *args), rtol=0, atol=1e-6)


class Twice(nnx.Module):
    """Calls one unit two times."""

    def __init__(self):
        self.layer = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.layer(jnp.tanh(self.layer(x)))


@pytest.mark.parametrize("reshard", [True, False])
def test_a_unit_may_be_called_twice_in_one_forward(reshard):
    mesh = make_mesh(replica=2, fsdp=4)
    settings = {"units": nnx.Linear, "reshard_after_forward": reshard}
    assert_same_gradients(Twice, lambda m: jfsdp.shard(m, mesh, **settings), X)


class Tied(nnx.Module):
    """Two modules, each of which becomes a unit, share one Variable."""

    def __init__(self):
        self.embed = nnx.Embed(32, 16, rngs=nnx.Rngs(0))
        self.head = nnx.Embed(32, 16, rngs=nnx.Rngs(1))
        self.head.embedding = self.embed.embedding

    def __call__(self, x):
        return x @ self.embed(jnp.arange(16)) @ self.head(jnp.arange(16))


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_parameter_may_be_shared_by_two_units(by_hand):
    mesh = make_mesh(fsdp=8)

    def shard(model):
        if by_hand:
            jfsdp.shard(model.embed, mesh)
            jfsdp.shard(model.head, mesh)
        jfsdp.shard(model, mesh, units=() if by_hand else nnx.Embed)

    assert_same_gradients(Tied, shard, X)
    model = Tied()
    shard(model)
    assert model.embed.embedding is model.head.embedding


def test_a_nested_unit_may_be_called_alone():
    model = jfsdp.shard(Twice(), make_mesh(fsdp=8), units=nnx.Linear)
    assert_close(grads_of(model.layer, X), grads_of(Twice().layer, X), rtol=0, atol=1e-6)


def test_another_method_may_be_registered_as_a_forward():
    class Head(nnx.Module):
        def __init__(self):
            self.embed = nnx.Embed(32, 16, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.embed.attend(x)

    def shard(model):
        jfsdp.shard(model, make_mesh(fsdp=8), units=nnx.Embed)
        jfsdp.register_forward_method(model.embed, "attend")

    assert_same_gradients(Head, shard, X)


def test_two_forwards_may_share_one_backward():
    def loss(model):
        return jnp.mean((model(X) - model(X[::-1])) ** 2)

    model = jfsdp.shard(Twice(), make_mesh(fsdp=8), units=nnx.Linear)
    expected = nnx.jit(nnx.grad(loss))(Twice())
    assert_close(nnx.jit(nnx.grad(loss))(model), expected, rtol=0, atol=1e-6)


def test_calls_outside_of_jit_work():
    model = jfsdp.shard(Twice(), make_mesh(replica=2, fsdp=4), units=nnx.Linear)
    np.testing.assert_allclose(model(X), Twice()(X), rtol=0, atol=1e-6)
    loss = nnx.grad(lambda model: jnp.mean(model(X) ** 2))
    assert_close(loss(model), loss(Twice()), rtol=0, atol=1e-6)


def test_the_whole_model_may_be_rematerialized():
    def loss(model):
        return jnp.mean(nnx.remat(lambda m, x: m(x))(model, X) ** 2)

    model = jfsdp.shard(Twice(), make_mesh(fsdp=8), units=nnx.Linear)
    expected = nnx.jit(nnx.grad(loss))(Twice())
    assert_close(nnx.jit(nnx.grad(loss))(model), expected, rtol=0, atol=1e-6)


class Anything(nnx.Module):
    """Pytrees, scalars, keywords, strings and None in; the same out."""

    def __init__(self):
        self.layer = nnx.Linear(16, 8, rngs=nnx.Rngs(0))

    def __call__(self, inputs, scale, mode="sum", *, extra=None):
        y = self.layer(inputs["x"]) * scale
        if extra is not None:
            y = y + extra[0]
        return {"y": y, "aux": (jnp.mean(y**2), mode, None), "ids": inputs["ids"], "count": 3}


def test_pytrees_scalars_keywords_and_other_values_pass():
    model = jfsdp.shard(Anything(), make_mesh(fsdp=8))
    inputs = {"x": X, "ids": np.arange(16)}
    args = (inputs, jnp.float32(0.5), "mean")
    result, expected = (m(*args, extra=[X[:, :8]]) for m in (model, Anything()))
    assert (result["aux"][1:], result["count"]) == (("mean", None), 3)
    for name in ("y", "ids"):
        np.testing.assert_allclose(result[name], expected[name], rtol=0, atol=1e-6)
    np.testing.assert_allclose(result["aux"][0], expected["aux"][0], rtol=0, atol=1e-6)


def test_gradients_of_inputs_are_those_of_the_whole_batch():
    def loss(model, inputs, scale):
        result = model(inputs, scale)
        return jnp.sum(result["y"] ** 2) + result["aux"][0]

    inputs, wanted = {"x": X, "ids": np.arange(16)}, (1, 2)
    sharded = jfsdp.shard(Anything(), make_mesh(replica=2, fsdp=4))
    grad = nnx.jit(
        nnx.grad(lambda m, x, s: loss(m, {"x": x, "ids": inputs["ids"]}, s), argnums=wanted)
    )
    got, expected = (grad(model, X, jnp.float32(0.5)) for model in (sharded, Anything()))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


class Probe(nnx.Module):
    """A product that notes the dtypes of its weight and inputs in `SEEN`."""

    def __init__(self, rngs):
        self.w = nnx.Param(rngs.normal((16, 16)))

    def __call__(self, x, table):
        SEEN.append((self.w.dtype.name, x.dtype.name, table.dtype.name))
        return x @ self.w[...].astype(x.dtype)


SEEN: list[tuple[str, str, str]] = []


class Probes(nnx.Module):
    """Two probes, one after the other."""

    def __init__(self):
        self.first, self.second = (Probe(nnx.Rngs(i)) for i in range(2))

    def __call__(self, x, table):
        return self.second(self.first(x, table), table)


def test_each_unit_has_its_own_policy():
    mesh, table = make_mesh(fsdp=8), jnp.ones((16, 2))
    model = Probes()
    half = jfsdp.MixedPrecisionPolicy("bfloat16", output_dtype="float32")
    plain = jfsdp.MixedPrecisionPolicy("float16", cast_forward_inputs=False)
    jfsdp.shard(model.first, mesh, mp_policy=half)
    jfsdp.shard(model.second, mesh, mp_policy=plain)
    jfsdp.shard(model, mesh, mp_policy=jfsdp.MixedPrecisionPolicy(output_dtype="bfloat16"))
    SEEN.clear()
    assert model(X, table).dtype == jnp.bfloat16
    assert SEEN == [("bfloat16", "bfloat16", "bfloat16"), ("float16", "float32", "float32")]


def test_an_argument_may_lie_otherwise_than_a_batch():
    class Masked(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(16, 8, rngs=nnx.Rngs(0))

        def __call__(self, x, mask, batch):
            return self.layer(x) * mask + batch["bias"]

    def shard(model):
        specs = {"mask": P(), "batch.bias": P()}
        jfsdp.shard(model, make_mesh(replica=2, fsdp=4), in_specs=specs)

    assert_same_gradients(Masked, shard, X, rows(1, 8), {"bias": rows(1, 8, seed=2)})


def test_a_result_may_be_the_mean_over_the_devices():
    class Mean(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(16, 8, rngs=nnx.Rngs(0))

        def __call__(self, x):
            y = self.layer(x)
            return y, jnp.mean(y, axis=0)

    def shard(model):
        jfsdp.shard(model, make_mesh(replica=2, fsdp=4), out_specs=(None, P()))

    assert_same_gradients(Mean, shard, X)
    model = Mean()
    shard(model)
    np.testing.assert_allclose(model(X)[1], Mean()(X)[1], rtol=0, atol=1e-6)


SIZES = st.integers(1, 20)


MESHES = st.sampled_from([(1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2), (8, 1)])


@pytest.mark.slow
@settings(max_examples=8)
@given(inner=SIZES, hidden=SIZES, outer=SIZES, sizes=MESHES)
def test_any_shape_on_any_mesh_has_the_unsharded_gradients(inner, hidden, outer, sizes):
    def make():
        rngs = nnx.Rngs(0)
        return nnx.Sequential(
            nnx.Linear(inner, hidden, rngs=rngs), jnp.tanh, nnx.Linear(hidden, outer, rngs=rngs)
        )

    mesh = make_mesh(replica=sizes[0], fsdp=sizes[1])
    assert_same_gradients(make, lambda m: jfsdp.shard(m, mesh, units=nnx.Linear), rows(8, inner))
