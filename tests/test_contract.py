"""What the policies promise, held against collectives and figures that are written here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest

from jfsdp.inspect import (
    Collective,
    Departure,
    Memory,
    Minimum,
    PolicyViolation,
    Promise,
    Report,
    Wire,
)
from jfsdp.inspect.collective import itemsize, ring_bytes
from jfsdp.inspect.contract import minima_of
from jfsdp.inspect.difference import difference
from jfsdp.inspect.sizes import parse_bytes
from jfsdp.inspect.stored import stored_departures
from jfsdp.inspect.verify import departures

MiB = 2**20


def promised(
    leaf: str = "w",
    shape: tuple[int, ...] = (1024, 1024),
    *,
    shards: int = 8,
    copies: int = 1,
    param: str = "bfloat16",
    reduce: str = "float32",
    **others: Any,
) -> Promise:
    """A parameter that is split on dimension 0 over fsdp, and copied over replica."""
    size = math.prod(shape)
    gather, scatter, total = None, None, None
    if shards > 1:
        part = (shards - 1) / shards
        gather = Wire(("fsdp",), param, size * itemsize(param or "float32") * part)
        scatter = Wire(("fsdp",), reduce, size * itemsize(reduce) * part)
    if copies > 1:
        received = 2 * size / shards * itemsize(reduce) * (copies - 1) / copies
        total = Wire(("replica",), reduce, received)
    shard = (shape[0] // shards, *shape[1:])
    return Promise(leaf, (shape,), (shard,), gather, scatter, total, **others)


def collective(
    kind: str,
    shape: tuple[int, ...],
    dtype: str,
    axes: tuple[str, ...] = ("fsdp",),
    size: int = 8,
    **others: Any,
) -> Collective:
    result = shape
    if kind == "all-gather":
        result = (shape[0] * size, *shape[1:])
    elif kind == "reduce-scatter":
        result = (shape[0] // size, *shape[1:])
    received = ring_bytes(
        others.get("written") or kind,
        math.prod(shape) * itemsize(dtype),
        math.prod(result) * itemsize(dtype),
        size,
    )
    others = {"executions": 1, "bytes_per_device": received, **others}
    return Collective(kind, axes, dtype, shape, result, size, **others)


def gather(leaf: str = "w", dtype: str = "bfloat16", rows: int = 128, **others: Any) -> Collective:
    return collective("all-gather", (rows, 1024), dtype, leaf=leaf, **others)


def scatter(leaf: str = "w", dtype: str = "float32", **others: Any) -> Collective:
    return collective("reduce-scatter", (1024, 1024), dtype, leaf=leaf, **others)


def copied(leaf: str = "w", dtype: str = "float32", rows: int = 256, **others: Any) -> Collective:
    """The sum of a gradient's shards over their copies."""
    others = {"axes": ("replica",), "size": 2, **others}
    return collective("all-reduce", (rows, 1024), dtype, leaf=leaf, **others)


def found(
    records: Sequence[Collective],
    promises: Sequence[Promise] | None = None,
    *,
    calls: int = 1,
    tolerance: float = 0.01,
) -> list[Departure]:
    stated = [promised()] if promises is None else promises
    return departures(records, stated, calls=calls, tolerance=tolerance)


def rules(records: Sequence[Collective], *args: Any, **settings: Any) -> list[str]:
    return [departure.rule for departure in found(records, *args, **settings)]


HSDP = promised(shards=4, copies=2)
HSDP_STEP = [gather(rows=256, size=4), scatter(size=4), copied()]
GATHERED = "bytes of the all-gathers, per device and step"
REDUCED = "bytes of the reductions, per device and step"


# --------------------------------------------------------------------------------------------------
# Programs as they are stated


def test_a_program_that_does_what_is_stated_has_no_departures() -> None:
    assert found([gather(), scatter()]) == []


def test_a_program_with_copies_that_does_what_is_stated_has_no_departures() -> None:
    assert found(HSDP_STEP, [HSDP]) == []


def test_a_program_that_does_nothing_has_no_departures() -> None:
    assert found([]) == []


def test_collectives_without_names_belong_to_the_parameters_of_their_shape() -> None:
    assert found([gather(leaf=""), scatter(leaf="")]) == []
    assert found([dataclasses.replace(c, leaf="") for c in HSDP_STEP], [HSDP]) == []


