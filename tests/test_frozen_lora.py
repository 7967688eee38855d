"""A frozen base in bfloat16 and adapters in float32: what is reduced, cast and changed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from helpers import (
    assert_close,
    batch_on,
    compilations,
    make_mesh,
    mean_square,
    rows,
    stablehlo_ops,
)
from linen_models import abstract, assert_same, filled

import jfsdp

WIDTH, RANK = 16, 8
X = rows(16, WIDTH)
BASE, BASE_SHARD = (WIDTH, 48), (WIDTH, 6)
"""The shape of the frozen kernels, which nothing else has."""

ADAPTERS = {(WIDTH, RANK), (RANK, 48), (48, RANK), (RANK, WIDTH)}


class Block(nnx.Module):
    """A frozen layer that is adapted, and its adapted way back."""

    def __init__(self, rngs: nnx.Rngs):
        settings: Any = {
            "lora_rank": RANK,
            "param_dtype": jnp.bfloat16,
            "lora_param_dtype": jnp.float32,
            "use_bias": False,
        }
        self.up = nnx.LoRALinear(WIDTH, 48, **settings, rngs=rngs)
        self.down = nnx.LoRALinear(48, WIDTH, **settings, rngs=rngs)
        for layer in (self.up, self.down):  # flax starts at zero: then the other has no gradient
            layer.lora.lora_b[...] = jax.random.normal(rngs.params(), layer.lora.lora_b.shape) / 9

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


def make() -> nnx.Sequential:
    rngs = nnx.Rngs(0)
    return nnx.Sequential(*(Block(rngs) for _ in range(2)))


ONLY = nnx.DiffState(0, nnx.LoRAParam)
POLICIES = {
    "own dtypes": jfsdp.MixedPrecisionPolicy(reduce_dtype="float32"),
    "bfloat16": jfsdp.MixedPrecisionPolicy("bfloat16", "float32"),
}


@pytest.fixture(params=POLICIES.values(), ids=list(POLICIES))
def model(request) -> Any:
    return jfsdp.shard(make(), make_mesh(S=8), units=Block, mp_policy=request.param)


def gradients(model: Any, x: jax.Array) -> Any:
    return nnx.jit(nnx.value_and_grad(mean_square, argnums=ONLY))(model, x)


def lowered(model: Any) -> Any:
    step = nnx.jit(nnx.grad(mean_square, argnums=ONLY))
    return step.lower(model, batch_on(make_mesh(S=8), X))


def test_only_adapters_are_reduced(model):
    ops = stablehlo_ops(lowered(model))
    scattered = [op for op in ops if op.kind in ("reduce_scatter", "all_reduce")]
    assert {op.dtype for op in scattered} == {"f32"}
    assert {np.prod(op.shape) * 8 for op in scattered} == {WIDTH * RANK, 48 * RANK}
    assert sum(ops[op] for op in scattered) == 8


def test_base_is_gathered_in_its_own_dtype_and_never_cast(model):
    program = lowered(model)
    wide = {op for op in stablehlo_ops(program) if op.kind == "all_gather" and 48 in op.shape}
    assert {op.dtype for op in wide if op.shape not in ADAPTERS} == {"bf16"}
    shard = "x".join(map(str, BASE_SHARD))
    assert f"tensor<{shard}xbf16>" in program.as_text()
    assert f"tensor<{shard}xf32>" not in program.as_text()


def test_gradients_are_those_of_the_unsharded_model():
    model = jfsdp.shard(make(), make_mesh(S=8), units=Block)
    expected = gradients(make(), X)
    assert_close(gradients(model, batch_on(make_mesh(S=8), X)), expected, rtol=1e-5, atol=1e-6)


def test_training_changes_adapters_alone(model):
    bases = [block.up.kernel for block in model.layers]
    before = [np.asarray(base[...]).view(np.uint16) for base in bases]
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)
    x = batch_on(make_mesh(S=8), X)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(mean_square, argnums=ONLY)(model, x)
        optimizer.update(model, grads)
        return loss

    with compilations() as counts:
        losses = [float(step(model, optimizer, x)) for _ in range(3)]
    assert counts["step"] == 1
    assert losses[-1] < losses[0]
    for base, bits in zip(bases, before, strict=True):
        assert base.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(base[...]).view(np.uint16), bits)
    moments = jax.tree.leaves(optimizer.opt_state[0].mu)
    assert {m.shape for m in moments} == ADAPTERS


def test_adapters_lie_as_jfsdp_s_rule_says(model):
    """They are a subclass of Param: nothing keeps them from being sharded."""
    rows = {row.path: row for row in jfsdp.plan(model).rows}
    assert rows["layers.0.up.lora.lora_a"].bytes_per_device == WIDTH * RANK * 4 // 8


def test_unit_with_nothing_to_train_costs_no_reduction():
    model = make()
    jfsdp.shard(model, make_mesh(S=8), units=[nnx.LoRALinear, Block])
    only = nnx.DiffState(0, nnx.PathContains("up"))  # of all others nothing
    step = nnx.jit(nnx.grad(mean_square, argnums=only))
    ops = stablehlo_ops(step.lower(model, batch_on(make_mesh(S=8), X)))
    assert sum(n for op, n in ops.items() if op.kind == "reduce_scatter") == 2 * 3


# --------------------------------------------------------------------------------------------------
# Linen: the adapters are a part of the tree, and the loss is differentiated by that part


class Adapted(nn.Module):
    """A frozen kernel in bfloat16, and an adapter by hand."""

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.normal(0.1)
        base = self.param("base", init, BASE, jnp.bfloat16)
        a = self.param("lora_a", init, (WIDTH, RANK))
        b = self.param("lora_b", init, (RANK, 48))
        return x @ base.astype(x.dtype) + x @ a @ b


def linen_gradients(model: Any, params: Any) -> Any:
    def loss(trained: Any, frozen: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(model.apply({"params": {**frozen, **trained}}, x) ** 2)

    frozen = {"base": params["base"]}
    trained = {name: params[name] for name in ("lora_a", "lora_b")}
    return jax.jit(jax.grad(loss)), (trained, frozen, X)


def test_linen_reduces_adapters_alone_and_gathers_the_base_in_bfloat16():
    model = jfsdp.shard(Adapted(), make_mesh(S=8))
    step, arguments = linen_gradients(model, filled(abstract(model, X))["params"])
    ops = stablehlo_ops(step.lower(*arguments))
    assert sum(n for op, n in ops.items() if op.kind == "reduce_scatter") == 2
    assert {op.dtype for op in ops if op.kind == "all_gather" and op.shape == BASE} == {"bf16"}


def test_linen_gradients_are_those_of_the_unsharded_model():
    results = []
    for model in (jfsdp.shard(Adapted(), make_mesh(S=8)), Adapted()):
        step, arguments = linen_gradients(model, filled(abstract(model, X))["params"])
        results.append(step(*arguments))
    assert_same(*results)
