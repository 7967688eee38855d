"""Which share of the bytes overlaps: in figures, in the table, in JSON and on the page."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from jfsdp.inspect import Collective, Report
from jfsdp.inspect.overlap import overlap_line


def record(kind: str, phase: str, size: float, overlapped: bool, times: int = 1) -> Collective:
    plain = Collective(kind, ("fsdp",), "bfloat16", (1,), (8,), 8, times, size, phase=phase)
    return dataclasses.replace(
        plain, instruction="i", asynchronous=overlapped, overlapped=overlapped
    )


@pytest.fixture
def report() -> Report:
    return Report(
        collectives=(
            record("all-gather", "forward", 10, True, times=3),
            record("all-gather", "forward", 10, False),
            record("all-gather", "backward", 40, False),
            record("reduce-scatter", "backward", 60, True),
            record("reduce-scatter", "backward", 20, False),
            record("all-to-all", "", 5, True),
        ),
        mesh_axes=(("fsdp", 8),),
        target="8 x TPU v5 lite",
    )


@pytest.mark.parametrize(
    ("kind", "phase", "share"),
    [
        ("all-gather", None, 0.375),
        ("all-gather", "forward", 0.75),
        ("all-gather", "backward", 0.0),
        ("all-gather", "update", None),
        ("reduce-scatter", None, 0.75),
        ("reduce-scatter", "backward", 0.75),
        ("all-reduce", None, None),
    ],
)
def test_the_share_is_of_the_bytes_of_all_executions(
    report: Report, kind: str, phase: str | None, share: float | None
) -> None:
    assert report.overlap(kind, phase) == share


def test_a_kind_of_several_phases_tells_each_in_the_text(report: Report) -> None:
    assert overlap_line(report.collectives) == (
        "scheduled beside a matrix multiplication: all-gather 38% (forward 75%, backward 0%), "
        "reduce-scatter 75% of the bytes"
    )
    assert overlap_line(report.collectives) in str(report)


def test_json_has_the_shares_by_kind_and_phase(report: Report) -> None:
    assert json.loads(report.to_json())["overlap"] == {
        "all-gather": {"all": 0.375, "forward": 0.75, "backward": 0.0},
        "reduce-scatter": {"all": 0.75, "backward": 0.75},
        "all-to-all": {"all": 1.0},
    }


def test_the_page_has_the_shares_by_phase(report: Report) -> None:
    assert '<td class="number">38%</td><td class="number">75%</td>' in report.to_html()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("allgather",), "no kind of collective 'allgather'"),
        (("all-gather", "backwards"), "no phase 'backwards'; there are .*'forward', 'backward'"),
    ],
)
def test_a_misspelled_kind_or_phase_is_an_error(
    report: Report, arguments: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        report.overlap(*arguments)


def test_a_program_before_compilation_has_no_share(report: Report) -> None:
    written = dataclasses.replace(report, target="")
    with pytest.raises(ValueError, match=r"of compiled programs only.*compile=True"):
        written.overlap("all-gather")
