"""Parameters on the host, however a unit is called; and how often their shards are copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import models
import pytest
from flax import nnx
from helpers import (
    batch_on,
    equations,
    explicit,
    explicit_set,
    gradients,
    make_mesh,
    mean_square,
    rows,
)
from jax.sharding import PartitionSpec as P
from test_offload import HOST, MIXED, assert_equal, kinds

import jfsdp
from jfsdp.testing import topology_or_skip

OFF = jfsdp.OffloadPolicy()
X = rows(16, 16)


def both(run: Callable[[Any], Any]) -> tuple[Any, Any]:
    """What `run` gives with parameters on the device and on the host: the same values."""
    expected, got = run(OFF), run(HOST)
    assert_equal(got, expected)
    return expected, got


def mlp(policy: Any, mesh: Any = None, **settings: Any) -> Any:
    return models.CASES["mlp"].sharded(mesh or make_mesh(fsdp=8), offload_policy=policy, **settings)


def stack(**settings: Any) -> models.Stack:
    return models.Stack(3, 16, nnx.Rngs(0), **settings)


def on_mesh(x: Any = X) -> jax.Array:
    return batch_on(make_mesh(fsdp=8), x)


@pytest.mark.parametrize("sync", ["every", "last"])
def test_gradients_of_microbatches(sync):
    def loss(model: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (model(x).astype(jnp.float32) ** 2).sum(), jnp.float32(x.shape[0])

    def run(policy: Any) -> Any:
        model = mlp(policy, mp_policy=MIXED)
        return nnx.jit(jfsdp.value_and_grad(loss, microbatches=2, sync=sync))(model, on_mesh())

    _, (_, got) = both(run)
    assert kinds(got) == {"pinned_host"}


@pytest.mark.parametrize("mesh_of", [explicit, explicit_set])
@pytest.mark.parametrize("partitioning", ["manual", "auto"])
def test_explicit_axes(mesh_of, partitioning):
    def run(policy: Any) -> Any:
        with mesh_of(fsdp=8) as mesh:
            model = mlp(policy, mesh, partitioning=partitioning)
            return gradients(model, batch_on(mesh, X))[1]

    _, got = both(run)
    assert kinds(got) == {"pinned_host"}


@pytest.mark.parametrize("check_vma", [False, True])
def test_the_users_own_shard_map(check_vma):
    mesh = make_mesh(fsdp=8)

    def run(policy: Any) -> Any:
        graphdef, state = nnx.split(mlp(policy, mesh))
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, state)

        def local(state: Any, x: jax.Array) -> Any:
            return jax.grad(lambda state: jnp.mean(nnx.merge(graphdef, state)(x) ** 2) / 8)(state)

        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=(specs, P("fsdp")), out_specs=specs, check_vma=check_vma
        )
        return jax.jit(mapped)(state, batch_on(mesh, X))

    _, got = both(run)
    assert kinds(got) == {"pinned_host"}


def test_without_jit():
    _, got = both(lambda policy: nnx.value_and_grad(mean_square)(mlp(policy), on_mesh())[1])
    assert kinds(got) == {"pinned_host"}


def test_a_forward_alone_is_on_the_device():
    _, got = both(lambda policy: mlp(policy)(on_mesh()))
    assert kinds(got) == {"device"}


def test_under_the_users_own_remat():
    def run(policy: Any) -> Any:
        model = jfsdp.shard(
            stack(remat=True), make_mesh(fsdp=8), units=models.Block, offload_policy=policy
        )
        return gradients(model, on_mesh())[1]

    _, got = both(run)
    assert kinds(got) == {"pinned_host"}


class Twice(nnx.Module):
    """One block, twice."""

    def __init__(self) -> None:
        self.block = models.Block(16, nnx.Rngs(0))

    def __call__(self, x):
        return self.block(self.block(x))


def test_a_unit_that_is_called_twice():
    def run(policy: Any) -> Any:
        model = jfsdp.shard(Twice(), make_mesh(fsdp=8), units=models.Block, offload_policy=policy)
        return gradients(model, on_mesh())[1]

    _, got = both(run)
    assert kinds(got) == {"pinned_host"}


def test_units_may_differ():
    def run(policy: Any) -> Any:
        model, mesh = stack(), make_mesh(fsdp=8)
        jfsdp.shard(model.blocks[1], mesh, offload_policy=policy)
        jfsdp.shard(model, mesh, units="blocks.0")
        return gradients(model, on_mesh())[1]

    _, got = both(run)
    blocks = [kinds(got["blocks"][index]) for index in range(3)]
    assert blocks == [{"device"}, {"pinned_host"}, {"device"}]


def test_ignored_parameters_stay_on_the_device():
    def run(policy: Any) -> Any:
        model = models.CASES["mlp"].make()
        jfsdp.shard(
            model,
            make_mesh(fsdp=8),
            units=nnx.Linear,
            offload_policy=policy,
            ignored_params="fc1.bias",
        )
        return gradients(model, on_mesh())[1]

    _, got = both(run)
    assert kinds(got.fc1.bias) == {"device"}
    assert kinds([got.fc1.kernel, got.fc2.kernel]) == {"pinned_host"}


def test_whole_weights_are_on_the_device():
    _, got = both(lambda policy: nnx.state(jfsdp.unshard(mlp(policy)), nnx.Param))
    assert kinds(got) == {"device"}


def test_state_only_leaves_parameters_on_the_device():
    model = mlp(jfsdp.CPUOffloadPolicy(parameters=False))
    assert kinds(nnx.state(model, nnx.Param)) == {"device"}


def test_unpinned_memory_runs_on_cpu():
    def run(policy: Any) -> Any:
        return gradients(mlp(policy), on_mesh())[1]

    expected = run(OFF)
    assert_equal(run(jfsdp.CPUOffloadPolicy(pin_memory=False)), expected)
    model = mlp(jfsdp.CPUOffloadPolicy(pin_memory=False))
    assert kinds(nnx.state(model, nnx.Param)) == {"unpinned_host"}


@pytest.mark.slow
def test_unpinned_memory_is_refused_where_compilers_refuse_it():
    devices = topology_or_skip("v5e:2x4")
    mesh = jax.make_mesh((8,), ("fsdp",), devices=devices)
    with pytest.raises(ValueError) as error:
        jfsdp.shard(
            models.CASES["mlp"].make(),
            mesh,
            offload_policy=jfsdp.CPUOffloadPolicy(pin_memory=False),
        )
    assert str(error.value) == (
        "CPUOffloadPolicy(pin_memory=False, parameters=True, optimizer_state=True, activations=()): programs "
        "for TPU v5 lite take no arrays from memory of the kind 'unpinned_host'. Kinds that they take: "
        "device, pinned_host. Pass CPUOffloadPolicy(pin_memory=True)."
    )


# --------------------------------------------------------------------------------------------------
# Counts


def moved(model: Any) -> tuple[int, int]:
    """How often a step's gradients move arrays to the device, and to the host, before the compiler."""
    graphdef, state = nnx.split(model)

    def step(state: Any, x: jax.Array) -> Any:
        return nnx.value_and_grad(mean_square)(nnx.merge(graphdef, state), x)[1]

    program = jax.make_jaxpr(step)(state, on_mesh())
    puts = [e for e in equations(program.jaxpr) if e.primitive.name == "device_put"]
    spaces = [space for equation in puts for space in equation.params["devices"]]
    return spaces.count(jax.memory.Space.Device), spaces.count(jax.memory.Space.Host)


@pytest.mark.parametrize(
    "again, gathers",
    [
        # Blocks 1 and 2 of 3 are gathered again; the first one's input has no gradient.
        pytest.param(True, 3 + 2, id="True"),
        pytest.param(False, 3, id="False"),
    ],
)
def test_a_shard_is_copied_for_every_gather_and_its_gradient_once(again, gathers):
    model = jfsdp.shard(
        stack(),
        make_mesh(fsdp=8),
        units=models.Block,
        offload_policy=HOST,
        reshard_after_forward=again,
    )
    assert moved(model) == (gathers, 3)


def test_nothing_is_moved_without_offload():
    model = jfsdp.shard(stack(), make_mesh(fsdp=8), units=models.Block)
    assert moved(model) == (0, 0)
