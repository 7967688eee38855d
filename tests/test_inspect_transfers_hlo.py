"""What a compiled program moves to and from host memory, and does with it, read from its text."""

from __future__ import annotations

from jfsdp.inspect.compiled_transfers import compiled_transfers
from jfsdp.inspect.transfers import HostWork, Traffic, traffic_line

KIB = 2**10

HOST, DEVICE = "f32[4,256]{1,0:S(5)}", "f32[4,256]{1,0}"
SLICE = "f32[1,256]{1,0}"


def program(*body: str, before: str = "") -> str:
    lines = "\n".join(f"  {line}" for line in body)
    return f"HloModule jit_step\n\n{before}\n\nENTRY %main (p: f32[4,256]) -> f32[4,256] {{\n{lines}\n}}\n"


GIVEN = f"%p = {HOST} parameter(0)"
COPIED = (
    f"%there = ({DEVICE}, {HOST}, u32[]) copy-start(%p)",
    f"%here = {DEVICE} copy-done(%there)",
)


def test_copies_are_moves_in_either_direction() -> None:
    back = f'ROOT %back = {HOST} copy(%here), metadata={{op_name="jit(step)/transpose(jvp())/x"}}'
    transfers, work = compiled_transfers(program(GIVEN, *COPIED, back))
    assert [(t.source, t.target, t.shape, t.instruction) for t in transfers] == [
        ("host", "device", (4, 256), "there"),
        ("device", "host", (4, 256), "back"),
    ]
    assert {t.phase for t in transfers} == {"backward"}
    assert work == []


def test_a_copy_in_host_memory_is_neither() -> None:
    transfers, _ = compiled_transfers(program(GIVEN, f"ROOT %c = {HOST} copy(%p)"))
    traffic = Traffic(tuple(transfers))
    assert (traffic.to_device, traffic.to_host) == (0, 0)
    assert traffic_line(traffic).endswith("4.0 KiB copied from host memory to host memory")


def test_a_slice_of_a_stack_moves_what_it_takes() -> None:
    start = (
        f"%s = (({HOST}, s32[], s32[]), {SLICE}, u32[]) dynamic-slice-start(%p, %i, %i), "
        "dynamic_slice_sizes={1,256}"
    )
    done = f"ROOT %d = {SLICE} dynamic-slice-done(%s)"
    (transfer,), _ = compiled_transfers(program(GIVEN, "%i = s32[] constant(0)", start, done))
    assert (transfer.target, transfer.shape) == ("device", (1, 256))


UPDATE = f"""\
%update (a: f32[4,256], b: f32[1,256], i: s32[]) -> f32[4,256] {{
  %a = {HOST} parameter(0)
  %b = {SLICE} parameter(1)
  %i = s32[] parameter(2)
  %j = s32[] add(%i, %i)
  ROOT %u = {HOST} dynamic-update-slice(%a, %b, %j, %i)
}}"""


def test_an_update_of_a_stack_moves_what_it_writes() -> None:
    body = (
        GIVEN,
        f"%b = {SLICE} broadcast(%z), dimensions={{}}",
        "%i = s32[] constant(0)",
        f"ROOT %f = {HOST} fusion(%p, %b, %i), kind=kLoop, calls=%update",
    )
    (transfer,), work = compiled_transfers(
        program(body[0], "%z = f32[] constant(0)", *body[1:], before=UPDATE)
    )
    assert (transfer.source, transfer.target, transfer.shape) == ("device", "host", (1, 256))
    assert work == []


def test_a_loop_multiplies_what_it_moves() -> None:
    state = f"(s32[], {HOST})"
    loop = f"""\
%body (s: {state}) -> {state} {{
  %s = {state} parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %h = {HOST} get-tuple-element(%s), index=1
  %c = {DEVICE} copy(%h), metadata={{op_name="jit(step)/jvp()/while/body/x"}}
  ROOT %t = {state} tuple(%i, %h)
}}

%condition (s: {state}) -> pred[] {{
  %s = {state} parameter(0)
  ROOT %go = pred[] constant(true)
}}"""
    body = (
        GIVEN,
        "%z = s32[] constant(0)",
        f"%t = {state} tuple(%z, %p)",
        f"%w = {state} while(%t), condition=%condition, body=%body, "
        'backend_config={"known_trip_count":{"n":"12"}}',
        f"ROOT %r = {HOST} get-tuple-element(%w), index=1",
    )
    (transfer,), _ = compiled_transfers(program(*body, before=loop))
    assert (transfer.executions, transfer.unknown_trips, transfer.phase) == (12, False, "forward")
    (transfer,), _ = compiled_transfers(program(*body, before=loop).replace("known", "no"))
    assert (transfer.executions, transfer.unknown_trips) == (1, True)


