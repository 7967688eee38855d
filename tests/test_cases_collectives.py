"""Which collectives a step runs, how often, over which axes and in which dtype."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    MeshOf,
    Op,
    assert_close,
    assert_spec,
    auto,
    batch_on,
    both_axis_types,
    compiled_ops,
    count_ops,
    every_axis_type,
    explicit_set,
    gradients,
    leaves,
    linears,
    local_shape,
    make_mesh,
    mean_square,
    rows,
    stablehlo_ops,
)

import jfsdp

BF16_REDUCED_IN_F32 = jfsdp.MixedPrecisionPolicy(param_dtype="bfloat16", reduce_dtype="float32")


# --------------------------------------------------------------------------------------------------
# How often


class Scanned(nnx.Module):
    """`count` layers Linear with tanh, stacked on dimension 0 and run by a scan."""

    def __init__(self, count: int, width: int = 64):
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(width, width, use_bias=False, rngs=rngs)

        self.layers = make(nnx.Rngs(0).split(count))

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer: nnx.Linear, x: jax.Array) -> jax.Array:
            return jnp.tanh(layer(x))

        return run(self.layers, x)


@pytest.mark.parametrize(
    "mesh_of",
    [auto, pytest.param(explicit_set, marks=pytest.mark.slow)],
    ids=["auto", "explicit_set"],
)
def test_layers_of_a_scan_are_gathered_one_by_one_inside_its_loop(mesh_of: MeshOf):
    """B15: 8 layers 64x64 on S8, so that the layer axis divides and tempts."""
    with mesh_of(S=8) as mesh:
        model = jfsdp.shard(Scanned(8), mesh, units=nnx.Linear, stacked_axis=0)
        assert_spec(model.layers.kernel, None, "S")
        x = batch_on(mesh, rows(8, 64))
        lowered = nnx.jit(nnx.value_and_grad(mean_square)).lower(model, x)
        ops = compiled_ops(lowered.lowered.compile())
        assert [op for op in ops if op.shape[:1] == (8,) and len(op.shape) == 3] == []
        gathers = [op for op in ops if op.kind == "all-gather"]
        # Those of the first layer, and of the last ones again, stand before the loops, which look ahead.
        assert {(op.shape, op.in_loop) for op in gathers} == {((64, 64), True), ((64, 64), False)}
        assert_close(gradients(model, x), gradients(Scanned(8), rows(8, 64)))


def test_a_scan_gathers_every_layer_twice_and_reduces_it_once():
    """B15: executions, the loops' trip counts included."""
    mesh = make_mesh(S=8)
    model = jfsdp.shard(Scanned(8), mesh, units=nnx.Linear, stacked_axis=0)
    report = jfsdp.inspect(nnx.value_and_grad(mean_square), model, batch_on(mesh, rows(8, 64)))
    assert report.count("all-gather") == 16
    assert report.count("reduce-scatter") == 8
    inside = [op for op in report.collectives if op.in_loop]
    assert {(op.kind, op.executions) for op in inside} == {
        ("all-gather", 7),
        ("all-gather", 6),
        ("reduce-scatter", 6),
    }


def test_the_layer_axis_is_not_sharded_though_it_is_the_largest():
    """B15: 16 layers 8x8, a stack (16,8,8): dimension 1 all the same."""
    model = jfsdp.shard(Scanned(16, 8), make_mesh(S=8), units=nnx.Linear, stacked_axis=0)
    assert_spec(model.layers.kernel, None, "S")
    report = jfsdp.inspect(lambda model, x: model(x), model, rows(8, 8))
    found = [(op.in_loop, op.executions, op.result_shape) for op in report.collectives]
    assert found == [(False, 1, (8, 8)), (True, 15, (8, 8))]


def six(**settings: Any) -> nnx.Sequential:
    return jfsdp.shard(linears(6, 64), units=nnx.Linear, **settings)


@pytest.mark.parametrize(
    "reshard, of_the_input_too, gathers",
    [(True, True, 12), (True, False, 11), (False, True, 6), (False, False, 6)],
)
def test_resharding_decides_whether_the_backward_gathers_again(
    reshard: bool, of_the_input_too: bool, gathers: int
):
    """B16: 6x Linear(64,64) on S8; without the input's gradient the first re-gather is dead."""
    mesh = make_mesh(S=8)
    model = six(mesh=mesh, reshard_after_forward=reshard)
    x = batch_on(mesh, rows(8, 64))
    step = nnx.jit(nnx.grad(mean_square, argnums=(0, 1) if of_the_input_too else 0))
    lowered = step.lower(model, x).lowered
    assert count_ops(lowered, "all_gather") == gathers
    assert count_ops(lowered, "reduce_scatter") == 6
    report = jfsdp.inspect(step, model, x)
    assert report.count("all-gather", axes="S") == gathers
    assert report.count("reduce-scatter", axes="S") == 6


