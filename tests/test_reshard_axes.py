"""`reshard_after_forward` as axes or int: weights stay in fewer parts, and are gathered again over these."""

from __future__ import annotations

import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import (
    assert_close,
    assert_spec,
    batch_on,
    every_axis_type,
    gradients,
    make_mesh,
    rows,
)
from models import CASES, Block, Stack
from reshard_cases import BOTH, DIMS, counts, gradients_of_both, mesh_of, report, stack

import jfsdp
from jfsdp.mesh import DataParallelMesh

POLICY = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)
COUNTS = {
    "True": (True, {BOTH: (4, 4)}),
    "all names": (BOTH, {BOTH: (4, 4)}),
    "all names, another order": (("inner", "outer"), {BOTH: (4, 4)}),
    "8": (8, {BOTH: (4, 4)}),
    "inner": ("inner", {("inner",): (4, 4), ("outer",): (4, 0)}),
    "tuple": (("inner",), {("inner",): (4, 4), ("outer",): (4, 0)}),
    "4": (4, {("inner",): (4, 4), ("outer",): (4, 0)}),
    "outer": ("outer", {("inner",): (4, 0), ("outer",): (4, 4)}),
    "1": (1, {BOTH: (4, 0)}),
    "False": (False, {BOTH: (4, 0)}),
}


@pytest.mark.parametrize("name", COUNTS)
def test_the_backward_gathers_over_the_kept_axes_only(name):
    reshard, expected = COUNTS[name]
    found = report(stack(reshard, mp_policy=POLICY))
    assert counts(found) == expected
    assert found.count("reduce-scatter", BOTH, "float32") == found.count("reduce-scatter") == 4
    found.check()


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_all_gathered_bytes_are_the_stated_ones(kind):
    """P (F - 1)/F in the forward, P (I - 1)/I in the backward, in bfloat16."""
    found = report(stack("inner", kind, mp_policy=POLICY))
    size, parts, inner = 4 * 64 * 64 * 2, *((8, 4) if kind == "fsdp" else (4, 2))
    assert found.bytes("all-gather") == size * (parts - 1) / parts + size * (inner - 1) / inner
    (total,) = [row for row in found.totals if row.kind == "all-gather"]
    assert total.ratio == 1.0


def test_every_unit_says_for_itself():
    mesh, dims = mesh_of("fsdp")
    model = Stack(2, 64, nnx.Rngs(0))
    jfsdp.shard(model.blocks[0], mesh, dp_mesh_dims=dims, reshard_after_forward="inner")
    jfsdp.shard(model.blocks[1], mesh, dp_mesh_dims=dims, reshard_after_forward=True)
    found = report(jfsdp.shard(model, mesh, dp_mesh_dims=dims))
    assert counts(found) == {BOTH: (1, 1), ("inner",): (1, 1), ("outer",): (1, 0)}
    found.check()


def test_names_of_axes_of_size_1_change_nothing():
    mesh = make_mesh(one=1, outer=2, inner=4)
    dims = jfsdp.DataParallelMeshDims(shard=("one", "outer", "inner"))
    for reshard, expected in (("one", (4, 0)), (BOTH, (4, 4))):
        model = jfsdp.shard(
            Stack(4, 64, nnx.Rngs(0)),
            mesh,
            dp_mesh_dims=dims,
            units=Block,
            reshard_after_forward=reshard,
        )
        assert counts(report(model)) == {BOTH: expected}


# --------------------------------------------------------------------------------------------------
# Numbers


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_gradients_are_those_of_every_other_setting_bit_by_bit(kind):
    x = rows(16, 64)
    kept = gradients_of_both(stack(False, kind, mp_policy=POLICY), x)
    for reshard in (True, "inner", "outer"):
        found = gradients_of_both(stack(reshard, kind, mp_policy=POLICY), x)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(kept), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "case",
    [
        *("mlp", "scanned"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("attention", "tied", "conv")),
    ],
)
def test_gradients_are_the_unsharded_ones(case):
    """With leaves that do not divide, and a scanned stack of layers."""
    mesh, dims = mesh_of("hsdp")
    settings = {"dp_mesh_dims": dims, "reshard_after_forward": "inner"}
    model, batch = CASES[case].sharded(mesh, **settings), jnp.asarray(CASES[case].batch)
    found = gradients(model, batch)
    assert_close(found, gradients(CASES[case].make(), batch), rtol=1e-5, atol=1e-6)


@every_axis_type
def test_gradients_on_meshes_of_every_axis_type(mesh_of):
    with mesh_of(outer=2, inner=4) as mesh:
        settings = {"dp_mesh_dims": DIMS, "units": Block, "reshard_after_forward": "inner"}
        model = jfsdp.shard(Stack(2, 64, nnx.Rngs(0)), mesh, **settings)
        found = gradients(model, batch_on(mesh, rows(16, 64)))
    assert_close(found, gradients(Stack(2, 64, nnx.Rngs(0)), rows(16, 64)))


SPLITS = [
    (("a", "b", "c"), names)
    for count in (1, 2)
    for names in itertools.combinations(("a", "b", "c"), count)
]


@pytest.mark.parametrize("staged", [False, True], ids=["at_once", "axis_by_axis"])
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=6)
def test_gradients_whatever_axes_are_kept(staged, data):
    """Axes that do not lie beside each other too, on one dimension or several, on TPUs axis by axis."""
    shard, kept = data.draw(st.sampled_from(SPLITS))
    shape = data.draw(st.sampled_from([(8, 6), (24, 2), (4, 6), (2, 4, 2), (3, 5), (16,)]))
    order = data.draw(st.permutations(shard))

    class Weight(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.arange(float(np.prod(shape))).reshape(shape) / 10)

        def __call__(self, x):
            return x + jnp.sin(self.w[...]).reshape(1, -1)

    mesh, size = make_mesh(a=2, b=2, c=2), int(np.prod(shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DataParallelMesh, "staged", property(lambda self: staged))
        dims = jfsdp.DataParallelMeshDims(shard=tuple(order))
        settings = {"dp_mesh_dims": dims, "reshard_after_forward": kept}
        found = gradients(jfsdp.shard(Weight(), mesh, **settings), rows(8, size))
    assert_close(found, gradients(Weight(), rows(8, size)))


def test_axes_on_different_dimensions():
    """No dimension of (4, 6) divides by 8; the axes go to both."""
    mesh, dims = mesh_of("fsdp")

    class Weight(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(rows(6, 4, seed=3))

        def __call__(self, x):
            return jnp.tanh(x @ self.w[...])

    for reshard in ("inner", "outer"):
        model = jfsdp.shard(Weight(), mesh, dp_mesh_dims=dims, reshard_after_forward=reshard)
        assert_spec(model.w, "outer", "inner")
        found = jfsdp.inspect(gradients_of_both, model, rows(8, 6))
        dropped = "outer" if reshard == "inner" else "inner"
        assert counts(found) == {(reshard,): (1, 1), (dropped,): (1, 0)}
        found.check()
        assert_close(gradients(model, rows(8, 6)), gradients(Weight(), rows(8, 6)))
