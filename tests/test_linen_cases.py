"""The cases of public bugs that tests/test_cases_*.py have for NNX, for Linen."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from helpers import (
    assert_close,
    auto,
    batch_on,
    both_axis_types,
    both_axis_types_and_partitionings,
    both_partitionings,
    every_axis_type,
    explicit_set,
    local_shape,
    make_mesh,
    rows,
)
from linen_models import (
    KEY,
    abstract,
    create,
    fast_compiler,
    filled,
    init,
    mean_square,
)

import jfsdp
import jfsdp.born


@pytest.fixture(scope="module", autouse=True)
def compiler():
    with fast_compiler():
        yield


class Dense4(nn.Module):
    """4 bias-free layers."""

    width: int = 512

    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = nn.Dense(self.width, use_bias=False)(x)
        return x


class Product(nn.Module):
    """x @ w, w of ones."""

    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width, use_bias=False, kernel_init=nn.initializers.ones)(x)


def kernel(tree: Any) -> Any:
    (leaf,) = jax.tree.leaves(tree)
    return leaf


def ones(*shape: int) -> Any:
    """The variables of a Product."""
    return {"params": {"Dense_0": {"kernel": jnp.ones(shape)}}}


# --------------------------------------------------------------------------------------------------
# Initialization


@every_axis_type
def test_init_makes_no_parameter_whole_on_a_device(mesh_of, monkeypatch):
    """B01: 4 bias-free 512x512 layers: 524,320 bytes out, less than 1 MB of temporaries."""
    lowered = []

    def program(*args: Any) -> Any:
        made = original(*args)

        def call(*inputs: Any) -> Any:
            lowered.append(made.lower(*inputs))
            return made(*inputs)

        return call

    original = jfsdp.born.program
    monkeypatch.setattr(jfsdp.born, "program", program)
    jax.config.update("jax_disable_most_optimizations", False)
    with mesh_of(S=8) as mesh:
        model: Any = jfsdp.shard(Dense4(), mesh, units=nn.Dense)
        variables = model.init(KEY(0), jnp.ones((8, 512)))
    (program_of_init,) = lowered
    memory = program_of_init.compile().memory_analysis()
    assert memory.output_size_in_bytes == 524_320
    assert memory.temp_size_in_bytes < 1_000_000
    assert {local_shape(x) for x in jax.tree.leaves(variables)} == {(64, 512)}


@pytest.mark.parametrize(
    "mesh_of, sizes",
    [
        (auto, {"S": 1}),
        (auto, {"R": 2, "S": 4}),
        (explicit_set, {"R": 2, "S": 4}),
    ],
)
def test_initial_values_do_not_depend_on_the_mesh(mesh_of, sizes):
    """B31: MLP 64-496-4, the same key: the same parameters to 1e-6."""
    plain = nn.Sequential([nn.Dense(496), nn.tanh, nn.Dense(4)])
    with mesh_of(**sizes) as mesh:
        variables = init(jfsdp.shard(plain, mesh, units=nn.Dense), rows(8, 64))
    assert_close(variables, init(plain, rows(8, 64)), rtol=0, atol=1e-6)


# --------------------------------------------------------------------------------------------------
# The program


@pytest.mark.parametrize("backward", [False, True])
def test_parameters_are_arguments_of_the_program_not_constants(backward):
    """B10: 4 bias-free 512x512 layers, x (8,512): 526,336 bytes of arguments, a short text."""
    mesh = make_mesh(S=8)
    model: Any = jfsdp.shard(Dense4(), mesh, units=nn.Dense)
    variables, x = filled(abstract(model, rows(8, 512))), batch_on(mesh, rows(8, 512))
    loss = functools.partial(mean_square, model)
    lowered: Any = jax.jit(jax.grad(loss) if backward else model.apply).lower(variables, x)
    assert len(lowered.as_text()) < 50_000
    assert lowered.compile().memory_analysis().argument_size_in_bytes == 526_336


@pytest.mark.parametrize(
    "mesh, dims, text",
    [
        (
            make_mesh(S=8),
            {"shard": "fsdpp"},
            "'fsdpp', which the mesh does not have. Its axes: S=8",
        ),
        (make_mesh(S=8), {"shard": "S", "replicate": "S"}, "names 'S' more than once"),
        (
            jax.sharding.Mesh(np.array(jax.devices()[0]), ()),
            {"shard": "S"},
            "the mesh is empty: it has no axes.",
        ),
    ],
    ids=["unknown", "twice", "empty"],
)
def test_wrong_axes_are_refused_before_anything_runs(mesh, dims, text):
    """B48: the text names the given and the available axes."""
    with pytest.raises(ValueError) as error:
        jfsdp.shard(nn.Dense(8), mesh, dp_mesh_dims=jfsdp.DataParallelMeshDims(**dims))
    assert text in str(error.value)


# --------------------------------------------------------------------------------------------------
# Factors


SHARDED = jfsdp.DataParallelMeshDims(shard="S", replicate="R")
COPIED = jfsdp.DataParallelMeshDims(replicate=("R", "S"))


def mean(model: Any, variables: Any, x: Any) -> Any:
    return jax.jit(jax.value_and_grad(lambda v, x: jnp.mean(model.apply(v, x))))(variables, x)


@pytest.mark.parametrize(
    "sizes, dims, width, expected",
    [
        ({"R": 2, "S": 4}, SHARDED, 4, 0.875),
        ({"R": 8, "S": 1}, SHARDED, 4, 0.875),
        ({"R": 1, "S": 1}, SHARDED, 4, 0.875),
        ({"R": 2, "S": 4}, COPIED, 4, 0.875),
        ({"R": 1, "S": 8}, SHARDED, 8, 0.4375),
        ({"R": 2, "S": 4}, SHARDED, 3, 3.5 / 3),
    ],
    ids=["R2xS4", "R8xS1", "S1", "copies_on_8", "S8", "does_not_divide"],
)
@both_axis_types_and_partitionings
def test_gradients_have_no_factor_of_the_mesh(mesh_of, partitioning, sizes, dims, width, expected):
    """B32: x = 0..7, w of ones (1,4), mean(x @ w): 0.875; (1,8): 0.4375."""
    with mesh_of(**sizes) as mesh:
        settings = {"dp_mesh_dims": dims, "partitioning": partitioning}
        model: Any = jfsdp.shard(Product(width), mesh, **settings)
        x = batch_on(mesh, jnp.arange(8.0)[:, None])
        loss, grads = mean(model, ones(1, width), x)
        assert loss == 3.5
        np.testing.assert_allclose(kernel(grads), np.full((1, width), expected), rtol=1e-6)


@both_axis_types
def test_gradients_of_the_input_have_no_factor_either(mesh_of):
    """B32: d mean(x @ w) / dx = 1/8 everywhere."""
    with mesh_of(R=2, S=4) as mesh:
        model: Any = jfsdp.shard(Product(4), mesh)
        x = batch_on(mesh, jnp.arange(8.0)[:, None])
        grad = jax.jit(jax.grad(lambda x, v: jnp.mean(model.apply(v, x))))
        np.testing.assert_array_equal(grad(x, ones(1, 4)), np.full((8, 1), 0.125))


@both_partitionings
def test_a_gradient_comes_from_the_data_of_all_replicas(partitioning):
    """B33: R2xS4, zeros for replica 0 and ones for replica 1: 0.125, one replica alone has 0.25."""
    mesh = make_mesh(R=2, S=4)
    model: Any = jfsdp.shard(Product(4), mesh, partitioning=partitioning)
    x = batch_on(mesh, jnp.repeat(jnp.array([0.0, 1.0]), 4)[:, None] * jnp.ones((1, 4)))
    _, grads = mean(model, ones(4, 4), x)
    np.testing.assert_array_equal(kernel(grads), np.full((4, 4), 0.125))


def test_replicas_hold_the_same_bits_after_training():
    """B33: after 5 adam steps; each replica saw other data."""
    mesh = make_mesh(R=2, S=4)
    model: Any = jfsdp.shard(Product(4), mesh)
    state = jfsdp.init(lambda: create(model, rows(8, 4), optax.adam(1e-2)))

    @jax.jit
    def step(state: Any, x: Any) -> Any:
        loss = lambda params: mean_square(model, {"params": params}, x)  # noqa: E731
        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    for seed in range(5):
        state = step(state, batch_on(mesh, rows(8, 4, seed)))
    adam = state.opt_state[0]
    for array in jax.tree.leaves((state.params, adam.mu, adam.nu)):
        copies: dict[str, list[np.ndarray]] = {}
        for shard in array.addressable_shards:
            copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        for values in copies.values():
            assert len(values) == 2
            assert np.array_equal(values[0], values[1])
