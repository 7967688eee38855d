"""What a step moves to and from host memory as it is written, and the least of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jfsdp.inspect import Promise
from jfsdp.inspect.transfers import HostWork, Traffic, Transfer, least_bytes, traffic_line
from jfsdp.inspect.written_transfers import written_transfers
from jfsdp.offload import on_host, to_device, to_host


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))


def on(mesh: jax.sharding.Mesh, *shape: int) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(mesh, P("fsdp"), memory_kind="pinned_host")
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def written(function: Any, *args: Any, **how: Any) -> tuple[list[Transfer], list[HostWork]]:
    shares = {(64, 8): (8, 8)}
    return written_transfers(
        jax.jit(function).trace(*args).jaxpr, shares, updates=how.get("updates", False)
    )


def test_both_directions_are_read_with_the_shape_of_one_device(mesh: jax.sharding.Mesh) -> None:
    transfers, _ = written(lambda w: to_host(to_device(w) * 2), on(mesh, 64, 8))
    there = Transfer("host", "device", "float32", (8, 8), phase="forward")
    back = Transfer("device", "host", "float32", (8, 8), phase="forward")
    assert transfers == [there, back]


def test_shapes_in_manual_regions_are_those_of_one_device(mesh: jax.sharding.Mesh) -> None:
    def step(w: jax.Array) -> jax.Array:
        spec = P("fsdp")
        return jax.shard_map(to_device, mesh=mesh, in_specs=spec, out_specs=spec)(w)

    (transfer,), _ = written(step, on(mesh, 512, 8))
    assert transfer.shape == (64, 8)


def test_a_scan_counts_as_often_as_it_runs(mesh: jax.sharding.Mesh) -> None:
    def step(stack: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return x + to_device(w), None

        return jax.lax.scan(layer, jnp.zeros(8), stack)[0]

    (transfer,), _ = written(step, on(mesh, 64, 8))
    assert (transfer.shape, transfer.executions, transfer.total_bytes) == ((8,), 64, 64 * 32)


def test_a_loop_of_unknown_length_counts_once_and_says_so(mesh: jax.sharding.Mesh) -> None:
    def step(w: jax.Array, n: jax.Array) -> jax.Array:
        zeros = jnp.zeros((64, 8))
        return jax.lax.fori_loop(0, n, lambda i, x: x + to_device(w), zeros)

    (transfer,), _ = written(step, on(mesh, 64, 8), jnp.int32(3))
    assert (transfer.executions, transfer.unknown_trips) == (1, True)


def test_phases_are_those_of_the_derivatives(mesh: jax.sharding.Mesh) -> None:
    def step(w: jax.Array) -> jax.Array:
        gradient = jax.grad(lambda w: jnp.sum(to_device(w) ** 2))(w)
        return to_host(to_device(w) - to_device(gradient))

    transfers, _ = written(step, on(mesh, 64, 8), updates=True)
    found = [(transfer.target, transfer.phase) for transfer in transfers]
    assert found == [
        ("device", "forward"),
        ("host", "backward"),
        ("device", "update"),
        ("device", "update"),
        ("host", "update"),
    ]


def test_of_a_conditional_the_branch_that_moves_most_counts(mesh: jax.sharding.Mesh) -> None:
    def step(w: jax.Array, on: jax.Array) -> jax.Array:
        return jax.lax.cond(on, lambda w: to_device(w) * 2, lambda w: to_device(w) + 1, w)

    (transfer,), _ = written(step, on(mesh, 64, 8), jnp.asarray(True))
    assert transfer.target == "device"


def test_what_nothing_uses_is_not_moved(mesh: jax.sharding.Mesh) -> None:
    def step(w: jax.Array) -> jax.Array:
        to_device(w)
        return jnp.zeros(3)

    assert written(step, on(mesh, 64, 8)) == ([], [])


def test_what_lies_there_is_not_moved(mesh: jax.sharding.Mesh) -> None:
    space = jax.memory.Space.Host
    assert written(lambda w: jax.device_put(w, space), on(mesh, 64, 8)) == ([], [])


def test_what_the_host_computes_is_work_and_not_moved(mesh: jax.sharding.Mesh) -> None:
    transfers, (work,) = written(on_host(lambda w: w * 2), on(mesh, 64, 8))
    assert transfers == []
    assert (work.where, work.asked, work.bytes) == ("host", True, 2 * 256)


# The least of it


def promise(**changes: Any) -> Promise:
    known: dict[str, Any] = {"memory_kind": "pinned_host", "bytes_at_rest": 100.0}
    return Promise("w", ((8,),), ((1,),), None, None, None, **{**known, **changes})


def test_an_update_on_the_device_fetches_parameters_gradients_and_state() -> None:
    promises = (promise(fetched=200.0, returned=100.0),)
    assert least_bytes(promises, 50, updates=False, on_host=False) == (200, 100)
    assert least_bytes(promises, 50, updates=True, on_host=False) == (200 + 250, 100 + 150)
    assert least_bytes(promises, 50, updates=True, on_host=True) == (200, 100)


def test_state_alone_is_all_that_moves_if_it_alone_is_offloaded() -> None:
    promises = (promise(memory_kind=None),)
    assert least_bytes(promises, 50, updates=True, on_host=False) == (50, 50)


def test_microbatches_multiply_it() -> None:
    accumulated = promise(fetched=200.0, returned=100.0).accumulated(3, every=False)
    assert (accumulated.fetched, accumulated.returned) == (600, 100)


def test_the_line_has_both_directions_and_the_least() -> None:
    there = Transfer("host", "device", "float32", (256,), 3)
    back = Transfer("device", "host", "float32", (256,), unknown_trips=True)
    work = HostWork("host", "call", "", 2048, asked=True)
    assert traffic_line(Traffic((there, back), (work,), (2048, 0))).splitlines() == [
        "host memory: 3.0 KiB+ to the device (least 2.0 KiB, 1.500x), 1.0 KiB+ back (least 0 B), per device "
        "and step",
        "+ inside a loop whose length the program does not say: counted once",
        "2.0 KiB of host memory are worked on by the host",
    ]
    assert traffic_line(Traffic((), (), (0, 0))) == traffic_line(None) == ""


def test_the_line_says_what_is_not_counted() -> None:
    first, second = traffic_line(Traffic(unseen=True)).splitlines()
    assert first == "host memory: 0 B to the device, 0 B back, per device and step"
    assert second == "not counted: what lies in unpinned_host, which jax's types do not tell"
