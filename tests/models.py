"""Small models of every kind that users train, and batches for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import jfsdp


class Block(nnx.Module):
    """Linear(width, width) without bias, and tanh: one leaf."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.linear = nnx.Linear(width, width, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class Stack(nnx.Module):
    """A list of blocks; `remat` puts the user's own nnx.remat round each."""

    def __init__(self, depth: int, width: int, rngs: nnx.Rngs, remat: bool = False):
        self.blocks = nnx.List([Block(width, rngs) for _ in range(depth)])
        self.remat = remat

    def __call__(self, x):
        for block in self.blocks:
            x = nnx.remat(lambda m, x: m(x))(block, x) if self.remat else block(x)
        return x


class MLP(nnx.Module):
    """With biases, one of which (10) divides by no mesh of the tests."""

    def __init__(self, rngs: nnx.Rngs):
        self.fc1 = nnx.Linear(16, 32, rngs=rngs)
        self.fc2 = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        return self.fc2(nnx.gelu(self.fc1(x)))


class AttentionBlock(nnx.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.norm2 = nnx.RMSNorm(16, rngs=rngs)
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Attention(nnx.Module):
    """Two attention blocks on continuous inputs."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([AttentionBlock(rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class ConvNet(nnx.Module):
    """Convolution and BatchNorm."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 16, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.mean(nnx.relu(self.norm(self.conv(x))), axis=(1, 2)))


class TiedLM(nnx.Module):
    """Embedding, a block, and the embedding again as the head."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.block = AttentionBlock(rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)

    def __call__(self, tokens):
        return self.embed.attend(self.norm(self.block(self.embed(tokens))))


class LoRA(nnx.Module):
    """A layer and an adapter, whose parameters are of a Variable type of their own."""

    def __init__(self, rngs: nnx.Rngs, base_dtype: Any = jnp.float32):
        self.layer = nnx.LoRALinear(16, 16, lora_rank=8, param_dtype=base_dtype, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


class Layer(nnx.Module):
    """One layer of a scanned stack."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class Scanned(nnx.Module):
    """`nnx.scan` over stacked layers, as many as the tests have devices: axis 0 is a tempting choice."""

    def __init__(self, rngs: nnx.Rngs, depth: int = 8):
        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs: nnx.Rngs) -> Layer:
            return Layer(rngs)

        self.layers = stack(rngs)
        self.head = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer: Layer, x):
            return layer(x)

        return self.head(run(self.layers, x))


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, how it becomes units, and a batch."""

    make: Callable[[], nnx.Module]
    batch: Any
    units: Any = ()
    stack: str = ""

    def sharded(self, mesh, **settings) -> nnx.Module:
        """The model, sharded."""
        model = self.make()
        if self.stack:
            jfsdp.shard(getattr(model, self.stack), mesh, stacked_axis=0, **settings)
        return jfsdp.shard(model, mesh, units=self.units, **settings)


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


CASES = {
    "mlp": Case(lambda: MLP(nnx.Rngs(0)), _normal(16, 16), units=nnx.Linear),
    "attention": Case(lambda: Attention(nnx.Rngs(0)), _normal(16, 4, 16), units=AttentionBlock),
    "conv": Case(lambda: ConvNet(nnx.Rngs(0)), _normal(16, 4, 4, 3)),
    "tied": Case(
        lambda: TiedLM(nnx.Rngs(0)),
        np.random.default_rng(0).integers(0, 32, (16, 8)),
        units=AttentionBlock,
    ),
    "scanned": Case(lambda: Scanned(nnx.Rngs(0)), _normal(16, 16), stack="layers"),
}
