"""What the transformers here share: attention, the pre-norm block, and stacks of layers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, block: int = 512
) -> jax.Array:
    """softmax(q k^T / sqrt(dim)) v, one block of queries after the other.

    q is (batch, time, heads, dim); k and v may have fewer heads, which groups of query heads then
    share. The scores (batch, heads, block, time) of one block are alive at a time, and none is kept
    for the backward, which computes them again (Rabe and Staats, arXiv:2112.05682). The softmax is
    in float32, the matrix products take the dtype of q.
    """
    batch, time, heads, dim = q.shape

    @jax.checkpoint
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, start: jax.Array | int) -> jax.Array:
        mask = None
        if causal:
            position = start + jnp.arange(q.shape[1])
            mask = (position[:, None] >= jnp.arange(time)[None, :])[None, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask)

    if time <= block:
        return attend(q, k, v, 0)
    count = -(-time // block)
    # The last block is filled up with queries that are dropped again.
    filled = jnp.pad(q, ((0, 0), (0, count * block - time), (0, 0), (0, 0)))
    blocks = filled.reshape(batch, count, block, heads, dim).swapaxes(0, 1)
    starts = block * jnp.arange(count)
    mixed = jax.lax.map(lambda each: attend(each[0], k, v, each[1]), (blocks, starts))
    return mixed.swapaxes(0, 1).reshape(batch, count * block, heads, dim)[:, :time]


class Attention(nnx.Module):
    """Multi-head self-attention with one matrix for queries, keys and values."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool,
        init: nnx.Initializer,
        out_init: nnx.Initializer,
        rngs: nnx.Rngs,
    ) -> None:
        self.heads, self.causal = heads, causal
        self.qkv = nnx.Linear(width, 3 * width, kernel_init=init, rngs=rngs)
        self.out = nnx.Linear(width, width, kernel_init=out_init, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, time, width = x.shape
        q, k, v = jnp.split(self.qkv(x).reshape(batch, time, 3 * self.heads, -1), 3, axis=2)
        return self.out(attention(q, k, v, causal=self.causal).reshape(batch, time, width))


class MLP(nnx.Module):
    """Four times the width, and GELU (its tanh form)."""

    def __init__(
        self, width: int, *, init: nnx.Initializer, out_init: nnx.Initializer, rngs: nnx.Rngs
    ) -> None:
        self.up = nnx.Linear(width, 4 * width, kernel_init=init, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, kernel_init=out_init, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x)))


class Block(nnx.Module):
    """The pre-norm block of GPT-2 and ViT: x + attention(norm(x)), then x + mlp(norm(x)).

    `init` makes the kernels; `out_init` those of the two layers that write to the residual stream.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool,
        epsilon: float,
        init: nnx.Initializer,
        out_init: nnx.Initializer,
        rngs: nnx.Rngs,
    ) -> None:
        self.norm1 = nnx.LayerNorm(width, epsilon=epsilon, rngs=rngs)
        self.attention = Attention(
            width, heads, causal=causal, init=init, out_init=out_init, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(width, epsilon=epsilon, rngs=rngs)
        self.mlp = MLP(width, init=init, out_init=out_init, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Embed(nnx.Embed):
    """Computes in the dtype of its table, as Flax's other layers do in that of their kernels.

    Flax's own keeps to the dtype that the table had when it was made.
    """

    def __init__(self, count: int, width: int, *, init: nnx.Initializer, rngs: nnx.Rngs) -> None:
        super().__init__(count, width, embedding_init=init, rngs=rngs)
        self.dtype = None


def stack_layers(
    make: Callable[[nnx.Rngs], nnx.Module], depth: int, *, rngs: nnx.Rngs
) -> nnx.Module:
    """`depth` layers as one module, whose parameters have the layers as their dimension 0."""

    @nnx.split_rngs(splits=depth)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(rngs: nnx.Rngs) -> nnx.Module:
        return make(rngs)

    return stack(rngs)


def call_layer(layer: nnx.Module, x: jax.Array) -> jax.Array:
    return layer(x)


def scan_layers(stack: nnx.Module, x: jax.Array, *, remat: bool) -> jax.Array:
    """Call the layers of a stack in turn; `remat` keeps only their inputs for the backward."""
    # Nothing of the forward's loop can be merged with the backward's: no barriers are needed.
    call = nnx.remat(call_layer, prevent_cse=False) if remat else call_layer
    return nnx.scan(call, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(stack, x)


def call_layers(layers: nnx.List, x: jax.Array, *, remat: bool) -> jax.Array:
    """The same for layers in a list."""
    call = nnx.remat(call_layer) if remat else call_layer
    for layer in layers:
        x = call(layer, x)
    return x
