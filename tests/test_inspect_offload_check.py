"""What `check` says when host memory is not as the policies state."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from offload_steps import (
    ALL,
    KERNEL,
    STATE,
    batch_on,
    mesh,
    model_on,
    momentum_of,
    offloaded,
    report_of,
    step_with,
    text_of,
)

import jfsdp
from jfsdp.inspect import Memory, Report
from jfsdp.inspect.transfers import HostWork, Traffic, Transfer
from jfsdp.offload import to_host

__all__ = ["mesh", "offloaded"]

MIB = 2**20


# What lies there by the policies, and nothing else


def test_a_step_that_keeps_everything_on_the_host_is_no_departure(offloaded: Report) -> None:
    offloaded.check()


def test_state_that_was_made_on_the_device_is_a_departure(mesh: jax.sharding.Mesh) -> None:
    model = model_on(mesh, **STATE)
    step = step_with(lambda x: x)
    text = text_of(report_of(mesh, model, momentum_of(model, "device"), step))
    assert text == (
        "0.1.trace.bias, 0.1.trace.kernel: memory of the optimizer state: expected pinned_host, found the "
        "device's own memory for 2 arrays, 4.1 KiB per device, the largest float32[64,128]: pass what "
        "jfsdp.shard and jfsdp.init_optimizer made, or jax.device_put(x, jfsdp.shardings(x))"
    )


def test_parameters_on_the_device_are_a_departure(mesh: jax.sharding.Mesh) -> None:
    model = model_on(mesh, optimizer_state=False)
    placed = model_on(mesh)
    for name in ("kernel", "bias"):
        getattr(model, name).set_raw_value(getattr(placed, name).get_raw_value())
    step = step_with(to_host, lambda x: x)
    text = text_of(report_of(mesh, model, momentum_of(model, "device"), step))
    assert text.startswith(
        "0.0.bias.value, 0.0.kernel.value: memory of the parameters: expected pinned_host, found the "
        "device's own memory for 2 arrays, 4.1 KiB per device"
    )


def test_state_on_the_host_that_no_policy_asks_for_is_a_departure(mesh: jax.sharding.Mesh) -> None:
    model = model_on(mesh)
    step = step_with(lambda x: x, lambda x: x)
    text = text_of(report_of(mesh, model, momentum_of(model), step))
    assert text == (
        "0.1.trace.bias, 0.1.trace.kernel: memory of the optimizer state: expected the device's own memory, "
        "found pinned_host for 2 arrays, 4.1 KiB per device, the largest float32[64,128], for which no "
        "policy asks"
    )


def test_state_that_comes_back_on_the_device_is_a_departure(mesh: jax.sharding.Mesh) -> None:
    model = model_on(mesh, **ALL)
    step = step_with(to_host, lambda x: x)
    text = text_of(report_of(mesh, model, momentum_of(model), step))
    assert (
        "memory of what the step returns: expected pinned_host, found the device's own memory"
        in text
    )
    assert "for 2 arrays, 4.1 KiB per device, the largest float32[64,128]: update with" in text
    assert "out_shardings=jfsdp.shardings(state), or use jfsdp.jit" in text


def test_it_is_one_in_the_compiled_program_too(mesh: jax.sharding.Mesh) -> None:
    model = model_on(mesh, **ALL)
    report = report_of(
        mesh, model, momentum_of(model), step_with(to_host, lambda x: x), compile=True
    )
    rules = {departure.rule for departure in report.departures()}
    assert "memory of what the step returns" in rules


def test_parameters_that_come_back_on_the_host_unasked_are_a_departure(
    mesh: jax.sharding.Mesh,
) -> None:
    model = model_on(mesh)
    step = step_with(to_host, lambda x: x)
    text = text_of(report_of(mesh, model, momentum_of(model, "device"), step))
    assert (
        "memory of what the step returns: expected the device's own memory, found pinned_host"
        in text
    )
    assert text.endswith("for which no policy asks")


def test_a_step_that_returns_no_state_need_not_keep_it(mesh: jax.sharding.Mesh) -> None:
    model = model_on(mesh, **ALL)
    graph, state = nnx.split(model)
    step = jax.jit(lambda state, x: jnp.sum(nnx.merge(graph, state)(x)))
    jfsdp.inspect(step, state, batch_on(mesh), model=model).check()


# Activations


def named(report: Report, transfers: tuple[Transfer, ...], memory: Memory | None = None) -> Report:
    """The report of a program whose unit keeps values on the host, and that moves this, as written."""
    promises = tuple(dataclasses.replace(p, activations=("hidden",)) for p in report.promises)
    assert report.lowered is not None
    lowered = dataclasses.replace(report.lowered, traffic=Traffic(transfers))
    return dataclasses.replace(
        report, promises=promises, lowered=lowered, memory=memory or report.memory
    )


KEPT = (Transfer("device", "host", "float32", (8, 8), phase="forward"),)


def test_activations_that_nothing_moves_are_a_departure(offloaded: Report) -> None:
    gradient = dataclasses.replace(KEPT[0], phase="backward")
    text = text_of(named(offloaded, (gradient,)))
    assert text == (
        "the step: where activations wait for the backward: expected host memory for hidden, found nothing "
        "is moved to host memory in the forward: name them in the unit's forward: "
        "jax.ad_checkpoint.checkpoint_name(x, name)"
    )


def test_activations_that_the_compiler_left_on_the_device_are_a_departure(
    offloaded: Report,
) -> None:
    text = text_of(named(offloaded, KEPT, Memory(host_told=True)))
    assert text == (
        "the step: where activations wait for the backward: expected host memory for hidden, found no "
        "temporary of the compiled program lies in host memory"
    )


@pytest.mark.parametrize("memory", [Memory(host_told=True, host_temporaries=1), Memory()])
def test_activations_in_host_memory_are_none(offloaded: Report, memory: Memory) -> None:
    named(offloaded, KEPT, memory).check()


# What is done there


def test_what_the_host_computes_unasked_is_a_departure(offloaded: Report) -> None:
    work = HostWork("host", "host-call.1", "jit(step)/checkpoint/dot_general", 3 * MIB, asked=False)
    text = text_of(dataclasses.replace(offloaded, traffic=Traffic(work=(work,))))
    assert text == (
        "the step: what the host computes: expected what compute_on asks for, found host-call.1 "
        "(jit(step)/checkpoint/dot_general) on 3.0 MiB of host memory, by XLA's choice: move arrays to the "
        "device before they are used, and keep arrays in host memory out of jax.checkpoint"
    )
    asked = dataclasses.replace(work, asked=True)
    dataclasses.replace(offloaded, traffic=Traffic(work=(asked,))).check()


def test_a_kernel_on_host_memory_is_a_departure(offloaded: Report) -> None:
    work = HostWork("device", "loop_add_fusion", "", 3 * MIB, asked=False)
    text = text_of(dataclasses.replace(offloaded, traffic=Traffic(work=(work,))))
    assert text == (
        "the step: what the device does with host memory: expected copies, found loop_add_fusion reads or "
        "writes 3.0 MiB of it in place: move arrays to the device before they are used"
    )


def test_more_host_memory_than_there_is_is_a_departure(offloaded: Report) -> None:
    assert offloaded.memory is not None
    memory = dataclasses.replace(offloaded.memory, host_available=KERNEL)
    text = text_of(dataclasses.replace(offloaded, memory=memory))
    assert text == "the step: host memory, per device: expected at most 4.0 KiB, found 8.1 KiB"
    assert memory.host_verdict == "host memory does not fit: 8.1 of 4.0 KiB per device"
