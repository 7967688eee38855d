"""Auto partitioning: the same numbers by XLA's collectives, and refusals of what it cannot keep."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import CASES, AttentionBlock, Block, Stack
from test_parity import arrays, loss_fn, mesh_and_dims, reference, train

import jfsdp


@pytest.mark.parametrize("axes", ["auto", "explicit_set"])
@pytest.mark.parametrize("case", ["mlp", "conv", pytest.param("scanned", marks=pytest.mark.slow)])
def test_training_equals_the_unsharded_model(case, axes):
    mesh, dims = mesh_and_dims("R2xS4", axes)
    expected_losses, _, expected_state = reference(case)
    with jax.set_mesh(mesh):
        model = CASES[case].sharded(mesh, dp_mesh_dims=dims, partitioning="auto")
        losses, _, state = train(model, CASES[case].batch)
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=1e-5)
    for name, expected in expected_state.items():
        np.testing.assert_allclose(state[name], expected, rtol=0, atol=1e-5, err_msg=name)


def test_a_manual_unit_inside_an_auto_one_opens_its_own_region():
    mesh, _ = mesh_and_dims("S8", "auto")
    model = CASES["attention"].make()
    for block in model.blocks:
        jfsdp.shard(block, mesh)
    jfsdp.shard(model, mesh, partitioning="auto")
    batch = CASES["attention"].batch
    loss, grads = nnx.jit(nnx.value_and_grad(loss_fn))(model, batch)
    expected_losses, expected, _ = reference("attention")
    assert abs(float(loss) - expected_losses[0]) < 1e-6
    for name, gradient in arrays(grads).items():
        np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=1e-6, err_msg=name)
    report = jfsdp.inspect(nnx.jit(lambda m, x: m(x)), model, batch)
    assert report.count("all-gather") == 2 * len(
        jax.tree.leaves(nnx.state(model.blocks[0], nnx.Param))
    )
    assert isinstance(model.blocks[0], AttentionBlock)


def test_weights_are_gathered_again_in_the_backward():
    """The forward's whole weights are no residuals: the barrier's operands are the shards."""
    mesh, _ = mesh_and_dims("S8", "auto")

    def casts(reshard):
        model = Stack(4, 64, nnx.Rngs(0))
        policy = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
        jfsdp.shard(
            model,
            mesh,
            units=Block,
            mp_policy=policy,
            partitioning="auto",
            reshard_after_forward=reshard,
        )
        step = nnx.jit(nnx.value_and_grad(loss_fn, argnums=(0, 1)))
        text = step.lower(model, np.ones((16, 64), np.float32)).lowered.as_text()
        return text.count("tensor<64x64xf32>) -> tensor<64x64xbf16>")

    assert (casts(False), casts(True)) == (4, 8)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"mp_policy": jfsdp.MixedPrecisionPolicy(reduce_dtype="float32")}, "reduce_dtype=float32"),
        (
            {"mp_policy": jfsdp.MixedPrecisionPolicy(reduce_dtype="bfloat16")},
            "reduce_dtype=bfloat16",
        ),
    ],
)
def test_what_it_cannot_promise_is_refused(settings, text):
    with pytest.raises(ValueError, match=f'partitioning="auto" cannot promise .*{text}'):
        jfsdp.shard(
            Stack(1, 64, nnx.Rngs(0)),
            mesh_and_dims("S8", "auto")[0],
            partitioning="auto",
            **settings,
        )
