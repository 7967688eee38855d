"""Memory that is not needed: gradients of replicas, copies of the batch, transfers of what is in place."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import linen_models
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    MeshOf,
    assert_close,
    assert_spec,
    batch_on,
    both_axis_types,
    gradients,
    linears,
    local_shape,
    make_mesh,
    mean_square,
    mlp,
    rows,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jfsdp
from jfsdp.inspect import Memory
from jfsdp.testing import topology_or_skip

S8: dict[str, int] = {"S": 8}
HSDP: dict[str, int] = {"R": 2, "S": 4}
LAYERS = 6

# --------------------------------------------------------------------------------------------------
# B20: HSDP


@both_axis_types
def test_gradients_are_as_small_as_the_shards_of_their_parameters(mesh_of: MeshOf):
    """B20: R2xS4, 6x Linear(64,64): (16,64) on each device."""
    with mesh_of(**HSDP) as mesh:
        model = jfsdp.shard(linears(LAYERS, 64), mesh, units=nnx.Linear)
        _, grads = gradients(model, batch_on(mesh, rows(64, 64)))
        assert [local_shape(x) for x in jax.tree.leaves(grads)] == [(16, 64)] * LAYERS
        assert_close(grads, gradients(linears(LAYERS, 64), rows(64, 64))[1])


@functools.cache
def memory(target: str, hsdp: bool, finer: bool = False, width: int = 64) -> Memory:
    """Of a step with Adam on 8 devices, `width` rows in all; `finer`: the state over all of them."""
    sizes = HSDP if hsdp else S8
    devices = None if target == "cpu" else topology_or_skip(target)
    types = (AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), types, devices=devices)
    model = jfsdp.init(lambda: linears(LAYERS, width), mesh, units=nnx.Linear)
    tx = optax.adam(1e-3)
    optimizer = jfsdp.init_optimizer(tx, model, shard_over="R" if finer else None)

    @nnx.jit(donate_argnums=(0, 1))
    def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(mean_square)(model, x)
        optimizer.update(model, grads)
        return loss

    batch = NamedSharding(mesh, P(mesh.axis_names))
    x = jax.ShapeDtypeStruct((width, width), jnp.float32, sharding=batch)
    found = jfsdp.inspect(step, model, optimizer, x, compile=True).memory
    assert found is not None
    return found


def assert_hsdp_needs_little_more(target: str, finer: bool, width: int) -> None:
    """A shard is 1/4 of a gradient instead of 1/8: twice those bytes more, before and after the all-reduce.

    Measured (jax 0.12.0.1, 2026-11-30; temporaries on R2xS4 / S8, and with the state over all devices):
    64x64 CPU 1.09 and 1.09, H100 1.10 and 1.12, v5e 1.01 and 0.95;
    512x512 H100 1.16 and 1.10, v5e 0.99 and 0.92.
    """
    fsdp, hsdp = memory(target, False, width=width), memory(target, True, finer, width)
    parameters = LAYERS * width * width
    assert hsdp.parameters == pytest.approx(4 * parameters / 4)
    assert hsdp.temporaries - fsdp.temporaries <= 2 * 4 * parameters * (1 / 4 - 1 / 8)


@pytest.mark.parametrize("finer", [False, True], ids=["as parameters", "over all"])
def test_hsdp_needs_little_more_memory_than_fsdp(finer: bool):
    """B20: without accumulation, with as many rows on each device."""
    assert_hsdp_needs_little_more("cpu", finer, 64)


@pytest.mark.slow
@pytest.mark.parametrize("finer", [False, True], ids=["as parameters", "over all"])
@pytest.mark.parametrize("width", [64, 512])
@pytest.mark.parametrize("target", ["v5e:2x4", "h100:8"])
def test_hsdp_needs_little_more_memory_than_fsdp_on(target: str, width: int, finer: bool):
    """B20: as compiled for devices that are not here."""
    assert_hsdp_needs_little_more(target, finer, width)


@pytest.mark.parametrize("finer, adam", [(False, 8 / 4), (True, 8 / 8)])
def test_the_state_of_hsdp_lies_as_the_parameters_or_over_all_devices(finer: bool, adam: float):
    """B20: bytes of Adam's moments in the arguments of the step, and its counts."""
    parameters = LAYERS * 64 * 64
    assert memory("cpu", True, finer).optimizer == pytest.approx(adam * parameters, abs=8)


# --------------------------------------------------------------------------------------------------
# B21: the batch


