"""What XLA makes of auto partitioning, compiled for 8 GPUs that are not here."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_gates import least

import jfsdp
from jfsdp.inspect import Report
from jfsdp.testing import topology_or_skip

pytestmark = pytest.mark.slow
VOCABULARY, WIDTH, DEPTH = 4096, 512, 2
MESHES = {"S8": ((8,), ("fsdp",)), "R2xS4": ((2, 4), ("replica", "fsdp"))}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(DEPTH)])
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@nnx.jit
def train_step(model, optimizer, tokens):
    def loss_fn(model):
        logits = model(tokens).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    optimizer.update(model, nnx.grad(loss_fn)(model))


@nnx.jit
def forward(model, optimizer, tokens):
    return model(tokens)


@functools.cache
def report_of(name: str, step=train_step) -> Report:
    shape, names = MESHES[name]
    types = (AxisType.Auto,) * len(shape)
    mesh = jax.make_mesh(shape, names, types, devices=topology_or_skip("h100:8"))
    policy = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    settings = {"units": Block, "mp_policy": policy, "partitioning": "auto"}
    model = jfsdp.init(lambda: jfsdp.shard(Model(nnx.Rngs(0)), mesh, **settings))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    batch = NamedSharding(mesh, P(names))
    tokens = jax.ShapeDtypeStruct((16, 256), jnp.int32, sharding=batch)
    return jfsdp.inspect(step, model, optimizer, tokens, compile=True)


@pytest.mark.parametrize("step", [train_step, forward], ids=["train", "forward"])
@pytest.mark.parametrize("mesh", MESHES)
def test_weights_are_gathered_in_the_compute_dtype(mesh, step):
    gathers = [c for c in report_of(mesh, step).collectives if c.kind == "all-gather"]
    assert {c.dtype for c in gathers} == {"bfloat16"}


@pytest.mark.parametrize("mesh", MESHES)
def test_weights_are_gathered_again_for_the_backward(mesh):
    report = report_of(mesh)
    gathered = sum(c.total_bytes for c in report.collectives if c.kind == "all-gather")
    assert 0.98 <= gathered / least(report, "all-gather") <= 1.02


@pytest.mark.parametrize("mesh", MESHES)
def test_each_element_of_a_gradient_is_reduce_scattered_once(mesh):
    report = report_of(mesh)
    scattered = elements(report, "reduce-scatter", ("fsdp",))
    assert 0.99 <= scattered / (least(report, "reduce-scatter") / 4) <= 1.01
    copies = least(report, "all-reduce") / 4 if mesh == "R2xS4" else 0
    assert 0.99 * copies <= elements(report, "all-reduce", ("replica",)) <= 1.01 * copies
    everywhere = sum(c.total_bytes for c in report.collectives if "fsdp" in c.axes and is_sum(c))
    assert everywhere < 2**17


def elements(report: Report, kind: str, axes: tuple[str, ...]) -> float:
    """The elements that one device receives: the policies state 4 bytes for each, XLA decides."""
    return sum(
        c.total_bytes / jnp.dtype(c.dtype).itemsize
        for c in report.collectives
        if (c.kind, c.axes) == (kind, axes)
    )


def is_sum(collective) -> bool:
    return collective.kind == "all-reduce"


@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_of_kernels_are_reduced_in_the_compute_dtype_whatever_is_stated(mesh):
    scatters = [c for c in report_of(mesh).collectives if c.shape == (4 * WIDTH, WIDTH)]
    assert [(c.kind, c.dtype) for c in scatters] == [("reduce-scatter", "bfloat16")] * 2 * DEPTH
