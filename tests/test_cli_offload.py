"""`python -m jfsdp` on jobs whose state lies in host memory."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flax import nnx
from jobs import Write, eight, write

import jfsdp
from jfsdp.cli import job as job_file
from jfsdp.cli import main
from jfsdp.cli.config import ConfigError, read_config
from jfsdp.cli.job import build_job

__all__ = ["eight", "write"]

Change = tuple[str, str]

OFFLOADED: Change = ('units = ["blocks.*"]', 'units = ["blocks.*"]\noffload = "all"')


def offload(said: str) -> Change:
    return (OFFLOADED[0], f"{OFFLOADED[0]}\n{said}")


@pytest.mark.parametrize(
    ("said", "parameters", "state"),
    [
        ('offload = "none"', "", ""),
        ('offload = "all"', "pinned_host", "pinned_host"),
        ('offload = "parameters"', "pinned_host", ""),
        ('offload = "optimizer"', "", "pinned_host"),
    ],
)
def test_the_file_says_what_lies_in_host_memory(
    write: Write, said: str, parameters: str, state: str
) -> None:
    plan = jfsdp.plan(build_job(read_config(write(offload(said)))).model)
    assert {row.memory_kind for row in plan.rows} == {parameters}
    assert {row.state_memory_kind for row in plan.rows} == {state}


def test_activations_are_named_in_the_file(write: Write) -> None:
    config = read_config(write(offload('offload_activations = "hidden"')))
    policy = job_file._offload(config.shard)
    assert policy == jfsdp.CPUOffloadPolicy(
        parameters=False, optimizer_state=False, activations=("hidden",)
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            offload('offload = "some"'),
            "job.toml: [shard] offload = 'some' must be one of none, all, parameters, optimizer",
        ),
        (offload("offload = true"), "job.toml: [shard] offload = True must be text"),
        (
            ('optimizer = "adam"', 'optimizer = "adam"\nupdate_on = "cpu"'),
            "job.toml: [step] update_on = 'cpu' must be one of device, host",
        ),
        (
            offload("offload_activations = 3"),
            "job.toml: [shard] offload_activations = 3 must be a name or a list of names",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(write: Write, change: Change, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_config(write(change))
    assert str(error.value) == text


def test_the_update_is_where_the_file_says(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def init_optimizer(tx: Any, model: Any, **settings: Any) -> nnx.Optimizer:
        given.update(settings)
        return nnx.Optimizer(model, tx, wrt=settings["wrt"])

    monkeypatch.setattr(job_file.states, "init_optimizer", init_optimizer)
    build_job(read_config(write(('optimizer = "adam"', 'optimizer = "adam"\nupdate_on = "host"'))))
    assert given == {"wrt": nnx.Param, "update_on": "host"}


def test_plan_tells_the_memories_apart(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", write(OFFLOADED), "--memory", "1 KiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = {tuple(line.split()) for line in lines}
    # 2 x 16 elements over 4, of float32; gradients, and two moments each.
    assert ("blocks.0-1", "bias", "32", "B", "32", "B", "64", "B", "128", "B", "128", "B") in found
    assert lines[-2].startswith("8 B of 1.0 KiB per device before activations and gathered weights")
    assert lines[-1] == "3.1 KiB per device in host memory"


def test_plan_says_whether_what_is_left_fits(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    change = offload('offload = "parameters"')
    assert main(["plan", write(change), "--memory", "1 KiB"]) == 1
    (verdict,) = [line for line in capsys.readouterr().out.splitlines() if "does not fit" in line]
    assert verdict == (
        "does not fit: parameters and optimizer state take 1.6 KiB of 1.0 KiB per device"
    )


def test_plan_as_json_has_the_bytes_on_the_host(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", write(offload('offload = "optimizer"')), "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["bytes_on_host"] == 1600
    assert {(leaf["on_host"], leaf["state_on_host"]) for leaf in read["leaves"]} == {(False, True)}


def test_compile_has_a_verdict_for_each_memory(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", write(OFFLOADED), "--memory", "1 MiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("fits: ")
    assert lines[-1] == "host memory needs 2.3 KiB per device"
    assert any(line.startswith("host memory: ") and "to the device" in line for line in lines)


def test_a_job_that_does_not_fit_fits_with_its_state_on_the_host(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    wide: Change = ("width = 16", "width = 256")
    rows: Change = ("[16, 16]", "[16, 256]")
    verdicts = []
    for changes in ((wide, rows), (wide, rows, offload('offload = "optimizer"'))):
        main(["plan", write(*changes), "--memory", "500 KiB"])
        verdicts.append(capsys.readouterr().out.rpartition("\n\n")[2])
    assert "does not fit" in verdicts[0]
    assert "does not fit" not in verdicts[1]
