"""The two losses of the models here, in float32 whatever the model computes in."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx


def next_token_loss(model: nnx.Module, tokens: jax.Array) -> jax.Array:
    """Nats per token: the mean cross entropy of tokens (batch, time + 1) but each first one."""
    return mean_cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


def classification_loss(model: nnx.Module, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Nats per image: the mean cross entropy of labels (batch,)."""
    return mean_cross_entropy(model(images), labels)


def mean_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