def test_dimensions_of_size_one_and_their_order_do_not_matter_for_the_shape() -> None:
    turned = collective("all-gather", (1, 1024, 1024), "bfloat16", size=8)
    turned = dataclasses.replace(turned, result_shape=(1, 1024, 1024), bytes_per_device=1.75 * MiB)
    assert found([turned, scatter()]) == []


# --------------------------------------------------------------------------------------------------
# Dtypes


@pytest.mark.parametrize("leaf", ["w", ""])
def test_a_gather_in_another_dtype_is_found(leaf: str) -> None:
    dtype, total = found([gather(leaf, "float32"), scatter()])
    assert dtype == Departure(
        "w",
        "dtype of the all-gather",
        "bfloat16",
        "all-gather of float32[1024,1024] over fsdp (3.5 MiB)",
    )
    assert total.rule == GATHERED


@pytest.mark.parametrize("leaf", ["w", ""])
def test_a_reduce_scatter_in_another_dtype_is_found(leaf: str) -> None:
    (departure,) = found([gather(), scatter(leaf, "bfloat16", phase="backward")])
    assert departure == Departure(
        "w",
        "dtype of the reduce-scatter",
        "float32",
        "reduce-scatter of bfloat16[1024,1024] over fsdp, backward (1.8 MiB)",
    )


@pytest.mark.parametrize("leaf", ["w", ""])
def test_an_all_reduce_in_another_dtype_is_found(leaf: str) -> None:
    gathered, scattered, _ = HSDP_STEP
    halves = {"executions": 2, "in_loop": True, "bytes_per_device": 0.25 * MiB}
    (departure,) = found([gathered, scattered, copied(leaf, "bfloat16", **halves)], [HSDP])
    assert departure == Departure(
        "w",
        "dtype of the all-reduce",
        "float32",
        "all-reduce of bfloat16[256,1024] over replica x2 in a loop (512.0 KiB)",
    )


def test_a_dtype_that_is_not_promised_may_be_any() -> None:
    assert found([gather(dtype="float32"), scatter()], [promised(param="")]) == []


def test_a_collective_keeps_the_promise_of_one_of_the_parameters_of_its_shape() -> None:
    both = [promised("a", param="float32"), promised("b", param="bfloat16")]
    records = [gather("", "bfloat16"), gather("", "float32"), scatter(""), scatter("")]
    assert found(records, both) == []
    assert found(records, both[::-1]) == []


def test_a_collective_that_keeps_none_of_their_promises_is_found_with_all_their_names() -> None:
    both = [promised("b", param="float32"), promised("a", param="bfloat16")]
    records = [gather("", "float16"), scatter(""), scatter("")]
    (departure,) = found(records, both)
    assert (departure.leaf, departure.rule) == ("a, b", "dtype of the all-gather")


# --------------------------------------------------------------------------------------------------
# Axes


@pytest.mark.parametrize("leaf", ["w", ""])
def test_collectives_over_other_axes_are_found(leaf: str) -> None:
    both = {"axes": ("replica", "fsdp")}
    gathered, scattered, summed = HSDP_STEP
    for record, kind in (
        (gather(leaf, rows=256, size=4, **both), "all-gather"),
        (scatter(leaf, size=4, **both), "reduce-scatter"),
    ):
        others = [c for c in (gathered, scattered, summed) if c.kind != kind]
        (departure,) = found([record, *others], [HSDP])
        assert departure.rule == f"axes of the {kind}"
        assert departure.expected == "fsdp"
        assert "over replica and fsdp" in departure.found


def test_collectives_over_some_of_the_stated_axes_are_in_order() -> None:
    wire = Wire(("slice", "fsdp"), "bfloat16", 1.75 * MiB)
    promise = dataclasses.replace(promised(), gather=wire)
    assert found([gather(), scatter()], [promise]) == []


GROUPS = "{{0,2},{1,3},{4,6},{5,7}}"


@pytest.mark.parametrize("leaf", ["w", ""])
@pytest.mark.parametrize("made", [gather, scatter])
def test_collectives_over_groups_that_no_axes_explain_are_found(made: Any, leaf: str) -> None:
    record = made(leaf, axes=(), groups=GROUPS)
    others = [c for c in (gather(), scatter()) if c.kind != record.kind]
    (departure,) = found([record, *others])
    assert (departure.rule, departure.expected) == (f"axes of the {record.kind}", "fsdp")
    assert f"over {GROUPS}" in departure.found


