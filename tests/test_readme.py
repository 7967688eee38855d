"""The README's example runs, and prints what the README says it prints."""

from __future__ import annotations

import contextlib
import io
import pathlib
import re
from typing import Any

import jax

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()


def fenced(language: str) -> list[str]:
    """The code blocks of a language, in order."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for name, text in blocks if name == language]


def test_the_example_prints_the_tables_of_the_readme():
    nnx_example, linen_example, accumulation = fenced("python")
    (shown,) = [block for block in fenced("") if block.startswith("parameters on")]
    names: dict[str, Any] = {}
    shown = re.sub(r"^jax [\d.]+", f"jax {jax.__version__}", shown, flags=re.MULTILINE)
    assert output_of(nnx_example, names) == shown
    assert re.fullmatch(r"loss \d\.\d{3}\n", output_of(linen_example, names))
    assert re.fullmatch(r"loss \d\.\d{3}\n", output_of(accumulation, names))


def output_of(example: str, names: dict[str, Any]) -> str:
    """What the code prints, in and into these names."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(example, "README.md", "exec"), names)
    return output.getvalue()
