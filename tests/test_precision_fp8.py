"""Parameters of 8-bit floats are storage: gathered as they are, handed over as they are, reduced if asked."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers import (
    MeshOf,
    assert_close,
    assert_spec,
    batch_on,
    both_axis_types_and_partitionings,
    count_ops,
    local_shape,
    make_mesh,
    rows,
)

import jfsdp

POLICY = jfsdp.MixedPrecisionPolicy("bfloat16", cast_forward_inputs=False)
FORMATS = {"float8_e4m3fn": "f8E4M3FN", "float8_e5m2": "f8E5M2"}
formats = pytest.mark.parametrize("dtype", FORMATS)


class Net(nnx.Module):
    """A frozen base stored in 8 bits, and an adapter beside it."""

    def __init__(self, dtype: Any = "float8_e4m3fn", seen: dict[str, Any] | None = None):
        self.base = nnx.Param(rows(16, 16, seed=2).astype(dtype))
        self.adapter = nnx.Param(rows(16, 16, seed=3))
        self.note = nnx.static((seen if seen is not None else {}).update)

    def __call__(self, x):
        base, adapter = self.base[...], self.adapter[...]
        self.note({"base": base.dtype, "adapter": adapter.dtype})
        return jnp.tanh(x @ base.astype(jnp.float32)) @ adapter.astype(jnp.float32)


def is_adapter(path: Any, _: Any) -> bool:
    return "adapter" in path


@nnx.jit
def adapter_gradient(model: nnx.Module, x: jax.Array) -> Any:
    of = nnx.DiffState(0, nnx.All(nnx.Param, is_adapter))
    return nnx.value_and_grad(lambda m, x: jnp.mean(m(x) ** 2), argnums=of)(model, x)


@nnx.jit
def whole_gradient(model: nnx.Module, x: jax.Array) -> Any:
    return nnx.value_and_grad(lambda m, x: jnp.mean(m(x) ** 2))(model, x)


@formats
@both_axis_types_and_partitionings
def test_frozen_next_to_float32(mesh_of: MeshOf, partitioning: str, dtype: str):
    """FSDP2's mixed_dtypes_no_grad_param: sharded, seen as it is stored, the other's gradient right."""
    with mesh_of(S=8) as mesh:
        seen: dict[str, Any] = {}
        policy = jfsdp.MixedPrecisionPolicy(cast_forward_inputs=False)
        model = jfsdp.shard(Net(dtype, seen), mesh, mp_policy=policy, partitioning=partitioning)
        assert_spec(model.base, "S")
        assert local_shape(model.base[...]) == (2, 16)
        found = adapter_gradient(model, batch_on(mesh, rows(8, 16)))
        assert seen == {"base": jnp.dtype(dtype), "adapter": jnp.float32}
        assert_close(found, adapter_gradient(Net(dtype), rows(8, 16)), rtol=1e-5, atol=1e-6)


@formats
def test_it_is_never_cast_by_param_dtype(dtype):
    seen: dict[str, Any] = {}
    jfsdp.shard(Net(dtype, seen), make_mesh(S=8), mp_policy=POLICY)(rows(8, 16))
    assert seen == {"base": jnp.dtype(dtype), "adapter": jnp.bfloat16}


@formats
@pytest.mark.parametrize("reshard", [True, False])
def test_its_bytes_are_on_the_wire(dtype, reshard):
    """One byte an element, in the forward and, dropped in between, in the backward."""
    model = jfsdp.shard(Net(dtype), make_mesh(S=8), mp_policy=POLICY, reshard_after_forward=reshard)

    @nnx.jit
    def step(model: nnx.Module, x: jax.Array) -> Any:
        of = nnx.DiffState(0, nnx.All(nnx.Param, is_adapter))
        return nnx.grad(lambda m, x: jnp.mean(m(x) ** 2), argnums=(of, 1))(model, x)

    x = rows(8, 16)
    report = jfsdp.inspect(step, model, x)
    gathers = [c for c in report.collectives if c.kind == "all-gather" and c.leaf == "base"]
    assert {c.dtype for c in gathers} == {dtype}
    assert sum(c.total_bytes for c in gathers) == (1 + reshard) * 16 * 16 * 7 / 8
    assert count_ops(step.lower(model, x).lowered, "all_gather", FORMATS[dtype]) == 1 + reshard
    assert {c.leaf for c in report.collectives if c.kind == "reduce-scatter"} == {"adapter"}
    report.check()


def test_kept_over_some_axes_it_stays_in_8_bits():
    dims = jfsdp.DataParallelMeshDims(shard=("outer", "inner"))
    settings = {"dp_mesh_dims": dims, "reshard_after_forward": "inner", "mp_policy": POLICY}
    model = jfsdp.shard(Net(), make_mesh(outer=2, inner=4), **settings)
    report = jfsdp.inspect(adapter_gradient, model, rows(8, 16))
    gathers = [c for c in report.collectives if c.kind == "all-gather" and c.leaf == "base"]
    assert {(c.axes, c.dtype) for c in gathers} == {
        (("outer",), "float8_e4m3fn"),
        (("inner",), "float8_e4m3fn"),
    }
    report.check()


def test_param_dtype_override_fn_may_say_otherwise():
    seen: dict[str, Any] = {}
    fn = lambda path, param: "bfloat16" if path == "base" else None  # noqa: E731
    policy = jfsdp.MixedPrecisionPolicy(param_dtype_override_fn=fn)
    model = jfsdp.shard(Net(seen=seen), make_mesh(S=8), mp_policy=policy)
    lowered = nnx.jit(lambda model, x: model(x)).lower(model, rows(8, 16)).lowered
    assert seen["base"] == jnp.bfloat16
    assert count_ops(lowered, "all_gather", "bf16") == 1


# --------------------------------------------------------------------------------------------------
# Differentiated


@formats
@pytest.mark.parametrize("partitioning", ["manual", "auto"])
def test_differentiating_it_needs_a_reduce_dtype(dtype, partitioning):
    text = (
        f"base is differentiated and stored in {dtype}, in which gradients cannot be summed. Say in which "
        'dtype they are: MixedPrecisionPolicy(reduce_dtype="float32"); or freeze the parameter: '
        "differentiate with respect to the others only."
    )
    model = jfsdp.shard(Net(dtype), make_mesh(S=8), mp_policy=POLICY, partitioning=partitioning)
    with pytest.raises(ValueError, match=re.escape(text)):
        whole_gradient(model, rows(8, 16))


@formats
def test_its_gradient_is_summed_in_the_reduce_dtype_that_is_stated(dtype):
    """And rounded to what it is stored in afterwards, as any gradient is."""
    policy = jfsdp.MixedPrecisionPolicy(reduce_dtype="float32")
    model = jfsdp.shard(Net(dtype), make_mesh(S=8), mp_policy=policy)
    report = jfsdp.inspect(whole_gradient, model, rows(8, 16))
    assert report.count("reduce-scatter", "S", "float32") == 2
    report.check()
    _, found = whole_gradient(model, rows(8, 16))
    assert found["base"].dtype == jnp.dtype(dtype)

    def share(base: jax.Array, x: jax.Array) -> jax.Array:
        y = jnp.tanh(x @ base.astype(jnp.float32)) @ Net(dtype).adapter[...]
        return jnp.sum(y**2) / (8 * 16)

    base, shares = Net(dtype).base[...], []
    for x in jnp.split(rows(8, 16), 8):
        shares.append(jax.grad(share)(base, x).astype(jnp.float32))
    expected = np.asarray(sum(shares[1:], shares[0]).astype(dtype), np.float32)
    got = np.asarray(found["base"][...], np.float32)
    np.testing.assert_allclose(got, expected, rtol=0.3, atol=0.02)


def test_nothing_is_stated_of_the_gradient_of_what_cannot_be_trained():
    model = jfsdp.shard(Net(), make_mesh(S=8), mp_policy=POLICY)
    report = jfsdp.inspect(adapter_gradient, model, rows(8, 16))
    (scattered,) = [row for row in report.totals if row.kind == "reduce-scatter"]
    assert scattered.ratio == 1.0


# --------------------------------------------------------------------------------------------------
# Linen


class LinenNet(nn.Module):
    """`base` is stored in 8 bits."""

    @nn.compact
    def __call__(self, x):
        cast = lambda key, shape: rows(*shape, seed=2).astype("float8_e4m3fn")  # noqa: E731
        base = self.param("base", cast, (16, 16))
        assert base.dtype == jnp.dtype("float8_e4m3fn")
        adapter = self.param("adapter", nn.initializers.lecun_normal(), (16, 16))
        hidden = jnp.tanh(x @ base.astype(jnp.float32))
        return hidden @ adapter.astype(jnp.float32)


def linen_step(model: Any, frozen: bool) -> Any:
    @jax.jit
    def step(params: Any, x: jax.Array) -> Any:
        def loss(trained: Any) -> jax.Array:
            y: Any = model.apply({"params": {**params, **trained}}, x)
            return jnp.mean(y**2)

        return jax.grad(loss)({"adapter": params["adapter"]} if frozen else params)

    return step


def test_linen_gathers_it_as_it_is_stored():
    model = jfsdp.shard(LinenNet(), make_mesh(S=8), mp_policy=POLICY)
    params = model.init(jax.random.key(0), rows(8, 16))["params"]
    assert (local_shape(params["base"]), params["base"].dtype) == ((2, 16), "float8_e4m3fn")
    step = linen_step(model, frozen=True)
    report = jfsdp.inspect(step, params, rows(8, 16), model=model)
    gathered = {c.leaf: c.dtype for c in report.collectives if c.kind == "all-gather"}
    assert gathered == {"base": "float8_e4m3fn", "adapter": "bfloat16"}
    report.check()
    plain = linen_step(LinenNet(), frozen=True)(jfsdp.unshard(params), rows(8, 16))
    assert_close(step(params, rows(8, 16)), plain, rtol=0.05, atol=0.01)


def test_linen_refuses_to_differentiate_it_without_a_reduce_dtype():
    model = jfsdp.shard(LinenNet(), make_mesh(S=8), mp_policy=POLICY)
    params = model.init(jax.random.key(0), rows(8, 16))["params"]
    with pytest.raises(ValueError, match="base is differentiated and stored in float8_e4m3fn"):
        linen_step(model, frozen=False)(params, rows(8, 16))
