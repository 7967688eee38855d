"""Programs of several TPU slices: what goes between them, and what the chips of one slice do."""

from __future__ import annotations

import pytest
from test_inspect_compiled import named

from jfsdp.inspect import Collective
from jfsdp.inspect.compiled import compiled_collectives
from jfsdp.inspect.networks import Networks

MATMUL = "%m = f32[16,16] dot(%shard, %shard), lhs_contracting_dims={1}"


def slices(count: int, chips: int, order: tuple[int, ...] | None = None, **axes: int) -> Networks:
    """A mesh of the chips of several slices in this order, that of the slices by default."""
    places = order or tuple(range(count * chips))
    return Networks(
        platform="tpu",
        mesh_axes=tuple(axes.items()),
        islands=tuple(place // chips for place in places),
        devices=tuple(100_000 * (place // chips + 1) + place % chips for place in places),
    )


def transfer(
    kind: str, sent: str, got: str, target: str, operand: str = "%shard", at: str = ""
) -> str:
    """What libtpu writes of a collective between slices, and something beside it."""
    host = (
        'is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
        f'_xla_host_transfer_rendezvous="r{at}",_xla_megascale_target={target},'
        f'_xla_megascale_transfer_type="{kind}"}}'
    )
    return f"""
  %after{at} = token[] after-all()
  %send{at} = ({sent}, u32[]{{:S(2)}}, token[]) send({operand}, %after{at}), channel_id=2, {host}
  %recv{at} = ({got}, u32[]{{:S(2)}}, token[]) recv(%after{at}), channel_id=1, {host}
  BESIDE{at}
  %sent{at} = token[] send-done(%send{at}), channel_id=2, is_host_transfer=true
  BEFORE{at}
  %received{at} = ({got}, token[]) recv-done(%recv{at}), channel_id=1, is_host_transfer=true
  %result{at} = {got} get-tuple-element(%received{at}), index=0"""


def read(entry: str, networks: Networks) -> list[Collective]:
    text = f"""HloModule jit_step, is_scheduled=true, num_partitions=4

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}

ENTRY %main (p0: bf16[16,32], p1: f32[64,32]) -> bf16[16,32] {{
  %shard = bf16[16,32]{{1,0:T(8,128)(2,1)}} parameter(0)
  %grad = f32[64,32]{{1,0:T(8,128)}} parameter(1)
{entry}
  ROOT %out = bf16[16,32] copy(%shard)
}}
"""
    return compiled_collectives(text, dict(networks.mesh_axes), networks)


def one(entry: str, networks: Networks) -> Collective:
    (record,) = read(entry, networks)
    return record


HSDP = slices(2, 4, replica=2, fsdp=4)
FLAT = slices(2, 4, fsdp=8)
PAIR = '"{1,2}x{0:3}"'
WIDE = "bf16[32,32]{1,0:T(8,128)(2,1)}"
SHARD, GRAD = "bf16[16,32]{1,0:T(8,128)(2,1)}", "f32[64,32]{1,0:T(8,128)}"


# --------------------------------------------------------------------------------------------------
# Between slices


@pytest.mark.parametrize(
    ("kind", "sent", "got", "written", "received", "shapes"),
    [
        ("ALL_GATHER", SHARD, WIDE, "all-gather", 1024, ((16, 32), (32, 32))),
        ("REDUCE_SCATTER", GRAD, GRAD.replace("64", "32", 1), "reduce-scatter", 4096, ((64, 32), (32, 32))),
        ("ALL_REDUCE", GRAD, GRAD, "all-reduce", 8192, ((64, 32), (64, 32))),
        ("ALL_TO_ALL", GRAD, GRAD, "all-to-all", 4096, ((64, 32), (64, 32))),
    ],
    ids=["gather", "scatter", "sum", "all-to-all"],
)  # fmt: skip
def test_a_transfer_is_the_collective_that_it_stands_for(
    kind: str, sent: str, got: str, written: str, received: float, shapes: object
) -> None:
    operand = "%shard" if sent == SHARD else "%grad"
    record = one(transfer(kind, sent, got, PAIR, operand), HSDP)
    assert (record.kind, record.axes, record.group_size) == (written, ("replica",), 2)
    assert (record.bytes_per_device, (record.shape, record.result_shape)) == (received, shapes)
    assert record.dtype == ("bfloat16" if sent == SHARD else "float32")
    assert (record.crossing, record.asynchronous, record.groups) == (1.0, True, "")


def test_a_transfer_one_to_one_is_a_permute() -> None:
    pairs = ",".join(f"{{10000{c}->20000{c}}},{{20000{c}->10000{c}}}" for c in range(4))
    record = one(transfer("ONE_TO_ONE", GRAD, GRAD, f"{{{pairs}}}", "%grad"), HSDP)
    assert (record.kind, record.axes, record.bytes_per_device) == (
        "collective-permute",
        ("replica",),
        8192,
    )
    assert record.crossing == 1.0


def test_groups_of_some_slices_are_written_device_by_device() -> None:
    networks = slices(4, 2, a=2, b=2, chip=2)
    groups = "{{100000,300000},{100001,300001},{200000,400000},{200001,400001}}"
    record = one(transfer("ALL_REDUCE", GRAD, GRAD, groups, "%grad"), networks)
    assert (record.axes, record.group_size) == (("a",), 2)


def test_a_mesh_may_have_the_slices_on_an_inner_axis() -> None:
    networks = slices(2, 4, (0, 4, 1, 5, 2, 6, 3, 7), fsdp=4, replica=2)
    record = one(transfer("ALL_REDUCE", GRAD, GRAD, PAIR, "%grad"), networks)
    assert (record.axes, record.crossing) == (("replica",), 1.0)


def test_a_gradient_that_was_bitcast_is_of_its_own_shape() -> None:
    cast = "  %flat = f32[2,8,128]{2,1,0:T(8,128)} bitcast(%grad)\n"
    sent = "f32[2,8,128]{2,1,0:T(8,128)}"
    record = one(cast + transfer("ALL_REDUCE", sent, sent, PAIR, "%flat"), HSDP)
    assert (record.shape, record.bytes_per_device) == ((64, 32), 8192)


def test_a_transfer_has_the_name_of_what_it_sends() -> None:
    name = named("jit(step)/transpose(jvp())/jfsdp_reduce[a.w]/convert_element_type")
    cast = f"  %g = f32[64,32]{{1,0:T(8,128)}} convert(%grad), {name}\n"
    record = one(cast + transfer("ALL_REDUCE", GRAD, GRAD, PAIR, "%g"), HSDP)
    assert (record.leaf, record.phase) == ("a.w", "backward")


@pytest.mark.parametrize(
    ("place", "overlapped"), [("BESIDE", True), ("BEFORE", True), ("AFTER", False)]
)
def test_a_transfer_ends_when_it_is_received(place: str, overlapped: bool) -> None:
    entry = transfer("ALL_REDUCE", GRAD, GRAD, PAIR, "%grad") + "\n  AFTER"
    assert one(entry.replace(place, MATMUL), HSDP).overlapped == overlapped


def test_two_transfers_have_their_own_ends() -> None:
    entry = transfer("ALL_REDUCE", GRAD, GRAD, PAIR, "%grad", "1")
    entry += transfer("ALL_REDUCE", GRAD, GRAD, PAIR, "%grad", "2").replace("BEFORE2", MATMUL)
    assert [record.overlapped for record in read(entry, HSDP)] == [False, True]


def test_an_unknown_kind_of_transfer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"send is a transfer .* unknown kind: GOSSIP"):
        read(transfer("GOSSIP", GRAD, GRAD, PAIR, "%grad"), HSDP)


def test_a_device_that_the_mesh_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"device 300000, which is not in the mesh"):
        read(transfer("ALL_REDUCE", GRAD, GRAD, '"{1,3}x{0:3}"', "%grad"), HSDP)


# --------------------------------------------------------------------------------------------------
# Inside a slice


def gather(groups: str) -> str:
    done = f"replica_groups={groups}, dimensions={{0}}, use_global_device_ids=true"
    return f"  %g = bf16[64,32]{{1,0:T(8,128)(2,1)}} all-gather(%shard), channel_id=1, {done}"


@pytest.mark.parametrize("groups", ["{{0,1,2,3}}", "{}", "[1,4]<=[4]", "mesh['x'=4] {'x'}"])
def test_chips_are_numbered_inside_their_slice(groups: str) -> None:
    record = one(gather(groups), HSDP)
    assert (record.axes, record.group_size, record.groups) == (("fsdp",), 4, "")
    assert (record.bytes_per_device, record.crossing) == (3 * 16 * 32 * 2, 0.0)


def test_chips_are_numbered_in_the_order_of_the_mesh() -> None:
    networks = slices(2, 4, (0, 1, 4, 5, 2, 3, 6, 7), a=2, slice=2, b=2)
    assert one(gather("{{0,2},{1,3}}"), networks).axes == ("a",)
    assert one(gather("{{0,1},{2,3}}"), networks).axes == ("b",)


def test_a_gather_over_one_axis_of_both_slices_has_a_part_on_each_network() -> None:
    between = transfer("ALL_GATHER", SHARD, WIDE, PAIR)
    inside = gather("{{0,1,2,3}}").replace("%shard", "%result")
    inside = inside.replace("bf16[64,32]", "bf16[2,64,32]")
    records = read(f"{between}\n{inside}", FLAT)
    found = [(r.axes, r.group_size, r.bytes_per_device, r.crossing) for r in records]
    # Of eight shards of 1024 bytes: one from the other slice, and two from each of three neighbors.
    assert found == [(("fsdp",), 2, 1024, 1.0), (("fsdp",), 4, 6144, 0.0)]


def test_a_permute_inside_a_slice_has_its_axis() -> None:
    pairs = "source_target_pairs={{0,1},{1,0},{2,3},{3,2}}"
    networks = slices(2, 4, slice=2, a=2, b=2)
    record = one(f"  %p = f32[64,32] collective-permute(%grad), channel_id=1, {pairs}", networks)
    assert (record.axes, record.crossing) == (("b",), 0.0)


def test_groups_that_are_no_part_of_an_axis_are_kept_as_text() -> None:
    record = one(gather("{{0,3},{1,2}}"), HSDP)
    assert (record.axes, record.groups, record.group_size) == ((), "{{0,3},{1,2}}", 2)


def test_a_gather_without_a_name_has_the_phase_of_what_uses_the_weight() -> None:
    """What is gathered again for the backward may be a shard that the forward kept."""
    kept = (
        f"  %kept = {SHARD} copy(%shard), {named('jit(step)/jvp()/jfsdp_gather[a.w]/all_gather')}\n"
    )
    backward = named("jit(step)/transpose(jvp())/dot_general")
    use = f"\n  %b = {SHARD.replace('16', '64')} bitcast(%g)\n  %d = f32[64,64] dot(%b, %b), {backward}"
    record = one(kept + gather("{{0,1,2,3}}").replace("%shard", "%kept") + use, HSDP)
    assert (record.leaf, record.phase) == ("a.w", "backward")
    assert one(kept + gather("{{0,1,2,3}}").replace("%shard", "%kept"), HSDP).phase == "forward"
