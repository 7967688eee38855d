"""A small residual network with BatchNorm in plain Flax Linen: no word of meshes, sharding or jfsdp.

He and others: Deep Residual Learning for Image Recognition, arXiv:1512.03385, 2015; the block is the
basic one of figure 5, and the network that of section 4.2, for smaller images.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    features: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        strides = (self.stride, self.stride)
        y = nn.Conv(self.features, (3, 3), strides, use_bias=False)(x)
        y = nn.relu(nn.BatchNorm(not train, momentum=0.9)(y))
        y = nn.Conv(self.features, (3, 3), use_bias=False)(y)
        y = nn.BatchNorm(not train, momentum=0.9, scale_init=nn.initializers.zeros)(y)
        if x.shape != y.shape:
            x = nn.Conv(self.features, (1, 1), strides, use_bias=False)(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Maps images (batch, height, width, channels) to logits (batch, classes)."""

    stages: tuple[int, ...] = (48, 64, 64)  # features; all but the first halve the resolution
    classes: int = 10

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        x = nn.Conv(self.stages[0], (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(not train, momentum=0.9)(x))
        for stage, features in enumerate(self.stages):
            x = ResidualBlock(features, stride=2 if stage else 1)(x, train=train)
        return nn.Dense(self.classes)(jnp.mean(x, axis=(1, 2)))
