"""The benchmark suite measures what it says: its formulas, its references, its table."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close
from linen_models import fast_compiler

import jfsdp

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
import gpt_by_hand  # pyright: ignore[reportMissingImports]
import gpt_linen  # pyright: ignore[reportMissingImports]
import gpt_nnx  # pyright: ignore[reportMissingImports]
import gpt_plain_jit  # pyright: ignore[reportMissingImports]
import gpt_program  # pyright: ignore[reportMissingImports]
import suite  # pyright: ignore[reportMissingImports]
import suite_table  # pyright: ignore[reportMissingImports]
from gpt_shape import Shape  # pyright: ignore[reportMissingImports]
from minima import Minima, minima  # pyright: ignore[reportMissingImports]

TINY = Shape(blocks=3, width=16, heads=2, vocabulary=32, context=8, rows=8)
F32 = jfsdp.MixedPrecisionPolicy()
forms = pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
meshes = pytest.mark.parametrize("mesh_name", ["S8", "R2xS4"])


@pytest.fixture(autouse=True)
def _fast_compiler() -> Iterator[None]:
    with fast_compiler():
        yield


@functools.cache
def nnx_model(scan: bool) -> gpt_nnx.GPT:
    return gpt_nnx.GPT(TINY, scan, True, jnp.float32, nnx.Rngs(0))


def tree_of(model: nnx.Module) -> Any:
    """An NNX model's arrays as the plain functions take them."""
    tree = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    if 0 in tree["blocks"]:
        tree["blocks"] = [tree["blocks"][i] for i in range(len(tree["blocks"]))]
    return tree


def laid(tree: Any, scan: bool, mesh: Any) -> Any:
    """The arrays where the references have them."""
    specs = gpt_by_hand.specs_of(TINY, scan)
    return jax.tree.map(
        lambda spec, x: jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)), specs, tree
    )


@functools.cache
def expected(scan: bool, mesh: Any) -> tuple[Any, Any, Any]:
    """Parameters, and jfsdp's loss and gradients."""
    params = laid(tree_of(nnx_model(scan)), scan, mesh)
    model = gpt_nnx.shard(nnx.clone(nnx_model(scan)), mesh, mp_policy=F32)
    tokens = gpt_program.make_tokens(TINY, mesh)
    loss, grads = nnx.jit(nnx.value_and_grad(gpt_nnx.loss_fn))(model, tokens)
    tree = nnx.to_pure_dict(grads)
    if not scan:
        tree["blocks"] = [tree["blocks"][i] for i in range(TINY.blocks)]
    return params, loss, tree


# --------------------------------------------------------------------------------------------------
# The references compute what jfsdp computes


@meshes
@forms
def test_the_hand_written_step_has_the_loss_and_gradients_of_jfsdp(scan: bool, mesh_name: str):
    mesh = gpt_program.make_mesh(mesh_name)
    params, loss, grads = expected(scan, mesh)
    run = jax.jit(gpt_by_hand.loss_and_grads(TINY, mesh, scan, compute=jnp.float32))
    got, got_grads = run(params, gpt_program.make_tokens(TINY, mesh))
    np.testing.assert_allclose(got, loss, rtol=1e-6)
    assert_close(got_grads, grads, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "scan, order, remat",
    [
        (False, "ahead", False),
        (False, "next", True),
        (False, "strict", True),
        (False, "free", False),
        (True, "ahead", False),
        (True, "free", True),
    ],
)
def test_every_order_of_the_hand_written_step_is_the_same_function(
    scan: bool, order: str, remat: bool
):
    mesh = gpt_program.make_mesh("S8")
    params, loss, grads = expected(scan, mesh)
    settings = {"remat": remat, "order": order, "compute": jnp.float32}
    run = jax.jit(gpt_by_hand.loss_and_grads(TINY, mesh, scan, **settings))
    got, got_grads = run(params, gpt_program.make_tokens(TINY, mesh))
    np.testing.assert_allclose(got, loss, rtol=1e-6)
    assert_close(got_grads, grads, rtol=1e-5, atol=1e-6)


@meshes
@forms
def test_plain_jit_has_the_loss_and_gradients_of_jfsdp(scan: bool, mesh_name: str):
    mesh = gpt_program.make_mesh(mesh_name)
    params, loss, grads = expected(scan, mesh)
    run = jax.value_and_grad(gpt_plain_jit.loss_of(TINY, mesh, scan, compute=jnp.float32))
    got, got_grads = jax.jit(run)(params, gpt_program.make_tokens(TINY, mesh))
    np.testing.assert_allclose(got, loss, rtol=1e-6)
    assert_close(got_grads, grads, rtol=1e-5, atol=1e-6)


@forms
def test_the_models_of_both_front_ends_are_one_function_of_the_same_parameters(scan: bool):
    model = nnx_model(scan)
    params = tree_of(model)
    if not scan:
        params |= {f"blocks_{i}": block for i, block in enumerate(params.pop("blocks"))}
    tokens = np.random.default_rng(0).integers(0, TINY.vocabulary, (2, TINY.context))
    linen = gpt_linen.GPT(TINY, scan, True)
    assert_close(linen.apply({"params": params}, tokens), model(tokens), rtol=1e-6, atol=1e-6)


