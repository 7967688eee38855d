"""What mixed precision casts, and what it must leave alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from helpers import (
    MeshOf,
    assert_close,
    assert_spec,
    batch_on,
    both_axis_types,
    both_axis_types_and_partitionings,
    both_partitionings,
    count_ops,
    leaves,
    local_shape,
    make_mesh,
    rows,
)
from jax.sharding import PartitionSpec as P

import jfsdp

BF16 = jnp.dtype("bfloat16")


# --------------------------------------------------------------------------------------------------
# Inputs


class Rotary(nnx.Module):
    """Notes the dtype of everything it is given and returns the token ids it sees."""

    def __init__(self, seen: dict[str, Any]):
        self.w = nnx.Param(jnp.ones((8, 8)))
        self.note = nnx.static(seen.update)

    def __call__(
        self, x: jax.Array, ids: jax.Array, cos: jax.Array, mask: jax.Array, *, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        self.note(
            {"x": x.dtype, "ids": ids.dtype, "cos": cos.dtype, "mask": mask.dtype, "key": key.dtype}
        )
        return jnp.where(mask[:, None], x @ self.w[...] * cos, 0), ids, cos


POSITIONS = np.arange(8184, 8192)


def call_rotary(mesh: Any, partitioning: str, **policy: Any) -> tuple[dict[str, Any], Any]:
    seen: dict[str, Any] = {}
    policy = jfsdp.MixedPrecisionPolicy(param_dtype="bfloat16", **policy)
    model = jfsdp.shard(Rotary(seen), mesh, mp_policy=policy, partitioning=partitioning)
    result = nnx.jit(lambda model, *args, key: model(*args, key=key))(
        model,
        batch_on(mesh, rows(8, 8)),
        batch_on(mesh, jnp.full((8,), 257151)),
        batch_on(mesh, jnp.cos(POSITIONS.astype(np.float32))[:, None]),
        batch_on(mesh, jnp.arange(8) > 3),
        key=jax.random.key(0),
    )
    return seen, result


@both_axis_types_and_partitionings
def test_no_input_is_cast_where_that_is_off(mesh_of: MeshOf, partitioning: str):
    """B25: x f32, ids int32 257151, cos f32, a mask and a key: all as they came."""
    with mesh_of(S=8) as mesh:
        seen, (_, ids, cos) = call_rotary(mesh, partitioning, cast_forward_inputs=False)
        assert seen["x"] == seen["cos"] == jnp.float32
        assert seen["ids"] == jnp.int32
        assert seen["mask"] == jnp.bool
        assert jax.dtypes.issubdtype(seen["key"], jax.dtypes.prng_key)
        np.testing.assert_array_equal(ids, np.full(8, 257151))
        np.testing.assert_allclose(cos[:, 0], np.cos(POSITIONS), atol=1e-3)


@both_partitionings
def test_only_floating_inputs_are_cast_where_that_is_on(partitioning: str):
    """B25: the ids are 257151 all the same; x and the table, named `cos`, become bf16."""
    seen, (_, ids, _) = call_rotary(make_mesh(S=8), partitioning)
    assert seen["x"] == seen["cos"] == BF16
    assert seen["ids"] == jnp.int32
    assert seen["mask"] == jnp.bool
    assert jax.dtypes.issubdtype(seen["key"], jax.dtypes.prng_key)
    np.testing.assert_array_equal(ids, np.full(8, 257151))


def test_a_table_that_is_no_batch_keeps_its_dtype_and_its_shape():
    """B25: cos (4,8) for 4 positions, the same for every row, by `in_specs`."""
    seen: list[tuple[Any, Any]] = []

    class Positions(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((8, 8)))

        def __call__(self, x: jax.Array, cos: jax.Array) -> jax.Array:
            seen.append((cos.shape, cos.dtype))
            return x @ self.w[...] * cos[None]

    policy = jfsdp.MixedPrecisionPolicy(param_dtype="bfloat16", cast_forward_inputs=False)
    model = jfsdp.shard(Positions(), make_mesh(S=8), mp_policy=policy, in_specs={"cos": P()})
    assert model(jnp.ones((8, 4, 8)), jnp.ones((4, 8))).shape == (8, 4, 8)
    assert set(seen) == {((4, 8), jnp.dtype("float32"))}


# --------------------------------------------------------------------------------------------------
# State


class Normed(nnx.Module):
    """Linear, BatchNorm(8), Dropout: Param, BatchStat, RngCount and RngKey."""

    def __init__(self):
        self.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
        self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        self.norm.mean.set_value(jnp.ones(8))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.linear(self.norm(x)))


@both_partitionings
def test_running_statistics_keep_their_dtype_and_move(partitioning: str):
    """B26: mean 1.0, 100 batches of mean 1.1, momentum 0.99: 1.0634, which bf16 never leaves 1.0 for."""
    mesh = make_mesh(S=8)
    policy = jfsdp.MixedPrecisionPolicy(param_dtype="bfloat16", cast_forward_inputs=False)
    model = jfsdp.shard(Normed(), mesh, mp_policy=policy, partitioning=partitioning)
    x = batch_on(mesh, jnp.full((8, 8), 1.1))
    step = nnx.jit(lambda model, x: model(x))
    for _ in range(100):
        step(model, x)
    assert model.norm.mean.dtype == model.norm.var.dtype == jnp.float32
    np.testing.assert_allclose(model.norm.mean[...], 1.0634, atol=1e-3)


@both_axis_types_and_partitionings
def test_state_that_is_no_parameter_keeps_its_dtype(mesh_of: MeshOf, partitioning: str):
    """B26: BatchStat f32, RngCount uint32, RngKey a key, and parameters stored in f32."""
    with mesh_of(S=8) as mesh:
        policy = jfsdp.MixedPrecisionPolicy(param_dtype="bfloat16")
        model = jfsdp.shard(Normed(), mesh, mp_policy=policy, partitioning=partitioning)
        nnx.jit(lambda model, x: model(x))(model, batch_on(mesh, rows(8, 8)))
        reference = leaves(Normed())
        got = leaves(model)
        assert {path: x.dtype for path, x in got.items()} == {
            p: x.dtype for p, x in reference.items()
        }


def test_statistics_of_a_step_in_bf16_are_those_of_a_step_in_f32():
    """B26: on inputs that bf16 holds exactly, the same running mean and variance to rounding."""
    mesh = make_mesh(S=8)
    x = jnp.arange(64.0).reshape(8, 8)
    policy = jfsdp.MixedPrecisionPolicy(param_dtype="bfloat16")
    models = [Normed(), jfsdp.shard(Normed(), mesh, mp_policy=policy)]
    for model in models:
        nnx.jit(lambda model, x: model(x))(model, x)
    plain, sharded = (nnx.state(model, nnx.BatchStat) for model in models)
    assert_close(sharded, plain, rtol=1e-5, atol=0)


# --------------------------------------------------------------------------------------------------
# Parameters


class Mixed(nnx.Module):
    """Parameters of every kind: f32, int8, complex64, and a key beside them."""

    def __init__(self, seen: dict[str, Any] | None = None):
        w, q, c = jax.random.split(jax.random.key(0), 3)
        self.w = nnx.Param(jax.random.normal(w, (8, 8)))
        self.q = nnx.Param(jax.random.randint(q, (8, 8), -3, 3, "int8"))
        self.c = nnx.Param(jax.random.normal(c, (8, 8), "complex64"))
        self.key = nnx.RngKey(jax.random.key(1), tag="params")
        self.note = nnx.static((seen if seen is not None else {}).update)

    def __call__(self, x: jax.Array) -> jax.Array:
        names = ("w", "q", "c", "key")
        self.note({name: getattr(self, name)[...].dtype for name in names})
        y = x @ self.w[...] + x @ self.q[...].astype(x.dtype)
        return y.astype("float32") + jnp.abs(x.astype("complex64") @ self.c[...])


def is_floating(path: Any, value: Any) -> bool:
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)


def floating_gradient(model: Mixed, x: jax.Array) -> nnx.State:
    of = nnx.DiffState(0, nnx.All(nnx.Param, is_floating))
    return nnx.grad(lambda model, x: jnp.mean(model(x) ** 2), argnums=of)(model, x)


@both_axis_types_and_partitionings
def test_only_real_floating_parameters_are_cast(mesh_of: MeshOf, partitioning: str):
    """B41: inside, w is bf16, q int8, c complex64 and the key a key; no warning."""
    with mesh_of(S=8) as mesh:
        seen: dict[str, Any] = {}
        policy = jfsdp.MixedPrecisionPolicy(param_dtype="bfloat16")
        model = jfsdp.shard(Mixed(seen), mesh, mp_policy=policy, partitioning=partitioning)
        y = nnx.jit(lambda model, x: model(x))(model, batch_on(mesh, rows(8, 8)))
        assert (seen["w"], seen["q"], seen["c"]) == (BF16, jnp.int8, jnp.complex64)
        assert jax.dtypes.issubdtype(seen["key"], jax.dtypes.prng_key)
        np.testing.assert_allclose(y, Mixed()(rows(8, 8)), rtol=0.05, atol=0.05)


@both_axis_types
def test_parameters_of_every_dtype_are_sharded_and_gathered_in_it(mesh_of: MeshOf):
    """B41: q int8 has local shard (1,8) and is gathered as int8, c as complex64."""
    with mesh_of(S=8) as mesh:
        policy = jfsdp.MixedPrecisionPolicy(param_dtype="bfloat16")
        model = jfsdp.shard(Mixed(), mesh, mp_policy=policy)
        assert [local_shape(p[...]) for p in (model.w, model.q, model.c)] == [(1, 8)] * 3
        assert_spec(model.key)
        lowered = nnx.jit(lambda model, x: model(x)).lower(model, rows(8, 8)).lowered
        assert count_ops(lowered, "all_gather", "bf16") == 1
        assert count_ops(lowered, "all_gather", "i8") == 1
        assert count_ops(lowered, "all_gather", "complex<f32>") == 1
        assert count_ops(lowered, "all_gather") == 3


@both_axis_types_and_partitionings
def test_gradients_of_the_floating_parameters_ignore_the_others(mesh_of: MeshOf, partitioning: str):
    """B41: the gradient of w alone, equal to the unsharded one."""
    with mesh_of(S=8) as mesh:
        model = jfsdp.shard(Mixed(), mesh, partitioning=partitioning)
        got = nnx.jit(floating_gradient)(model, batch_on(mesh, rows(8, 8)))
        assert [*got] == ["w"]
        assert_close(got, nnx.jit(floating_gradient)(Mixed(), rows(8, 8)), rtol=1e-5, atol=1e-5)
