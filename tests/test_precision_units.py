"""Units with policies of their own: what each casts, under remat too, and float32 tables among the inputs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers import assert_close, both_partitionings, gradients, make_mesh, rows

import jfsdp

BF16, F16, F32 = (jnp.dtype(name) for name in ("bfloat16", "float16", "float32"))
Policy = jfsdp.MixedPrecisionPolicy


class Seeing(nnx.Module):
    """A matrix product that notes the dtypes of its input and of its weight, at each trace."""

    def __init__(self, name: str, seen: list[Any], rngs: nnx.Rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (8, 8)) / 3)
        self.note = nnx.static(lambda x, w: seen.append((name, x.dtype.name, w.dtype.name)))

    def __call__(self, x):
        self.note(x, self.w[...])
        return jnp.tanh(x @ self.w[...])


class Pair(nnx.Module):
    """The user casts between the two; the second may get an input from outside."""

    def __init__(self, cast_to: Any = None, remat: bool = False):
        seen: list[Any] = []
        self.first = Seeing("first", seen, nnx.Rngs(0))
        self.second = Seeing("second", seen, nnx.Rngs(1))
        self.log = nnx.static(lambda: seen)
        self.cast_to, self.remat = cast_to, remat

    def __call__(self, x, external=None):
        def forward(module: nnx.Module, x: jax.Array) -> Any:
            return module(x)

        x = (nnx.remat(forward) if self.remat else forward)(self.first, x)
        if self.cast_to is not None:
            x = x.astype(self.cast_to)
        if external is not None:
            x = external + x.astype(external.dtype)
        return (nnx.remat(forward) if self.remat else forward)(self.second, x)


def shard(model: Pair, first: Policy, second: Policy, root: Policy, **settings: Any) -> Pair:
    mesh = make_mesh(S=8)
    jfsdp.shard(model.first, mesh, mp_policy=first, **settings)
    jfsdp.shard(model.second, mesh, mp_policy=second, **settings)
    return jfsdp.shard(model, mesh, mp_policy=root, **settings)


@both_partitionings
def test_float16_on_one_submodule(partitioning):
    """FSDP2's float16_on_one_submodule: its output is cast back; the user casts what goes in."""
    half = Policy("float16", output_dtype="float32", cast_forward_inputs=False)
    model = Pair(cast_to="float16")
    shard(model, Policy(), half, Policy(), partitioning=partitioning)
    y = model(rows(8, 8))
    assert set(model.log()) == {("first", "float32", "float32"), ("second", "float16", "float16")}
    assert y.dtype == F32
    np.testing.assert_allclose(y, Pair()(rows(8, 8)), rtol=1e-2, atol=1e-2)


@both_partitionings
def test_float16_submodule_that_casts_its_own_inputs(partitioning):
    half = Policy("float16", output_dtype="float32")
    model = shard(Pair(), Policy(), half, Policy(), partitioning=partitioning)
    assert model(rows(8, 8)).dtype == F32
    assert set(model.log()) == {("first", "float32", "float32"), ("second", "float16", "float16")}


