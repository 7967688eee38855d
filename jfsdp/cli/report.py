"""The report of a compiled job, as tables for a terminal and as a page."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import jfsdp
from jfsdp.cli.job import Job
from jfsdp.cli.terminal import Table
from jfsdp.inspect import Memory, Report, Row
from jfsdp.inspect.html import to_html
from jfsdp.inspect.networks_table import network_table
from jfsdp.inspect.overlap import overlap_line
from jfsdp.inspect.table import human_bytes
from jfsdp.inspect.transfers import traffic_line

__all__ = ["Cost", "contract_line", "headline", "html_page", "limited", "report_tables"]


@dataclasses.dataclass(frozen=True)
class Cost:
    """What compiling took on this machine.

    Attributes:
        seconds: to trace, lower and compile.
        peak_host_bytes: the most memory that this process has had; None where that is not to be had.
    """

    seconds: float
    peak_host_bytes: int | None = dataclasses.field(default_factory=lambda: _peak_of_this_process())

    def __str__(self) -> str:
        memory = self.peak_host_bytes
        peak = (
            ""
            if memory is None
            else f", with at most {human_bytes(memory)} of this machine's memory"
        )
        return f"compiled in {self.seconds:.1f} s{peak}"


def headline(job: Job) -> str:
    """What is trained on what, in one line."""
    config = job.config
    mesh = " x ".join(f"{axis}={size}" for axis, size in config.mesh.items())
    where = config.target or f"{job.mesh.size} x {job.mesh.devices.flat[0].device_kind}"
    size = jfsdp.plan(job.model).parameters
    return f"{config.path.name}: {config.model.build}, {size:,} parameters, on {where}, mesh {mesh}"


def limited(report: Report, memory: int | None) -> Report:
    """The report with another amount of memory to fit into; None leaves it as it is."""
    if memory is None or report.memory is None:
        return report
    return dataclasses.replace(report, memory=dataclasses.replace(report.memory, available=memory))


def html_page(job: Job, report: Report, facts: Sequence[Any]) -> str:
    """The report as a page, with the job's configuration.

    Args:
        job: the job.
        report: of its step.
        facts: more to say about it, a line each.
    """
    details = {
        "job": headline(job),
        "machine": job.config.target or "the devices that are here",
        "compilation and roofline": "\n".join(map(str, facts)),
        "configuration": job.config.path.read_text(encoding="utf-8"),
    }
    return to_html(report, f"{job.config.model.build} on {details['machine']}", details=details)


def contract_line(report: Report) -> str:
    """What to say where there is no departure."""
    if report.lowered is not None and "cpu" in report.target:
        return (
            "no departure: the program is what the policies state (as it is written: compilers for CPU "
            "widen bfloat16)"
        )
    return "no departure: the program is what the policies state"


def report_tables(report: Report) -> tuple[str | Table, ...]:
    """What `str(report)` says, as tables for a screen that draws them."""
    blocks: list[str | Table] = []
    if report.collectives or report.memory is None:
        overlap = overlap_line(report.collectives)
        blocks += [_collectives(report), *([f"{overlap}\n"] if overlap else [])]
        networks = network_table(report.collectives, report.promises, report.networks)
        blocks += [f"{networks}\n"] if networks else []
    moved = traffic_line(report.traffic)
    blocks += [f"{moved}\n"] if moved else []
    if report.memory is not None:
        blocks += _memory(report.memory)
    return tuple(blocks)


def _collectives(report: Report) -> Table:
    rows = []
    for total in report.totals:
        own = [row for row in report.rows if row.kind == total.kind]
        rows += [_cells(row, ", ".join(row.axes) or row.groups or "-", row.dtype) for row in own]
        if len(own) > 1:
            rows.append(_cells(total, "total", ""))
    count = sum(total.count for total in report.totals)
    total = ("total", "", "", f"{count:,}", human_bytes(report.total_bytes), "", "")
    head = ("kind", "axes", "dtype", "count", "bytes", "minimum", "ratio")
    title = f"collectives: bytes received per device and step, {report.target or 'as lowered'}"
    return Table(title, head, rows, total, left=3)


def _cells(row: Row, axes: str, dtype: str) -> tuple[str, ...]:
    minimum = "" if row.minimum is None else human_bytes(row.minimum)
    ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
    return (
        row.kind,
        axes,
        dtype,
        f"{row.count:,}",
        human_bytes(row.bytes_per_device),
        minimum,
        ratio,
    )


def _memory(memory: Memory) -> tuple[Table, ...]:
    *rows, peak = [(name, human_bytes(size)) for name, size in memory.by_name().items()]
    tables = [Table("memory of one device", ("", "bytes"), rows, peak)]
    if memory.host:
        *rows, whole = [(name, human_bytes(n)) for name, n in memory.by_name_on_host().items()]
        tables.append(Table("host memory of one device", ("", "bytes"), rows, whole))
    if memory.buffers:
        cells = [
            (human_bytes(each.bytes), f"{each.dtype}{list(each.shape)}", each.kind, each.op_name)
            for each in memory.buffers
        ]
        head = ("bytes", "array", "kind", "from")
        tables.append(Table("largest buffers at the peak", head, cells, left=4))
    return tuple(tables)


def _peak_of_this_process() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
