"""Dynamic loss scaling with float16: an overflow on one device is seen by all, and the scale halves once."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from helpers import batch_on, compilations, make_mesh, rows

import jfsdp

MESHES = [{"S": 8}, {"R": 2, "S": 4}]
every_mesh = pytest.mark.parametrize("sizes", MESHES, ids=["S8", "R2xS4"])
FP16 = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.float16, reduce_dtype=jnp.float32)

# Of the mean of 16 x 8 outputs a row of the kernel has the gradient 512 * x, until the scale is halved:
# 200 * 512 is beyond float16, whose largest number is 65504, and 200 * 256 is not.
SCALE = 2.0**16
FINE = rows(16, 8) / 4
OVERFLOW = FINE.at[2, 3].set(200.0)  # of row 2 alone, which lies on one device
BATCHES = FINE, OVERFLOW, OVERFLOW, FINE, FINE
SCALES = [SCALE, SCALE / 2, SCALE / 2, SCALE / 2, SCALE]
"""It grows again in the third finite step in a row."""


def start() -> DynamicScale:
    """With arrays: a step that takes Python numbers compiles once more for what it returns."""
    return DynamicScale(
        scale=jnp.float32(SCALE),  # pyright: ignore[reportArgumentType]
        fin_steps=jnp.int32(0),  # pyright: ignore[reportArgumentType]
        growth_interval=2,
    )


def on_all_devices(value: Any) -> set[float]:
    return {float(shard.data) for shard in value.addressable_shards}


# --------------------------------------------------------------------------------------------------
# Linen: the scale in the train state, as in Flax's examples


class State(TrainState):
    """With the scale of the loss."""

    dynamic_scale: Any = None


class Model(nn.Module):
    """Dense(8) in float16, without jfsdp too."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8, use_bias=False, dtype=jnp.float16)(x)


def linen_step(state: State, x: jax.Array) -> tuple[State, jax.Array]:
    def loss(params: Any) -> jax.Array:
        return jnp.mean(state.apply_fn({"params": params}, x).astype(jnp.float32))

    scale, is_finite, _, grads = state.dynamic_scale.value_and_grad(loss)(state.params)
    new = state.apply_gradients(grads=grads)

    def chosen(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda x, y: jnp.where(is_finite, x, y), new, old)

    params, opt_state = chosen(new.params, state.params), chosen(new.opt_state, state.opt_state)
    return new.replace(params=params, opt_state=opt_state, dynamic_scale=scale), is_finite


def linen_state(mesh: Any) -> Any:
    model: Any = jfsdp.shard(Model(), mesh, mp_policy=FP16) if mesh else Model()

    def create() -> State:
        params = model.init(jax.random.key(0), FINE[:1])["params"]
        tx = optax.adam(1e-2)
        return State.create(apply_fn=model.apply, params=params, tx=tx, dynamic_scale=start())

    return jfsdp.init(create) if mesh else create()


@every_mesh
def test_a_linen_train_state_skips_an_overflow_of_one_device_everywhere(sizes: Any):
    mesh = make_mesh(**sizes)
    state = linen_state(mesh)
    shardings = jfsdp.shardings(state)

    def unique_step(state: State, x: jax.Array) -> Any:
        return linen_step(state, x)

    step = jax.jit(unique_step, out_shardings=(shardings, None))
    seen, finite = [], []
    with compilations() as compiled:
        for x in BATCHES:
            before = jax.device_get((state.params, state.opt_state))
            state, is_finite = step(state, batch_on(mesh, x))
            seen.append(on_all_devices(state.dynamic_scale.scale))
            finite.append(bool(is_finite))
            if not is_finite:
                after = jax.device_get((state.params, state.opt_state))
                jax.tree.map(np.testing.assert_array_equal, after, before)
                assert on_all_devices(state.dynamic_scale.fin_steps) == {0}
    assert seen == [{scale} for scale in SCALES]
    assert finite == [True, False, True, True, True]
    assert compiled["unique_step"] == 1
    assert jfsdp.shardings(state) == shardings


