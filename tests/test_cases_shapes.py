"""Shapes, batches and meshes that do not fit, and every way to jit a step."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    AUTO,
    MeshOf,
    assert_close,
    assert_spec,
    auto,
    batch_on,
    both_axis_types,
    both_axis_types_and_partitionings,
    both_partitionings,
    compilations,
    explicit_set,
    gradients,
    leaves,
    local_shape,
    make_mesh,
    mean_square,
    mlp,
    rows,
    train,
)
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jfsdp

# --------------------------------------------------------------------------------------------------
# Parameters


class Odd(nnx.Module):
    """Parameters (10,8), (5,), (7,3) and (16,), of which two do not divide by 8."""

    def __init__(self):
        keys = iter(jax.random.split(jax.random.key(0), 4))
        self.a = nnx.Param(jax.random.normal(next(keys), (10, 8)))
        self.b = nnx.Param(jax.random.normal(next(keys), (5,)))
        self.c = nnx.Param(jax.random.normal(next(keys), (7, 3)))
        self.d = nnx.Param(jax.random.normal(next(keys), (16,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x @ self.a[...]
        z = jnp.tanh(y[:, :7] @ self.c[...])
        return jnp.concatenate([z, y[:, :5] + self.b[...][None], y * self.d[:8][None]], axis=1)


@functools.cache
def unsharded() -> tuple[list[float], dict[str, Any]]:
    model = Odd()
    return train(model, rows(8, 10)), leaves(model)


@both_axis_types_and_partitionings
def test_what_does_not_divide_is_replicated_and_trained_exactly(mesh_of: MeshOf, partitioning: str):
    """B37: (10,8), (5,), (7,3), (16,) on S8: P(None,'S'), P(), P(), P('S'); 3 steps as unsharded."""
    expected_losses, expected = unsharded()
    with mesh_of(S=8) as mesh:
        model = jfsdp.shard(Odd(), mesh, partitioning=partitioning)
        assert_spec(model.a, None, "S")
        assert_spec(model.b)
        assert_spec(model.c)
        assert_spec(model.d, "S")
        before = jfsdp.shardings(nnx.state(model))
        losses = train(model, batch_on(mesh, rows(8, 10)))
        assert jfsdp.shardings(nnx.state(model)) == before
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert_close(leaves(model), expected, rtol=1e-5, atol=1e-6)


def test_the_plan_tells_which_parameters_do_not_divide():
    """B37: the report has the two, each with the sizes that do not divide and by what."""
    plan = jfsdp.plan(jfsdp.shard(Odd(), make_mesh(S=8)))
    assert [row.path for row in plan.replicated] == ["b", "c"]
    assert all("divides by 8" in row.reason for row in plan.replicated)


@pytest.mark.parametrize("path, dim", [("a", 0), ("b", 0), ("c", -1)])
def test_a_dimension_that_the_user_names_must_divide(path: str, dim: int):
    """B37, strict: `shard_placement_fn` names one that does not: the path, the axis and 8."""

    def choose(name: str, param: Any) -> int | None:
        return dim if name == path else None

    model = Odd()
    with pytest.raises(ValueError, match=rf"^{path}: shard_placement_fn .*S=8.* divide by 8"):
        jfsdp.shard(model, make_mesh(S=8), shard_placement_fn=choose)
    assert type(model) is Odd


class Scaled(nnx.Module):
    """s * (x @ w) + b with s of rank 0, b (3,) and w (16,3)."""

    def __init__(self):
        self.s = nnx.Param(jnp.float32(2))
        self.w = nnx.Param(jax.random.normal(jax.random.key(0), (16, 3)))
        self.b = nnx.Param(jnp.ones(3))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.s[...] * (x @ self.w[...]) + self.b[...][None]


@pytest.mark.parametrize(
    "mesh_of, sizes", [(auto, {"S": 8}), (auto, {"R": 2, "S": 4}), (explicit_set, {"R": 2, "S": 4})]
)
@both_partitionings
def test_tiny_parameters_are_replicated_and_have_exact_gradients(
    mesh_of: MeshOf, partitioning: str, sizes: Any
):
    """B39: s of rank 0 and b (3,) have P(), w (16,3) P('S')."""
    with mesh_of(**sizes) as mesh:
        model = jfsdp.shard(Scaled(), mesh, partitioning=partitioning)
        assert_spec(model.s)
        assert_spec(model.b)
        assert_spec(model.w, "S")
        got, expected = (
            gradients(model, batch_on(mesh, rows(8, 16))),
            gradients(Scaled(), rows(8, 16)),
        )
        assert_close(got, expected, rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------------------------------
# Parameters that another axis holds


class Frozen(nnx.Param):
    """A kind of parameter of the user's own."""


