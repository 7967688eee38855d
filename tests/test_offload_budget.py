"""`jfsdp.offload_by_budget`: what goes to the host, and no more than that."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import linen_models
import optax
import pytest
from flax import nnx
from helpers import linears, make_mesh, mlp
from hypothesis import given
from hypothesis import strategies as st

import jfsdp
from jfsdp.budget import Item, to_offload

ADAM = optax.adam(1e-3)
COUNT = 4
"""Bytes of Adam's step count, and as many are those of nnx.Optimizer."""

items = st.dictionaries(
    st.tuples(st.text("abc", min_size=1, max_size=3), st.sampled_from(["state", "parameter"])),
    st.integers(0, 50),
    max_size=8,
).map(lambda sizes: [Item(*key, size) for key, size in sizes.items()])
budgets = st.integers(0, 400)


def total(chosen: list[Item]) -> int:
    return sum(item.bytes for item in chosen)


# --------------------------------------------------------------------------------------------------
# The order


@given(items, budgets)
def test_what_stays_fits_or_all_has_gone(items: list[Item], budget: int):
    gone = to_offload(items, 0, budget)
    assert total(items) - total(gone) <= budget or total(gone) == total(items)


@given(items, budgets)
def test_it_never_overshoots(items: list[Item], budget: int):
    """Without the last one it would not fit."""
    gone = to_offload(items, 0, budget)
    if gone:
        assert total(items) - total(gone[:-1]) > budget


@given(items, budgets, budgets)
def test_a_smaller_budget_gives_a_superset(items: list[Item], one: int, other: int):
    small, large = (to_offload(items, 0, budget) for budget in sorted((one, other)))
    assert small[: len(large)] == large


@given(items, budgets, st.randoms())
def test_it_is_deterministic(items: list[Item], budget: int, random: Any):
    shuffled = random.sample(items, len(items))
    assert to_offload(shuffled, 0, budget) == to_offload(items, 0, budget)


def test_state_goes_first_then_the_largest_with_ties_to_the_first_path():
    sizes = [("b", "parameter", 9), ("c", "state", 4), ("a", "state", 4), ("d", "state", 6)]
    gone = to_offload([Item(*x) for x in sizes], 0, 0)
    assert [(item.path, item.what) for item in gone] == [
        ("d", "state"),
        ("a", "state"),
        ("c", "state"),
        ("b", "parameter"),
    ]


@pytest.mark.parametrize("spare, count", [(0, 1), (1, 0), (-1, 2)])
def test_the_boundary_is_included(spare: int, count: int):
    pair = [Item("a", "state", 5), Item("b", "state", 1)]
    assert len(to_offload(pair, 10, 11 + (5 if spare == 1 else spare))) == count


# --------------------------------------------------------------------------------------------------
# NNX


def sharded(**settings: Any) -> Any:
    """Kernels of 16x64 and 64x8, f32 on 8 devices: 512 and 256 bytes of a device; biases 32 and 4."""
    return jfsdp.shard(mlp(16, 64, 8), make_mesh(fsdp=8), **settings)


ALL = 512 + 256 + 32 + 4


def memory(model: Any) -> dict[str, str]:
    return {row.path: row.memory for row in jfsdp.plan(model).rows}


def on_device(model: Any, tx: Any = None) -> int:
    """Bytes that the model, and its optimizer, have on one device."""
    trees = [nnx.state(model)]
    if tx is not None:
        trees.append(nnx.state(nnx.Optimizer(model, tx, wrt=nnx.Param)))
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(trees)
        if x.sharding.memory_kind == "device"
    )


def test_a_budget_that_is_met_changes_nothing():
    model = sharded()
    arrays = jax.tree.leaves(nnx.state(model))
    assert jfsdp.offload_by_budget(model, device_bytes=ALL) is model
    assert all(x is y for x, y in zip(arrays, jax.tree.leaves(nnx.state(model)), strict=True))
    assert not jfsdp.plan(model).offloads


def test_parameters_move_in_place_with_their_state():
    model = jfsdp.offload_by_budget(sharded(), device_bytes=ALL - 1)
    assert memory(model)["layers.0.kernel"] == "pinned_host"
    assert model.layers[0].kernel[...].sharding.memory_kind == "pinned_host"
    assert set(memory(model).values()) == {"pinned_host", "device"}
    assert on_device(model) == ALL - 512


@pytest.mark.parametrize("budget", [3 * ALL, 2 * ALL, ALL + 2 * COUNT, ALL, 300, 33])
def test_parameters_and_optimizer_state_fit(budget: int):
    model = jfsdp.offload_by_budget(sharded(), device_bytes=budget, tx=ADAM)
    assert on_device(model, ADAM) <= budget


def test_state_alone_goes_where_that_is_enough():
    model = jfsdp.offload_by_budget(sharded(), device_bytes=ALL + 2 * COUNT, tx=ADAM)
    assert set(memory(model).values()) == {"device, state pinned_host"}
    assert on_device(model, ADAM) == ALL + 2 * COUNT


