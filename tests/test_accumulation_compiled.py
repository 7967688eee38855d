"""Steps over microbatches, compiled for GPUs and TPUs that are not here, are what their policies state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_linen_compiled import Stack as LinenStack

import jfsdp
import jfsdp.testing

pytestmark = pytest.mark.slow
POLICY = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)
WIDTH, DEPTH, MICROBATCHES = 512, 3, 4
TARGETS = pytest.mark.parametrize("target", ["v5e:2x4", "h100:8"])
EVERY_SYNC = pytest.mark.parametrize("sync", ["every", "last"])


class Block(nnx.Module):
    """2.1 million parameters."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.down(nnx.gelu(self.up(x)))


def mesh_of(target: str) -> Any:
    devices = jfsdp.testing.topology_or_skip(target)
    return jax.make_mesh((2, 4), ("replica", "fsdp"), devices=devices)


def described(mesh: Any, *shape: int) -> jax.ShapeDtypeStruct:
    """A batch over all devices of the mesh."""
    return jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=NamedSharding(mesh, P(mesh.axis_names))
    )


def loss_fn(model: Any, x: Any, weights: Any) -> Any:
    each = jnp.mean(model(x).astype(jnp.float32) ** 2, axis=(1, 2))
    return jnp.sum(each * weights), jnp.sum(weights)


@TARGETS
@EVERY_SYNC
def test_a_step_of_nnx(target, sync):
    """Every collective in its dtype; the replicas summed once, outside of the loop; bytes to 1 %."""
    mesh = mesh_of(target)

    def make() -> nnx.Module:
        rngs = nnx.Rngs(0)
        return nnx.Sequential(*(Block(rngs) for _ in range(DEPTH)))

    model = jfsdp.init(make, mesh, units=Block, mp_policy=POLICY)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    both = jfsdp.value_and_grad(loss_fn, microbatches=MICROBATCHES, sync=sync)

    @nnx.jit(donate_argnums=(0, 1))
    def step(model: Any, optimizer: Any, x: Any, weights: Any) -> Any:
        loss, grads = both(model, x, weights)
        optimizer.update(model, grads)
        return loss

    batch = described(mesh, 64, 128, WIDTH), described(mesh, 64)
    report = jfsdp.inspect(step, model, optimizer, *batch, compile=True)
    report.check()
    assert_as_stated(report, sync)


@TARGETS
@EVERY_SYNC
def test_a_step_of_scanned_linen(target, sync):
    mesh = mesh_of(target)
    model = jfsdp.shard(LinenStack(scan=True), mesh, mp_policy=POLICY)
    make = lambda: model.init(jax.random.key(0), jnp.ones((8, 128, WIDTH)))["params"]  # noqa: E731
    params = jfsdp.init(make, abstract=True)

    def loss_fn(params: Any, x: Any) -> Any:
        return jnp.mean(model.apply({"params": params}, x).astype(jnp.float32) ** 2)

    step = jax.jit(jfsdp.value_and_grad(loss_fn, microbatches=MICROBATCHES, sync=sync))
    report = jfsdp.inspect(step, params, described(mesh, 64, 128, WIDTH), model=model, compile=True)
    report.check()
    assert_as_stated(report, sync)


def assert_as_stated(report: jfsdp.inspect.Report, sync: str) -> None:
    """What `check` does not say: the least bytes are of as many scatters as microbatches, and of one sum."""
    large = [c for c in report.collectives if c.total_bytes >= 2**20]
    assert {c.dtype for c in large if c.purpose == "all-gather"} == {"bfloat16"}
    assert {c.dtype for c in large if c.purpose != "all-gather"} == {"float32"}
    sums = [c for c in large if c.axes == ("replica",)]
    assert sums and {c.executions for c in sums} == {1}
    least = {row.kind: row.bytes_per_device for row in report.minima}
    received = sum(c.unpadded_bytes for c in large if c.role == "reduce" and c.axes == ("fsdp",))
    assert received == pytest.approx(least["reduce-scatter"], rel=0.02)
    ratio = least["reduce-scatter"] / least["all-reduce"]
    assert ratio == pytest.approx(3 * (MICROBATCHES if sync == "every" else 1), rel=0.01)
