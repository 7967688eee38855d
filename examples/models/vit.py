"""The Vision Transformer in Flax NNX.

Dosovitskiy and others: An Image is Worth 16x16 Words, arXiv:2010.11929, 2021. ViT-Base of table 1
with 16x16 patches, and the single linear layer of fine-tuning as its head. Without dropout.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from losses import classification_loss
from transformer import Block, call_layers

__all__ = ["ViT", "ViTConfig", "classification_loss", "vit_b16"]


@dataclass(frozen=True)
class ViTConfig:
    size: int = 224  # of the square images, in pixels
    patch: int = 16  # of the square patches, in pixels
    width: int = 768
    layers: int = 12
    heads: int = 12
    classes: int = 1000
    remat: bool = False  # keep only each block's input for the backward


class ViT(nnx.Module):
    """Maps images (batch, size, size, 3) to logits (batch, classes)."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        width, patch = config.width, (config.patch, config.patch)
        tokens = 1 + (config.size // config.patch) ** 2
        kernels = {"init": nnx.initializers.xavier_uniform()}
        kernels["out_init"] = kernels["init"]
        self.remat = config.remat
        self.patches = nnx.Conv(3, width, patch, strides=patch, padding="VALID", rngs=rngs)
        self.class_token = nnx.Param(jnp.zeros((1, 1, width)))
        positions = nnx.initializers.normal(0.02)(rngs.params(), (1, tokens, width))
        self.position = nnx.Param(positions)
        self.blocks = nnx.List(
            [
                Block(width, config.heads, causal=False, epsilon=1e-6, **kernels, rngs=rngs)
                for _ in range(config.layers)
            ]
        )
        self.norm = nnx.LayerNorm(width, epsilon=1e-6, rngs=rngs)
        self.head = nnx.Linear(width, config.classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        patches = self.patches(images)
        batch, *_, width = patches.shape
        first = jnp.broadcast_to(self.class_token[...], (batch, 1, width))
        x = jnp.concatenate([first, patches.reshape(batch, -1, width)], axis=1)
        x = call_layers(self.blocks, x + self.position[...], remat=self.remat)
        return self.head(self.norm(x[:, 0]))


def vit_b16(*, rngs: nnx.Rngs, remat: bool = False) -> ViT:
    """86,567,656 parameters."""
    return ViT(ViTConfig(remat=remat), rngs=rngs)
