"""Parts, several forwards and unused outputs, as in PyTorch's own FSDP2 tests: see FSDP2_CONFORMANCE.md."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    assert_close,
    batch_on,
    count_ops,
    gradients,
    make_mesh,
    mean_square,
    rows,
    train,
)
from jax.sharding import PartitionSpec as P
from models import AttentionBlock, Stack

import jfsdp


def test_a_part_is_trained_alone_after_its_root():
    """The root's step, then a block alone: its gradients are those of the plain block."""
    mesh = make_mesh(S=8)
    x = rows(16, 16)
    model, plain = Stack(3, 16, nnx.Rngs(0)), Stack(3, 16, nnx.Rngs(0))
    jfsdp.shard(model, mesh, units="blocks.*")
    for one, batch in ((model, batch_on(mesh, x)), (plain, x)):
        train(one, batch, steps=1)
    got = gradients(model.blocks[1], batch_on(mesh, x))
    assert_close(got, gradients(plain.blocks[1], x))
    for one, batch in ((model, batch_on(mesh, x)), (plain, x)):
        train(one, batch, steps=1)
    assert_close(*(nnx.as_pure(nnx.state(m)) for m in (model, plain)))


@pytest.mark.parametrize("remat", [False, True], ids=["plain", "remat"])
@pytest.mark.parametrize("reshard", [True, False])
def test_two_forwards_of_nested_units_share_one_backward(remat: bool, reshard: bool):
    """A loss of preferences: both answers by one model, rematerialized or not."""

    def loss(model: Any, x: jax.Array) -> jax.Array:
        chosen, rejected = model(x), model(-x)
        return jnp.mean(jnp.log1p(jnp.exp(jnp.sum(rejected - chosen, axis=-1))))

    mesh = make_mesh(R=2, S=4)
    make = lambda: Stack(3, 16, nnx.Rngs(0), remat)  # noqa: E731
    model = jfsdp.shard(make(), mesh, units="blocks.*", reshard_after_forward=reshard)
    got = gradients(model, batch_on(mesh, rows(16, 16)), loss)
    assert_close(got, gradients(make(), rows(16, 16), loss))


def test_two_forwards_of_a_part_before_the_backward():
    """The first block twice on other inputs, the second once."""

    def loss(model: Any, x: jax.Array) -> jax.Array:
        first = model.blocks[0](x)
        return jnp.mean((model.blocks[1](first) + model.blocks[0](x[:, ::-1])) ** 2)

    mesh = make_mesh(S=8)
    model = jfsdp.shard(Stack(2, 16, nnx.Rngs(0)), mesh, units="blocks.*")
    got = gradients(model, batch_on(mesh, rows(16, 16)), loss)
    assert_close(got, gradients(Stack(2, 16, nnx.Rngs(0)), rows(16, 16), loss))


class Twice(nnx.Module):
    """A trained and a frozen layer, each called twice."""

    def __init__(self):
        self.trained = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        self.frozen = nnx.Linear(16, 16, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.frozen(self.trained(jnp.tanh(self.frozen(self.trained(x)))))


def test_several_forwards_of_trained_and_frozen_units():
    trained = nnx.All(nnx.Param, nnx.PathContains("trained"))
    grad = nnx.jit(nnx.grad(mean_square, argnums=nnx.DiffState(0, trained)))
    mesh = make_mesh(S=8)
    model = jfsdp.shard(Twice(), mesh, units=nnx.Linear)
    x = batch_on(mesh, rows(16, 16))
    assert_close(nnx.as_pure(grad(model, x)), nnx.as_pure(grad(Twice(), rows(16, 16))))
    # Two leaves, once for each of the two calls.
    assert count_ops(grad.lower(model, x).lowered, "reduce_scatter") == 4


class TiedTable(nnx.Module):
    """A table of 13 rows of 5, as embedding and as head: no dimension divides."""

    def __init__(self):
        self.embed = nnx.Embed(13, 5, rngs=nnx.Rngs(0))
        self.mix = nnx.Linear(5, 5, rngs=nnx.Rngs(1))

    def __call__(self, tokens):
        return self.embed.attend(jnp.tanh(self.mix(self.embed(tokens))))


@pytest.mark.parametrize("sizes", [{"S": 8}, {"R": 2, "S": 4}], ids=["S8", "R2xS4"])
def test_every_row_of_a_tied_table_that_does_not_divide_is_trained(sizes: Any):
    """pytorch/pytorch#176076: there the last rank's rows silently stayed as they were."""
    mesh = make_mesh(**sizes)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 13, (16, 4)))
    before = np.array(TiedTable().embed.embedding[...])
    model, plain = jfsdp.shard(TiedTable(), mesh, units=nnx.Linear), TiedTable()
    for one, batch in ((model, batch_on(mesh, tokens)), (plain, tokens)):
        train(one, batch, steps=10, tx=optax.adam(1e-2, eps=1e-3))
    got, expected = (nnx.as_pure(nnx.state(m)) for m in (model, plain))
    assert_close(got, expected, rtol=0, atol=1e-5)
    assert (np.abs(np.array(model.embed.embedding[...]) - before).max(axis=1) > 1e-3).all()