def test_resharding_changes_no_gradient():
    """B16: equal to 1e-7, and to the unsharded gradient."""
    mesh = make_mesh(S=8)
    x = batch_on(mesh, rows(8, 64))
    kept, dropped = (gradients(six(mesh=mesh, reshard_after_forward=r), x) for r in (False, True))
    assert_close(dropped, kept, rtol=0, atol=1e-7)
    assert_close(dropped, gradients(linears(6, 64), rows(8, 64)))


# --------------------------------------------------------------------------------------------------
# Over which axes


class Watched(nnx.Module):
    """Linear(4,8) that notes the shape of its input at trace time."""

    def __init__(self, seen: list[tuple[int, ...]]):
        self.linear = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
        self.note = nnx.static(seen.append)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.note(x.shape)
        return self.linear(x)


@every_axis_type
def test_a_batch_splits_over_both_data_axes(mesh_of: MeshOf):
    """B21: batch (16,4) on R2xS4: (2,4) inside the region, wherever the batch came from."""
    with mesh_of(R=2, S=4) as mesh:
        seen: list[tuple[int, ...]] = []
        model = jfsdp.shard(Watched(seen), mesh)
        reference = gradients(Watched([]), rows(16, 4))
        for x in (rows(16, 4), batch_on(mesh, rows(16, 4))):
            seen.clear()
            assert_close(gradients(model, x), reference)
            assert set(seen) == {(2, 4)}


def test_results_leave_split_over_both_data_axes():
    """B21: so that no activation is replicated behind the model either."""
    model = jfsdp.shard(Watched([]), make_mesh(R=2, S=4))
    y = nnx.jit(lambda model, x: model(x))(model, rows(16, 4))
    assert_spec(y, ("R", "S"))
    assert local_shape(y) == (2, 8)


def test_hsdp_reduces_the_shards_only_over_the_replicas():
    """B21: reduce-scatter over S, then all-reduce of what is left over R."""
    mesh = make_mesh(R=2, S=4)
    model = six(mesh=mesh)
    x = batch_on(mesh, rows(16, 64))
    report = jfsdp.inspect(nnx.grad(mean_square), model, x)
    assert report.count("reduce-scatter", axes="S") == report.count("reduce-scatter") == 6
    assert report.count("all-reduce", axes="R") == 6
    lowered = nnx.jit(nnx.grad(mean_square)).lower(model, x).lowered
    assert stablehlo_ops(lowered)[Op("all_reduce", "f32", (16, 64))] == 6


# --------------------------------------------------------------------------------------------------
# In which dtype


@both_axis_types
def test_weights_are_gathered_in_the_compute_dtype(mesh_of: MeshOf):
    """B23: 6x Linear(64,64), param_dtype bf16: every gather is bf16."""
    with mesh_of(S=8) as mesh:
        model = six(mesh=mesh, mp_policy=BF16_REDUCED_IN_F32)
        x = batch_on(mesh, rows(8, 64))
        lowered = nnx.jit(nnx.grad(mean_square)).lower(model, x).lowered
        assert count_ops(lowered, "all_gather", "bf16") == count_ops(lowered, "all_gather") == 11
        assert count_ops(lowered, "reduce_scatter", "f32") == 6
        report = jfsdp.inspect(nnx.grad(mean_square), model, x)
        assert report.count("all-gather", dtype=jnp.bfloat16) == report.count("all-gather") == 11
        assert report.bytes("all-gather") == 11 * 64 * 64 * 2 * 7 / 8


def test_master_weights_and_moments_stay_in_the_storage_dtype():
    """B23: parameters, mu and nu are f32 before and after a step that computes in bf16."""
    mesh = make_mesh(S=8)
    model = six(mesh=mesh, mp_policy=BF16_REDUCED_IN_F32)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: jax.Array) -> None:
        optimizer.update(model, nnx.grad(mean_square)(model, x))

    for _ in range(2):
        adam = optimizer.opt_state[0]
        dtypes = {x.dtype for x in jax.tree.leaves((nnx.state(model), adam.mu, adam.nu))}
        assert dtypes == {jnp.dtype("float32")}
        step(model, optimizer, batch_on(mesh, rows(8, 64)))