def test_the_batch_function_splits_over_both_data_axes():
    """B21: batch (16,4) on R2xS4: local (2,4), spec P(('R','S')); gradients as unsharded."""
    mesh = make_mesh(**HSDP)
    x = jfsdp.shard_batch(np.asarray(rows(16, 4)), mesh)
    assert_spec(x, ("R", "S"))
    assert local_shape(x) == (2, 4)
    model = jfsdp.shard(mlp(4, 32, 8), mesh, units=nnx.Linear)
    assert_close(gradients(model, x), gradients(mlp(4, 32, 8), rows(16, 4)))


@pytest.mark.parametrize("spec", [P(), P("S"), P("R"), P(("R", "S"))], ids=str)
def test_no_device_does_the_work_of_another_wherever_the_batch_lies(spec: P):
    """B21: a batch over one axis or none is split all the same: as many operations as on S8, within 5 %."""

    def operations(sizes: dict[str, int], spec: P) -> float:
        mesh = make_mesh(**sizes)
        model = jfsdp.shard(linears(LAYERS, 64), mesh, units=nnx.Linear)
        x = jax.device_put(rows(64, 64), NamedSharding(mesh, spec))
        step = nnx.jit(nnx.value_and_grad(mean_square))
        return step.lower(model, x).lowered.compile().cost_analysis()["flops"]

    assert operations(HSDP, spec) == pytest.approx(operations(S8, P("S")), rel=0.05)


# --------------------------------------------------------------------------------------------------
# B58: what is in place


def assert_identical(got: Any, before: list[Any]) -> None:
    after = jax.tree.leaves(got)
    assert before
    assert all(x is y for x, y in zip(after, before, strict=True))


def nnx_state(mesh: Any) -> nnx.State:
    model = jfsdp.shard(mlp(16, 32, 10), mesh, units=nnx.Linear)
    return nnx.state((model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)))


def linen_state(mesh: Any) -> Any:
    model: Any = jfsdp.shard(linen_models.MLP(), mesh)
    return jfsdp.init(lambda: linen_models.create(model, rows(16, 16), optax.adam(1e-3)))


@pytest.mark.parametrize("make", [nnx_state, linen_state])
@both_axis_types
def test_a_train_state_put_where_it_lies_keeps_its_arrays(mesh_of: MeshOf, make: Any):
    """B58: twice; every array is the same object."""
    with mesh_of(**HSDP) as mesh:
        state = make(mesh)
        arrays = jax.tree.leaves(state)
        for _ in range(2):
            state = jax.device_put(state, jfsdp.shardings(state))
            assert_identical(state, arrays)


@both_axis_types
def test_shard_keeps_arrays_that_lie_in_place(mesh_of: MeshOf):
    """B58: parameters that were restored to where they belong, say."""
    with mesh_of(**HSDP) as mesh:
        first = jfsdp.shard(mlp(16, 32, 10), mesh, units=nnx.Linear)
        model = mlp(16, 32, 10)
        pairs = zip(*(nnx.to_flat_state(nnx.state(m)) for m in (model, first)), strict=True)
        for (_, variable), (_, laid) in pairs:
            variable.set_raw_value(laid.get_raw_value())
        arrays = jax.tree.leaves(nnx.state(model))
        jfsdp.shard(model, mesh, units=nnx.Linear)
        assert_identical(nnx.state(model), arrays)


@both_axis_types
def test_shard_batch_keeps_a_batch_that_lies_in_place_and_what_is_no_array(mesh_of: MeshOf):
    """B58: the second call; None and empty containers are as they were in the first too."""
    with mesh_of(**HSDP) as mesh:
        given = {"x": rows(16, 4), "scale": 0.5, "mask": None, "more": ()}
        first = jfsdp.shard_batch(given, mesh)
        second = jfsdp.shard_batch(first, mesh)
        assert_identical(second, jax.tree.leaves(first))
        assert second["mask"] is None
        assert second["more"] == ()


def test_unshard_keeps_arrays_that_are_whole():
    """B58: the other direction: whole weights are no copies of whole weights."""
    state = nnx_state(make_mesh(**S8))
    whole = jfsdp.unshard(state)
    assert_identical(jfsdp.unshard(whole), jax.tree.leaves(whole))
    text, number = "name", 3
    kept = jfsdp.unshard({"text": text, "number": number, "none": None})
    assert kept["text"] is text
    assert kept["number"] is number
