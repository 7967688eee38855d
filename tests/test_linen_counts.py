"""The collectives of a Linen program as written are exactly the stated ones, as for NNX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from linen_models import KEY, Block, Stack
from test_counts import BATCH, POLICY, dots, mesh_of

import jfsdp
from jfsdp.inspect import Report

SMALL = np.ones((16, 16), np.float32)


def sharded(hsdp=False, remat=False, axis_type=AxisType.Auto, **settings):
    """6 blocks of Dense(64), each a unit."""
    settings = {"mp_policy": POLICY, "units": Block, **settings}
    return jfsdp.shard(Stack(6, 64, remat), mesh_of(hsdp, axis_type), **settings)


def variables_of(model: Any, batch: Any = BATCH) -> Any:
    return jax.eval_shape(lambda: model.init(KEY(0), batch))


def loss_fn(model, params, batch):
    return jnp.mean(model.apply({"params": params}, batch).astype(jnp.float32) ** 2)


def gradient_step(model, *argnums: int):
    """Gradient of the parameters, with (0, 1) of the input too."""

    @jax.jit
    def step(params, batch):
        return jax.value_and_grad(lambda *args: loss_fn(model, *args), argnums)(params, batch)

    return step


def report(model, *argnums: int, batch: Any = BATCH) -> Report:
    """What the gradient step communicates."""
    params = variables_of(model, batch)["params"]
    return jfsdp.inspect(gradient_step(model, *argnums), params, batch, model=model)


def dots_of(model: Any, batch: Any = BATCH) -> int:
    """Matrix products of the gradient step."""
    return dots(gradient_step(model, 0, 1), variables_of(model, batch)["params"], batch)


# --------------------------------------------------------------------------------------------------
# Unrolled blocks


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("remat", [False, True], ids=["plain", "users_remat"])
@pytest.mark.parametrize("hsdp", [False, True], ids=["S8", "R2xS4"])
def test_resharded_weights_are_gathered_twice(hsdp, remat, axis_type):
    """B16: whatever the user's own nn.remat does."""
    found = report(sharded(hsdp, remat, axis_type), 0, 1)
    assert found.count("all-gather") == found.count("all-gather", "fsdp", "bfloat16") == 12


@pytest.mark.parametrize("reshard", [None, True])
def test_first_units_second_gather_is_gone_when_nothing_needs_it(reshard):
    """B16: 11, the first block's re-gather is dead."""
    found = report(sharded(reshard_after_forward=reshard), 0)
    assert found.count("all-gather") == 11


@pytest.mark.parametrize("hsdp", [False, True], ids=["S8", "R2xS4"])
def test_kept_weights_are_gathered_once(hsdp):
    """B16: 6."""
    found = report(sharded(hsdp, reshard_after_forward=False), 0, 1)
    assert found.count("all-gather") == found.count("all-gather", "fsdp", "bfloat16") == 6


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_weights_are_cast_before_they_are_gathered(axis_type):
    """B23: no float32 travels forward, and the gradients reduce in float32."""
    found = report(sharded(axis_type=axis_type), 0)
    assert {c.dtype for c in found.collectives if c.kind == "all-gather"} == {"bfloat16"}
    params = variables_of(sharded())["params"]
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("reshard", [True, False])
def test_gradients_are_reduce_scattered_once_in_reduce_dtype(reshard):
    found = report(sharded(reshard_after_forward=reshard), 0, 1)
    assert found.count("reduce-scatter") == found.count("reduce-scatter", "fsdp", "float32") == 6
    assert found.count("all-reduce") == 0


def test_hsdp_all_reduces_the_scattered_gradient_over_the_replicas_alone():
    found = report(sharded(hsdp=True), 0, 1)
    assert found.count("reduce-scatter", "fsdp", "float32") == 6
    assert found.count("all-reduce") == found.count("all-reduce", "replica", "float32") == 6
    assert {c.shape for c in found.collectives if c.kind == "all-reduce"} == {(16, 64)}


def test_replicate_only_gathers_nothing_and_all_reduces_every_gradient():
    dims = jfsdp.DataParallelMeshDims(replicate="fsdp")
    found = report(sharded(dp_mesh_dims=dims), 0, 1)
    assert found.count("all-reduce") == found.count("all-reduce", "fsdp", "float32") == 6
    assert len(found.collectives) == 6


def test_one_device_communicates_nothing():
    mesh = jax.make_mesh((1,), ("fsdp",), devices=jax.devices()[:1])
    model = jfsdp.shard(Stack(2, 64), mesh, units=Block, mp_policy=POLICY)
    assert not report(model, 0).collectives


def test_several_shard_axes_are_one_collective():
    mesh = jax.make_mesh((2, 4), ("outer", "inner"), axis_types=(AxisType.Auto,) * 2)
    dims = jfsdp.DataParallelMeshDims(shard=("outer", "inner"))
    found = report(jfsdp.shard(Stack(6, 64), mesh, dp_mesh_dims=dims, units=Block), 0, 1)
    assert found.count("all-gather", ("outer", "inner")) == found.count("all-gather") == 12
    assert found.count("reduce-scatter", ("outer", "inner")) == 6


