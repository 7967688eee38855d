"""The reader of compiled programs: their text as data, and how often their loops run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_topology import mesh_of_absent, needs_gpu_compiler, needs_tpu_compiler

from jfsdp.inspect.hlo import Array, Computation, Instruction, Module, parse, trip_count
from jfsdp.inspect.topology import compiler_options

# As XLA writes it: tables of source lines, computations, the entry last.
STEP = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

FileNames
1 "/model.py"

StackFrames
1 {file_location_id=1 parent_frame_id=1}


%add (x: f32[], y: f32[]) -> f32[] {
  %zero = f32[]{:T(128)} constant(0)
  %y = f32[]{:T(128)} parameter(1)
  %x = f32[]{:T(128)} parameter(0)
  ROOT %sum = f32[]{:T(128)} add(%x, %y)
  %unused = f32[]{:T(128)} add(%x, %zero)
}

%pair (p: (f32[8], s32[])) -> f32[8] {
  %p = (f32[8]{0:T(128)S(1)}, s32[]{:T(128)}) parameter(0)
  %first = f32[8]{0:T(128)S(1)} get-tuple-element(%p), index=0
}, execution_thread="host"

ENTRY %main.5_spmd (a: f32[8]) -> f32[8] {
  %a = f32[8]{0:T(128)} parameter(0)
  ROOT %all-reduce.1 = f32[8]{0:T(128)} all-reduce(%a), channel_id=1, to_apply=%add
}

"""


def only(line: str) -> Instruction:
    """An instruction as it is read in a program of nothing else."""
    (instruction,) = parse(f"ENTRY %main () -> f32[] {{\n  {line}\n}}\n")["main"]
    return instruction


# --------------------------------------------------------------------------------------------------
# Computations


def test_computations_are_found_by_name_and_the_entry_is_known() -> None:
    module = parse(STEP)
    assert list(module.computations) == ["add", "pair", "main.5_spmd"]
    assert module.entry == "main.5_spmd"
    assert module["pair"] is module.computations["pair"]


def test_instructions_stand_in_the_order_of_the_schedule() -> None:
    assert [at.name for at in parse(STEP)["add"]] == ["zero", "y", "x", "sum", "unused"]


def test_the_root_is_the_instruction_that_is_marked() -> None:
    assert parse(STEP)["add"].root == "sum"


def test_where_none_is_marked_the_last_instruction_is_the_root() -> None:
    assert parse(STEP)["pair"].root == "first"


def test_parameters_are_found_by_number_whatever_their_order() -> None:
    add = parse(STEP)["add"]
    found = [add.parameter(number) for number in range(3)]
    assert [at and at.name for at in found] == ["x", "y", None]


def test_a_program_without_percent_signs_is_read_alike() -> None:
    module, bare = parse(STEP), parse(STEP.replace("%", ""))
    assert bare.entry == module.entry
    for name, computation in module.computations.items():
        assert bare[name].root == computation.root
        for at, other in zip(computation, bare[name], strict=True):
            assert (other.name, other.operands) == (at.name, at.operands)
            assert other.called("to_apply") == at.called("to_apply")


def test_a_computation_without_a_signature_is_read() -> None:
    module = parse("ENTRY main {\n  ROOT x = f32[] constant(1)\n}\n")
    assert (module.entry, module["main"].root) == ("main", "x")


@pytest.mark.parametrize("text", ["", "module @jit_step {\n}\n", STEP.replace("ENTRY ", "")])
def test_a_text_without_an_entry_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no compiled program: it has no ENTRY computation$"):
        parse(text)


@pytest.mark.parametrize(
    "rest", ["f32[8]", "f32[8]{0} 5", "(f32[8], s32[]) %x", "f32[8]{0} %x(%y)"]
)
def test_an_instruction_that_cannot_be_read_is_named_and_quoted(rest: str) -> None:
    with pytest.raises(ValueError) as error:
        only(f"%odd.1 = {rest}")
    assert str(error.value) == f"jfsdp.inspect: cannot read the instruction odd.1: {rest}"


# --------------------------------------------------------------------------------------------------
# Instructions


