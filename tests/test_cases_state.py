"""State that must be sharded, and must stay so: parameters, moments, counters, keys."""

from __future__ import annotations

import contextlib
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from helpers import (
    MeshOf,
    assert_close,
    assert_spec,
    auto,
    batch_on,
    both_axis_types,
    compilations,
    every_axis_type,
    explicit,
    explicit_set,
    gradients,
    linears,
    local_bytes,
    local_shape,
    make_mesh,
    mean_square,
    rows,
    train,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jfsdp
import jfsdp.nnx
from jfsdp.nnx_init import init_program

# --------------------------------------------------------------------------------------------------
# Initialization


@every_axis_type
def test_init_makes_no_parameter_whole_on_a_device(mesh_of: MeshOf):
    """B01: 4 bias-free 512x512 layers: 524,320 bytes out, less than 1 MB of temporaries."""
    with mesh_of(S=8) as mesh:
        program, abstract = init_program(
            lambda: linears(4, 512), lambda model: jfsdp.shard(model, mesh, units=nnx.Linear)
        )
        memory = program.lower().compile().memory_analysis()
    assert memory.output_size_in_bytes == 524_320
    assert memory.temp_size_in_bytes < 1_000_000
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(nnx.state(abstract)))


@every_axis_type
def test_init_gives_every_device_its_eighth(mesh_of: MeshOf):
    """B01: every kernel's local shard is 64x512."""
    with mesh_of(S=8) as mesh:
        model = jfsdp.init(lambda: linears(4, 512), mesh, units=nnx.Linear)
    kernels = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert [local_shape(kernel) for kernel in kernels] == [(64, 512)] * 4
    assert_close(model, linears(4, 512))


# --------------------------------------------------------------------------------------------------
# Optimizer state


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jitted"])
@both_axis_types
def test_moments_lie_as_their_parameter_and_the_count_on_the_mesh(mesh_of: MeshOf, jitted: bool):
    """B02: w (16,8), adam; the NNX part, where nnx.Optimizer calls `tx.init`."""
    with mesh_of(S=8) as mesh:
        model = jfsdp.shard(nnx.Linear(16, 8, use_bias=False, rngs=nnx.Rngs(0)), mesh)

        def make(model: nnx.Module) -> nnx.Optimizer:
            return nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

        optimizer = (nnx.jit(make) if jitted else make)(model)
        adam = optimizer.opt_state[0]
        for moment in (adam.mu.kernel, adam.nu.kernel):
            assert moment.sharding == model.kernel.sharding
            assert local_shape(moment[...]) == (2, 8)
        assert adam.count.sharding == NamedSharding(mesh, P())
        assert optimizer.step.sharding == NamedSharding(mesh, P())


# flax's own spellings, of which it turns the older two into the first with a warning.
SPELLINGS = ("out_sharding", "sharding", "sharding_names")


class Annotated(nnx.Module):
    """One (8,8) parameter for every spelling of the annotation."""

    def __init__(self, spec: tuple[Any, Any], **metadata: Any):
        for name in SPELLINGS:
            old = name != "out_sharding"
            with pytest.warns(DeprecationWarning) if old else contextlib.nullcontext():
                param = nnx.Param(jnp.ones((8, 8)), **{name: spec}, **metadata)
            setattr(self, name, param)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.out_sharding + x @ self.sharding + x @ self.sharding_names


@pytest.mark.parametrize("eager", [False, True], ids=["annotated", "placed_by_flax"])
@pytest.mark.parametrize(
    "spec, local", [(("fsdp", None), (1, 8)), ((None, "fsdp"), (8, 1))], ids=["rows", "columns"]
)
def test_every_spelling_of_an_annotation_is_read(spec: Any, local: tuple[int, int], eager: bool):
    """B04: all three of ('fsdp', None) have local shard (1,8); of (None, 'fsdp'), (8,1)."""
    mesh = make_mesh(fsdp=8)
    with jax.set_mesh(mesh):
        model = jfsdp.shard(Annotated(spec, eager_sharding=eager), mesh)
    assert [local_shape(x) for x in jax.tree.leaves(nnx.state(model))] == [local] * 3


def test_an_unknown_spelling_of_an_annotation_raises():
    """B04: an unknown spelling is an error that names the path, not replication."""
    model = nnx.Linear(8, 8, kernel_metadata={"sharding_axes": ("fsdp", None)}, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"kernel: .*sharding_axes"):
        jfsdp.shard(model, make_mesh(fsdp=8))


class Stack(nnx.Module):
    """`count` stacked Linear(16,16), run one after the other by a scan."""

    def __init__(self, count: int):
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs: nnx.Rngs) -> nnx.Linear:
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("a", "b"))
            return nnx.Linear(16, 16, use_bias=False, kernel_init=init, rngs=rngs)

        self.layers = make(nnx.Rngs(0).split(count))

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer: nnx.Linear, x: jax.Array) -> jax.Array:
            return layer(x)

        return run(self.layers, x)


