"""What ZeRO-1, ZeRO-2 and ZeRO-3 communicate and keep, each by one setting of jfsdp.

    python tests/benchmarks/zero_stages.py [v5e:2x4 h100:8 cpu]

A stack of MLP blocks, Adam, 8 devices on one axis, float32 parameters that are gathered in bfloat16 and whose
gradients are reduced in float32. The step is compiled for devices that need not be there, not run. Each
figure stands beside its formula; sizes are of one device, collectives are bytes that it receives in a step.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jfsdp
from jfsdp.inspect import Report

DEVICES = 8
MIB = 2**20
POLICY = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Depth and widths of the stack, and the rows of the global batch."""

    depth: int = 8
    width: int = 1024
    hidden: int = 4096
    rows: int = 2048

    @property
    def parameters(self) -> int:
        return self.depth * 2 * self.width * self.hidden

    def batch(self, mesh: Any) -> jax.ShapeDtypeStruct:
        lying = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        return jax.ShapeDtypeStruct((self.rows, self.width), jnp.float32, sharding=lying)


class Block(nnx.Module):
    """x + down(gelu(up(x)))."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs):
        self.up = nnx.Linear(shape.width, shape.hidden, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(shape.hidden, shape.width, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class Stack(nnx.Module):
    """A stack of blocks."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(shape, rngs) for _ in range(shape.depth)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


# --------------------------------------------------------------------------------------------------
# The stages

SETTINGS: dict[int, dict[str, Any]] = {
    1: {"dp_mesh_dims": jfsdp.DataParallelMeshDims(replicate="data")},
    2: {"reshard_after_forward": False},
    3: {"reshard_after_forward": True},
}


def make_mesh(devices: Any = None) -> jax.sharding.Mesh:
    """One axis "data" over 8 devices, those of a topology too."""
    return jax.make_mesh((DEVICES,), ("data",), (AxisType.Auto,), devices=devices)


def build(
    stage: int,
    mesh: Any,
    shape: Shape = Shape(),
    tx: Any = None,
    policy: jfsdp.MixedPrecisionPolicy = POLICY,
) -> tuple[Stack, nnx.Optimizer]:
    """The model and its optimizer, as a user writes them; abstract on devices that are not here."""
    model = jfsdp.init(
        lambda: Stack(shape, nnx.Rngs(0)), mesh, units=Block, mp_policy=policy, **SETTINGS[stage]
    )
    tx = optax.adam(1e-3) if tx is None else tx
    optimizer = jfsdp.init_optimizer(tx, model, shard_over="data" if stage == 1 else None)
    return model, optimizer


def mean_square(model: Stack, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x).astype(jnp.float32) ** 2)


@nnx.jit(donate_argnums=(0, 1))
def train_step(model: Stack, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    """One step of training, the same for every stage."""
    loss, grads = nnx.value_and_grad(mean_square)(model, x)
    optimizer.update(model, grads)
    return loss


# --------------------------------------------------------------------------------------------------
# What it costs

KINDS = ("all-gather", "reduce-scatter", "all-reduce")


def least_communication(stage: int, parameters: int) -> dict[str, float]:
    """The least bytes of each kind that a device receives in a step.

    ZeRO-1 is written as an all-reduce of the gradients, and XLA gathers the updated parameters. Its compilers
    for TPUs and GPUs make the former a reduce-scatter, because each device updates its own part only; the one
    for CPUs does not, and receives twice as much.
    """
    share = parameters * (DEVICES - 1) / DEVICES
    gathered = {1: 4, 2: 2, 3: 2 + 2}[stage]  # float32 once; bfloat16 once, or twice
    return {"all-gather": gathered * share, "reduce-scatter": 4 * share, "all-reduce": 0}


def least_memory(stage: int, parameters: int) -> dict[str, float]:
    """The least bytes of a device at rest: parameters, and Adam's two moments."""
    kept = 1 if stage == 1 else 1 / DEVICES
    return {"parameters": 4 * parameters * kept, "optimizer": 8 * parameters / DEVICES}


def measure(stage: int, devices: Any, shape: Shape = Shape(), *, compile: bool = True) -> Report:
    """What jfsdp reads off the step of this stage."""
    mesh = make_mesh(devices)
    model, optimizer = build(stage, mesh, shape)
    return jfsdp.inspect(train_step, model, optimizer, shape.batch(mesh), compile=compile)


def received(report: Report, kind: str) -> float:
    """Bytes of one kind that a device receives in a step."""
    return sum(record.total_bytes for record in report.collectives if record.kind == kind)


def row(stage: int, target: str, report: Report, parameters: int) -> list[str]:
    """One line of the table. Compilers for CPUs widen bfloat16: there the program as written is read."""
    memory = report.memory
    assert memory is not None
    written = report.lowered if target == "cpu" else report
    assert written is not None
    least = least_communication(stage, parameters) if target != "cpu" else {}
    rest = least_memory(stage, parameters)
    moved = [(received(written, kind), least.get(kind)) for kind in KINDS]
    kept = [(getattr(memory, name), rest[name]) for name in ("parameters", "optimizer")]
    sizes = [*moved, *kept, (memory.temporaries, None), (memory.peak, None)]
    return [target, f"ZeRO-{stage}", *(_cell(size, of) for size, of in sizes)]


def _cell(size: float, least: float | None) -> str:
    if round(size / MIB, 1) == 0:
        return ""
    return f"{size / MIB:.1f}" if not least else f"{size / MIB:.1f} ({size / least:.3f})"


def main() -> None:
    """Prints the table; the ratio to the least bytes in parentheses."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("targets", nargs="*", default=["v5e:2x4", "h100:8", "cpu"])
    shape = Shape()
    print(
        f"jax {jax.__version__}; {shape.depth} blocks of {shape.width}x{shape.hidden}, {shape.parameters:,} "
        f"parameters, {shape.rows} rows; MiB per device (ratio to the least)"
    )
    names = ["target", "stage", *KINDS, "parameters", "optimizer", "temporaries", "peak"]
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for target in parser.parse_args().targets:
        devices = None if target == "cpu" else jfsdp.topology(target)
        for stage in SETTINGS:
            cells = row(stage, target, measure(stage, devices, shape), shape.parameters)
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
