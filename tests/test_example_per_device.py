"""The examples of the per-device view: pmap before and after jfsdp, and a shard_map."""

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the `examples` extra is not installed")

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = ("pmap_before", "pmap_after", "shard_map_step")
STEPS = 20


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    """The scripts as modules, with fewer steps."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        modules = {name: importlib.import_module(name) for name in SCRIPTS}
        for module in modules.values():
            module.STEPS = STEPS
        yield SimpleNamespace(**modules)
    finally:
        sys.path.remove(str(EXAMPLES))
        for name in (*SCRIPTS, "digits", "digits.data"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def before(scripts: SimpleNamespace) -> list[float]:
    """The losses of the unsharded pmap."""
    return scripts.pmap_before.main()


def test_unsharded_pmap_learns(before):
    assert len(before) == STEPS
    assert before[-1] < before[0] / 2


@pytest.mark.parametrize("name", ["pmap_after", "shard_map_step"])
def test_sharded_script_has_the_losses_of_the_unsharded_pmap(scripts, before, capsys, name):
    losses = getattr(scripts, name).main()
    np.testing.assert_allclose(losses, before, rtol=0, atol=1e-5)
    assert "294 KiB on each of 8 devices, 1/8.0 of 2,352 KiB" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_runs_by_itself(name):
    # A fresh environment: the script splits the CPU itself.
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(EXAMPLES.parent), "JAX_PLATFORMS": "cpu"}
    script = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "on each of 8 devices" in done.stdout