def test_a_linen_train_state_with_a_scale_trains_as_unsharded():
    """To the rounding of float16."""

    def run(mesh: Any) -> Any:
        state = linen_state(mesh)
        for x in BATCHES:
            state, _ = jax.jit(linen_step)(state, batch_on(mesh, x) if mesh else x)
        return state

    got, expected = run(make_mesh(S=8)), run(None)
    assert float(got.dynamic_scale.scale) == float(expected.dynamic_scale.scale) == SCALE
    kernel, wanted = (state.params["Dense_0"]["kernel"] for state in (got, expected))
    np.testing.assert_allclose(kernel, wanted, rtol=0, atol=1e-4)
    assert np.abs(np.asarray(wanted)).max() > 1e-2


# --------------------------------------------------------------------------------------------------
# NNX: the same object on the split model; the optimizer skips what is not finite


def nnx_step(model: Any, optimizer: Any, scale: DynamicScale, x: jax.Array) -> Any:
    graphdef, params = nnx.split(model)

    def loss(params: Any) -> jax.Array:
        return jnp.mean(nnx.merge(graphdef, params)(x).astype(jnp.float32))

    scale, is_finite, _, grads = scale.value_and_grad(loss)(params)
    optimizer.update(model, grads)
    return scale, is_finite, grads


@functools.cache
def nnx_run(sizes: tuple[tuple[str, int], ...]) -> tuple[list[Any], Any, int]:
    """Of every step the scales on the devices, whether shards were finite, the weights; the optimizer."""
    mesh = make_mesh(**dict(sizes))
    model = nnx.Linear(8, 8, use_bias=False, dtype=jnp.float16, rngs=nnx.Rngs(0))
    jfsdp.shard(model, mesh, mp_policy=FP16)
    tx = optax.apply_if_finite(optax.adam(1e-2), max_consecutive_errors=100)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    scale = jax.device_put(start(), jfsdp.shardings((start(), nnx.state(model)))[0])

    @nnx.jit
    def unique_step(model: Any, optimizer: Any, scale: Any, x: jax.Array) -> Any:
        return nnx_step(model, optimizer, scale, x)

    steps = []
    with compilations() as compiled:
        for x in BATCHES:
            scale, _, grads = unique_step(model, optimizer, scale, batch_on(mesh, x))
            shards = grads.kernel[...].addressable_shards
            finite = [bool(np.isfinite(shard.data).all()) for shard in shards]
            steps.append((on_all_devices(scale.scale), finite, np.array(model.kernel[...])))
    return steps, optimizer, compiled["unique_step"]


def runs(sizes: Any) -> tuple[list[Any], Any, int]:
    return nnx_run(tuple(sizes.items()))


@every_mesh
def test_an_overflow_is_in_the_shard_of_one_device_and_halves_the_scale_of_all_once(sizes: Any):
    """Row 3 of the kernel: on R2xS4 both replicas hold it."""
    steps, _, compiled = runs(sizes)
    holders = [3] if sizes == {"S": 8} else [1, 5]
    assert [seen for seen, _, _ in steps] == [{scale} for scale in SCALES]
    assert steps[1][1] == [device not in holders for device in range(8)]
    assert all(all(finite) for number, (_, finite, _) in enumerate(steps) if number != 1)
    assert compiled == 1


@every_mesh
def test_a_step_that_overflows_changes_no_weight_and_the_others_do(sizes: Any):
    steps, optimizer, _ = runs(sizes)
    kernels = [kernel for _, _, kernel in steps]
    changed = [(one != other).any() for one, other in itertools.pairwise(kernels)]
    assert changed == [False, True, True, True]
    assert on_all_devices(optimizer.opt_state.total_notfinite.get_raw_value()) == {1}
    assert on_all_devices(optimizer.opt_state.notfinite_count.get_raw_value()) == {0}
