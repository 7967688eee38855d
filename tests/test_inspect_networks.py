"""Two networks: which bytes travel between TPU slices and GPU hosts, and which must not."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from jfsdp.inspect import Collective, PolicyViolation, Promise, Report, Wire
from jfsdp.inspect.networks import Networks

MIB = 2**20


def gpus(hosts: int, each: int, order: tuple[int, ...] | None = None, **axes: int) -> Networks:
    """A mesh of the GPUs of several hosts in this order, that of the hosts by default."""
    places = order or tuple(range(hosts * each))
    return Networks("gpu", tuple(axes.items()), tuple(place // each for place in places), places)


def tpus(slices: int, each: int, **axes: int) -> Networks:
    """A mesh of the chips of several slices, slice by slice."""
    places = tuple(range(slices * each))
    return Networks("tpu", tuple(axes.items()), tuple(place // each for place in places), places)


HSDP = gpus(2, 8, replica=2, fsdp=8)


# --------------------------------------------------------------------------------------------------
# Shares


def test_axes_inside_a_host_do_not_cross_and_axes_between_hosts_do() -> None:
    assert (HSDP.share_along("all-gather", ["fsdp"]), HSDP.across(["fsdp"])) == (0.0, False)
    assert (HSDP.share_along("all-reduce", ["replica"]), HSDP.across(["replica"])) == (1.0, True)


def test_a_ring_over_hosts_leaves_each_of_them_once() -> None:
    assert gpus(2, 8, fsdp=16).share_along("all-gather", ["fsdp"]) == 2 / 16
    assert gpus(4, 2, fsdp=8).share_along("reduce-scatter", ["fsdp"]) == 4 / 8


def test_slices_receive_each_part_that_they_lack_once() -> None:
    assert tpus(2, 8, fsdp=16).share_along("all-gather", ["fsdp"]) == 1 / 15
    assert tpus(4, 2, slice=4, chip=2).share_along("all-reduce", ["slice", "chip"]) == 3 / 7


def test_an_exchange_of_all_with_all_crosses_to_every_device_of_other_hosts() -> None:
    assert gpus(2, 4, a=8).share_along("all-to-all", ["a"]) == pytest.approx(4 / 7)


def test_a_permute_crosses_where_source_and_target_are_apart() -> None:
    networks = gpus(2, 2, a=4)
    assert networks.share("collective-permute", ((0, 1), (1, 2), (2, 3), (3, 0))) == 0.5
    assert networks.share("collective-permute", ((0, 0), (1, 2))) == 1.0


def test_the_least_share_is_the_same_on_both_kinds_of_machines() -> None:
    for networks in (gpus(2, 8, fsdp=16), tpus(2, 8, fsdp=16)):
        assert networks.least_share(["fsdp"]) == 1 / 15


def test_one_host_has_nothing_to_cross() -> None:
    networks = gpus(1, 8, replica=2, fsdp=4)
    assert not networks.several
    assert networks.share_along("all-reduce", ["replica", "fsdp"]) == 0.0


def test_a_mesh_laid_across_hosts_crosses_on_the_other_axis() -> None:
    networks = gpus(2, 2, (0, 2, 1, 3), replica=2, fsdp=2)
    assert (networks.across(["replica"]), networks.across(["fsdp"])) == (False, True)


# --------------------------------------------------------------------------------------------------
# Reports


def record(kind: str, axes: tuple[str, ...], size: float, share: float, **more: Any) -> Collective:
    known = {"instruction": "i", "crossing": share, **more}
    dtype = "bfloat16" if kind == "all-gather" else "float32"
    return Collective(kind, axes, dtype, (64, 64), (512, 64), 8, 1, size, **known)


def promise(leaf: str = "up.kernel", **wires: Any) -> Promise:
    given = {"gather": None, "scatter": None, "sum": None, **wires}
    return Promise(leaf, ((512, 64),), ((64, 64),), **given)


def hsdp_promise() -> Promise:
    return promise(
        gather=Wire(("fsdp",), "bfloat16", 4 * MIB),
        scatter=Wire(("fsdp",), "float32", 4 * MIB),
        sum=Wire(("replica",), "float32", 1 * MIB),
    )


def report(*records: Collective, networks: Networks | None = HSDP, **more: Any) -> Report:
    axes = (("replica", 2), ("fsdp", 8)) if networks is None else networks.mesh_axes
    return Report(records, mesh_axes=axes, target="16 x H100", networks=networks, **more)


def hsdp(*more: Collective) -> Report:
    leaf = {"leaf": "up.kernel", "phase": "backward"}
    return report(
        record("all-gather", ("fsdp",), 4 * MIB, 0.0, **leaf),
        record("reduce-scatter", ("fsdp",), 4 * MIB, 0.0, **leaf),
        record("all-reduce", ("replica",), 1 * MIB, 1.0, overlapped=True, **leaf),
        *more,
        promises=(hsdp_promise(),),
    )


def test_bytes_are_told_apart_by_network_in_any_case() -> None:
    found = report(
        record("all-gather", ("fsdp",), 1600, 0.125), record("all-reduce", ("replica",), 100, 1)
    )
    assert found.bytes(network="network") == 200 + 100
    assert found.bytes(network="nvlink") == found.bytes(network="NVLink") == 1400
    assert found.bytes("all-gather", network="network") == 200
    assert found.bytes() == 1700


def test_tpus_have_other_names_for_them() -> None:
    found = report(record("all-reduce", ("slice",), 100, 1), networks=tpus(2, 4, slice=2, chip=4))
    assert (found.bytes(network="dcn"), found.bytes(network="ICI")) == (100, 0)
    with pytest.raises(ValueError, match=r"no network 'NVLink': .*'ICI' inside a slice and 'DCN'"):
        found.bytes(network="NVLink")


def test_the_networks_of_devices_that_are_not_known_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"network='dcn': which networks join .* is not known"):
        report(networks=None).bytes(network="dcn")


def test_the_table_has_the_bytes_by_network_and_the_least() -> None:
    assert """