def test_a_sum_over_groups_that_no_axes_explain_is_found() -> None:
    gathered, scattered, _ = HSDP_STEP
    record = copied(axes=(), groups=GROUPS, rows=1024, bytes_per_device=1.0 * MiB)
    departed = found([gathered, scattered, record], [HSDP])
    assert [(d.rule, d.expected) for d in departed] == [
        ("reduction", "a reduce-scatter over fsdp and an all-reduce over replica"),
        ("axes of the all-reduce", "fsdp"),
    ]


def test_a_small_collective_without_a_name_may_run_over_any_axes() -> None:
    promise = promised(shape=(8, 16))
    record = collective("all-gather", (1, 16), "bfloat16", ("replica",))
    assert found([record], [promise]) == []
    assert rules([dataclasses.replace(record, leaf="w")], [promise]) == ["axes of the all-gather"]


# --------------------------------------------------------------------------------------------------
# All-reduces in place of reduce-scatters


@pytest.mark.parametrize("leaf", ["w", ""])
def test_a_large_all_reduce_in_place_of_a_reduce_scatter_is_found(leaf: str) -> None:
    record = collective("all-reduce", (1024, 1024), "float32", leaf=leaf)
    reduction, total = found([gather(), record])
    assert reduction == Departure(
        "w",
        "reduction",
        "a reduce-scatter over fsdp",
        "all-reduce of float32[1024,1024] over fsdp (7.0 MiB)",
    )
    assert (total.rule, total.found) == (REDUCED, "7.0 MiB (2.000x, 2.000x the elements)")


def test_an_all_reduce_over_all_devices_is_held_against_both_steps_that_are_stated() -> None:
    record = collective("all-reduce", (1024, 1024), "float32", ("replica", "fsdp"), leaf="w")
    reduction, _ = found([HSDP_STEP[0], record], [HSDP])
    assert reduction.expected == "a reduce-scatter over fsdp and an all-reduce over replica"


def test_a_large_all_reduce_is_found_by_its_shape_beside_a_replicated_parameter() -> None:
    bias = Promise("b", ((10,),), ((10,),), None, None, Wire(("fsdp",), "float32", 70.0))
    record = collective("all-reduce", (1024, 1024), "float32")
    assert rules([gather(), record], [promised(), bias]) == ["reduction", REDUCED]


def test_a_reduce_scatter_is_known_by_its_shape_beside_a_replicated_parameter() -> None:
    bias = Promise("b", ((10,),), ((10,),), None, None, Wire(("fsdp",), "float32", 70.0))
    assert found([gather(leaf=""), scatter(leaf="")], [promised(), bias]) == []


def test_a_small_all_reduce_in_place_of_a_reduce_scatter_is_in_order_but_for_its_dtype() -> None:
    promise = promised(shape=(1024, 8))
    record = collective("all-reduce", (1024, 8), "float32", leaf="w")
    assert rules([record], [promise], tolerance=1.0) == []
    narrow = collective("all-reduce", (1024, 8), "bfloat16", leaf="w")
    assert rules([narrow], [promise], tolerance=1.0) == ["dtype of the all-reduce"]


# --------------------------------------------------------------------------------------------------
# Collectives of no parameter


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-to-all"])
def test_a_large_collective_of_no_parameter_is_found(kind: str) -> None:
    record = collective(kind, (8, 96, 1024), "bfloat16")
    departure = found([gather(), scatter(), record])[0]
    assert (departure.leaf, departure.rule) == ("", f"{kind}s of no parameter")
    assert departure.expected == "none: activations stay split on the batch dimension"
    assert departure.found.startswith(f"{kind} of bfloat16[")


def test_a_large_all_reduce_of_no_parameter_is_found() -> None:
    record = collective("all-reduce", (96, 1024, 8), "bfloat16")
    assert rules([gather(), scatter(), record])[0] == "all-reduces of no parameter"


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(collective("all-to-all", (8, 2, 96), "bfloat16"), id="small"),
        pytest.param(collective("all-reduce", (), "float32"), id="the loss"),
        pytest.param(collective("all-gather", (8, 96, 1024), "int32"), id="integers"),
        pytest.param(collective("all-gather", (8, 96, 1024), "bool"), id="masks"),
        pytest.param(gather(dtype="float32", axes=(), size=1), id="one device"),
    ],
)
def test_what_is_small_or_no_number_or_does_not_travel_is_not_looked_at(
    record: Collective,
) -> None:
    assert found([gather(), scatter(), record]) == []


