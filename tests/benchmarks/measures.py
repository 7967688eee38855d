"""Measures one program: lowers and compiles it, and reads it with jfsdp.inspect, whoever wrote it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import Any

import jax
from gpt_program import Program

from jfsdp.inspect.collective import Collective
from jfsdp.inspect.compiled import compiled_collectives
from jfsdp.inspect.memory import read_memory
from jfsdp.inspect.stablehlo import collectives
from jfsdp.inspect.topology import compiler_options

MIB = 2**20
KINDS = ("all-gather", "reduce-scatter", "all-reduce")


def measure(program: Program) -> dict[str, Any]:
    """Everything that is read off one compilation.

    Returns:
        bytes: per kind, received by one device; of other kinds together under "other".
        large_all_reduces: bytes of all-reduces of 1 MiB or more that no replicate axis asks for.
        dtypes: bytes per kind and dtype. On CPU, whose compiler widens, bytes and dtypes are those of the
            program as written; if none are, its bytes are those of the compiled one, and its dtypes nothing.
        groups: sizes of the groups of all-reduces of 1 KiB or more.
        counts: collectives per kind as written, before any compiler pass.
        compiled_counts: instructions per kind and execution after them.
        memory: of one device, bytes: persistent, padding, outputs, temporaries, peak, aliased; and XLA's own
            figure of the peak, on TPUs of HBM and VMEM together.
        overlap: share of the bytes of gathers and reduce-scatters with a matmul beside them.
        hlo: the program's text: lines and bytes as written, bytes as compiled.
        seconds: of process CPU time, to trace and lower, and to compile.
        cycles: the TPU compiler's estimate for a step; 0 elsewhere.
    """
    start = time.process_time()
    lowered = program.step.lower(program.state, program.tokens)
    traced = time.process_time()
    compiled = lowered.compile(compiler_options=compiler_options(program.mesh) or None)
    done = time.process_time()
    sizes = {str(axis): size for axis, size in program.mesh.shape.items()}
    source, text = lowered.as_text(), compiled.as_text() or ""
    written = list(collectives(lowered, program.mesh))
    found = compiled_collectives(text, sizes)
    on_cpu = program.mesh.devices.flat[0].platform == "cpu"
    moved = written if on_cpu and written else found
    tokens = program.tokens
    batch = tokens.dtype.itemsize * tokens.size // program.mesh.size
    memory = read_memory(compiled)
    return {
        "bytes": by_kind(moved),
        "large_all_reduces": sum(
            r.total_bytes
            for r in moved
            if r.kind == "all-reduce" and "fsdp" in r.axes and r.bytes_per_device >= MIB
        ),
        "dtypes": by_dtype(moved) if moved is written or not on_cpu else {},
        "groups": sorted(
            {r.group_size for r in moved if r.kind == "all-reduce" and r.total_bytes >= 1024}
        ),
        "counts": count(written),
        "compiled_counts": count(_instructions(found)),
        "memory": {
            "persistent": memory.rest - batch,
            "padding": memory.padding,
            "outputs": memory.outputs_not_aliased,
            "temporaries": memory.temporaries,
            "peak": memory.peak,
            "aliased": memory.aliased,
            "xla_peak": getattr(compiled.memory_analysis(), "peak_memory_in_bytes", 0),
        },
        "overlap": {kind: overlapped(found, kind) for kind in KINDS[:2]},
        "hlo": {
            "lines": source.count("\n"),
            "written": len(source),
            "compiled": len(text),
        },
        "seconds": {"lower": traced - start, "compile": done - traced},
        "cycles": cycles(text),
    }


def by_kind(records: Iterable[Collective]) -> dict[str, float]:
    """Bytes received per kind; what is written as one kind and compiled as another counts as written."""
    found = dict.fromkeys((*KINDS, "other"), 0.0)
    for record in records:
        kind = record.purpose if record.purpose in KINDS else "other"
        found[kind] += record.unpadded_bytes
    return found


def by_dtype(records: Iterable[Collective]) -> dict[str, dict[str, float]]:
    """Bytes received per kind and dtype."""
    found: dict[str, dict[str, float]] = {}
    for record in records:
        of_kind = found.setdefault(record.purpose, {})
        of_kind[record.dtype] = of_kind.get(record.dtype, 0.0) + record.total_bytes
    return found


def count(records: Iterable[Collective]) -> dict[str, int]:
    """Executions per kind."""
    found: dict[str, int] = {}
    for record in records:
        found[record.kind] = found.get(record.kind, 0) + record.executions
    return found


def overlapped(records: Iterable[Collective], kind: str) -> float | None:
    """The share of a kind's bytes that has a matmul beside it; None if there are no bytes."""
    of_kind = [record for record in records if record.purpose == kind]
    total = sum(record.total_bytes for record in of_kind)
    return sum(r.total_bytes for r in of_kind if r.overlapped) / total if total else None


def cycles(text: str) -> int:
    """What the TPU compiler estimates for all instructions of a step, loops counted once."""
    return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', text)))


def _instructions(records: Iterable[Collective]) -> list[Collective]:
    """One record for each instruction: those that several leaves were combined into once."""
    return list({(r.instruction, r.in_loop): r for r in records}.values())


def environment() -> dict[str, str]:
    """Versions and date, for the head of the table."""
    import flax

    return {"jax": jax.__version__, "flax": flax.__version__, "date": time.strftime("%Y-%m-%d")}