def test_replicated_parameters_can_go_too():
    model = jfsdp.offload_by_budget(
        jfsdp.shard(mlp(16, 10), make_mesh(fsdp=8)), device_bytes=0, tx=None
    )
    assert set(memory(model).values()) == {"pinned_host"}


def test_what_a_policy_has_on_the_host_does_not_count():
    model = sharded(offload_policy=jfsdp.CPUOffloadPolicy())
    assert jfsdp.offload_by_budget(model, device_bytes=2 * COUNT, tx=ADAM) is model


def test_pin_memory_names_the_kind():
    model = jfsdp.offload_by_budget(sharded(), device_bytes=0, pin_memory=False)
    assert set(memory(model).values()) == {"unpinned_host"}


def test_an_abstract_model_is_planned_without_memory():
    make = lambda: jfsdp.shard(mlp(16, 64, 8), make_mesh(fsdp=8))  # noqa: E731
    model = jfsdp.offload_by_budget(jfsdp.init(make, abstract=True), device_bytes=ALL - 1)
    assert memory(model) == memory(jfsdp.offload_by_budget(make(), device_bytes=ALL - 1))


def test_training_within_a_budget_gives_the_same_numbers():
    def trained(budget: float) -> Any:
        model = jfsdp.offload_by_budget(sharded(), device_bytes=budget, tx=ADAM)
        optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)

        @nnx.jit
        def step(model: Any, optimizer: Any, x: Any) -> Any:
            value, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
            optimizer.update(model, grads)
            return value

        x = jnp.ones((8, 16)) * jnp.arange(8.0)[:, None]
        losses = [float(step(model, optimizer, x)) for _ in range(3)]
        return losses, memory(model)

    losses, before = trained(600)
    assert losses == trained(1e9)[0]
    assert "pinned_host" in before.values()


# --------------------------------------------------------------------------------------------------
# Linen


def test_linen_gives_a_module_that_makes_parameters_where_the_plan_says():
    model = jfsdp.shard(linen_models.MLP(), make_mesh(fsdp=8))
    x = jnp.ones((8, 16))
    small = jfsdp.offload_by_budget(model, x, device_bytes=100)
    params: Any = small.init(jax.random.key(0), x)["params"]
    assert params["fc1"]["kernel"].sharding.memory_kind == "pinned_host"
    assert params["fc1"]["bias"].sharding.memory_kind == "device"
    assert memory(small)["fc1.kernel"] == "pinned_host"
    assert not jfsdp.plan(model).offloads


def test_linen_counts_the_state_of_an_optimizer():
    model = jfsdp.shard(linen_models.MLP(), make_mesh(fsdp=8))
    x = jnp.ones((8, 16))
    whole = jfsdp.offload_by_budget(model, x, device_bytes=10**6, tx=ADAM)
    assert whole is model
    rest = jfsdp.plan(model).bytes_per_device + COUNT
    small = jfsdp.offload_by_budget(model, x, device_bytes=rest, tx=ADAM)
    assert set(memory(small).values()) == {"device, state pinned_host"}


# --------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize("budget", [-1, -0.5, math.nan])
def test_a_negative_budget_or_none_is_refused(budget: float):
    with pytest.raises(ValueError, match=r"a number of bytes of 0 or more"):
        jfsdp.offload_by_budget(sharded(), device_bytes=budget)


@pytest.mark.parametrize("budget", [True, "16 GiB", None])
def test_what_is_no_number_is_refused(budget: Any):
    with pytest.raises(TypeError, match="device_bytes must be a number of bytes, got"):
        jfsdp.offload_by_budget(sharded(), device_bytes=budget)


def test_a_budget_that_cannot_be_met_lists_what_stays():
    model = sharded(ignored_params="layers.0.*")
    with pytest.raises(ValueError) as error:
        jfsdp.offload_by_budget(model, device_bytes=100, tx=ADAM)
    assert "13,064 bytes stay on each device" in str(error.value)
    assert "  8 bytes: optimizer state that lies as no parameter" in str(error.value)
    assert "  13,056 bytes: parameters in ignored_params, and their state" in str(error.value)
    assert not jfsdp.plan(model).offloads


def test_a_model_that_is_not_sharded_is_refused():
    with pytest.raises(ValueError, match=r"no module that jfsdp\.shard was applied to"):
        jfsdp.offload_by_budget(linears(1, 8), device_bytes=0)


def test_inputs_and_wrt_are_refused_where_they_mean_nothing():
    with pytest.raises(ValueError, match="takes inputs of a Linen module"):
        jfsdp.offload_by_budget(sharded(), jnp.ones(8), device_bytes=0)
    model = jfsdp.shard(linen_models.MLP(), make_mesh(fsdp=8))
    with pytest.raises(ValueError, match="wrt chooses Variables"):
        jfsdp.offload_by_budget(model, jnp.ones((8, 16)), device_bytes=0, wrt=nnx.Param)