bytes by network   NVLink  network  least network  network beside matmuls
-------------------------------------------------------------------------
all-gather        4.0 MiB      0 B            0 B
reduce-scatter    4.0 MiB      0 B            0 B
all-reduce            0 B  1.0 MiB        1.0 MiB                    100%
-------------------------------------------------------------------------
                  8.0 MiB  1.0 MiB        1.0 MiB""" in str(hsdp())


def test_json_and_the_page_have_them_too() -> None:
    assert json.loads(hsdp().to_json())["networks"]["all-reduce"] == {
        "NVLink": 0.0,
        "network": MIB,
        "minimum": MIB,
        "overlapped": 1.0,
    }
    page = hsdp().to_html()
    assert "Bytes inside a host and between them" in page
    assert '<th class="number">least network</th>' in page


def test_one_host_has_no_such_table() -> None:
    one_host = gpus(1, 16, replica=2, fsdp=8)
    found = report(record("all-reduce", ("replica",), 100, 0.0), networks=one_host)
    assert "bytes by network" not in str(found)
    assert json.loads(found.to_json())["networks"] == {}
    assert "between them" not in found.to_html()


def test_the_least_of_what_is_gathered_again_is_that_of_its_own_axes() -> None:
    """Kept over the hosts, a weight is gathered over one host's GPUs alone in the backward."""
    wires: dict[str, Any] = {
        "gather": Wire(("host", "gpu"), "bfloat16", 15 + 14),
        "again": Wire(("gpu",), "bfloat16", 14),
    }
    networks = gpus(2, 8, host=2, gpu=8)
    found = report(networks=networks, promises=(promise(**wires),)).as_dict()["networks"]
    assert found["all-gather"]["minimum"] == pytest.approx(1)


