"""The example in examples/: its configuration errors, its data, and a short run of the script."""

import csv
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

for needed in ("grain", "matplotlib", "rich"):
    pytest.importorskip(needed, reason="the `examples` extra is not installed")

ROOT = Path(__file__).parents[1]
TINY = ROOT / "configs" / "tiny.toml"


@pytest.fixture(scope="module")
def train_lm() -> Iterator[Any]:
    """The script as a module; its imports `config`, `text` and `gpt` lie next to it."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import train_lm

        yield train_lm
    finally:
        sys.path.remove(str(ROOT / "examples"))
        for name in ("train_lm", "config", "text", "gpt"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def text(train_lm: Any) -> Any:
    return train_lm.text


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder of 45 files, each with its own number in it, some of them in folders."""
    for i in range(45):
        file = tmp_path / f"part{i % 3}" / f"{i:02}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"# {i:02} " * 20)
    (tmp_path / "notes.txt").write_text("not python")
    return tmp_path


def error_lines(train_lm: Any, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert train_lm.main(list(arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err.splitlines()


CONFIG_ERRORS = {
    "unknown key": (
        "train.step=3",
        "unknown [train] key step (did you mean steps?); known: steps, batch_size,",
    ),
    "unknown key like no other": ("mesh.zzz=3", "unknown [mesh] key zzz; known: replica, fsdp"),
    "unknown section": (
        "modle.width=3",
        "unknown section modle (did you mean model?); known: model, data, mesh, policy, train",
    ),
    "no number": ("train.steps=many", "[train] steps = 'many' must be an integer"),
    "boolean": ("train.steps=true", "[train] steps = True must be an integer"),
    "fraction": ("train.steps=1.5", "[train] steps = 1.5 must be an integer"),
    "no string": ("train.output=3", "[train] output = 3 must be a string"),
    "zero": ("model.layers=0", "[model] layers = 0 must be above 0"),
    "negative": ("train.seed=-1", "[train] seed = -1 must be at least 0"),
    "no fraction": ("model.dropout=1.0", "[model] dropout = 1.0 must be below 1"),
    "dtype": (
        "policy.param_dtype=bf16",
        "[policy] param_dtype = 'bf16' must be one of float32, bfloat16",
    ),
    "offload": (
        "policy.offload=host",
        "[policy] offload = 'host' must be one of none, optimizer, all",
    ),
    "heads": ("model.heads=3", "[model] width = 256 does not divide over 3 heads; use 255 or 258"),
    "batch": (
        "train.batch_size=30",
        "[train] batch_size = 30 does not divide over 8 data-parallel devices; use 24 or 32",
    ),
    "small batch": (
        "train.batch_size=3",
        "[train] batch_size = 3 does not divide over 8 data-parallel devices; use 8",
    ),
    "microbatches": (
        "train.microbatches=3",
        "[train] batch_size = 8 does not divide over 24 data-parallel devices x microbatches; use 24",
    ),
    "empty prompt": ('train.prompt=""', "[train] prompt must have 1 to 128 bytes"),
    "no override": ("steps=3", "cannot read 'steps=3'; write section.key=value"),
    "no data": ("data.path=/no/where", "[data] path: no such file or folder: /no/where"),
}


@pytest.mark.parametrize(("override", "message"), CONFIG_ERRORS.values(), ids=CONFIG_ERRORS)
def test_config_error_is_one_line(train_lm, capsys, override, message):
    (line,) = error_lines(train_lm, capsys, str(TINY), override)
    assert line.startswith(f"error: {TINY}: {message}")


def test_missing_config_is_one_line(train_lm, capsys, tmp_path):
    (line,) = error_lines(train_lm, capsys, str(tmp_path / "none.toml"))
    assert line.startswith(f"error: {tmp_path / 'none.toml'}: cannot be read: ")
    assert "No such file" in line


def test_broken_toml_is_one_line(train_lm, capsys, tmp_path):
    file = tmp_path / "broken.toml"
    file.write_text("[model]\nwidth = \n")
    (line,) = error_lines(train_lm, capsys, str(file))
    assert "cannot be read: Invalid value (at line 2" in line


def test_missing_key_is_named(train_lm, tmp_path):
    file = tmp_path / "short.toml"
    file.write_text("[model]\nwidth = 8\n")
    with pytest.raises(train_lm.ConfigError, match=r"\[model\] lacks layers, an integer"):
        train_lm.read_config(str(file))


def test_key_outside_sections_is_named(train_lm, tmp_path):
    file = tmp_path / "flat.toml"
    file.write_text("train = 3\n")
    with pytest.raises(train_lm.ConfigError, match=r"train = 3 is in no \[section\]"):
        train_lm.read_config(str(file), ["train.steps=3"])


def test_mesh_that_is_not_the_devices_is_an_error(train_lm):
    with pytest.raises(train_lm.ConfigError, match=r"replica = 3 x fsdp = 5 needs 15 devices"):
        train_lm.make_mesh(train_lm.MeshConfig(replica=3, fsdp=5))


def test_overrides_take_both_spellings(train_lm):
    config = train_lm.read_config(str(TINY), ["train.steps=20", "--train.prompt=class A"])
    assert (config.train.steps, config.train.prompt) == (20, "class A")


def test_offload_is_the_policys(train_lm):
    assert {name: type(policy).__name__ for name, policy in train_lm.OFFLOAD.items()} == {
        "none": "OffloadPolicy",
        "optimizer": "CPUOffloadPolicy",
        "all": "CPUOffloadPolicy",
    }
    config = train_lm.read_config(
        str(TINY), ["model.width=16", "model.heads=1", "policy.offload=all"]
    )
    model = train_lm.build_model(config, train_lm.make_mesh(config.mesh))
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))}
    assert kinds == {"pinned_host"}


