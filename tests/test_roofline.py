"""The roofline: from how many tokens per device on a step is bound by computation."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jfsdp.inspect import Row
from jfsdp.inspect.roofline import Network, Roofline, network_of, roofline, threshold
from jfsdp.inspect.target import Target

TPU = Target(
    name="a",
    platform="tpu",
    chips=0,
    memory_bytes=0,
    usable_memory_bytes=0,
    peak_flops=120e12,
    link_bandwidth=10e9,
    links=6,
    torus_dims=3,
    network_bandwidth=1e9,
    devices_per_host=0,
    source="",
)
FLAT_TPU = Target(**{**vars(TPU), "links": 4, "torus_dims": 2})
GPU = Target(**{**vars(TPU), "platform": "gpu", "links": 1, "torus_dims": 0, "devices_per_host": 8})


def torus(*sizes: int) -> list[Any]:
    """The chips of a slice, the last dimension fastest."""
    places = itertools.product(*map(range, sizes))
    return [SimpleNamespace(coords=list(at), id=i, slice_index=None) for i, at in enumerate(places)]


def gpus(count: int) -> list[Any]:
    return [SimpleNamespace(id=i) for i in range(count)]


def mesh_of(devices: list[Any], **sizes: int) -> Any:
    """What a Mesh has of a mesh, of devices that are none."""
    array = np.empty(len(devices), object)
    array[:] = devices
    array = array.reshape(tuple(sizes.values()))
    return SimpleNamespace(devices=array, axis_names=tuple(sizes), size=array.size)


def row(axes: tuple[str, ...], size: float, kind: str = "all-gather") -> Row:
    return Row(kind, axes, "bfloat16", 1, size)


# Numbers worked out by hand.


def test_the_threshold_is_where_both_times_are_equal() -> None:
    # 6e9 bytes at 100 GB/s take 0.06 s. 1e9 parameters take 6e9 operations a token, 3e-5 s at
    # 200 TFLOP/s: 2000 tokens take 0.06 s too.
    assert threshold(6e9, parameters=10**9, peak_flops=200e12, bandwidth=100e9) == 2000


def test_times_at_the_threshold_are_equal() -> None:
    line = Roofline(("fsdp",), Network("ICI", 50e9, 2), 6e9, 10**9, 200e12, tokens_per_device=2000)
    assert line.communication_seconds == pytest.approx(0.06)
    assert line.compute_seconds == pytest.approx(0.06)
    assert line.compute_bound


def test_one_token_less_is_bound_by_communication() -> None:
    line = Roofline(("fsdp",), Network("ICI", 50e9, 2), 6e9, 10**9, 200e12, tokens_per_device=1999)
    assert line.compute_bound is False


def test_text_of_a_compute_bound_step() -> None:
    line = Roofline(("fsdp",), Network("ICI", 90e9, 2), 6e9, 10**9, 200e12, tokens_per_device=8192)
    assert str(line) == (
        "roofline: 8192 tokens per chip, compute-bound from 1112 on axis fsdp (ICI 90 GB/s x 2 links)"
    )


def test_text_of_a_step_that_waits_for_the_network() -> None:
    line = Roofline(("a", "b"), Network("network", 50e9), 6e9, 10**9, 200e12, tokens_per_device=16)
    assert str(line) == (
        "roofline: 16 tokens per chip, compute-bound from 4000 on axes a, b (network 50 GB/s): "
        "bound by communication"
    )


def test_text_without_a_number_of_tokens_says_the_threshold() -> None:
    line = Roofline(("fsdp",), Network("NVLink", 450e9), 6e9, 10**9, 200e12)
    assert str(line) == (
        "roofline: compute-bound from 445 on axis fsdp (NVLink 450 GB/s), in tokens per chip"
    )
    assert (line.compute_bound, line.compute_seconds) == (None, None)


def test_bytes_of_all_kinds_over_the_same_axes_add_up() -> None:
    mesh = mesh_of(gpus(8), fsdp=8)
    rows = [row(("fsdp",), 2e9), row(("fsdp",), 1e9, "reduce-scatter")]
    (line,) = roofline(rows, mesh=mesh, target=GPU, parameters=10**9, tokens=16_000)
    # 3e9 bytes over 10 GB/s: 0.3 s. 6e9 operations a token at 120 TFLOP/s: 5e-5 s, so 6000 tokens.
    assert (line.bytes_per_device, line.threshold) == (3e9, pytest.approx(6000))
    assert line.tokens_per_device == 2000


def test_axes_have_a_line_each_the_longest_communication_first() -> None:
    mesh = mesh_of(gpus(16), replica=2, fsdp=8)
    rows = [row(("fsdp",), 5e9), row(("replica",), 1e9, "all-reduce")]
    lines = roofline(rows, mesh=mesh, target=GPU, parameters=10**9)
    # A tenth of the bandwidth for a fifth of the bytes: twice the time.
    assert [(line.axes, line.communication_seconds) for line in lines] == [
        (("replica",), pytest.approx(1.0)),
        (("fsdp",), pytest.approx(0.5)),
    ]


def test_axes_that_take_no_time_to_speak_of_have_no_line() -> None:
    mesh = mesh_of(gpus(8), fsdp=8)
    rows = [row(("fsdp",), 1e9), row((), 1e9)]
    assert [line.axes for line in roofline(rows, mesh=mesh, target=GPU, parameters=1)] == [
        ("fsdp",)
    ]
    mesh = mesh_of(gpus(8), replica=2, fsdp=4)
    rows = [row(("fsdp",), 1e9), row(("replica",), 0.9e7)]
    assert [line.axes for line in roofline(rows, mesh=mesh, target=GPU, parameters=1)] == [
        ("fsdp",)
    ]


def test_axes_over_two_networks_have_a_line_for_each() -> None:
    mesh = mesh_of(gpus(16), fsdp=16)
    lines = roofline([row(("fsdp",), 8e9)], mesh=mesh, target=GPU, parameters=10**9)
    # A ring over 2 hosts of 8: two of sixteen steps between hosts, over a tenth of the bandwidth.
    assert [(str(line.network), line.bytes_per_device) for line in lines] == [
        ("network 1 GB/s", 1e9),
        ("NVLink 10 GB/s", 7e9),
    ]


def test_axes_over_two_slices_have_a_line_for_each_network() -> None:
    first, second = torus(2, 2, 1), torus(2, 2, 1)
    for chip in second:
        chip.slice_index = 1
    mesh = mesh_of([*first, *second], fsdp=8)
    lines = roofline([row(("fsdp",), 7e9)], mesh=mesh, target=FLAT_TPU, parameters=10**9)
    # Each slice receives what it lacks once: one of the seven parts that a device receives.
    assert [(str(line.network), line.bytes_per_device) for line in lines] == [
        ("DCN 1 GB/s", 1e9),
        ("ICI 10 GB/s x 2 links", 6e9),
    ]


# Networks.


def test_an_axis_over_a_whole_torus_has_two_links_in_each_dimension() -> None:
    assert network_of(mesh_of(torus(4, 4, 4), fsdp=64), ["fsdp"], TPU) == Network("ICI", 10e9, 6)


def test_an_axis_over_one_ring_has_two_links() -> None:
    mesh = mesh_of(torus(4, 4, 4), replica=16, fsdp=4)
    assert network_of(mesh, ["fsdp"], TPU).links == 2
    assert network_of(mesh, ["replica"], TPU).links == 4


def test_a_slice_of_less_than_a_cube_is_not_closed() -> None:
    assert network_of(mesh_of(torus(2, 2, 4), fsdp=16), ["fsdp"], TPU).links == 3


@pytest.mark.parametrize(("sizes", "links"), [((2, 4), 2), ((8, 16), 3), ((16, 16), 4)])
def test_a_flat_torus_is_closed_where_it_is_16_long(sizes: tuple[int, ...], links: int) -> None:
    devices = torus(*sizes, 1)
    assert network_of(mesh_of(devices, fsdp=len(devices)), ["fsdp"], FLAT_TPU).links == links


def test_part_of_a_ring_has_one_link() -> None:
    mesh = mesh_of(torus(16, 16, 1), replica=64, fsdp=4)
    assert network_of(mesh, ["fsdp"], FLAT_TPU).links == 1


def test_groups_that_lie_in_between_share_the_links() -> None:
    mesh = mesh_of(torus(16, 16, 1), a=16, replica=4, fsdp=4)
    assert network_of(mesh, ["replica"], FLAT_TPU).links == 0.5
    assert str(network_of(mesh, ["replica"], FLAT_TPU)) == "ICI 10 GB/s x 0.5 links"


def test_a_group_that_is_no_box_counts_one_link() -> None:
    chips = torus(2, 4, 1)
    mesh = mesh_of([chips[i] for i in (0, 7, 1, 2, 3, 4, 5, 6)], a=4, fsdp=2)
    assert network_of(mesh, ["fsdp"], FLAT_TPU).links == 1


def test_gpus_of_one_host_have_nvlink() -> None:
    mesh = mesh_of(gpus(16), replica=2, fsdp=8)
    assert str(network_of(mesh, ["fsdp"], GPU)) == "NVLink 10 GB/s"


def test_gpus_of_several_hosts_have_the_network_between_them() -> None:
    mesh = mesh_of(gpus(16), replica=2, fsdp=8)
    assert str(network_of(mesh, ["replica"], GPU)) == "network 1 GB/s"
    assert str(network_of(mesh, ["replica", "fsdp"], GPU)) == "network 1 GB/s"


def test_chips_of_several_slices_have_the_network_between_them() -> None:
    first, second = torus(2, 2, 1), torus(2, 2, 1)
    for chip in second:
        chip.slice_index = 1
    mesh = mesh_of([*first, *second], replica=2, fsdp=4)
    assert str(network_of(mesh, ["replica"], FLAT_TPU)) == "DCN 1 GB/s"
    assert network_of(mesh, ["fsdp"], FLAT_TPU).name == "ICI"
