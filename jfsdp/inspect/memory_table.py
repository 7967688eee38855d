"""The figures of a program's memory as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from .buffers import Buffer
from .table import aligned, human_bytes

if TYPE_CHECKING:
    from .memory import Memory

__all__ = ["Figure", "figures", "memory_table"]

_TITLE: Final = "memory of one device"


class Figure(NamedTuple):
    """A line of the table: bytes on one device, bytes on the host for it, and the least of either."""

    name: str
    device: int
    least: int | None = None
    host: int = 0
    least_on_host: int | None = None


def figures(memory: Memory) -> list[Figure]:
    """The lines of the table, those of zero bytes included; the last one is the sum."""
    m = memory
    return [
        Figure(
            "parameters",
            m.parameters,
            m.parameters_minimum,
            m.host_parameters,
            m.host_parameters_minimum,
        ),
        Figure(
            "optimizer state",
            m.optimizer,
            m.optimizer_minimum,
            m.host_optimizer,
            m.host_optimizer_minimum,
        ),
        Figure("other arguments", m.rest, None, m.host_rest),
        Figure("padding to tiles", m.padding, None, m.host_padding),
        Figure("outputs", m.outputs_not_aliased, None, m.host_outputs),
        Figure("temporaries", m.temporaries, None, m.host_temporaries),
        Figure("code", m.code, None, m.host_code),
        Figure("peak", m.peak, None, m.host),
    ]


def memory_table(memory: Memory) -> str:
    """The figures as plain text, those of host memory beside the device's if there are any.

    Args:
        memory: the figures.

    Returns:
        Lines of aligned columns, then the verdict, without a line break at the end.
    """
    rows = []
    for row in figures(memory):
        if memory.refused and not row.device:
            row = row._replace(least=None)
        if row.device or row.host or row.least is not None or row.least_on_host:
            rows.append(row)
    lines = [*_table_lines(rows), memory.verdict, *filter(None, [memory.host_verdict])]
    if memory.aliased:
        in_place = human_bytes(memory.aliased)
        lines.append(f"{in_place} of outputs take the place of donated arguments")
    if memory.unused:
        unused = human_bytes(memory.unused)
        lines.append(f"{unused} of the arguments are not used, and not in the peak")
    if memory.refused:
        lines.append("the compiler refused the program; figures are those of its message")
    return "\n".join([*lines, *_buffer_lines(memory.buffers)])


def _table_lines(rows: Sequence[Figure]) -> list[str]:
    if len(rows) == 1:
        return [_TITLE]
    minima = any(row.least is not None for row in rows)
    on_host = any(row.host or row.least_on_host for row in rows)
    host_minima = any(row.least_on_host is not None for row in rows) and on_host
    cells = [
        (
            row.name,
            human_bytes(row.device),
            *(_against(row.device, row.least) if minima else ()),
            *((human_bytes(row.host),) if on_host else ()),
            *(_against(row.host, row.least_on_host) if host_minima else ()),
        )
        for row in rows
    ]
    least = ("minimum", "ratio")
    header = (_TITLE, *(("device",) if on_host else ("bytes",)), *(least if minima else ()))
    header += (*(("host",) if on_host else ()), *(least if host_minima else ()))
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