def test_integer_is_taken_for_a_number(train_lm):
    rate = train_lm.read_config(str(TINY), ["train.learning_rate=1"]).train.learning_rate
    assert isinstance(rate, float)


def test_split_is_by_file_and_disjoint(text, files):
    found = text.find_files(text.DataConfig(str(files)))
    train, validation = text.split(found)
    assert len(found) == 45
    assert len(validation) == 3
    assert set(train) | set(validation) == set(found)
    assert not set(train) & set(validation)


def test_split_is_the_same_each_time(text, files):
    first, second = (text.load(text.DataConfig(str(files))) for _ in range(2))
    np.testing.assert_array_equal(first.train, second.train)
    np.testing.assert_array_equal(first.validation, second.validation)


def test_no_validation_file_is_in_the_training_text(text, files):
    loaded = text.load(text.DataConfig(str(files)))
    numbers = [
        set(re.findall(rb"# (\d\d)", part.tobytes())) for part in (loaded.train, loaded.validation)
    ]
    assert not numbers[0] & numbers[1]


def test_single_file_gives_up_its_end(text, tmp_path):
    file = tmp_path / "one.txt"
    file.write_bytes(bytes(range(200)))
    loaded = text.load(text.DataConfig(str(file)))
    assert loaded.train.tobytes() + loaded.validation.tobytes() == bytes(range(200))
    assert loaded.validation.size == 10


def test_folder_without_matching_files_is_an_error(text, files):
    with pytest.raises(FileNotFoundError, match=r"no \*\.rs file below"):
        text.load(text.DataConfig(str(files), "*.rs"))


def test_standard_library_is_the_default_text(text):
    found = text.find_files(text.DataConfig())
    names = {file.name for file in found}
    assert {"argparse.py", "dataclasses.py"} <= names
    assert not any("site-packages" in file.parts for file in found)


def test_windows_overlap_by_the_byte_to_predict(text):
    windows = text.Windows(np.arange(21, dtype=np.uint8), context=5)
    assert [list(windows[i][[0, -1]]) for i in range(len(windows))] == [
        [0, 5],
        [5, 10],
        [10, 15],
        [15, 20],
    ]


def test_epoch_has_each_window_once(text):
    batches = text.batches(np.arange(129, dtype=np.uint8), context=8, batch_size=4, seed=0)
    starts = np.concatenate([next(batches)[:, 0] for _ in range(4)])
    assert sorted(starts) == list(range(0, 128, 8))


def test_order_is_the_seed_s(text):
    data = np.arange(201, dtype=np.uint8)
    one, again, other = (next(text.batches(data, 4, 8, seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)


def test_restored_iterator_goes_on_where_it_was(text):
    data = np.arange(201, dtype=np.uint8)
    first = text.batches(data, 4, 8, seed=0)
    next(first)
    state, expected = first.get_state(), next(first)
    second = text.batches(data, 4, 8, seed=0)
    second.set_state(state)
    np.testing.assert_array_equal(next(second), expected)


def test_text_shorter_than_a_batch_is_an_error(text):
    with pytest.raises(ValueError, match="20 bytes are too few for 8 windows of 4"):
        text.batches(np.arange(20, dtype=np.uint8), 4, 8, seed=0)


@pytest.mark.slow
def test_script_trains_and_writes_its_files(tmp_path):
    overrides = {
        "model.width": 64,
        "model.layers": 2,
        "model.context": 64,
        "model.dropout": 0.1,
        "train.steps": 60,
        "train.batch_size": 16,
        "train.microbatches": 2,
        "train.validate_every": 30,
        "train.validation_batches": 2,
        "train.sample_bytes": 8,
        "train.output": tmp_path / "run",
    }
    arguments = [f"{key}={value}" for key, value in overrides.items()]
    # A fresh environment: the script splits the CPU itself.
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    script = [sys.executable, str(ROOT / "examples" / "train_lm.py"), str(TINY), *arguments]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr

    with (tmp_path / "run" / "loss.csv").open() as file:
        rows = list(csv.reader(file))[1:]
    training = [float(row[1]) for row in rows]
    validation = [float(row[2]) for row in rows if row[2]]
    assert len(training) == 60
    assert np.mean(training[-10:]) < training[0] - 1.0
    assert validation[1] < validation[0]
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    for shown in ("8 x cpu, simulated", "replica 2, fsdp 4", "reduce-scatter", "nats/byte", "def "):
        assert shown in done.stdout