def test_a_replicated_parameter_is_not_gathered() -> None:
    promise = promised(shards=1, copies=2)
    record = gather(axes=("replica",), size=2, rows=512)
    departure = found([record], [promise])[0]
    assert (departure.leaf, departure.rule, departure.expected) == ("w", "its all-gathers", "none")


# --------------------------------------------------------------------------------------------------
# Gradients that were packed into one vector


def packed(dtype: str) -> Collective:
    return collective("all-reduce", (256 * 1024,), dtype, ("replica",), size=2)


def test_gradients_packed_into_one_vector_are_in_order() -> None:
    assert found([*HSDP_STEP[:2], packed("float32")], [HSDP]) == []


def test_gradients_packed_in_another_dtype_are_found() -> None:
    twice = dataclasses.replace(packed("bfloat16"), executions=2)
    (departure,) = found([*HSDP_STEP[:2], twice], [HSDP], tolerance=1.0)
    assert (departure.leaf, departure.rule, departure.expected) == (
        "",
        "dtype of the all-reduce",
        "float32",
    )


# --------------------------------------------------------------------------------------------------
# Bytes and elements


def test_more_gathered_bytes_than_stated_are_found() -> None:
    (departure,) = found([gather(), gather(), scatter()])
    assert departure == Departure(
        "", GATHERED, "at most 1.8 MiB", "3.5 MiB (2.000x, 2.000x the elements)"
    )


def test_more_reduced_bytes_than_stated_are_found() -> None:
    (departure,) = found([gather(), scatter(), scatter()])
    assert departure == Departure(
        "", REDUCED, "at most 3.5 MiB", "7.0 MiB (2.000x, 2.000x the elements)"
    )


def test_bytes_where_none_are_stated_are_found() -> None:
    record = collective("all-reduce", (1024, 1024), "float32", leaf="w")
    departure = found([record], [promised(shards=1)])[-1]
    assert (departure.expected, departure.found) == ("at most 0 B", "7.0 MiB (none are stated)")


@pytest.mark.parametrize(("excess", "is_found"), [(0.009, False), (0.011, True)])
def test_bytes_may_exceed_the_least_by_the_tolerance(excess: float, is_found: bool) -> None:
    more = 1.75 * MiB * (1 + excess)
    record = dataclasses.replace(gather(), bytes_per_device=more)
    assert (rules([record, scatter()]) == [GATHERED]) == is_found
    assert rules([record, scatter()], tolerance=0.02) == []


def test_a_few_bytes_more_are_none() -> None:
    extra = collective("all-reduce", (512,), "float32")
    assert extra.total_bytes == 3584
    assert found([extra], []) == []
    assert rules([extra, extra], []) == [REDUCED]


def test_too_many_elements_in_a_narrower_dtype_are_found() -> None:
    wide = promised(param="float32")
    dtype, elements = found([gather(), gather(), scatter()], [wide])
    assert dtype.rule == "dtype of the all-gather"
    assert (elements.rule, elements.found) == (GATHERED, "3.5 MiB (1.000x, 2.000x the elements)")


def test_elements_do_not_count_where_the_dtype_is_not_promised() -> None:
    assert found([gather(), gather(), scatter()], [promised(param="")]) == []


def test_calling_the_model_twice_allows_twice_the_bytes() -> None:
    twice = [gather(), gather(), scatter(), scatter()]
    assert rules(twice) == [GATHERED, REDUCED]
    assert found(twice, calls=2) == []


def test_executions_multiply_bytes() -> None:
    assert rules([gather(executions=2), scatter()]) == [GATHERED]


def test_collectives_over_axes_that_are_not_data_parallel_are_not_looked_at() -> None:
    """A user's tensor axes."""
    own = collective("all-reduce", (4096, 4096), "bfloat16", axes=("tensor",), size=2)
    records = [gather(), scatter(), own]
    assert found(records) != []
    stated = {"calls": 1, "tolerance": 0.01, "other_axes": ["tensor"]}
    assert departures(records, [promised()], **stated) == []


