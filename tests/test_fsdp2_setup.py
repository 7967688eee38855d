"""Initialization, and changes after `shard`, as in PyTorch's own FSDP2 tests: see FSDP2_CONFORMANCE.md."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import (
    assert_close,
    assert_spec,
    batch_on,
    count_ops,
    gradients,
    leaves,
    linears,
    local_shape,
    make_mesh,
    mean_square,
    mlp,
    rows,
    train,
)
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import Stack

import jfsdp

S8: dict[str, int] = {"S": 8}
HSDP: dict[str, int] = {"R": 2, "S": 4}
both_meshes = pytest.mark.parametrize("sizes", [S8, HSDP], ids=["S8", "R2xS4"])

# --------------------------------------------------------------------------------------------------
# Without arrays first


@pytest.mark.parametrize("width", [8, 3, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@both_meshes
def test_an_abstract_model_has_the_shapes_and_places_of_the_real_one(
    sizes: Any, dtype: str, width: int
):
    """Widths that divide, that do not, and 1; the values are those of the unsharded initialization."""

    def make() -> nnx.Module:
        return linears(2, width, use_bias=True, param_dtype=jnp.dtype(dtype))

    mesh = make_mesh(**sizes)
    described, real = (jfsdp.init(make, mesh, units=nnx.Linear, abstract=a) for a in (True, False))
    expected = leaves(real)
    for path, leaf in leaves(described).items():
        assert isinstance(leaf, jax.ShapeDtypeStruct)
        assert (leaf.shape, leaf.dtype) == (expected[path].shape, dtype), path
        assert leaf.sharding == expected[path].sharding, path
    assert_close(real, make())
    shards = sizes["S"] if width == 8 else 1
    assert local_shape(real.layers[0].kernel[...]) == (width // shards, width)


def test_a_model_without_arrays_is_not_run():
    model = jfsdp.init(lambda: mlp(16, 8), make_mesh(**S8), abstract=True)
    with pytest.raises(TypeError, match="ShapeDtypeStruct"):
        model(rows(8, 16))


@both_meshes
def test_whole_weights_of_the_host_become_the_shards_of_an_abstract_model(sizes: Any):
    """A full state dict of numpy arrays: each device is sent its part, and the model computes with it."""
    mesh, plain = make_mesh(**sizes), mlp(16, 32, 10)
    saved = jax.tree.map(np.asarray, nnx.as_pure(nnx.state(plain)))
    model = jfsdp.init(lambda: mlp(16, 32, 10), mesh, units=nnx.Linear, abstract=True)
    places = nnx.as_pure(jax.tree.map(lambda x: x.sharding, nnx.state(model)))
    nnx.update(model, jax.device_put(saved, places))
    assert_spec(model.layers[0].kernel, None, "S")
    assert_close(gradients(model, batch_on(mesh, rows(16, 16))), gradients(plain, rows(16, 16)))


# --------------------------------------------------------------------------------------------------
# Changes after `shard`


def test_a_parameter_that_is_replaced_after_shard_counts_and_lies_where_it_did():
    mesh = make_mesh(**S8)
    model, plain = jfsdp.shard(mlp(16, 32, 8), mesh, units=nnx.Linear), mlp(16, 32, 8)
    for one in (model, plain):
        one.layers[0].kernel[...] = jnp.full((16, 32), 0.1)
    assert_spec(model.layers[0].kernel, None, "S")
    assert_close(gradients(model, batch_on(mesh, rows(8, 16))), gradients(plain, rows(8, 16)))


def cast(model: Any, dtype: str) -> None:
    nnx.update(model, jax.tree.map(lambda x: x.astype(dtype), nnx.state(model)))


def test_a_model_in_float64_after_shard_computes_and_reduces_in_it():
    with jax.enable_x64():
        mesh = make_mesh(**S8)
        model, plain = jfsdp.shard(linears(2, 16), mesh, units=nnx.Linear), linears(2, 16)
        for one in (model, plain):
            cast(one, "float64")
        x = np.asarray(rows(8, 16), "float64")
        grad = nnx.jit(nnx.grad(lambda model, x: jnp.mean(model(x) ** 2)))
        got, expected = grad(model, batch_on(mesh, x)), grad(plain, x)
        assert_close(nnx.as_pure(got), nnx.as_pure(expected), rtol=1e-14, atol=1e-16)
        lowered = grad.lower(model, batch_on(mesh, x)).lowered
        assert count_ops(lowered, "all_gather") == count_ops(lowered, "all_gather", "f64") == 3
        assert count_ops(lowered, "reduce_scatter", "f64") == 2


@pytest.mark.parametrize("reduce_dtype, wire", [("bfloat16", "bf16"), (None, "f32")])
def test_a_model_in_float32_after_shard_keeps_a_stated_reduce_dtype(reduce_dtype: Any, wire: str):
    """It was bfloat16; what is not stated follows the parameter."""
    mesh = make_mesh(**S8)
    policy = jfsdp.MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    model = linears(2, 16, param_dtype=jnp.bfloat16)
    jfsdp.shard(model, mesh, units=nnx.Linear, mp_policy=policy)
    cast(model, "float32")
    lowered = nnx.jit(nnx.grad(mean_square)).lower(model, batch_on(mesh, rows(8, 16))).lowered
    assert count_ops(lowered, "all_gather", "f32") == 3
    assert count_ops(lowered, "reduce_scatter", wire) == count_ops(lowered, "reduce_scatter") == 2


@pytest.mark.parametrize("before, after", [(True, False), (False, True), (None, False)])
def test_the_setting_of_a_copy_may_be_another(before: Any, after: bool):
    """FSDP2's set_reshard_after_forward: shard a plain copy again; the first model stays as it was."""
    mesh = make_mesh(**S8)
    model = jfsdp.shard(
        Stack(4, 16, nnx.Rngs(0)), mesh, units="blocks.*", reshard_after_forward=before
    )
    other = jfsdp.shard(jfsdp.unshard(model), mesh, units="blocks.*", reshard_after_forward=after)
    x = batch_on(mesh, rows(8, 16))
    for one, reshard in ((model, before), (other, after), (model, before)):
        lowered = nnx.jit(nnx.grad(mean_square)).lower(one, x).lowered
        assert count_ops(lowered, "all_gather") == (4 if reshard is False else 7)


