"""What is computed in which dtype, as in PyTorch's own FSDP2 tests: see FSDP2_CONFORMANCE.md."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import linen_models
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers import assert_close, batch_on, gradients, make_mesh, rows

import jfsdp

S8: dict[str, int] = {"S": 8}
HSDP: dict[str, int] = {"R": 2, "S": 4}

# --------------------------------------------------------------------------------------------------
# Casts of inputs, recomputed too


class Noting(nnx.Module):
    """A product that notes the dtypes of its weight and input whenever it is traced."""

    def __init__(self, seed: int, seen: list[tuple[str, str]]):
        self.w = nnx.Param(jax.random.normal(jax.random.key(seed), (16, 16)))
        self.note = nnx.static(seen.append)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.note((self.w.dtype.name, x.dtype.name))
        return jnp.tanh(x @ self.w[...])


class Model(nnx.Module):
    """Three of them; the second gets float32 from outside, whatever the first returns."""

    def __init__(self, seen: list[tuple[str, str]], remat: bool):
        self.first, self.second, self.third = (Noting(seed, seen) for seed in range(3))
        self.remat = remat

    def __call__(self, x: jax.Array) -> jax.Array:
        def run(unit: nnx.Module, x: jax.Array) -> Any:
            return nnx.remat(lambda m, x: m(x))(unit, x) if self.remat else unit(x)

        x = run(self.first, x)
        return run(self.third, run(self.second, x.astype(jnp.float32)))


def policy(dtype: str, **settings: Any) -> jfsdp.MixedPrecisionPolicy:
    return jfsdp.MixedPrecisionPolicy(dtype, jnp.float32, **settings)


@pytest.mark.parametrize("cast_inputs", [True, False])
@pytest.mark.parametrize("remat", [False, True], ids=["plain", "remat"])
def test_inputs_are_cast_in_the_recomputation_as_in_the_forward(remat: bool, cast_inputs: bool):
    """One submodule in float16, its neighbors in bfloat16; what is traced again sees the same dtypes."""
    seen: list[tuple[str, str]] = []
    mesh, model = make_mesh(**HSDP), Model(seen, remat)
    for unit, dtype in ((model.first, "bfloat16"), (model.second, "float16")):
        jfsdp.shard(unit, mesh, mp_policy=policy(dtype, cast_forward_inputs=cast_inputs))
    jfsdp.shard(model.third, mesh, mp_policy=policy("bfloat16"))
    jfsdp.shard(model, mesh)
    _, grads = gradients(model, batch_on(mesh, rows(16, 16)))
    wide = [("bfloat16", "float32"), ("float16", "float32")]
    narrow = [("bfloat16", "bfloat16"), ("float16", "float16")]
    assert set(seen) == {*(narrow if cast_inputs else wide), ("bfloat16", "bfloat16")}
    expected = gradients(Model([], remat), rows(16, 16))[1]
    assert_close(nnx.as_pure(grads), nnx.as_pure(expected), rtol=0, atol=1e-2)


@pytest.mark.parametrize("remat", [False, True], ids=["plain", "remat"])
def test_outputs_are_cast_in_the_recomputation_as_in_the_forward(remat: bool):
    seen: list[tuple[str, str]] = []
    mesh, model = make_mesh(**S8), Model(seen, remat)
    settings = policy("bfloat16", cast_forward_inputs=False, output_dtype=jnp.float16)
    for unit in (model.first, model.second, model.third):
        jfsdp.shard(unit, mesh, mp_policy=settings)
    jfsdp.shard(model, mesh)
    x = batch_on(mesh, rows(16, 16))
    assert nnx.jit(lambda model, x: model(x))(model, x).dtype == jnp.float16
    gradients(model, x)
    assert set(seen) == {("bfloat16", "float32"), ("bfloat16", "float16")}


# --------------------------------------------------------------------------------------------------
# Structured inputs and outputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
    """A floating array, and integers."""

    x: jax.Array
    ids: jax.Array


class Result(NamedTuple):
    """A batch and what belongs to it."""

    y: jax.Array
    more: dict[str, Any]


class Structured(nnx.Module):
    """Takes a dataclass, a named tuple, a list or a dict of them, returns named tuples of dicts."""

    def __init__(self):
        self.inner, self.outer = (nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(2))

    def __call__(self, given: Any) -> Result:
        batch = given["batch"] if isinstance(given, dict) else given
        batch = batch[0] if isinstance(batch, list | tuple) and not hasattr(batch, "x") else batch
        h = jnp.tanh(self.inner(batch.x))
        return Result(self.outer(h), {"hidden": [h, (batch.ids, None)], "name": "result"})


class Pair(NamedTuple):
    """A batch as a named tuple."""

    x: jax.Array
    ids: jax.Array


KINDS = {
    "dataclass": lambda x, ids: Batch(x, ids),
    "named tuple": lambda x, ids: Pair(x, ids),
    "list": lambda x, ids: [Batch(x, ids)],
    "tuple": lambda x, ids: (Batch(x, ids), 1),
    "dict": lambda x, ids: {"batch": Pair(x, ids)},
}
POLICIES = {
    "float32": jfsdp.MixedPrecisionPolicy(),
    "bfloat16": policy("bfloat16"),
    "bfloat16 out": policy("float32", output_dtype="bfloat16"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", POLICIES)
def test_structures_of_arrays_go_in_and_come_out(name: str, kind: str):
    """Floating leaves are cast, integers are not, gradients come through every output."""

    def loss(model: Any, given: Any) -> jax.Array:
        result = model(given)
        return jnp.mean(result.y.astype(jnp.float32) ** 2) + jnp.mean(
            result.more["hidden"][0].astype(jnp.float32)
        )

    mesh, x = make_mesh(**S8), rows(16, 16)
    model = jfsdp.shard(Structured(), mesh, units=nnx.Linear, mp_policy=POLICIES[name])
    ids = jnp.arange(16) + 257151
    result = model(KINDS[kind](batch_on(mesh, x), batch_on(mesh, ids)))
    assert isinstance(result, Result)
    assert result.more["name"] == "result"
    hidden, (returned, none) = result.more["hidden"]
    assert none is None
    np.testing.assert_array_equal(returned, ids)
    assert result.y.dtype == hidden.dtype == ("float32" if name == "float32" else "bfloat16")
    got = gradients(model, KINDS[kind](x, ids), loss)
    expected = gradients(Structured(), KINDS[kind](x, ids), loss)
    tolerance = 1e-6 if name == "float32" else 0.02
    assert_close(got, expected, rtol=tolerance, atol=tolerance)


# --------------------------------------------------------------------------------------------------
# Norms


class Norms(nnx.Module):
    """LayerNorm and BatchNorm between products."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.inner, self.outer = nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
        self.layer_norm = nnx.LayerNorm(16, rngs=rngs)
        self.batch_norm = nnx.BatchNorm(16, momentum=0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(self.batch_norm(self.layer_norm(self.inner(x))))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("norms_apart", [False, True], ids=["with_all", "in_float32"])
def test_norms_train_in_half_precision(dtype: str, norms_apart: bool):
    """Statistics stay float32 and are those of the unsharded model; norms may have a policy of their own."""
    mesh, model, plain = make_mesh(**HSDP), Norms(), Norms()
    if norms_apart:
        for norm in (model.layer_norm, model.batch_norm):
            jfsdp.shard(norm, mesh, mp_policy=policy("float32", output_dtype=dtype))
    jfsdp.shard(model, mesh, mp_policy=policy(dtype))
    got, expected = gradients(model, batch_on(mesh, rows(16, 16))), gradients(plain, rows(16, 16))
    assert_close(got, expected, rtol=0.05, atol=0.02)
    statistics, wanted = (nnx.as_pure(nnx.state(m, nnx.BatchStat)) for m in (model, plain))
    assert_close(statistics, wanted, rtol=0.02, atol=0.01)
    assert {x.dtype.name for x in jax.tree.leaves(statistics)} == {"float32"}


class LinenNorms(nn.Module):
    """The same in Linen."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.LayerNorm()(nn.Dense(16)(x))
        return nn.Dense(8)(nn.BatchNorm(use_running_average=False, momentum=0.5)(x))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_norms_of_linen_train_in_half_precision(dtype: str):
    mesh, x = make_mesh(**HSDP), rows(16, 16)
    model: Any = jfsdp.shard(LinenNorms(), mesh, mp_policy=policy(dtype))

    def run(module: Any, x: jax.Array) -> Any:
        variables = linen_models.init(module, rows(16, 16))

        def loss(params: Any) -> Any:
            given = {**variables, "params": params}
            y, changed = module.apply(given, x, mutable=["batch_stats"])
            return jnp.mean(y.astype(jnp.float32) ** 2), changed["batch_stats"]

        return jax.jit(jax.grad(loss, has_aux=True))(variables["params"])

    got, expected = run(model, batch_on(mesh, x)), run(LinenNorms(), x)
    assert_close(got, expected, rtol=0.05, atol=0.02)
