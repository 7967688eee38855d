"""`reshard_after_forward` as axes or int in Linen: the same programs as in NNX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from helpers import batch_on, make_mesh, rows
from linen_models import CASES, Block, Layer, Stack, assert_as_unsharded, gradients, init, scan
from reshard_cases import BOTH, DIMS, HSDP, counts

import jfsdp

POLICY = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)
KEEP = jax.checkpoint_policies.save_only_these_names("jfsdp_kept")


def report(plain: nn.Module, reshard: Any, x: Any = None, **settings: Any) -> Any:
    """What the gradient of parameters and input communicates."""
    x = rows(16, 64) if x is None else x
    settings = {"dp_mesh_dims": DIMS, "units": Block, "mp_policy": POLICY, **settings}
    mesh = make_mesh(outer=2, inner=4)
    model = jfsdp.shard(plain, mesh, reshard_after_forward=reshard, **settings)

    @jax.jit
    def step(variables: Any, x: Any) -> Any:
        def loss(variables: Any, x: Any) -> jax.Array:
            y: Any = model.apply(variables, x)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        return jax.grad(loss, argnums=(0, 1))(variables, x)

    return jfsdp.inspect(step, init(model, x), batch_on(mesh, x), model=model)


INNER = {("inner",): (4, 4), ("outer",): (4, 0)}


@pytest.mark.parametrize(
    ("reshard", "expected"),
    [
        pytest.param(True, {BOTH: (4, 4)}, id="True"),
        pytest.param("inner", INNER, id="inner"),
        pytest.param(4, INNER, id="4"),
        pytest.param("outer", {("inner",): (4, 0), ("outer",): (4, 4)}, id="outer"),
        pytest.param(False, {BOTH: (4, 0)}, id="False"),
    ],
)
def test_the_backward_gathers_over_the_kept_axes_only(reshard, expected):
    found = report(Stack(4, 64), reshard)
    assert counts(found) == expected
    assert found.count("reduce-scatter", BOTH, "float32") == found.count("reduce-scatter") == 4
    found.check()


@pytest.mark.parametrize(
    "case",
    [
        *("mlp", "scanned"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("attention", "tied")),
    ],
)
def test_variables_and_gradients_are_the_unsharded_ones(case):
    """With leaves that do not divide, and a scanned stack of layers."""
    settings = {"dp_mesh_dims": HSDP, "reshard_after_forward": "inner", "units": CASES[case].units}
    mesh = make_mesh(replica=2, outer=2, inner=2)
    assert_as_unsharded(CASES[case].make(), mesh, CASES[case].batch, **settings)


class Looped(nn.Module):
    """nn.scan over layers, with nn.remat round each or without."""

    policy: Any = None
    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        body: Any = nn.remat(Layer, prevent_cse=False, policy=self.policy) if self.remat else Layer
        return scan(body, 4)()(x)[0]


def test_a_scanned_stack_keeps_a_part_of_each_layer():
    found = report(Looped(), "inner", rows(16, 16), units=())
    forward, backward = counts(found)[("inner",)]
    assert counts(found)[("outer",)] == (forward, 0)
    assert backward == 8  # both kernels of 4 layers; nothing reads a bias again
    found.check()


@pytest.mark.parametrize(("policy", "again"), [(KEEP, 0), (None, 12)], ids=["kept", "nothing"])
def test_remat_round_a_scanned_layer_can_keep_the_part(policy, again):
    found = report(Looped(policy, remat=True), "inner", rows(16, 16), units=())
    assert counts(found)[("outer",)] == (16, again)
    if policy is None:
        with pytest.raises(jfsdp.PolicyViolation, match="axes of the all-gather"):
            found.check()
    else:
        found.check()


def test_gradients_are_those_of_every_other_setting():
    x, mesh = rows(16, 64), make_mesh(outer=2, inner=4)
    settings = {"dp_mesh_dims": DIMS, "units": Block, "mp_policy": POLICY}
    found = []
    for reshard in (False, True, "inner", "outer"):
        model = jfsdp.shard(Stack(3, 64), mesh, reshard_after_forward=reshard, **settings)
        found.append(gradients(model, init(model, x), batch_on(mesh, x)))
    for other in found[1:]:
        same = jax.tree.map(lambda a, b: bool((a == b).all()), found[0], other)
        assert all(jax.tree.leaves(same))
