"""The figures of host memory: what lies there, beside what lies on the device, and how much there may be."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import pytest
from offload_steps import SHARD, mesh, model_on, momentum_of, offloaded, report_of, step_with

from jfsdp.inspect import Argument, Memory, Report
from jfsdp.inspect.host_limits import host_limit
from jfsdp.inspect.memory import from_failure, memory_table
from jfsdp.inspect.target import Target

__all__ = ["mesh", "offloaded"]

MIB, GIB = 2**20, 2**30


def test_device_bytes_of_offloaded_state_are_0(offloaded: Report) -> None:
    memory = offloaded.memory
    assert memory is not None
    assert (memory.parameters, memory.optimizer) == (0, 0)
    assert (memory.host_parameters, memory.host_optimizer) == (SHARD, SHARD)


def test_the_least_of_it_is_known_for_each_memory(offloaded: Report) -> None:
    memory = offloaded.memory
    assert memory is not None
    assert (memory.parameters_minimum, memory.optimizer_minimum) == (0, 0)
    assert (memory.host_parameters_minimum, memory.host_optimizer_minimum) == (SHARD, SHARD)


def test_donated_state_in_host_memory_is_no_output(offloaded: Report) -> None:
    memory = offloaded.memory
    assert memory is not None
    assert (memory.host_outputs, memory.aliased, memory.host) == (0, 2 * SHARD, 2 * SHARD)


def test_the_peak_of_the_device_is_without_host_memory(
    offloaded: Report, mesh: jax.sharding.Mesh
) -> None:
    model = model_on(mesh)
    plain = report_of(
        mesh,
        model,
        momentum_of(model, None),
        step_with(lambda x: x, lambda x: x),
        compile=True,
    )
    assert plain.memory is not None
    assert offloaded.memory is not None
    assert plain.memory.peak - offloaded.memory.peak == 2 * SHARD
    assert plain.memory.host == 0


def test_host_figures_stand_beside_those_of_the_device() -> None:
    memory = Memory(
        parameters=MIB,
        temporaries=20 * MIB,
        peak=21 * MIB,
        available=GIB,
        parameters_minimum=MIB,
        optimizer_minimum=0,
        host=14 * MIB,
        host_parameters=4 * MIB,
        host_optimizer=8 * MIB,
        host_temporaries=2 * MIB,
        host_parameters_minimum=4 * MIB,
        host_optimizer_minimum=8 * MIB,
        host_available=2 * GIB,
    )
    assert (
        memory_table(memory)
        == """\
memory of one device    device  minimum  ratio      host  minimum  ratio
------------------------------------------------------------------------
parameters             1.0 MiB  1.0 MiB  1.000   4.0 MiB  4.0 MiB  1.000
optimizer state            0 B      0 B      -   8.0 MiB  8.0 MiB  1.000
temporaries           20.0 MiB                   2.0 MiB
------------------------------------------------------------------------
peak                  21.0 MiB                  14.0 MiB
fits: 21.0 MiB of 1.0 GiB per device
host memory fits: 14.0 MiB of 2.0 GiB per device"""
    )


def test_json_and_page_have_the_host_figures(offloaded: Report) -> None:
    content = offloaded.as_dict()
    assert content["memory"]["host_parameters"] == SHARD
    assert content["memory"]["host_verdict"].startswith("host memory needs 8.1 KiB")
    assert content["host_traffic"]["bytes_to_device"] == 4 * SHARD
    assert "parameters in host memory" in offloaded.to_html()
    assert "host memory: 16.2 KiB to the device" in offloaded.to_html()


def test_a_difference_tells_the_memories_apart(offloaded: Report) -> None:
    assert offloaded.memory is not None
    device = dataclasses.replace(offloaded.memory, parameters=SHARD, host_parameters=0)
    text = str(offloaded.difference(dataclasses.replace(offloaded, memory=device)))
    assert "parameters on the host" in text


# How much there is


def target(**changes: Any) -> Target:
    known = Target("h100", "gpu", 16, GIB, GIB, 1.0, 1.0, 1, 0, 1.0, 8, "")
    return dataclasses.replace(known, **changes)


@pytest.mark.parametrize(
    ("devices", "gib", "variable"), [(16, 8, ""), (16, 9, "=76"), (4, 16, ""), (4, 17, "=72")]
)
def test_gpus_have_64_gib_of_pinned_memory_a_process(devices: int, gib: int, variable: str) -> None:
    text = host_limit(target(), gib * GIB, devices)
    assert text.rpartition("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB")[2] == variable
    assert host_limit(target(platform="tpu"), gib * GIB, devices) == ""


def test_the_verdict_names_the_variable() -> None:
    memory = Memory(host=9 * GIB, host_limit=host_limit(target(), 9 * GIB, 8))
    assert memory.host_verdict == (
        "host memory needs 9.0 GiB per device; a process with 8 GPUs pins 72.0 GiB, and XLA gives it 64.0 "
        "GiB: set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=76"
    )


def test_a_refused_program_has_its_arguments_on_the_host() -> None:
    text = "RESOURCE_EXHAUSTED: memory required for HLO temporaries (24.0G) exceeds the available HBM (15.0G)"
    there = Argument("w", "parameters", (4,), "float32", 16, "pinned_host")
    memory = from_failure(RuntimeError(text), [there])
    assert memory is not None
    assert (memory.parameters, memory.host_parameters, memory.host) == (0, 16, 16)


def test_moves_of_unpinned_memory_are_said_not_to_be_counted(mesh: jax.sharding.Mesh) -> None:
    model = model_on(mesh, pin_memory=False)
    state = momentum_of(model, "unpinned_host")
    traffic = report_of(mesh, model, state, step_with()).traffic
    assert traffic is not None
    assert (traffic.unseen, traffic.least) == (True, None)
