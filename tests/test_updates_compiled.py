"""`jfsdp.update_optimizer`, compiled for GPUs and TPUs that are not here: memory and copies."""

from __future__ import annotations

import functools
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jfsdp
import jfsdp.testing
from jfsdp.inspect.topology import compiler_options
from jfsdp.layout import named_sharding

pytestmark = pytest.mark.slow

SIZE = 8192  # smaller ones a TPU takes into its VMEM, which would be counted
SHARD = SIZE * SIZE * 4 // 8
HOST, DEVICE = "pinned_host", None
TARGETS = pytest.mark.parametrize("target", ["h100:8", "v5e:2x4"])


@functools.cache
def compiled(
    target: str,
    leaves: int,
    places: Any,
    on: str | None,
    inside: bool = False,
    size: int = SIZE,
) -> Any:
    """A step of AdamW with a global norm over square matrices, in memory of two kinds."""
    devices = jfsdp.testing.topology_or_skip(target)
    mesh = jax.make_mesh((8,), ("S",), (AxisType.Auto,), devices=devices)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def matrix(kind: str | None) -> jax.ShapeDtypeStruct:
        sharding = named_sharding(mesh, P("S"), 2, kind)
        return jax.ShapeDtypeStruct((size, size), jnp.float32, sharding=sharding)

    params = [matrix(places[0]) for _ in range(leaves)]
    policy = jfsdp.CPUOffloadPolicy() if places[1] else jfsdp.OffloadPolicy()
    state = jfsdp.init_optimizer(tx, params, offload_policy=policy)
    seen = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))

    def step(params: Any, state: Any, grads: Any) -> Any:
        return jfsdp.update_optimizer(tx, grads, state, params, on=on)

    specs = jax.tree.map(lambda x: P("S") if x.ndim else P(), (params, state))
    if inside:
        on_mesh = params[0].sharding.mesh
        step = jax.shard_map(step, mesh=on_mesh, in_specs=(*specs, specs[0]), out_specs=specs)
    both = jax.jit(lambda p, s, g, n: (*step(p, s, g), n + 1), donate_argnums=(0, 1))
    lowered = both.lower(params, state, params, seen)
    return lowered.compile(compiler_options=compiler_options(mesh) or None)


def on_device(target: str, leaves: int, places: Any, on: str | None, inside: bool = False) -> float:
    """What the step needs on a device beside its arguments, in shards of a matrix."""
    stats = compiled(target, leaves, places, on, inside).memory_analysis()
    arguments = stats.argument_size_in_bytes + stats.host_argument_size_in_bytes
    return (stats.peak_memory_in_bytes - arguments) / SHARD


def copies(text: str) -> Counter[str]:
    """Copies of a matrix's shard to the device and to the host."""
    found: Counter[str] = Counter()
    array = rf"f32\[{SIZE // 8},{SIZE}\]{{[^}}]*}}"
    for line in text.splitlines():
        match = re.search(rf" = \(({array}), ({array}), .* copy-start\(", line)
        if match:
            to, of = ("S(5)" in part for part in match.groups())
            found["to host" if to else "to device"] += to != of
    return +found


@TARGETS
@pytest.mark.parametrize("places", [(HOST, HOST), (DEVICE, HOST), (HOST, DEVICE)])
@pytest.mark.parametrize("inside", [False, True], ids=["jit", "shard_map"])
def test_streamed_state_takes_the_same_on_the_device_however_much_there_is(
    target: str, places: Any, inside: bool
):
    few, many = (on_device(target, n, places, "device", inside) for n in (4, 12))
    assert many < few + 0.2
    assert many < 12


@TARGETS
@pytest.mark.parametrize("on", ["device", "host"])
def test_all_of_the_state_is_written_in_place_on_the_host(target: str, on: str):
    stats = compiled(target, 4, (HOST, HOST), on).memory_analysis()
    assert stats.host_argument_size_in_bytes == 4 * 4 * SHARD
    assert stats.host_alias_size_in_bytes == 4 * 3 * SHARD
    assert stats.argument_size_in_bytes < 4096


@TARGETS
def test_streaming_takes_nothing_more_on_the_host(target: str):
    assert (
        compiled(target, 4, (HOST, HOST), "device").memory_analysis().host_temp_size_in_bytes == 0
    )


@TARGETS
def test_each_array_is_copied_once_and_the_gradients_twice(target: str):
    """But that of the first group: XLA keeps it from the norm to the update."""
    found = copies(compiled(target, 4, (HOST, HOST), "device").as_text())
    assert found == {"to device": 4 * 5 - 1, "to host": 4 * 3}


@TARGETS
def test_the_host_computes_with_nothing_on_the_device_but_once_more_on_the_host(target: str):
    executable = compiled(target, 4, (HOST, HOST), "host")
    stats = executable.memory_analysis()
    assert not copies(executable.as_text())
    assert stats.temp_size_in_bytes < SHARD
    # What the host computes is copied into place: if that goes, the default is to be thought over.
    assert stats.host_temp_size_in_bytes / SHARD == pytest.approx(4 * 3, abs=0.1)


def test_what_does_not_fit_a_chip_is_streamed_through_it():
    """48 arrays of 512 MiB a chip of 16 GiB: without `on_tpu` of `updates_run` XLA refuses."""
    stats = compiled("v5e:2x4", 12, (HOST, HOST), "device", size=32768).memory_analysis()
    assert stats.host_argument_size_in_bytes == 12 * 4 * 2**29
    assert stats.temp_size_in_bytes < 15 * 2**29
