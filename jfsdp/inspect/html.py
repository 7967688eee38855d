"""A report as one HTML page that needs nothing else: no network, no scripts, no other file."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.resources
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from .contract import Departure
from .html_memory import buffers_section, memory_section
from .html_wire import networks_section, schedule_section, totals_section, units_section
from .sizes import parse_bytes
from .transfers import traffic_line

if TYPE_CHECKING:
    from .report import Report

__all__ = ["to_html"]


def to_html(
    report: Report,
    title: str = "",
    *,
    memory: int | str | None = None,
    details: Mapping[str, str] | None = None,
) -> str:
    """Write a report as a page.

    Args:
        report: of a program, compiled or not.
        title: its heading; "" for a general one.
        memory: what a device has, as for `Report.check`.
        details: more to say about the run, by name, such as the text of its configuration. Texts of
            several lines are kept as they are.

    Returns:
        A whole HTML document, light or dark as the reader's system is.
    """
    title = title or "Training step"
    if memory is not None and report.memory is not None:
        limited = dataclasses.replace(report.memory, available=parse_bytes(memory))
        report = dataclasses.replace(report, memory=limited)
    departures = report.departures() if report.promises else []
    # A program that was refused communicates nothing; what it was written to is known.
    wire = report if report.collectives or report.lowered is None else report.lowered
    style = importlib.resources.files("jfsdp.inspect").joinpath("report.css").read_text("utf-8")
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(_subtitle(report))}</p>',
        _verdict(report, departures),
        "" if report.memory is None else memory_section(report.memory),
        *(f"<p>{escape(line)}</p>" for line in traffic_line(report.traffic).splitlines()),
        "" if report.memory is None else buffers_section(report.memory.buffers),
        totals_section(wire),
        networks_section(wire),
        units_section(wire),
        schedule_section(report),
        _departures(report, departures),
        _details(report, details or {}),
    ]
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>",
            *filter(None, body),
            "</body>\n</html>\n",
        ]
    )


# --------------------------------------------------------------------------------------------------
# Sections


def _subtitle(report: Report) -> str:
    mesh = " x ".join(f"{axis}={size}" for axis, size in report.mesh_axes) or "no mesh"
    stage = f"compiled for {report.target}" if report.target else "as written, not compiled"
    return f"{stage}; mesh {mesh}; jax {report.jax_version}"


def _verdict(report: Report, departures: Sequence[Departure]) -> str:
    if not report.promises:
        contract = "No policies to hold it against."
    elif departures:
        points = f"{len(departures)} point{'s' if len(departures) > 1 else ''}"
        contract = f"The program departs from the policies in {points}, listed below."
    else:
        contract = "The program is what the policies state."
    fits = None if report.memory is None else report.memory.fits
    text = "memory is not known" if report.memory is None else report.memory.verdict
    kind = "bad" if departures or fits is False else "good" if report.promises else ""
    return f'<div class="verdict {kind}">{escape(text)}<span>{contract}</span></div>'


def _departures(report: Report, departures: Sequence[Departure]) -> str:
    if not report.promises:
        return ""
    items = "".join(f"<li>{escape(str(each))}</li>" for each in departures)
    return "<h2>Departures from the policies</h2>\n" + (
        f"<ol>{items}</ol>" if items else "<p>None.</p>"
    )


def _details(report: Report, details: Mapping[str, str]) -> str:
    known = {
        "target": report.target or "not compiled",
        "mesh": ", ".join(f"{axis}={size}" for axis, size in report.mesh_axes),
        "versions": f"jax {report.jax_version}, jfsdp {importlib.metadata.version('jfsdp')}",
    }
    items = [
        f"<dt>{escape(name)}</dt><dd>{_text(text)}</dd>"
        for name, text in {**known, **details}.items()
    ]
    return f"<h2>Details</h2>\n<dl>{''.join(items)}</dl>"


def _text(text: str) -> str:
    return f"<pre>{escape(text)}</pre>" if "\n" in text else escape(text)
