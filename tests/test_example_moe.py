"""The mixture of experts in examples/: equal to the unsharded model, and what travels over which axis."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, assert_spec, leaves, local_shape, make_mesh

import jfsdp

EXAMPLES = Path(__file__).parents[1] / "examples"
FILES = ("moe", "mixture", "gpt")


@pytest.fixture(scope="module")
def files() -> Iterator[SimpleNamespace]:
    """The script and its model as modules."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in FILES})
    finally:
        sys.path.remove(str(EXAMPLES))
        for name in FILES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def config(files: Any) -> Any:
    """Small, with a place for every token in every expert: then no token is left out anywhere."""
    sizes = {"width": 16, "layers": 1, "heads": 2, "context": 8, "vocabulary": 32}
    return files.mixture.MoEConfig(**sizes, hidden=32, experts=8, top_k=2, capacity=4.0)


TOKENS = np.random.default_rng(0).integers(0, 32, (16, 9), np.int32)


@pytest.fixture(scope="module")
def expected(files: Any, config: Any) -> Any:
    """The loss and the gradients of the unsharded model."""
    model = files.mixture.MoETransformer(config, rngs=nnx.Rngs(0))
    return nnx.jit(nnx.value_and_grad(files.moe.loss_fn, has_aux=True))(model, TOKENS)


MESHES = {"4x2": {"fsdp": 4, "expert": 2}, "2x4": {"fsdp": 2, "expert": 4}}


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_loss_and_every_gradient_are_those_of_the_unsharded_model(files, config, expected, sizes):
    model = files.moe.sharded(config, make_mesh(**sizes))
    got = nnx.jit(nnx.value_and_grad(files.moe.loss_fn, has_aux=True))(model, TOKENS)
    np.testing.assert_allclose(got[0][0], expected[0][0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(got[0][1], expected[0][1], rtol=0, atol=1e-5)
    assert_close(got[1], expected[1], rtol=1e-5, atol=1e-5)


def test_device_holds_its_part_of_its_own_experts(files, config):
    model = files.moe.sharded(config, make_mesh(fsdp=4, expert=2))
    up = model.blocks[0].moe.experts.up.get_raw_value()
    assert_spec(up, "expert", "fsdp")
    assert local_shape(up) == (4, 4, 32)
    row = {row.path: row for row in jfsdp.plan(model).rows}["blocks.0.moe.experts.up"]
    assert row.bytes_per_device == 4 * 4 * 32 * 4


def test_weights_of_experts_travel_over_fsdp_and_tokens_over_expert(files, config):
    model = files.moe.sharded(config, make_mesh(fsdp=4, expert=2))
    report = jfsdp.inspect(nnx.grad(files.moe.loss_fn, has_aux=True), model, TOKENS)
    report.check()
    seen = Counter(
        (c.kind, c.axes)
        for c in report.collectives
        for _ in range(c.executions)
        if ".experts." in c.leaf or c.kind == "all-to-all"
    )
    assert seen == {
        ("all-gather", ("fsdp",)): 2 * 2,  # two arrays, forward and again in the backward
        ("reduce-scatter", ("fsdp",)): 2,
        ("all-to-all", ("expert",)): 2 * 2,  # there and back, forward and backward
    }
    others = {c.axes for c in report.collectives if c.leaf and ".experts." not in c.leaf}
    assert others == {("fsdp", "expert")}


def test_device_receives_the_rest_of_its_own_experts_only(files, config):
    model = files.moe.sharded(config, make_mesh(fsdp=4, expert=2))
    report = jfsdp.inspect(nnx.grad(files.moe.loss_fn, has_aux=True), model, TOKENS)
    of_its_experts = 2 * 4 * 16 * 32 * 4  # two arrays, 4 of 8 experts, float32
    assert report.bytes("reduce-scatter", axes="fsdp") == of_its_experts * 3 / 4
    assert {t.kind: t.ratio for t in report.totals}["reduce-scatter"] == pytest.approx(1)


def test_moments_lie_as_their_experts_and_a_step_is_a_fixed_point(files, config):
    model = files.moe.sharded(config, make_mesh(fsdp=4, expert=2))
    optimizer = nnx.Optimizer(model, files.moe.optax.adamw(1e-3), wrt=nnx.Param)
    shardings = lambda: {k: v.sharding for k, v in leaves((nnx.state(model), optimizer)).items()}  # noqa: E731
    before = shardings()
    moment = optimizer.opt_state[0].mu["blocks"][0]["moe"]["experts"]["up"].get_raw_value()
    assert_spec(moment, "expert", "fsdp")
    for _ in range(2):
        files.moe.train_step(model, optimizer, TOKENS)
    assert shardings() == before


def test_unsharded_copy_holds_all_experts_and_computes_the_same(files, config):
    model = files.moe.sharded(config, make_mesh(fsdp=4, expert=2))
    whole = jfsdp.unshard(model)
    assert whole.blocks[0].moe.experts.up.shape == (8, 16, 32)
    got, wanted = (nnx.jit(lambda m: m(TOKENS[:, :-1]))(m) for m in (whole, model))
    np.testing.assert_allclose(got[0], wanted[0], rtol=0, atol=1e-5)


def test_auto_partitioning_sees_all_experts(files, config):
    """What decodes or takes an odd batch: the whole arrays, and no token is sent."""
    model = files.moe.sharded(config, make_mesh(fsdp=4, expert=2))
    forward = nnx.jit(lambda m, x: m(x)[0])
    wanted = forward(model, TOKENS[:, :-1])[:3]
    with jfsdp.auto_partitioning():
        np.testing.assert_allclose(forward(model, TOKENS[:3, :-1]), wanted, rtol=0, atol=1e-5)


def test_token_without_a_place_is_left_out(files, config):
    tight = dataclasses.replace(config, capacity=1 / 16)
    layer = functools.partial(files.mixture.MoE, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (4, 8, 16))
    empty = [(np.abs(layer(c)(x)[0]).sum(-1) == 0).mean() for c in (config, tight)]
    assert empty[0] == 0
    assert empty[1] > 0.5


@pytest.mark.slow
def test_script_runs_by_itself_and_learns():
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(EXAMPLES.parent), "JAX_PLATFORMS": "cpu"}
    script = [sys.executable, "-W", "error", str(EXAMPLES / "moe.py")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"^step +\d+ +loss ([\d.]+)", done.stdout, re.MULTILINE)]
    assert len(losses) == 7
    assert losses[-1] < 0.3
    assert "P('expert', 'fsdp')" in done.stdout
