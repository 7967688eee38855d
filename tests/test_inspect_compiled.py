"""What compilers make of collectives, and how the inspector finds them again."""

from __future__ import annotations

import functools
import gc
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import Op, make_mesh, mean_square, mlp, stablehlo_ops
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_topology import needs_gpu_compiler, needs_tpu_compiler

import jfsdp
from jfsdp.inspect import Collective, collectives
from jfsdp.inspect.compiled import compiled_collectives
from jfsdp.inspect.hlo import Module
from jfsdp.inspect.read import lower
from jfsdp.inspect.topology import compiler_options

ALL = "replica_groups=mesh['fsdp'=8] {'fsdp'}, use_global_device_ids=true"
GATHER = f"channel_id=1, {ALL}, dimensions={{0}}"
SUM = f"channel_id=1, {ALL}, to_apply=%add"
SCATTER = f"channel_id=1, {ALL}, dimensions={{0}}, to_apply=%add"


def read(entry: str, computations: str = "", **axis_sizes: int) -> list[Collective]:
    """What a program communicates: `entry` with a shard, a weight, a gradient and a count."""
    text = f"""HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}
{computations}
ENTRY %main (p0: bf16[16,32], p1: bf16[128,32], p2: f32[128,32], p3: s32[]) -> f32[] {{
  %shard = bf16[16,32]{{1,0:T(8,128)(2,1)}} parameter(0)
  %weight = bf16[128,32]{{1,0:T(8,128)(2,1)}} parameter(1)
  %grad = f32[128,32]{{1,0:T(8,128)}} parameter(2)
  %count = s32[] parameter(3)
{entry}
}}
"""
    return compiled_collectives(text, axis_sizes or {"fsdp": 8})


def one(entry: str, computations: str = "", **axis_sizes: int) -> Collective:
    (record,) = read(entry, computations, **axis_sizes)
    return record


def named(op_name: str) -> str:
    return f'metadata={{op_name="{op_name}" stack_frame_id=1}}'


# --------------------------------------------------------------------------------------------------
# One collective


@pytest.mark.parametrize(
    ("line", "kind", "dtype", "result_shape", "received"),
    [
        (f"bf16[128,32] all-gather(%shard), {GATHER}", "all-gather", "bfloat16", (128, 32), 7168),
        (f"f32[16,32] reduce-scatter(%grad), {SCATTER}", "reduce-scatter", "float32", (16, 32), 14336),
        (f"f32[128,32] all-reduce(%grad), {SUM}", "all-reduce", "float32", (128, 32), 28672),
        (f"f32[128,32] all-to-all(%grad), {GATHER}", "all-to-all", "float32", (128, 32), 14336),
        (
            "f32[128,32] collective-permute(%grad), source_target_pairs={{0,1},{1,0}}",
            "collective-permute",
            "float32",
            (128, 32),
            16384,
        ),
        (
            f"f32[128,32] collective-broadcast(%grad), {ALL}",
            "collective-broadcast",
            "float32",
            (128, 32),
            16384,
        ),
    ],
)  # fmt: skip
def test_each_kind_has_its_shapes_and_ring_bytes(
    line: str, kind: str, dtype: str, result_shape: tuple[int, ...], received: int
) -> None:
    record = one(f"  ROOT %found = {line}, {named('jit(step)/x')}")
    shape = (16, 32) if kind == "all-gather" else (128, 32)
    expected = Collective(
        kind, ("fsdp",), dtype, shape, result_shape, 8, 1, received,
        phase="forward", instruction="found",
    )  # fmt: skip
    assert record == expected


def test_a_gather_along_another_dimension_grows_that_one() -> None:
    line = f"  ROOT %g = bf16[16,256] all-gather(%shard), {ALL}, dimensions={{1}}"
    assert one(line).result_shape == (16, 256)


@pytest.mark.parametrize(
    ("groups", "axes", "size"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("f",), 4),
        ("[4,2]<=[2,4]T(1,0)", ("r",), 2),
        ("mesh['r'=2,'f'=4] {'f','r'}", ("r", "f"), 8),
        ("mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'x'}", ("f",), 4),
        ("{}", ("r", "f"), 8),
    ],
)
def test_the_axes_of_every_spelling_of_groups_are_named(
    groups: str, axes: tuple[str, ...], size: int
) -> None:
    line = f"  ROOT %r = f32[128,32] all-reduce(%grad), replica_groups={groups}, to_apply=%add"
    record = one(line, r=2, f=4)
    assert (record.axes, record.group_size, record.groups) == (axes, size, "")


def test_no_groups_stand_for_all_devices() -> None:
    record = one("  ROOT %r = f32[128,32] all-reduce(%grad), to_apply=%add", r=2, f=4)
    assert (record.axes, record.group_size) == (("r", "f"), 8)


@pytest.mark.parametrize("groups", ["{{0,2},{1,3},{4,6},{5,7}}", "mesh['f'=8] {'f':(2)2}"])
def test_groups_that_no_axes_explain_are_kept_as_text(groups: str) -> None:
    line = f"  ROOT %r = f32[128,32] all-reduce(%grad), replica_groups={groups}, to_apply=%add"
    record = one(line, r=2, f=4)
    assert (record.axes, record.group_size, record.groups) == ((), 2, groups)


def test_an_unknown_spelling_of_groups_is_refused() -> None:
    line = "  ROOT %r = f32[128,32] all-reduce(%grad), replica_groups=<all>, to_apply=%add"
    with pytest.raises(ValueError, match="device groups written in an unknown way: <all>"):
        read(line)


def test_a_permute_has_the_axes_that_it_moves_along_and_their_size() -> None:
    pairs = "{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"
    line = f"  ROOT %p = f32[128,32] collective-permute(%grad), source_target_pairs={pairs}"
    record = one(line, r=2, f=4)
    assert (record.axes, record.group_size, record.groups) == (("f",), 4, "")


