"""Frozen parameters and adapters: no gradient, no reduction, no moments, no copy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from helpers import (
    MeshOf,
    assert_close,
    batch_on,
    both_axis_types,
    both_axis_types_and_partitionings,
    both_partitionings,
    count_ops,
    linears,
    local_shape,
    make_mesh,
    mean_square,
    rows,
)

import jfsdp


def gradient_of(wrt: Any) -> Any:
    return nnx.grad(mean_square, argnums=nnx.DiffState(0, wrt))


def train(model: Any, x: jax.Array, wrt: Any, steps: int = 3) -> nnx.Optimizer:
    """Train what `wrt` selects, in place."""
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=wrt)

    @nnx.jit
    def step(model: Any, optimizer: nnx.Optimizer, x: jax.Array) -> None:
        optimizer.update(model, gradient_of(wrt)(model, x))

    for _ in range(steps):
        step(model, optimizer, x)
    return optimizer


def copied(model: nnx.Module) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): np.array(param[...]) for path, param in flat}


# --------------------------------------------------------------------------------------------------
# Adapters


def lora() -> nnx.LoRALinear:
    model = nnx.LoRALinear(16, 8, lora_rank=2, rngs=nnx.Rngs(0))
    model.lora.lora_b[...] = jnp.ones((2, 8))  # zeros would leave lora_a without a gradient
    return model


@both_axis_types_and_partitionings
def test_only_the_selected_kind_of_parameter_has_moments(mesh_of: MeshOf, partitioning: str):
    """B54: LoRALinear(16,8,rank 2) w.r.t. LoRAParam: mu and nu for (16,2) and (2,8), and scalars."""
    with mesh_of(S=8) as mesh:
        model = jfsdp.shard(lora(), mesh, partitioning=partitioning)
        optimizer = train(model, batch_on(mesh, rows(8, 16)), nnx.LoRAParam)
        moments = [x for x in jax.tree.leaves(nnx.state(optimizer)) if x.ndim]
        assert sorted(x.shape for x in moments) == [(2, 8), (2, 8), (16, 2), (16, 2)]
        assert sorted(local_shape(x) for x in moments) == [(2, 1), (2, 1), (2, 2), (2, 2)]


@both_axis_types
def test_only_the_selected_kind_of_parameter_has_a_gradient(mesh_of: MeshOf):
    """B54: the gradient has lora_a and lora_b, and only these two are reduced."""
    with mesh_of(S=8) as mesh:
        model = jfsdp.shard(lora(), mesh)
        x = batch_on(mesh, rows(8, 16))
        step = nnx.jit(gradient_of(nnx.LoRAParam))
        got = step(model, x)
        assert [*got] == ["lora"]
        assert sorted(got["lora"]) == ["lora_a", "lora_b"]
        assert_close(got, step(lora(), rows(8, 16)), rtol=1e-5, atol=1e-6)
        assert count_ops(step.lower(model, x).lowered, "reduce_scatter") == 2
        assert jfsdp.inspect(step, model, x).count("reduce-scatter") == 2


@both_partitionings
def test_the_base_of_an_adapter_keeps_its_bits(partitioning: str):
    """B54: after 3 steps kernel and bias are as before, the adapters have moved as unsharded."""
    mesh = make_mesh(S=8)
    model, plain = jfsdp.shard(lora(), mesh, partitioning=partitioning), lora()
    before = copied(model)
    train(model, batch_on(mesh, rows(8, 16)), nnx.LoRAParam)
    train(plain, rows(8, 16), nnx.LoRAParam)
    after = copied(model)
    for path in ("kernel", "bias"):
        np.testing.assert_array_equal(after[path], before[path])
    assert not np.array_equal(after["lora.lora_a"], before["lora.lora_a"])
    assert_close(model, plain, rtol=1e-5, atol=1e-6)


@both_axis_types
def test_adapters_move_though_they_compute_in_bf16_beside_a_base_in_bf16(mesh_of: MeshOf):
    """B30: 100 steps of constant gradient at 1e-3 move each number by 0.1; base bf16, not one bit changed.

    Adapters that were kept in bf16 would stay at 1.0.
    """
    policy = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)

    def loss(model: Any, x: jax.Array) -> jax.Array:
        adapters = jax.tree.leaves(nnx.as_pure(nnx.state(model, nnx.LoRAParam)))
        return sum((jnp.sum(w) for w in adapters), 0 * mean_square(model, x))

    with mesh_of(S=8) as mesh:
        model = nnx.LoRALinear(16, 8, lora_rank=2, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        model.lora.lora_a[...], model.lora.lora_b[...] = jnp.ones((16, 2)), jnp.ones((2, 8))
        jfsdp.shard(model, mesh, mp_policy=policy)
        before, sizes = copied(model), {"kernel": (2, 8), "bias": (1,)}
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.LoRAParam)

        @nnx.jit
        def step(model: Any, optimizer: nnx.Optimizer, x: jax.Array) -> None:
            wrt = nnx.DiffState(0, nnx.LoRAParam)
            optimizer.update(model, nnx.grad(loss, argnums=wrt)(model, x))

        for _ in range(100):
            step(model, optimizer, batch_on(mesh, rows(8, 16)))
    after = copied(model)
    for name in ("lora.lora_a", "lora.lora_b"):
        np.testing.assert_allclose(before[name] - after[name], 0.1, atol=1e-3)
        assert after[name].dtype == jnp.float32
    for name, local in sizes.items():
        assert after[name].dtype == jnp.bfloat16
        assert after[name].tobytes() == before[name].tobytes()
        assert local_shape(getattr(model, name)[...]) == local


# --------------------------------------------------------------------------------------------------
# Frozen layers

LAST = nnx.All(nnx.Param, nnx.PathContains(3))


def half_frozen() -> nnx.Sequential:
    """4x Linear(64,64): three frozen ones in bf16, the last, trained, in f32."""
    frozen = linears(3, 64, param_dtype=jnp.bfloat16)
    last = nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(1))
    return nnx.Sequential(*frozen.layers, last)


@both_axis_types
def test_a_frozen_layer_costs_no_reduction(mesh_of: MeshOf):
    """B55: 4x Linear(64,64), the last trained: one reduce-scatter, and each layer gathered once."""
    with mesh_of(S=8) as mesh:
        model = jfsdp.shard(half_frozen(), mesh, units=nnx.Linear)
        step = nnx.jit(gradient_of(LAST))
        x = batch_on(mesh, rows(8, 64))
        lowered = step.lower(model, x).lowered
        assert count_ops(lowered, "reduce_scatter") == 1
        assert count_ops(lowered, "all_reduce") == 0
        assert count_ops(lowered, "all_gather") == 4
        report = jfsdp.inspect(step, model, x)
        assert report.count("reduce-scatter") == 1
        assert report.count("all-gather", dtype="bfloat16") == 3


def test_a_frozen_layer_behind_a_trained_one_is_gathered_again_but_not_reduced():
    """B55: the first of four trained: the gradient passes through the three others."""
    mesh = make_mesh(S=8)
    model = jfsdp.shard(linears(4, 64), mesh, units=nnx.Linear)
    first = nnx.All(nnx.Param, nnx.PathContains(0))
    lowered = nnx.jit(gradient_of(first)).lower(model, batch_on(mesh, rows(8, 64))).lowered
    assert count_ops(lowered, "reduce_scatter") == 1
    assert count_ops(lowered, "all_gather") == 4 + 3


def test_stop_gradient_in_the_model_costs_no_reduction_either():
    """B55: frozen by the forward instead of by `wrt`: one reduce-scatter."""

    class Stopped(nnx.Module):
        def __init__(self):
            self.frozen, self.last = linears(3, 64), linears(1, 64)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.last(jax.lax.stop_gradient(self.frozen(x)))

    mesh = make_mesh(S=8)
    model = jfsdp.shard(Stopped(), mesh, units=nnx.Linear)
    grad = nnx.jit(nnx.grad(mean_square))
    assert count_ops(grad.lower(model, rows(8, 64)).lowered, "reduce_scatter") == 1


@both_axis_types
def test_a_frozen_layer_has_no_moments(mesh_of: MeshOf):
    """B55: mu and nu of one layer, sharded."""
    with mesh_of(S=8) as mesh:
        model = jfsdp.shard(half_frozen(), mesh, units=nnx.Linear)
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=LAST)
    moments = [x for x in jax.tree.leaves(nnx.state(optimizer)) if x.ndim]
    assert [(x.shape, local_shape(x)) for x in moments] == [((64, 64), (8, 64))] * 2


@both_axis_types_and_partitionings
def test_a_frozen_layer_keeps_its_dtype_its_bits_and_its_shards(mesh_of: MeshOf, partitioning: str):
    """B55: frozen bf16 stays bf16, bit-equal after 3 steps; the last layer trains as unsharded."""
    with mesh_of(S=8) as mesh:
        model = jfsdp.shard(half_frozen(), mesh, units=nnx.Linear, partitioning=partitioning)
        plain = half_frozen()
        before = copied(model)
        train(model, batch_on(mesh, rows(8, 64)), LAST)
        train(plain, rows(8, 64), LAST)
        for layer, path in enumerate(before):
            kernel = model.layers[layer].kernel[...]
            assert local_shape(kernel) == (8, 64)
            assert kernel.dtype == (jnp.bfloat16 if layer < 3 else jnp.float32)
            same = np.array_equal(np.array(kernel), before[path])
            assert same == (layer < 3)
        expected = plain.layers[3].kernel[...]
        np.testing.assert_allclose(model.layers[3].kernel[...], expected, rtol=1e-3, atol=1e-3)
