"""A report as a page: the figures are in it, nothing outside it is needed, nothing in it is code."""

from __future__ import annotations

import dataclasses
import html.parser
import re
from typing import Any

import jax
import pytest
from flax import nnx
from helpers import linears, make_mesh, mean_square, rows

import jfsdp
from jfsdp.inspect import Collective, Memory, Report
from jfsdp.inspect.buffers import Buffer
from jfsdp.inspect.html import to_html

MIB = 2**20
MEMORY = Memory(
    parameters=10 * MIB,
    optimizer=20 * MIB,
    rest=5 * MIB,
    temporaries=15 * MIB,
    peak=50 * MIB,
    aliased=30 * MIB,
    available=100 * MIB,
)


def gather(leaf: str, size: float, at: int = 0, **settings: Any) -> Collective:
    """An all-gather of the forward that a compiler has scheduled."""
    given = {"phase": "forward", "leaf": leaf, "instruction": f"gather.{at}", **settings}
    return Collective("all-gather", ("fsdp",), "bfloat16", (1,), (8,), 8, 1, size, **given)


@pytest.fixture(scope="module")
def written() -> Report:
    """Of a real step, before compilation."""
    model = jfsdp.shard(linears(2, 16), make_mesh(fsdp=8), units=nnx.Linear)
    return jfsdp.inspect(jax.grad(mean_square), model, rows(8, 16))


@pytest.fixture
def compiled(written: Report) -> Report:
    """The same with figures of a compiled program to recognize."""
    records = (
        gather("layers.0.kernel", 60 * MIB, 0, asynchronous=True, overlapped=True),
        gather("layers.1.kernel", 30 * MIB, 1, asynchronous=True),
        gather("", 10 * MIB, 2),
    )
    target = "8 x TPU v5 lite"
    return dataclasses.replace(written, collectives=records, memory=MEMORY, target=target)