def test_collectives_of_one_channel_are_different_ones() -> None:
    records = read(f"""
  %a = f32[128,32] all-reduce(%grad), {SUM}
  ROOT %b = f32[128,32] all-reduce(%a), {SUM}""")
    assert [record.instruction for record in records] == ["a", "b"]


def test_a_sum_of_bfloat16_that_is_widened_on_the_way_is_of_float32() -> None:
    line = f"(f32[128,32], f32[16,32]) all-reduce(%weight, %shard), {SUM}"
    records = read(f"  ROOT %r = {line}")
    assert [(r.dtype, r.shape, r.bytes_per_device) for r in records] == [
        ("float32", (128, 32), 2 * 7 / 8 * 16384),
        ("float32", (16, 32), 2 * 7 / 8 * 2048),
    ]


def test_a_text_that_is_no_program_is_refused() -> None:
    with pytest.raises(ValueError, match="no ENTRY"):
        compiled_collectives("module @jit_step {}", {"fsdp": 8})


def test_a_program_is_let_go_once_it_is_read() -> None:
    def programs() -> int:
        gc.collect()
        return sum(isinstance(each, Module) for each in gc.get_objects())

    before = programs()
    read(f"  ROOT %s = f32[16,32] reduce-scatter-start(%grad), {SCATTER}")
    assert programs() == before


# --------------------------------------------------------------------------------------------------
# Several in one instruction


def test_a_combined_collective_has_a_record_for_each_operand() -> None:
    line = f"(bf16[128,32], bf16[1024,32]) all-gather(%shard, /*index=1*/%weight), {GATHER}"
    records = read(f"  ROOT %g = {line}")
    assert [(r.shape, r.result_shape, r.instruction) for r in records] == [
        ((16, 32), (128, 32), "g"),
        ((128, 32), (1024, 32), "g"),
    ]


def test_names_that_were_merged_go_to_the_operands_in_order() -> None:
    names = ":".join(f"jfsdp_gather[{leaf}]/all_gather" for leaf in ("b.w", "a.w"))
    line = f"(bf16[128,32], bf16[1024,32]) all-gather(%shard, %weight), {GATHER}"
    records = read(f"  ROOT %g = {line}, {named(f'jit(step)/jvp()/({names})')}")
    assert [(r.leaf, r.shape, r.phase, r.written) for r in records] == [
        ("b.w", (16, 32), "forward", ""),
        ("a.w", (128, 32), "forward", ""),
    ]


def test_the_name_of_one_operand_is_not_given_to_the_others() -> None:
    line = f"(bf16[128,32], bf16[1024,32]) all-gather(%shard, %weight), {GATHER}"
    name = named("jit(step)/jvp(jfsdp_gather[a.w])/all_gather")
    assert [r.leaf for r in read(f"  ROOT %g = {line}, {name}")] == ["", ""]


def test_operands_without_a_name_have_that_of_their_cast() -> None:
    records = read(f"""
  %cast = f32[128,32] convert(%weight), {named("jit(step)/jfsdp_reduce[a.w]/convert_element_type")}
  %same = f32[128,32] bitcast(%cast)
  %plain = f32[128,32] negate(%grad), {named("jit(step)/neg")}
  ROOT %s = (f32[16,32], f32[16,32]) reduce-scatter(%same, %plain), {SCATTER}""")
    assert [r.leaf for r in records] == ["a.w", ""]


def test_a_cast_behind_something_else_does_not_give_its_name() -> None:
    cast = named("jit(step)/jfsdp_reduce[a.w]/convert_element_type")
    record = one(f"""
  %cast = f32[128,32] convert(%weight), {cast}
  %more = f32[128,32] negate(%cast)
  ROOT %s = f32[16,32] reduce-scatter(%more), {SCATTER}""")
    assert record.leaf == ""


def test_a_fusion_of_several_results_does_not_give_the_name_of_one() -> None:
    name = named("jit(step)/jfsdp_reduce[a.w]/convert_element_type")
    record = one(
        f"""
  %both = (f32[128,32], f32[128,32]) fusion(%grad), kind=kLoop, calls=%two, {name}
  %second = f32[128,32] get-tuple-element(%both), index=1
  ROOT %s = f32[16,32] reduce-scatter(%second), {SCATTER}""",
        """
%two (q: f32[128,32]) -> (f32[128,32], f32[128,32]) {
  %q = f32[128,32] parameter(0)
  ROOT %t = (f32[128,32], f32[128,32]) tuple(%q, %q)
}""",
    )
    assert record.leaf == ""


PACKING = """
%pack (q: f32[128,32]) -> f32[8192] {
  %q = f32[128,32] parameter(0)
  %flat = f32[4096] bitcast(%q)
  %both = f32[8192] concatenate(%flat, %flat), dimensions={0}
  ROOT %again = f32[8192] bitcast(%both)
}"""


@pytest.mark.parametrize(
    "packed",
    [
        "f32[8192] concatenate(%flat, %flat), dimensions={0}",
        "f32[8192] fusion(%grad), kind=kLoop, calls=%pack",
    ],
)
def test_several_gradients_packed_into_one_have_no_leaf(packed: str) -> None:
    name = named("jit(step)/transpose(jvp())/jfsdp_reduce[a.w]/psum")
    record = one(
        f"""
  %flat = f32[4096] bitcast(%grad)
  %packed = {packed}
  %once.more = f32[8192] bitcast(%packed)
  ROOT %r = f32[8192] all-reduce(%once.more), {SUM}, {name}""",
        PACKING,
    )
    assert (record.leaf, record.phase) == ("", "backward")


# --------------------------------------------------------------------------------------------------
# Names: phase, leaf, what was written


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("jit(step)/jvp(jit(f))/dot_general", "forward"),
        ("jit(step)/transpose(jvp(jit(f)))/dot_general", "backward"),
        ("jit(step)/checkpoint/rematted_computation/dot_general", "backward"),
        ("jit(step)/reduce_sum", "update"),
        ("", ""),
    ],
)
def test_the_phase_is_that_of_the_name(name: str, phase: str) -> None:
    record = one(f"""
  %backward = f32[128,32] negate(%grad), {named("jit(step)/transpose(jvp())/neg")}
  ROOT %r = f32[128,32] all-reduce(%grad), {SUM}, {named(name)}""")
    assert record.phase == phase


