"""Quantizing in blocks, and the collectives that do it: their errors, and what they may not hide."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jfsdp
from jfsdp.quantized import dequantize, quantize

INT8, FLOAT8 = np.dtype("int8"), np.dtype(jnp.float8_e4m3fn)
BOTH = pytest.mark.parametrize("dtype", [INT8, FLOAT8], ids=["int8", "float8"])
GROUPS = pytest.mark.parametrize("group", [("a", "b"), ("b", "a"), ("b",)], ids=str)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@functools.partial(jax.jit, static_argnums=(1, 2))
def there_and_back(x: jax.Array, dtype: np.dtype, block: int) -> tuple[jax.Array, jax.Array]:
    payload, scales = quantize(x, dtype, block)
    assert payload.dtype == dtype and payload.size == x.size  # nothing is padded on the wire
    return dequantize(payload, scales, x.shape[1], block), scales


def round_trip(x: np.ndarray, dtype: np.dtype, block: int) -> tuple[np.ndarray, np.ndarray]:
    """What comes back of each element, and its scale."""
    back, scales = map(np.asarray, there_and_back(x, dtype, block))
    return back, np.repeat(scales, block, axis=1)[:, : x.shape[1]]


# --------------------------------------------------------------------------------------------------
# In blocks


@BOTH
@given(data=st.data())
def test_an_element_is_off_by_half_a_step_at_most(dtype: np.dtype, data: Any):
    """Whatever the sizes, and the magnitudes of the blocks."""
    count, size, block = (data.draw(st.integers(1, most)) for most in (3, 70, 80))
    magnitude = 10.0 ** data.draw(st.integers(-20, 20))
    spread = np.exp(4 * normal(count, size, seed=data.draw(st.integers(0, 99))))
    x = (normal(count, size) * spread * magnitude).astype(np.float32)
    got, scales = round_trip(x, dtype, block)
    allowed = scales / 2 if dtype == INT8 else np.maximum(np.abs(x) / 16, scales / 2**10)
    assert np.all(np.abs(got - x) <= allowed * (1 + 1e-4))


@BOTH
def test_the_largest_element_of_a_block_comes_back(dtype: np.dtype):
    x = normal(2, 64)
    got, _ = round_trip(x, dtype, 16)
    largest = np.abs(x.reshape(2, 4, 16)).argmax(axis=-1)[..., None]
    pairs = (np.take_along_axis(y.reshape(2, 4, 16), largest, axis=-1) for y in (got, x))
    np.testing.assert_allclose(*pairs, rtol=1e-6)


@BOTH
def test_a_block_of_zeros_is_exact_whatever_its_neighbors_are(dtype: np.dtype):
    x = normal(1, 48)
    x[:, 16:32] = 0
    got, _ = round_trip(x, dtype, 16)
    assert np.all(got[:, 16:32] == 0) and np.all(got[:, 32:] != 0)


@BOTH
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_nan_or_inf_makes_its_block_nan_and_no_other(dtype: np.dtype, bad: float):
    x = normal(2, 40)
    x[1, 20] = bad
    got, _ = round_trip(x, dtype, 16)
    assert np.all(np.isnan(got[1, 16:32]))
    assert np.all(np.isfinite(got[0])) and np.all(np.isfinite(got[1, [*range(16), *range(32, 40)]]))


def test_blocks_that_are_too_small_for_float32_come_back_as_zeros():
    x = np.full((1, 8), 1e-44, np.float32)
    np.testing.assert_array_equal(round_trip(x, INT8, 8)[0], 0)


# --------------------------------------------------------------------------------------------------
# What they take


@pytest.mark.parametrize("kind", [jfsdp.QuantizedAllGather, jfsdp.QuantizedReduceScatter])
def test_two_of_the_same_settings_are_equal_and_hash_equal(kind: Any):
    """A unit is part of what jit hashes."""
    one, other = kind("int8", 256), kind(jnp.int8)
    assert one == other and hash(one) == hash(other)
    assert one != kind(jnp.float8_e4m3fn) and one != kind("int8", 128)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.block = 3


REFUSED = {
    "wider": (
        {"dtype": "bfloat16"},
        ValueError,
        r"must be one of \['int8', 'float8_e4m3fn'\], got",
    ),
    "unsigned": ({"dtype": "uint8"}, ValueError, "got uint8"),
    "no dtype": ({"dtype": "int9"}, TypeError, "dtype must name a dtype, got 'int9'"),
    "no block": ({"block": 0}, ValueError, "block must be at least 1 element, got 0"),
    "half a block": ({"block": 2.5}, TypeError, "block must be an int, got 2.5"),
    "a bool": ({"block": True}, TypeError, "block must be an int, got True"),
}


@pytest.mark.parametrize("kind", [jfsdp.QuantizedAllGather, jfsdp.QuantizedReduceScatter])
@pytest.mark.parametrize(("settings", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_other_settings_are_refused(kind: Any, settings: Any, error: Any, text: str):
    with pytest.raises(error, match=rf"^{kind.__name__}.*{text}"):
        kind(**settings)


def test_stochastic_rounding_is_of_int8_only():
    with pytest.raises(ValueError, match="rounds to int8 only, got float8_e4m3fn"):
        jfsdp.QuantizedReduceScatter("float8_e4m3fn", stochastic=True)
    with pytest.raises(TypeError, match="must be True or False, got 1"):
        jfsdp.QuantizedReduceScatter(stochastic=1)  # pyright: ignore[reportArgumentType]


def test_async_and_unknown_reductions_are_refused():
    shape = jax.ShapeDtypeStruct((8,), jnp.float32)
    with pytest.raises(ValueError, match="QuantizedAllGather: async_op=True"):
        jfsdp.QuantizedAllGather()(shape, jnp.ones(1), ("a",), True)
    with pytest.raises(ValueError, match="QuantizedReduceScatter: async_op=True"):
        jfsdp.QuantizedReduceScatter()(shape, jnp.ones(8), ("a",), "sum", True)
    with pytest.raises(ValueError, match="op must be 'sum' or 'avg', got 'max'"):
        jfsdp.QuantizedReduceScatter()(shape, jnp.ones(8), ("a",), "max")


# --------------------------------------------------------------------------------------------------
# Over devices


def per_device(function: Callable[..., Any], x: Any, in_spec: P, out_spec: P) -> jax.Array:
    mesh = make_mesh(a=2, b=4)
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=in_spec, out_specs=out_spec, check_vma=False
    )
    return jax.jit(mapped)(x)


def described(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@BOTH
@GROUPS
def test_each_shard_is_quantized_by_itself_and_gathered_in_the_group_s_order(
    dtype: np.dtype, group: tuple[str, ...]
):
    """Of 3x5 elements: blocks of 4 leave the last one short."""
    gather, devices = jfsdp.QuantizedAllGather(dtype, 4), 8 if len(group) > 1 else 4
    x = normal(devices * 3, 5)
    whole = per_device(lambda s: gather(described(*x.shape), s, group), x, P(group), P())
    expected, _ = round_trip(x.reshape(devices, 15), dtype, 4)
    np.testing.assert_allclose(whole, expected.reshape(x.shape), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["int32", "float8_e5m2", "complex64"])
def test_what_is_no_wider_than_a_byte_or_not_real_is_gathered_and_reduced_as_it_is(dtype: str):
    x = jnp.arange(16.0).reshape(16, 1).astype(dtype)
    gather, reduce = jfsdp.QuantizedAllGather(), jfsdp.QuantizedReduceScatter()
    shape, group = described(16, 1, dtype=dtype), ("a", "b")
    np.testing.assert_array_equal(
        per_device(lambda s: gather(shape, s, group), x, P(group), P()), x
    )
    if dtype == "int32":
        part = described(2, 1, dtype=dtype)
        got = per_device(lambda g: reduce(part, g, group, "sum"), x, P(), P(group))
        np.testing.assert_array_equal(got, 8 * x)


def reduced(reduce: Any, gradients: np.ndarray, group: tuple[str, ...], op: str) -> np.ndarray:
    """`gradients` has one whole gradient for each device of the group, in its order."""
    devices, rows, width = gradients.shape
    part = described(rows // devices, width)
    return np.asarray(
        per_device(lambda g: reduce(part, g[0], group, op), gradients, P(group), P(group))
    )


def allowed_error(gradients: np.ndarray, block: int) -> np.ndarray:
    """Half the scale of each contribution's block, added up over the devices."""
    devices, rows, width = gradients.shape
    _, scales = round_trip(gradients.reshape(devices * devices, -1), INT8, block)
    return (scales.reshape(devices, rows, width) / 2).sum(axis=0)


