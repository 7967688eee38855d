"""A byte-level GPT in plain Flax NNX: no word of meshes, sharding or jfsdp."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

VOCABULARY = 256  # one token per byte value


@dataclass(frozen=True)
class GPTConfig:
    width: int
    layers: int
    heads: int
    context: int  # the longest sequence, in bytes
    dropout: float = 0.0


class Attention(nnx.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.heads = config.heads
        self.qkv = nnx.Linear(config.width, 3 * config.width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(
            config.width, config.width, kernel_init=nnx.initializers.zeros, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, time, width = x.shape
        q, k, v = jnp.split(self.qkv(x).reshape(batch, time, self.heads, -1), 3, axis=-1)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.reshape(batch, time, width))


class MLP(nnx.Module):
    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(config.width, 4 * config.width, rngs=rngs)
        self.down = nnx.Linear(
            4 * config.width, config.width, kernel_init=nnx.initializers.zeros, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x)))


class Block(nnx.Module):
    """One pre-norm transformer block. Its residual branches start at zero: the identity."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(config.width, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.norm2 = nnx.LayerNorm(config.width, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: jax.Array, *, deterministic: bool) -> jax.Array:
        x = x + self.dropout(self.attention(self.norm1(x)), deterministic=deterministic)
        return x + self.dropout(self.mlp(self.norm2(x)), deterministic=deterministic)


class GPT(nnx.Module):
    """Maps tokens (batch, time) to the logits (batch, time, 256) of each next byte."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.token = nnx.Embed(VOCABULARY, config.width, rngs=rngs)
        self.position = nnx.Embed(config.context, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.head = nnx.Linear(config.width, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array, *, deterministic: bool = False) -> jax.Array:
        x = self.token(tokens) + self.position(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, deterministic=deterministic)
        return self.head(self.norm(x))


@nnx.jit
def next_byte(
    model: GPT, tokens: jax.Array, last: int, temperature: float, key: jax.Array
) -> jax.Array:
    """One sampled byte per sequence, to follow position `last`. What lies behind it is padding."""
    logits = model(tokens, deterministic=True)[:, last].astype(jnp.float32)
    return jax.random.categorical(key, logits / temperature)


def generate(
    model: GPT, prompt: bytes, count: int, *, batch: int, temperature: float, seed: int
) -> bytes:
    """The prompt and `count` sampled bytes.

    There is no cache: every step runs the whole window. A sharded model splits its batch over the
    devices, so `batch` sequences are sampled, and the first is returned.
    """
    context = model.position.num_embeddings
    text = np.tile(np.frombuffer(prompt, np.uint8).astype(np.int32), (batch, 1))
    for i in range(count):
        window = text[:, -context:]
        last = window.shape[1] - 1
        tokens = np.pad(window, ((0, 0), (0, context - 1 - last)))  # one shape: compiled once
        key = jax.random.fold_in(jax.random.key(seed), i)
        byte = next_byte(model, tokens, last, temperature, key)
        text = np.concatenate([text, np.asarray(byte)[:, None]], axis=1)
    return bytes(text[0].astype(np.uint8))
