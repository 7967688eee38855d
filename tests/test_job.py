"""A job's file: what is built of it, and what is said to a mistake in it."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from typing import Any

import jax
import numpy as np
import pytest
from jobs import SOURCE, Write, eight, write

import jfsdp
import jfsdp.testing
from jfsdp.cli import main
from jfsdp.cli.config import read_config
from jfsdp.cli.job import build_job

__all__ = ["eight", "write"]

# Mistakes: one line that names file, table, key and what may be there; status 2.

MISTAKES = [
    (
        ("[model]\n", "[modle]\n"),
        "unknown table or key modle (did you mean model?); known: target, model",
    ),
    (('build = "net"\n', ""), "[model] lacks build, text"),
    (
        ('build = "net"', 'biuld = "net"'),
        "[model]: unknown key biuld (did you mean build?); known: source",
    ),
    (('build = "net"', "build = 3"), "[model] build = 3 must be text"),
    (
        ('build = "net"', 'build = "nett"'),
        "[model] build: net.py has no function nett (did you mean net?)",
    ),
    (
        ('build = "net"', 'build = "no_model"\n#'),
        "[model] arguments: no_model(): got an unexpected keyword",
    ),
    (
        ("{ width = 16 }", "{ widht = 16 }"),
        "[model] arguments: net(): got an unexpected keyword argument ",
    ),
    (("{ width = 16 }", "{ widht = 16 }"), "(did you mean width?); known: rngs, width"),
    (('"net.py"', '"missing.py"'), "[model] source: there is no file missing.py beside job.toml"),
    (
        ('"net.py"', '"no_such_module"'),
        "[model] source: no_such_module: No module named 'no_such_module'",
    ),
    (("[batch.x]", "[batch.y]"), "[batch]: mean_square(): missing a required argument: 'x'"),
    (
        ("shape = [16, 16]", "shape = [16, -1]"),
        "[batch.x] shape = [16, -1] must be a list of whole numbers",
    ),
    (
        ("shape = [16, 16]", "shape = [12, 16]"),
        "[batch.x] shape: 12 does not divide over 8 data-parallel ",
    ),
    (("shape = [16, 16]", "shape = [12, 16]"), "devices (replica=2 x fsdp=4); use 8 or 16"),
    (
        ('"float32"\n\n[step]', '"float3"\n\n[step]'),
        "[batch.x] dtype = 'float3' must be one of float32, bfl",
    ),
    (('dtype = "float32"\n\n', "\n"), "[batch.x] lacks dtype"),
    (
        ('loss = "mean_square"', 'loss = "mean_squares"'),
        "[step] loss: net.py has no function mean_squares (d",
    ),
    (('"adam"', '"adamww"'), "[step] optimizer: optax has no adamww (did you mean adamw?)"),
    (
        ('"adam"', '"apply_updates"'),
        "[step] arguments: apply_updates(): missing a required argument",
    ),
    (
        ('"adam"', '"constant_schedule"'),
        "[step] arguments: constant_schedule(): missing a required argument",
    ),
    (
        ("learning_rate = 1e-3", "learning_rat = 1"),
        "[step] arguments: adam(): missing a required argument: ",
    ),
    (("[step]", "[step]\ntokens = 0"), "[step] tokens = 0 must be a whole number above 0"),
    (("fsdp = 4", "fsdp = 4.0"), "[mesh] fsdp = 4.0 must be a whole number above 0"),
    (
        ("fsdp = 4", "fsdp = 8"),
        "[mesh]: replica=2 x fsdp=8 is 16 devices, but 8 are here. Name a machine of",
    ),
    (
        ('shard = "fsdp"', 'shard = "fdsp"'),
        "[shard] shard: [mesh] has no axis fdsp (did you mean fsdp?)",
    ),
    (
        ('replicate = "replica"', 'replicate = "fsdp"'),
        "[shard] fsdp is in both shard and replicate",
    ),
    (('"blocks.*"', '"block.*"'), "[shard]: units='block.*' matches no module inside Net."),
    (
        ("units =", 'stacked = ["layers"]\nunits ='),
        "[shard] stacked: the model has no module layers; known: ",
    ),
    (
        ('"bfloat16"', '"bf16"'),
        "[shard] param_dtype = 'bf16' must be one of float32, bfloat16, float16",
    ),
    (
        ("units =", "reshard_after_forward = 1.5\nunits ="),
        "reshard_after_forward = 1.5 must be true, false, a whole number, or the names of shard axes",
    ),
    (
        ("units =", 'reshard_after_forward = "no"\nunits ='),
        "[shard]: reshard_after_forward=('no',): 'no' is no axis of the mesh",
    ),
    (
        ('"adam"', '"adam"\nmicrobatches = 3'),
        "16 does not divide over 8 data-parallel devices (replica=2 x fsdp=4) x 3 microbatches; use 24",
    ),
    (
        ("[model]", 'target = "v9:8"\n[model]'),
        "target: topology('v9:8'): there is no such target. There are",
    ),
    (("[model]", "target = 8\n[model]"), "target = 8 must be a machine's name"),
    (("[model]", "[model"), "not TOML: "),
]


@pytest.mark.parametrize(("change", "text"), MISTAKES, ids=[text[:40] for _, text in MISTAKES])
def test_a_mistake_in_the_file_is_one_line_and_2(
    change: tuple[str, str], text: str, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", write(change)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jfsdp: job.toml: ")
    assert err.count("\n") == 1
    assert text in err


def test_a_table_that_is_missing_is_named(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.toml").write_text('[model]\nsource = "a.py"\nbuild = "a"\n')
    assert main(["plan", str(tmp_path / "job.toml")]) == 2
    assert capsys.readouterr().err == "jfsdp: job.toml: [batch] is missing\n"


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "no/such.toml"]) == 2
    assert capsys.readouterr().err == "jfsdp: no/such.toml: No such file or directory\n"


def test_a_build_that_makes_no_model_is_named(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    change = ('build = "net"\narguments = { width = 16 }', 'build = "no_model"')
    assert main(["plan", write(change)]) == 2
    assert "[model] build: no_model() made no flax.nnx.Module" in capsys.readouterr().err


def test_an_error_in_the_model_is_shown_whole_and_2(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    change = ('build = "net"\narguments = { width = 16 }', 'build = "broken"')
    assert main(["plan", write(change)]) == 2
    err = capsys.readouterr().err
    assert "RuntimeError: the model's own mistake" in err
    assert "in broken" in err
    assert err.endswith("job.toml: the job could not be built; see above\n")


def test_an_amount_of_memory_that_is_none_is_a_mistake(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", write(), "--memory", "much"]) == 2
    assert capsys.readouterr().err.startswith("jfsdp: --memory: 'much' is no amount of memory")


def test_a_folder_for_the_page_that_is_not_there_is_a_mistake(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", write(), "--html", "no/such/folder/a.html"]) == 2
    assert "there is no folder no/such/folder" in capsys.readouterr().err


# Machines.


def test_one_axis_is_scaled_to_another_machine(
    write: Write, eight: None, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(("replica = 2\nfsdp = 4", "fsdp = 4"), ('replicate = "replica"\n', ""))
    assert main(["plan", config, "--target", "some:8", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "jfsdp: some:8 has 8 devices: fsdp=8 in place of fsdp=4\n"
    assert json.loads(out)["mesh"] == {"fsdp": 8}


def test_two_axes_are_not(write: Write, eight: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", write(), "--target", "some:4"]) == 2
    assert capsys.readouterr().err == (
        "jfsdp: job.toml: [mesh]: replica=2 x fsdp=4 is 8 devices, but some:4 has 4; which axis to scale "
        "is not clear: change [mesh]\n"
    )


def test_the_file_s_own_machine_has_to_have_the_mesh_s_devices(
    write: Write, eight: None, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(
        ("[model]", 'target = "some:8"\n[model]'),
        ("replica = 2\nfsdp = 4", "fsdp = 4"),
        ('replicate = "replica"\n', ""),
    )
    assert main(["plan", config]) == 2
    assert capsys.readouterr().err == (
        "jfsdp: job.toml: [mesh]: fsdp=4 is 4 devices, but some:8 has 8\n"
    )


def over_two_slices(write: Write, axes: str, *changes: tuple[str, str]) -> Any:
    """The slice of each device of a job's mesh on two slices of v5e:2x2."""
    jfsdp.testing.topology_or_skip("2xv5e:2x2")
    target = ("[model]", 'target = "2xv5e:2x2"\n[model]')
    config = read_config(write(target, ("replica = 2\nfsdp = 4", axes), *changes))
    return np.vectorize(lambda device: device.slice_index)(build_job(config).mesh.devices).tolist()


