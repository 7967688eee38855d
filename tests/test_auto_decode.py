"""Greedy decoding with a cache: token for token as the unsharded model, also with one sequence."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import make_mesh
from jax.sharding import PartitionSpec as P

import jfsdp

VOCABULARY, WIDTH, PROMPT, LENGTH = 32, 16, 3, 8


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=True, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(x)))


class Decoder(nnx.Module):
    """One token of each sequence in, the logits of the next one out."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs)])
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def decoder(batch: int, *, caches_first: bool = True, **settings) -> Decoder:
    model = Decoder(nnx.Rngs(0))
    if settings and not caches_first:
        shard(model, **settings)
    for layer in model.layers:
        layer.attention.init_cache((batch, LENGTH, WIDTH))
    return shard(model, **settings) if settings and caches_first else model


def shard(model: Decoder, **settings) -> Decoder:
    return jfsdp.shard(model, make_mesh(fsdp=8), units=Layer, **settings)


@nnx.jit
def step(model: Decoder, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = model(tokens)
    return jnp.argmax(logits, axis=-1), logits


def generate(model: Decoder, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens, prompt included, and the logits of every step."""
    prompt = np.random.default_rng(0).integers(0, VOCABULARY, (batch, PROMPT))
    tokens, logits = [jnp.asarray(prompt[:, i : i + 1]) for i in range(PROMPT)], []
    for position in range(LENGTH - 1):
        following, these = step(model, tokens[position])
        logits.append(these)
        if position + 1 == len(tokens):
            tokens.append(following)
    return np.concatenate(tokens, axis=1), np.concatenate(logits, axis=1)


@functools.cache
def unsharded(batch: int) -> tuple[np.ndarray, np.ndarray]:
    return generate(decoder(batch), batch)


WAYS = {
    "auto": {"partitioning": "auto"},
    "context": {"mp_policy": jfsdp.MixedPrecisionPolicy(reduce_dtype="float32")},
    "manual": {"state_specs": {nnx.Cache: P("fsdp")}},
}


SLOW = [(8, "context"), (1, "auto"), (3, "auto"), (1, "context")]


@pytest.mark.parametrize(
    ("batch", "way"),
    [
        *[(8, "auto"), (8, "manual"), (3, "context")],
        *[pytest.param(*case, marks=pytest.mark.slow) for case in SLOW],
    ],
)
def test_decoding_equals_the_unsharded_model_token_for_token(way, batch):
    model = decoder(batch, **WAYS[way])
    with jfsdp.auto_partitioning() if way == "context" else contextlib.nullcontext():
        tokens, logits = generate(model, batch)
    expected_tokens, expected_logits = unsharded(batch)
    np.testing.assert_array_equal(tokens, expected_tokens)
    np.testing.assert_allclose(logits, expected_logits, rtol=0, atol=1e-5)
    assert len(np.unique(tokens)) > 4


@pytest.mark.parametrize("way", ["auto", "manual", pytest.param("context", marks=pytest.mark.slow)])
def test_the_cache_of_a_batch_that_divides_lies_where_its_sequences_do(way):
    model = decoder(8, **WAYS[way])
    with jfsdp.auto_partitioning() if way == "context" else contextlib.nullcontext():
        generate(model, 8)
    cache = model.layers[0].attention.cached_key.get_raw_value()
    assert cache.sharding.spec[0] == "fsdp"
    assert int(model.layers[0].attention.cache_index.get_raw_value()) == LENGTH - 1


@pytest.mark.slow
def test_a_loop_over_steps_may_hold_the_context():
    """The whole of `generate` is one jitted scan."""

    @nnx.jit
    def run(model: Decoder, token: jax.Array) -> jax.Array:
        @nnx.scan(
            in_axes=(nnx.StateAxes({...: nnx.Carry}), nnx.Carry), out_axes=(nnx.Carry, 1), length=5
        )
        def loop(model: Decoder, token: jax.Array) -> tuple[jax.Array, jax.Array]:
            following = jnp.argmax(model(token), axis=-1)
            return following, following[:, 0]

        return loop(model, token)[1]

    start = jnp.ones((3, 1), jnp.int32)
    expected = run(decoder(3), start)
    with jfsdp.auto_partitioning():
        np.testing.assert_array_equal(run(decoder(3, **WAYS["context"]), start), expected)


def test_caches_may_be_made_after_the_model_was_sharded():
    tokens, _ = generate(decoder(8, caches_first=False, partitioning="auto"), 8)
    np.testing.assert_array_equal(tokens, unsharded(8)[0])
