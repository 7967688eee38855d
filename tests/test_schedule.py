"""The schedule of a call: what is gathered and reduced when, and for which programs there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from helpers import assert_close, make_mesh, mean_square, rows
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jfsdp
from jfsdp.pieces import cut, misused, used_name

WIDTH = 16
X = rows(16, WIDTH)


class Block(nnx.Module):
    """x + down(gelu(up(norm(x)))): 6 leaves."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    """A head behind blocks, which `forward` calls."""

    def __init__(self, forward: Callable[..., Any], depth: int = 3):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(rngs) for _ in range(depth)])
        self.head = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.forward = forward

    def __call__(self, x):
        return self.head(self.forward(self.blocks, x))


class Tied(nnx.Module):
    """A language model whose head is its embedding."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(32, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


class Scanned(nnx.Module):
    """A head behind a scan over stacked blocks."""

    def __init__(self, depth: int, remat: bool):
        self.head = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(0))
        keys = jax.random.split(jax.random.key(1), depth)
        self.blocks = nnx.vmap(lambda key: Block(nnx.Rngs(key)))(keys)
        self.remat = remat

    def __call__(self, x):
        def call(block, x):
            return block(x)

        layer = nnx.remat(call) if self.remat else call
        scan = nnx.scan(
            lambda block, x: layer(block, x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry
        )
        return self.head(scan(self.blocks, x))


class LinenBlock(nn.Module):
    """The same as a layer of `nn.scan`."""

    @nn.compact
    def __call__(self, x, _):
        h = nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(h), None


class LinenScanned(nn.Module):
    """A head behind `nn.scan`."""

    depth: int
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        block = nn.remat(LinenBlock, prevent_cse=False) if self.remat else LinenBlock
        stack = nn.scan(
            block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.depth
        )
        return nn.Dense(WIDTH, use_bias=False)(stack()(x, None)[0])


def one_by_one(blocks, x):
    """Each block once."""
    for block in blocks:
        x = block(x)
    return x


def rematted(blocks, x):
    """Each block once, in a remat of its own."""
    for block in blocks:
        x = nnx.remat(lambda block, x: block(x))(block, x)
    return x


def twice(blocks, x):
    """All blocks, and all of them again."""
    return one_by_one(blocks, one_by_one(blocks, x))


def in_one_remat(blocks, x):
    """All blocks in one remat."""
    return nnx.remat(one_by_one)(blocks, x)


def in_a_loop(blocks, x):
    """The first block in each iteration of a loop, then the others."""
    graphdef, state = nnx.split(blocks[0])

    def call(x, _):
        return nnx.merge(graphdef, state)(x), None

    return one_by_one(list(blocks)[1:], jax.lax.scan(call, x, length=2)[0])


def compare(make: Callable[[], Any], mesh: Any, x: Any = X, **settings: Any) -> Any:
    """Loss and gradients are those of the unsharded model; returns the report of both passes."""
    step = nnx.jit(nnx.value_and_grad(mean_square))
    model = jfsdp.shard(make(), mesh, **settings)
    loss, grads = step(model, x)
    expected, expected_grads = step(make(), x)
    assert_close(loss, expected, rtol=1e-6)
    assert_close(grads, expected_grads, rtol=2e-5, atol=1e-6)
    return jfsdp.inspect(step, model, x)


# Gathers forward; those of the backward, without the biases of `down` and `head` that it does not need.
FORWARD, AGAIN = 6, {False: 3, True: 5}


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("remat", [False, True])
def test_units_one_by_one(prefetch, remat):
    forward, mesh = rematted if remat else one_by_one, make_mesh(replica=2, fsdp=4)
    report = compare(lambda: Model(forward), mesh, units=Block, prefetch=prefetch)
    # Of the first block, whose input is data, the backward does not need the scale of the norm.
    spared = 0 if remat else 1
    assert report.count("all-gather") == 3 * (FORWARD + AGAIN[remat]) + 1 - spared
    assert report.count("reduce-scatter") == report.count("all-reduce") == 3 * FORWARD + 1
    report.check()


@settings(max_examples=8)
@given(
    depth=st.integers(1, 4),
    prefetch=st.integers(0, 2),
    remat=st.booleans(),
    sizes=st.sampled_from([{"fsdp": 8}, {"replica": 2, "fsdp": 4}, {"fsdp": 2}, {"fsdp": 1}]),
    reshard=st.sampled_from([None, True, False]),
)
def test_scanned_layers(depth, prefetch, remat, sizes, reshard):
    report = compare(
        lambda: Scanned(depth, remat),
        make_mesh(**sizes),
        units=Block,
        stacked_axis=0,
        prefetch=prefetch,
        reshard_after_forward=reshard,
    )
    if sizes["fsdp"] > 1:
        again = depth * AGAIN[remat] if reshard is not False else 0
        own = 2 if reshard else 1  # the head, which is the root's
        assert report.count("all-gather") == depth * FORWARD + again + own
        assert report.count("reduce-scatter") == depth * FORWARD + 1
        report.check()


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_scanned_layers_of_linen(prefetch, remat):
    plain, mesh = LinenScanned(3, remat), make_mesh(replica=2, fsdp=4)
    model = jfsdp.shard(plain, mesh, units=LinenBlock, prefetch=prefetch)
    variables = plain.init(jax.random.key(0), X)
    sharded = model.init(jax.random.key(0), X)
    sharded = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), variables, sharded)

    def step(model):
        return jax.jit(jax.value_and_grad(lambda v: jnp.mean(model.apply(v, X) ** 2)))

    loss, grads = step(model)(sharded)
    expected, expected_grads = step(plain)(variables)
    assert_close(loss, expected, rtol=1e-6)
    assert_close(grads, expected_grads, rtol=2e-5, atol=1e-6)
    report = jfsdp.inspect(step(model), sharded, model=model)
    assert report.count("all-gather") == 3 * (FORWARD + AGAIN[remat]) + 1
    report.check()