def test_resharding_recomputes_no_activation():
    again, kept = (sharded(reshard_after_forward=reshard) for reshard in (True, False))
    assert dots_of(again) == dots_of(kept) == 18  # 6 forward, 6 and 6 backward


@pytest.mark.parametrize("reshard", [None, True])
def test_the_users_remat_still_recomputes(reshard):
    assert dots_of(sharded(remat=True, reshard_after_forward=reshard)) == 24


class RematInside(nn.Module):
    """A unit whose forward holds the user's remat."""

    def setup(self):
        self.up = nn.Dense(64, use_bias=False)
        self.down = nn.Dense(64, use_bias=False)

    def __call__(self, x):
        def hidden(self, x):
            return jnp.sin(self.up(jnp.sin(self.up(x))))

        return self.down(nn.remat(hidden)(self, x))


@pytest.mark.parametrize("reshard", [True, False])
def test_a_remat_inside_a_unit_is_not_overruled(reshard):
    settings = {"mp_policy": POLICY, "reshard_after_forward": reshard}
    model = jfsdp.shard(RematInside(), mesh_of(False), **settings)
    assert dots_of(model) == dots_of(RematInside()) == 11


@pytest.mark.parametrize("units", ["blocks_*", lambda path, module: isinstance(module, Block)])
def test_globs_and_predicates_make_the_same_units(units):
    assert report(sharded(units=units), 0).count("all-gather") == 11


def test_a_class_that_was_sharded_itself_is_a_unit():
    class Parent(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(6):
                x = unit(64)(x)
            return x

    unit: Any = jfsdp.shard(Block, mesh_of(False), mp_policy=POLICY)
    found = report(jfsdp.shard(Parent(), mesh_of(False), mp_policy=POLICY), 0, 1)
    # Units of their own shard call are outermost ones, which keep their weights unless told otherwise.
    assert found.count("reduce-scatter", "fsdp", "float32") == 6


def test_a_forward_alone_gathers_once_and_reduces_nothing():
    model = sharded()
    forward = jax.jit(lambda params, x: model.apply({"params": params}, x))
    found = jfsdp.inspect(forward, variables_of(model)["params"], BATCH, model=model)
    assert found.count("all-gather") == len(found.collectives) == 6


def test_methods_of_a_unit_are_one_gather_each():
    class Tied(nn.Module):
        def setup(self):
            self.embed = nn.Embed(64, 64)

        def __call__(self, x):
            return self.embed.attend(self.embed(x))

    tokens = np.zeros((16, 4), np.int32)
    model = jfsdp.shard(Tied(), mesh_of(False), units=nn.Embed, reshard_after_forward=False)
    assert report(model, 0, batch=tokens).count("all-gather") == 2
    whole = jfsdp.shard(Tied(), mesh_of(False), reshard_after_forward=False)
    assert report(whole, 0, batch=tokens).count("all-gather") == 1


# --------------------------------------------------------------------------------------------------
# What is not trained


def split_last(params: Any) -> tuple[Any, Any]:
    last = {"blocks_5": params["blocks_5"]}
    return last, {k: v for k, v in params.items() if k not in last}


def test_units_outside_of_the_differentiated_subtree_are_not_reduced():
    model = sharded()

    @jax.jit
    def step(params, batch):
        last, frozen = split_last(params)
        return jax.grad(lambda last: loss_fn(model, {**frozen, **last}, batch))(last)

    found = jfsdp.inspect(step, variables_of(model)["params"], BATCH, model=model)
    assert found.count("reduce-scatter") == 1
    assert found.count("all-gather") == 6 + 1 - 1  # the last block's input needs no gradient


def test_parameters_behind_stop_gradient_are_not_reduced():
    model = sharded()

    def loss(params, batch):
        last, frozen = split_last(params)
        return loss_fn(model, {**jax.lax.stop_gradient(frozen), **last}, batch)

    found = jfsdp.inspect(
        jax.jit(jax.grad(loss)), variables_of(model)["params"], BATCH, model=model
    )
    assert found.count("reduce-scatter") == 1


def test_parameters_that_optax_freezes_have_no_moments():
    """The gradients are taken all the same: optax is asked after them."""
    model = sharded()

    def labels(params):
        last, _ = split_last(params)
        return {name: "train" if name in last else "freeze" for name in params}

    tx = optax.partition({"train": optax.adam(1e-3), "freeze": optax.set_to_zero()}, labels)

    def make():
        params = model.init(KEY(0), BATCH)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    state = jfsdp.init(make, abstract=True)
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.shape == (64, 64)]
    assert [x.sharding.spec for x in moments] == [P("fsdp")] * 2


# --------------------------------------------------------------------------------------------------
# The user's collectives


def test_custom_collectives_serve_every_sharded_leaf():
    calls = []

    class Gather(jfsdp.AllGather):
        def allocate(self, size, *, dtype, device):
            return super().allocate(size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, async_op=False):
            calls.append((output_tensor.shape, input_tensor.shape, group))
            halves = jnp.split(input_tensor, 2, axis=-1)
            gathered = [jax.lax.all_gather(x, group, axis=0, tiled=True) for x in halves]
            return jnp.concatenate(gathered, axis=-1)

    found = report(sharded(all_gather=Gather()), 0, 1)
    assert set(calls) == {((64, 64), (8, 64), ("fsdp",))}
    assert found.count("all-gather") == 24