class Tensor(nnx.Module):
    """x @ kernel, kernel (16,10) laid by the user."""

    def __init__(self, mesh: Mesh, *spec: Any, width: int = 10):
        kernel = jax.random.normal(jax.random.key(0), (16, width))
        self.kernel = Frozen(jax.device_put(kernel, NamedSharding(mesh, P(*spec))), tag="mine")

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.kernel[...]


SHARD_S = jfsdp.DataParallelMeshDims(shard="S")


@both_axis_types_and_partitionings
def test_the_shard_axis_is_added_to_the_parameters_own_spec(mesh_of: MeshOf, partitioning: str):
    """B42: (16,10), P(None,'T') on S4xT2: P('S','T'), local (4,5), whole exactly (16,10) inside."""
    with mesh_of(S=4, T=2) as mesh:
        model = Tensor(mesh, None, "T")
        whole = np.asarray(model.kernel[...])
        jfsdp.shard(model, mesh, dp_mesh_dims=SHARD_S, partitioning=partitioning)
        assert_spec(model.kernel, "S", "T")
        assert local_shape(model.kernel[...]) == (4, 5)
        eye = jax.device_put(jnp.eye(16), NamedSharding(mesh, P("S")))
        y = nnx.jit(lambda model, x: model(x))(model, eye)
        np.testing.assert_array_equal(y, whole)
        assert type(model.kernel) is Frozen
        assert model.kernel.get_metadata("tag") == "mine"


@both_axis_types
def test_gradients_with_a_tensor_axis_are_the_unsharded_ones(mesh_of: MeshOf):
    """B42: and they lie as the parameter."""
    with mesh_of(S=4, T=2) as mesh:
        model = jfsdp.shard(Tensor(mesh, None, "T"), mesh, dp_mesh_dims=SHARD_S)
        loss, grads = gradients(model, jax.device_put(rows(8, 16), NamedSharding(mesh, P("S"))))
        assert local_shape(grads.kernel[...]) == (4, 5)
    one = make_mesh(S=1, T=1)
    assert_close((loss, grads), gradients(Tensor(one, None, "T"), rows(8, 16)))


def test_a_spec_that_uses_the_shard_axis_already_is_obeyed_or_contradicted_aloud():
    """B42: (16,8), P(None,'S'): kept so by the rule; asked for dimension 0: an error."""
    mesh = make_mesh(S=4, T=2)
    with pytest.raises(ValueError, match=r"^kernel: .*dimension 0.*\(None, 'S'\)"):
        jfsdp.shard(
            Tensor(mesh, None, "S", width=8),
            mesh,
            dp_mesh_dims=SHARD_S,
            shard_placement_fn=lambda path, param: 0,
        )
    model = jfsdp.shard(Tensor(mesh, None, "S", width=8), mesh, dp_mesh_dims=SHARD_S)
    assert_spec(model.kernel, None, "S")


def test_a_spec_over_a_replicate_axis_is_refused():
    """B42: P('R') on R2xS4: the axis cannot hold copies and parts."""
    mesh = make_mesh(R=2, S=4)
    with pytest.raises(ValueError, match=r"^kernel: .*'R'.*holds copies"):
        jfsdp.shard(Tensor(mesh, "R"), mesh)


# --------------------------------------------------------------------------------------------------
# Batches


@both_axis_types
def test_a_training_call_with_too_small_a_batch_raises(mesh_of: MeshOf):
    """B44: batch 1 on S8; the Linen part (an init batch of 1) has no counterpart in NNX."""
    message = r"(?s)the batch is 1, .*\b8 data-parallel devices.*\(1, 16\).*Use a batch of 8"
    with mesh_of(S=8) as mesh:
        model = jfsdp.shard(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), mesh)
        with pytest.raises(ValueError, match=message):
            nnx.jit(nnx.grad(mean_square))(model, jnp.ones((1, 16)))


# --------------------------------------------------------------------------------------------------
# Meshes