def test_the_next_layer_is_gathered_in_the_loop():
    """7 of 8 layers; the first one's weights are gathered before it."""
    model = jfsdp.shard(Scanned(8, True), make_mesh(fsdp=8), units=Block, stacked_axis=0)
    report = jfsdp.inspect(nnx.jit(mean_square), model, X)
    inside = sum(c.executions for c in report.collectives if c.in_loop)
    assert (inside, report.count("all-gather")) == (7 * FORWARD, 8 * FORWARD + 1)


@pytest.mark.parametrize(
    ("forward", "gathers"),
    [
        (twice, 6 * (FORWARD + AGAIN[False]) - 1),  # the first block's input is data
        (in_one_remat, 3 * (FORWARD + FORWARD) - 1),  # made again but for the last block's result
        # The same weights in every iteration: jax takes the forward's gather out of the loop.
        (in_a_loop, (1 + 2) * FORWARD + (2 + 2) * AGAIN[False]),
    ],
)
def test_what_cannot_be_scheduled_is_gathered_by_each_call(forward, gathers):
    report = compare(lambda: Model(forward), make_mesh(fsdp=8), units=Block)
    assert report.count("all-gather") == gathers + 1


def test_layers_stacked_along_another_dimension():
    """nn.scan transposes them before the loop: what it slices is no parameter as it stands."""

    class Other(nn.Module):
        @nn.compact
        def __call__(self, x):
            stack = nn.scan(
                LinenBlock, variable_axes={"params": 1}, split_rngs={"params": True}, length=3
            )
            return stack()(x, None)[0]

    plain = Other()
    model = jfsdp.shard(plain, make_mesh(fsdp=8), units=LinenBlock)
    sharded, variables = model.init(jax.random.key(0), X), plain.init(jax.random.key(0), X)
    sharded = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), variables, sharded)

    def step(model):
        return jax.jit(jax.value_and_grad(lambda v: jnp.mean(model.apply(v, X) ** 2)))

    assert_close(step(model)(sharded), step(plain)(variables), rtol=2e-5, atol=1e-6)
    report = jfsdp.inspect(step(model), sharded, model=model)
    assert {c.in_loop for c in report.collectives if c.kind == "all-gather"} == {True}


def test_weights_that_are_returned_as_they_are():
    class Open(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.ones((WIDTH, WIDTH)))

        def __call__(self, x):
            return x @ self.weight[...], self.weight[...]

    def loss(model, x):
        y, weight = model(x)
        return jnp.mean(y**2) + jnp.mean(weight**3)

    model = jfsdp.shard(Open(), make_mesh(fsdp=8), out_specs=(None, P()))
    grads, expected = nnx.jit(nnx.grad(loss))(model, X), nnx.grad(loss)(Open(), X)
    assert_close(grads, expected, rtol=1e-5)


