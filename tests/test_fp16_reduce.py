"""Reductions in float16 round, overflow and underflow where FSDP2's do.

FSDP2 sums gradients of local means: it divides them by p before and by N/p after. What jfsdp sums are shares
of the gradient of the global mean, 1/N of those: they are multiplied by N/p before, and divided by it after.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers import batch_on, equations, make_mesh

import jfsdp
from jfsdp.comm import DefaultReduceScatter
from jfsdp.policies import headroom

F16 = jfsdp.MixedPrecisionPolicy(reduce_dtype="float16")


@pytest.mark.parametrize(
    ("devices", "before"),
    [
        *((1, 1), (2, 2), (3, 2), (4, 2), (6, 4), (7, 2), (8, 4), (9, 2), (12, 4)),
        *((16, 4), (32, 8), (64, 8), (128, 16)),
    ],
)
def test_factor_is_n_over_the_power_of_two_that_fsdp2_divides_by_before(devices, before):
    assert headroom(np.dtype("float16"), devices) == devices / before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_factor_of_every_other_dtype_is_1(dtype):
    assert headroom(np.dtype(dtype), 8) == 1


class Weights(nnx.Module):
    """The gradient of weight j is the sum of column j of the batch."""

    def __init__(self, width: int = 8):
        self.w = nnx.Param(jnp.zeros(width))

    def __call__(self, x):
        return (x * self.w[...][None]).sum(1)


def sharded(mesh: Any, policy: Any = F16, **settings: Any) -> Weights:
    return jfsdp.shard(Weights(), mesh, mp_policy=policy, **settings)


def gradient(shares: Any, mesh: Any, policy: Any = F16, **settings: Any) -> np.ndarray:
    """The gradient of a weight to which each device contributes one of `shares`, 8 of them."""
    x = batch_on(mesh, jnp.broadcast_to(jnp.asarray(shares, jnp.float32)[:, None], (8, 8)))
    step = nnx.jit(nnx.grad(lambda model, x: model(x).sum()))
    (found,) = jax.tree.leaves(step(sharded(mesh, policy, **settings), x))
    assert len(set(np.asarray(found))) == 1
    return np.asarray(found)[0]


MESHES = {"S8": {"S": 8}, "R2xS4": {"R": 2, "S": 4}, "R8": {"R": 8}}
meshes = pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)


def dims_of(sizes: dict[str, int]) -> dict[str, Any]:
    shard, replicate = ("S" in sizes) and "S", ("R" in sizes) and "R"
    return {"dp_mesh_dims": jfsdp.DataParallelMeshDims(shard or None, replicate or None)}


@meshes
def test_shares_that_float16_rounds_to_zero_survive(sizes):
    """2.5e-8 is less than half of the smallest float16, 6e-8; N/p times as much is not."""
    found = gradient([2.5e-8] * 8, make_mesh(**sizes), **dims_of(sizes))
    assert np.float16(2.5e-8) == 0
    np.testing.assert_allclose(found, 8 * 2.5e-8, rtol=0.25)


@meshes
@pytest.mark.parametrize(("share", "overflows"), [(4000.0, False), (4200.0, True)])
def test_sums_overflow_where_those_of_fsdp2_do(sizes, share, overflows):
    """FSDP2 sums local means, 8 times a share, divided by 4: up to 65504 that is finite."""
    assert (8 * (8 * share / 4) > 65504) == overflows
    found = gradient([share] * 8, make_mesh(**sizes), **dims_of(sizes))
    assert np.isinf(found) if overflows else found == 8 * share


@meshes
def test_rounding_is_that_of_fsdp2(sizes):
    """Bit by bit, where the order of the sum does not matter: all shares but one are small integers."""
    shares = np.array([1 / 3, 1, 2, 3, 4, 5, 6, 7], np.float32)
    means = (8 * shares).astype(np.float16) / np.float16(4)
    expected = np.float32(means.sum(dtype=np.float16) / np.float16(2))
    assert gradient(shares, make_mesh(**sizes), **dims_of(sizes)) == expected


def program(policy: Any) -> list[tuple[str, str]]:
    """Primitives of the backward and the dtypes they result in, from the gradient of the whole weight on."""
    graphdef, state = nnx.split(sharded(make_mesh(R=2, S=4), policy))

    def loss(state: Any, x: Any) -> Any:
        return nnx.merge(graphdef, state)(x).sum()

    found = list(equations(jax.make_jaxpr(jax.grad(loss))(state, jnp.ones((8, 8))).jaxpr))
    named = [e for e in found if "jfsdp_reduce" in str(e.source_info.name_stack)]
    return [(e.primitive.name, str(e.outvars[0].aval.dtype)) for e in named]


def test_it_is_multiplied_cast_scattered_summed_divided_and_cast():
    assert program(F16) == [
        ("mul", "float32"),
        ("convert_element_type", "float16"),
        ("reduce_scatter", "float16"),
        ("psum", "float16"),
        ("div", "float16"),
        ("convert_element_type", "float32"),
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_other_dtype_is_multiplied(dtype):
    names = {name for name, _ in program(jfsdp.MixedPrecisionPolicy(reduce_dtype=dtype))}
    assert names <= {"convert_element_type", "reduce_scatter", "psum"}


def test_a_reduction_of_the_users_gets_what_is_multiplied():
    seen: list[Any] = []

    class Spy(DefaultReduceScatter):
        def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
            jax.debug.callback(seen.append, input_tensor)
            return super().__call__(output_tensor, input_tensor, group, op, async_op)

    assert gradient([3.0] * 8, make_mesh(S=8), reduce_scatter=Spy()) == 24
    jax.effects_barrier()
    assert {(array.dtype.name, float(array[0])) for array in seen} == {("float16", 6.0)}


def test_linen_does_the_same():
    class Weighted(nn.Module):
        @nn.compact
        def __call__(self, x):
            return (x * self.param("w", nn.initializers.zeros, (8,))[None]).sum(1)

    mesh = make_mesh(S=8)
    model = jfsdp.shard(Weighted(), mesh, mp_policy=F16)
    x = batch_on(mesh, jnp.full((8, 8), 2.5e-8))
    variables = model.init(jax.random.key(0), x)
    found = jax.jit(jax.grad(lambda v, x: model.apply(v, x).sum()))(variables, x)
    np.testing.assert_allclose(found["params"]["w"], np.full(8, 2e-7), rtol=0.25)


def test_what_is_stated_is_float16():
    report = jfsdp.inspect(
        nnx.jit(nnx.grad(lambda model, x: model(x).sum())),
        sharded(make_mesh(R=2, S=4)),
        jnp.ones((8, 8)),
    )
    assert {c.dtype for c in report.collectives if c.phase == "backward"} == {"float16"}
    report.check()