class Two(nnx.Module):
    """Two outputs of the same attention block."""

    def __init__(self):
        self.block, self.head = AttentionBlock(nnx.Rngs(0)), nnx.Linear(16, 8, rngs=nnx.Rngs(1))

    def __call__(self, x):
        y = self.block(x)
        return y, self.head(y)


def test_an_output_may_be_left_unused():
    """The head's gradient is zeros; the block's is that of the output that is used."""

    def loss(model: Any, x: jax.Array) -> jax.Array:
        used, _ = model(x)
        return jnp.mean(used**2)

    mesh = make_mesh(S=8)
    model = jfsdp.shard(Two(), mesh, units=(AttentionBlock, nnx.Linear))
    x = rows(8, 4 * 16).reshape(8, 4, 16)
    got, expected = gradients(model, batch_on(mesh, x), loss), gradients(Two(), x, loss)
    assert_close(got, expected)
    assert not np.any(got[1].head.kernel[...])


def test_parameters_of_a_model_without_arguments_are_trained():
    """A root without inputs: every device computes the same, and it is counted once."""

    class Free(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

        def __call__(self):
            return jnp.mean(self.linear(jnp.ones((2, 8))) ** 2)

    mesh = make_mesh(R=2, S=4)
    model = jfsdp.shard(Free(), mesh)
    assert model.linear.kernel[...].sharding.spec == P("S")
    loss = nnx.jit(nnx.value_and_grad(lambda model: model()))
    assert_close(loss(model), loss(Free()))


# --------------------------------------------------------------------------------------------------
# A list of modules as one unit


class Chunked(nnx.Module):
    """A block, and a norm and a head that are called once for each chunk of the sequence."""

    def __init__(self):
        self.block, self.norm = AttentionBlock(nnx.Rngs(0)), nnx.LayerNorm(16, rngs=nnx.Rngs(1))
        self.head = nnx.Linear(16, 32, rngs=nnx.Rngs(2))

    def __call__(self, x: jax.Array) -> list[jax.Array]:
        return [self.head(self.norm(part)) for part in jnp.split(self.block(x), 2, axis=1)]


@pytest.mark.parametrize("reshard", [True, False])
def test_a_loss_in_chunks_over_a_list_that_is_one_unit(reshard: bool):
    def loss(model: Any, x: jax.Array) -> jax.Array:
        return sum((jnp.mean(jnp.sin(y) ** 2) for y in model(x)), jnp.zeros(()))

    mesh, model = make_mesh(R=2, S=4), Chunked()
    jfsdp.shard(model.block, mesh)
    jfsdp.shard([model.norm, model.head], mesh, reshard_after_forward=reshard)
    jfsdp.shard(model, mesh)
    x = rows(8, 4 * 16).reshape(8, 4, 16)
    assert_close(gradients(model, batch_on(mesh, x), loss), gradients(Chunked(), x, loss))


class Noting(nnx.Module):
    """A product that notes the dtypes of its weight and input."""

    def __init__(self, seed: int, seen: list[Any]):
        self.w = nnx.Param(jax.random.normal(jax.random.key(seed), (16, 16)))
        self.note = nnx.static(seen.append)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.note((self.w.dtype.name, x.dtype.name))
        return (x @ self.w[...]).astype(jnp.float32)


class Pair(nnx.Module):
    """Two of them; what is between them is float32."""

    def __init__(self, seen: list[Any]):
        self.first, self.second = Noting(0, seen), Noting(1, seen)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(jnp.tanh(self.first(x)))


@pytest.mark.parametrize("cast", [True, False])
def test_inputs_of_each_module_of_a_list_are_cast(cast: bool):
    seen: list[Any] = []
    mesh, model = make_mesh(S=8), Pair(seen)
    policy = jfsdp.MixedPrecisionPolicy("bfloat16", "float32", cast_forward_inputs=cast)
    jfsdp.shard([model.first, model.second], mesh, mp_policy=policy)
    jfsdp.shard(model, mesh)
    gradients(model, batch_on(mesh, rows(8, 16)))
    assert set(seen) == {("bfloat16", "bfloat16" if cast else "float32")}