def test_a_program_without_a_backward_has_no_update() -> None:
    line = f"f32[128,32] all-reduce(%grad), {SUM}, {named('jit(step)/reduce_sum')}"
    assert one(f"  ROOT %r = {line}").phase == "forward"


def test_a_collective_without_a_name_has_the_phase_of_what_it_adds_up() -> None:
    record = one(f"""
  %made = f32[128,32] negate(%grad), {named("jit(step)/transpose(jvp())/dot_general")}
  %copied = f32[128,32] copy(%made)
  ROOT %r = f32[128,32] all-reduce(%copied), {SUM}""")
    assert record.phase == "backward"


def test_a_reduction_without_a_name_has_the_leaf_of_its_sum() -> None:
    name = named("jit(step)/transpose(jvp())/jfsdp_reduce[a.w]/add")
    region = f"""
%region_1.2 (x.1: f32[], y.1: f32[]) -> f32[] {{
  %x.1 = f32[] parameter(0)
  %y.1 = f32[] parameter(1)
  ROOT %sum.1 = f32[] add(%x.1, %y.1), {name}
}}"""
    line = f"f32[16,32] reduce-scatter(%grad), {ALL}, dimensions={{0}}, to_apply=%region_1.2"
    record = one(f"  ROOT %s = {line}", region)
    assert (record.leaf, record.phase) == ("a.w", "backward")


@pytest.mark.parametrize(
    ("primitive", "written"),
    [
        ("jfsdp_gather[a.w]/all_gather", "all-gather"),
        ("psum_scatter", "reduce-scatter"),
        ("jvp(psum_invariant)", ""),
        ("dot_general", ""),
    ],
)
def test_what_was_written_is_told_where_the_compiler_emits_something_else(
    primitive: str, written: str
) -> None:
    name = named(f"jit(step)/jvp()/{primitive}")
    record = one(f"  ROOT %r = f32[128,32] all-reduce(%grad), {SUM}, {name}")
    assert (record.written, record.purpose) == (written, written or "all-reduce")


def test_a_gather_by_permutes_is_written_a_gather() -> None:
    pairs = "source_target_pairs={{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}"
    name = named("jit(step)/jvp()/jfsdp_gather[a.w]/all_gather")
    record = one(f"  ROOT %p = bf16[16,32] collective-permute(%shard), {pairs}, {name}")
    assert (record.written, record.leaf) == ("all-gather", "a.w")


# --------------------------------------------------------------------------------------------------
# What TPUs make of them


def part_in_place(index: str, name: str = "") -> str:
    """An all-reduce of arrays that are zero but for 16 numbers each."""
    return f"""
  %zeros = f32[128] constant({{...}})
  %own = f32[16] constant({{...}})
  %replica-id = u32[] replica-id()
  %partition-id = u32[] partition-id()
  %by = u32[] constant(16)
  %linear = u32[] add(%replica-id, %partition-id)
  %offset = u32[] multiply(%linear, %by)
  %dynamic-update-slice.1 = f32[128] dynamic-update-slice(%zeros, %own, {index})
  ROOT %all-reduce.7 = f32[128] all-reduce(%dynamic-update-slice.1), {SUM}{name}"""


def test_a_small_gather_by_an_all_reduce_is_written_a_gather() -> None:
    record = one(part_in_place("%offset", f", {named('jit(step)/jfsdp_gather[a.b]/all_gather')}"))
    assert (record.kind, record.written, record.leaf) == ("all-reduce", "all-gather", "a.b")


def test_a_small_gather_whose_name_is_lost_is_known_by_its_own_part() -> None:
    record = one(part_in_place("%offset"))
    assert (record.kind, record.written, record.purpose) == (
        "all-reduce",
        "all-gather",
        "all-gather",
    )


def test_a_sum_of_arrays_that_are_filled_at_the_same_place_is_no_gather() -> None:
    assert one(part_in_place("%by")).written == ""


# As libtpu writes it: the collective has no name, the fusion that calls it has.
TPU_SCATTER = f"""
%all-reduce-scatter.2.clone (input.2: f32[124,32]) -> f32[16,32] {{
  %input.2 = f32[124,32]{{1,0:T(8,128)S(1)}} parameter(0)
  %nothing = f32[] constant(0)
  %pad = f32[128,32]{{1,0:T(8,128)}} pad(%input.2, %nothing), padding=0_4x0_0
  %all-reduce.3 = f32[128,32]{{1,0:T(8,128)}} all-reduce(%pad), {SUM}
  %partition-id.5 = u32[] partition-id()
  %size = u32[] constant(16)
  %at = u32[]{{:T(128)}} multiply(%partition-id.5, %size)
  %origin = u32[] constant(0)
  ROOT %own = f32[16,32]{{1,0}} dynamic-slice(%all-reduce.3, %at, %origin), dynamic_slice_sizes={{16,32}}
}}"""
SCATTERED = (
    "%fusion.1 = f32[16,32] fusion(%gradient), kind=kCustom, calls=%all-reduce-scatter.2.clone"
)
REDUCE_NAME = named("jit(step)/transpose(jvp())/jfsdp_reduce[a.w]/dot_general")


def test_a_fused_all_reduce_of_which_each_keeps_a_part_is_a_reduce_scatter() -> None:
    record = one(
        f"  %gradient = f32[124,32] copy(%grad)\n  ROOT {SCATTERED}, {REDUCE_NAME}", TPU_SCATTER
    )
    assert record == Collective(
        "reduce-scatter", ("fsdp",), "float32", (124, 32), (16, 32), 8, 1, 7 / 8 * 128 * 32 * 4,
        phase="backward", leaf="a.w", instruction="all-reduce.3", padding=7 / 8 * 4 * 32 * 4,
        role="reduce",
    )  # fmt: skip


