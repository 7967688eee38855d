"""Shapes, meshes and factors that PyTorch's own FSDP2 tests train with: see FSDP2_CONFORMANCE.md."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    assert_close,
    assert_spec,
    batch_on,
    count_ops,
    gradients,
    make_mesh,
    mean_square,
    mlp,
    rows,
    train,
)
from models import Stack

import jfsdp
from jfsdp.comm import DefaultAllGather

Dims = jfsdp.DataParallelMeshDims
STEPS = 10


# --------------------------------------------------------------------------------------------------
# Shapes and meshes

SHAPES = {"16x15": (16, 15, 8), "7x15": (7, 15, 3), "16x17": (16, 17, 8), "odd": (3, 5, 1)}
QUICK = ("16x15", "odd")


@pytest.mark.parametrize("sizes", [{"S": 8}, {"R": 2, "S": 4}], ids=["S8", "R2xS4"])
@pytest.mark.parametrize(
    "widths",
    [
        pytest.param(shape, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, shape in SHAPES.items()
    ],
)
def test_any_shapes_train_as_unsharded(widths: tuple[int, ...], sizes: Any):
    """One group, shapes that divide on no dimension too: those are replicated."""
    mesh = make_mesh(**sizes)
    model, plain = jfsdp.shard(mlp(*widths), mesh), mlp(*widths)
    x, tx = rows(16, widths[0]), optax.adam(1e-2, eps=1e-3)
    losses = train(model, batch_on(mesh, x), steps=STEPS, tx=tx)
    np.testing.assert_allclose(losses, train(plain, x, steps=STEPS, tx=tx), rtol=1e-5)
    got, expected = (nnx.as_pure(nnx.state(m)) for m in (model, plain))
    assert_close(got, expected, rtol=0, atol=1e-5)


def tensor_parallel() -> nnx.Sequential:
    """Columns of the first kernel and rows of the second lie on the axis T."""
    model = mlp(16, 32, 8)
    for layer, spec in ((model.layers[0], (None, "T")), (model.layers[2], ("T", None))):
        layer.kernel.set_metadata(out_sharding=spec)
    return model


PARALLELISMS: dict[str, tuple[dict[str, int], Any, dict[str, Any]]] = {
    "fsdp": ({"S": 8}, Dims(shard="S"), {}),
    "fsdp, kept": ({"S": 8}, Dims(shard="S"), {"reshard_after_forward": False}),
    "ddp": ({"R": 8}, Dims(replicate="R"), {}),
    "ddp of several axes": ({"R": 2, "Q": 4}, Dims(replicate=("R", "Q")), {}),
    "hsdp": ({"R": 2, "S": 4}, Dims(shard="S", replicate="R"), {}),
    "several shard axes": ({"S": 2, "U": 4}, Dims(shard=("S", "U")), {}),
    "hsdp of several axes": ({"R": 2, "Q": 2, "S": 2}, Dims("S", ("R", "Q")), {}),
    "fsdp and tp": ({"S": 4, "T": 2}, Dims(shard="S"), {}),
    "fsdp and tp, kept": ({"S": 4, "T": 2}, Dims(shard="S"), {"reshard_after_forward": False}),
    "hsdp and tp": ({"R": 2, "S": 2, "T": 2}, Dims(shard="S", replicate="R"), {}),
}


@pytest.mark.parametrize("name", PARALLELISMS)
def test_every_parallelism_trains_as_unsharded(name: str):
    sizes, dims, settings = PARALLELISMS[name]
    mesh = make_mesh(**sizes)

    def shard(model: Any) -> None:
        jfsdp.shard(model, mesh, dp_mesh_dims=dims, units=nnx.Linear, **settings)

    make = tensor_parallel if "T" in sizes else lambda: mlp(16, 32, 8)
    x = rows(16, 16)
    model = make()
    shard(model)
    batch = jfsdp.shard_batch(np.asarray(x), mesh, dp_mesh_dims=dims)
    tx = optax.adam(1e-2, eps=1e-3)
    losses = train(model, batch, steps=STEPS, tx=tx)
    np.testing.assert_allclose(losses, train(mlp(16, 32, 8), x, steps=STEPS, tx=tx), rtol=1e-5)
    if "T" in sizes:
        assert_spec(model.layers[0].kernel, "S", "T")


@pytest.mark.parametrize(
    "sizes, gathers, scatters, reductions",
    [
        ({"R": 8, "S": 1}, 0, 0, 3),
        ({"R": 1, "S": 8}, 5, 3, 0),
        ({"R": 1, "S": 1}, 0, 0, 0),
        ({"R": 2, "S": 4}, 5, 3, 3),
    ],
    ids=["8x1", "1x8", "1x1", "2x4"],
)
def test_axes_of_size_1_cost_no_collective_and_the_gradient_is_the_same(
    sizes: Any, gathers: int, scatters: int, reductions: int
):
    """HSDP over (N, 1): no gather, whole gradients all-reduced; (1, N): no all-reduce; (1, 1): nothing."""
    mesh = make_mesh(**sizes)
    model = jfsdp.shard(Stack(3, 16, nnx.Rngs(0)), mesh, units="blocks.*")
    x = batch_on(mesh, rows(16, 16))
    assert_close(gradients(model, x), gradients(Stack(3, 16, nnx.Rngs(0)), rows(16, 16)))
    lowered = nnx.jit(nnx.value_and_grad(mean_square)).lower(model, x).lowered
    assert count_ops(lowered, "all_gather") == gathers
    assert count_ops(lowered, "reduce_scatter") == scatters
    assert count_ops(lowered, "all_reduce") == reductions


# --------------------------------------------------------------------------------------------------
# The factor of a gradient is the user's


@pytest.mark.parametrize("sizes", [{"S": 8}, {"R": 4, "S": 2}, {"R": 8, "S": 1}], ids=str)
@pytest.mark.parametrize("factor", [16.0, 8.0, 1.0])
def test_a_loss_that_is_divided_by_a_factor_divides_the_gradient(sizes: Any, factor: float):
    """FSDP2's divide factor: here the loss is a sum that its user divides; nothing else is divided."""
    mesh = make_mesh(**sizes)

    def loss(model: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(model(x).astype(jnp.float32) ** 2) / factor

    policy = jfsdp.MixedPrecisionPolicy(param_dtype="bfloat16", reduce_dtype="float32")
    for mp_policy, tolerance in ((jfsdp.MixedPrecisionPolicy(), 1e-5), (policy, 0.05)):
        model = jfsdp.shard(mlp(16, 16), mesh, mp_policy=mp_policy)
        grads = gradients(model, batch_on(mesh, rows(16, 16)), loss)[1]
        expected = gradients(mlp(16, 16), rows(16, 16), loss)[1]
        scale = float(jnp.abs(expected.layers[0].kernel[...]).max())
        assert_close(grads, expected, rtol=tolerance, atol=tolerance * scale)


def test_reductions_are_sums_and_nothing_is_divided():
    """FSDP2's force-sum: every reduction of the program as written adds, and is followed by no division."""
    mesh = make_mesh(R=2, S=4)
    model = jfsdp.shard(Stack(2, 16, nnx.Rngs(0)), mesh, units="blocks.*")

    def total(model: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(model(x))

    lowered = nnx.jit(nnx.grad(total)).lower(model, batch_on(mesh, rows(16, 16))).lowered
    text = lowered.as_text()
    bodies = [part.split("stablehlo.return")[0] for part in text.split("reduce_scatter")[1:]]
    bodies += [part.split("stablehlo.return")[0] for part in text.split("all_reduce")[1:]]
    assert len(bodies) == 2 + 2
    assert all("stablehlo.add" in body for body in bodies)
    assert "stablehlo.divide" not in text


# --------------------------------------------------------------------------------------------------
# Collectives of the user's


class Noting(DefaultAllGather):
    """Gathers in bfloat16, whatever the weight is in, and notes over which axes."""

    def __init__(self, groups: list[Any]):
        self.groups = groups

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False):
        self.groups.append(group)
        sent = input_tensor.astype(jnp.bfloat16)
        return super().__call__(output_tensor, sent, group).astype(output_tensor.dtype)


def test_a_gather_of_the_users_sees_the_shard_axes_of_hsdp_alone_and_trains():
    """Born sharded from an abstract initialization; bfloat16 on the wire, float32 in the model."""
    mesh, groups = make_mesh(R=2, S=4), []
    model = jfsdp.init(lambda: mlp(16, 32, 8), mesh, units=nnx.Linear, all_gather=Noting(groups))
    x, tx = rows(16, 16), optax.adam(1e-2, eps=1e-3)
    losses = train(model, batch_on(mesh, x), steps=STEPS, tx=tx)
    assert set(groups) == {("S",)}
    np.testing.assert_allclose(losses, train(mlp(16, 32, 8), x, steps=STEPS, tx=tx), rtol=0.02)
    lowered = nnx.jit(nnx.grad(mean_square)).lower(model, batch_on(mesh, x)).lowered
    assert count_ops(lowered, "all_gather") == count_ops(lowered, "all_gather", "bf16") > 0
    assert count_ops(lowered, "reduce_scatter", "f32") == 4