class Ones(nnx.Module):
    """x @ w with w (width, 8) of zeros."""

    def __init__(self, width: int = 1):
        self.w = nnx.Param(jnp.zeros((width, 8)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w[...]


@pytest.mark.parametrize("sizes", [{"S": 8}, {"R": 2, "S": 4}, {"R": 8, "S": 1}], ids=str)
@pytest.mark.parametrize("dtype, expected", [("float32", 263.0), ("bfloat16", 264.0)])
def test_gradients_are_reduced_in_the_reduce_dtype(sizes: Any, dtype: str, expected: float):
    """B24: 256 + 7 ones, computed in bf16: 263 when reduced in f32, not in bf16."""
    mesh = make_mesh(**sizes)
    policy = jfsdp.MixedPrecisionPolicy(param_dtype="bfloat16", reduce_dtype=dtype)
    model = jfsdp.shard(Ones(), mesh, mp_policy=policy)
    x = batch_on(mesh, jnp.array([256.0, 1, 1, 1, 1, 1, 1, 1])[:, None])
    grad = nnx.jit(nnx.grad(lambda model, x: jnp.sum(model(x))))(model, x).w[...]
    assert grad.dtype == jnp.float32
    np.testing.assert_array_equal(grad, np.full((1, 8), expected))


def test_the_default_reduce_dtype_is_the_parameters_own():
    """B24: param_dtype bf16 alone reduces in f32, as FSDP2 does."""
    mesh = make_mesh(S=8)
    policy = jfsdp.MixedPrecisionPolicy(param_dtype="bfloat16")
    model = jfsdp.shard(Ones(), mesh, mp_policy=policy)
    x = jnp.array([256.0, 1, 1, 1, 1, 1, 1, 1])[:, None]
    grad = nnx.jit(nnx.grad(lambda model, x: jnp.sum(model(x))))(model, x).w[...]
    np.testing.assert_array_equal(grad, np.full((1, 8), 263.0))


class Late(nnx.Module):
    """Two layers, of which the second is used only if asked."""

    def __init__(self):
        self.first = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.second = nnx.Linear(8, 8, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array, both: bool) -> jax.Array:
        x = self.first(x)
        return self.second(x) if both else x


def late_loss(model: Late, x: jax.Array, both: bool) -> jax.Array:
    return jnp.mean(model(x, both).astype(jnp.float32))


def accumulated_in_python(model: Late, batches: jax.Array) -> nnx.State:
    """Gradients over 4 microbatches, a quarter of each."""
    parts = [nnx.grad(late_loss)(model, batches[i], i == 3) for i in range(4)]
    total = jax.tree.map(jnp.add, parts[0], parts[1])
    for part in parts[2:]:
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(part))
        total = jax.tree.map(jnp.add, total, part)
    return jax.tree.map(lambda x: x / 4, total)


def accumulated_in_a_scan(model: Late, batches: jax.Array) -> nnx.State:
    """The same, the first three in a `jax.lax.scan`."""
    graphdef, state = nnx.split(model)
    params = nnx.as_pure(state)  # arrays: a Variable may not be used inside another trace

    def add(total: nnx.State, x: jax.Array) -> tuple[nnx.State, None]:
        part = nnx.as_pure(nnx.grad(late_loss)(nnx.merge(graphdef, params), x, False))
        return jax.tree.map(jnp.add, total, part), None

    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches[:3])
    part = nnx.as_pure(nnx.grad(late_loss)(model, batches[3], True))
    return jax.tree.map(lambda x, y: (x + y) / 4, total, part)


@pytest.mark.parametrize("accumulated", [accumulated_in_python, accumulated_in_a_scan])
@both_axis_types
def test_accumulated_gradients_keep_the_reduce_dtype_though_a_layer_is_used_late(
    mesh_of: MeshOf, accumulated: Any
):
    """B27: the second of two layers is used in microbatch 4 of 4 only; bf16, reduced in f32."""
    with mesh_of(S=8) as mesh:
        model = jfsdp.shard(Late(), mesh, units=nnx.Linear, mp_policy=BF16_REDUCED_IN_F32)
        batches = jnp.stack([rows(8, 8, seed) for seed in range(4)])
        got = nnx.jit(accumulated)(model, batches)
        single = nnx.jit(nnx.grad(late_loss), static_argnums=2)(model, batches[3], True)
        assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype("float32")}
        quarter = jax.tree.map(lambda x: x / 4, single.second)
        assert_close(nnx.as_pure(got.second), nnx.as_pure(quarter), rtol=1e-6, atol=0)
        got = leaves(nnx.as_pure(got))
        expected = leaves(nnx.as_pure(nnx.jit(accumulated)(Late(), batches)))
        assert got.keys() == expected.keys()
        for path, value in expected.items():
            np.testing.assert_allclose(got[path], value, rtol=0.03, atol=0.01, err_msg=path)