@pytest.mark.parametrize(
    ("type_text", "arrays"),
    [
        ("f32[]", [("float32", ())]),
        ("pred[4]{0}", [("bool", (4,))]),
        ("f8e4m3fn[4,2]{1,0}", [("float8_e4m3fn", (4, 2))]),
        ("bf16[8,1,512]{2,1,0:T(2,128)(2,1)S(1)}", [("bfloat16", (8, 1, 512))]),
        ("f32[<=10,2]{1,0}", [("float32", (10, 2))]),
        ("(f32[8]{0}, token[])", [("float32", (8,))]),
        ("()", []),
        (
            "((f32[16]{0}, c64[8]{0}), (f32[2]{0:T(8)}, u8[1]{0}), u32[]{:S(2)})",
            [
                ("float32", (16,)),
                ("complex64", (8,)),
                ("float32", (2,)),
                ("uint8", (1,)),
                ("uint32", ()),
            ],
        ),
        (
            "(s32[2]{0:S(4)}, /*index=1*/bf16[1,128]{1,0:T(8,128)(2,1)S(1)})",
            [("int32", (2,)), ("bfloat16", (1, 128))],
        ),
    ],
)
def test_arrays_of_a_result_are_read_whatever_their_layout(
    type_text: str, arrays: list[tuple[str, tuple[int, ...]]]
) -> None:
    read = only(f'%x = {type_text} custom-call(%a, %b), custom_call_target="f"')
    assert read.arrays == tuple(Array(*array) for array in arrays)
    assert (read.opcode, read.operands) == ("custom-call", ("a", "b"))


@pytest.mark.parametrize(
    ("text", "operands"),
    [
        ("", ()),
        ("%a", ("a",)),
        ("%a.1, %b-2.clone", ("a.1", "b-2.clone")),
        ("a, b", ("a", "b")),
        ("%a, /*index=1*/%b", ("a", "b")),
        ("a, /*index=1*/b", ("a", "b")),
        ("f32[8,4]{1,0:T(8,128)} %a, (f32[2]{0}, /*index=1*/s32[]) %b", ("a", "b")),
    ],
)
def test_operands_are_named_in_order(text: str, operands: tuple[str, ...]) -> None:
    assert only(f"%x = f32[] custom-call({text}), channel_id=1").operands == operands


@pytest.mark.parametrize("value", ["5", "-4", "0.5", "{1, 2}", "{ { 1, 2 }, { 3, 4 } }", "{...}"])
def test_a_constant_has_its_value_and_no_operands(value: str) -> None:
    read = only(f"%x = s32[2,2]{{1,0}} constant({value}), metadata={{}}")
    assert (read.operand_text, read.operands, read.opcode) == (value, (), "constant")


def test_a_parameter_has_no_operands() -> None:
    read = only("%x = s32[] parameter(3)")
    assert (read.operand_text, read.operands) == ("3", ())


# Brackets that do not close and escaped quotes in strings, as in TPUs' backend_config.
STRINGS = r'backend_config={"debug":"\nshard: (1, {2 \"](\" ","id":"7"}'


def test_brackets_and_quotes_in_strings_do_not_end_an_instruction() -> None:
    read = only(f'%x = f32[8]{{0}} custom-call(%a, "("), calls=%f, {STRINGS}, dimensions={{1}}')
    assert read.operand_text == '%a, "("'
    assert read.attributes == f", calls=%f, {STRINGS}, dimensions={{1}}"
    assert read.attribute(r"dimensions=\{(\d+)") == "1"


def test_an_attribute_that_is_not_there_is_empty() -> None:
    read = only("%x = f32[] add(%a, %b)")
    assert (read.attribute("channel_id=(.)"), read.called("calls"), read.op_name) == ("",) * 3
    assert read.branches() == ()


def test_called_computations_are_named_by_key() -> None:
    read = only("%x = f32[] while(%a), condition=%cond.1, body=%wide.body-2.clone")
    assert (read.called("condition"), read.called("body")) == ("cond.1", "wide.body-2.clone")


def test_a_key_that_ends_another_one_is_not_taken_for_it() -> None:
    assert only("%x = f32[] f(%a), async_calls=%a, calls=%b").called("calls") == "b"