def test_a_fused_reduce_scatter_counts_as_often_as_the_loop_that_calls_it() -> None:
    body = f"""{TPU_SCATTER}
%body (b: (s32[], f32[124,32], f32[16,32])) -> (s32[], f32[124,32], f32[16,32]) {{
  %b = (s32[], f32[124,32], f32[16,32]) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %gradient = f32[124,32] get-tuple-element(%b), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  {SCATTERED}, {REDUCE_NAME}
  ROOT %out = (s32[], f32[124,32], f32[16,32]) tuple(%next, %gradient, %fusion.1)
}}
%condition (t: (s32[], f32[124,32], f32[16,32])) -> pred[] {{
  %t = (s32[], f32[124,32], f32[16,32]) parameter(0)
  %c = s32[] get-tuple-element(%t), index=0
  %n = s32[] constant(6)
  ROOT %lt = pred[] compare(%c, %n), direction=LT
}}"""
    record = one(
        """
  %zero = s32[] constant(0)
  %a = f32[124,32] copy(%grad)
  %o = f32[16,32] copy(%shard)
  %tuple = (s32[], f32[124,32], f32[16,32]) tuple(%zero, %a, %o)
  ROOT %while = (s32[], f32[124,32], f32[16,32]) while(%tuple), condition=%condition, body=%body""",
        body,
    )
    found = (record.kind, record.executions, record.in_loop, record.phase, record.leaf)
    assert found == ("reduce-scatter", 6, True, "backward", "a.w")


PADDING = "source_target_pairs={{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7}}"


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("", "reduce-scatter"),
        (REDUCE_NAME, "reduce-scatter"),
        (named("jit(step)/transpose(jvp())/ppermute"), ""),
    ],
)
def test_a_permute_after_a_reduce_scatter_moves_its_padding_unless_it_was_written(
    name: str, written: str
) -> None:
    start = "(f32[4,32], f32[4,32], u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%slice)"
    _, permute = read(
        f"""
  %gradient = f32[124,32] copy(%grad)
  {SCATTERED}
  %slice = f32[4,32] slice(%fusion.1), slice={{[12:16], [0:32]}}
  %start = {start}, channel_id=1, {PADDING}, {name}
  ROOT %done = f32[4,32] collective-permute-done(%start)""",
        TPU_SCATTER,
    )
    assert (permute.kind, permute.written) == ("collective-permute", written)
    assert (permute.shape, permute.bytes_per_device) == ((4, 32), 4 * 32 * 4)


def test_a_permute_of_something_else_moves_no_padding() -> None:
    assert one(f"  ROOT %p = f32[128,32] collective-permute(%grad), {PADDING}").written == ""


def chain(*members: str, ids: str = "0") -> tuple[str, str]:
    """A gather that TPUs spread over fusions, in each of which it stands: entry, computations."""
    parts, calls = [], []
    for number, multiplies in enumerate(members):
        matmul = "  %dot = f32[128,128] convolution(%q, %q), dim_labels=bf_io->bf\n"
        gather = f"all-gather(%q), {ALL}, dimensions={{0}}, frontend_attributes={{chain_id="
        name = named("jit(step)/jvp()/jfsdp_gather[a.w]/all_gather")
        parts.append(f"""
%part.{ids}.{number} (q: bf16[16,32]) -> bf16[128,32] {{
  %q = bf16[16,32]{{1,0}} parameter(0)
{matmul if multiplies else ""}  %g.{ids}.{number} = bf16[128,32]{{1,0}} {gather}"{ids}"}}, {name}
  ROOT %c = bf16[128,32]{{1,0}} custom-call(%g.{ids}.{number}), custom_call_target="AsyncCollectivePart"
}}""")
        calls.append(
            f"  %fusion.{ids}.{number} = bf16[128,32] fusion(%shard), kind=kCustom, "
            f"calls=%part.{ids}.{number}"
        )
    return "\n".join(calls), "".join(parts)


@pytest.mark.parametrize(
    ("members", "overlapped"),
    [(("", "", ""), False), (("", "matmul", ""), True), (("", "", "matmul", ""), True)],
)
def test_a_gather_spread_over_fusions_is_one_and_overlaps_their_matmuls(
    members: tuple[str, ...], overlapped: bool
) -> None:
    record = one(*chain(*members))
    assert (record.instruction, record.leaf, record.phase) == ("g.0.0", "a.w", "forward")
    assert (record.asynchronous, record.overlapped) == (True, overlapped)


def test_two_gathers_spread_over_fusions_are_two() -> None:
    first, second = chain("", "matmul", ""), chain("", "", ids="1")
    records = read(f"{first[0]}\n{second[0]}", first[1] + second[1])
    assert [(r.instruction, r.overlapped) for r in records] == [("g.0.0", True), ("g.1.0", False)]


def test_a_gather_that_goes_on_in_a_loop_is_one_and_overlaps_its_matmuls() -> None:
    (start, inside, end), parts = (
        chain("", "matmul", "")[0].splitlines(),
        chain("", "matmul", "")[1],
    )
    loop = f"""
%body (shard: bf16[16,32]) -> bf16[16,32] {{
  %shard = bf16[16,32] parameter(0)
{inside}
  ROOT %same = bf16[16,32] copy(%shard)
}}
%always (s: bf16[16,32]) -> pred[] {{
  %s = bf16[16,32] parameter(0)
  ROOT %yes = pred[] constant(true)
}}"""
    config = 'backend_config={"known_trip_count":{"n":"5"}}'
    line = f"bf16[16,32] while(%shard), condition=%always, body=%body, {config}"
    record = one(f"{start}\n  %loop = {line}\n{end}", parts + loop)
    assert (record.executions, record.in_loop) == (1, False)
    assert (record.asynchronous, record.overlapped) == (True, True)


def test_a_gather_fused_in_one_piece_does_not_run_beside_anything() -> None:
    entry, computations = chain("matmul")
    record = one(entry, computations.replace("chain_id=", "other="))
    assert (record.asynchronous, record.overlapped) == (False, False)


# --------------------------------------------------------------------------------------------------
# Asynchronous ones


