"""On two TPU slices and two GPU hosts that are not here: what the compiled program sends over which network.

Two networks, one model of 4 times 512x512 parameters, gathered in bfloat16 and reduced in float32. With R
replicas over slices or hosts and F shards inside, the only bytes between them are those of the all-reduce of
the reduced shards: 2 (R - 1)/R * P/F * 4.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import linears, mean_square
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jfsdp
import jfsdp.testing

LAYERS, WIDTH, ISLANDS, EACH = 4, 512, 2, 8
SIZE = LAYERS * WIDTH * WIDTH
POLICY = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)
SCALARS = 4096
"""Bytes that sums of scalars, padded to a tile, may take."""

pytestmark = pytest.mark.slow
on_both = pytest.mark.parametrize("target", ["2xv5e:2x4", "h100:16"])
SLOW = {"2xv5e:2x4": "DCN", "h100:16": "network"}
FAST = {"2xv5e:2x4": "ICI", "h100:16": "NVLink"}


def mesh_on(target: str, outer: str, inner: str) -> Mesh:
    """One axis over the slices or hosts, one over the devices of each."""
    devices = jfsdp.testing.topology_or_skip(target)
    if target.startswith("2x"):
        grid = mesh_utils.create_hybrid_device_mesh(
            (1, EACH), (ISLANDS, 1), devices=devices, allow_split_physical_axes=True
        )
    else:
        grid = np.array(devices).reshape(ISLANDS, EACH)
    return Mesh(grid, (outer, inner), axis_types=(AxisType.Auto,) * 2)


@functools.cache
def report(target: str, outer: str, dims: jfsdp.DataParallelMeshDims, **policy: Any) -> Any:
    mesh = mesh_on(target, outer, "chip")
    model = jfsdp.init(
        lambda: linears(LAYERS, WIDTH),
        mesh,
        units=nnx.Linear,
        dp_mesh_dims=dims,
        mp_policy=POLICY,
        **policy,
    )
    axes = dims.replicate_names + dims.shard_names
    rows = jax.ShapeDtypeStruct(
        (32 * ISLANDS * EACH, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P(axes))
    )
    return jfsdp.inspect(nnx.value_and_grad(mean_square), model, rows, compile=True)


def hsdp(target: str) -> Any:
    dims = jfsdp.DataParallelMeshDims(shard="chip", replicate="replica")
    return report(target, "replica", dims)


def received(found: Any, kind: str, network: str) -> float:
    """Bytes of what the program asks for, whatever kind the compiler made of it."""
    slow = network in SLOW.values()
    records = [c for c in found.collectives if c.purpose == kind]
    return sum(c.crossing_bytes if slow else c.inside_bytes for c in records)


@on_both
def test_hsdp_gathers_and_scatters_inside_a_slice_or_host(target: str) -> None:
    found = hsdp(target)
    found.check()
    for kind in ("all-gather", "reduce-scatter"):
        assert received(found, kind, SLOW[target]) == 0
        assert {c.axes for c in found.collectives if c.purpose == kind} == {("chip",)}


@on_both
def test_hsdp_sends_the_reduced_shards_between_them_and_nothing_else(target: str) -> None:
    found = hsdp(target)
    least = 2 * (ISLANDS - 1) / ISLANDS * SIZE / EACH * 4
    between = found.bytes(network=SLOW[target])
    assert least <= between <= least + SCALARS
    assert found.bytes("all-reduce", "replica") == pytest.approx(least, abs=SCALARS)
    sums = [c for c in found.collectives if c.crossing and c.bytes_per_device > SCALARS]
    assert {(c.kind, c.axes, c.group_size, c.dtype) for c in sums} == {
        ("all-reduce", ("replica",), ISLANDS, "float32")
    }


@on_both
def test_two_stages_of_a_gather_are_each_on_one_network(target: str) -> None:
    dims = jfsdp.DataParallelMeshDims(shard=("host", "chip"))
    found = report(target, "host", dims, all_gather=jfsdp.TwoStageAllGather(slow=("host",)))
    gathers = [c for c in found.collectives if c.purpose == "all-gather"]
    shard = SIZE / (ISLANDS * EACH) * 2
    assert {(c.axes, c.crossing) for c in gathers} == {(("host",), 1.0), (("chip",), 0.0)}
    # The gather of the forward, and that of the backward without the first unit, whose input has no gradient.
    times = 1 + (LAYERS - 1) / LAYERS
    assert received(found, "all-gather", SLOW[target]) == shard * (ISLANDS - 1) * times
    assert received(found, "all-gather", FAST[target]) == shard * ISLANDS * (EACH - 1) * times


def test_the_axis_between_slices_named_last_is_gathered_first_and_reduced_last() -> None:
    dims = jfsdp.DataParallelMeshDims(shard=("chip", "host"))
    found = report("2xv5e:2x4", "host", dims)
    found.check()
    least = SIZE / (ISLANDS * EACH) * (2 * (1 + (LAYERS - 1) / LAYERS) + 4)
    assert found.bytes(network="DCN") == pytest.approx(least, abs=SCALARS)


def test_the_axis_between_slices_named_first_sends_whole_weights_over_dcn() -> None:
    dims = jfsdp.DataParallelMeshDims(shard=("host", "chip"))
    found = report("2xv5e:2x4", "host", dims)
    best = report("2xv5e:2x4", "host", jfsdp.DataParallelMeshDims(shard=("chip", "host")))
    assert found.bytes(network="DCN") > 7 * best.bytes(network="DCN")
    assert "bytes over DCN, per device and step" in [d.rule for d in found.departures()]


def test_one_gather_over_both_hosts_leaves_each_of_them_once() -> None:
    """As NCCL's ring goes: 2 of 16 steps."""
    dims = jfsdp.DataParallelMeshDims(shard=("host", "chip"))
    found = report("h100:16", "host", dims)
    found.check()
    gathered = found.bytes("all-gather")
    assert received(found, "all-gather", "network") == gathered * ISLANDS / (ISLANDS * EACH)
