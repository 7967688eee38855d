"""Programs for TPUs and GPUs that are not here have the named values in host memory, in loops too."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax.sharding import AxisType
from offload_models import batch, loss_of, offloading

import jfsdp
import jfsdp.testing
from jfsdp.inspect.topology import compiler_options

ROWS, WIDTH = 8192, 512
"""Of one device. On a v5e many arrays of 16.8 MB lie in HBM, of which temporaries are counted."""


def depth_of(scan: bool) -> int:
    return 24 if scan else 12


def named_bytes(scan: bool) -> int:
    """On one device of what one name names."""
    return depth_of(scan) * ROWS * WIDTH * 4


def memory(target: str, front: str, policy: Any, scan: bool, remat: str) -> tuple[int, int]:
    """Temporaries on the host and on the device, in bytes."""
    devices = jfsdp.testing.topology_or_skip(target)
    mesh = jax.make_mesh((8,), ("fsdp",), (AxisType.Auto,), devices=devices)
    sizes = {"width": WIDTH, "depth": depth_of(scan)}
    function, params = loss_of(front, mesh, policy, scan=scan, remat=remat, **sizes)
    step = jax.jit(jax.value_and_grad(function))
    lowered = step.lower(params, batch(mesh, 8 * ROWS, WIDTH))
    found: Any = lowered.compile(compiler_options(mesh) or None).memory_analysis()
    return found.host_temp_size_in_bytes, found.temp_size_in_bytes


every_case = pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
every_target = pytest.mark.parametrize("target", ["h100:8", "v5e:2x4"])


def assert_on_host(host: int, named: int, scan: bool) -> None:
    """All of it; XLA for TPUs has one layer more for a loop."""
    assert named <= host <= named * (depth_of(scan) + 1) / depth_of(scan)


@pytest.mark.slow
@pytest.mark.parametrize("front", ["nnx", "linen"])
@every_case
@every_target
def test_named_values_leave_the_device(target: str, front: str, scan: bool):
    """But for the layers that are on their way. XLA for TPUs has kept them in bf16, half the bytes."""
    named = named_bytes(scan)
    host, device = memory(target, front, offloading("block_in"), scan, "plain")
    none, before = memory(target, front, jfsdp.OffloadPolicy(), scan, "plain")
    assert none == 0
    assert_on_host(host, named, scan)
    assert before - device >= named // (4 if target.startswith("v5e") else 2)


@pytest.mark.slow
@every_case
@every_target
def test_what_a_remat_of_the_users_offloads_is_on_the_host(target: str, scan: bool):
    host, _ = memory(target, "nnx", jfsdp.OffloadPolicy(), scan, "own")
    assert_on_host(host, 2 * named_bytes(scan), scan)
