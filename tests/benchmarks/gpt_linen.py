"""The GPT of the suite in Linen, unrolled and scanned, and its training step through jfsdp."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.training.train_state import TrainState
from gpt_program import Program, make_tokens
from gpt_shape import TX, Shape, attend, token_losses
from jax.sharding import Mesh

import jfsdp

POLICY = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)


class Block(nn.Module):
    """One pre-norm block, which returns what nn.scan wants: the carry, and nothing to stack."""

    shape: Shape

    def setup(self):
        d = self.shape.width
        self.norm1, self.norm2 = nn.LayerNorm(), nn.LayerNorm()
        self.qkv, self.out = nn.Dense(3 * d), nn.Dense(d)
        self.up, self.down = nn.Dense(4 * d), nn.Dense(d)

    def __call__(self, x):
        x = x + self.out(attend(self.qkv(self.norm1(x)), self.shape.heads))
        return x + self.down(nn.gelu(self.up(self.norm2(x)))), None


class GPT(nn.Module):
    """Tokens (rows, time) to logits (rows, time, vocabulary)."""

    shape: Shape
    scan: bool
    remat: bool

    def setup(self):
        shape = self.shape
        block: Any = nn.remat(Block, prevent_cse=not self.scan) if self.remat else Block
        self.token = nn.Embed(shape.vocabulary, shape.width)
        self.position = nn.Embed(shape.context, shape.width)
        if self.scan:
            stack = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            self.blocks = nn.scan(block, length=shape.blocks, **stack)(shape)
        else:
            self.blocks = [block(shape) for _ in range(shape.blocks)]
        self.norm = nn.LayerNorm()
        self.head = nn.Dense(shape.vocabulary, use_bias=False)

    def __call__(self, tokens):
        x = self.token(tokens) + self.position(jnp.arange(tokens.shape[1]))[None]
        for block in [self.blocks] if self.scan else self.blocks:
            x, _ = block(x)
        return self.head(self.norm(x))


def build(
    shape: Shape, mesh: Mesh, scan: bool = False, remat: bool = True, **settings: Any
) -> Program:
    """The step of a train state."""
    settings = {"mp_policy": POLICY, "units": Block, **settings}
    model = jfsdp.shard(GPT(shape, scan, remat), mesh, **settings)

    def create() -> TrainState:
        tokens = jnp.zeros((1, shape.context), jnp.int32)
        params = model.init(jax.random.key(0), tokens)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=TX)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            logits: Any = state.apply_fn({"params": params}, tokens[:, :-1])
            return token_losses(logits, tokens).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return Program(step, jfsdp.init(create), make_tokens(shape, mesh), mesh)