def test_small_vectors_all_reduced_in_a_loop_are_let_pass_and_large_ones_are_found() -> None:
    """TPUs all-reduce the gradients of norms and biases, without a name, in every layer."""
    small = collective("all-reduce", (8192,), "float32", executions=80)
    large = collective("all-reduce", (2**20,), "float32", executions=80)
    assert small.total_bytes > 2**20
    foreign = "all-reduces of no parameter"
    assert foreign not in rules([gather(), scatter(), small])
    assert foreign in rules([gather(), scatter(), large])


def test_permutes_that_move_padding_are_not_counted() -> None:
    padding = collective("collective-permute", (1024, 1024), "float32", written="reduce-scatter")
    assert found([gather(), scatter(), padding]) == []
    other = collective("collective-permute", (1024, 1024), "float32")
    assert rules([gather(), scatter(), other]) == ["collective-permutes of no parameter", REDUCED]


def test_what_a_collective_is_padded_with_is_not_counted() -> None:
    padded = {"bytes_per_device": 7.0 * MiB, "leaf": "w"}
    record = collective("reduce-scatter", (1024, 1024), "float32", **padded)
    assert rules([gather(), record]) == [REDUCED]
    assert found([gather(), dataclasses.replace(record, padding=3.5 * MiB)]) == []


def test_a_gather_that_became_an_all_reduce_counts_as_a_gather() -> None:
    record = gather()
    changed = dataclasses.replace(record, kind="all-reduce", written="all-gather")
    assert found([changed, scatter()]) == []
    assert rules([changed, changed, scatter()]) == [GATHERED]


# --------------------------------------------------------------------------------------------------
# Weights that are dropped after the forward


def dropped(leaf: str, unit: str) -> Promise:
    promise = promised(leaf, unit=unit)
    assert promise.gather is not None
    both, one = (
        dataclasses.replace(promise.gather, bytes_per_device=n * 1.75 * MiB) for n in (2, 1)
    )
    return dataclasses.replace(promise, gather=both, again=one)


THREE_UNITS = [dropped(f"{n}.w", f"{n}") for n in range(3)]
FORWARD = [gather(f"{n}.w", phase="forward") for n in range(3)]
BACKWARD = [scatter(f"{n}.w", phase="backward") for n in range(3)]


def test_weights_that_are_not_gathered_again_are_found() -> None:
    (departure,) = found([*FORWARD, *BACKWARD], THREE_UNITS)
    assert departure == Departure(
        "",
        "weights are dropped after the forward and gathered again for the backward",
        "about 3.5 MiB gathered in the backward",
        "0 B: the whole weights are kept",
    )


def test_the_first_unit_need_not_be_gathered_again() -> None:
    again = [gather(f"{n}.w", phase="backward") for n in (2, 1)]
    assert found([*FORWARD, *again, *BACKWARD], THREE_UNITS) == []


def test_a_program_without_a_backward_gathers_once() -> None:
    assert found(FORWARD, THREE_UNITS) == []


def test_weights_that_are_kept_as_stated_are_not_gathered_again() -> None:
    kept = [dataclasses.replace(promise, again=None) for promise in THREE_UNITS]
    assert found([*FORWARD, *BACKWARD], kept) == []


HSDP_PARTS = promised(shards=8, unit="0")
OVER_BOTH, OVER_INNER = (Wire(axes, "bfloat16", 2 * MiB) for axes in (("fsdp", "in"), ("in",)))
PARTLY = dataclasses.replace(HSDP_PARTS, gather=OVER_BOTH, again=OVER_INNER)


def test_a_backward_that_gathers_over_the_stated_axes_only_is_as_stated() -> None:
    steps = [gather(axes=("fsdp",)), gather(axes=("in",)), gather(axes=("in",), phase="backward")]
    assert [d for d in found(steps, [PARTLY], tolerance=9) if d.rule.startswith("axes")] == []


def test_a_backward_that_gathers_over_all_axes_again_is_found() -> None:
    steps = [gather(axes=("fsdp", "in"), phase=phase) for phase in ("forward", "backward")]
    (departure,) = found(steps, [PARTLY], tolerance=9)
    assert (departure.rule, departure.expected) == ("axes of the all-gather", "in")
    assert "backward" in departure.found


# --------------------------------------------------------------------------------------------------
# What is stored


def stored(
    constants: int = 0, available: int | None = None, **figures: Any
) -> list[tuple[str, str, str]]:
    memory = Memory(**figures) if figures else None
    departed = stored_departures(constants, memory, available)
    return [(departure.rule, departure.expected, departure.found) for departure in departed]


