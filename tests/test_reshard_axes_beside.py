"""`reshard_after_forward` as axes beside tensor axes, custom gathers, remat, frozen weights, microbatches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import assert_close, assert_spec, batch_on, gradients, make_mesh, rows
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models import CASES, Block, Stack
from reshard_cases import BOTH, DIMS, HSDP, counts, gradients_of_both, mesh_of, report, stack

import jfsdp
from jfsdp.comm import DefaultAllGather

KEEP = jax.checkpoint_policies.save_only_these_names("jfsdp_kept")


def test_beside_a_tensor_axis_each_device_moves_its_part():
    mesh = make_mesh(outer=2, inner=2, tensor=2)

    def made() -> nnx.Module:
        init = nnx.with_partitioning(
            nnx.initializers.lecun_normal(), (None, "tensor"), eager_sharding=False
        )
        return nnx.Linear(16, 32, use_bias=False, kernel_init=init, rngs=nnx.Rngs(0))

    settings = {"dp_mesh_dims": DIMS, "reshard_after_forward": "inner"}
    model = jfsdp.init(made, mesh, **settings)
    assert_spec(model.kernel.get_raw_value(), ("outer", "inner"), "tensor")
    x = jax.device_put(rows(16, 16), NamedSharding(mesh, P(BOTH)))
    found = jfsdp.inspect(gradients_of_both, model, x)
    part = 16 * 16 * 4
    assert found.bytes("all-gather") == part * 3 / 4 + part / 2
    found.check()
    assert_close(gradients(model, x), gradients(made(), rows(16, 16)))


def test_a_gather_of_the_users_is_called_for_both_steps():
    groups: list[tuple[str, ...]] = []

    class Spy(DefaultAllGather):
        def __call__(self, output_tensor, input_tensor, group, async_op=False):
            groups.append(group)
            return super().__call__(output_tensor, input_tensor, group, async_op)

    model = stack("inner", all_gather=Spy())
    found = report(model)
    assert set(groups) == {("outer",), ("inner",)}
    assert counts(found) == {("inner",): (4, 4), ("outer",): (4, 0)}
    assert_close(gradients(model, rows(16, 64)), gradients(Stack(4, 64, nnx.Rngs(0)), rows(16, 64)))


def test_a_frozen_weight_is_kept_in_the_same_parts():
    model = stack("inner")
    frozen = nnx.All(nnx.Param, lambda path, _: path[1] != 2)

    @nnx.jit
    def step(model: nnx.Module, x: jax.Array) -> Any:
        of = nnx.DiffState(0, frozen)
        return nnx.grad(lambda m, x: jnp.mean(m(x) ** 2), argnums=(of, 1))(model, x)

    found = report(model, step)
    assert counts(found) == {("inner",): (4, 4), ("outer",): (4, 0)}
    assert found.count("reduce-scatter") == 3
    found.check()


def test_remat_of_the_users_inside_a_unit_keeps_the_parts():
    class Inside(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.blocks = nnx.List([Block(64, rngs) for _ in range(2)])

        def __call__(self, x):
            for block in self.blocks:
                x = nnx.remat(lambda m, x: m(x))(block, x)
            return x

    mesh, dims = mesh_of("fsdp")
    model = jfsdp.shard(Inside(nnx.Rngs(0)), mesh, dp_mesh_dims=dims, reshard_after_forward="inner")
    found = report(model)
    assert counts(found) == {("inner",): (2, 2), ("outer",): (2, 0)}
    found.check()


class Rematted(nnx.Module):
    """The user's remat round each unit."""

    def __init__(self, policy: Any):
        self.blocks = nnx.List([Block(64, nnx.Rngs(i)) for i in range(3)])
        self.policy = nnx.static(policy)

    def __call__(self, x):
        for block in self.blocks:
            x = nnx.remat(lambda m, x: m(x), policy=self.policy)(block, x)
        return x


