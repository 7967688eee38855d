"""The inspector's memory: what a compiled step needs of one device, and for which arrays."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from helpers import make_mesh
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jfsdp
from jfsdp.inspect.allocation import temporary_bytes
from jfsdp.inspect.buffers import Buffer, buffers_at_peak, largest_buffers
from jfsdp.inspect.memory import Argument, Memory, from_failure, memory_table, read_memory
from jfsdp.inspect.topology import compiler_options

COPIED = P()
KIB, MIB, GIB = 2**10, 2**20, 2**30
CPU, TPU, GPU = "cpu", "v5e:2x4", "h100:8"
V5E_BYTES = 16 * GIB - 258 * MIB  # what the compiler for v5e lets a program have


def mesh_on(target: str) -> Mesh:
    """A mesh of 8 devices with one axis."""
    if target == CPU:
        return make_mesh(fsdp=8)
    try:
        devices = jfsdp.topology(target)
    except ImportError as error:
        pytest.skip(str(error))
    return jax.make_mesh((8,), ("fsdp",), (AxisType.Auto,), devices=devices)


def array(mesh: Mesh, *shape: int, spec: P = COPIED, dtype: Any = jnp.float32, **where: str) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec, **where))


def compile_for(mesh: Mesh, step: Any, *args: Any, **jit: Any) -> jax.stages.Compiled:
    lowered = jax.jit(step, **jit).lower(*args)
    return lowered.compile(compiler_options=compiler_options(mesh) or None)


def argument(kind: Any, size: int, memory_kind: str | None = None) -> Argument:
    return Argument(kind, kind, (), "float32", size, memory_kind)


def update(w: jax.Array, moment: jax.Array, x: jax.Array) -> Any:
    gradient = x.T @ (x @ w)
    moment = 0.9 * moment + gradient
    return w - moment, moment, gradient.sum()


def compile_update(mesh: Mesh, **jit: Any) -> jax.stages.Compiled:
    """Arguments of 2 MiB, 2 MiB and 1 MiB per device."""
    state = array(mesh, 512, 1024)
    return compile_for(mesh, update, state, state, array(mesh, 4096, 512, spec=P("fsdp")), **jit)


def stats_of(compiled: jax.stages.Compiled) -> Any:
    return compiled.memory_analysis()


def everything(compiled: jax.stages.Compiled) -> list[Buffer]:
    return buffers_at_peak(compiled.as_text() or "")


NAMED = (argument("parameters", 2 * MIB), argument("optimizer", 2 * MIB), argument("rest", MIB))
on_all = pytest.mark.parametrize("target", [CPU, TPU, GPU])


# --------------------------------------------------------------------------------------------------
# What memory is for


@on_all
def test_arguments_count_by_kind(target: str) -> None:
    memory = read_memory(compile_update(mesh_on(target)), NAMED)
    assert (memory.parameters, memory.optimizer, memory.rest) == (2 * MIB, 2 * MIB, MIB)
    assert (memory.persistent, memory.padding, memory.unused) == (5 * MIB, 0, 0)


@on_all
def test_donated_state_is_updated_in_place(target: str) -> None:
    memory = read_memory(compile_update(mesh_on(target), donate_argnums=(0, 1)), NAMED)
    assert memory.aliased == 4 * MIB
    assert memory.outputs_not_aliased <= KIB  # the scalar, and the addresses of the outputs


@on_all
def test_what_is_not_donated_is_there_twice(target: str) -> None:
    memory = read_memory(compile_update(mesh_on(target)), NAMED)
    assert memory.aliased == 0
    assert 4 * MIB <= memory.outputs_not_aliased <= 4 * MIB + KIB


@on_all
def test_the_peak_is_the_sum_of_its_parts(target: str) -> None:
    memory = read_memory(compile_update(mesh_on(target), donate_argnums=(0, 1)), NAMED)
    parts = memory.outputs_not_aliased + memory.temporaries + memory.code
    assert memory.peak == 5 * MIB + parts
    assert memory.temporaries >= 0


def test_temporaries_are_in_the_peak_on_cpu() -> None:
    # XLA's own peak leaves them out there.
    compiled = compile_update(mesh_on(CPU), donate_argnums=(0, 1))
    memory = read_memory(compiled, NAMED)
    stats = stats_of(compiled)
    assert memory.temporaries >= 2 * MIB  # x.T @ ..., all-reduced
    assert abs(memory.temporaries - stats.temp_size_in_bytes) <= KIB
    assert memory.peak > stats.peak_memory_in_bytes


@on_all
def test_a_version_that_tells_no_total_gives_the_same(target: str) -> None:
    compiled = compile_for(mesh_on(target), jnp.sin, array(mesh_on(target), 8))
    # A heap of 60 of which 10 are lost. TPUs count these twice; the peak of GPUs leaves them out, that
    # of CPUs the whole heap.
    stats = types.SimpleNamespace(
        temp_size_in_bytes=70 if target == TPU else 60,
        peak_memory_in_bytes=1000 if target == CPU else 1050,
    )
    assert temporary_bytes(compiled, stats, 1000) == 60
    # More in VMEM than in HBM.
    stats = types.SimpleNamespace(temp_size_in_bytes=7, peak_memory_in_bytes=1900)
    assert temporary_bytes(compiled, stats, 1000) == 7


def test_what_no_one_names_is_the_rest() -> None:
    memory = read_memory(compile_update(mesh_on(CPU)), NAMED[:1])
    assert (memory.parameters, memory.optimizer, memory.rest) == (2 * MIB, 0, 3 * MIB)
    assert (memory.unused, memory.padding) == (0, 0)


def test_an_argument_that_is_not_used_is_not_in_the_peak() -> None:
    mesh = mesh_on(CPU)
    state = array(mesh, 1024, 1024, spec=P("fsdp"))
    named = [argument("parameters", MIB // 2), argument("rest", 3 * MIB)]
    with_it = compile_for(mesh, lambda x, _: x * 2, state, array(mesh, 768, 1024))
    memory = read_memory(with_it, named)
    alone = read_memory(compile_for(mesh, lambda x: x * 2, state))
    assert (memory.persistent, memory.unused) == (MIB // 2 + 3 * MIB, 3 * MIB)
    assert memory.padding == 0
    assert memory.peak == alone.peak == MIB


def test_an_argument_that_is_kept_unused_is_in_the_peak() -> None:
    mesh = mesh_on(CPU)
    args = array(mesh, 1024, 1024, spec=P("fsdp")), array(mesh, 768, 1024)
    memory = read_memory(compile_for(mesh, lambda x, _: x * 2, *args, keep_unused=True))
    assert (memory.rest, memory.unused, memory.peak) == (MIB // 2 + 3 * MIB, 0, 4 * MIB)


@pytest.mark.parametrize("dtype, size", [(jnp.bfloat16, 14), (jnp.bool, 7), (jnp.int4, 4)])
def test_arguments_count_in_their_dtype(dtype: Any, size: int) -> None:
    mesh = mesh_on(CPU)
    memory = read_memory(compile_for(mesh, lambda x: x, array(mesh, 7, dtype=dtype)))
    assert (memory.rest, memory.padding) == (size, 0)


def test_keys_count_as_their_data() -> None:
    mesh = mesh_on(CPU)
    keys = jax.device_put(jax.random.split(jax.random.key(0), 16), NamedSharding(mesh, P("fsdp")))
    memory = read_memory(compile_for(mesh, jax.random.fold_in, keys[0], 1))
    assert (memory.rest, memory.padding) == (8 + 4, 0)
    memory = read_memory(compile_for(mesh, jax.vmap(jax.random.bits), keys))
    assert (memory.rest, memory.padding) == (2 * 8, 0)


def test_on_tpus_arrays_fill_whole_tiles() -> None:
    mesh = mesh_on(TPU)
    args = array(mesh, 8, 3, spec=P("fsdp")), array(mesh, 9, 130, dtype=jnp.bfloat16)
    memory = read_memory(compile_for(mesh, lambda x, y: (x + 1, y + 1), *args))
    assert memory.rest == 3 * 4 + 9 * 130 * 2
    # Tiles of 1x128 float32; of 8x128 bfloat16, two by two.
    assert memory.rest + memory.padding == 128 * 4 + 16 * 256 * 2


def test_host_memory_is_not_the_devices() -> None:
    mesh = mesh_on(TPU)
    on_device = NamedSharding(mesh, P("fsdp"))
    offloaded = array(mesh, 1024, 1024, spec=P("fsdp"), memory_kind="pinned_host")
    compiled = compile_for(
        mesh,
        lambda x, moment: x + jax.device_put(moment, on_device),
        array(mesh, 1024, 1024, spec=P("fsdp")),
        offloaded,
    )
    named = [argument("parameters", MIB // 2), argument("optimizer", MIB // 2, "pinned_host")]
    memory = read_memory(compiled, named)
    assert memory.host == MIB // 2
    assert (memory.parameters, memory.optimizer, memory.rest) == (MIB // 2, 0, 0)
    assert (memory.unused, memory.padding) == (0, 0)


# --------------------------------------------------------------------------------------------------
# A sharded model


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(512, 2048, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(2048, 512, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(x)))


PARAMETERS = 2 * (2 * 512 * 2048)
ROWS = 2**18


@functools.cache
def compile_training(target: str) -> jax.stages.Compiled:
    """A donated step of adam on two blocks, with a batch whose activations a TPU keeps in HBM."""
    mesh = mesh_on(target)

    def make() -> nnx.Sequential:
        rngs = nnx.Rngs(0)
        return nnx.Sequential(Block(rngs), Block(rngs))

    policy = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)
    model = jfsdp.init(make, mesh, units=Block, mp_policy=policy)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def loss(model: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(model(x).astype(jnp.float32) ** 2)

    @nnx.jit(donate_argnums=(0, 1))
    def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        value, gradients = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, gradients)
        return value

    lowered = step.lower(model, optimizer, array(mesh, ROWS, 512, spec=P("fsdp"))).lowered
    return lowered.compile(compiler_options=compiler_options(mesh) or None)


training = pytest.mark.parametrize("target", [CPU, GPU, pytest.param(TPU, marks=pytest.mark.slow)])


@training
def test_a_training_step_keeps_a_share_of_parameters_and_moments(target: str) -> None:
    state = PARAMETERS * (4 + 8) // 8
    batch, counters = ROWS * 512 * 4 // 8, 4 + 4  # adam's count, the optimizer's step
    named = [argument("parameters", PARAMETERS * 4 // 8), argument("optimizer", PARAMETERS + 8)]
    memory = read_memory(compile_training(target), named)
    assert (memory.persistent, memory.rest) == (state + counters + batch, batch)
    # A counter fills a tile of 128 on TPUs.
    assert memory.padding == (2 * 512 - counters if target == TPU else 0)


@training
def test_a_training_step_updates_all_of_its_state_in_place(target: str) -> None:
    memory = read_memory(compile_training(target))
    counters = 2 * 512 if target == TPU else 4 + 4
    assert memory.aliased == PARAMETERS * (4 + 8) // 8 + counters
    assert memory.outputs_not_aliased <= KIB


@training
def test_the_peak_of_a_training_step_is_above_its_arguments_and_largest_buffer(target: str) -> None:
    compiled = compile_training(target)
    memory = read_memory(compiled)
    temporary = [b.bytes for b in everything(compiled) if b.kind == "temporary"]
    assert max(temporary) >= ROWS // 8 * 2048 * 2  # what a block's first layer results in
    assert memory.peak >= memory.persistent + max(temporary)


@pytest.mark.parametrize("target", [GPU, pytest.param(TPU, marks=pytest.mark.slow)])
def test_the_buffers_of_a_training_step_make_up_its_peak(target: str) -> None:
    compiled = compile_training(target)
    memory, buffers = read_memory(compiled), everything(compiled)
    stats = stats_of(compiled)
    total = sum(b.bytes for b in buffers)
    # Without what is lost between buffers; at this peak nothing is in VMEM.
    assert stats.peak_memory_in_bytes - 8 * KIB <= total <= stats.peak_memory_in_bytes
    assert total <= memory.peak
    given = sum(b.bytes for b in buffers if b.kind == "argument")
    assert given == memory.persistent + memory.padding


# --------------------------------------------------------------------------------------------------
# Buffers


@on_all
def test_the_largest_buffer_is_the_result_of_the_large_matmul(target: str) -> None:
    mesh = mesh_on(target)
    compiled = compile_for(
        mesh,
        lambda x, up, down: lax.optimization_barrier(x @ up) @ down,
        array(mesh, 8 * 65536, 256, spec=P("fsdp")),
        array(mesh, 256, 1024),
        array(mesh, 1024, 256),
    )
    first, *others = largest_buffers(compiled, 3)
    assert (first.shape, first.kind) == ((65536, 1024), "temporary")
    assert first.bytes == (128 if target == TPU else 256) * MIB  # TPUs multiply in bfloat16
    assert first.op_name.endswith("/dot_general")
    assert {(b.kind, b.shape) for b in others} == {
        ("argument", (65536, 256)),
        ("output", (65536, 256)),
    }
    assert [b.op_name for b in others if b.kind == "argument"] == ["x"]
    assert sum(b.bytes for b in everything(compiled)) <= read_memory(compiled).peak


def test_what_a_loop_stacks_is_there_once() -> None:
    mesh = mesh_on(CPU)

    def step(x: jax.Array, weights: jax.Array) -> jax.Array:
        x, steps = lax.scan(lambda x, w: (jnp.sin(x @ w), x), x, weights)
        return lax.optimization_barrier(steps).sum() + x.sum()

    compiled = compile_for(
        mesh, step, array(mesh, 8 * 1024, 64, spec=P("fsdp")), array(mesh, 32, 64, 64)
    )
    stacked = [b for b in everything(compiled) if b.shape == (32, 1024, 64)]
    assert [(b.bytes, b.kind) for b in stacked] == [(8 * MIB, "temporary")]
    memory = read_memory(compiled)
    assert 8 * MIB < memory.temporaries < 10 * MIB


def test_a_donated_argument_and_its_output_are_one_buffer() -> None:
    compiled = compile_update(mesh_on(CPU), donate_argnums=(0, 1))
    buffers = [b for b in everything(compiled) if b.bytes == 2 * MIB and b.kind != "temporary"]
    assert [(b.kind, b.op_name) for b in buffers] == [("argument", "w"), ("argument", "moment")]


def test_what_is_overwritten_is_there_once() -> None:
    mesh = mesh_on(CPU)

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        # tanh may take the place of the product, which nothing reads later.
        return jnp.tanh(lax.optimization_barrier(x @ w)) @ w.T

    compiled = compile_for(
        mesh, step, array(mesh, 8 * 1024, 256, spec=P("fsdp")), array(mesh, 256, 1024)
    )
    large = [b for b in everything(compiled) if b.shape == (1024, 1024)]
    assert len(large) == 1
    assert read_memory(compiled).temporaries < 5 * MIB


# --------------------------------------------------------------------------------------------------
# Buffers of programs as compilers write them, each from what XLA guarantees of them


def at_peak(entry: str, functions: str = "", header: str = "") -> list[tuple[str, int]]:
    """What is alive at the peak of a program with these instructions: instruction, bytes."""
    head = f"HloModule m, is_scheduled=true{header}"
    text = f"{head}\n\n{functions}\nENTRY %main () -> () {{\n  {entry}\n}}\n"
    return sorted((b.instruction, b.bytes) for b in buffers_at_peak(text))


def sizes(*program: str) -> list[int]:
    return sorted(size for _, size in at_peak(*program))


def peak(**instructions: int) -> list[tuple[str, int]]:
    return sorted(instructions.items())


def test_a_buffer_lives_until_its_last_reader() -> None:
    assert at_peak("""
        %x = f32[1000]{0} parameter(0)
        %one = f32[5000]{0} custom-call(%x)
        %two = f32[2000]{0} custom-call(%one)
        %three = f32[4000]{0} custom-call(%two)
        ROOT %y = f32[10]{0} custom-call(%three)
    """) == peak(x=4000, one=20000, two=8000, y=40)


def test_parts_of_a_tuple_live_each_for_itself() -> None:
    assert at_peak("""
        %x = f32[1000]{0} parameter(0)
        %both = (f32[2000]{0}, /*index=1*/f32[3000]{0}) custom-call(%x)
        %first = f32[2000]{0} get-tuple-element(%both), index=0
        %second = f32[3000]{0} get-tuple-element(%both), index=1
        %short = f32[1]{0} custom-call(%second)
        %wide = f32[9000]{0} custom-call(%short)
        ROOT %y = f32[10]{0} custom-call(%first, %wide)
    """) == peak(x=4000, both=8000, short=4, wide=36000, y=40)


MATMUL = """
%matmul (a: f32[1000], b: f32[1000], scale: f32[1000]) -> f32[1000] {
  %a = f32[1000]{0} parameter(0)
  %b = f32[1000]{0} parameter(1)
  %scale = f32[1000]{0} parameter(2)
  %turned = f32[1000]{0} bitcast(%a)
  %product = f32[1000]{0} convolution(%turned, %b), dim_labels=bf_oi->bf
  ROOT %scaled = f32[1000]{0} multiply(%product, %scale)
}
"""


@pytest.mark.parametrize(
    "fresh, alive",
    [
        pytest.param("scale", [40, 4000, 4000, 4000], id="what its result is scaled by"),
        pytest.param("a", [40, 4000, 4000, 4000, 4000], id="what it reads, by way of a bitcast"),
        pytest.param("b", [40, 4000, 4000, 4000, 4000], id="what it reads"),
    ],
)
def test_a_matmul_overwrites_no_operand_but_what_its_result_is_worked_on_with(
    fresh: str, alive: list[int]
) -> None:
    operands = ["%kept" if name != fresh else "%fresh" for name in ("a", "b", "scale")]
    program = f"""
        %kept = f32[1000]{{0}} parameter(0)
        %other = f32[1000]{{0}} custom-call(%kept)
        %fresh = f32[1000]{{0}} custom-call(%kept, %other)
        %scaled = f32[1000]{{0}} fusion({", ".join(operands)}), kind=kOutput, calls=%matmul
        ROOT %y = f32[10]{{0}} custom-call(%scaled, %other)
    """
    assert sizes(program, MATMUL) == alive


LOOP = """
%condition (c: (s32[], f32[1000])) -> pred[] {
  %c = (s32[], f32[1000]{0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  ROOT %less = pred[] custom-call(%i)
}

%body (b: (s32[], f32[1000])) -> (s32[], f32[1000]) {
  %b = (s32[], f32[1000]{0}) parameter(0)
  %j = s32[] get-tuple-element(%b), index=0
  %before = f32[1000]{0} get-tuple-element(%b), index=1
  BODY
  ROOT %next = (s32[], f32[1000]{0}) tuple(%j, %after)
}
"""
RUN = """
  %x = f32[10]{0} parameter(0)
  %zero = s32[] custom-call()
  %start = f32[1000]{0} custom-call(%x)
  %carried = (s32[], f32[1000]{0}) tuple(%zero, %start)
  %loop = (s32[], f32[1000]{0}) while(%carried), condition=%condition, body=%body
  %end = f32[1000]{0} get-tuple-element(%loop), index=1
  ROOT %y = f32[10]{0} custom-call(%end)
"""


def test_what_a_loop_carries_is_one_buffer() -> None:
    body = LOOP.replace("BODY", "%after = f32[1000]{0} custom-call(%before)")
    assert sizes(RUN, body) == [1, 4, 40, 40, 4000]


def test_what_a_loop_carries_may_be_gone_within_an_iteration() -> None:
    body = """%short = f32[1]{0} custom-call(%before)
  %wide = f32[9000]{0} custom-call(%short)
  %sum = f32[1]{0} custom-call(%wide)
  %after = f32[1000]{0} custom-call(%sum)"""
    found = at_peak(RUN, LOOP.replace("BODY", body))
    assert found == peak(x=40, zero=4, short=4, wide=36000, y=40)


def test_what_a_loop_passes_through_lives_through_it() -> None:
    body = LOOP.replace("BODY", "%wide = f32[9000]{0} custom-call()").replace("%after", "%before")
    found = at_peak(RUN, body)
    assert found == peak(x=40, zero=4, start=4000, wide=36000, y=40)


@pytest.mark.parametrize(
    "start, done",
    [
        ("((f32[100]{0}), (f32[800]{0})) all-gather-start", "(f32[800]{0}) all-gather-done"),
        ("(f32[100]{0}, f32[800]{0}, u32[]) collective-permute-start", "f32[800]{0} collective-permute-done"),
        ("f32[800]{0} all-reduce-start", "f32[800]{0} all-reduce-done"),
        ("(f32[800]{0}, f32[100]{0}, u32[]) copy-start", "f32[800]{0} copy-done"),
        ("((f32[100]{0}), f32[800]{0}, u32[]) fusion-start", "f32[800]{0} fusion-done"),
    ],
)  # fmt: skip
def test_an_asynchronous_result_is_one_buffer_and_its_operand_another(
    start: str, done: str
) -> None:
    found = sizes(f"""
        %x = f32[10]{{0}} parameter(0)
        %part = f32[100]{{0}} custom-call(%x)
        %start = {start}(%part)
        %done = {done}(%start)
        ROOT %y = f32[10]{{0}} custom-call(%done)
    """)
    assert [size for size in found if size > 4] == [40, 40, 400, 3200]


def test_the_branches_of_a_conditional_take_turns() -> None:
    functions = """
%left (a: f32[100]) -> f32[200] {
  %a = f32[100]{0} parameter(0)
  %wide = f32[9000]{0} custom-call(%a)
  ROOT %one = f32[200]{0} custom-call(%wide)
}

%right (b: f32[100]) -> f32[200] {
  %b = f32[100]{0} parameter(0)
  %less = f32[9500]{0} custom-call(%b)
  ROOT %two = f32[200]{0} custom-call(%less)
}
"""
    found = sizes(
        """
        %x = f32[100]{0} parameter(0)
        %which = s32[] custom-call(%x)
        %choice = f32[200]{0} conditional(%which, %x, %x), branch_computations={%left, %right}
        ROOT %y = f32[10]{0} custom-call(%choice)
        """,
        functions,
    )
    assert found == [40, 400, 800, 38000]


def test_a_function_that_is_called_has_buffers_of_its_own() -> None:
    functions = """
%function (a: f32[100]) -> f32[200] {
  %a = f32[100]{0} parameter(0)
  %wide = f32[9000]{0} custom-call(%a)
  ROOT %one = f32[200]{0} custom-call(%wide)
}
"""
    found = at_peak(
        """
        %x = f32[100]{0} parameter(0)
        %called = f32[200]{0} call(%x), to_apply=%function
        ROOT %y = f32[10]{0} custom-call(%called)
        """,
        functions,
    )
    assert found == peak(x=400, wide=36000, one=800, y=40)


def test_a_result_that_is_said_to_alias_an_operand_is_one_buffer() -> None:
    aliased = "output_to_operand_aliasing={{}: (0, {})}"
    lines = """
        %x = f32[10]{0} parameter(0)
        %one = f32[200]{0} custom-call(%x)
        %two = f32[200]{0} custom-call(%one), ALIAS
        ROOT %y = f32[10]{0} custom-call(%two)
    """
    assert sizes(lines.replace("ALIAS", aliased)) == [40, 40, 800]
    assert sizes(lines.replace("ALIAS", "a=1")) == [40, 40, 800, 800]


def test_an_output_takes_the_place_of_the_argument_that_the_header_names() -> None:
    lines = """
        %x = f32[100]{0} parameter(0)
        %w = f32[100]{0} parameter(1)
        ROOT %y = f32[100]{0} custom-call(%x, %w)
    """
    header = ", input_output_alias={ {}: (1, {}, may-alias) }, entry_computation_layout={()->()}"
    assert at_peak(lines) == peak(x=400, w=400, y=400)
    assert sizes(lines, "", header) == [400, 400]


@pytest.mark.parametrize(
    "layout, size",
    [
        ("bf16[9,130]{1,0:T(8,128)(2,1)}", 16 * 256 * 2),
        ("bf16[9,130]{0,1:T(8,128)(2,1)}", 136 * 128 * 2),
        ("f32[3,9,130]{2,1,0:T(8,128)}", 3 * 16 * 256 * 4),
        ("f32[]{:T(128)}", 512),
        ("f32[100]{0:T(1,128)}", 512),
        ("pred[100]{0}", 100),
        ("s4[7]{0}", 4),
        ("f32[9,130]", 9 * 130 * 4),
    ],
)
def test_a_buffer_has_the_size_of_its_layout(layout: str, size: int) -> None:
    assert at_peak(f"ROOT %x = {layout} parameter(0)") == peak(x=size)


def test_on_chip_and_host_memory_are_not_counted() -> None:
    assert at_peak("""
        %x = f32[100]{0:T(128)} parameter(0)
        %fast = f32[1000]{0:T(128)S(1)} custom-call(%x)
        %far = f32[1000]{0:T(128)S(5)} custom-call(%fast)
        ROOT %y = f32[200]{0:T(128)} custom-call(%far)
    """) == peak(x=512, y=1024)


# --------------------------------------------------------------------------------------------------
# Whether it fits


def test_whether_it_fits_is_said_of_what_is_available() -> None:
    memory = Memory(peak=61 * GIB + GIB // 5)
    assert (memory.fits, memory.verdict) == (None, "needs 61.2 GiB per device")
    memory = dataclasses.replace(memory, available=95 * GIB)
    assert (memory.fits, memory.verdict) == (True, "fits: 61.2 of 95.0 GiB per device")
    memory = dataclasses.replace(memory, available=61 * GIB)
    assert (memory.fits, memory.verdict) == (False, "does not fit: 61.2 of 61.0 GiB per device")
    memory = dataclasses.replace(memory, peak=3 * MIB)
    assert memory.verdict == "fits: 3.0 MiB of 61.0 GiB per device"


def test_a_verdict_on_few_bytes_names_them_all() -> None:
    assert Memory(peak=2**30 + 1, available=2**30).verdict == (
        "does not fit: 1,073,741,825 of 1,073,741,824 B per device"
    )


@pytest.mark.parametrize("target", [CPU, GPU])
def test_what_does_not_fit_comes_with_its_largest_buffers(target: str) -> None:
    compiled = compile_update(mesh_on(target))
    assert read_memory(compiled, available=GIB).buffers == ()
    memory = read_memory(compiled, available=5 * MIB)
    assert memory.fits is False
    assert memory.buffers == tuple(largest_buffers(compiled))
    assert {"w", "moment"} <= {b.op_name for b in memory.buffers}
    table = memory_table(memory)
    assert "does not fit: " in table
    assert "\nlargest buffers at the peak\n" in table
    assert f"{memory.buffers[0].dtype}[512,1024]" in table


def test_arrays_beyond_the_hbm_are_read_from_the_refusal() -> None:
    mesh = mesh_on(TPU)
    args = [array(mesh, 8 * 2**20, 1024, spec=P("fsdp"))] * 5  # 4 GiB each
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as error:
        compile_for(mesh, lambda *x: [a + 1 for a in x], *args, donate_argnums=tuple(range(5)))
    memory = from_failure(error.value, [argument("parameters", 20 * GIB)])
    assert memory is not None and memory.refused
    assert (memory.parameters, memory.peak) == (20 * GIB, 20 * GIB)
    assert memory.available == pytest.approx(V5E_BYTES, rel=1e-3)
    assert memory.verdict == "does not fit: 20.0 of 15.8 GiB per device"


def test_a_program_beyond_the_hbm_is_read_from_the_refusal() -> None:
    mesh = mesh_on(TPU)
    rows = (V5E_BYTES - 64 * KIB) // 4096  # an array that fits, but not with a program beside it
    with pytest.raises(jax.errors.JaxRuntimeError, match="Largest program") as error:
        compile_for(
            mesh, lambda x: x + 1, array(mesh, 8 * rows, 1024, spec=P("fsdp")), donate_argnums=0
        )
    memory = from_failure(error.value)
    assert memory is not None and memory.fits is False
    assert 64 * KIB < memory.code < 256 * KIB
    assert 0 < memory.peak - (memory.available or 0) < 256 * KIB
    assert memory.rest == memory.aliased == pytest.approx(rows * 4096, rel=1e-3)
    largest = memory.buffers[0]
    assert (largest.shape, largest.dtype, largest.kind) == ((rows, 1024), "float32", "argument")
    assert largest.bytes == memory.rest


REFUSAL = """\
RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: XLA:TPU compile permanent error. Ran out of memory in \
memory space hbm. Used 17.25G of 15.75G hbm. Exceeded hbm capacity by 1.50G.

Total hbm usage >= 17.50G:
    reserved        258.00M 
    program           2.25G 
    arguments        14.00G 

Output size 3.00G; shares 2.00G with arguments.

Program hbm requirement 2.25G:
    global             512B
    scoped            1.00M
    HLO temp          2.00G (100.0% utilization: Unpadded (2.00G) Padded (2.00G), 2.4% fragmentation (2.04M))
    overlays        256.00M

  Largest program allocations in hbm:

  1. Size: 1.50G
     Operator: op_name="jit(f)/jvp()/dot_general" source_file="f.py" source_line=3
     Shape: bf16[8192,98304]{1,0:T(8,128)(2,1)}
     Unpadded size: 1.50G
     XLA label: fusion.6 = fusion(copy.1, param.3), kind=kOutput, calls=fused_computation.9
     Allocation type: HLO temp
     ==========================

  2. Size: 256.00M
     XLA label: overlays
     Allocation type: overlays
     ==========================


  Largest program arguments and outputs in hbm:

  1. Size: 14.00G
     Shape: f32[3670016,1024]{1,0:T(8,128)}
     XLA label: Argument 0 index {}
     ==========================

  2. Size: 1.00G
     Shape: f32[262144,1024]{1,0:T(8,128)}
     XLA label: Output index {1}
     ==========================

"""  # noqa: W291 (as libtpu 0.0.50 writes it)


def test_a_refusal_is_read_to_the_last_figure() -> None:
    memory = from_failure(RuntimeError(REFUSAL), NAMED)
    assert memory is not None
    assert dataclasses.replace(memory, buffers=()) == Memory(
        parameters=2 * MIB,
        optimizer=2 * MIB,
        rest=14 * GIB - 4 * MIB,
        outputs_not_aliased=GIB,
        temporaries=2 * GIB,
        code=GIB // 4,
        peak=17 * GIB + GIB // 4,
        aliased=2 * GIB,
        available=15 * GIB + 3 * GIB // 4,
        refused=True,
    )
    assert memory.buffers == (
        Buffer(14 * GIB, (3670016, 1024), "float32", "", "Argument 0 index {}", "argument"),
        Buffer(
            3 * GIB // 2,
            (8192, 98304),
            "bfloat16",
            "jit(f)/jvp()/dot_general",
            "fusion.6",
            "temporary",
        ),
        Buffer(GIB, (262144, 1024), "float32", "", "Output index {1}", "output"),
        Buffer(GIB // 4, (), "", "", "overlays", "temporary"),
    )


def test_outputs_in_the_place_of_arguments_are_not_listed_twice() -> None:
    text = REFUSAL.replace("shares 2.00G", "shares 3.00G")
    memory = from_failure(RuntimeError(text))
    assert memory is not None
    assert {b.kind for b in memory.buffers} == {"argument", "temporary"}


@pytest.mark.parametrize(
    "text",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 17.00M of 16.00M vmem.",
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes.",
        "INVALID_ARGUMENT: No such compile option: 'xla_of_tomorrow'",
    ],
)
def test_other_errors_are_no_refusal(text: str) -> None:
    assert from_failure(RuntimeError(text)) is None


# --------------------------------------------------------------------------------------------------
# Text and JSON


def example() -> Memory:
    return Memory(
        parameters=4 * MIB,
        optimizer=8 * MIB,
        rest=512,
        unused=12,
        padding=MIB,
        temporaries=20 * MIB,
        peak=33 * MIB + 500,
        aliased=12 * MIB,
        available=GIB,
        parameters_minimum=4 * MIB,
        optimizer_minimum=4 * MIB,
    )


def test_the_table_is_aligned_and_complete() -> None:
    assert (
        memory_table(example())
        == """\
memory of one device     bytes  minimum  ratio
----------------------------------------------
parameters             4.0 MiB  4.0 MiB  1.000
optimizer state        8.0 MiB  4.0 MiB  2.000
other arguments          512 B
padding to tiles       1.0 MiB
temporaries           20.0 MiB
----------------------------------------------
peak                  33.0 MiB
fits: 33.0 MiB of 1.0 GiB per device
12.0 MiB of outputs take the place of donated arguments
12 B of the arguments are not used, and not in the peak"""
    )


def test_the_table_has_no_columns_for_minima_that_no_one_gave() -> None:
    memory = dataclasses.replace(example(), parameters_minimum=None, optimizer_minimum=None)
    first, rule, *_ = memory_table(memory).splitlines()
    assert first == "memory of one device     bytes"
    assert rule == "-" * len(first)


def test_the_table_counts_buffers_that_are_alike() -> None:
    activation = Buffer(MIB, (4, 65536), "float32", "jit(step)/dot_general", "fusion", "temporary")
    weight = Buffer(KIB, (256,), "float32", "model.kernel", "param.1", "argument")
    other = dataclasses.replace(activation, instruction="fusion.1")
    memory = dataclasses.replace(example(), available=MIB, buffers=(activation, other, weight))
    assert memory_table(memory).splitlines()[-3:] == [
        "largest buffers at the peak",
        "  2 x  1.0 MiB  float32[4,65536]  temporary  jit(step)/dot_general",
        "       1.0 KiB  float32[256]      argument   model.kernel",
    ]


def test_the_table_of_a_refusal_has_what_the_compiler_told() -> None:
    memory = Memory(peak=24 * GIB, available=15 * GIB, refused=True)
    assert (
        memory_table(memory)
        == """\
memory of one device
does not fit: 24.0 of 15.0 GiB per device
the compiler refused the program; figures are those of its message"""
    )


def test_figures_go_by_the_names_in_the_table() -> None:
    assert example().by_name() == {
        "parameters": 4 * MIB,
        "optimizer state": 8 * MIB,
        "other arguments": 512,
        "padding to tiles": MIB,
        "temporaries": 20 * MIB,
        "peak": 33 * MIB + 500,
    }


def test_json_has_figures_and_verdict() -> None:
    content = json.loads(json.dumps(example().as_dict()))
    assert (content["persistent"], content["peak"]) == (12 * MIB + 512, 33 * MIB + 500)
    assert (content["fits"], content["verdict"]) == (True, "fits: 33.0 MiB of 1.0 GiB per device")
