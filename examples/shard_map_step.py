"""A training step in the user's own jax.shard_map, with the state sharded by jfsdp.

Nothing here needs a shard_map: examples/train_digits.py has the same training in an ordinary jit. It is
for steps that place further collectives by hand.
"""

import functools
import itertools
import os
from typing import Any

import jax
import jax.numpy as jnp
import optax
from digits import data
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

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


def create_state(model: nn.Module) -> TrainState:
    params = model.init(jax.random.key(0), jnp.zeros((8, 8, 8, 1)))["params"]
    tx = optax.sgd(0.05, momentum=0.9)
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train_step(state: TrainState, images: jax.Array, labels: jax.Array) -> Any:
    """A step on all images, or on those of one device: its share of the loss and of the gradients."""

    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        # Over the global batch, on every device: so the shares of all devices add up to the mean.
        return losses.sum() / BATCH_SIZE

    # jfsdp reduces the gradients in the backward: each device gets its shards of their sum.
    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def per_device_step(state: TrainState, images: jax.Array, labels: jax.Array) -> Any:
    state, share = train_step(state, images, labels)
    return state, jax.lax.psum(share, "batch")


def bytes_per_device(state: TrainState) -> int:
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))


def main() -> list[float]:
    mesh = jax.make_mesh((DEVICES,), ("batch",), axis_types=(AxisType.Auto,))
    model = jfsdp.shard(MLP(), mesh)
    state = jfsdp.init(lambda: create_state(model))  # global arrays, born sharded
    specs = jax.tree.map(lambda sharding: sharding.spec, jfsdp.shardings(state))
    in_specs, out_specs = (specs, P("batch"), P("batch")), (specs, P())
    step = jax.shard_map(per_device_step, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    step, unsharded_step = jax.jit(step, donate_argnums=0), jax.jit(train_step)

    whole, losses, differences = jax.jit(functools.partial(create_state, MLP()))(), [], []
    training, _ = data.load()
    for batch in itertools.islice(data.batches(training, BATCH_SIZE, seed=0), STEPS):
        state, loss = step(state, *batch)
        whole, expected = unsharded_step(whole, *batch)
        losses.append(float(loss))
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