@GROUPS
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_a_sum_is_off_by_half_a_scale_of_each_contribution_at_most(group: tuple[str, ...], op: str):
    devices = 8 if len(group) > 1 else 4
    gradients = normal(devices, devices * 3, 5) * np.exp(normal(devices, devices * 3, 5, seed=1))
    got = reduced(jfsdp.QuantizedReduceScatter(block=4), gradients, group, op)
    factor = devices if op == "avg" else 1
    error = np.abs(got * factor - gradients.sum(axis=0))
    assert np.all(error <= allowed_error(gradients, 4) * (1 + 1e-4) + 1e-6)
    assert error.max() > 1e-4  # it was quantized


def test_float8_reduces_too():
    gradients = normal(8, 16, 3)
    got = reduced(jfsdp.QuantizedReduceScatter(FLOAT8, 4), gradients, ("a", "b"), "sum")
    assert np.all(np.abs(got - gradients.sum(axis=0)) <= np.abs(gradients).sum(axis=0) / 16)


def test_a_nan_in_one_contribution_is_a_nan_in_the_sum():
    gradients = normal(8, 16, 3)
    gradients[5, 7, 1] = np.nan
    got = reduced(jfsdp.QuantizedReduceScatter(block=2), gradients, ("a", "b"), "sum")
    assert np.isnan(got[7, 1]) and np.isnan(got).sum() == 2


def test_stochastic_rounding_has_the_exact_mean():
    """Over 400 gradients that differ in their last element only, which goes to another device."""
    reduce = jfsdp.QuantizedReduceScatter(stochastic=True)
    gradients = np.tile(normal(1, 8, 16), (400, 1, 1)).repeat(8, axis=0)
    gradients = gradients.reshape(400, 8, 8, 16)
    gradients[:, :, -1, -1] = np.arange(400)[:, None] / 1e4
    group, part = ("a", "b"), described(1, 16)
    many = per_device(
        lambda gs: jax.lax.map(lambda g: reduce(part, g[0], group, "sum"), gs),
        gradients, P(None, group), P(None, group),
    )  # fmt: skip
    errors = np.asarray(many)[:, :-1] - gradients.sum(axis=1)[:, :-1]
    scale = 8 * np.abs(gradients[0, 0]).max() / 127
    assert np.abs(errors).max() <= scale
    assert np.abs(errors).max() > 0.02 * scale
    assert np.abs(errors.mean(axis=0)).max() < 0.1 * scale / np.sqrt(8)


def test_stochastic_rounding_rounds_the_same_gradient_the_same_way():
    reduce, gradients = jfsdp.QuantizedReduceScatter(stochastic=True), normal(8, 16, 3)
    one, other = (reduced(reduce, gradients, ("a", "b"), "sum") for _ in range(2))
    np.testing.assert_array_equal(one, other)
