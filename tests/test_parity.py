"""A sharded model trains as the same model unsharded: loss, every gradient, parameters, state."""

from __future__ import annotations

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from models import CASES

import jfsdp

MESHES = {
    "S8": ((8,), ("shard",), None),
    "R2xS4": ((2, 4), ("replica", "shard"), None),
    "R8": ((8,), ("replica",), jfsdp.DataParallelMeshDims(replicate="replica")),
    "S1": ((1,), ("shard",), None),
    "S4xT2": ((4, 2), ("shard", "tensor"), jfsdp.DataParallelMeshDims(shard="shard")),
    "S2xS4": ((2, 4), ("outer", "inner"), jfsdp.DataParallelMeshDims(shard=("outer", "inner"))),
}
STEPS = 10
# A gradient that is zero in exact arithmetic (a bias before BatchNorm, the key bias of attention) is
# rounding noise, which AdamW with a tiny eps turns into a full step of either sign.
OPTIMIZER = optax.adamw(1e-3, eps=1e-3)
# Explicit axes are used as Auto ones unless the mesh is set with jax.set_mesh.
AXES = ("auto", "explicit", "explicit_set")
QUICK = {("S8", "auto"), ("R2xS4", "explicit_set")}


def mesh_and_dims(name: str, axes_are: str):
    """The mesh of that name over the first devices, and its data-parallel axes."""
    shape, axes, dims = MESHES[name]
    axis_type = AxisType.Auto if axes_are == "auto" else AxisType.Explicit
    devices = jax.devices()[: math.prod(shape)]
    mesh = jax.make_mesh(shape, axes, devices=devices, axis_types=(axis_type,) * len(axes))
    return mesh, dims


def loss_fn(model, batch):
    """Neither linear nor symmetric in the outputs."""
    return jnp.mean(jnp.sin(model(batch).astype(jnp.float32)) ** 2)


def train(model, batch):
    """Losses of 10 steps, the first step's gradients, the state afterwards."""

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss, grads

    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    losses, first = [], None
    for _ in range(STEPS):
        loss, grads = step(model, optimizer, batch)
        first = first or arrays(grads)
        losses.append(float(loss))
    return losses, first, arrays(nnx.state(model))


def arrays(state) -> dict[str, np.ndarray]:
    """Every numeric leaf by path."""
    flat = {".".join(map(str, path)): v.get_raw_value() for path, v in nnx.to_flat_state(state)}
    return {k: np.asarray(v) for k, v in flat.items() if jnp.issubdtype(v.dtype, np.number)}


@functools.cache
def reference(name: str):
    """The same training, unsharded."""
    return train(CASES[name].make(), CASES[name].batch)


def combinations():
    """Every mesh, axis type and model; the quick part has two of the meshes."""
    for mesh in MESHES:
        for axes in AXES:
            for case in CASES:
                marks = () if (mesh, axes) in QUICK else (pytest.mark.slow,)
                yield pytest.param(mesh, axes, case, marks=marks, id=f"{mesh}-{axes}-{case}")


@pytest.mark.parametrize(("mesh", "axes", "case"), list(combinations()))
def test_training_equals_the_unsharded_model(mesh, axes, case):
    mesh, dims = mesh_and_dims(mesh, axes)
    expected_losses, expected_grads, expected_state = reference(case)
    with jax.set_mesh(mesh) if axes == "explicit_set" else contextlib.nullcontext():
        model = CASES[case].sharded(mesh, dp_mesh_dims=dims)
        losses, grads, state = train(model, CASES[case].batch)
    for name, expected in expected_grads.items():
        np.testing.assert_allclose(grads[name], expected, rtol=0, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(losses[0], expected_losses[0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=1e-5)
    for name, expected in expected_state.items():
        np.testing.assert_allclose(state[name], expected, rtol=0, atol=1e-5, err_msg=name)
