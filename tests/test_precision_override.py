"""`param_dtype_override_fn`: some parameters are gathered and computed in another dtype than the rest."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from helpers import (
    MeshOf,
    assert_close,
    batch_on,
    both_axis_types_and_partitionings,
    count_ops,
    gradients,
    make_mesh,
    rows,
    shard_refused,
)
from models import CASES

import jfsdp

F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


def norms_in_float32(path: str, param: Any) -> Any:
    return jnp.float32 if "norm" in path else None


def policy(fn: Any = norms_in_float32, **other: Any) -> jfsdp.MixedPrecisionPolicy:
    return jfsdp.MixedPrecisionPolicy("bfloat16", **other, param_dtype_override_fn=fn)


class Net(nnx.Module):
    """A kernel and the scale of a norm, which says in which dtypes it sees them."""

    def __init__(self, seen: dict[str, Any] | None = None):
        self.kernel = nnx.Param(rows(8, 8))
        self.norm_scale = nnx.Param(jnp.ones(8))
        self.note = nnx.static((seen if seen is not None else {}).update)

    def __call__(self, x):
        scale = self.norm_scale[...]
        self.note({"kernel": self.kernel[...].dtype, "norm_scale": scale.dtype, "x": x.dtype})
        y = (x @ self.kernel[...]).astype(jnp.float32)
        return jnp.tanh(y * scale[None].astype(jnp.float32))


@both_axis_types_and_partitionings
def test_the_forward_sees_the_dtype_that_the_function_says(mesh_of: MeshOf, partitioning: str):
    with mesh_of(S=8) as mesh:
        seen: dict[str, Any] = {}
        model = jfsdp.shard(Net(seen), mesh, mp_policy=policy(), partitioning=partitioning)
        nnx.jit(lambda model, x: model(x))(model, batch_on(mesh, rows(8, 8)))
        assert seen == {"kernel": BF16, "norm_scale": F32, "x": BF16}
        assert {p.dtype for p in jax.tree.leaves(nnx.state(model, nnx.Param))} == {F32}


def test_gathers_are_in_it_on_the_wire():
    model = jfsdp.shard(Net(), make_mesh(S=8), mp_policy=policy())
    report = jfsdp.inspect(gradients, model, rows(8, 8))
    dtypes = {c.leaf: c.dtype for c in report.collectives if c.kind == "all-gather"}
    assert dtypes == {"kernel": "bfloat16", "norm_scale": "float32"}
    report.check()


def test_a_program_that_gathers_in_another_dtype_is_found():
    plain, stated = (
        jfsdp.shard(Net(), make_mesh(S=8), mp_policy=policy(fn)) for fn in (None, norms_in_float32)
    )
    report = jfsdp.inspect(gradients, plain, rows(8, 8), model=stated)
    with pytest.raises(jfsdp.PolicyViolation) as error:
        report.check()
    (departure,) = [d for d in error.value.departures if d.rule.startswith("dtype")]
    assert (departure.leaf, departure.expected) == ("norm_scale", "float32")


def test_gradients_are_those_of_the_same_casts_written_out():
    def loss(model: Any, x: jax.Array) -> jax.Array:
        kernel = model.kernel[...].astype(BF16)
        y = (x.astype(BF16) @ kernel).astype(jnp.float32)
        return jnp.mean(jnp.tanh(y * model.norm_scale[...][None]) ** 2)

    model = jfsdp.shard(Net(), make_mesh(R=2, S=4), mp_policy=policy())
    expected = nnx.jit(nnx.value_and_grad(loss))(Net(), rows(8, 8))
    assert_close(gradients(model, rows(8, 8)), expected, rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_any_real_floating_dtype_will_do(dtype):
    """FSDP2 allows two: the policy's, and the parameter's own."""
    seen: dict[str, Any] = {}
    fn = lambda path, param: dtype if path == "kernel" else None  # noqa: E731
    settings = {"mp_policy": policy(fn, cast_forward_inputs=False)}
    jfsdp.shard(Net(seen), make_mesh(S=8), **settings)(rows(8, 8))
    assert (seen["kernel"], seen["norm_scale"]) == (jnp.dtype(dtype), BF16)


def test_without_param_dtype_the_function_alone_casts():
    seen: dict[str, Any] = {}
    fn = lambda path, param: "bfloat16" if path == "kernel" else None  # noqa: E731
    alone = jfsdp.MixedPrecisionPolicy(param_dtype_override_fn=fn)
    jfsdp.shard(Net(seen), make_mesh(S=8), mp_policy=alone)(rows(8, 8))
    assert seen == {"kernel": BF16, "norm_scale": F32, "x": F32}


class Asked:
    """Notes what it is asked, and says nothing."""

    def __init__(self) -> None:
        self.paths: list[tuple[str, tuple[int, ...], str]] = []

    def __call__(self, path: str, param: Any) -> None:
        self.paths.append((path, tuple(param.shape), jnp.dtype(param.dtype).name))


def test_it_is_asked_once_for_each_real_floating_parameter():
    asked, model = Asked(), Net()
    model.table = nnx.Param(jnp.arange(8))
    model.tied = model.kernel
    model.count = nnx.Variable(jnp.ones(()))
    model = jfsdp.shard(model, make_mesh(S=8), mp_policy=policy(asked))
    model(rows(8, 8))
    assert asked.paths == [("kernel", (8, 8), "float32"), ("norm_scale", (8,), "float32")]


def test_paths_are_those_of_the_module_that_is_sharded():
    asked = Asked()
    CASES["attention"].sharded(make_mesh(S=8), mp_policy=policy(asked))
    assert ("blocks.0.norm1.scale", (16,), "float32") in asked.paths
    assert len(asked.paths) == len(set(asked.paths))


def test_plan_counts_the_parameters_of_each_other_dtype():
    model = jfsdp.shard(Net(), make_mesh(S=8), mp_policy=policy())
    assert "compute in bfloat16 (1 parameter in float32)" in str(jfsdp.plan(model))


# --------------------------------------------------------------------------------------------------
# Linen


class LinenNet(nn.Module):
    seen: Any = None

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (8, 8))
        scale = self.param("norm_scale", nn.initializers.ones, (8,))
        if self.seen is not None:
            self.seen((kernel.dtype, scale.dtype))
        return jnp.tanh((x @ kernel).astype(jnp.float32) * scale[None].astype(jnp.float32))


def test_linen_gathers_in_what_the_function_says():
    asked, seen = Asked(), []

    def fn(path: str, param: Any) -> Any:
        asked(path, param)
        return norms_in_float32(path, param)

    model = jfsdp.shard(LinenNet(seen.append), make_mesh(S=8), mp_policy=policy(fn))
    variables = model.init(jax.random.key(0), rows(8, 8))
    lowered = jax.jit(lambda v, x: model.apply(v, x)).lower(variables, rows(8, 8))
    assert count_ops(lowered, "all_gather", "bf16") == 1
    assert count_ops(lowered, "all_gather", "f32") == 1
    assert seen[-1] == (BF16, F32)
    assert sorted(asked.paths) == [("kernel", (8, 8), "float32"), ("norm_scale", (8,), "float32")]
    assert "compute in bfloat16 (1 parameter in float32)" in str(jfsdp.plan(model))


# --------------------------------------------------------------------------------------------------
# What is refused


def test_what_is_no_function_is_refused():
    text = (
        "MixedPrecisionPolicy.param_dtype_override_fn must be a function f(path, param) or None, got "
        "'float32'."
    )
    with pytest.raises(TypeError, match=re.escape(text)):
        policy("float32")


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (
            3,
            TypeError,
            "kernel: param_dtype_override_fn must return None or a dtype such as 'bfloat16'",
        ),
        (
            "int8",
            ValueError,
            "kernel: param_dtype_override_fn must return None or a real floating dtype",
        ),
        (jnp.complex64, ValueError, "got complex64"),
    ],
)
def test_answer_that_is_no_real_floating_dtype_is_refused(answer, kind, text):
    assert text in shard_refused(kind, Net(), mp_policy=policy(lambda path, param: answer))


def test_linen_refuses_it_when_the_parameters_are_found():
    model = jfsdp.shard(LinenNet(), make_mesh(S=8), mp_policy=policy(lambda *_: "int8"))
    with pytest.raises(ValueError, match=r"kernel: param_dtype_override_fn .* got int8"):
        model.init(jax.random.key(0), rows(8, 8))


def test_policies_with_the_same_function_are_equal():
    assert policy() == policy()
    assert hash(policy()) == hash(policy())
    assert policy(lambda *_: None) != policy(lambda *_: None)