@pytest.mark.parametrize(("casts", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_submodules_with_external_inputs(casts, dtype):
    """FSDP2's case: an input that the inner unit gets from outside is cast by its own policy."""
    inner = Policy("bfloat16", cast_forward_inputs=casts)
    root = Policy("bfloat16", cast_forward_inputs=False)
    model = shard(Pair(), Policy("bfloat16"), inner, root)
    model(rows(8, 8), rows(8, 8, seed=5))
    assert set(model.log()) == {("first", "bfloat16", "bfloat16"), ("second", dtype, "bfloat16")}


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("remat", [False, True], ids=["plain", "users_remat"])
def test_recomputation_casts_inputs_and_outputs_as_the_forward_did(remat, reshard):
    """FSDP2's checkpoint_recompute_casts_forward_inputs and _outputs."""
    first, second = Policy("bfloat16", output_dtype="float16"), Policy("bfloat16")
    found = []
    for wrapped in (False, remat):
        model = Pair(remat=wrapped)
        shard(model, first, second, Policy(output_dtype="float32"), reshard_after_forward=reshard)
        found.append(gradients(model, rows(8, 8)))
        assert set(model.log()) == {
            ("first", "bfloat16", "bfloat16"),
            ("second", "bfloat16", "bfloat16"),
        }
    # XLA for CPUs of jax 0.10.2 keeps more bits in what it fuses.
    assert_close(found[1], found[0], rtol=2e-2, atol=5e-4)


def test_gradients_are_those_of_the_casts_written_out():
    first, second = Policy("bfloat16", output_dtype="float32"), Policy("float16")
    model = shard(Pair(), first, second, Policy(output_dtype="float32"))

    def loss(model: Pair, x: jax.Array) -> jax.Array:
        x = jnp.tanh(x.astype(BF16) @ model.first.w[...].astype(BF16)).astype(F32)
        x = jnp.tanh(x.astype(F16) @ model.second.w[...].astype(F16)).astype(F32)
        return jnp.mean(x**2)

    found, expected = gradients(model, rows(8, 8)), gradients(Pair(), rows(8, 8), loss)
    assert_close(found, expected, rtol=2e-2, atol=5e-4)


# --------------------------------------------------------------------------------------------------
# Rotary embeddings. bfloat16 holds 8192 for position 8191; the cosine is off by 0.94 there.

POSITIONS = np.arange(8184, 8192, dtype=np.float32)


def rotated(x: Any, positions: Any, numpy: Any = jnp) -> Any:
    """x (batch, length, 2), turned by the angle of each position."""
    cos, sin = numpy.cos(positions)[None], numpy.sin(positions)[None]
    return numpy.stack([x[..., 0] * cos - x[..., 1] * sin, x[..., 0] * sin + x[..., 1] * cos], -1)


class Rope(nnx.Module):
    """Turns what comes in; the table of positions is an argument, or state of its own."""

    def __init__(self, own_table: bool = False):
        self.scale = nnx.Param(jnp.ones((2,)))
        self.table = nnx.Variable(jnp.asarray(POSITIONS)) if own_table else None

    def __call__(self, x, positions=None):
        table = self.table[...] if self.table is not None else positions
        return rotated(x.astype(F32) * self.scale[...].astype(F32)[None, None], table.astype(F32))


EXACT = rotated(np.ones((8, 8, 2)), POSITIONS.astype(np.float64), np)


def off(model: nnx.Module, *tables: Any) -> float:
    y = model(jnp.ones((8, 8, 2)), *map(jnp.asarray, tables))
    return float(np.abs(np.asarray(y, np.float64) - EXACT).max())


def rope(own_table: bool = False, **policy: Any) -> nnx.Module:
    settings = {} if own_table else {"in_specs": {"positions": jax.sharding.PartitionSpec()}}
    policy = {"param_dtype": "bfloat16", **policy}
    return jfsdp.shard(Rope(own_table), make_mesh(S=8), mp_policy=Policy(**policy), **settings)


def test_a_table_among_the_inputs_is_rounded_like_every_float():
    """B25: position 8191 becomes 8192."""
    assert off(rope(), POSITIONS) > 0.5


def test_a_table_among_the_inputs_is_exact_where_inputs_are_not_cast():
    assert off(rope(cast_forward_inputs=False), POSITIONS) < 1e-3


def test_a_table_that_is_state_of_the_module_is_never_cast():
    assert off(rope(own_table=True)) < 1e-3


class LinenRope(nn.Module):
    """The table is a collection of its own, or computed inside."""

    kind: str

    @nn.compact
    def __call__(self, x, positions=None):
        scale = self.param("scale", nn.initializers.ones, (2,)).astype(F32)
        if self.kind == "collection":
            positions = self.variable("tables", "positions", lambda: jnp.asarray(POSITIONS)).value
        if self.kind == "inside":
            positions = jnp.arange(8184, 8192)
        return rotated(x.astype(F32) * scale[None, None], jnp.asarray(positions, F32))


@pytest.mark.parametrize(
    ("kind", "casts", "exact"),
    [
        ("argument", True, False),
        ("argument", False, True),
        ("collection", True, True),
        ("inside", True, True),
    ],
)
def test_tables_in_linen(kind, casts, exact):
    tables = (jnp.asarray(POSITIONS),) if kind == "argument" else ()
    policy = Policy("bfloat16", cast_forward_inputs=casts)
    settings = {"in_specs": {"positions": jax.sharding.PartitionSpec()}} if tables else {}
    model = jfsdp.shard(LinenRope(kind), make_mesh(S=8), mp_policy=policy, **settings)
    x = jnp.ones((8, 8, 2))
    y = model.apply(model.init(jax.random.key(0), x, *tables), x, *tables)
    worst = np.abs(np.asarray(y, np.float64) - EXACT).max()
    assert worst < 1e-3 if exact else worst > 0.5