@pytest.mark.parametrize(
    ("attributes", "names"),
    [
        ("branch_computations={%first.1, %second}", ("first.1", "second")),
        ("true_computation=%yes, false_computation=%no", ("yes", "no")),
        ('custom_call_target="f", called_computations={%kernel}', ("kernel",)),
        ("branch_computations={}", ()),
    ],
)
def test_branches_are_named(attributes: str, names: tuple[str, ...]) -> None:
    assert only(f"%x = f32[] conditional(%a, %b), {attributes}").branches() == names


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("jit(f)/jvp()/dot_general", "jit(f)/jvp()/dot_general"),
        (r"a[\'x\']/b", "a['x']/b"),
        (r"jfsdp_gather[\"x\"]/all_gather", 'jfsdp_gather["x"]/all_gather'),
        (r"gr\303\266\303\237e \\", "größe \\"),
    ],
)
def test_the_name_of_an_operation_is_read_with_its_escapes(written: str, name: str) -> None:
    metadata = f'metadata={{op_name="{written}" stack_frame_id=3}}'
    assert only(f"%x = f32[] add(%a, %b), {metadata}").op_name == name


# --------------------------------------------------------------------------------------------------
# Loops as TPU programs write them: no count, a counter in a tuple


def counter_loop(
    start: str = "constant(0)",
    bound: str = "constant(8)",
    step: str = "add(%i, %by)",
    compared: str = "compare(%c, %n), direction=LT",
    *,
    by: str = "constant(1)",
    carried: str = "constant(8)",
    carried_on: str = "%k",
    config: str = "",
) -> int | None:
    """How often it runs: a loop over a counter, an array and one more number."""
    types = "s32[]{:T(128)}, f32[8]{0:T(128)}, s32[]{:T(128)}"
    module = parse(f"""HloModule jit_step
%body (b: ({types})) -> ({types}) {{
  %by = s32[]{{:T(128)}} {by}
  %b = ({types}) parameter(0)
  %i.0 = s32[]{{:T(128)}} get-tuple-element(%b), index=0
  %i = s32[]{{:T(128)S(6)}} copy(%i.0)
  %x = f32[8]{{0:T(128)}} get-tuple-element(%b), index=1
  %k = s32[]{{:T(128)}} get-tuple-element(%b), index=2
  %other = s32[]{{:T(128)}} add(%k, %by)
  %next = s32[]{{:T(128)}} {step}
  ROOT %out = ({types}) tuple(%next, %x, {carried_on})
}}
%condition (t: ({types})) -> pred[] {{
  %t = ({types}) parameter(0)
  %c = s32[]{{:T(128)}} get-tuple-element(%t), index=0
  %k.1 = s32[]{{:T(128)}} get-tuple-element(%t), index=2
  %n = s32[]{{:T(128)}} {bound}
  %always = pred[] constant(true)
  %lt = pred[]{{:T(512)}} compare(%c, %n), direction=LT
  ROOT %lt.1 = pred[]{{:T(512)}} {compared}
}}
ENTRY %main (a: f32[8], s: s32[]) -> ({types}) {{
  %a = f32[8]{{0:T(128)}} parameter(0)
  %s = s32[]{{:T(128)}} parameter(1)
  %three = s32[]{{:T(128)}} constant(3)
  %start = s32[]{{:T(128)}} {start}
  %copy-start = (s32[], s32[], u32[]) copy-start(%start)
  %copy-done = s32[]{{:T(128)}} copy-done(%copy-start)
  %more = s32[]{{:T(128)}} {carried}
  %tuple.1 = ({types}) tuple(%copy-done, %a, %more)
  ROOT %while.1 = ({types}) while(%tuple.1), condition=%condition, body=%body{config}
}}
""")
    entry = module["main"]
    return trip_count(entry.instructions["while.1"], entry, module)


NUMBERS = [
    # start, bound, step, direction, trips
    (0, 8, 1, "LT", 8),
    (2, 8, 3, "LT", 2),
    (2, 8, 2, "LE", 4),
    (2, 9, 3, "LE", 3),
    (8, 8, 1, "LT", 0),
    (8, 8, 1, "LE", 1),
    (9, 8, 1, "LE", 0),
    (-4, 4, 2, "LT", 4),
    (12, 8, -3, "GT", 2),
    (14, 8, -3, "GE", 3),
    (8, 0, -1, "GT", 8),
    (0, -8, -1, "GE", 9),
]


@pytest.mark.parametrize(("start", "bound", "step", "direction", "trips"), NUMBERS)
def test_a_counter_is_followed_to_its_bound(
    start: int, bound: int, step: int, direction: str, trips: int
) -> None:
    compared = f"compare(%c, %n), direction={direction}"
    read = counter_loop(
        f"constant({start})", f"constant({bound})", compared=compared, by=f"constant({step})"
    )
    assert read == trips