STARTED = [
    (
        f"(bf16[16,32]{{1,0}}, bf16[128,32]{{1,0}}) all-gather-start(%shard), {GATHER}",
        "bf16[128,32]{1,0} all-gather-done(%start)",
        [("all-gather", "bfloat16", (16, 32), (128, 32))],
    ),
    (
        "((bf16[16,32]{1,0}, bf16[128,32]{1,0}), (bf16[128,32]{1,0}, bf16[1024,32]{1,0})) "
        f"all-gather-start(%shard, %weight), {GATHER}",
        "(bf16[128,32]{1,0}, bf16[1024,32]{1,0}) all-gather-done(%start)",
        [
            ("all-gather", "bfloat16", (16, 32), (128, 32)),
            ("all-gather", "bfloat16", (128, 32), (1024, 32)),
        ],
    ),
    (
        f"((f32[128,32]{{1,0}}), f32[16,32]{{1,0}}) reduce-scatter-start(%grad), {SCATTER}",
        "f32[16,32]{1,0} reduce-scatter-done(%start)",
        [("reduce-scatter", "float32", (128, 32), (16, 32))],
    ),
    (
        f"f32[128,32]{{1,0}} all-reduce-start(%grad), {SUM}",
        "f32[128,32]{1,0} all-reduce-done(%start)",
        [("all-reduce", "float32", (128, 32), (128, 32))],
    ),
    (
        f"(f32[128,32]{{1,0}}, bf16[16,32]{{1,0}}) all-reduce-start(%grad, %shard), {SUM}",
        "(f32[128,32]{1,0}, bf16[16,32]{1,0}) all-reduce-done(%start)",
        [
            ("all-reduce", "float32", (128, 32), (128, 32)),
            ("all-reduce", "bfloat16", (16, 32), (16, 32)),
        ],
    ),
    (
        "(f32[128,32]{1,0}, f32[128,32]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) "
        f"collective-permute-start(%grad), {PADDING}",
        "f32[128,32]{1,0} collective-permute-done(%start)",
        [("collective-permute", "float32", (128, 32), (128, 32))],
    ),
    (
        "((f32[128,32]{1,0}), f32[16,32]{1,0}, u32[]) async-start(%grad), calls=%wrapped",
        "f32[16,32]{1,0} async-done(%start)",
        [("reduce-scatter", "float32", (128, 32), (16, 32))],
    ),
]
WRAPPED = f"""
%wrapped (q: f32[128,32]) -> f32[16,32] {{
  %q = f32[128,32]{{1,0}} parameter(0)
  ROOT %inner = f32[16,32]{{1,0}} reduce-scatter(%q), {SCATTER}
}}, execution_thread="async"
%matmul (q.1: bf16[16,32]) -> f32[16,16] {{
  %q.1 = bf16[16,32]{{1,0}} parameter(0)
  %half = f32[16,32]{{1,0}} convert(%q.1)
  ROOT %dot.1 = f32[16,16]{{1,0}} dot(%half, %half), lhs_contracting_dims={{1}}
}}
%outer (q.2: bf16[16,32]) -> f32[16,16] {{
  %q.2 = bf16[16,32]{{1,0}} parameter(0)
  ROOT %nested = f32[16,16]{{1,0}} fusion(%q.2), kind=kOutput, calls=%matmul
}}
%sine (q.3: bf16[16,32]) -> bf16[16,32] {{
  %q.3 = bf16[16,32]{{1,0}} parameter(0)
  ROOT %sin = bf16[16,32]{{1,0}} sine(%q.3)
}}
%forever (q.4: bf16[16,32]) -> pred[] {{
  %q.4 = bf16[16,32]{{1,0}} parameter(0)
  ROOT %yes = pred[] constant(true)
}}"""
started = pytest.mark.parametrize(
    ("start", "done", "found"),
    STARTED,
    ids=[case[1].split("(%")[0].split()[-1] for case in STARTED],
)


@started
def test_a_start_is_the_collective_and_its_done_is_none(
    start: str, done: str, found: list[Any]
) -> None:
    records = read(f"  %start = {start}\n  ROOT %done = {done}", WRAPPED)
    assert [(r.kind, r.dtype, r.shape, r.result_shape) for r in records] == found
    assert all(r.asynchronous and not r.overlapped for r in records)


MATMUL = "%m = f32[16,16] dot(%shard, %shard), lhs_contracting_dims={1}"


@started
def test_a_matmul_between_start_and_done_overlaps(start: str, done: str, found: list[Any]) -> None:
    records = read(f"  %start = {start}\n  {MATMUL}\n  ROOT %done = {done}", WRAPPED)
    assert [(r.asynchronous, r.overlapped) for r in records] == [(True, True)] * len(found)


@started
def test_a_matmul_before_start_or_after_done_does_not_overlap(
    start: str, done: str, found: list[Any]
) -> None:
    after = MATMUL.replace("%m", "ROOT %n")
    records = read(f"  {MATMUL}\n  %start = {start}\n  %done = {done}\n  {after}", WRAPPED)
    assert [(r.asynchronous, r.overlapped) for r in records] == [(True, False)] * len(found)


@pytest.mark.parametrize(
    ("line", "multiplies"),
    [
        ("f32[16,16] dot(%shard, %shard), lhs_contracting_dims={1}", True),
        ("f32[16,16] convolution(%shard, %shard), dim_labels=bf_oi->bf", True),
        ("f32[16,16] fusion(%shard), kind=kOutput, calls=%matmul", True),
        ("f32[16,16] fusion(%shard), kind=kOutput, calls=%outer", True),
        ("((bf16[16,32]), f32[16,16], u32[]) fusion-start(%shard), calls=%outer", True),
        ("f32[16,16] call(%shard), to_apply=%matmul", True),
        ("f32[16,16] while(%shard), condition=%forever, body=%matmul", True),
        ("f32[16,16] conditional(%count, %shard), branch_computations={%sine, %matmul}", True),
        ('f32[16,16] custom-call(%shard), custom_call_target="__cublas$lt$matmul"', True),
        ('f32[16,16] custom-call(%shard), custom_call_target="tpu_custom_call"', True),
        ('f32[16,16] custom-call(%shard), custom_call_target="AllocateBuffer"', False),
        ("bf16[16,32] fusion(%shard), kind=kLoop, calls=%sine", False),
        ("bf16[16,32] while(%shard), condition=%forever, body=%sine", False),
        ("bf16[16,32] copy(%shard)", False),
    ],
)
def test_what_multiplies_matrices_overlaps_and_the_rest_does_not(
    line: str, multiplies: bool
) -> None:
    start, done, _ = STARTED[0]
    record = one(f"  %start = {start}\n  %beside = {line}\n  ROOT %done = {done}", WRAPPED)
    assert record.overlapped == multiplies