def test_a_mebibyte_of_constants_is_found_and_less_is_not() -> None:
    ((rule, expected, text),) = stored(MiB)
    assert (rule, expected) == ("arrays are arguments of the step", "none in the program itself")
    assert text == "1.0 MiB of constants: pass the model as an argument, do not close over it"
    assert stored(MiB - 1) == []


@pytest.mark.parametrize(
    ("kind", "name"), [("parameters", "parameters"), ("optimizer", "optimizer state")]
)
def test_state_of_more_bytes_than_stated_is_found(kind: str, name: str) -> None:
    least = {f"{kind}_minimum": 8 * MiB}
    assert stored(**{kind: 16 * MiB}, **least) == [
        (f"bytes of the {name}, per device", "at most 8.0 MiB", "16.0 MiB (2.000x)")
    ]
    assert stored(**{kind: 8 * MiB + 8192}, **least) == []
    assert stored(**{kind: 16 * MiB}) == []


def test_state_where_none_is_stated_is_found() -> None:
    ((_, expected, _),) = stored(optimizer=MiB, optimizer_minimum=0)
    assert expected == "at most 0 B"


def test_donated_state_that_is_not_reused_is_found() -> None:
    state = {"parameters": 8 * MiB, "optimizer": 16 * MiB}
    assert stored(**state, aliased=16 * MiB) == [
        (
            "donated state is updated in place",
            "24.0 MiB",
            "16.0 MiB reused: a donated array comes out in another layout or dtype",
        )
    ]
    assert stored(**state, aliased=24 * MiB) == []


def test_state_that_is_not_donated_need_not_be_reused() -> None:
    assert stored(parameters=8 * MiB, aliased=0) == []


def test_a_step_that_does_not_fit_is_found() -> None:
    too_much = [("memory, per device", "at most 8.0 MiB", "9.0 MiB")]
    assert stored(peak=9 * MiB, available=8 * MiB) == too_much
    assert stored(peak=8 * MiB, available=8 * MiB) == []
    assert stored(peak=9 * MiB) == []


def test_memory_that_is_given_is_taken_for_what_is_known() -> None:
    memory = Memory(peak=9 * MiB, available=8 * MiB)
    assert len(list(stored_departures(0, memory, None))) == 1
    assert list(stored_departures(0, memory, 10 * MiB)) == []
    assert len(list(stored_departures(0, Memory(peak=9 * MiB), MiB))) == 1


# --------------------------------------------------------------------------------------------------
# How it is said


def test_departures_of_parameters_that_are_alike_are_one() -> None:
    stack = [promised(f"blocks.{n}.w") for n in range(3)]
    records = [gather(p.leaf, "float16") for p in stack] + [scatter(p.leaf) for p in stack]
    (departure,) = found(records, stack)
    assert departure.leaf == "blocks.0.w, blocks.1.w, blocks.2.w"


def test_of_many_parameters_that_are_alike_the_first_are_named() -> None:
    stack = [promised(f"blocks.{n}.w") for n in range(6)]
    records = [gather(p.leaf, "float16") for p in stack] + [scatter(p.leaf) for p in stack]
    (departure,) = found(records, stack)
    assert departure.leaf == "blocks.0.w, blocks.1.w, blocks.2.w, blocks.3.w and 2 more"


def test_departures_with_different_texts_stay_apart() -> None:
    both = [promised("a"), promised("b")]
    records = [gather("a", "float16"), gather("b", "float16", phase="forward")]
    assert [d.leaf for d in found(records, both)] == ["a", "b"]


def test_a_violation_lists_its_departures_with_their_numbers() -> None:
    first, second = Departure("a.w", "dtype", "bfloat16", "float32"), Departure("", "b", "c", "d")
    error = PolicyViolation("Not as stated:", [first, second])
    assert error.departures == (first, second)
    assert str(error).splitlines() == [
        "Not as stated:",
        "  1. a.w: dtype: expected bfloat16, found float32",
        "  2. the step: b: expected c, found d",
    ]


def test_minima_add_up_by_kind_and_leave_out_what_is_not_stated() -> None:
    assert minima_of([promised("a"), promised("b")]) == (
        Minimum("all-gather", 3.5 * MiB),
        Minimum("reduce-scatter", 7 * MiB),
    )
    assert minima_of([promised(shape=(0, 1024)), promised(shards=1)]) == ()
    assert [m.kind for m in minima_of([HSDP])] == [
        "all-gather",
        "reduce-scatter",
        "all-reduce",
    ]


