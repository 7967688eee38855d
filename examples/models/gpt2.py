"""GPT-2 in Flax NNX.

Radford, Wu, Child, Luan, Amodei, Sutskever: Language Models are Unsupervised Multitask Learners,
2019. The smallest of its four models: table 2, which the authors later corrected to 124 million
parameters (https://github.com/openai/gpt-2). Without dropout.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from losses import next_token_loss
from transformer import Block, Embed, call_layers, scan_layers, stack_layers

__all__ = ["GPT2", "GPT2Config", "gpt2_124m", "gpt3_6_7b", "next_token_loss"]


@dataclass(frozen=True)
class GPT2Config:
    vocabulary: int = 50257
    width: int = 768
    layers: int = 12
    heads: int = 12
    context: int = 1024  # the longest sequence, in tokens
    scan: bool = False  # one stack of blocks, compiled once, in place of a list
    remat: bool = False  # keep only each block's input for the backward


class GPT2(nnx.Module):
    """Maps tokens (batch, time) to the logits (batch, time, vocabulary) of each next token."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs) -> None:
        width, layers, init = config.width, config.layers, nnx.initializers.normal(0.02)
        out_init = nnx.initializers.normal(0.02 / (2 * layers) ** 0.5)  # section 2.3

        def block(rngs: nnx.Rngs) -> Block:
            kernels = {"init": init, "out_init": out_init}
            return Block(width, config.heads, causal=True, epsilon=1e-5, **kernels, rngs=rngs)

        self.config = config
        self.token = Embed(config.vocabulary, width, init=init, rngs=rngs)
        self.position = Embed(config.context, width, init=init, rngs=rngs)
        self.blocks = (
            stack_layers(block, layers, rngs=rngs)
            if config.scan
            else nnx.List([block(rngs) for _ in range(layers)])
        )
        self.norm = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.token(tokens) + self.position(jnp.arange(tokens.shape[1])[None])
        run = scan_layers if self.config.scan else call_layers
        x = run(self.blocks, x, remat=self.config.remat)
        return self.token.attend(self.norm(x))  # the head is the embedding


def gpt2_124m(*, rngs: nnx.Rngs, scan: bool = False, remat: bool = False) -> GPT2:
    """124,439,808 parameters."""
    return GPT2(GPT2Config(scan=scan, remat=remat), rngs=rngs)


def gpt3_6_7b(*, rngs: nnx.Rngs, scan: bool = False, remat: bool = True) -> GPT2:
    """The 6.7B of Brown et al., Language Models are Few-Shot Learners, 2020 (table 2.1), all attention dense.

    With a vocabulary of 50257 rounded up to a multiple of 128: over 4 chips XLA for TPUs would all-reduce the
    gradient of the embedding (v5e:2x2, jax 0.12.0.1).
    """
    sizes = {"vocabulary": 50304, "width": 4096, "layers": 32, "heads": 32, "context": 2048}
    return GPT2(GPT2Config(**sizes, scan=scan, remat=remat), rngs=rngs)