# --------------------------------------------------------------------------------------------------
# How often


def repeated(n: str, inner: str, *, name: str = "", counted: bool = True) -> str:
    """A body that sums, the condition of its loop, and a computation that runs it `n` times."""
    config = f', backend_config={{"known_trip_count":{{"n":"{n}"}}}}' if counted else ""
    return f"""
%body{name} (b{name}: f32[128,32]) -> f32[128,32] {{
  %b{name} = f32[128,32] parameter(0)
{inner.replace("%in", f"%b{name}")}
}}
%go{name} (t{name}: f32[128,32]) -> pred[] {{
  %t{name} = f32[128,32] parameter(0)
  ROOT %and{name} = pred[] constant(true)
}}
%run{name} (r{name}: f32[128,32]) -> f32[128,32] {{
  %r{name} = f32[128,32] parameter(0)
  ROOT %w{name} = f32[128,32] while(%r{name}), condition=%go{name}, body=%body{name}{config}
}}"""


SUMMED = f"  ROOT %r = f32[128,32] all-reduce(%in), {SUM}"
RUN = "  ROOT %c = f32[128,32] call(%grad), to_apply=%run"


def test_a_collective_in_a_loop_counts_as_often_as_it_runs() -> None:
    record = one(RUN, repeated("5", SUMMED))
    assert (record.executions, record.in_loop, record.unknown_trips) == (5, True, False)
    assert record.total_bytes == 5 * record.bytes_per_device


def test_loops_in_loops_multiply() -> None:
    inner = repeated("3", SUMMED, name=".1")
    outer = repeated("5", "  ROOT %c.1 = f32[128,32] call(%in), to_apply=%run.1")
    assert one(RUN, inner + outer).executions == 15


def test_an_iteration_that_was_taken_out_of_its_loop_counts_beside_it() -> None:
    first = f"  %first = f32[128,32] all-reduce(%grad), {SUM}\n"
    records = read(first + RUN.replace("%grad", "%first"), repeated("3", SUMMED))
    assert [(r.executions, r.in_loop) for r in records] == [(1, False), (3, True)]


def test_a_loop_of_unknown_length_counts_once_and_says_so() -> None:
    inner = repeated("3", SUMMED, name=".1")
    outer = repeated("", "  ROOT %c.1 = f32[128,32] call(%in), to_apply=%run.1", counted=False)
    record = one(RUN, inner + outer)
    assert (record.executions, record.in_loop, record.unknown_trips) == (3, True, True)


def test_the_condition_of_a_loop_runs_once_more_than_its_body() -> None:
    text = repeated("5", SUMMED)
    summing = f"  %often = f32[128,32] all-reduce(%t), {SUM}\n  ROOT %and"
    records = read(RUN, text.replace("  ROOT %and", summing))
    assert {r.instruction: r.executions for r in records} == {"often": 6, "r": 5}


def test_a_loop_that_never_runs_does_not_count() -> None:
    assert read(RUN, repeated("0", SUMMED)) == []


def test_every_branch_of_a_conditional_counts_once() -> None:
    branches = "".join(
        f"""
%branch.{name} (q.{name}: f32[128,32]) -> f32[128,32] {{
  %q.{name} = f32[128,32] parameter(0)
  ROOT %{name} = f32[128,32] all-reduce(%q.{name}), {SUM}
}}"""
        for name in ("yes", "no")
    )
    chosen = "conditional(%count, %grad, %grad), branch_computations={%branch.yes, %branch.no}"
    records = read(f"  ROOT %if = f32[128,32] {chosen}", branches)
    assert [(r.instruction, r.executions) for r in records] == [("yes", 1), ("no", 1)]


def test_a_function_counts_for_each_of_its_calls_and_not_if_nobody_calls_it() -> None:
    calls = "  %d = f32[128,32] call(%grad), to_apply=%run\n" + RUN.replace("%grad", "%d")
    records = read(calls, repeated("5", SUMMED) + repeated("7", SUMMED, name=".unused"))
    assert [r.executions for r in records] == [5, 5]


def test_a_collective_in_a_loop_without_a_name_has_the_phase_of_the_loop() -> None:
    while_name = f"body=%body, {named('jit(step)/transpose(jvp())/while')}"
    record = one(RUN, repeated("5", SUMMED).replace("body=%body", while_name))
    assert record.phase == "backward"


# --------------------------------------------------------------------------------------------------
# Programs of which every collective is known, as each compiler leaves them

WIDTH, LAYERS = 1024, 4
on_every_target = pytest.mark.parametrize(
    "target",
    [
        "cpu",
        pytest.param("v5e:2x4", marks=needs_tpu_compiler),
        pytest.param("h100:8", marks=needs_gpu_compiler),
    ],
)
in_both_forms = pytest.mark.parametrize("form", ["unrolled", "scanned"])


def mesh_on(target: str, **sizes: int) -> Mesh:
    devices = jax.devices() if target == "cpu" else jfsdp.topology(target)
    auto = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=devices, axis_types=auto)


def read_compiled(function: Any, mesh: Mesh, *arrays: tuple[Any, Any, P]) -> list[Collective]:
    """What the compiler makes of a function of arrays of these shapes, dtypes and specs."""
    structs = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in arrays
    ]
    options = compiler_options(mesh) or None
    text = jax.jit(function).lower(*structs).compile(compiler_options=options).as_text()
    return compiled_collectives(text, dict(mesh.shape))