def test_a_setting_may_be_of_some_units_only():
    """Without recursion: two of four blocks are kept."""
    mesh, model = make_mesh(**S8), Stack(4, 16, nnx.Rngs(0))
    for number, block in enumerate(model.blocks):
        jfsdp.shard(block, mesh, reshard_after_forward=number < 2)
    jfsdp.shard(model, mesh)
    lowered = nnx.jit(nnx.grad(mean_square)).lower(model, batch_on(mesh, rows(8, 16))).lowered
    assert count_ops(lowered, "all_gather") == 4 + 1


class Activation(nnx.Module):
    """No parameters."""

    def __call__(self, x):
        return jnp.tanh(x)


def test_a_unit_without_parameters_costs_nothing():
    mesh = make_mesh(**S8)
    make = lambda: nnx.Sequential(Activation(), nnx.Linear(16, 16, rngs=nnx.Rngs(0)))  # noqa: E731
    model = make()
    jfsdp.shard(model.layers[0], mesh)
    jfsdp.shard(model, mesh)
    x = batch_on(mesh, rows(8, 16))
    assert_close(gradients(model, x), gradients(make(), rows(8, 16)))
    assert count_ops(nnx.jit(nnx.grad(mean_square)).lower(model, x).lowered, "all_gather") == 2


def test_parameters_that_lie_on_another_mesh_are_laid_on_the_one_that_is_given():
    """The same devices in another order."""
    mesh, model = make_mesh(**S8), mlp(16, 32, 8)
    other = Mesh(jax.devices()[::-1], ("S",))
    kernel = model.layers[0].kernel
    kernel.set_raw_value(jax.device_put(kernel.get_raw_value(), NamedSharding(other, P("S"))))
    jfsdp.shard(model, mesh, units=nnx.Linear)
    assert all(x.sharding.mesh == mesh for x in jax.tree.leaves(nnx.state(model)))
    losses = train(model, batch_on(mesh, rows(8, 16)))
    np.testing.assert_allclose(losses, train(mlp(16, 32, 8), rows(8, 16)), rtol=1e-6)
