"""What runs beside a collective, in each form in which compilers leave one that is asynchronous."""

from __future__ import annotations

import pytest
from test_inspect_compiled import GATHER, MATMUL, SCATTER, WRAPPED, one, read

from jfsdp.inspect import Collective

START = f"(bf16[16,32]{{1,0}}, bf16[128,32]{{1,0}}) all-gather-start(%shard), {GATHER}"
DONE = "bf16[128,32]{1,0} all-gather-done"
PAIR = "(bf16[16,32]{1,0}, bf16[128,32]{1,0})"


# --------------------------------------------------------------------------------------------------
# Between start and done


def test_a_done_is_found_behind_updates_copies_and_tuples() -> None:
    """Else whatever stands behind the done would count."""
    entry = f"""
  %start = {START}
  %update = {PAIR} async-update(%start)
  %both = (s32[], {PAIR}) tuple(%count, %update)
  %kept = (s32[], {PAIR}) optimization-barrier(%both)
  %again = {PAIR} get-tuple-element(%kept), index=1
  %done = {DONE}(%again)
  ROOT {MATMUL}"""
    assert not one(entry).overlapped


def test_a_matmul_before_a_done_that_is_behind_a_tuple_overlaps() -> None:
    entry = f"""
  %start = {START}
  %both = (s32[], {PAIR}) tuple(%count, %start)
  {MATMUL}
  %again = {PAIR} get-tuple-element(%both), index=1
  ROOT %done = {DONE}(%again)"""
    assert one(entry).overlapped


def test_the_done_of_another_start_ends_nothing() -> None:
    entry = f"""
  %start = {START}
  %other = {START}
  %done.1 = {DONE}(%other)
  {MATMUL}
  ROOT %done = {DONE}(%start)"""
    assert [record.overlapped for record in read(entry)] == [True, False]


def test_starts_that_share_a_tuple_have_their_own_ends() -> None:
    entry = f"""
  %start = {START}
  %other = {START}
  %both = ({PAIR}, {PAIR}) tuple(%start, %other)
  %second = {PAIR} get-tuple-element(%both), index=1
  %done.1 = {DONE}(%second)
  {MATMUL}
  %first = {PAIR} get-tuple-element(%both), index=0
  ROOT %done = {DONE}(%first)"""
    assert [record.overlapped for record in read(entry)] == [True, False]


def test_a_wrapped_reduce_scatter_overlaps_a_wrapped_fusion() -> None:
    """GPUs start both on streams of their own."""
    entry = """
  %start = ((f32[128,32]{1,0}), f32[16,32]{1,0}, u32[]) async-start(%grad), calls=%wrapped
  %busy = ((bf16[16,32]), f32[16,16], u32[]) fusion-start(%shard), kind=kCustom, calls=%matmul
  %idle = f32[16,16] fusion-done(%busy)
  ROOT %done = f32[16,32]{1,0} async-done(%start)"""
    record = one(entry, WRAPPED)
    assert (record.kind, record.asynchronous, record.overlapped) == ("reduce-scatter", True, True)


# --------------------------------------------------------------------------------------------------
# Loops


def looped(*body: str, carried: str = "%weight") -> Collective:
    """The gather of a loop of 5 that carries a shard and a weight, whose body has these lines."""
    lines = "\n  ".join(body)
    types = "(bf16[16,32], bf16[128,32])"
    computations = f"""
%body (b: {types}) -> {types} {{
  %b = {types} parameter(0)
  %shard.1 = bf16[16,32] get-tuple-element(%b), index=0
  %weight.1 = bf16[128,32] get-tuple-element(%b), index=1
  {lines}
}}
%go (c: {types}) -> pred[] {{
  %c = {types} parameter(0)
  ROOT %yes = pred[] constant(true)
}}"""
    config = 'backend_config={"known_trip_count":{"n":"5"}}'
    entry = f"""
  %t = {types} tuple(%shard, {carried})
  ROOT %w = {types} while(%t), condition=%go, body=%body, {config}"""
    (record,) = [r for r in read(entry, computations) if r.in_loop]
    assert record.executions == 5
    return record


INNER = START.replace("%shard", "%shard.1")
USED = "%m = f32[16,16] dot(%shard.1, %weight.1), lhs_contracting_dims={1}"


def test_a_gather_that_the_next_iteration_uses_overlaps_the_matmuls_of_its_own() -> None:
    """A weight that is carried by the loop: start and done are in one iteration, the use in the next."""
    assert looped(
        f"%start = {INNER}",
        USED,
        f"%next = {DONE}(%start)",
        "ROOT %out = (bf16[16,32], bf16[128,32]) tuple(%shard.1, %next)",
    ).overlapped


def test_a_gather_that_its_own_iteration_waits_for_does_not_overlap() -> None:
    assert not looped(
        f"%start = {INNER}",
        f"%next = {DONE}(%start)",
        USED,
        "ROOT %out = (bf16[16,32], bf16[128,32]) tuple(%shard.1, %next)",
    ).overlapped


