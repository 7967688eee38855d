"""Parameters that lie on the host: the same numbers, and every array in the memory that was asked for."""

from __future__ import annotations

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import linen_models
import models
import numpy as np
import pytest
from flax import nnx
from helpers import batch_on, make_mesh

import jfsdp

HOST = jfsdp.CPUOffloadPolicy()
MIXED = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)


def kinds(tree: Any) -> set[str]:
    """The memory kinds of all arrays."""
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def assert_equal(got: Any, expected: Any) -> None:
    """The same values in the same places; an NNX state's structure tells the memory apart."""
    pairs = [jax.tree_util.tree_leaves_with_path(tree) for tree in (got, expected)]
    for (path, leaf), (other_path, other) in zip(*pairs, strict=True):
        assert path == other_path
        np.testing.assert_array_equal(leaf, other, err_msg=jax.tree_util.keystr(path))


def nnx_gradients(case: Any, mesh: Any, loss: Any = helpers.mean_square, **settings: Any) -> Any:
    """The parameters of a sharded case of NNX, the loss and the gradients."""
    model = case.sharded(mesh, **settings)
    value, gradients = helpers.gradients(model, batch_on(mesh, case.batch), loss)
    return nnx.state(model, nnx.Param), value, nnx.state(gradients, nnx.Param)


def linen_gradients(case: Any, mesh: Any, **settings: Any) -> Any:
    model = case.sharded(mesh, **settings)
    variables = linen_models.filled(linen_models.abstract(model, case.batch))
    params, others = variables["params"], {k: v for k, v in variables.items() if k != "params"}

    def loss(params: Any, x: Any) -> jax.Array:
        result = model.apply({"params": params, **others}, x, mutable=list(others) or False)
        y = result[0] if others else result
        return jnp.mean(y.astype(jnp.float32) ** 2)

    value, gradients = jax.jit(jax.value_and_grad(loss))(params, batch_on(mesh, case.batch))
    return params, value, gradients


SETTINGS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "S8": ({"fsdp": 8}, {}),
    "R2xS4, bf16": ({"replica": 2, "fsdp": 4}, {"mp_policy": MIXED}),
    "kept": ({"fsdp": 8}, {"reshard_after_forward": False}),
    "hpZ": (
        {"host": 2, "chip": 4},
        {
            "dp_mesh_dims": jfsdp.DataParallelMeshDims(shard=("host", "chip")),
            "reshard_after_forward": "chip",
        },
    ),
    "no prefetch": ({"fsdp": 8}, {"prefetch": 0}),
    "auto": ({"fsdp": 8}, {"partitioning": "auto"}),
}
every_case = pytest.mark.parametrize(
    "name, setting",
    [
        *((name, "S8") for name in models.CASES),
        *(
            pytest.param(name, setting, marks=pytest.mark.slow)
            for setting in SETTINGS
            for name in ("mlp", "scanned")
            if setting != "S8"
        ),
    ],
)


def assert_the_same_on_the_host(gradients: Any, case: Any, setting: str) -> None:
    sizes, asked = SETTINGS[setting]
    mesh = make_mesh(**sizes)
    expected = gradients(case, mesh, **asked)
    got = gradients(case, mesh, offload_policy=HOST, **asked)
    assert kinds(expected) == {"device"}
    assert kinds(got[0]) == kinds(got[2]) == {"pinned_host"}
    assert_equal(got, expected)


@every_case
def test_gradients_of_nnx_are_bit_equal_and_lie_on_the_host(name, setting):
    assert_the_same_on_the_host(nnx_gradients, models.CASES[name], setting)


@every_case
def test_gradients_of_linen_are_bit_equal_and_lie_on_the_host(name, setting):
    assert_the_same_on_the_host(linen_gradients, linen_models.CASES[name], setting)