def layer(w: Any, x: Any, name: str, replicate: bool) -> tuple[Any, Any]:
    """Gathers a weight in bfloat16, and scatters a gradient in float32."""
    with jax.named_scope(f"jfsdp_gather[{name}]"):
        whole = lax.all_gather(w.astype(jnp.bfloat16), "fsdp", tiled=True)
    x = jnp.tanh(x @ whole)
    with jax.named_scope(f"jfsdp_reduce[{name}]"):
        grad = lax.psum_scatter((x.T @ x).astype(jnp.float32), "fsdp", tiled=True)
        return x, lax.psum(grad, "replica") if replicate else grad


@functools.cache
def layers(target: str, form: str, hsdp: bool = False) -> list[Collective]:
    """What a stack of layers communicates; HSDP has half the shards, and copies of them."""

    def per_device(ws: Any, x: Any) -> Any:
        if form == "scanned":
            return lax.scan(lambda x, w: layer(w, x, "w", hsdp), x, ws)
        grads = []
        for number in range(LAYERS):
            x, grad = layer(ws[number], x, f"w.{number}", hsdp)
            grads.append(grad)
        return x, jnp.stack(grads)

    mesh = mesh_on(target, replica=2, fsdp=4) if hsdp else mesh_on(target, fsdp=8)
    weights, batch = P(None, "fsdp"), P(mesh.axis_names)
    region = jax.shard_map(
        per_device,
        mesh=mesh,
        in_specs=(weights, batch),
        out_specs=(batch, weights),
        check_vma=False,
    )
    return read_compiled(
        region,
        mesh,
        ((LAYERS, WIDTH, WIDTH), jnp.float32, weights),
        ((WIDTH, WIDTH), jnp.bfloat16, batch),
    )


def gathered_dtype(target: str) -> str:
    """XLA's CPU backend widens bfloat16 collectives."""
    return "float32" if target == "cpu" else "bfloat16"


def totals(records: Iterable[Collective]) -> dict[tuple[Any, ...], tuple[int, float]]:
    """Executions and bytes by kind, axes and dtype."""
    found: dict[tuple[Any, ...], tuple[int, float]] = {}
    for r in records:
        count, size = found.get((r.kind, r.axes, r.dtype), (0, 0.0))
        found[r.kind, r.axes, r.dtype] = count + r.executions, size + r.total_bytes
    return found


@in_both_forms
@on_every_target
def test_counts_and_bytes_of_a_compiled_program_are_those_of_the_written_one(
    target: str, form: str
) -> None:
    dtype = gathered_dtype(target)
    whole = LAYERS * WIDTH * WIDTH
    assert totals(layers(target, form)) == {
        ("all-gather", ("fsdp",), dtype): (LAYERS, whole * jnp.dtype(dtype).itemsize * 7 / 8),
        ("reduce-scatter", ("fsdp",), "float32"): (LAYERS, whole * 4 * 7 / 8),
    }


@on_every_target
def test_counts_and_bytes_of_a_compiled_program_with_copies_are_those_of_the_written_one(
    target: str,
) -> None:
    dtype = gathered_dtype(target)
    whole = LAYERS * WIDTH * WIDTH
    assert totals(layers(target, "scanned", hsdp=True)) == {
        ("all-gather", ("fsdp",), dtype): (LAYERS, whole * jnp.dtype(dtype).itemsize * 3 / 4),
        ("reduce-scatter", ("fsdp",), "float32"): (LAYERS, whole * 4 * 3 / 4),
        ("all-reduce", ("replica",), "float32"): (LAYERS, 2 * whole / 4 * 4 / 2),
    }


@on_every_target
def test_every_layer_of_an_unrolled_program_is_named_once_per_kind(target: str) -> None:
    found = sorted((record.kind, record.leaf) for record in layers(target, "unrolled"))
    assert found == [
        (kind, f"w.{n}") for kind in ("all-gather", "reduce-scatter") for n in range(LAYERS)
    ]


@on_every_target
def test_the_layers_of_a_scan_have_one_name_and_are_in_the_loop(target: str) -> None:
    records = layers(target, "scanned")
    assert {record.leaf for record in records} == {"w"}
    for kind in ("all-gather", "reduce-scatter"):
        looped = sum(r.executions for r in records if r.kind == kind and r.in_loop)
        # GPUs start the next iteration before this one has ended.
        assert looped in ((LAYERS, LAYERS - 1) if target == "h100:8" else (LAYERS,))


@needs_gpu_compiler
def test_gpus_combine_and_start_collectives() -> None:
    records = layers("h100:8", "unrolled")
    assert len({record.instruction for record in records}) < len(records)
    assert any(record.asynchronous for record in records)


@needs_tpu_compiler
def test_tpus_gather_beside_matmuls() -> None:
    gathers = [r for r in layers("v5e:2x4", "unrolled") if r.kind == "all-gather"]
    assert any(record.asynchronous and record.overlapped for record in gathers)


def test_cpus_run_collectives_one_after_the_other() -> None:
    assert not any(r.asynchronous or r.overlapped for r in layers("cpu", "unrolled"))


@needs_tpu_compiler
def test_a_small_gather_on_tpus_is_known_for_one() -> None:
    mesh = mesh_on("v5e:2x4", fsdp=8)
    gather = jax.shard_map(
        lambda b: lax.all_gather(b.astype(jnp.bfloat16), "fsdp", tiled=True),
        mesh=mesh,
        in_specs=P("fsdp"),
        out_specs=P(),
        check_vma=False,
    )
    (record,) = read_compiled(gather, mesh, ((512,), jnp.float32, P("fsdp")))
    assert (record.purpose, record.dtype, record.axes) == ("all-gather", "bfloat16", ("fsdp",))