class Checked(html.parser.HTMLParser):
    """Reads a page; every element is closed, in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def cells(page: str) -> list[list[str]]:
    """The text of every table line."""
    lines = re.findall(r"<tr[^>]*>(.*?)</tr>", page, re.DOTALL)
    return [
        [
            re.sub(r"<[^>]+>", "", cell)
            for cell in re.findall(r"<td[^>]*>(.*?)</td>", line, re.DOTALL)
        ]
        for line in lines
    ]


def bars(page: str, kind: str) -> list[list[tuple[str, float]]]:
    """Color and width (of 1000) of the parts of each bar of a kind."""
    found = re.findall(rf'<svg class="{kind}".*?</svg>', page, re.DOTALL)
    parts = [re.findall(r'<rect class="(\w+)" x="[\d.]+" width="([\d.]+)"', bar) for bar in found]
    return [[(color, float(width)) for color, width in bar] for bar in parts]


def test_the_page_is_whole_and_needs_nothing_else(compiled: Report) -> None:
    page = to_html(compiled, "A title")
    read = Checked(page)
    assert page.startswith("<!DOCTYPE html>")
    assert "A title" in read.text
    assert not {"script", "link", "img", "iframe"}.intersection(tag for tag, _ in read.tags)
    assert not {"src", "href"}.intersection(name for _, given in read.tags for name in given)
    assert not re.search(r"https?:|url\(|@import", page)


def test_the_page_is_light_or_dark_as_the_reader_s_system_is(compiled: Report) -> None:
    assert "@media (prefers-color-scheme: dark)" in to_html(compiled)


def test_the_report_s_own_method_writes_the_same_page(compiled: Report) -> None:
    assert compiled.to_html("A title") == to_html(compiled, "A title")


def test_everything_that_comes_from_outside_is_escaped(compiled: Report) -> None:
    evil = "<script>alert('&')</script>"
    record = gather(f"{evil}.kernel", 1.0, phase=evil, written=evil, groups=evil)
    record = dataclasses.replace(record, dtype=evil, axes=(evil,))
    buffer = Buffer(1, (1,), evil, evil, evil, "temporary")
    report = dataclasses.replace(
        compiled,
        collectives=(record,),
        mesh_axes=((evil, 8),),
        target=evil,
        jax_version=evil,
        memory=dataclasses.replace(MEMORY, buffers=(buffer,)),
    )
    page = to_html(report, evil, details={evil: evil, "text": f"{evil}\n{evil}"})
    read = Checked(page)
    assert "script" not in {tag for tag, _ in read.tags}
    assert read.text.count(evil) > 10


def test_the_verdict_and_the_target_come_first(compiled: Report) -> None:
    text = Checked(to_html(compiled)).text
    verdict = text.index("fits: 50.0 of 100.0 MiB per device")
    assert text.index("8 x TPU v5 lite") < verdict < text.index("Memory per device")


def test_memory_is_a_bar_against_what_a_device_has(compiled: Report) -> None:
    ((*parts,),) = bars(to_html(compiled), "bar")
    assert parts == [
        ("blue", 100),
        ("violet", 200),
        ("teal", 50),
        ("amber", 150),
        ("free", 500),
    ]


def test_memory_has_its_numbers_beside_the_bar(compiled: Report) -> None:
    found = cells(to_html(compiled))
    assert ["parameters", "10.0 MiB", "10.0%"] in found
    assert ["optimizer state", "20.0 MiB", "20.0%"] in found
    assert ["temporaries", "15.0 MiB", "15.0%"] in found
    assert ["a device has", "100.0 MiB", ""] in found


def test_a_bar_that_does_not_fit_has_a_mark_where_the_device_ends(compiled: Report) -> None:
    page = to_html(compiled, memory="25 MiB")
    assert "does not fit: 50.0 of 25.0 MiB" in Checked(page).text
    assert '<rect class="mark" x="498.00"' in page
    assert "free" not in dict(bars(page, "bar")[0])


def test_what_a_refusing_compiler_does_not_tell_is_shown_as_such(compiled: Report) -> None:
    refused = Memory(parameters=MIB, peak=4 * MIB, available=2 * MIB, refused=True)
    page = to_html(dataclasses.replace(compiled, memory=refused, collectives=()))
    assert ["not told apart by the compiler", "3.0 MiB", "75.0%"] in cells(page)


def test_a_refused_program_has_the_communication_that_was_written(written: Report) -> None:
    refused = Memory(peak=4 * MIB, available=2 * MIB, refused=True)
    report = dataclasses.replace(
        written, collectives=(), memory=refused, target="8 x TPU v5 lite", lowered=written
    )
    page = to_html(report)
    assert "Communication per device and step, as written: " in page
    # Two matrices of 256 float32, of which 7/8 come from others.
    line, *_ = [line for line in cells(page) if line[:1] == ["reduce-scatter"]]
    assert line[:5] == ["reduce-scatter", "fsdp", "float32", "2", "1.8 KiB"]


def test_buffers_are_listed_where_they_are_known(compiled: Report) -> None:
    buffer = Buffer(3 * MIB, (4, 8), "bfloat16", "step/dot", "fusion.1", "temporary")
    memory = dataclasses.replace(MEMORY, buffers=(buffer,))
    page = to_html(dataclasses.replace(compiled, memory=memory))
    assert ["3.0 MiB", "bfloat16[4, 8]", "temporary", "step/dot"] in cells(page)
    assert "Largest buffers" not in to_html(compiled)


def test_collectives_are_by_unit_and_phase_with_bars(compiled: Report) -> None:
    page = to_html(compiled)
    lines = [line[:7] for line in cells(page) if len(line) == 8]
    assert lines == [
        ["layers.0-1", "forward", "all-gather", "fsdp", "bfloat16", "2", "90.0 MiB"],
        [
            "of no parameter, or unnamed",
            "forward",
            "all-gather",
            "fsdp",
            "bfloat16",
            "1",
            "10.0 MiB",
        ],
    ]
    assert [width for ((_, width),) in bars(page, "inline")] == [1000, pytest.approx(111.11)]


def test_what_the_compiler_made_of_a_collective_is_said(compiled: Report) -> None:
    record = dataclasses.replace(gather("head.bias", 1.0), kind="all-reduce", written="all-gather")
    page = to_html(dataclasses.replace(compiled, collectives=(record,)))
    assert "all-reduce (for all-gather)" in Checked(page).text


def test_the_schedule_has_the_share_and_a_strip_in_program_order(compiled: Report) -> None:
    page = to_html(compiled)
    assert ["all-gather", "60%"] in [line[:2] for line in cells(page)]
    assert bars(page, "strip") == [[("teal", 600), ("blue", 300), ("amber", 100)]]


def test_a_program_before_compilation_has_neither_schedule_nor_memory(written: Report) -> None:
    text = Checked(to_html(written)).text
    assert "as written, not compiled" in text
    assert "Schedule" not in text
    assert "Memory per device" not in text


def test_departures_are_listed(compiled: Report) -> None:
    record = dataclasses.replace(gather("layers.0.kernel", 1.0), dtype="float16")
    page = to_html(dataclasses.replace(compiled, collectives=(record,)))
    (item,) = re.findall(r"<li>(layers.*?)</li>", page)
    assert "dtype of the all-gather: expected float32" in item
    assert '<div class="verdict bad">' in page


def test_no_departure_is_said_too(written: Report) -> None:
    page = to_html(written)
    assert "<p>None.</p>" in page
    assert '<div class="verdict good">' in page


def test_details_keep_their_lines(compiled: Report) -> None:
    page = to_html(compiled, details={"configuration": "[mesh]\nfsdp = 8", "job": "tiny"})
    assert "<dt>configuration</dt><dd><pre>[mesh]\nfsdp = 8</pre></dd>" in page
    assert "<dt>job</dt><dd>tiny</dd>" in page
    assert f"jfsdp {jfsdp.__version__}" in page