# --------------------------------------------------------------------------------------------------
# Reports


def report(*records: Collective, **fields: Any) -> Report:
    fields = {"promises": (promised(),), "mesh_axes": (("fsdp", 8),), "jax_version": "0", **fields}
    return Report(collectives=records, **fields)


def test_check_says_nothing_of_a_program_that_is_as_stated() -> None:
    assert report(gather(), scatter()).check() is None


def test_check_raises_the_title_the_number_and_all_departures() -> None:
    wrong = report(gather(dtype="float32"), scatter(dtype="bfloat16"))
    with pytest.raises(PolicyViolation) as error:
        wrong.check()
    title, count, *lines = str(error.value).splitlines()
    assert title == "jax 0, mesh fsdp=8: as lowered, before compiler passes"
    assert count == "The program is not what the policies state, in 3 points:"
    assert [line[:5] for line in lines] == ["  1. ", "  2. ", "  3. "]
    assert error.value.departures == tuple(wrong.departures())


def test_check_counts_one_point_in_the_singular() -> None:
    with pytest.raises(PolicyViolation, match=r"in 1 point:\n  1\. the step: bytes of"):
        report(gather(), gather(), scatter()).check()


def test_check_passes_calls_and_tolerance_on() -> None:
    twice = report(gather(), gather(), scatter(), scatter())
    assert len(twice.departures()) == 2
    assert twice.departures(calls=2) == twice.departures(tolerance=1.1) == []
    twice.check(calls=2)
    twice.check(tolerance=1.1)


def test_check_passes_the_axes_on_of_which_nothing_is_stated() -> None:
    own = collective("all-reduce", (4096, 4096), "bfloat16", ("tensor",), size=2)
    assert report(gather(), scatter(), own).departures()
    assert report(gather(), scatter(), own, other_axes=("tensor",)).departures() == []


def test_a_program_without_policies_is_refused() -> None:
    with pytest.raises(ValueError) as error:
        report(gather(), promises=()).check()
    assert "no policies to hold this program against" in str(error.value)
    assert "`model=`" in str(error.value)


def test_memory_of_a_program_that_is_not_compiled_is_refused() -> None:
    with pytest.raises(ValueError, match=r"compiled programs only: .*compile=True"):
        report(gather(), scatter()).departures(memory="16 GiB")


def test_memory_that_is_given_as_text_is_what_a_device_has() -> None:
    needs = report(gather(), scatter(), memory=Memory(peak=9 * MiB), target="8 x TPU v5 lite")
    assert needs.departures() == needs.departures(memory="9 MiB") == []
    (departure,) = needs.departures(memory="8 MiB")
    assert (departure.rule, departure.expected) == ("memory, per device", "at most 8.0 MiB")
    with pytest.raises(ValueError, match="'8 MB each' is no amount of memory"):
        needs.departures(memory="8 MB each")


def test_constants_are_departures_of_a_program_that_is_not_compiled_too() -> None:
    (departure,) = report(gather(), scatter(), constants=MiB).departures()
    assert departure.rule == "arrays are arguments of the step"


def test_what_the_compiler_for_cpus_widens_is_read_before() -> None:
    written, widened = report(gather(), scatter()), gather(dtype="float32")
    compiled = {"lowered": written, "memory": Memory()}
    assert report(widened, scatter(), target="8 x cpu", **compiled).departures() == []
    assert report(widened, scatter(), target="8 x TPU v5 lite", **compiled).departures()


def test_a_compiled_program_is_read_and_not_the_written_one() -> None:
    written = report(gather(dtype="float32"), scatter())
    compiled = report(gather(), scatter(), target="8 x TPU v5", memory=Memory(), lowered=written)
    assert compiled.departures() == []


# --------------------------------------------------------------------------------------------------
# What changes from one report to another


def test_equal_reports_do_not_differ() -> None:
    same = report(gather(), scatter()).difference(report(gather("other"), scatter()))
    assert not same
    assert (same.changes, str(same)) == ((), "no difference")


