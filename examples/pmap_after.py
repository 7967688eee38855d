"""The training of pmap_before.py with the state sharded by jfsdp: every device holds 1/8 of it.

Three changes, marked 1 to 3. The rest is the comparison with the same training unsharded.
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

import jfsdp

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
    # 3. No pmean: the gradients come out reduced, each device's shards of their sum over all devices.
    # Each device differentiated the mean over its own images, so the gradient of the mean over all
    # images is that sum divided by the number of devices. They are shards: what the optimizer takes
    # over several elements, such as a global norm, needs a psum over the axis.
    grads = jax.tree.map(lambda grad: grad / DEVICES, grads)
    return state.apply_gradients(grads=grads), jax.lax.pmean(loss, "batch")


@jax.jit
def unsharded_step(state: TrainState, images: jax.Array, labels: jax.Array) -> Any:
    loss, grads = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, images, labels)
    return state.apply_gradients(grads=grads), loss


def bytes_per_device(state: TrainState) -> int:
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))


def main() -> list[float]:
    # 1. Over a mesh whose axis has the name that the pmap gives. Called inside the pmap, the model
    # gathers its weights from all devices' shards, and drops them after use.
    model = jfsdp.shard(MLP(), jax.make_mesh((DEVICES,), ("batch",)))
    key, losses, differences = jax.random.key(0), [], []
    # 2. Made inside a pmap too: by the same key, so that all devices keep shards of the same values.
    create = jax.pmap(functools.partial(create_state, model), axis_name="batch")
    state, whole = create(jax_utils.replicate(key)), create_state(MLP(), key)
    training, _ = data.load()
    for batch in itertools.islice(data.batches(training, BATCH_SIZE, seed=0), STEPS):
        per_device = [x.reshape(DEVICES, -1, *x.shape[1:]) for x in batch]
        state, loss = train_step(state, *per_device)
        whole, expected = unsharded_step(whole, *batch)
        losses.append(float(loss[0]))
        differences.append(abs(losses[-1] - float(expected)))
    print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {STEPS} steps")
    print(f"unsharded the same: the losses differ by at most {max(differences):.0e}")
    part, of = bytes_per_device(state) / 1024, bytes_per_device(whole) / 1024
    print(
        f"state: {part:,.0f} KiB on each of {DEVICES} devices, 1/{of / part:.1f} of {of:,.0f} KiB"
    )
    return losses


if __name__ == "__main__":
    main()