@both_partitionings
def test_both_kinds_of_axes_give_the_same_numbers(partitioning: str):
    """B46: MLP 10-16-8, whose first kernel (10,16) divides on dimension 1 only."""
    expected = gradients(mlp(10, 16, 8), rows(8, 10))
    bare = jax.make_mesh((8,), ("S",))
    placed = batch_on(bare, rows(8, 10))
    for mesh, x in [(make_mesh(AUTO, S=8), rows(8, 10)), (bare, rows(8, 10)), (bare, placed)]:
        model = jfsdp.shard(mlp(10, 16, 8), mesh, units=nnx.Linear, partitioning=partitioning)
        assert_close(gradients(model, x), expected)
    with jax.set_mesh(bare):
        model = jfsdp.shard(mlp(10, 16, 8), units=nnx.Linear, partitioning=partitioning)
        assert_close(gradients(model, placed), expected)


@pytest.mark.parametrize(
    "mesh_of, partitioning, replicate",
    [
        (explicit_set, "manual", None),
        (explicit_set, "manual", "C"),
        (explicit_set, "auto", None),
        (auto, "manual", "C"),
    ],
)
def test_an_axis_of_size_1_is_named_nowhere(mesh_of: MeshOf, partitioning: str, replicate: Any):
    """B47: S8xC1: the step runs, and neither parameters, moments nor results name C."""
    dims = jfsdp.DataParallelMeshDims(shard="S", replicate=replicate)
    with mesh_of(S=8, C=1) as mesh:
        model = jfsdp.shard(mlp(16, 8, 8), mesh, dp_mesh_dims=dims, partitioning=partitioning)
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

        @nnx.jit
        def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
            optimizer.update(model, nnx.grad(mean_square)(model, x))
            return model(x)

        x = jax.device_put(rows(8, 16), NamedSharding(mesh, P("S")))
        for _ in range(2):
            y = step(model, optimizer, x)
            for array in [y, *jax.tree.leaves((nnx.state(model), nnx.state(optimizer)))]:
                assert "C" not in jax.tree.leaves(tuple(array.sharding.spec))
        assert [row for row in jfsdp.plan(model).rows if "C" in str(row.spec)] == []


@pytest.mark.parametrize(
    "mesh, dims, message",
    [
        ({"fsdp": 8}, {"shard": "fsdpp"}, r"shard names the axis 'fsdpp'.*fsdp=8"),
        (
            {"R": 2, "S": 4},
            {"shard": "S", "replicate": "r"},
            r"replicate names the axis 'r'.*R=2, S=4",
        ),
        ({}, {"shard": "fsdp"}, r"mesh is empty"),
        ({"a": 2, "b": 2, "c": 2}, None, r"a=2, b=2, c=2.*dp_mesh_dims"),
    ],
    ids=["shard", "replicate", "empty", "three"],
)
@pytest.mark.parametrize("kind", ["devices", "abstract"])
def test_a_wrong_mesh_raises_before_anything_compiles(
    mesh: Any, dims: Any, message: str, kind: str
):
    """B48: the error names the axis that was given and the axes there are."""
    if kind == "devices":
        mesh = make_mesh(**mesh) if mesh else Mesh(np.array(jax.devices()[0]), ())
    else:
        mesh = AbstractMesh(tuple(mesh.values()), tuple(mesh))
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    dims = jfsdp.DataParallelMeshDims(**dims) if dims else None
    with compilations() as compiled, pytest.raises(ValueError, match=message):
        jfsdp.shard(model, mesh, dp_mesh_dims=dims)
    assert not compiled
    assert type(model) is nnx.Linear


def test_an_axis_both_sharded_and_replicated_raises():
    """B48: shard == replicate."""
    with pytest.raises(ValueError, match=r"'fsdp' more than once"):
        jfsdp.DataParallelMeshDims(shard="fsdp", replicate="fsdp")


def test_a_parameters_own_spec_over_an_unknown_axis_raises():
    """B48: an annotation that names an axis the mesh lacks."""
    metadata = {"out_sharding": ("fsdpp", None), "eager_sharding": False}
    model = nnx.Linear(16, 8, kernel_metadata=metadata, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"^kernel: .*'fsdpp'.*fsdp=8"):
        jfsdp.shard(model, make_mesh(fsdp=8))
