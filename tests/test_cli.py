"""`python -m jfsdp`: what it prints, its exit status, and what it says to a mistaken configuration."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

import pytest
from jobs import Write, write, written

import jfsdp
from jfsdp.cli import main
from jfsdp.cli.config import read_config
from jfsdp.cli.job import build_job
from jfsdp.cli.terminal import screen
from jfsdp.testing import topology_or_skip

__all__ = ["write"]

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One compilation: exit status, what was printed, the page."""
    folder = tmp_path_factory.mktemp("compiled")
    page, out = folder / "report.html", io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main(["compile", written(folder), "--html", str(page)])
    return {"status": status, "out": out.getvalue(), "page": page.read_text()}


# The command itself.


def test_without_a_command_it_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "usage: python -m jfsdp" in out
    assert all(command in out for command in ("plan", "compile"))


def test_help_of_a_command_describes_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"[{table}]" in out for table in ("model", "batch.tokens", "step", "mesh", "shard"))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jfsdp {jfsdp.__version__}\n"


@pytest.mark.parametrize("arguments", [["compil", "a"], ["plan"], ["plan", "a", "--jsn"]])
def test_a_mistake_on_the_command_line_is_2(arguments: list[str]) -> None:
    assert main(arguments) == 2


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "jfsdp", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"jfsdp {jfsdp.__version__}\n")


# plan


