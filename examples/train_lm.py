"""Train a byte-level GPT on text, sharded by jfsdp.

    python examples/train_lm.py configs/tiny.toml
    python examples/train_lm.py configs/tiny.toml train.steps=20 model.layers=2

Where there is no accelerator, the CPU is split into as many devices as the mesh asks for.
"""

import csv
import math
import os
import platform
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import text
from config import Config, ConfigError, MeshConfig, TrainConfig, blame, read_config
from flax import nnx
from gpt import GPT, Block, generate
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import jfsdp

# What lies in host memory between steps, by the name that the configuration gives it.
OFFLOAD = {
    "none": jfsdp.OffloadPolicy(),
    "optimizer": jfsdp.CPUOffloadPolicy(parameters=False),
    "all": jfsdp.CPUOffloadPolicy(),
}


def simulate_devices(count: int) -> None:
    """Let JAX see the CPU as `count` devices. Accelerators, where there are any, go first."""
    flags, name = os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count"
    if name not in flags:  # read when JAX first looks for devices, not when it is imported
        os.environ["XLA_FLAGS"] = f"{flags} {name}={count}".strip()


def make_mesh(config: MeshConfig) -> Mesh:
    wanted, found = config.replica * config.fsdp, jax.devices()
    if wanted != len(found):
        raise ConfigError(
            f"[mesh] replica = {config.replica} x fsdp = {config.fsdp} needs {wanted} devices, JAX"
            f" has {len(found)} ({found[0].device_kind}); use replica = 1 and fsdp = {len(found)}"
        )
    # Auto: on an Explicit mesh optax's cross entropy does not trace (jax 0.12.0.1, optax 0.2.8).
    axis_types = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((config.replica, config.fsdp), ("replica", "fsdp"), axis_types)


def global_batches(data: np.ndarray, config: Config, mesh: Mesh) -> Iterator[jax.Array]:
    """Batches (batch_size, context + 1), their first dimension split over all devices."""
    sharding, size = NamedSharding(mesh, P(mesh.axis_names)), config.train.batch_size
    with blame("[data] path"):
        batches = text.batches(data, config.model.context, size, config.train.seed)
    return (jax.make_array_from_process_local_data(sharding, batch) for batch in batches)


def build_model(config: Config, mesh: Mesh) -> GPT:
    """The sharded model. No device ever holds the whole of it."""
    return jfsdp.init(
        lambda: GPT(config.model, rngs=nnx.Rngs(config.train.seed)),
        units=Block,
        mesh=mesh,
        dp_mesh_dims=jfsdp.DataParallelMeshDims(shard="fsdp", replicate="replica"),
        mp_policy=jfsdp.MixedPrecisionPolicy(
            param_dtype=jnp.dtype(config.policy.param_dtype),
            reduce_dtype=jnp.dtype(config.policy.reduce_dtype),
        ),
        offload_policy=OFFLOAD[config.policy.offload],
    )


def build_optimizer(model: GPT, config: TrainConfig) -> nnx.Optimizer:
    warmup = int(config.warmup * config.steps)
    rate = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, warmup, config.steps)
    clip = optax.clip_by_global_norm(config.clip_norm)
    adamw = optax.adamw(rate, b2=0.98, weight_decay=config.weight_decay)
    return nnx.Optimizer(model, optax.chain(clip, adamw), wrt=nnx.Param)


def loss_fn(model: GPT, windows: jax.Array, deterministic: bool = False) -> jax.Array:
    """Nats per byte: the mean over the global batch, in float32."""
    logits = model(windows[:, :-1], deterministic=deterministic).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def make_train_step(microbatches: int) -> Callable[..., jax.Array]:
    """The jitted step. With one microbatch, `nnx.value_and_grad` would do as well."""
    value_and_grad = jfsdp.value_and_grad(loss_fn, microbatches=microbatches)

    @jfsdp.jit  # the new parameters and optimizer state replace the old ones
    def train_step(model: GPT, optimizer: nnx.Optimizer, windows: jax.Array) -> jax.Array:
        loss, grads = value_and_grad(model, windows)
        optimizer.update(model, grads)
        return loss

    return train_step


@jfsdp.jit(donate=False)
def validation_step(model: GPT, windows: jax.Array) -> jax.Array:
    return loss_fn(model, windows, deterministic=True)


@dataclass
class History:
    """Losses in nats per byte, by step."""

    training: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)

    def smoothed(self, step: int) -> float:
        """The mean training loss of the last 20 steps: one batch alone is noisy."""
        return float(np.mean([self.training[i] for i in range(max(1, step - 19), step + 1)]))

    def final(self) -> dict[str, float]:
        step = max(self.training)
        return {"training": self.smoothed(step), "validation": self.validation[step]}

    def write(self, path: Path) -> None:
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["step", "training (nats/byte)", "validation (nats/byte)"])
            rows.writerows([i, x, self.validation.get(i, "")] for i, x in self.training.items())

    def plot(self, path: Path, title: str) -> None:
        steps = list(self.training)
        figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
        axes = figure.subplots()
        axes.plot(
            steps, list(self.training.values()), "C0", alpha=0.25, label="training, each batch"
        )
        full = steps[19:]  # from here on the mean has all its steps
        axes.plot(full, [self.smoothed(i) for i in full], "C0", label="training, mean of 20")
        axes.plot(*zip(*self.validation.items(), strict=True), "o-C1", label="validation")
        axes.set(xlabel="step", ylabel="loss (nats/byte)")
        axes.set_title(title, fontsize="medium")
        to_bits, to_nats = (lambda nats: nats / math.log(2)), (lambda bits: bits * math.log(2))
        axes.secondary_yaxis("right", (to_bits, to_nats)).set_ylabel("loss (bits/byte)")
        axes.set_ylim(top=2 * max(self.final().values()))  # leaves the first steps' fall out
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(path)