def test_of_a_conditional_the_branch_that_moves_most_counts() -> None:
    branches = f"""\
%most (h: f32[4,256]) -> f32[4,256] {{
  %h = {HOST} parameter(0)
  ROOT %c = {DEVICE} copy(%h)
}}

%none (g: f32[4,256]) -> f32[4,256] {{
  %g = {HOST} parameter(0)
  %z = f32[] constant(0)
  ROOT %b = {DEVICE} broadcast(%z), dimensions={{}}
}}"""
    body = (
        GIVEN,
        "%on = pred[] constant(true)",
        f"ROOT %r = {DEVICE} conditional(%on, %p, %p), true_computation=%most, false_computation=%none",
    )
    (transfer,), _ = compiled_transfers(program(*body, before=branches))
    assert transfer.target == "device"


BY_XLA = f'%n = {DEVICE} multiply(%a, %a), metadata={{op_name="multiply.12"}}'
ADD = 'add(%a, %a), metadata={op_name="jit(step)/compute_on/add"}'


def host_call(operation: str, operand: str = HOST) -> str:
    called = f"""\
%called (a: f32[4,256]) -> f32[4,256] {{
  %a = {DEVICE} parameter(0)
  {BY_XLA if "add" in operation else ""}
  ROOT %m = {DEVICE} {operation}
}}, execution_thread="host\""""
    given = GIVEN if operand == HOST else f"%p = {operand} parameter(0)"
    call = (
        f'%s = (({operand}), {HOST}, u32[]) custom-call-start(%p), execution_thread="host", '
        'custom_call_target="HostExecute", called_computations={%called}'
    )
    return program(given, call, f"ROOT %d = {HOST} custom-call-done(%s)", before=called)


def test_what_the_host_is_asked_to_compute_moves_nothing() -> None:
    transfers, (work,) = compiled_transfers(host_call(ADD))
    assert transfers == []
    assert (work.where, work.asked, work.bytes) == ("host", True, 8 * KIB)


def test_what_it_takes_from_the_device_is_moved() -> None:
    (transfer,), _ = compiled_transfers(host_call(ADD, DEVICE))
    assert (transfer.source, transfer.target) == ("device", "host")


def test_what_it_computes_unasked_is_told_by_its_names() -> None:
    _, (work,) = compiled_transfers(host_call(ADD.replace("compute_on", "checkpoint")))
    assert (work.asked, work.operation) == (False, "jit(step)/checkpoint/add")
    _, (work,) = compiled_transfers(host_call("add(%a, %a)"))
    assert (work.asked, work.operation) == (False, "")


def test_what_it_only_copies_is_no_work() -> None:
    assert compiled_transfers(host_call("copy(%a)"))[1] == []


def test_a_kernel_on_host_memory_is_work_of_the_device() -> None:
    add = f'ROOT %add = {HOST} add(%p, %p), metadata={{op_name="jit(step)/add"}}'
    transfers, (work,) = compiled_transfers(program(GIVEN, add))
    assert transfers == []
    assert work == HostWork("device", "add", "jit(step)/add", 12 * KIB, asked=False)


def test_a_fusion_that_computes_on_host_memory_is_work() -> None:
    fused = UPDATE.replace(
        f"%b = {SLICE} parameter(1)", f"%x = {SLICE} parameter(1)\n  %b = {SLICE} negate(%x)"
    )
    body = (
        GIVEN,
        "%z = f32[] constant(0)",
        f"%b = {SLICE} broadcast(%z), dimensions={{}}",
        "%i = s32[] constant(0)",
        f"ROOT %f = {HOST} fusion(%p, %b, %i), kind=kLoop, calls=%update",
    )
    transfers, (work,) = compiled_transfers(program(*body, before=fused))
    assert (transfers, work.where, work.instruction) == ([], "device", "f")


def test_a_program_without_host_memory_moves_nothing() -> None:
    assert compiled_transfers("no program at all") == ([], [])