def across_iterations(*body: str) -> Collective:
    """The gather of a loop that carries what it has started, and what it was given done."""
    lines = "\n  ".join(body)
    types = f"(bf16[16,32], {PAIR})"
    computations = f"""
%body (b: {types}) -> {types} {{
  %b = {types} parameter(0)
  %shard.1 = bf16[16,32] get-tuple-element(%b), index=0
  %before = {PAIR} get-tuple-element(%b), index=1
  {lines}
  ROOT %out = {types} tuple(%shard.1, %start.1)
}}
%go (c: {types}) -> pred[] {{
  %c = {types} parameter(0)
  ROOT %yes = pred[] constant(true)
}}"""
    config = 'backend_config={"known_trip_count":{"n":"5"}}'
    entry = f"""
  %start = {START}
  %t = {types} tuple(%shard, %start)
  %w = {types} while(%t), condition=%go, body=%body, {config}
  %last = {PAIR} get-tuple-element(%w), index=1
  ROOT %done = {DONE}(%last)"""
    first, inner = read(entry, computations)
    assert (first.executions, inner.executions) == (1, 5)
    assert first.overlapped == inner.overlapped
    return inner


INNER_START = f"%start.1 = {INNER}"
INNER_DONE = f"%done.1 = {DONE}(%before)"
INNER_MATMUL = MATMUL.replace("%shard", "%shard.1")


@pytest.mark.parametrize(
    ("lines", "overlapped"),
    [
        ((INNER_MATMUL, INNER_DONE, INNER_START), True),
        ((INNER_DONE, INNER_MATMUL, INNER_START), False),
        ((INNER_DONE, INNER_START), False),
    ],
    ids=["matmul-done-start", "done-matmul-start", "none"],
)
def test_a_gather_that_is_done_in_the_next_iteration_overlaps_what_stands_before_that(
    lines: tuple[str, ...], overlapped: bool
) -> None:
    assert across_iterations(*lines).overlapped == overlapped


def test_a_gather_that_is_started_last_overlaps_the_matmuls_behind_it_in_its_iteration() -> None:
    types = f"(bf16[16,32], {PAIR})"
    computations = f"""
%body (b: {types}) -> {types} {{
  %b = {types} parameter(0)
  %shard.1 = bf16[16,32] get-tuple-element(%b), index=0
  %before = {PAIR} get-tuple-element(%b), index=1
  {INNER_DONE}
  {INNER_START}
  {INNER_MATMUL}
  ROOT %out = {types} tuple(%shard.1, %start.1)
}}
%go (c: {types}) -> pred[] {{
  %c = {types} parameter(0)
  ROOT %yes = pred[] constant(true)
}}"""
    entry = f"""
  %start = {START}
  %t = {types} tuple(%shard, %start)
  ROOT %w = {types} while(%t), condition=%go, body=%body"""
    # What was started before the loop is waited for at once.
    assert [r.overlapped for r in read(entry, computations)] == [False, True]


def test_a_gather_round_a_loop_with_matmuls_overlaps() -> None:
    config = 'backend_config={"known_trip_count":{"n":"5"}}'
    loop = f"bf16[16,32] while(%shard), condition=%forever, body=%matmul, {config}"
    record = one(f"  %start = {START}\n  %l = {loop}\n  ROOT %done = {DONE}(%start)", WRAPPED)
    assert (record.executions, record.overlapped) == (1, True)


def test_a_peeled_iteration_that_is_synchronous_counts_beside_the_loop_that_overlaps() -> None:
    """GPUs' pipelining of collectives takes the last reduce-scatter out of the loop."""
    types = "(f32[128,32], bf16[16,32])"
    computations = f"""{WRAPPED}
%add.1 (x.1: f32[], y.1: f32[]) -> f32[] {{
  %x.1 = f32[] parameter(0)
  %y.1 = f32[] parameter(1)
  ROOT %sum.1 = f32[] add(%x.1, %y.1)
}}
%body (b: {types}) -> {types} {{
  %b = {types} parameter(0)
  %last = f32[128,32] get-tuple-element(%b), index=0
  %x.2 = bf16[16,32] get-tuple-element(%b), index=1
  %begun = ((f32[128,32]), f32[16,32]) reduce-scatter-start(%last), {SCATTER}
  %grad.1 = f32[128,32] fusion(%x.2), kind=kCustom, calls=%matmul
  %part = f32[16,32] reduce-scatter-done(%begun)
  ROOT %out = {types} tuple(%grad.1, %x.2)
}}"""
    config = 'backend_config={"known_trip_count":{"n":"5"}}'
    entry = f"""
  %t = {types} tuple(%grad, %shard)
  %w = {types} while(%t), condition=%forever, body=%body, {config}
  %left = f32[128,32] get-tuple-element(%w), index=0
  ROOT %peeled = f32[16,32] reduce-scatter(%left), {SCATTER}"""
    found = [(r.executions, r.in_loop, r.overlapped) for r in read(entry, computations)]
    assert found == [(5, True, True), (1, False, False)]