def rematted(policy: Any) -> nnx.Module:
    mesh, dims = mesh_of("fsdp")
    settings = {"dp_mesh_dims": dims, "units": Block, "reshard_after_forward": "inner"}
    return jfsdp.shard(Rematted(policy), mesh, **settings)


def test_remat_of_the_users_round_a_unit_can_keep_the_parts():
    found = report(rematted(KEEP))
    assert counts(found) == {("inner",): (3, 3), ("outer",): (3, 0)}
    found.check()
    assert_close(gradients(rematted(KEEP), rows(16, 64)), gradients(Rematted(KEEP), rows(16, 64)))


def test_remat_of_the_users_round_a_unit_that_keeps_nothing_does_not_drop_the_parts():
    """They are gathered outside of it."""
    found = report(rematted(None))
    assert counts(found) == {("inner",): (3, 3), ("outer",): (3, 0)}
    found.check()


def test_a_program_that_gathers_over_all_axes_again_is_found():
    found = jfsdp.inspect(gradients_of_both, stack(True), rows(16, 64), model=stack("inner"))
    with pytest.raises(jfsdp.PolicyViolation) as error:
        found.check()
    assert {d.rule for d in error.value.departures} == {
        "axes of the all-gather",
        "bytes of the all-gathers, per device and step",
    }


def test_a_program_that_keeps_whole_weights_is_found():
    found = jfsdp.inspect(gradients_of_both, stack(False), rows(16, 64), model=stack("inner"))
    with pytest.raises(jfsdp.PolicyViolation, match="the whole weights are kept"):
        found.check()


# --------------------------------------------------------------------------------------------------
# Called otherwise


@pytest.mark.parametrize("check_vma", [False, True], ids=["unchecked", "check_vma"])
def test_in_a_shard_map_of_the_users(check_vma):
    mesh = make_mesh(replica=2, outer=2, inner=2)
    settings = {"dp_mesh_dims": HSDP, "reshard_after_forward": "inner"}
    model, batch = CASES["mlp"].sharded(mesh, **settings), CASES["mlp"].batch
    graphdef, state = nnx.split(model)
    specs = jax.tree.map(lambda x: x.sharding.spec, state)
    data = ("replica", "outer", "inner")

    def per_device(state: Any, batch: jax.Array) -> Any:
        def loss(state: Any) -> jax.Array:
            return jnp.mean(nnx.merge(graphdef, state)(batch) ** 2) / 8

        return jax.grad(loss)(state)

    step = jax.shard_map(
        per_device, mesh=mesh, in_specs=(specs, P(data)), out_specs=specs, check_vma=check_vma
    )
    found = jax.jit(step)(state, batch_on(mesh, batch))
    _, expected = gradients(CASES["mlp"].make(), jnp.asarray(batch))
    assert_close(jax.tree.leaves(found), jax.tree.leaves(expected))


@pytest.mark.parametrize("sync", ["every", "last"])
def test_over_microbatches(sync):
    model = stack("inner")
    accumulated = nnx.jit(
        jfsdp.value_and_grad(lambda m, x: jnp.mean(m(x) ** 2), microbatches=2, sync=sync)
    )
    found = jfsdp.inspect(accumulated, model, rows(16, 64))
    forward, backward = counts(found)[("inner",)]
    assert counts(found)[("outer",)] == (forward, 0) == (8, 0)
    assert backward == 6  # in each microbatch all but the first block: nobody asks for its input's
    found.check()
    expected = gradients(Stack(4, 64, nnx.Rngs(0)), rows(16, 64))
    assert_close(accumulated(model, rows(16, 64)), expected)


def test_in_the_context_of_auto_partitioning_it_is_called_and_not_differentiated():
    model = stack("inner")
    with jfsdp.auto_partitioning():
        assert_close(model(rows(16, 64)), Stack(4, 64, nnx.Rngs(0))(rows(16, 64)))
        with pytest.raises(
            NotImplementedError, match=r"reshard_after_forward=\('inner',\) cannot be kept"
        ):
            gradients(model, rows(16, 64))
