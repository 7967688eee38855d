"""The GPT of the suite in NNX, unrolled and scanned, and its training step through jfsdp."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from gpt_program import Program, make_tokens
from gpt_shape import TX, Shape, attend, token_losses
from jax.sharding import Mesh

import jfsdp

POLICY = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)


class Block(nnx.Module):
    """One pre-norm block."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs):
        d = shape.width
        self.heads = shape.heads
        self.norm1 = nnx.LayerNorm(d, rngs=rngs)
        self.qkv = nnx.Linear(d, 3 * d, rngs=rngs)
        self.out = nnx.Linear(d, d, rngs=rngs)
        self.norm2 = nnx.LayerNorm(d, rngs=rngs)
        self.up = nnx.Linear(d, 4 * d, rngs=rngs)
        self.down = nnx.Linear(4 * d, d, rngs=rngs)

    def __call__(self, x):
        x = x + self.out(attend(self.qkv(self.norm1(x)), self.heads))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """Tokens (rows, time) to logits (rows, time, vocabulary)."""

    def __init__(self, shape: Shape, scan: bool, remat: bool, dtype: Any, rngs: nnx.Rngs):
        self.scan, self.remat = scan, remat
        # Without a dtype nnx.Embed casts what it looks up to the dtype in which it was made, float32.
        self.token = nnx.Embed(shape.vocabulary, shape.width, dtype=dtype, rngs=rngs)
        self.position = nnx.Embed(shape.context, shape.width, dtype=dtype, rngs=rngs)
        self.norm = nnx.LayerNorm(shape.width, rngs=rngs)
        self.head = nnx.Linear(shape.width, shape.vocabulary, use_bias=False, rngs=rngs)
        if scan:

            @nnx.split_rngs(splits=shape.blocks)
            @nnx.vmap(in_axes=0, out_axes=0)
            def stack(rngs: nnx.Rngs) -> Block:
                return Block(shape, rngs)

            self.blocks = stack(rngs)
        else:
            self.blocks = nnx.List([Block(shape, rngs) for _ in range(shape.blocks)])

    def __call__(self, tokens):
        def run(block, x):
            return block(x)

        if self.remat:
            run = nnx.remat(run, prevent_cse=not self.scan)
        x = self.token(tokens) + self.position(jnp.arange(tokens.shape[1]))[None]
        if self.scan:
            x = nnx.scan(run, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)
        else:
            for block in self.blocks:
                x = run(block, x)
        return self.head(self.norm(x))


def loss_fn(model: GPT, tokens: jax.Array) -> jax.Array:
    """Nats per token."""
    return token_losses(model(tokens[:, :-1]), tokens).mean()


def shard(model: GPT, mesh: Mesh, **settings: Any) -> GPT:
    """Each block a unit, the rest another."""
    if not model.scan:
        return jfsdp.shard(model, mesh, units=Block, **settings)
    jfsdp.shard(model.blocks, mesh, stacked_axis=0, **settings)
    return jfsdp.shard(model, mesh, **settings)


def build(
    shape: Shape, mesh: Mesh, scan: bool = False, remat: bool = True, **settings: Any
) -> Program:
    """The step on the split model, as its state goes in and out of `jax.jit`."""
    settings = {"mp_policy": POLICY, **settings}
    dtype = settings["mp_policy"].param_dtype

    def make() -> GPT:
        return shard(GPT(shape, scan, remat, dtype, nnx.Rngs(0)), mesh, **settings)

    model = jfsdp.init(make)
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    graphdef, state = nnx.split((model, optimizer))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, tokens: jax.Array) -> Any:
        model, optimizer = nnx.merge(graphdef, state)
        loss, grads = nnx.value_and_grad(loss_fn)(model, tokens)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    return Program(step, state, make_tokens(shape, mesh), mesh)
