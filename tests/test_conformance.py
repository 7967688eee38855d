"""FSDP2_CONFORMANCE.md: every test that it names exists, and no row is empty."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TABLE = TESTS / "FSDP2_CONFORMANCE.md"
NAMED = re.compile(r"`tests/([\w/]+\.py)::(\w+)`")


def rows() -> list[list[str]]:
    """The cells of every row, without heads and rules."""
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "FSDP2" and set(row[0]) != {"-"}]


@functools.cache
def functions(file: str) -> frozenset[str]:
    """Names of the tests of a file, those in classes too."""
    tree = ast.parse((TESTS / file).read_text())
    found = (node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return frozenset(name for name in found if name.startswith("test_"))


def named() -> list[tuple[str, str]]:
    return sorted(set(NAMED.findall(TABLE.read_text())))


@pytest.mark.parametrize(("file", "test"), named())
def test_every_test_that_is_named_exists(file: str, test: str):
    assert (TESTS / file).exists()
    assert test in functions(file)


def test_every_row_has_as_many_cells_as_its_head_and_none_is_empty():
    for row in rows():
        assert len(row) in (2, 3), row
        assert all(row), row


def test_every_row_names_a_test_or_says_why_there_is_none():
    for row in rows():
        if len(row) == 3:
            assert NAMED.search(row[-1]) or row[-1].startswith(("none", "TODO")), row


def test_every_test_of_fsdp2_has_one_row():
    names = [row[0] for row in rows()]
    assert len(names) == len(set(names))
    assert len([name for name in names if ".py`: " in name]) >= 150


def test_no_row_is_left_to_do():
    """Every behavior has its test."""
    assert [row for row in rows() if "TODO" in row[-1]] == []
