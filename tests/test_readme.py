"""The README's example runs, and prints what the README says it prints."""

from __future__ import annotations

import contextlib
import io
import pathlib
import re

import jax

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()


def fenced(language: str) -> list[str]:
    """The code blocks of a language, in order."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for name, text in blocks if name == language]


def test_the_example_prints_the_tables_of_the_readme():
    (example,) = fenced("python")
    (shown,) = [block for block in fenced("") if block.startswith("parameters on")]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(example, "README.md", "exec"), {})
    shown = re.sub(r"^jax [\d.]+", f"jax {jax.__version__}", shown, flags=re.MULTILINE)
    assert output.getvalue() == shown