def test_plan_prints_the_plan_and_the_bytes_of_every_leaf(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write()
    assert main(["plan", config]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert str(jfsdp.plan(build_job(read_config(config)).model)) in out
    lines = {tuple(line.split()) for line in out.splitlines()}
    assert ("(root)", "head.kernel", "256", "B", "256", "B", "512", "B", "1.0", "KiB") in lines
    # 2 x 16 elements over 4, of float32; two moments each.
    assert ("blocks.0-1", "bias", "32", "B", "32", "B", "64", "B", "128", "B") in lines


def test_plan_as_json_has_every_leaf(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", write(), "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert (read["config"], read["parameters"], read["mesh"]) == (
        "job.toml",
        3 * 256 + 2 * 16,
        {"replica": 2, "fsdp": 4},
    )
    kept = read["bytes_per_device"]
    assert (kept["parameters"], kept["gradients"]) == (800, 800)
    assert kept["total"] == 1600 + kept["optimizer"]
    # Twice the parameters, and optax's and Flax's counts of steps.
    assert kept["optimizer"] == 1600 + 8
    (leaf,) = [leaf for leaf in read["leaves"] if leaf["path"] == "blocks.1.kernel"]
    assert leaf == {
        "path": "blocks.1.kernel",
        "unit": "blocks.1",
        "shape": [16, 16],
        "parameters": 256,
        "gradients": 256,
        "optimizer": 512,
        "gathered": 512,
        "on_host": False,
        "state_on_host": False,
    }


def test_gradients_count_in_the_dtype_in_which_they_are_reduced(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    change = ('reduce_dtype = "float32"', 'reduce_dtype = "bfloat16"')
    assert main(["plan", write(change), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_per_device"]["gradients"] == 400


def test_plan_of_state_that_does_not_fit_is_1(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", write(), "--memory", "2 KiB"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        "does not fit: parameters and optimizer state take 2.4 KiB of 2.0 KiB per device"
    )


def test_plan_does_not_say_that_the_step_fits(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", write(), "--memory", "1 MiB", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["fits"] is None
    assert read["verdict"].startswith("3.1 KiB of 1.0 MiB per device before activations")


# compile


def test_compile_of_a_job_that_is_what_it_states_is_0(compiled: dict[str, Any]) -> None:
    assert compiled["status"] == 0


def test_compile_prints_the_report_the_cost_and_the_verdict(compiled: dict[str, Any]) -> None:
    out = compiled["out"]
    assert out.startswith("job.toml: net, 800 parameters, on 8 x cpu, mesh replica=2 x fsdp=4\n")
    assert re.search(r"^reduce-scatter +fsdp +float32 +5 ", out, re.MULTILINE)
    assert re.search(
        r"^compiled in \d+\.\d s, with at most [\d.]+ \w+ of this machine", out, re.MULTILINE
    )
    assert re.search(r"^optimizer state +1\.6 KiB", out, re.MULTILINE)
    assert "no departure: the program is what the policies state (as it is written: " in out
    assert re.match(r"needs [\d.]+ KiB per device", out.splitlines()[-1])


def test_output_that_is_piped_is_plain(compiled: dict[str, Any]) -> None:
    assert "\x1b" not in compiled["out"]
    assert compiled["out"].isascii()


def test_the_page_has_the_figures_and_the_configuration(compiled: dict[str, Any]) -> None:
    page = compiled["page"]
    (verdict,) = re.findall(r'<div class="verdict good">(.*?)<span>', page)
    assert verdict == compiled["out"].splitlines()[-1]
    assert "reduce_dtype = &quot;float32&quot;" in page
    assert "compiled in" in page
    assert not re.search(r"https?:|url\(|@import|<script|<link", page)


@pytest.fixture(scope="module")
def too_large(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One compilation with less memory than it needs, as JSON."""
    out = io.StringIO()
    config = written(tmp_path_factory.mktemp("too_large"))
    with contextlib.redirect_stdout(out):
        status = main(["compile", config, "--json", "--memory", "1 KiB"])
    return {"status": status, "json": json.loads(out.getvalue())}


def test_compile_of_a_job_that_does_not_fit_is_1(too_large: dict[str, Any]) -> None:
    assert too_large["status"] == 1
    read = too_large["json"]
    assert read["fits"] is False
    assert re.fullmatch(r"does not fit: [\d.]+ of 1.0 KiB per device", read["verdict"])
    assert [each["rule"] for each in read["departures"]] == ["memory, per device"]


def test_compile_as_json_has_the_report(too_large: dict[str, Any]) -> None:
    read = too_large["json"]
    report = read["report"]
    assert read["mesh"] == report["mesh"] == {"replica": 2, "fsdp": 4}
    # Each of 800 float32 gradients, 3/4 of it from others.
    (scattered,) = [row for row in report["rows"] if row["kind"] == "reduce-scatter"]
    assert (scattered["count"], scattered["bytes_per_device"]) == (5, 800 * 4 * 3 / 4)
    assert report["memory"]["parameters"] == 800
    assert read["compile"]["seconds"] > 0
    assert read["compile"]["peak_host_bytes"] > 2**20


def test_compile_of_a_job_that_departs_from_its_policies_is_1(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", write(("mean_square", "with_a_constant"))]) == 1
    out = capsys.readouterr().out
    assert "departure 1: the step: arrays are arguments of the step: expected none" in out
    assert "no departure" not in out


# A terminal.


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal for stdout; not as a fixture, since pytest captures set-up and test apart."""
    pytest.importorskip("rich")
    made = Terminal()
    monkeypatch.setattr(sys, "stdout", made)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return made


def test_in_a_terminal_there_are_colors(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    assert main(["plan", write(), "--memory", "1 MiB"]) == 0
    out = terminal.getvalue()
    assert "\x1b[" in out
    plain = re.sub(r"\x1b\[[\d;?]*\w", "", out)
    assert re.search(r"blocks\.0-1 +kernel +512 B +512 B +1\.0 KiB +2\.0 KiB", plain)


def test_in_a_terminal_without_rich_it_is_plain(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = a_terminal(monkeypatch)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "rich" else find(name, *rest),
    )
    assert main(["plan", write()]) == 0
    assert "\x1b" not in terminal.getvalue()


def test_json_is_json_in_a_terminal_too(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    assert main(["plan", write(), "--json"]) == 0
    assert json.loads(terminal.getvalue())["parameters"] == 800


def test_while_it_compiles_a_terminal_has_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    with screen().working("compiling [something]"):
        pass
    assert "compiling [something]" in terminal.getvalue()
    assert "0:00:0" in terminal.getvalue()


# A machine that is not here.


@pytest.mark.slow
def test_a_small_gpt2_compiles_for_a_host_of_h100(tmp_path: pathlib.Path) -> None:
    topology_or_skip("h100:8")
    for file in (ROOT / "examples" / "models").glob("*.py"):
        shutil.copy(file, tmp_path)
    (tmp_path / "small.py").write_text(
        "from gpt2 import GPT2, GPT2Config, next_token_loss\n"
        "def small(*, rngs):\n"
        "    config = GPT2Config(vocabulary=512, width=256, layers=2, heads=4, context=128)\n"
        "    return GPT2(config, rngs=rngs)\n"
    )
    text = (ROOT / "configs" / "gpt2-124m-h100.toml").read_text()
    text = re.sub(r"^tokens = .*\n", "", text, flags=re.MULTILINE)
    for old, new in (
        ("../examples/models/gpt2.py", "small.py"),
        ("gpt2_124m", "small"),
        ("[64, 1025]", "[64, 129]"),
        ("[step]", "[step]\ntokens = 8192"),
    ):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "job.toml").write_text(text)
    environment = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-m", "jfsdp", "compile", "job.toml", "--html", "report.html"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compiled for 8 x NVIDIA H100" in done.stdout
    assert re.search(r"^reduce-scatter +fsdp +float32 .* 1\.000$", done.stdout, re.MULTILINE)
    assert re.search(
        r"^roofline: 1024 tokens per chip, compute-bound from \d+ on axis fsdp \(NVLink 450 "
        r"GB/s\): bound by communication$",
        done.stdout,
        re.MULTILINE,
    )
    assert re.match(r"fits: [\d.]+ .* of 63\.3 GiB per device", done.stdout.splitlines()[-1])
    assert "fits: " in (tmp_path / "report.html").read_text()
