"""The Linen example in examples/: its data, its first steps against the unsharded ones, full runs."""

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

for needed in ("sklearn", "rich"):
    pytest.importorskip(needed, reason="the `examples` extra is not installed")

ROOT = Path(__file__).parents[1]
MODELS = ("resnet", "vit")
SCRIPT = ("train_digits", "digits", "digits.data", "digits.resnet", "digits.vit")


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """The script as a module; its package `digits` lies next to it."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import train_digits

        yield train_digits
    finally:
        sys.path.remove(str(ROOT / "examples"))
        for name in SCRIPT:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module", params=MODELS)
def runs(example: Any, request: pytest.FixtureRequest) -> dict[str, Any]:
    """State and losses after the first steps, sharded and not, of small models.

    Without dropout: sharded it has other masks.
    """
    models = {
        "resnet": (example.ResNet(stages=(8, 16)), example.ResidualBlock),
        "vit": (example.ViT(width=32, layers=1, dropout=0.0), example.EncoderBlock),
    }
    with pytest.MonkeyPatch.context() as patch, quickly_compiled():
        patch.setattr(example, "MODELS", models)
        patch.setattr(example, "LEARNING_RATE", 2e-2)  # small models take larger steps
        sharded, unsharded = (
            first_steps(example, request.param, sharded=sharded) for sharded in (True, False)
        )
    return {"sharded": sharded, "unsharded": unsharded}


@contextlib.contextmanager
def quickly_compiled() -> Iterator[None]:
    """Compiling takes most of the time of these tests."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def first_steps(example: Any, name: str, *, sharded: bool) -> tuple[Any, np.ndarray]:
    _, state, batches, _ = example.prepare(name, sharded=sharded, steps=20, seed=0)
    losses = []
    for batch in itertools.islice(batches, 20):
        state, loss = example.train_step(state, *batch)
        losses.append(float(loss))
    return state, np.array(losses)


def test_training_and_test_images_are_all_digits_once(example):
    (images, labels), (test_images, test_labels) = example.data.load()
    assert (images.shape, test_images.shape) == ((1437, 8, 8, 1), (360, 8, 8, 1))
    found = np.concatenate([images, test_images])
    expected = example.data.load_digits().data.reshape(-1, 8, 8, 1) / 16
    assert sorted(map(bytes, found)) == sorted(map(bytes, expected.astype(np.float32)))
    assert set(labels) == set(test_labels) == set(range(10))


def test_epoch_has_each_image_at_most_once(example):
    rows = np.arange(103)
    batches = example.data.batches((rows, rows), 10, seed=0)
    seen = np.concatenate([next(batches)[0] for _ in range(10)])
    assert len(set(seen)) == 100


def test_first_losses_are_those_of_the_unsharded_training(runs):
    (_, losses), (_, expected) = runs["sharded"], runs["unsharded"]
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)
    assert losses[-1] < losses[0] - 0.2


def test_running_averages_of_batch_norm_are_those_of_the_unsharded_training(runs):
    (state, _), (whole, _) = runs["sharded"], runs["unsharded"]
    found, expected = jax.tree.leaves(state.batch_stats), jax.tree.leaves(whole.batch_stats)
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_trained_state_is_an_eighth_on_each_device(runs):
    state, _ = runs["sharded"]
    arrays = jax.tree.leaves((state.params, state.opt_state))
    part = sum(array.addressable_shards[0].data.nbytes for array in arrays)
    assert part / sum(array.nbytes for array in arrays) == pytest.approx(1 / 8, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_sharded_model_is_as_accurate_as_the_unsharded_one(example, name):
    accuracies = {
        flags: [example.main([name, *flags, f"--seed={seed}"]) for seed in (0, 1)]
        for flags in ((), ("--unsharded",))
    }
    assert min(itertools.chain(*accuracies.values())) > 0.95
    sharded, whole = (np.mean(found) for found in accuracies.values())
    assert abs(sharded - whole) < 0.015


@pytest.mark.slow
def test_script_splits_the_cpu_and_prints_what_it_does():
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    script = [sys.executable, str(ROOT / "examples" / "train_digits.py"), "resnet", "--steps=10"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for shown in ("8 x cpu, simulated", "parameters on fsdp=8", "all-gather", "ResNet: "):
        assert shown in done.stdout