def test_collectives_that_changed_are_named_by_kind_axes_dtype_and_phase() -> None:
    before = [gather(phase="forward"), gather(phase="backward", executions=3), scatter()]
    after = [gather(phase="forward", executions=2), scatter(), copied()]
    changed = difference(before, after, {}, {})
    assert [
        (c.what, c.before, c.after, c.count_before, c.count_after) for c in changed.changes
    ] == [
        ("all-gather over fsdp in bfloat16, forward", 1.75 * MiB, 3.5 * MiB, 1, 2),
        ("all-gather over fsdp in bfloat16, backward", 5.25 * MiB, 0.0, 3, 0),
        ("all-reduce over replica in float32", 0.0, MiB, 0, 1),
    ]
    assert changed


def test_as_many_bytes_in_more_collectives_are_a_change() -> None:
    parts = [gather(rows=64), gather(rows=64)]
    (change,) = difference([gather()], parts, {}, {}).changes
    assert (change.before, change.after) == (1.75 * MiB, 1.75 * MiB)
    assert (change.count_before, change.count_after) == (1, 2)


def test_groups_without_axes_and_single_devices_are_told_apart() -> None:
    records = [gather(axes=(), groups=GROUPS), gather(axes=(), size=1)]
    names = [change.what for change in difference(records, [], {}, {}).changes]
    assert names == [
        f"all-gather over {GROUPS} in bfloat16",
        "all-gather over one device in bfloat16",
    ]


def test_memory_is_compared_where_both_are_known() -> None:
    before = {"peak": 8.0 * MiB, "rest": 3.0, "code": 1.0}
    after = {"peak": 4.0 * MiB, "rest": 3.0, "host": 2.0}
    changed = difference([], [], before, after)
    assert [(c.what, c.before, c.after) for c in changed.changes] == [
        ("memory: peak", 8.0 * MiB, 4.0 * MiB),
        ("memory: code", 1.0, 0.0),
        ("memory: host", 0.0, 2.0),
    ]
    assert not difference([], [], before, {})


def test_reports_compare_the_memory_of_compiled_programs() -> None:
    small, large = (report(memory=Memory(temporaries=n * MiB, peak=n * MiB)) for n in (1, 2))
    assert {(c.before, c.after) for c in small.difference(large).changes} == {(MiB, 2 * MiB)}
    assert not small.difference(report())


def test_a_difference_is_printed_as_a_table() -> None:
    before = [gather(), scatter()]
    after = [gather(executions=2), copied(rows=512)]
    table = str(difference(before, after, {"peak": 8.0 * MiB}, {"peak": 6.0 * MiB}))
    assert table.splitlines() == [
        "                                     count          bytes               change",
        "all-gather over fsdp in bfloat16         1  -> 2  1.8 MiB  -> 3.5 MiB  +100.0%",
        "reduce-scatter over fsdp in float32      1  -> 0  3.5 MiB      -> 0 B     gone",
        "all-reduce over replica in float32       0  -> 1      0 B  -> 2.0 MiB      new",
        "memory: peak                                      8.0 MiB  -> 6.0 MiB   -25.0%",
    ]


# --------------------------------------------------------------------------------------------------
# Sizes that a person writes


@pytest.mark.parametrize(
    ("written", "size"),
    [
        (17179869184, 17179869184),
        ("17179869184", 17179869184),
        (8e10, 80_000_000_000),
        ("512 B", 512),
        ("1KiB", 1024),
        ("1.5 MiB", 1_572_864),
        ("16 GiB", 17_179_869_184),
        (" 2 TiB ", 2_199_023_255_552),
        ("1 KB", 1000),
        ("2 MB", 2_000_000),
        ("80 GB", 80_000_000_000),
        ("0.5 TB", 500_000_000_000),
    ],
)
def test_an_amount_of_memory_is_read(written: Any, size: int) -> None:
    assert parse_bytes(written) == size


@pytest.mark.parametrize(
    "written",
    ["", "GiB", "16 gib", "16 PiB", "-1 GiB", -5, 0, "0 GiB", "1.2.3 GiB", ".", None, True],
)
def test_what_is_no_amount_of_memory_is_refused_with_what_is_one(written: Any) -> None:
    with pytest.raises(ValueError) as error:
        parse_bytes(written)
    assert str(error.value) == (
        f"{written!r} is no amount of memory; write bytes, or a number with one of "
        'B, KiB, KB, MiB, MB, GiB, GB, TiB, TB, such as "16 GiB"'
    )
