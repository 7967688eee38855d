"""Train a small ResNet or ViT of Flax Linen on scikit-learn's digits, sharded by jfsdp or not.

    python examples/train_digits.py resnet
    python examples/train_digits.py vit --unsharded

The models, in examples/digits, are plain Linen with BatchNorm and dropout; the state is Flax's
TrainState, the step an ordinary jax.jit. What jfsdp adds stands in `prepare`. Where there is no
accelerator, the CPU is split into 8 devices.
"""

import functools
import itertools
import os
import platform
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import data
from digits.resnet import ResidualBlock, ResNet
from digits.vit import EncoderBlock, ViT
from flax import linen as nn
from flax.training import train_state
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import jfsdp

MODELS = {"resnet": (ResNet(), ResidualBlock), "vit": (ViT(), EncoderBlock)}
BATCH_SIZE, LEARNING_RATE, WEIGHT_DECAY = 128, 3e-3, 1e-2
TEST_EVERY = 50  # steps


def simulate_devices(count: int) -> None:
    """Let JAX see the CPU as `count` devices. Accelerators, where there are any, go first."""
    flags, name = os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count"
    if name not in flags:  # read when JAX first looks for devices, not when it is imported
        os.environ["XLA_FLAGS"] = f"{flags} {name}={count}".strip()


class TrainState(train_state.TrainState):
    batch_stats: Any  # the running averages of BatchNorm; empty for the ViT
    key: jax.Array  # of dropout


def create_state(model: nn.Module, images: np.ndarray, steps: int, seed: int) -> TrainState:
    params_key, dropout_key = jax.random.split(jax.random.key(seed))
    variables = model.init(params_key, images, train=False)
    rate = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, steps // 10, steps)
    return TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables.get("batch_stats", {}),
        key=dropout_key,
        tx=optax.adamw(rate, weight_decay=WEIGHT_DECAY),
    )


@functools.partial(jax.jit, donate_argnums=0)  # the new state takes the place of the old one
def train_step(state: TrainState, images: Any, labels: Any) -> tuple[TrainState, jax.Array]:
    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        rngs = {"dropout": jax.random.fold_in(state.key, state.step)}
        logits, updates = state.apply_fn(
            variables, images, train=True, rngs=rngs, mutable=["batch_stats"]
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), updates

    (loss, updates), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, **updates), loss


@jax.jit
def accuracy(state: TrainState, images: Any, labels: Any) -> jax.Array:
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, images, train=False)
    return jnp.mean(logits.argmax(axis=-1) == labels)


def prepare(
    name: str, *, sharded: bool, steps: int, seed: int
) -> tuple[nn.Module, TrainState, Iterator[Any], Any]:
    """The model, its state, the batches to train on and the one to test with."""
    (model, unit), (training, test) = MODELS[name], data.load()
    batches = data.batches(training, BATCH_SIZE, seed)

    def create() -> TrainState:
        return create_state(model, training[0][:1], steps, seed)

    if not sharded:
        return model, jax.jit(create)(), batches, test
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
    model = jfsdp.shard(model, mesh, units=unit)
    state = jfsdp.init(create)  # born sharded: no device ever holds the whole of it
    on_mesh = functools.partial(jfsdp.shard_batch, mesh=mesh)
    return model, state, map(on_mesh, batches), on_mesh(test)


def train(state: TrainState, batches: Iterator[Any], test: Any, steps: int) -> float:
    """The accuracy on the test images. Prints lines, and a bar where a person watches."""
    console, started, correct = Console(highlight=False), time.perf_counter(), 0.0
    status = TextColumn("{task.description}")
    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=20), status)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("compiling", total=steps)
        for step in range(1, steps + 1):
            state, loss = train_step(state, *next(batches))
            progress.update(task, completed=step, description=f"loss {loss:.4f}")
            if step % TEST_EVERY == 0 or step == steps:
                correct, seconds = float(accuracy(state, *test)), time.perf_counter() - started
                progress.console.print(
                    f"step {step:>4}  loss {loss:.4f}  test accuracy {correct:.1%}  {seconds:.0f} s"
                )
    return correct


def describe(model: nn.Module, state: TrainState, sharded: bool) -> dict[str, str]:
    device, count = jax.devices()[0], jax.device_count() if sharded else 1
    simulated = ", simulated" if device.platform == "cpu" and count > 1 else ""
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "flax", "optax", "jfsdp"))
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    arrays = jax.tree.leaves(state)
    whole = sum(array.nbytes for array in arrays) / 1024
    part = sum(array.addressable_shards[0].data.nbytes for array in arrays) / 1024
    return {
        "devices": f"{count} x {device.device_kind}{simulated}",
        "versions": f"Python {platform.python_version()}, {packages}",
        "data": f"digits, {data.TRAINING_IMAGES:,} to train on, {data.TEST_IMAGES} to test with",
        "model": f"{type(model).__name__}, {size:,} parameters",
        "state": f"{whole:,.0f} KiB, {part:,.0f} KiB on each device",
    }


def main(arguments: list[str] | None = None) -> float:
    parser = ArgumentParser(description="Train a small Linen model on digits, sharded by jfsdp.")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--unsharded", action="store_true", help="on one device, without jfsdp")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    name, sharded, steps = options.model, not options.unsharded, options.steps
    simulate_devices(8 if sharded else 1)

    started = time.perf_counter()
    model, state, batches, test = prepare(name, sharded=sharded, steps=steps, seed=options.seed)
    for fact, value in describe(model, state, sharded).items():
        print(f"{fact:<10}{value}")
    if sharded:
        first = next(batches)
        batches = itertools.chain([first], batches)
        print("", jfsdp.plan(model), sep="\n")
        print("", jfsdp.inspect(train_step, state, *first), sep="\n")
    print()
    correct = train(state, batches, test, steps)
    wrong = f"{round((1 - correct) * data.TEST_IMAGES)} of {data.TEST_IMAGES} wrong"
    seconds = time.perf_counter() - started
    print(
        f"\n{type(model).__name__}: {correct:.1%} of the test images right, {wrong}, {seconds:.0f} s"
    )
    return correct


if __name__ == "__main__":
    main()
