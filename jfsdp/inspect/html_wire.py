"""The part of a report's page that is about what a step communicates, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Final

from .blocks import grouped, module_of, pattern, ranged
from .collective import KINDS, Collective
from .html_parts import svg, swatch, table
from .networks_table import bytes_by_network
from .overlap import overlap
from .table import human_bytes

if TYPE_CHECKING:
    from .report import Report

__all__ = ["networks_section", "schedule_section", "totals_section", "units_section"]

_PHASES: Final = ("forward", "backward", "update", "")
_ROOT: Final = "(root)"
_UNNAMED: Final = "of no parameter, or unnamed"
_COLORS: Final = {"all-gather": "blue", "reduce-scatter": "amber", "all-reduce": "violet"}
_STATES: Final = {
    "beside a matrix multiplication": "teal",
    "asynchronous": "blue",
    "synchronous: nothing else runs": "amber",
}


def totals_section(report: Report) -> str:
    """Bytes by kind, axes and dtype, against the least ones."""
    rows = []
    for total in report.totals:
        own = [row for row in report.rows if row.kind == total.kind]
        for row in own:
            axes = ", ".join(row.axes) or row.groups or "-"
            figures = (row.count, row.bytes_per_device, row.minimum, row.ratio)
            rows.append(
                (escape(row.kind), escape(axes), escape(row.dtype) or "-", *_figures(*figures))
            )
        if len(own) > 1:
            figures = (total.count, total.bytes_per_device, total.minimum, total.ratio)
            rows.append((escape(total.kind), "total", "", *_figures(*figures)))
    if not rows:
        return ""
    head = ("kind", "axes", "dtype", "count", "bytes", "minimum", "ratio")
    stage = "" if report.target else ", as written"
    return (
        f"<h2>Communication per device and step{stage}: {human_bytes(report.total_bytes)}</h2>\n"
        f"{table(head, rows, numbers=(3, 4, 5, 6))}"
    )


def networks_section(report: Report) -> str:
    """Bytes by network; "" where there is one."""
    by_kind = bytes_by_network(report.collectives, report.promises, report.networks)
    if report.networks is None or not by_kind:
        return ""
    networks = report.networks
    rows = []
    for kind, each in by_kind.items():
        least, share = each.get("minimum"), each.get("overlapped")
        rows.append(
            (
                escape(kind),
                human_bytes(each[networks.fast]),
                human_bytes(each[networks.slow]),
                "" if least is None else human_bytes(least),
                "" if share is None else f"{share:.0%}",
            )
        )
    head = ("kind", networks.fast, networks.slow, f"least {networks.slow}", "beside matmuls")
    return (
        f"<h2>Bytes inside a {networks.island} and between them</h2>\n"
        f"{table(head, rows, numbers=(1, 2, 3, 4))}"
    )


def _figures(count: int, size: float, minimum: float | None, ratio: float | None) -> list[str]:
    least = "" if minimum is None else human_bytes(minimum)
    return [f"{count:,}", human_bytes(size), least, "" if ratio is None else f"{ratio:.3f}"]


def _units(report: Report) -> Callable[[Collective], str]:
    """Tells which unit a collective is of; of the outermost one, which module in it."""
    named = {promise.leaf: promise.unit for promise in report.promises}

    def unit(record: Collective) -> str:
        name = named.get(record.leaf, "")
        return module_of(record.leaf) if name in ("", _ROOT) else name

    return unit


def units_section(report: Report) -> str:
    """Bytes by unit and phase; repeated blocks are one line."""
    unit = _units(report)
    groups = grouped(
        report.collectives,
        lambda c: (pattern(unit(c)), c.phase, c.kind, c.written, c.axes, c.groups, c.dtype),
    )
    order = list(dict.fromkeys(pattern(unit(group[0])) for group in groups))
    groups.sort(
        key=lambda group: (
            not unit(group[0]),
            order.index(pattern(unit(group[0]))),
            _phase(group[0]),
        )
    )
    largest = max((_bytes(group) for group in groups), default=0.0)
    if not largest:
        return ""
    rows = []
    for group in groups:
        first = group[0]
        name = ranged([unit(record) for record in group]) or _UNNAMED
        kind = f"{first.kind} (for {first.written})" if first.written else first.kind
        bar = [(_bytes(group), _COLORS.get(first.purpose, "gray"), "")]
        rows.append(
            (
                escape(name),
                escape(first.phase) or "-",
                escape(kind),
                escape(", ".join(first.axes) or first.groups or "-"),
                escape(first.dtype),
                f"{sum(c.executions for c in group):,}",
                human_bytes(_bytes(group)),
                svg("inline", bar, largest),
            )
        )
    head = ("unit", "phase", "kind", "axes", "dtype", "count", "bytes", "")
    return f"<h2>Collectives by unit and phase</h2>\n{table(head, rows, numbers=(5, 6), fill=7)}"


def _phase(record: Collective) -> int:
    return _PHASES.index(record.phase) if record.phase in _PHASES else len(_PHASES)


def schedule_section(report: Report) -> str:
    """What of each kind runs beside a matrix multiplication; "" before compilation."""
    unit = _units(report)
    rows = []
    for kind in KINDS:
        records = [
            c for c in report.collectives if c.kind == kind and c.instruction and c.total_bytes
        ]
        whole = _bytes(records)
        if not whole:
            continue
        runs: list[list[Collective]] = []
        for record in records:
            if runs and _state(runs[-1][0]) == _state(record):
                runs[-1].append(record)
            else:
                runs.append([record])
        parts = [(_bytes(run), _STATES[_state(run[0])], _run_text(run, unit)) for run in runs]
        shares = [overlap(records, kind, phase) for phase in (None, "forward", "backward")]
        texts = ["" if share is None else f"{share:.0%}" for share in shares]
        rows.append((kind, *texts, svg("strip", parts, whole, f"{kind} in program order")))
    if not rows:
        return ""
    legend = "".join(f"<li>{swatch(color)}{state}</li>" for state, color in _STATES.items())
    head = ("kind", "overlapped", "forward", "backward", "in program order, by bytes")
    drawn = table(head, rows, numbers=(1, 2, 3), fill=4, kind="schedule")
    return (
        "<h2>Schedule: what runs beside a matrix multiplication</h2>\n"
        f'<ul class="legend">{legend}</ul>\n{drawn}'
    )


def _state(record: Collective) -> str:
    beside, alone, waiting = _STATES
    return beside if record.overlapped else alone if record.asynchronous else waiting


def _run_text(run: Sequence[Collective], unit: Callable[[Collective], str]) -> str:
    names = list(dict.fromkeys(unit(record) for record in run if record.leaf))
    where = f" of {', '.join(names[:4])}{' and more' if len(names) > 4 else ''}" if names else ""
    count = sum(c.executions for c in run)
    return (
        f"{_state(run[0])}: {count} collective{'s'[: count - 1]}{where}, {human_bytes(_bytes(run))}"
    )


def _bytes(records: Iterable[Collective]) -> float:
    return sum(record.total_bytes for record in records)