def test_the_axis_of_their_number_goes_over_tpu_slices(write: Write) -> None:
    assert over_two_slices(write, "replica = 2\nfsdp = 4") == [[0] * 4, [1] * 4]
    assert over_two_slices(write, "fsdp = 4\nreplica = 2") == [[0, 1]] * 4


def test_one_axis_may_go_over_the_chips_and_the_slices(write: Write) -> None:
    no_replicas = ('replicate = "replica"\n', "")
    assert over_two_slices(write, "fsdp = 8", no_replicas) == [0] * 4 + [1] * 4


def test_a_mesh_without_an_axis_for_tpu_slices_is_a_mistake(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    jfsdp.testing.topology_or_skip("16xv5e:1x1")
    axes = ("replica = 2\nfsdp = 4", "replica = 4\nfsdp = 4")
    config = write(("[model]", 'target = "16xv5e:1x1"\n[model]'), axes)
    assert main(["plan", config]) == 2
    assert capsys.readouterr().err == (
        "jfsdp: job.toml: [mesh]: no axis can be split over 16 slices: 16 divides none\n"
    )


def test_a_batch_that_does_not_divide_over_the_other_machine_is_a_mistake(
    write: Write, eight: None, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(("replica = 2\nfsdp = 4", "fsdp = 4"), ('replicate = "replica"\n', ""))
    assert main(["plan", config, "--target", "some:5"]) == 2
    assert "16 does not divide over 5 data-parallel devices (fsdp=5)" in capsys.readouterr().err


def test_accelerators_that_are_here_are_left_alone_where_a_machine_is_named(
    write: Write, eight: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAX_PLATFORMS")
    assert main(["plan", write()]) == 0
    assert "JAX_PLATFORMS" not in os.environ
    assert main(["plan", write(), "--target", "some:8"]) == 0
    assert os.environ["JAX_PLATFORMS"] == "cpu"


# The job.


def test_no_array_is_made(write: Write) -> None:
    config = read_config(write())
    before = len(jax.live_arrays())
    built = build_job(config)
    assert len(jax.live_arrays()) == before
    leaves = [*jax.tree.leaves(built.optimizer), *built.batch.values()]
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


def test_the_batch_is_split_over_all_data_parallel_axes(write: Write) -> None:
    (array,) = build_job(read_config(write())).batch.values()
    assert array.sharding.shard_shape(array.shape) == (2, 16)


def test_the_folder_of_the_source_comes_first_while_it_is_loaded_and_only_then(
    tmp_path: pathlib.Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write(("net.py", "other.py"), ("arguments = { width = 16 }", ""))
    (tmp_path / "colorsys.py").write_text("WIDTH = 24\n")  # Python has one of this name
    (tmp_path / "other.py").write_text(
        f"from colorsys import WIDTH\n{SOURCE}".replace("width=16", "width=WIDTH")
    )
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    before = list(sys.path)
    try:
        assert build_job(read_config(config)).model.head.kernel.shape == (24, 24)
    finally:
        sys.modules.pop("colorsys", None)
    assert sys.path == before


def test_the_source_may_be_a_module(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write(("net.py", "net"))
    monkeypatch.syspath_prepend(str(pathlib.Path(config).parent))
    assert build_job(read_config(config)).model.head.kernel.shape == (16, 16)
    del sys.modules["net"]


def test_a_stack_of_layers_is_not_sharded_over_its_layers(write: Write) -> None:
    config = write(
        ('build = "net"\narguments = { width = 16 }', 'build = "stacked"'),
        ("shape = [16, 16]", "shape = [16, 8]"),
        ('units = ["blocks.*"]', 'stacked = ["layers"]'),
    )
    rows = {row.path: row for row in jfsdp.plan(build_job(read_config(config)).model).rows}
    assert rows["layers.kernel"].unit == "layers"
    assert rows["layers.kernel"].shape == (16, 8, 8)
    assert rows["layers.kernel"].spec[0] is None


def test_microbatches_are_those_of_the_step(write: Write) -> None:
    """Of 2 microbatches every gradient is scattered twice, and all-reduced over the replicas once."""
    once = build_job(read_config(write())).inspect(compile=False)
    twice = build_job(read_config(write(('"adam"', '"adam"\nmicrobatches = 2'))))
    report = twice.inspect(compile=False)
    report.check()
    for kind, times in (("reduce-scatter", 2), ("all-gather", 2)):
        assert report.count(kind) == times * once.count(kind) > 0
    assert report.count("all-reduce", "replica") == once.count("all-reduce", "replica")


@pytest.mark.parametrize("said", ['"inner"', '["inner"]', "2"])
def test_weights_stay_on_the_axes_that_the_file_says(write: Write, said: str) -> None:
    changes = (
        ("replica = 2\nfsdp = 4", "outer = 4\ninner = 2"),
        ('shard = "fsdp"', f'shard = ["outer", "inner"]\nreshard_after_forward = {said}'),
        ('replicate = "replica"\n', ""),
    )
    job = build_job(read_config(write(*changes)))
    report = job.inspect(compile=False)
    report.check()
    backward = [c for c in report.collectives if c.kind == "all-gather" and c.phase == "backward"]
    assert backward and {c.axes for c in backward} == {("inner",)}
