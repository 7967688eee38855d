"""A small model in host memory, its state of momentum, and steps that keep them there or do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jfsdp
from jfsdp.inspect import PolicyViolation, Report
from jfsdp.offload import to_device, to_host

KERNEL, BIAS = 64 * 128 * 4 // 8, 128 * 4 // 8
SHARD = KERNEL + BIAS
PRECISION = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)
Moves = Callable[[Any], Any]


def model_on(mesh: jax.sharding.Mesh, **policy: Any) -> nnx.Linear:
    offload = jfsdp.CPUOffloadPolicy(**policy) if policy else jfsdp.OffloadPolicy()
    return jfsdp.init(
        lambda: nnx.Linear(64, 128, rngs=nnx.Rngs(0)),
        mesh,
        abstract=True,
        offload_policy=offload,
        mp_policy=PRECISION,
    )


ALL = {"parameters": True}
STATE = {"parameters": False}


def momentum_of(model: nnx.Linear, memory_kind: str | None = "pinned_host") -> optax.TraceState:
    def like(variable: Any) -> jax.ShapeDtypeStruct:
        value = variable.get_raw_value()
        sharding = NamedSharding(value.sharding.mesh, value.sharding.spec, memory_kind=memory_kind)
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)

    trace: Any = {"kernel": like(model.kernel), "bias": like(model.bias)}
    return optax.TraceState(trace)


def batch_on(mesh: jax.sharding.Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))


def step_with(of_model: Moves = to_host, of_state: Moves = to_host) -> Any:
    """A step of momentum on the device; where its results go is given."""

    def step(model: nnx.Linear, state: Any, x: jax.Array) -> Any:
        def loss(model: nnx.Linear) -> jax.Array:
            return jnp.mean(model(x) ** 2)

        value, grads = nnx.value_and_grad(loss)(model)
        trace: Any = {}
        for name in ("kernel", "bias"):
            variable = getattr(model, name)
            moment = to_device(state.trace[name]) + to_device(getattr(grads, name)[...])
            new = to_device(variable[...]) - 0.1 * moment
            variable.set_raw_value(of_model(new))
            trace[name] = of_state(moment)
        return value, optax.TraceState(trace)

    return nnx.jit(step, donate_argnums=(0, 1))


def report_of(mesh: jax.sharding.Mesh, model: Any, state: Any, step: Any, **how: Any) -> Report:
    return jfsdp.inspect(step, model, state, batch_on(mesh), **how)


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.fixture(scope="module")
def offloaded(mesh: jax.sharding.Mesh) -> Report:
    """A compiled step of a model that lies in host memory with its state."""
    model = model_on(mesh, **ALL)
    return report_of(mesh, model, momentum_of(model), step_with(), compile=True)


def text_of(report: Report) -> str:
    with pytest.raises(PolicyViolation) as violation:
        report.check()
    (departure,) = violation.value.departures
    return str(departure)