def test_constants_of_the_forward():
    """Arrays that it closes over, used in several units."""
    table = jnp.linspace(0.5, 1, WIDTH)

    def forward(blocks, x):
        for block in blocks:
            x = block(x * table[None]) + table[None]
        return x

    compare(lambda: Model(forward), make_mesh(fsdp=8), units=Block)


def test_units_whose_inputs_differ_share_one_remat():
    """The first one's input is data, the others' are not."""

    def forward(blocks, x):
        call = nnx.remat(lambda block, x: block(x))
        for block in blocks:
            x = call(block, x)
        return x

    compare(lambda: Model(forward), make_mesh(fsdp=8), units=Block)


def test_frozen_units_are_not_reduced():
    mesh = make_mesh(fsdp=8)
    trained = nnx.All(nnx.Param, lambda path, _: "head" in path)
    step = nnx.jit(nnx.grad(mean_square, argnums=nnx.DiffState(0, trained)))
    model = jfsdp.shard(Model(one_by_one), mesh, units=Block)
    assert_close(step(model, X), step(Model(one_by_one), X), rtol=1e-5)
    report = jfsdp.inspect(step, model, X)
    assert (report.count("all-gather"), report.count("reduce-scatter")) == (3 * FORWARD + 1, 1)


@pytest.mark.parametrize(
    "given_, text", [(True, "True"), ("1", "'1'"), (1.0, "1.0"), (None, "None")]
)
def test_prefetch_is_a_number(given_, text):
    with pytest.raises(TypeError) as error:
        jfsdp.shard(Model(one_by_one), make_mesh(fsdp=8), prefetch=given_)
    assert str(error.value) == f"prefetch must be an int, a number of units, got {text}."


def test_negative_prefetch_is_refused():
    with pytest.raises(ValueError, match=r"^prefetch=-1: a number of units to gather ahead, 0 for"):
        jfsdp.shard(Model(one_by_one), make_mesh(fsdp=8), prefetch=-1)


# --------------------------------------------------------------------------------------------------
# Where a program is cut


def program(function: Callable[..., Any], *weights: int) -> tuple[Any, dict[Any, int]]:
    """A jaxpr of x and of as many square weights, and the group of each."""
    jaxpr = jax.make_jaxpr(function)(X, *[jnp.eye(WIDTH)] * len(weights)).jaxpr
    return jaxpr, dict(zip(jaxpr.invars[1:], weights, strict=True))


def called(weight: jax.Array, group: int) -> jax.Array:
    """A weight as a unit sees it."""
    return jax.ad_checkpoint.checkpoint_name(weight, used_name(group))


def test_a_piece_begins_where_a_new_unit_is_read():
    def function(x, a, b, c, d):
        x = jnp.sin(x) @ d  # of the outermost
        x = jnp.cos(x @ called(a, 1)) @ called(b, 1)
        x = jnp.tan(x @ called(c, 2))
        return x @ d

    jaxpr, groups = program(function, 1, 1, 2, 0)
    pieces = cut(jaxpr, groups)
    a, b, c, d = jaxpr.invars[1:]
    assert [set(piece.first) for piece in pieces] == [{d}, {a, b}, {c}]
    assert [set(piece.last) for piece in pieces] == [set(), {a, b}, {c, d}]


def test_two_calls_of_one_unit_are_seen():
    jaxpr, groups = program(lambda x, a: x @ called(a, 1) @ called(a, 1), 1)
    assert misused(jaxpr, groups) == {1}


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_weights_of_the_root_that_are_gathered_again(prefetch):
    """The tied embedding is needed at both ends."""
    tokens = jax.random.randint(jax.random.key(0), (16, 8), 0, 32)

    def loss(model, tokens):
        return jnp.mean(model(tokens).astype(jnp.float32) ** 2)

    step = nnx.jit(nnx.value_and_grad(loss))
    settings = dict(units="blocks.*", reshard_after_forward=True, prefetch=prefetch)
    model = jfsdp.shard(Tied(), make_mesh(replica=2, fsdp=4), **settings)
    (value, grads), (expected, expected_grads) = step(model, tokens), step(Tied(), tokens)
    assert_close(value, expected, rtol=1e-6)
    assert_close(grads, expected_grads, rtol=2e-5, atol=1e-6)
    jfsdp.inspect(step, model, tokens).check()
