"""A small job for the command line: its source, its file, and fixtures to write them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import pytest

from jfsdp.cli import job

SOURCE = """
import jax.numpy as jnp
import numpy as np
from flax import nnx

LARGE = np.arange(300_000, dtype=np.float32)


class Net(nnx.Module):
    def __init__(self, width, rngs):
        self.blocks = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(width, width, use_bias=False, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.head(x)


class Stacked(nnx.Module):
    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs), in_axes=0, out_axes=0)
        self.layers = nnx.split_rngs(splits=16)(make)(rngs)

    def __call__(self, x):
        return nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(
            self.layers, x
        )


def net(*, rngs, width=16):
    return Net(width, rngs)


def stacked(*, rngs):
    return Stacked(rngs)


def broken(*, rngs):
    raise RuntimeError("the model's own mistake")


def no_model(*, rngs):
    return 3


def mean_square(model, x):
    return jnp.mean(model(x) ** 2)


def with_a_constant(model, x):
    return mean_square(model, x) + jnp.sum(jnp.asarray(LARGE)[:1])
"""

CONFIG = """
[model]
source = "net.py"
build = "net"
arguments = { width = 16 }

[batch.x]
shape = [16, 16]
dtype = "float32"

[step]
loss = "mean_square"
optimizer = "adam"
arguments = { learning_rate = 1e-3 }

[mesh]
replica = 2
fsdp = 4

[shard]
shard = "fsdp"
replicate = "replica"
units = ["blocks.*"]
param_dtype = "bfloat16"
reduce_dtype = "float32"
"""

Write = Callable[..., str]


def written(folder: pathlib.Path, *changes: tuple[str, str]) -> str:
    """The configuration, with each text of `changes` replaced, beside its source."""
    text = CONFIG
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "net.py").write_text(SOURCE)
    config = folder / "job.toml"
    config.write_text(text)
    return str(config)


@pytest.fixture
def write(tmp_path: pathlib.Path) -> Write:
    return lambda *changes: written(tmp_path, *changes)


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every machine is the first devices that are here, as many as its name says."""

    def topology(name: str) -> list[Any]:
        return jax.devices()[: int(name.partition(":")[2])]

    monkeypatch.setattr(job, "topology", topology)
