"""How much memory of a device a compiled step needs, and what for."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Final, Literal

import jax

from .allocation import is_on_host, taken_arguments, temporary_bytes
from .buffers import Buffer, bytes_of, largest_buffers, refused_buffers
from .table import aligned, human_bytes

__all__ = ["Argument", "Memory", "from_failure", "memory_table", "read_memory"]

_TITLE: Final = "memory of one device"
_OVER: Final = re.compile(r"Used \S+ of (\S+) hbm\. Exceeded hbm capacity by ([\d.]+[BKMGT])")
_EARLY: Final = re.compile(
    r"memory required for HLO temporaries \((\S+)\) exceeds[^(]*HBM \((\S+)\)"
)


@dataclasses.dataclass(frozen=True)
class Argument:
    """An array among a step's arguments.

    Args:
        path: where it is, such as "model.blocks.0.up.kernel".
        kind: what it is for.
        shape: its global shape.
        dtype: NumPy or ml_dtypes name.
        bytes_per_device: bytes of one device's part, without padding.
        memory_kind: where it lies, such as "pinned_host"; None for the device's own memory.
        axes: the mesh axes that it lies on.
    """

    path: str
    kind: Literal["parameters", "optimizer", "rest"]
    shape: tuple[int, ...]
    dtype: str
    bytes_per_device: int
    memory_kind: str | None = None
    axes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a step needs of one device's memory, in bytes.

    peak = parameters + optimizer + rest - unused + padding + outputs_not_aliased + temporaries + code.

    Attributes:
        parameters: of the arguments, without padding.
        optimizer: the optimizer state among them.
        rest: the other arguments, and those that the caller did not name.
        unused: what the named arguments take beyond what the program takes of them: it drops arguments
            that it does not use. They may lie on the device all the same.
        padding: what the arguments take beyond their elements: arrays fill whole tiles on TPUs.
        outputs_not_aliased: outputs that do not take the place of an argument.
        temporaries: everything else, fragmentation included.
        code: the program itself.
        peak: what has to fit at once.
        aliased: outputs that take the place of donated arguments.
        host: what lies in host memory instead.
        available: what a device has; None if it is not known.
        parameters_minimum: the least bytes of the parameters by the policies; None if not known.
        optimizer_minimum: of the optimizer state.
        refused: whether the compiler refused the program. Then the figures are those of its message, to
            three digits; what it does not tell is 0.
        buffers: the largest buffers at the peak if the step does not fit, else none.
    """

    parameters: int = 0
    optimizer: int = 0
    rest: int = 0
    unused: int = 0
    padding: int = 0
    outputs_not_aliased: int = 0
    temporaries: int = 0
    code: int = 0
    peak: int = 0
    aliased: int = 0
    host: int = 0
    available: int | None = None
    parameters_minimum: int | None = None
    optimizer_minimum: int | None = None
    refused: bool = False
    buffers: tuple[Buffer, ...] = ()

    @property
    def persistent(self) -> int:
        """Bytes of all arguments, without padding."""
        return self.parameters + self.optimizer + self.rest

    @property
    def fits(self) -> bool | None:
        """Whether the peak is at most what a device has; None if that is not known."""
        return None if self.available is None else not self.refused and self.peak <= self.available

    @property
    def verdict(self) -> str:
        """Such as "fits: 61.2 of 95.0 GiB per device"."""
        if self.available is None:
            return f"needs {human_bytes(self.peak)} per device"
        needed, there = human_bytes(self.peak), human_bytes(self.available)
        if needed == there:
            needed, there = f"{self.peak:,}", f"{self.available:,} B"
        elif needed.split()[1] == there.split()[1]:
            needed = needed.split()[0]
        return f"{'fits' if self.fits else 'does not fit'}: {needed} of {there} per device"

    def by_name(self) -> dict[str, float]:
        """Each figure that is not zero, by the name that it has in the table."""
        return {name: size for name, size, _ in _rows(self) if size}

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        derived = {"persistent": self.persistent, "fits": self.fits, "verdict": self.verdict}
        return dataclasses.asdict(self) | derived