@pytest.mark.parametrize(("start", "bound", "step", "direction", "trips"), NUMBERS)
def test_the_bound_may_stand_before_the_counter(
    start: int, bound: int, step: int, direction: str, trips: int
) -> None:
    mirrored = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}[direction]
    compared = f"compare(%n, %c), direction={mirrored}"
    read = counter_loop(
        f"constant({start})", f"constant({bound})", compared=compared, by=f"constant({step})"
    )
    assert read == trips


def steps_of(start: int, bound: int, step: int, direction: str) -> int | None:
    """How often such a loop runs, by running it; None if it does not end."""
    goes_on: dict[str, Callable[[int], bool]] = {
        "LT": lambda i: i < bound,
        "LE": lambda i: i <= bound,
        "GT": lambda i: i > bound,
        "GE": lambda i: i >= bound,
    }
    for trips in range(100):
        if not goes_on[direction](start):
            return trips
        start += step
    return None


@hypothesis.given(
    st.integers(-9, 9),
    st.integers(-9, 9),
    st.integers(-4, 4),
    st.sampled_from(["LT", "LE", "GT", "GE"]),
)
def test_a_count_is_that_of_the_loop_or_none(
    start: int, bound: int, step: int, direction: str
) -> None:
    compared = f"compare(%c, %n), direction={direction}"
    read = counter_loop(
        f"constant({start})", f"constant({bound})", compared=compared, by=f"constant({step})"
    )
    towards_bound = step > 0 if direction[0] == "L" else step < 0
    assert read == (steps_of(start, bound, step, direction) if towards_bound else None)


def test_the_constant_may_stand_before_the_counter_in_the_sum() -> None:
    assert counter_loop(step="add(%by, %i)") == 8


def test_a_bound_that_the_loop_carries_unchanged_is_followed() -> None:
    assert counter_loop(bound="copy(%k.1)", carried="constant(5)") == 5


@pytest.mark.parametrize("opcode", ["copy", "bitcast", "convert"])
def test_copies_of_the_start_are_seen_through(opcode: str) -> None:
    assert counter_loop(f"{opcode}(%three)") == 5


def test_a_stated_count_is_believed() -> None:
    stated = ', backend_config={"known_trip_count":{"n":"12"},"known_init_step":{"step":"2"}}'
    assert counter_loop(config=stated) == 12


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"start": "copy(%s)"}, id="start not known"),
        pytest.param({"start": "constant(0.5)"}, id="start no whole number"),
        pytest.param({"bound": "constant(7.5)"}, id="bound no whole number"),
        pytest.param({"by": "constant(0.5)"}, id="step no whole number"),
        pytest.param({"by": "constant(0)"}, id="step of zero"),
        pytest.param({"by": "constant(-1)"}, id="away from the bound"),
        pytest.param({"step": "multiply(%i, %by)"}, id="no sum"),
        pytest.param({"step": "add(%k, %by)"}, id="sum of another number"),
        pytest.param({"step": "add(%i, %k)"}, id="step not constant"),
        pytest.param({"step": "copy(%i)"}, id="counter that does not move"),
        pytest.param({"bound": "copy(%k.1)", "carried_on": "%other"}, id="bound that moves"),
        pytest.param({"bound": "copy(%k.1)", "carried": "copy(%s)"}, id="bound not known"),
        pytest.param({"compared": "compare(%c, %n), direction=NE"}, id="not equal"),
        pytest.param({"compared": "and(%lt, %always)"}, id="two conditions"),
        pytest.param({"compared": "fusion(%c), calls=%less"}, id="fused comparison"),
        pytest.param({"compared": "compare(%k.1, %c), direction=LT"}, id="of the wrong one"),
    ],
)
def test_a_loop_that_cannot_be_followed_has_no_count(changes: dict[str, str]) -> None:
    assert counter_loop(**changes) is None


