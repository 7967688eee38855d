"""Scanned layers are gathered one by one, inside the loop."""

from __future__ import annotations

import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from linen_models import Layer, Scanned, scan
from test_counts import POLICY, mesh_of
from test_linen_counts import dots_of, report, variables_of

import jfsdp

SMALL = np.ones((16, 16), np.float32)


@pytest.mark.parametrize("remat", [False, True], ids=["plain", "users_remat"])
@pytest.mark.parametrize("units", [(), Layer, "layers"], ids=["by itself", "class", "path"])
def test_scanned_layers_are_gathered_inside_the_loop(units, remat):
    """B16: in each of 8 layers 4 leaves forward; backward the 2 kernels, to recompute also a bias.

    The loops look ahead: before them stand the first layer's, and those of the last two again.
    """
    model = jfsdp.shard(Scanned(remat=remat), mesh_of(False), units=units, mp_policy=POLICY)
    found = report(model, 0, batch=SMALL)
    inside = [c for c in found.collectives if c.kind == "all-gather" and c.in_loop]
    assert sum(c.executions for c in inside) == 7 * 4 + 6 * (3 if remat else 2)
    assert found.count("all-gather") == 8 * (4 + (3 if remat else 2)) + 2
    assert {c.result_shape for c in inside} == {(16, 32), (32,), (32, 16), (16,)}
    assert {c.dtype for c in inside} == {"bfloat16"}
    assert found.count("reduce-scatter") == 4 * 8 + 2


def test_kept_layers_of_a_scan_are_gathered_once():
    settings = {"mp_policy": POLICY, "reshard_after_forward": False}
    model = jfsdp.shard(Scanned(), mesh_of(False), **settings)
    found = report(model, 0, batch=SMALL)
    assert found.count("all-gather") == 8 * 4 + 2


def test_the_users_remat_in_a_scan_still_recomputes():
    plain, remat = (jfsdp.shard(Scanned(remat=r), mesh_of(False)) for r in (False, True))
    again = dots_of(Scanned(remat=True), SMALL) - dots_of(Scanned(), SMALL)
    # The last, the first, and in the loop each other layer's backward.
    assert dots_of(remat, SMALL) - dots_of(plain, SMALL) == 3 * again


def test_scanned_blocks_of_several_units_are_gathered_apart():
    """Units inside the body: each Dense by itself."""
    model = jfsdp.shard(Scanned(), mesh_of(False), units=nn.Dense, mp_policy=POLICY)
    plan = jfsdp.plan(variables_of(model, SMALL) and model)
    assert {row.unit for row in plan.rows} == {"layers.up", "layers.down", "head"}
    found = report(model, 0, batch=SMALL)
    assert found.count("reduce-scatter") == 4 * 8 + 2
    assert sum(c.executions for c in found.collectives if c.in_loop) == 8 * (4 + 2 + 4)


def test_the_layer_axis_is_never_sharded():
    """As many layers as devices: axis 0 is legal and tempting."""
    model = jfsdp.shard(Scanned(), mesh_of(False))
    variables_of(model, SMALL)
    specs = {row.path: row.spec for row in jfsdp.plan(model).rows if row.unit == "layers"}
    assert len(specs) == 4
    assert all(spec[0] is None for spec in specs.values())


def test_layers_stacked_along_another_axis_are_not_sharded_there():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return scan(Layer, 8, variable_axes={"params": -1})(name="layers")(x)[0]

    model = jfsdp.shard(Model(), mesh_of(False), mp_policy=POLICY)
    variables_of(model, SMALL)
    specs = {row.path: row.spec for row in jfsdp.plan(model).rows}
    assert specs["layers.up.kernel"] == P(None, "fsdp")
    found = report(model, 0, batch=SMALL)
    assert {c.in_loop for c in found.collectives} == {True}
