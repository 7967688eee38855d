"""A gather in two stages: what comes out, in which order it goes, and what that costs the slow axes."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import linen_models
import models
import numpy as np
import pytest
from flax import nnx
from helpers import AUTO, EXPLICIT, batch_on, leaves, make_mesh, mean_square
from jax.sharding import PartitionSpec as P

import jfsdp

TWO_AXES = jfsdp.DataParallelMeshDims(shard=("a", "b"))
POLICY = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)


def gathered(gather: Any, group: tuple[str, ...], **sizes: int) -> jax.Array:
    """What the devices gather of rows that are numbered in the group's order."""
    mesh = make_mesh(**sizes)
    count = int(np.prod([sizes[axis] for axis in group]))
    x = jnp.arange(count * 3 * 2).reshape(count * 3, 2)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    whole = jax.jit(
        jax.shard_map(
            lambda s: gather(shape, s, group), mesh=mesh, in_specs=P(group), out_specs=P(),
            check_vma=False,
        )
    )(x)  # fmt: skip
    np.testing.assert_array_equal(whole, x)
    return whole


@pytest.mark.parametrize("group", [("a", "b"), ("b", "a")], ids=str)
@pytest.mark.parametrize("slow", [None, ("a",), ("b",), ("a", "b"), ()], ids=str)
def test_shards_are_concatenated_in_the_group_s_order(group: Any, slow: Any):
    gathered(jfsdp.TwoStageAllGather(slow), group, a=2, b=4)


@pytest.mark.parametrize("slow", [None, ("b",), ("a", "c"), ("c", "b")], ids=str)
def test_three_axes_are_concatenated_in_the_group_s_order(slow: Any):
    gathered(jfsdp.TwoStageAllGather(slow), ("a", "b", "c"), a=2, b=2, c=2)


def test_a_group_of_one_axis_is_one_gather():
    gathered(jfsdp.TwoStageAllGather(), ("a",), a=8)


def test_an_axis_that_the_mesh_has_not_is_refused_with_the_parameter_s_path():
    model = nnx.Linear(8, 16, use_bias=False, rngs=nnx.Rngs(0))
    jfsdp.shard(model, make_mesh(fsdp=8), all_gather=jfsdp.TwoStageAllGather(("host",)))
    with pytest.raises(ValueError, match="'host', which is no data-parallel axis") as error:
        model(jnp.ones((8, 8)))
    assert error.value.__notes__[0].startswith("kernel: TwoStageAllGather raised this.")


@pytest.mark.parametrize("slow", ["a", ["a"], (1,), 2], ids=str)
def test_slow_is_a_tuple_of_names(slow: Any):
    with pytest.raises(TypeError, match="slow must be a tuple of mesh axes"):
        jfsdp.TwoStageAllGather(slow)


def test_two_of_the_same_axes_are_equal_and_hash_equal():
    one, other = (jfsdp.TwoStageAllGather(("a",)) for _ in range(2))
    assert one == other and hash(one) == hash(other) and one != jfsdp.TwoStageAllGather()


# --------------------------------------------------------------------------------------------------
# In a model


def meshes(axis_type: Any) -> Any:
    """A mesh of two shard axes; Explicit ones are set."""
    mesh = make_mesh(axis_type, a=2, b=4)
    return mesh, jax.set_mesh(mesh) if axis_type == EXPLICIT else contextlib.nullcontext()


QUICK = {("scanned", AUTO, "nnx"), ("mlp", EXPLICIT, "linen"), ("scanned", AUTO, "linen")}
CASES = [
    pytest.param(
        case, axis_type, front, id=f"{case}-{axis_type.name}-{front}",
        marks=() if (case, axis_type, front) in QUICK else pytest.mark.slow,
    )
    for case in ("mlp", "attention", "scanned")
    for axis_type in (AUTO, EXPLICIT)
    for front in ("nnx", "linen")
]  # fmt: skip


def loss_and_gradients(front: str, case: str, mesh: Any, **settings: Any) -> Any:
    settings = {"dp_mesh_dims": TWO_AXES, "mp_policy": POLICY, **settings}
    if front == "nnx":
        model = models.CASES[case].sharded(mesh, **settings)
        return nnx.jit(nnx.value_and_grad(mean_square))(model, models.CASES[case].batch)
    model, batch = (
        linen_models.CASES[case].sharded(mesh, **settings),
        linen_models.CASES[case].batch,
    )
    variables = linen_models.filled(linen_models.abstract(model, batch))
    return linen_models.gradients(model, variables, batch_on(mesh, batch))


@pytest.mark.parametrize(("case", "axis_type", "front"), CASES)
@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
def test_a_model_computes_bit_for_bit_what_it_does_with_one_gather(
    case: str, axis_type: Any, front: str, reshard: bool
):
    mesh, context = meshes(axis_type)
    with context:
        settings = {"reshard_after_forward": reshard}
        loss, grads = loss_and_gradients(front, case, mesh, **settings)
        settings["all_gather"] = jfsdp.TwoStageAllGather()
        own_loss, own_grads = loss_and_gradients(front, case, mesh, **settings)
    assert float(own_loss) == float(loss)
    own, expected = leaves(own_grads), leaves(grads)
    assert own.keys() == expected.keys() and expected
    for path, value in expected.items():
        np.testing.assert_array_equal(own[path], value, err_msg=path)


def report(**settings: Any) -> Any:
    model = models.CASES["scanned"].sharded(
        make_mesh(a=2, b=4), dp_mesh_dims=TWO_AXES, mp_policy=POLICY, **settings
    )
    batch = models.CASES["scanned"].batch
    return jfsdp.inspect(nnx.value_and_grad(mean_square), model, batch)


def test_the_slow_axis_carries_the_shards_alone():
    """Of 1/8 of the weights: 1 part over the slow axis of 2, and 2 * 3 over the fast one of 4."""
    found, one = report(all_gather=jfsdp.TwoStageAllGather()), report()
    assert found.bytes("all-gather", "a") == one.bytes("all-gather") / 7
    assert found.bytes("all-gather", "b") == one.bytes("all-gather") * 6 / 7
    assert found.bytes("reduce-scatter") == one.bytes("reduce-scatter")
    found.check()


def test_the_other_order_carries_four_times_as_much_over_that_axis():
    found, one = report(all_gather=jfsdp.TwoStageAllGather(("b",))), report()
    assert found.bytes("all-gather", "a") == one.bytes("all-gather") * 4 / 7
    found.check()


class WrongWay(jfsdp.TwoStageAllGather):
    """Says one order and takes the other."""

    def __call__(self, *args: Any) -> jax.Array:
        return jfsdp.TwoStageAllGather(("b",))(*args)


def test_a_gather_that_takes_the_other_order_than_it_states_is_found():
    model = nnx.Linear(512, 1024, use_bias=False, rngs=nnx.Rngs(0))
    jfsdp.shard(model, make_mesh(a=2, b=4), dp_mesh_dims=TWO_AXES, all_gather=WrongWay())
    found = jfsdp.inspect(nnx.value_and_grad(mean_square), model, jnp.ones((8, 512)))
    with pytest.raises(
        jfsdp.PolicyViolation, match="kernel: what its own collective sends to gather"
    ):
        found.check()