@pytest.mark.parametrize(
    "count, shard", [(1, ("a", "b")), (4, ("a", "b")), (4, "a"), (4, "b")], ids=str
)
def test_moments_of_stacked_layers_follow_the_array_not_its_stale_annotation(
    count: int, shard: Any
):
    """B05: 4 (and 1) vmapped (16,16), annotated ('a','b') on a=2 x b=4: P(None,'a','b') for both."""
    mesh = make_mesh(a=2, b=4)
    with jax.set_mesh(mesh):
        with nnx.use_eager_sharding(count > 1):
            model = Stack(count)
        kernel = model.layers.kernel
        if count == 1:  # flax itself cannot lay one stacked layer by that annotation
            kernel.set_value(jax.device_put(kernel[...], NamedSharding(mesh, P(None, "a", "b"))))
        dims = jfsdp.DataParallelMeshDims(shard=shard)
        jfsdp.shard(model, mesh, dp_mesh_dims=dims, stacked_axis=0)
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    adam = optimizer.opt_state[0]
    for array in (kernel, adam.mu.layers.kernel, adam.nu.layers.kernel):
        assert_spec(array, None, "a", "b")
        assert local_shape(array[...]) == (count, 8, 4)


# --------------------------------------------------------------------------------------------------
# The program


@pytest.mark.parametrize("jit", [jax.jit, nnx.jit], ids=["jax.jit", "nnx.jit"])
def test_parameters_are_arguments_of_the_program_not_constants(jit: Any):
    """B10: 4 bias-free 512x512 layers, x (8,512): 526,336 bytes of arguments, a short text."""
    mesh = make_mesh(S=8)
    model = jfsdp.shard(linears(4, 512), mesh, units=nnx.Linear)
    x = batch_on(mesh, jnp.ones((8, 512)))
    lowered = jit(lambda model, x: model(x)).lower(model, x)
    lowered = getattr(lowered, "lowered", lowered)
    assert len(lowered.as_text()) < 50_000
    assert lowered.compile().memory_analysis().argument_size_in_bytes == 526_336


def test_the_backward_pass_has_no_constants_either():
    """B10: the same for the gradient's program."""
    mesh = make_mesh(S=8)
    model = jfsdp.shard(linears(4, 512), mesh, units=nnx.Linear)
    x = batch_on(mesh, jnp.ones((8, 512)))
    lowered = nnx.jit(nnx.value_and_grad(mean_square)).lower(model, x)
    assert len(lowered.lowered.as_text()) < 50_000


class Noisy(nnx.Module):
    """w (16,8) and a dropout, whose key and count are state."""

    def __init__(self):
        self.linear = nnx.Linear(16, 8, use_bias=False, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.linear(x))


@pytest.mark.parametrize(
    "mesh_of, partitioning",
    [(auto, "manual"), (auto, "auto"), (explicit, "manual"), (explicit_set, "manual")],
)
def test_the_train_state_is_a_fixed_point_of_the_step(mesh_of: MeshOf, partitioning: str):
    """B13: w (16,8), adam, dropout key: 4 steps compile once and change no sharding."""
    with mesh_of(S=8) as mesh:
        model = jfsdp.shard(Noisy(), mesh, partitioning=partitioning)
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

        @nnx.jit
        def unique_step(model: nnx.Module, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
            loss, grads = nnx.value_and_grad(mean_square)(model, x)
            optimizer.update(model, grads)
            return loss

        before = jfsdp.shardings(nnx.state((model, optimizer)))
        x = batch_on(mesh, rows(8, 16))
        with compilations() as compiled:
            for _ in range(4):
                unique_step(model, optimizer, x)
        assert compiled["unique_step"] == 1
        assert jfsdp.shardings(nnx.state((model, optimizer))) == before


# --------------------------------------------------------------------------------------------------
# What is not sharded


def test_parameters_stay_sharded_over_steps():
    """B14: Linear(16,8) after 3 steps: the devices hold each byte once, nothing is replicated."""
    mesh = make_mesh(S=8)
    model = jfsdp.shard(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), mesh)
    train(model, batch_on(mesh, rows(8, 16)), steps=3, tx=optax.adam(1e-3))
    assert_spec(model.kernel, "S")
    for param in (model.kernel, model.bias):
        assert local_bytes(param[...]) == param.nbytes
    assert jfsdp.plan(model).replicated == ()


def test_the_plan_lists_what_is_replicated_and_why():
    """B14: Linear(16,3): the bias (3,) does not divide by 8, so all 8 devices hold it whole."""
    model = jfsdp.shard(nnx.Linear(16, 3, rngs=nnx.Rngs(0)), make_mesh(S=8))
    (row,) = jfsdp.plan(model).replicated
    assert row.path == "bias"
    assert re.search(r"\b3\b.*\b8\b", row.reason)
    assert row.bytes_per_device == row.bytes == 12
    assert local_bytes(model.bias[...]) == 8 * 12
    assert str(jfsdp.plan(model)).count(row.reason) == 1


def test_gradients_lie_as_their_parameters():
    """B14: no gradient is whole on a device."""
    mesh = make_mesh(S=8)
    model = jfsdp.shard(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), mesh)
    _, grads = gradients(model, batch_on(mesh, rows(8, 16)))
    for name, grad in grads.items():
        assert math.prod(local_shape(grad[...])) * 8 == grad.size, name