@needs_tpu_compiler
@pytest.mark.parametrize(("rows", "padded", "moved"), [(1024, 1024, []), (1032, 1088, [49])])
def test_a_reduce_scatter_of_the_tpu_partitioner_is_known_for_one(
    rows: int, padded: int, moved: list[int]
) -> None:
    mesh = mesh_on("v5e:2x4", fsdp=8)

    def grad(x: Any, y: Any) -> Any:
        with jax.named_scope("jfsdp_reduce[w]"):
            return lax.with_sharding_constraint(x.T @ y, NamedSharding(mesh, P("fsdp")))

    scatter, *padding = read_compiled(
        grad,
        mesh,
        ((4096, rows), jnp.float32, P("fsdp")),
        ((4096, 1024), jnp.float32, P("fsdp")),
    )
    assert (scatter.kind, scatter.leaf, scatter.shape) == ("reduce-scatter", "w", (rows, 1024))
    assert scatter.bytes_per_device == padded * 1024 * 4 * 7 / 8
    assert scatter.padding == (padded - rows) * 1024 * 4 * 7 / 8
    assert [(r.kind, r.written, r.shape) for r in padding] == [
        ("collective-permute", "reduce-scatter", (size, 1024)) for size in moved
    ]


# --------------------------------------------------------------------------------------------------
# Two ways of counting: the inspector's, and formulae over the plan

MESHES: dict[str, tuple[dict[str, int], Any]] = {
    "S8": ({"S": 8}, None),
    "R2xS4": ({"R": 2, "S": 4}, None),
    "R8": ({"R": 8}, jfsdp.DataParallelMeshDims(shard=None, replicate="R")),
    "S4xT2": ({"S": 4, "T": 2}, jfsdp.DataParallelMeshDims(shard="S")),
}


def sharded_mlp(
    widths: Sequence[int], units: Any, mesh: str, policy: Any, reshard: bool | None = None
) -> tuple[Any, Any, Mesh]:
    """A model without arrays, the program of its gradients, and its mesh."""
    sizes, dims = MESHES[mesh]
    made = make_mesh(**sizes)
    model = nnx.eval_shape(lambda: mlp(*widths))
    jfsdp.shard(
        model,
        made,
        units=units,
        dp_mesh_dims=dims,
        mp_policy=policy,
        reshard_after_forward=reshard,
    )
    step = nnx.jit(lambda model, x: nnx.value_and_grad(mean_square)(model, x))
    return model, lower(step, model, jax.ShapeDtypeStruct((16, widths[0]), jnp.float32)), made


def stated(model: Any, mesh: Mesh, gathered: int, reduced: int) -> dict[str, tuple[int, float]]:
    """Counts and bytes by kind, of weights of so many bytes an element."""
    shards, copies = mesh.shape.get("S", 1), mesh.shape.get("R", 1)
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for row in jfsdp.plan(model).rows:
        size = math.prod(row.shape)
        if "S" not in row.spec:
            group = shards * copies
            counts["all-reduce"] += group > 1
            sizes["all-reduce"] += 2 * size * reduced * (group - 1) / group
            continue
        # The backward reads kernels only, of all layers but the first, unless they were kept.
        again = row.unit != "(root)" and row.path.endswith("kernel") and ".0." not in row.path
        counts["all-gather"] += 1 + again
        sizes["all-gather"] += (1 + again) * size * gathered * (shards - 1) / shards
        counts["reduce-scatter"] += 1
        sizes["reduce-scatter"] += size * reduced * (shards - 1) / shards
        counts["all-reduce"] += copies > 1
        sizes["all-reduce"] += 2 * size / shards * reduced * (copies - 1) / copies
    return {kind: (counts[kind], sizes[kind]) for kind in counts if counts[kind]}


random_mlps = hypothesis.given(
    widths=st.lists(st.sampled_from([6, 8, 16, 24, 64]), min_size=2, max_size=5),
    units=st.sampled_from([(), nnx.Linear, "layers.0", "layers.[02]"]),
    mesh=st.sampled_from(list(MESHES)),
    wide=st.booleans(),
)


@hypothesis.settings(max_examples=20, derandomize=True)
@random_mlps
def test_counts_and_bytes_of_any_model_are_those_of_its_plan(
    widths: list[int], units: Any, mesh: str, wide: bool
) -> None:
    policy = jfsdp.MixedPrecisionPolicy(
        param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32 if wide else jnp.bfloat16
    )
    model, lowered, made = sharded_mlp(widths, units, mesh, policy)
    counts, sizes = Counter[str](), Counter[str]()
    for record in collectives(lowered, made):
        counts[record.kind] += record.executions
        sizes[record.kind] += record.total_bytes
    found = {kind: (counts[kind], sizes[kind]) for kind in counts}
    assert found == stated(model, made, 2, 4 if wide else 2)


@hypothesis.settings(max_examples=20, derandomize=True)
@random_mlps
def test_collectives_of_any_model_are_those_of_the_text_of_its_program(
    widths: list[int], units: Any, mesh: str, wide: bool
) -> None:
    policy = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16 if wide else None)
    _, lowered, made = sharded_mlp(widths, units, mesh, policy)
    short = {"float32": "f32", "bfloat16": "bf16"}
    found = Counter(
        Op(r.kind.replace("-", "_"), short[r.dtype], r.result_shape)
        for r in collectives(lowered, made)
    )
    assert found == stablehlo_ops(lowered)


@hypothesis.settings(max_examples=8, derandomize=True)
@random_mlps
def test_counts_and_bytes_of_any_model_are_the_same_once_it_is_compiled_for_cpus(
    widths: list[int], units: Any, mesh: str, wide: bool
) -> None:
    policy = jfsdp.MixedPrecisionPolicy(reduce_dtype=jnp.float32 if wide else None)
    # XLA for CPUs of jax 0.10.2 gathers once what is written twice; nothing is here.
    _, lowered, made = sharded_mlp(widths, units, mesh, policy, reshard=False)
    compiled = compiled_collectives(lowered.compile().as_text(), dict(made.shape))
    of_arrays = [record for record in compiled if record.shape]  # but the loss
    assert totals(of_arrays) == totals(collectives(lowered, made))