# --------------------------------------------------------------------------------------------------
# Formulas


def test_the_minima_of_a_shape_that_is_counted_by_hand():
    """A block has 872 parameters in 12 leaves, the rest 304 in 5: 2048 in all; 2 replicas of 4 shards."""
    shape = Shape(blocks=2, width=8, heads=2, vocabulary=16, context=4, rows=8)
    assert minima(shape, 2, 4) == Minima(
        parameters=2048,
        gathered=(2 * 2 * 872 + 304) * 2 * 3 / 4,
        scattered=2048 * 4 * 3 / 4,
        summed=2048 / 4 * 4,
        gathers=5 + 2 * (12 + 11),
        scatters=5 + 2 * 12,
        persistent=2048 * 12 / 4,
        growth=872 * 4 / 4 + 1 * 4 * 8 * 2,
    )


# --------------------------------------------------------------------------------------------------
# What is printed


def record(system: str, model: str, temporaries: int, blocks: int = 8) -> dict[str, Any]:
    """A row that meets every gate but, perhaps, that of memory."""
    row = suite.Row("compile", system, model, "h100:8", "S8", blocks)
    least = suite_table.least_of(row)
    memory = {"temporaries": temporaries, "peak": 0, "persistent": least.persistent}
    return {
        "bytes": {
            "all-gather": least.gathered,
            "reduce-scatter": least.scattered,
            "all-reduce": 8.0,
        },
        "dtypes": {"all-gather": {"bfloat16": 1.0}, "reduce-scatter": {"float32": 1.0}},
        "large_all_reduces": 0,
        "counts": {"all-gather": least.gathers, "reduce-scatter": least.scatters},
        "memory": memory | {"aliased": least.persistent},
        "overlap": {"all-gather": 0.75, "reduce-scatter": 0.5},
        "hlo": {"lines": 100, "written": 1000, "compiled": 2000},
        "seconds": {"lower": 1.0, "compile": 10.0},
        "cycles": 0,
        "jax": "1.2.3",
        "flax": "4.5.6",
        "date": "2026-11-30",
        "row": suite.dataclasses.asdict(row),
    }


def results(*records: dict[str, Any]) -> dict[str, Any]:
    return {suite_table.row_of(each).key: each for each in records}


def test_a_line_of_the_table_names_its_target_and_sets_the_systems_side_by_side():
    found = results(
        record("jfsdp", "nnx-scan", 80_000_000),
        record("by-hand", "scan", 79_000_000),
        record("plain-jit", "scan", 123_000_000),
    )
    lines = suite_table.readme(found).splitlines()
    assert len(lines) <= 25
    assert lines[0].startswith("jax 1.2.3, flax 4.5.6, 2026-11-30; GPT of 8 blocks")
    assert lines[-1].startswith("| h100:8, S8 | nnx, scan | 1.00 / 1.00 / 1.00 |")
    assert "| 80 / 79 / 123 |" in lines[-1]


def test_what_misses_its_gate_is_said():
    found = results(record("jfsdp", "nnx-scan", 90), record("by-hand", "scan", 80))
    row = suite_table.row_of(found["compile jfsdp nnx-scan h100:8 S8 8 remat"])
    missed = [line for line in suite_table.lines_of(row, found, set()) if "MISSED" in line]
    assert len(missed) == 1
    assert missed[0].split() == ["7", "peak", "1.125", "gate", "1.050", "MISSED"]


def test_growth_in_depth_is_held_against_the_formula():
    least = suite_table.least_of(suite.Row("compile", "jfsdp", "nnx-scan", "h100:8", "S8", 8))
    more = int(4 * least.growth)
    found = results(
        record("jfsdp", "nnx-scan", 1000, 4), record("jfsdp", "nnx-scan", 1000 + more, 8)
    )
    row = suite_table.row_of(found["compile jfsdp nnx-scan h100:8 S8 8 remat"])
    verdicts = {verdict.name: verdict for verdict in suite_table.verdicts_of(row, found)}
    assert verdicts["growth since 4"].value == pytest.approx(1)
    assert verdicts["growth since 4"].met


def test_a_reference_is_measured_once_for_all_models_that_are_held_against_it():
    options = suite.parse(["--target", "h100:8", "--mesh", "S8", "--only", "7"])
    keys = [row.key for row in suite.rows(options)]
    assert len(keys) == len(set(keys))
    assert sum("by-hand" in key for key in keys) == 2
    assert sum(key.startswith("compile jfsdp") for key in keys) == 4


def test_only_times_are_taken_for_measure_10():
    options = suite.parse(["--target", "h100:8", "cpu", "--only", "10"])
    assert {row.job for row in suite.rows(options)} == {"time"}
    assert {row.target for row in suite.rows(options)} == {"cpu"}