def read_memory(
    compiled: jax.stages.Compiled, arguments: Sequence[Argument] = (), available: int | None = None
) -> Memory:
    """Reads what a compiled program needs of one device's memory.

    Args:
        compiled: the program, for devices that are here or not.
        arguments: what its arguments are, in any order. What is not named counts as `rest`.
        available: bytes that a device has.

    Returns:
        The figures; with the largest buffers if the program does not fit.

    Raises:
        ValueError: the backend does not say what its programs need.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError("jfsdp.inspect: this backend does not say how much memory a program needs")
    # Where its figures tell host memory apart from the device's, so is it done here.
    apart = stats.host_argument_size_in_bytes > 0
    taken = sum(
        size for size, kind in taken_arguments(compiled) if not (apart and is_on_host(kind))
    )
    named = [each for each in arguments if not (apart and is_on_host(each.memory_kind))]
    fixed = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    temporaries = temporary_bytes(compiled, stats, fixed)
    memory = dataclasses.replace(
        _of_arguments(named, taken),
        padding=stats.argument_size_in_bytes - taken,
        outputs_not_aliased=stats.output_size_in_bytes - stats.alias_size_in_bytes,
        temporaries=temporaries,
        code=stats.generated_code_size_in_bytes,
        peak=fixed + temporaries + stats.generated_code_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        host=stats.host_argument_size_in_bytes
        + stats.host_output_size_in_bytes
        - stats.host_alias_size_in_bytes
        + stats.host_temp_size_in_bytes
        + stats.host_generated_code_size_in_bytes,
        available=available,
    )
    if memory.fits is not False:
        return memory
    return dataclasses.replace(memory, buffers=tuple(largest_buffers(compiled)))


def from_failure(error: BaseException, arguments: Sequence[Argument] = ()) -> Memory | None:
    """Reads what a program would need from the exception of a compiler that refused it for its size.

    Compilers for TPUs do; those for CPU and GPU compile what does not fit. Where the arrays alone are too
    much, the message has two figures, needed and available, and Memory no more than these. Otherwise it
    has a table of the largest allocations too.

    Args:
        error: what `lowered.compile()` raised.
        arguments: as for `read_memory`.

    Returns:
        The figures of the message; None for any other error.
    """
    text = str(error)
    over, early = _OVER.search(text), _EARLY.search(text)
    if "RESOURCE_EXHAUSTED" not in text or not (over or early):
        return None
    if early is not None:
        needed, there = map(bytes_of, early.groups())
        memory = _of_arguments(arguments, 0)
        return dataclasses.replace(memory, peak=needed, available=there, refused=True)
    assert over is not None
    there, beyond = map(bytes_of, over.groups())
    program, code = _size(r"^    program +", text), _size(r"^    overlays +", text)
    outputs, shared = _size("^Output size ", text), _size("; shares ", text)
    return dataclasses.replace(
        _of_arguments(arguments, _size("^    arguments +", text)),
        outputs_not_aliased=outputs - shared,
        temporaries=program - code,
        code=code,
        peak=there + beyond,
        aliased=shared,
        available=there,
        refused=True,
        buffers=tuple(refused_buffers(text)[:10]),
    )


def memory_table(memory: Memory) -> str:
    """The figures as plain text.

    Args:
        memory: the figures.

    Returns:
        Lines of aligned columns, then the verdict, without a line break at the end.
    """
    told = [
        (name, size, None if memory.refused and not size else least)
        for name, size, least in _rows(memory)
    ]
    rows = [row for row in told if row[1] or row[2] is not None]
    lines = [*_table_lines(rows), memory.verdict]
    if memory.aliased:
        in_place = human_bytes(memory.aliased)
        lines.append(f"{in_place} of outputs take the place of donated arguments")
    if memory.host:
        lines.append(f"{human_bytes(memory.host)} in host memory")
    if memory.unused:
        unused = human_bytes(memory.unused)
        lines.append(f"{unused} of the arguments are not used, and not in the peak")
    if memory.refused:
        lines.append("the compiler refused the program; figures are those of its message")
    return "\n".join([*lines, *_buffer_lines(memory.buffers)])


# --------------------------------------------------------------------------------------------------
# Figures


def _of_arguments(arguments: Sequence[Argument], taken: int) -> Memory:
    """The arguments by kind. What the program takes and nobody named is the rest."""
    sizes = {"parameters": 0, "optimizer": 0, "rest": 0}
    for each in arguments:
        sizes[each.kind] += each.bytes_per_device
    missing = taken - sum(sizes.values())
    return Memory(
        parameters=sizes["parameters"],
        optimizer=sizes["optimizer"],
        rest=sizes["rest"] + max(missing, 0),
        unused=max(-missing, 0) if taken else 0,
    )


def _size(label: str, text: str) -> int:
    """The size behind a label of a refusal; 0 if the compiler does not know it."""
    found = re.search(rf"{label}([\d.]+[BKMGT])", text, re.M)
    return bytes_of(found[1]) if found else 0


# --------------------------------------------------------------------------------------------------
# Text


def _rows(memory: Memory) -> list[tuple[str, int, int | None]]:
    """Name, bytes and least bytes of each line of the table."""
    return [
        ("parameters", memory.parameters, memory.parameters_minimum),
        ("optimizer state", memory.optimizer, memory.optimizer_minimum),
        ("other arguments", memory.rest, None),
        ("padding to tiles", memory.padding, None),
        ("outputs", memory.outputs_not_aliased, None),
        ("temporaries", memory.temporaries, None),
        ("code", memory.code, None),
        ("peak", memory.peak, None),
    ]


def _table_lines(rows: Sequence[tuple[str, int, int | None]]) -> list[str]:
    if len(rows) == 1:
        return [_TITLE]
    minima = any(least is not None for _, _, least in rows)
    cells = [
        (name, human_bytes(size), *(_against(size, least) if minima else ()))
        for name, size, least in rows
    ]
    header = (_TITLE, "bytes", *(("minimum", "ratio") if minima else ()))
    first, *lines, last = aligned([header, *cells], left=1)
    rule = "-" * max(map(len, [first, *lines, last]))
    return [first, rule, *lines, rule, last]


def _against(size: int, least: int | None) -> tuple[str, str]:
    if least is None:
        return "", ""
    return human_bytes(least), f"{size / least:.3f}" if least else "-"


def _buffer_lines(buffers: Sequence[Buffer]) -> list[str]:
    if not buffers:
        return []
    counts: dict[tuple[str, ...], int] = {}
    for each in buffers:
        array = f"{each.dtype}[{','.join(map(str, each.shape))}]" if each.dtype else ""
        cells = (human_bytes(each.bytes), array, each.kind, each.op_name or each.instruction)
        counts[cells] = counts.get(cells, 0) + 1
    lines = [(f"{count} x" if count > 1 else "", *cells) for cells, count in counts.items()]
    return ["", "largest buffers at the peak", *(f"  {line}" for line in aligned(lines, left=5))]
