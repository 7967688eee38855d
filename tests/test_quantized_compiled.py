"""Compiled for GPUs and TPUs that are not here: weights and gradients in 8 bits, gathers in two stages."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_linen_compiled import POLICY, WIDTH, Block, Stack, train_step

import jfsdp
import jfsdp.testing
from jfsdp.inspect import Report

pytestmark = pytest.mark.slow

TARGETS = pytest.mark.parametrize("target", ["h100:8", "v5e:2x4"])
TWO_AXES = jfsdp.DataParallelMeshDims(shard=("replica", "fsdp"))


def in_8_bits(dtype: str, **settings: Any) -> dict[str, Any]:
    return {
        "all_gather": jfsdp.QuantizedAllGather(dtype),
        "reduce_scatter": jfsdp.QuantizedReduceScatter(dtype, **settings),
    }


@functools.cache
def compiled(target: str, scan: bool, **comms: Any) -> Report:
    """A checked train step on 2 x 4 devices: two replicas, or two shard axes for the gather in two stages."""
    devices = jfsdp.testing.topology_or_skip(target)
    axes = ("replica", "fsdp")
    mesh = jax.make_mesh((2, 4), axes, (AxisType.Auto,) * 2, devices=devices)
    model = jfsdp.shard(Stack(scan), mesh, units=Block, mp_policy=POLICY, **comms)

    def create() -> TrainState:
        params = model.init(jax.random.key(0), jnp.ones((1, 128, WIDTH)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    batch = jax.ShapeDtypeStruct(
        (32, 128, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P(axes))
    )
    step = jax.jit(train_step, donate_argnums=0)
    return jfsdp.testing.check_step(step, jfsdp.init(create), batch)


def received(report: Report, role: str) -> dict[str, float]:
    """Bytes by dtype of what gathers weights, or reduces gradients over the shard axes."""
    found: dict[str, float] = {}
    for record in report.collectives:
        if record.role == role and record.axes == ("fsdp",) and record.kind != "all-reduce":
            found[record.dtype] = found.get(record.dtype, 0.0) + record.total_bytes
    return found


@TARGETS
@pytest.mark.parametrize(
    ("dtype", "scan"),
    [("int8", False), ("int8", True), ("float8_e4m3fn", False)],
    ids=["int8-unrolled", "int8-scan", "float8-unrolled"],
)
def test_elements_travel_in_8_bits_and_scales_in_float32(target: str, dtype: str, scan: bool):
    report = compiled(target, scan, **in_8_bits(dtype))
    plain = compiled(target, scan)
    for role, kind, width in (("gather", "all-gather", 2), ("reduce", "reduce-scatter", 4)):
        found, least = received(report, role), plain.bytes(kind, "fsdp")
        assert found.keys() == {dtype, "float32"}, role
        assert found[dtype] * width == pytest.approx(least, rel=0.01), role
        assert found["float32"] == pytest.approx(found[dtype] / 64, rel=0.02), role
    assert report.count("reduce-scatter") == 0


@TARGETS
def test_every_large_collective_is_named_after_its_parameter(target: str):
    report = compiled(target, False, **in_8_bits("int8"))
    large = [c for c in report.collectives if c.bytes_per_device > 1e5 and c.axes == ("fsdp",)]
    assert {c.kind for c in large} == {"all-gather", "all-to-all"}
    assert all(c.leaf.endswith("kernel") and c.role for c in large)


def test_stochastic_rounding_sends_no_more():
    report = compiled("h100:8", False, **in_8_bits("int8", stochastic=True))
    nearest = compiled("h100:8", False, **in_8_bits("int8"))
    assert received(report, "reduce") == received(nearest, "reduce")


class Widened(jfsdp.QuantizedAllGather):
    """States int8 and gathers what it is given."""

    def __call__(self, output_tensor: Any, input_tensor: jax.Array, group: Any, *_: Any) -> Any:
        return jax.lax.all_gather(input_tensor, group, axis=0, tiled=True)


@TARGETS
def test_a_gather_that_states_int8_and_is_not_is_found(target: str):
    with pytest.raises(jfsdp.PolicyViolation, match="what its own collective sends to gather"):
        compiled(target, False, all_gather=Widened())


@TARGETS
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
def test_the_slow_axis_carries_the_shards_alone(target: str, scan: bool):
    """Of 1/8 of the weights 1 part over the slow axis of 2, and 2 * 3 over the fast one of 4."""
    settings = {"dp_mesh_dims": TWO_AXES, "all_gather": jfsdp.TwoStageAllGather()}
    report = compiled(target, scan, **settings)
    slow, fast = (report.bytes("all-gather", axis) for axis in ("replica", "fsdp"))
    assert fast / slow == pytest.approx(6, rel=0.01)
    assert report.bytes("all-gather", ("replica", "fsdp")) == 0
    assert {c.dtype for c in report.collectives if c.kind == "all-gather"} == {"bfloat16"}
