"""The GPT of the suite: its sizes, and its mathematics in plain functions of a pytree of arrays.

The models in `gpt_nnx.py` and `gpt_linen.py` are the same function of the same parameters, under the same
names; `gpt_by_hand.py` and `gpt_plain_jit.py` are written with the functions here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

Tree = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the model and of a batch.

    Attributes:
        blocks: how many.
        width: of the residual stream.
        heads: of attention.
        vocabulary: tokens.
        context: tokens of a row.
        rows: of the global batch.
    """

    blocks: int = 8
    width: int = 512
    heads: int = 8
    vocabulary: int = 2048
    context: int = 256
    rows: int = 32

    @property
    def block_shapes(self) -> Tree:
        """The parameters of one block."""
        d = self.width
        norm = {"scale": (d,), "bias": (d,)}
        return {
            "norm1": norm,
            "qkv": {"kernel": (d, 3 * d), "bias": (3 * d,)},
            "out": {"kernel": (d, d), "bias": (d,)},
            "norm2": norm,
            "up": {"kernel": (d, 4 * d), "bias": (4 * d,)},
            "down": {"kernel": (4 * d, d), "bias": (d,)},
        }

    @property
    def root_shapes(self) -> Tree:
        """All other parameters: the root unit's."""
        d = self.width
        return {
            "token": {"embedding": (self.vocabulary, d)},
            "position": {"embedding": (self.context, d)},
            "norm": {"scale": (d,), "bias": (d,)},
            "head": {"kernel": (d, self.vocabulary)},
        }


CPU = Shape(width=128, heads=4, vocabulary=512, context=64, rows=16)
"""What a simulated device runs in a tenth of a second."""


def is_shape(value: Any) -> bool:
    return isinstance(value, tuple)


def tree_shapes(shape: Shape, scan: bool) -> Tree:
    """All parameters: blocks as a list, or stacked along dimension 0."""
    block = shape.block_shapes
    blocks: Any = [block] * shape.blocks
    if scan:
        blocks = jax.tree.map(lambda size: (shape.blocks, *size), block, is_leaf=is_shape)
    return {**shape.root_shapes, "blocks": blocks}


# --------------------------------------------------------------------------------------------------
# Flax's layers. Statistics of a norm are float32; the result has the dtype of what comes in.


def layer_norm(p: Tree, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.maximum(0, jnp.square(wide).mean(-1, keepdims=True) - jnp.square(mean))
    scale, bias = (p[name][None, None] for name in ("scale", "bias"))
    return ((x - mean) * (jax.lax.rsqrt(variance + 1e-6) * scale) + bias).astype(x.dtype)


def linear(p: Tree, x: jax.Array) -> jax.Array:
    y = jnp.dot(x, p["kernel"])
    return y + p["bias"][None, None] if "bias" in p else y


def attend(qkv: jax.Array, heads: int) -> jax.Array:
    """Causal attention of what `qkv` gives: (rows, time, 3 * width) to (rows, time, width)."""
    rows, time, width = qkv.shape
    q, k, v = (
        part.reshape(rows, time, heads, width // 3 // heads) for part in jnp.split(qkv, 3, axis=-1)
    )
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(rows, time, width // 3)


def run_block(p: Tree, x: jax.Array, heads: int) -> jax.Array:
    """One pre-norm block."""
    x = x + linear(p["out"], attend(linear(p["qkv"], layer_norm(p["norm1"], x)), heads))
    return x + linear(p["down"], jax.nn.gelu(linear(p["up"], layer_norm(p["norm2"], x))))


def embed(p: Tree, tokens: jax.Array) -> jax.Array:
    positions = jnp.arange(tokens.shape[1])
    return jnp.take(p["token"]["embedding"], tokens, axis=0) + jnp.take(
        p["position"]["embedding"], positions, axis=0
    )[None].astype(p["token"]["embedding"].dtype)


def logits_of(p: Tree, x: jax.Array) -> jax.Array:
    return linear(p["head"], layer_norm(p["norm"], x))


def token_losses(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Nats of each token (rows, time), of the logits for `tokens[:, :-1]`."""
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), tokens[:, 1:]
    )


TX = optax.adamw(3e-4)