def test_a_loop_over_what_is_no_tuple_written_there_has_no_count() -> None:
    text = """
%go (c: (s32[])) -> pred[] {
  %c = (s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(3)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}
%body (b: (s32[])) -> (s32[]) {
  ROOT %b = (s32[]) parameter(0)
}
ENTRY %main (a: (s32[])) -> (s32[]) {
  %a = (s32[]) parameter(0)
  ROOT %loop = (s32[]) while(%a), condition=%go, body=%body
}
"""
    module = parse(text)
    assert trip_count(module["main"].instructions["loop"], module["main"], module) is None


# --------------------------------------------------------------------------------------------------
# Loops as the compilers write them

EVERY_TARGET = pytest.mark.parametrize(
    "target",
    [
        "cpu",
        pytest.param("v5e:2x4", marks=needs_tpu_compiler),
        pytest.param("h100:8", marks=needs_gpu_compiler),
    ],
)


def compiled(target: str, per_device: Callable[..., Any]) -> Module:
    """The program in which each of 8 devices runs `per_device` on one array."""
    mesh = (
        jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
        if target == "cpu"
        else mesh_of_absent(target, AxisType.Auto)
    )
    region = jax.shard_map(
        per_device, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"fsdp"}, check_vma=False
    )
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=NamedSharding(mesh, P()))
    options = compiler_options(mesh) or None
    return parse(jax.jit(region).lower(x).compile(compiler_options=options).as_text())


def loops(computation: Computation, module: Module) -> Iterator[int | None]:
    """The counts of a computation's loops, each before those inside it."""
    for at in computation:
        if at.opcode == "while":
            yield trip_count(at, computation, module)
            yield from loops(module[at.called("body")], module)


def trips(target: str, per_device: Callable[..., Any]) -> list[int | None]:
    module = compiled(target, per_device)
    return list(loops(module[module.entry], module))


def summed(x: jax.Array) -> jax.Array:
    """What no compiler takes out of a loop."""
    return lax.psum(jnp.tanh(x), "fsdp")


def scanned(body: Callable[..., Any], length: int) -> Callable[..., Any]:
    return lambda x: lax.scan(lambda carry, _: (body(carry), None), x, length=length)[0]


def counted(first: Any, goes_on: Callable[..., Any], step: Any, bound: Any = 8) -> Any:
    return lambda x: lax.while_loop(
        lambda carry: goes_on(carry[0], carry[1]),
        lambda carry: (carry[0] + step, carry[1], summed(carry[2])),
        (jnp.asarray(first), jnp.asarray(bound), x),
    )[2]


@EVERY_TARGET
@pytest.mark.parametrize(
    ("per_device", "expected"),
    [
        pytest.param(scanned(summed, 5), [5], id="scan"),
        pytest.param(scanned(scanned(summed, 3), 5), [5, 3], id="scan in scan"),
        pytest.param(lambda x: lax.fori_loop(2, 9, lambda _, c: summed(c), x), [7], id="fori_loop"),
        pytest.param(counted(2, lambda i, n: n >= i, 2), [4], id="while, bound on the left"),
        pytest.param(counted(14, lambda i, n: i > n, -3), [2], id="while, downwards"),
    ],
)
def test_loops_of_known_length_are_counted(
    target: str, per_device: Callable[..., Any], expected: list[int]
) -> None:
    assert trips(target, per_device) == expected


@EVERY_TARGET
def test_a_loop_until_the_data_says_so_has_no_count(target: str) -> None:
    assert trips(target, lambda x: lax.while_loop(lambda c: c.sum() < 3, summed, x)) == [None]


@EVERY_TARGET
def test_a_loop_to_the_counter_of_another_one_has_no_count(target: str) -> None:
    def inner(i: jax.Array, x: jax.Array) -> jax.Array:
        return lax.fori_loop(jnp.int32(0), i, lambda _, c: summed(c), x)

    assert trips(target, lambda x: lax.fori_loop(0, 5, inner, x)) == [5, None]


@needs_tpu_compiler
def test_a_loop_that_counts_in_halves_has_no_count_on_tpus() -> None:
    assert trips("v5e:2x4", counted(0.0, lambda i, n: i < n, 0.5, bound=8.0)) == [None]


@hypothesis.settings(max_examples=8, derandomize=True)
@hypothesis.given(st.lists(st.integers(2, 40), min_size=1, max_size=3))
def test_nested_scans_of_any_length_are_counted(lengths: list[int]) -> None:
    body: Callable[..., Any] = summed
    for length in reversed(lengths):
        body = scanned(body, length)
    assert trips("cpu", body) == lengths