def make_progress(console: Console) -> Progress:
    """A bar where a person watches. Elsewhere it is off, and `train` prints more lines."""
    status, left = TextColumn("{task.description}  ETA"), TimeRemainingColumn()
    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=10), status, left)
    return Progress(*columns, console=console, disable=not console.is_terminal)


def train(
    train_step: Callable[..., jax.Array],
    model: GPT,
    optimizer: nnx.Optimizer,
    batches: Iterator[jax.Array],
    held_out: list[jax.Array],
    settings: TrainConfig,
) -> History:
    history, seconds, speed, validation = History(), 0.0, math.nan, ""
    with make_progress(Console(highlight=False)) as progress:
        task = progress.add_task("compiling", total=settings.steps)
        for step in range(1, settings.steps + 1):
            start, windows = time.perf_counter(), next(batches)
            history.training[step] = float(train_step(model, optimizer, windows))
            if step > 1:  # the first step compiles
                seconds += time.perf_counter() - start
                speed = (step - 1) * windows[:, 1:].size / seconds
            validates = step % settings.validate_every == 0 or step == settings.steps
            if validates:
                losses = [float(validation_step(model, batch)) for batch in held_out]
                history.validation[step] = float(np.mean(losses))
                validation = f"  val {history.validation[step]:.3f}"
            status = f"loss {history.smoothed(step):.3f}{validation}  {speed:,.0f} tokens/s"
            progress.update(task, completed=step, description=status)
            if validates or (progress.disable and step % settings.log_every == 0):
                left = (settings.steps - step) * seconds / max(1, step - 1)
                progress.console.print(f"step {step:>5}  {status}  ETA {left:.0f} s")
    return history


def describe(config: Config, mesh: Mesh, data: text.Text, model: GPT) -> dict[str, str]:
    device, shape, policy = mesh.devices.flat[0], config.model, config.policy
    simulated = ", simulated" if device.platform == "cpu" and mesh.size > 1 else ""
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "flax", "optax", "jfsdp"))
    size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    return {
        "devices": f"{mesh.size} x {device.device_kind}{simulated}",
        "mesh": ", ".join(f"{axis} {length}" for axis, length in mesh.shape.items()),
        "versions": f"Python {platform.python_version()}, {packages}",
        "data": f"{data.name}: {data.train.size / 1e6:.1f} MB for training, "
        f"{data.validation.size / 1e6:.1f} MB for validation",
        "model": f"GPT, {size / 1e6:.2f} M parameters, {shape.layers} blocks, "
        f"width {shape.width}, context {shape.context} bytes",
        "policy": f"compute in {policy.param_dtype}, reduction in {policy.reduce_dtype}"
        + ("" if policy.offload == "none" else f", in host memory: {policy.offload}"),
    }


def sample(model: GPT, settings: TrainConfig, batch: int) -> str:
    prompt, count = settings.prompt.encode(), settings.sample_bytes
    rules = {"temperature": settings.temperature, "seed": settings.seed}
    sampled = generate(model, prompt, count, batch=batch, **rules).decode(errors="replace")
    # Printed as it came, a control character could do anything to the terminal.
    return "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in sampled
    )


def run(config: Config) -> None:
    settings, output, mesh = config.train, Path(config.train.output), make_mesh(config.mesh)
    with blame("[data] path"):
        data = text.load(config.data)
    with blame("[train] output"):
        output.mkdir(parents=True, exist_ok=True)
    batches = global_batches(data.train, config, mesh)
    validation = global_batches(data.validation, config, mesh)
    held_out = list(islice(validation, settings.validation_batches))

    model = build_model(config, mesh)
    optimizer = build_optimizer(model, settings)
    facts = describe(config, mesh, data, model)
    print(*(f"{name:<10}{fact}" for name, fact in facts.items()), sep="\n")
    print("", jfsdp.plan(model), sep="\n")
    train_step = make_train_step(settings.microbatches)
    print("", jfsdp.inspect(train_step, model, optimizer, held_out[0]), "", sep="\n")

    history = train(train_step, model, optimizer, batches, held_out, settings)
    history.write(output / "loss.csv")
    history.plot(output / "loss.png", f"{facts['model']}\nmesh {facts['mesh']}; {facts['policy']}")
    print()
    for name, nats in history.final().items():
        print(f"{name:<12}{nats:.3f} nats/byte = {nats / math.log(2):.3f} bits/byte")
    print("", f"sample, temperature {settings.temperature}:", sep="\n")
    print("", sample(model, settings, mesh.size), "", sep="\n")
    print(f"wrote {output / 'loss.png'} and {output / 'loss.csv'}")


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(description="Train a byte-level GPT on text, sharded by jfsdp.")
    parser.add_argument("config", help="a TOML file, such as configs/tiny.toml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options, dashed = parser.parse_known_args(arguments)
    try:
        config = read_config(options.config, options.overrides + dashed)
        simulate_devices(config.mesh.replica * config.mesh.fsdp)
        started = time.perf_counter()
        run(config)
        print(f"took {time.perf_counter() - started:.0f} s")
    except ConfigError as error:
        print(f"error: {options.config}:", *str(error).split(), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
