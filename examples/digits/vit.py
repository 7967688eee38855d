"""A small Vision Transformer with dropout in plain Flax Linen: no word of meshes, sharding or jfsdp.

Dosovitskiy and others: An Image is Worth 16x16 Words, arXiv:2010.11929, 2021; with the mean over all
patches in place of a class token.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn


class EncoderBlock(nn.Module):
    """One pre-norm transformer block."""

    heads: int
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        drop = nn.Dropout(self.dropout, deterministic=not train)
        width = x.shape[-1]
        y = nn.LayerNorm()(x)
        x = x + drop(nn.MultiHeadDotProductAttention(self.heads)(y))
        y = nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x)))
        return x + drop(nn.Dense(width)(drop(y)))


class ViT(nn.Module):
    """Maps images (batch, height, width, channels) to logits (batch, classes)."""

    patch: int = 4  # of the square patches, in pixels
    width: int = 64
    layers: int = 3
    heads: int = 4
    dropout: float = 0.1
    classes: int = 10

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        patch = (self.patch, self.patch)
        x = nn.Conv(self.width, patch, strides=patch)(x)
        x = x.reshape(len(x), -1, self.width)
        x = x + self.param("position", nn.initializers.normal(0.5), (1, *x.shape[1:]))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        for _ in range(self.layers):
            x = EncoderBlock(self.heads, self.dropout)(x, train=train)
        return nn.Dense(self.classes)(jnp.mean(nn.LayerNorm()(x), axis=1))
