"""Data-parallel training with jax.pmap: every device holds the whole state.

pmap_after.py is this script with the state sharded by jfsdp; `diff` the two.
"""

import functools
import itertools
import os
from typing import Any

import jax
import jax.numpy as jnp
import optax
from digits import data
from flax import jax_utils
from flax import linen as nn
from flax.training.train_state import TrainState

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
DEVICES = jax.device_count()
BATCH_SIZE, STEPS = 128, 60


class MLP(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = images.reshape(len(images), -1)
        for _ in range(2):
            x = nn.relu(nn.Dense(512)(x))
        return nn.Dense(10)(x)


def create_state(model: nn.Module, key: jax.Array) -> TrainState:
    params = model.init(key, jnp.zeros((1, 8, 8, 1)))["params"]
    tx = optax.sgd(0.05, momentum=0.9)
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def loss_fn(params: Any, apply_fn: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    logits = apply_fn({"params": params}, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@functools.partial(jax.pmap, axis_name="batch", donate_argnums=0)
def train_step(state: TrainState, images: jax.Array, labels: jax.Array) -> Any:
    loss, grads = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, images, labels)
    grads = jax.lax.pmean(grads, "batch")
    return state.apply_gradients(grads=grads), jax.lax.pmean(loss, "batch")


def bytes_per_device(state: TrainState) -> int:
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))


def main() -> list[float]:
    model, key, losses = MLP(), jax.random.key(0), []
    state = jax_utils.replicate(create_state(model, key))
    training, _ = data.load()
    for batch in itertools.islice(data.batches(training, BATCH_SIZE, seed=0), STEPS):
        per_device = [x.reshape(DEVICES, -1, *x.shape[1:]) for x in batch]
        state, loss = train_step(state, *per_device)
        losses.append(float(loss[0]))
    print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {STEPS} steps")
    print(f"state: {bytes_per_device(state) / 1024:,.0f} KiB on each of {DEVICES} devices")
    return losses


if __name__ == "__main__":
    main()
