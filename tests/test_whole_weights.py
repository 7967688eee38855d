"""`jfsdp.unshard`: whole weights in modules and trees of their own kinds."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers import (
    MeshOf,
    assert_close,
    assert_spec,
    every_axis_type,
    local_shape,
    make_mesh,
    rows,
)
from jax.sharding import PartitionSpec as P
from models import CASES, MLP, TiedLM

import jfsdp


@every_axis_type
def test_an_nnx_model_becomes_a_plain_one_with_whole_weights(mesh_of: MeshOf):
    with mesh_of(S=8) as mesh:
        model = jfsdp.shard(MLP(nnx.Rngs(0)), mesh, units=nnx.Linear)
        whole = jfsdp.unshard(model)
    assert [type(node) for node in (whole, whole.fc1)] == [MLP, nnx.Linear]
    assert_close(whole, MLP(nnx.Rngs(0)))
    assert local_shape(whole.fc1.kernel[...]) == (16, 32)


def test_the_sharded_model_stays_as_it_is():
    model = jfsdp.shard(MLP(nnx.Rngs(0)), make_mesh(S=8), units=nnx.Linear)
    jfsdp.unshard(model)
    assert_spec(model.fc1.kernel, None, "S")
    assert jfsdp.plan(model).bytes_per_device < jfsdp.plan(model).bytes


def test_it_runs_one_example_without_a_region():
    """Inference on a small scale: a batch of 1, no collective."""
    model = jfsdp.unshard(CASES["attention"].sharded(make_mesh(S=8)))
    batch = CASES["attention"].batch[:1]
    expected = CASES["attention"].make()(batch)
    np.testing.assert_allclose(model(batch), expected, rtol=0, atol=1e-6)
    program = nnx.jit(lambda model, x: model(x)).lower(model, batch).lowered.as_text()
    assert not any(name in program for name in ("all_gather", "manual_computation", "shmap"))


def test_a_tied_leaf_stays_one():
    model = jfsdp.unshard(jfsdp.shard(TiedLM(nnx.Rngs(0)), make_mesh(S=8)))
    assert len(jax.tree.leaves(nnx.state(model))) == len(
        jax.tree.leaves(nnx.state(TiedLM(nnx.Rngs(0))))
    )


def test_parameters_keep_their_structure_dtype_and_values():
    """B65: names and shapes of the unsharded model; a bfloat16 policy does not change saved float32."""
    policy = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    model = jfsdp.shard(nn.Dense(8), make_mesh(R=2, S=4), mp_policy=policy)
    params = model.init(jax.random.key(0), rows(1, 16))["params"]
    whole = jfsdp.unshard(params)
    assert_close(whole, nn.Dense(8).init(jax.random.key(0), rows(1, 16))["params"])
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(whole)} == {P()}
    assert all(np.asarray(leaf).dtype == np.float32 for leaf in jax.tree.leaves(whole))


def test_a_linen_module_becomes_the_one_it_was():
    module = nn.Dense(8, use_bias=False)
    whole: Any = jfsdp.unshard(jfsdp.shard(module, make_mesh(S=8)))
    assert whole == module and type(whole) is nn.Dense


def test_abstract_parameters_stay_abstract():
    mesh = make_mesh(S=8)
    model = jfsdp.init(lambda: MLP(nnx.Rngs(0)), mesh, abstract=True)
    whole = jfsdp.unshard(nnx.state(model))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(whole))
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(whole)} == {P()}


def test_what_lies_on_no_mesh_passes():
    tree = {"step": 3, "name": "run", "x": np.ones(3)}
    assert jfsdp.unshard(tree)["x"] is tree["x"]


def test_inside_jit_it_takes_arguments():
    params = jfsdp.shard_batch({"w": np.ones((8, 2), np.float32)}, make_mesh(S=8))
    assert jax.jit(jfsdp.unshard)(params)["w"].sharding.spec == P()


def test_inside_jit_it_says_what_it_cannot_know():
    def made(key: jax.Array) -> Any:
        return jfsdp.unshard({"w": jax.random.normal(key, (8, 2))})

    with pytest.raises(ValueError, match=r"\['w'\] \(shape \(8, 2\)\) is traced.*outside of jit"):
        jax.jit(made)(jax.random.key(0))
