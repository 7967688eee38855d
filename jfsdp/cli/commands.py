"""`python -m jfsdp`: whether a training job fits a machine, what it communicates, before there is one."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import jax

import jfsdp
from jfsdp.cli import job as job_file
from jfsdp.cli.config import ConfigError, read_config
from jfsdp.cli.job import Job, build_job
from jfsdp.cli.kept import kept_by, promised_rows
from jfsdp.cli.report import Cost, contract_line, headline, html_page, limited, report_tables
from jfsdp.cli.terminal import RichScreen, Screen, screen
from jfsdp.inspect import Row
from jfsdp.inspect.roofline import Roofline, roofline
from jfsdp.inspect.sizes import parse_bytes
from jfsdp.inspect.table import human_bytes
from jfsdp.inspect.target import target_of

__all__ = ["main"]

FITS, REFUSED, MISTAKE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments; None for those of the process.

    Returns:
        0: the job is what its policies state, and fits. 1: it is not, or does not. 2: a mistake in the
        arguments, in the job's file or in the model.
    """
    parser = _parser()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stop:  # help, version, or a mistake that argparse has told
        return stop.code if isinstance(stop.code, int) else MISTAKE
    if arguments.command is None:
        parser.print_help()
        return FITS
    try:
        return arguments.run(arguments)
    except ConfigError as error:
        print(f"jfsdp: {error}", file=sys.stderr)
    except Exception:
        traceback.print_exc()
        print(f"jfsdp: {arguments.config}: the job could not be built; see above", file=sys.stderr)
    return MISTAKE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jfsdp",
        description="Say whether a training job fits a machine and what it communicates, on a computer "
        "that has none of that machine.",
        epilog="Exit status: 0 if it fits and is what its policies state, 1 if not, 2 for a mistake. "
        "`plan --help` describes the file of a job.",
    )
    parser.add_argument("--version", action="version", version=f"jfsdp {jfsdp.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    described: Any = {
        "epilog": job_file.__doc__,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }
    plan = commands.add_parser(
        "plan", help="bytes per device by leaf, in seconds: nothing is compiled", **described
    )
    plan.set_defaults(run=_plan)
    compile_ = commands.add_parser(
        "compile", help="compile the step: collectives, memory, schedule", **described
    )
    compile_.set_defaults(run=_compile)
    for command in (plan, compile_):
        command.add_argument("config", metavar="CONFIG", help="the job's TOML file")
        command.add_argument("--target", metavar="T", help="a machine, such as v5p:4x4x4 or h100:8")
        command.add_argument("--json", action="store_true", help="print JSON and nothing else")
        command.add_argument(
            "--memory",
            metavar="M",
            help='what a device has, such as "16 GiB", in place of what is known',
        )
    compile_.add_argument("--html", metavar="FILE", help="write the report as a page")
    return parser


# --------------------------------------------------------------------------------------------------
# Commands


def _plan(arguments: argparse.Namespace) -> int:
    memory = _memory_limit(arguments.memory)
    job = _job(arguments)
    kept = kept_by(job)
    target = target_of(job.mesh)
    limit = memory or (None if target is None else target.usable_memory_bytes)
    fits = False if limit is not None and kept.state > limit else None  # the rest is not known
    lines = _roofline(job, promised_rows(job))
    if arguments.json:
        _print_json(job, kept.as_dict(), lines, fits, kept.verdict(limit))
    else:
        unit, size = kept.largest_unit
        out = screen()
        out.show(headline(job), "", f"{jfsdp.plan(job.model)}", "", kept.table())
        out.show(
            f"largest unit while it is gathered: {human_bytes(size)}, {unit}", *map(str, lines)
        )
        out.verdict(kept.verdict(limit), fits)
        if kept.host:
            out.verdict(f"{human_bytes(kept.host)} per device in host memory", None)
    return REFUSED if fits is False else FITS


def _compile(arguments: argparse.Namespace) -> int:
    memory = _memory_limit(arguments.memory)
    page = _page(arguments.html)
    job = _job(arguments)
    out = Screen() if arguments.json else screen()
    started = time.perf_counter()
    with out.working(f"compiling {headline(job)}"):
        report = limited(job.inspect(compile=True), memory)
    cost = Cost(time.perf_counter() - started)
    departures = report.departures()
    lines = _roofline(job, report.rows if report.collectives else promised_rows(job))
    assert report.memory is not None
    fits, verdict = report.memory.fits, report.memory.verdict
    if page is not None:
        _write(page, html_page(job, report, [cost, *lines]))
    if arguments.json:
        facts = {
            "compile": dataclasses.asdict(cost),
            "report": report.as_dict(),
            "departures": [dataclasses.asdict(each) for each in departures],
        }
        _print_json(job, facts, lines, fits, verdict)
    else:
        out.show(headline(job), "")
        out.show(*(report_tables(report) if isinstance(out, RichScreen) else (str(report), "")))
        out.show(str(cost), *map(str, lines), *([] if page is None else [f"page: {page}"]))
        for number, each in enumerate(departures, 1):
            out.verdict(f"departure {number}: {each}", False)
        if not departures:
            out.verdict(contract_line(report), True)
        out.verdict(verdict, fits)
        if report.memory.host:
            out.verdict(report.memory.host_verdict, report.memory.host_fits)
    return REFUSED if departures or fits is False else FITS


def _job(arguments: argparse.Namespace) -> Job:
    config = read_config(arguments.config)
    if (arguments.target or config.target) and "JAX_PLATFORMS" not in os.environ:
        # The machine is only compiled for: no accelerator that is here is to be touched. JAX has read
        # its environment already, but has not started.
        os.environ["JAX_PLATFORMS"] = "cpu"
        jax.config.update("jax_platforms", "cpu")
    job = build_job(config, arguments.target)
    for note in job.notes:
        print(f"jfsdp: {note}", file=sys.stderr)
    return job


def _memory_limit(text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--memory: {error}") from error


def _page(name: str | None) -> pathlib.Path | None:
    """Where to write the page; a folder that is not there is told before minutes of compiling."""
    page = None if name is None else pathlib.Path(name)
    if page is not None and not page.parent.is_dir():
        raise ConfigError(f"--html {name}: there is no folder {page.parent}")
    return page


def _write(page: pathlib.Path, text: str) -> None:
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {page}: {error.strerror}") from error


def _roofline(job: Job, rows: Sequence[Row]) -> tuple[Roofline, ...]:
    target = target_of(job.mesh)
    if target is None:
        return ()
    parameters = jfsdp.plan(job.model).parameters
    return roofline(
        rows, mesh=job.mesh, target=target, parameters=parameters, tokens=job.config.step.tokens
    )


def _print_json(
    job: Job, facts: dict[str, Any], lines: Sequence[Roofline], fits: bool | None, verdict: str
) -> None:
    config = job.config
    head = {
        "config": config.path.name,
        "target": config.target,
        "mesh": config.mesh,
        "parameters": jfsdp.plan(job.model).parameters,
        "tokens": config.step.tokens,
    }
    tail = {"roofline": [line.as_dict() for line in lines], "fits": fits, "verdict": verdict}
    print(json.dumps({**head, **facts, **tail}, indent=2))