# --------------------------------------------------------------------------------------------------
# Departures


def test_shards_that_stay_in_their_host_depart_from_nothing() -> None:
    hsdp().check()


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter"])
def test_a_gather_or_scatter_that_leaves_its_host_departs(kind: str) -> None:
    stray = record(kind, ("replica",), 2 * MIB, 1.0, leaf="up.kernel", phase="backward")
    with pytest.raises(PolicyViolation) as error:
        hsdp(stray).check()
    assert (
        f"up.kernel: network of the {kind}: expected NVLink: its shards lie inside one host, found "
        f"2.0 MiB of a {kind} over network"
    ) in str(error.value)


def test_one_without_a_name_departs_if_no_parameter_leaves_its_host() -> None:
    rules = [d.rule for d in hsdp(record("all-gather", ("replica",), 2 * MIB, 1.0)).departures()]
    assert "network of the all-gather" in rules
    small = hsdp(record("all-gather", ("replica",), 0.5 * MIB, 1.0)).departures()
    assert "network of the all-gather" not in [d.rule for d in small]


def test_shards_that_lie_over_hosts_may_cross() -> None:
    wires: dict[str, Any] = {"gather": Wire(("fsdp",), "bfloat16", 4 * MIB)}
    found = report(
        record("all-gather", ("fsdp",), 4 * MIB, 0.125, leaf="up.kernel"),
        networks=gpus(2, 8, fsdp=16),
        promises=(promise(**wires),),
    )
    found.check()


@pytest.mark.parametrize(
    ("between", "inside", "departs"), [(1, 14, False), (8, 7, True)], ids=["last", "first"]
)
def test_tpus_that_gather_over_slices_last_send_whole_weights_over_dcn(
    between: float, inside: float, departs: bool
) -> None:
    networks = tpus(2, 8, slice=2, chip=8)
    found = report(
        record("all-gather", ("slice",), between * MIB, 1.0, leaf="up.kernel"),
        record("all-gather", ("chip",), inside * MIB, 0.0, leaf="up.kernel"),
        networks=networks,
        promises=(promise(gather=Wire(("slice", "chip"), "bfloat16", 15 * MIB)),),
    ).departures()
    assert [d.rule for d in found] == ["bytes over DCN, per device and step"] * departs
    if departs:
        assert "expected about 1.0 MiB, found 8.0 MiB" in str(found[0])
        assert 'name the one between slices last, as in shard=("x", "y", "slice")' in str(found[0])


def test_the_part_of_a_scatter_between_slices_needs_no_name() -> None:
    """XLA takes a reduce-scatter over slices apart; the second part has neither name nor shape."""
    found = report(
        record("reduce-scatter", ("chip",), 14 * MIB, 0.0, leaf="up.kernel"),
        record("reduce-scatter", ("slice",), MIB, 1.0),
        networks=tpus(2, 8, slice=2, chip=8),
        promises=(promise(scatter=Wire(("chip", "slice"), "float32", 15 * MIB)),),
    )
    assert found.departures() == []


def test_the_first_stage_of_a_gather_needs_no_name() -> None:
    """Programs of several slices name no gather, and what one axis gives has no parameter's shape."""
    wires: dict[str, Any] = {"gather": Wire(("x", "y"), "bfloat16", 8 * MIB)}
    networks = tpus(2, 8, slice=2, x=4, y=2)

    def found(**changes: Any) -> list[str]:
        first = record("all-gather", ("y",), MIB, 0.0, phase="forward")
        stage = dataclasses.replace(first, **{"result_shape": (128, 64), **changes})
        given = report(stage, networks=networks, promises=(promise(**wires),))
        return [departure.rule for departure in given.departures()]

    assert found() == []
    assert found(dtype="float32") == ["dtype of the all-gather"]
    assert found(result_shape=(64, 128, 5)) == ["all-gathers of no parameter"]
    assert found(axes=("slice",)) == ["all-gathers of no parameter"]
