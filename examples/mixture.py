"""A small mixture of experts in plain Flax NNX: a router, experts, and tokens sent to them and back.

Fedus et al., Switch Transformers (2021); Lepikhin et al., GShard (2020).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from gpt import Attention, GPTConfig


@dataclass(frozen=True)
class MoEConfig(GPTConfig):
    vocabulary: int = 64
    experts: int = 8
    hidden: int = 128  # of one expert
    top_k: int = 2  # experts of a token
    capacity: float = (
        1.5  # places of an expert, over what it would need if all had equally much to do
    )
    axis: str = "expert"  # the mesh axis that the experts are split over


class Experts(nnx.Module):
    """All experts as two arrays, dimension 0 being the expert; on `axis` of a mesh, if it has that."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs) -> None:
        count, width, hidden = config.experts, config.width, config.hidden
        init = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", batch_axis=0)
        # It is laid by whoever shards the model; unsharded it means nothing.
        lies = {"out_sharding": (config.axis, None, None), "eager_sharding": False}
        self.up = nnx.Param(init(rngs.params(), (count, width, hidden)), **lies)
        self.down = nnx.Param(init(rngs.params(), (count, hidden, width)), **lies)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x (experts, places, width): each expert's own tokens."""
        hidden = nnx.gelu(jnp.einsum("epd,edh->eph", x, self.up[...]))
        return jnp.einsum("eph,ehd->epd", hidden, self.down[...])


class MoE(nnx.Module):
    """Every token goes to its `top_k` experts; what finds no place in one is left out there."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.router = nnx.Linear(config.width, config.experts, use_bias=False, rngs=rngs)
        self.experts = Experts(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x (batch, time, width) to the same shape, and (2, experts): of each expert the share of tokens
        that chose it, and its mean probability."""
        tokens = x.reshape(-1, x.shape[-1])
        count, top_k = self.config.experts, self.config.top_k
        probabilities = jax.nn.softmax(self.router(tokens).astype(jnp.float32))
        gates, chosen = jax.lax.top_k(probabilities, top_k)
        gates /= gates.sum(-1, keepdims=True)
        choices = jax.nn.one_hot(chosen, count, dtype=int)  # (tokens, top_k, experts)
        places = -int(-self.config.capacity * top_k * len(tokens) // count)
        # First choices take their places before second ones.
        in_order = choices.swapaxes(0, 1).reshape(-1, count)
        before = (jnp.cumsum(in_order, 0) - in_order).reshape(top_k, -1, count).swapaxes(0, 1)
        place = jax.nn.one_hot(
            (before * choices).sum(-1), places
        )  # of those behind the last: zeros
        sent = jnp.einsum("tke,tkp->tep", choices, place)
        weighted = jnp.einsum("tk,tke,tkp->tep", gates, choices, place)
        received = self._through_experts(jnp.einsum("tep,td->epd", sent.astype(x.dtype), tokens))
        y = jnp.einsum("tep,epd->td", weighted.astype(x.dtype), received)
        return y.reshape(x.shape), jnp.stack([choices.mean((0, 1)), probabilities.mean(0)])

    def _through_experts(self, x: jax.Array) -> jax.Array:
        """x (experts, places, width): sent to the devices that hold the experts, and back."""
        if self.experts.up.shape[0] == self.config.experts:  # all are here
            return self.experts(x)
        axis = self.config.axis
        x = jax.lax.all_to_all(x, axis, split_axis=0, concat_axis=1, tiled=True)
        x = self.experts(x)
        return jax.lax.all_to_all(x, axis, split_axis=1, concat_axis=0, tiled=True)


class Block(nnx.Module):
    """The pre-norm transformer block, with a mixture of experts as its MLP."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.RMSNorm(config.width, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.norm2 = nnx.RMSNorm(config.width, rngs=rngs)
        self.moe = MoE(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x + self.attention(self.norm1(x))
        y, balance = self.moe(self.norm2(x))
        return x + y, balance


class MoETransformer(nnx.Module):
    """Maps tokens (batch, time) to logits (batch, time, vocabulary), and what `balance_loss` takes."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(config.vocabulary, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.head = nnx.Linear(config.width, config.vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, balances = self.embed(tokens), []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        return self.head(self.norm(x)), jnp.stack(balances)


def balance_loss(balance: jax.Array) -> jax.Array:
    """1 where all experts of all layers have equally much to do, more elsewhere (Switch, eq. 4).

    It is a product of two means over the global batch, so it is taken of these, (layers, 2, experts),
    outside of the model: the mean of the devices' products would be something else.
    """
    chosen, probability = balance[:, 0], balance[:, 1]
    return chosen.shape[-1] * (chosen * probability).sum(-1).mean()
