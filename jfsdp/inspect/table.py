"""A report as plain text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from .rows import Minimum, Row

__all__ = ["aligned", "human_bytes", "render"]

_HEADER = ("kind", "axes", "dtype", "count", "bytes", "minimum", "ratio")
_LEFT_ALIGNED = 3
_LONGEST_GROUPS = 32
_UNKNOWN_TRIPS = "+ inside a loop whose length the program does not say: counted once"


def render(
    title: str, rows: Sequence[Row], totals: Sequence[Row], minima: Sequence[Minimum]
) -> str:
    """The table of a report.

    Args:
        title: its first line.
        rows: the lines, those of one kind side by side.
        totals: one row per kind; shown for a kind of several rows.
        minima: what the rows' minima were added up from. If there are none, the table has no
            columns for them.

    Returns:
        Lines of aligned columns, without a line break at the end. For an empty program, the title
        and a line that says so.
    """
    if not rows:
        return f"{title}\n\nno collectives"
    columns = len(_HEADER) if minima else len(_HEADER) - 2
    blocks = [
        _kind_lines(total, [row for row in rows if row.kind == total.kind]) for total in totals
    ]
    lines = aligned([_HEADER[:columns], *(line[:columns] for line in itertools.chain(*blocks))])
    rule = "-" * max(len(line) for line in lines)
    received = sum(total.bytes_per_device for total in totals)
    unknown_trips = any(total.unknown_trips for total in totals)
    count = f"{sum(total.count for total in totals)}{'+' if unknown_trips else ''}"
    summary = f"{count} collectives, {human_bytes(received)}"
    notes = [f"minimum of {minimum.kind}: {minimum.label}" for minimum in minima if minimum.label]
    if unknown_trips:
        notes.append(_UNKNOWN_TRIPS)
    return "\n".join([title, "", lines[0], rule, *lines[1:], rule, summary, *notes])


def human_bytes(count: float) -> str:
    """Bytes in the largest unit that leaves at least 1, such as "7 B" or "3.5 MiB".

    Args:
        count: number of bytes.

    Returns:
        The text, with one decimal from 1 KiB up.
    """
    if round(count) < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        # What would be printed as 1024.0 is 1.0 of the next unit.
        if round(count, 1) < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def _kind_lines(total: Row, rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A kind's lines; the first one names it, and several end in their sum."""
    cells = [(_axes(row), row.dtype or "-", *_figures(row)) for row in rows]
    if len(rows) > 1:
        cells.append(("total", "", *_figures(total)))
    names = itertools.chain([total.kind], itertools.repeat(""))
    return [(name, *line) for name, line in zip(names, cells, strict=False)]


def _axes(row: Row) -> str:
    if row.axes:
        return ", ".join(row.axes)
    if not row.groups:
        return "-" if not row.count else "(one device)"
    short = (
        row.groups if len(row.groups) <= _LONGEST_GROUPS else f"{row.groups[:_LONGEST_GROUPS]}..."
    )
    return f"devices {short}"


def _figures(row: Row) -> tuple[str, ...]:
    return (
        f"{row.count}+" if row.unknown_trips else str(row.count),
        human_bytes(row.bytes_per_device),
        "" if row.minimum is None else human_bytes(row.minimum),
        _ratio(row),
    )


def _ratio(row: Row) -> str:
    if row.minimum is None:
        return ""
    return "-" if row.ratio is None else f"{row.ratio:.3f}"


def aligned(lines: Sequence[Sequence[str]], left: int = _LEFT_ALIGNED) -> list[str]:
    """Cells as lines of aligned columns, the first `left` of them to the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
