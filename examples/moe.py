"""Train a small mixture of experts: its dense parameters over all devices, its experts over some.

    python examples/moe.py

The mesh is 4 x 2. Both axes split the batch. Dense parameters are sharded over both. Each half of the
devices along "expert" holds half of the experts, which only the devices along "fsdp" share: their weights
are gathered, and their gradients reduced, over "fsdp" alone, while tokens travel along "expert". The model,
in examples/mixture.py, is plain NNX; what jfsdp is told stands in `sharded`.
"""

import os
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from mixture import Block, MoEConfig, MoETransformer, balance_loss

import jfsdp
from jfsdp import DataParallelMeshDims

FLAG = "--xla_force_host_platform_device_count"
if FLAG not in os.environ.get("XLA_FLAGS", ""):  # read when JAX first looks for devices
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}=8".strip()

BATCH_SIZE, TIME, STEPS, BALANCE = 64, 16, 60, 0.01


def make_mesh() -> Mesh:
    types = (AxisType.Auto,) * 2
    return jax.make_mesh((jax.device_count() // 2, 2), ("fsdp", "expert"), axis_types=types)


def place(path: str, param: Any) -> Any:
    """Experts: dimension 1 over "fsdp" alone. Everything else: jfsdp's rule."""
    return (1, DataParallelMeshDims(shard="fsdp")) if ".experts." in path else None


def sharded(config: MoEConfig, mesh: Mesh) -> MoETransformer:
    return jfsdp.init(
        lambda: MoETransformer(config, rngs=nnx.Rngs(0)),
        mesh,
        dp_mesh_dims=DataParallelMeshDims(shard=("fsdp", "expert")),
        shard_placement_fn=place,
        units=Block,
        out_specs=(None, P()),  # the experts' shares of the work: their mean over the devices
    )


def loss_fn(model: nnx.Module, tokens: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    logits, balance = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    cross_entropy, unbalance = losses.mean(), balance_loss(balance)
    return cross_entropy + BALANCE * unbalance, (cross_entropy, unbalance)


@nnx.jit
def train_step(model: nnx.Module, optimizer: nnx.Optimizer, tokens: jax.Array) -> Any:
    grads, losses = nnx.grad(loss_fn, has_aux=True)(model, tokens)
    optimizer.update(model, grads)
    return losses


def batches(vocabulary: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Sequences (batch, time + 1) of x -> 5 x + c, a c for each sequence: two tokens tell the rest."""
    rng = np.random.default_rng(seed)
    while True:
        x, c = rng.integers(0, vocabulary, BATCH_SIZE), rng.integers(0, 4, BATCH_SIZE)
        rows = [x]
        for _ in range(TIME):
            rows.append((5 * rows[-1] + c) % vocabulary)
        yield np.stack(rows, 1).astype(np.int32)


def main() -> list[float]:
    config, mesh = MoEConfig(width=64, layers=2, heads=4, context=TIME), make_mesh()
    model = sharded(config, mesh)
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    data = batches(config.vocabulary)
    dims = DataParallelMeshDims(shard=("fsdp", "expert"))
    tokens = jfsdp.shard_batch(next(data), mesh, dp_mesh_dims=dims)
    print(jfsdp.plan(model))
    report = jfsdp.inspect(train_step, model, optimizer, tokens)
    report.check()
    print(report)
    losses = []
    for step in range(1, STEPS + 1):
        tokens = jfsdp.shard_batch(next(data), mesh, dp_mesh_dims=dims)
        cross_entropy, unbalance = train_step(model, optimizer, tokens)
        losses.append(float(cross_entropy))
        if step == 1 or step % 10 == 0:
            print(f"step {step:3}  loss {losses[-1]:.3f}  balance {float(unbalance):.3f}")
    return losses


if __name__ == "__main__":
    main()
