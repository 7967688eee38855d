"""The gates of a step with blocks of GPT-2's size, compiled for 8 TPU v5e and 8 H100 that are not here.

Each gate is a ratio of what the compiled program does to the least that the policies allow.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jfsdp
from jfsdp.inspect import Report
from jfsdp.testing import topology_or_skip

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "models"))
import gpt2  # pyright: ignore[reportMissingImports]

LAYERS = 3
POLICY = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Setup:
    target: str
    hsdp: bool
    scan: bool
    layers: int = LAYERS

    def __str__(self) -> str:
        mesh, form = "R2xS4" if self.hsdp else "S8", "scan" if self.scan else "unrolled"
        return f"{self.target}-{mesh}-{form}"

    @property
    def config(self) -> gpt2.GPT2Config:
        return gpt2.GPT2Config(vocabulary=2048, context=256, layers=self.layers, scan=self.scan)

    def mesh(self) -> Any:
        shape, names = ((2, 4), ("replica", "fsdp")) if self.hsdp else ((8,), ("fsdp",))
        types = (AxisType.Auto,) * len(shape)
        return jax.make_mesh(shape, names, types, devices=topology_or_skip(self.target))

    def model(self, mesh: Any, **settings: Any) -> gpt2.GPT2:
        settings = {"mp_policy": POLICY, **settings}

        def make() -> gpt2.GPT2:
            model = gpt2.GPT2(self.config, rngs=nnx.Rngs(0))
            if self.scan:
                jfsdp.shard(model.blocks, mesh, stacked_axis=0, **settings)
                return jfsdp.shard(model, mesh, **settings)
            return jfsdp.shard(model, mesh, units="blocks.*", **settings)

        return jfsdp.init(make)

    def tokens(self, mesh: Any) -> jax.ShapeDtypeStruct:
        batch = NamedSharding(mesh, P(mesh.axis_names))
        return jax.ShapeDtypeStruct((16, 257), jnp.int32, sharding=batch)


SETUPS = [
    Setup(target, hsdp, scan)
    for target in ("v5e:2x4", "h100:8")
    for hsdp in (False, True)
    for scan in (False, True)
]
every_setup = pytest.mark.parametrize("setup", SETUPS, ids=str)


@nnx.jit(donate_argnums=(0, 1))
def train_step(model: gpt2.GPT2, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(gpt2.next_token_loss)(model, tokens)
    optimizer.update(model, grads)
    return loss


@functools.cache
def report_of(setup: Setup, compile: bool = True) -> Report:
    mesh = setup.mesh()
    model = setup.model(mesh)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    return jfsdp.inspect(train_step, model, optimizer, setup.tokens(mesh), compile=compile)


def least(report: Report, kind: str) -> float:
    return sum(minimum.bytes_per_device for minimum in report.minima if minimum.kind == kind)


def received(report: Report, *kinds: str, axes: tuple[str, ...]) -> float:
    return sum(
        record.total_bytes
        for record in report.collectives
        if record.kind in kinds and record.axes == axes and record.purpose != "all-gather"
    )


@pytest.mark.slow
@every_setup
def test_gate_1_gathered_bytes_are_the_least(setup):
    report = report_of(setup)
    gathered = sum(c.total_bytes for c in report.collectives if c.purpose == "all-gather")
    assert 0.99 <= gathered / least(report, "all-gather") <= 1.01


@pytest.mark.slow
@every_setup
def test_gate_2_scattered_bytes_are_the_least_and_nothing_large_is_all_reduced(setup):
    report = report_of(setup)
    # A TPU all-reduces biases where they are to be reduce-scattered.
    scattered = received(report, "reduce-scatter", "all-reduce", axes=("fsdp",))
    assert 0.99 <= scattered / least(report, "reduce-scatter") <= 1.01
    reduced = [c for c in report.collectives if c.kind == "all-reduce" and c.axes != ("replica",)]
    assert all(c.total_bytes < MIB for c in reduced)


@pytest.mark.slow
@every_setup
def test_gate_3_only_shards_are_all_reduced_over_the_replicas(setup):
    report = report_of(setup)
    summed = received(report, "all-reduce", axes=("replica",))
    if not setup.hsdp:
        assert summed == 0
        return
    assert 0.99 <= summed / least(report, "all-reduce") <= 1.01
    groups = {c.group_size for c in report.collectives if c.axes == ("replica",)}
    assert groups == {2}


@pytest.mark.slow
@every_setup
def test_gate_4_every_byte_travels_in_the_stated_dtype(setup):
    for record in report_of(setup).collectives:
        wanted = "bfloat16" if record.purpose == "all-gather" else "float32"
        assert record.dtype == wanted, record


@every_setup
def test_gate_5_each_leaf_is_gathered_once_forward_and_reduced_once(setup):
    report = report_of(setup, compile=False)
    depth = setup.layers if setup.scan else 1
    times = {p.leaf: depth if p.leaf.startswith("blocks") else 1 for p in report.promises}
    assert executed(report, "all-gather", "forward") == times
    assert executed(report, "reduce-scatter", "backward") == times
    again = executed(report, "all-gather", "backward")
    assert all(leaf.startswith("blocks") and again[leaf] == times[leaf] for leaf in again)
    kernels = {leaf for leaf in times if leaf.startswith("blocks") and leaf.endswith("kernel")}
    assert kernels <= again.keys()
    if setup.hsdp:
        assert executed(report, "all-reduce", "backward") == times


def executed(report: Report, kind: str, phase: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    for record in report.collectives:
        if record.kind == kind and record.phase == phase:
            counts[record.leaf] += record.executions
    return counts


def test_gate_5_a_scanned_stack_has_as_many_collectives_in_its_program_at_any_depth():
    shallow, deep = (
        report_of(Setup("v5e:2x4", False, True, layers), compile=False) for layers in (3, 6)
    )
    assert len(shallow.collectives) == len(deep.collectives)


@pytest.mark.slow
@every_setup
def test_gate_6_state_is_the_shards_alone_and_is_updated_in_place(setup):
    memory = report_of(setup).memory
    assert memory is not None
    parameters = sum(
        leaf.size
        for leaf in jax.tree.leaves(
            nnx.state(nnx.eval_shape(lambda: gpt2.GPT2(setup.config, rngs=nnx.Rngs(0))))
        )
    )
    shards = 4 if setup.hsdp else 8
    state = memory.parameters + memory.optimizer
    assert state <= 1.001 * parameters * (4 + 8) / shards
    assert memory.aliased >= state


@pytest.mark.slow
@every_setup
def test_the_step_is_what_its_policies_state(setup):
    report_of(setup).check()
