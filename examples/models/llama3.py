"""Llama 3 in Flax NNX.

Grattafiori and others: The Llama 3 Herd of Models, arXiv:2407.21783, 2024: table 3. The vocabulary
is that of the published weights. Rotary embeddings pair the halves of a head, as Hugging Face's
weights do; those of Meta pair neighbors, the same up to the order of the columns of `q` and `k`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from losses import next_token_loss
from transformer import Embed, attention, scan_layers, stack_layers

__all__ = ["Llama", "LlamaConfig", "llama3_8b", "llama3_70b", "next_token_loss"]


@dataclass(frozen=True)
class LlamaConfig:
    width: int
    layers: int
    heads: int
    hidden: int  # width of the feed-forward layer
    kv_heads: int = 8
    vocabulary: int = 128256
    theta: float = 500_000.0  # the base of the rotary frequencies
    epsilon: float = 1e-5  # of the norms
    remat: bool = True  # keep only each layer's input for the backward


def rotate(x: jax.Array, position: jax.Array, theta: float) -> jax.Array:
    """Rotary embedding of x (batch, time, heads, dim) at position (time,), in float32.

    Su and others: RoFormer, arXiv:2104.09864.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = (position[:, None] * frequency[None, :])[None, :, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary embeddings."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.dim, self.theta = config.width // config.heads, config.theta
        kv_width = config.kv_heads * self.dim
        self.q = nnx.Linear(config.width, config.width, use_bias=False, rngs=rngs)
        self.k = nnx.Linear(config.width, kv_width, use_bias=False, rngs=rngs)
        self.v = nnx.Linear(config.width, kv_width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(config.width, config.width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, time, width = x.shape
        q, k, v = (
            project(x).reshape(batch, time, -1, self.dim) for project in (self.q, self.k, self.v)
        )
        position = jnp.arange(time, dtype=jnp.float32)
        q, k = rotate(q, position, self.theta), rotate(k, position, self.theta)
        return self.out(attention(q, k, v, causal=True).reshape(batch, time, width))


class SwiGLU(nnx.Module):
    """Shazeer: GLU Variants Improve Transformer, arXiv:2002.05202."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.gate = nnx.Linear(config.width, config.hidden, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(config.width, config.hidden, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(config.hidden, config.width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.RMSNorm(config.width, epsilon=config.epsilon, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.norm2 = nnx.RMSNorm(config.width, epsilon=config.epsilon, rngs=rngs)
        self.mlp = SwiGLU(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nnx.Module):
    """Maps tokens (batch, time) to the logits (batch, time, vocabulary) of each next token."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.remat = config.remat
        self.token = Embed(
            config.vocabulary, config.width, init=nnx.initializers.normal(0.02), rngs=rngs
        )
        self.layers = stack_layers(lambda rngs: Layer(config, rngs=rngs), config.layers, rngs=rngs)
        self.norm = nnx.RMSNorm(config.width, epsilon=config.epsilon, rngs=rngs)
        self.head = nnx.Linear(config.width, config.vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = scan_layers(self.layers, self.token(tokens), remat=self.remat)
        return self.head(self.norm(x))


def llama3_8b(*, rngs: nnx.Rngs, remat: bool = True) -> Llama:
    """8,030,261,248 parameters."""
    config = LlamaConfig(width=4096, layers=32, heads=32, hidden=14336, remat=remat)
    return Llama(config, rngs=rngs)


def llama3_70b(*, rngs: nnx.Rngs, remat: bool = True) -> Llama:
    """70,553,706,496 parameters."""
    config = LlamaConfig(width=8192, layers=80, heads=64, hidden=28672, remat=remat)
    return Llama(config, rngs=rngs)
