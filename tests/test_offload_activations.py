"""What a unit's policy names waits on the host between forward and backward, and nothing else changes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import batch_on, equations, gradients, leaves, make_mesh, rows
from jax.ad_checkpoint import checkpoint_name
from offload_models import Block, Model, loss_of, offloading

import jfsdp

DEVICE = jfsdp.OffloadPolicy()

every_model = pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
every_front = pytest.mark.parametrize("front", ["nnx", "linen"])


def moved(function: Any, *args: Any) -> list[str]:
    """The types of what the gradient's program moves to the host."""
    found = equations(jax.make_jaxpr(jax.grad(function))(*args).jaxpr)
    puts = (e.outvars[0].aval for e in found if e.primitive.name == "device_put")
    return [str(kind) for kind in puts if kind.memory_space == jax.memory.Space.Host]


def assert_equal(one: Any, other: Any) -> None:
    one, other = leaves(one), leaves(other)
    assert one.keys() == other.keys()
    for path, value in one.items():
        np.testing.assert_array_equal(value, other[path], err_msg=path)


@every_front
@every_model
@pytest.mark.parametrize(
    "remat, names", [("none", ("block_in", "hidden")), ("plain", ("block_in",))]
)
def test_named_values_wait_on_the_host(front: str, scan: bool, remat: str, names: Any):
    """One of each name and block; of a loop once inside and once for the last layer."""
    mesh = make_mesh(fsdp=8)
    function, params = loss_of(front, mesh, offloading(*names), scan=scan, remat=remat)
    plain, same = loss_of(front, mesh, DEVICE, scan=scan, remat=remat)
    x = batch_on(mesh, rows(16, 16))
    assert moved(plain, same, x) == []
    assert moved(function, params, x) == ["float32<host>[2,16]"] * len(names) * (2 if scan else 3)
    assert_equal(
        jax.jit(jax.value_and_grad(function))(params, x),
        jax.jit(jax.value_and_grad(plain))(same, x),
    )


@every_front
@every_model
def test_a_remat_of_the_users_that_offloads_keeps_doing_it(front: str, scan: bool):
    mesh = make_mesh(fsdp=8)
    function, params = loss_of(front, mesh, DEVICE, scan=scan, remat="own")
    plain, same = loss_of(front, mesh, DEVICE, scan=scan, remat="plain")
    x = batch_on(mesh, rows(16, 16))
    assert moved(function, params, x) == ["float32<host>[2,16]"] * 2 * (2 if scan else 3)
    assert_equal(
        jax.jit(jax.value_and_grad(function))(params, x),
        jax.jit(jax.value_and_grad(plain))(same, x),
    )


@every_model
def test_a_name_of_what_such_a_remat_offloads_adds_nothing(scan: bool):
    mesh = make_mesh(fsdp=8)
    x = batch_on(mesh, rows(16, 16))
    own, params = loss_of("nnx", mesh, DEVICE, scan=scan, remat="own")
    both, same = loss_of("nnx", mesh, offloading("block_in", "hidden"), scan=scan, remat="own")
    assert moved(both, same, x) == moved(own, params, x)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_loop_without_prefetch_stacks_on_the_host_too(prefetch: int):
    mesh = make_mesh(fsdp=8)

    def made(policy: Any) -> Any:
        model = Model(16, 3, True, "none", nnx.Rngs(0))
        jfsdp.shard(model.blocks, mesh, stacked_axis=0, offload_policy=policy)  # pyright: ignore
        return jfsdp.shard(model, mesh, prefetch=prefetch)

    x = batch_on(mesh, rows(16, 16))
    assert_equal(gradients(made(offloading("hidden")), x), gradients(made(DEVICE), x))


class Twice(nnx.Module):
    """A unit that is called several times, which gathers for itself."""

    def __init__(self, loop: bool, rngs: nnx.Rngs):
        self.block, self.loop = Block(16, rngs), loop

    def __call__(self, x: Any) -> Any:
        if not self.loop:
            return self.block(self.block(x))
        axes: Any = {"in_axes": (nnx.Carry, None), "out_axes": nnx.Carry, "length": 2}
        return nnx.scan(lambda x, block: block(x), **axes)(x, self.block)


@pytest.mark.parametrize("loop, count", [(False, 4), (True, 2)], ids=["twice", "loop"])
def test_units_that_gather_for_themselves_do_it_too(loop: bool, count: int):
    mesh = make_mesh(fsdp=8)
    x = batch_on(mesh, rows(16, 16))
    found = []
    for policy in (DEVICE, offloading("block_in", "hidden")):
        model = Twice(loop, nnx.Rngs(0))
        jfsdp.shard(model, mesh, units=Block, offload_policy=policy)
        graphdef, state = nnx.split(model)
        function = lambda state, x: jnp.mean(nnx.merge(graphdef, state)(x) ** 2)  # noqa: B023, E731
        count_moved = len(moved(function, state, x))
        assert count_moved == (0 if policy is DEVICE else count)
        found.append(gradients(model, x))
    assert_equal(*found)


def test_units_may_differ():
    """A name counts in the forward of the unit that names it, and in no other one."""
    mesh = make_mesh(fsdp=8)
    model = Model(16, 3, False, "none", nnx.Rngs(0))
    for block, policy in zip(model.blocks, (offloading("hidden"), DEVICE, DEVICE), strict=True):
        jfsdp.shard(block, mesh, offload_policy=policy)
    graphdef, state = nnx.split(jfsdp.shard(model, mesh))
    x = batch_on(mesh, rows(16, 16))
    assert len(moved(lambda s, x: jnp.mean(nnx.merge(graphdef, s)(x) ** 2), state, x)) == 1


class Named(nnx.Module):
    """A function of what it names and a layer."""

    def __init__(self, function: Any):
        self.linear = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        self.function = function

    def __call__(self, x: Any) -> Any:
        return self.function(self.linear, x)


def differentiated(function: Any, *names: str) -> list[str]:
    mesh = make_mesh(fsdp=8)
    graphdef, state = nnx.split(
        jfsdp.shard(Named(function), mesh, offload_policy=offloading(*names))
    )
    x = batch_on(mesh, rows(16, 16))
    return moved(lambda s, x: jnp.mean(nnx.merge(graphdef, s)(x) ** 2), state, x)


def squared(x: Any) -> Any:
    """With x itself kept for the backward pass."""
    return x * jnp.sin(x)


def test_a_value_that_is_kept_before_and_after_it_is_named_goes_once():
    """tanh keeps its result, the layer its operand: one array."""
    assert len(differentiated(lambda f, x: f(checkpoint_name(jnp.exp(f(x)), "a")), "a")) == 1


def test_what_is_kept_of_a_cast_of_it_goes():
    def cast(linear: Any, x: Any) -> Any:
        return linear(checkpoint_name(linear(x), "a").astype(jnp.bfloat16).astype(jnp.float32))

    assert differentiated(cast, "a") == ["float32<host>[2,16]"]


def test_names_inside_of_jit_and_of_a_users_own_scan_count():
    def inside(linear: Any, x: Any) -> Any:
        x = jax.jit(lambda x: squared(checkpoint_name(x, "a")))(linear(x))
        return jax.lax.scan(lambda c, _: (squared(checkpoint_name(c, "b")), None), x, None, 3)[0]

    assert len(differentiated(inside, "a")) == 1
    assert differentiated(inside, "b") == ["float32<host>[3,2,16]"]


def test_a_name_that_nothing_has_is_an_error_that_lists_those_there_are():
    """AI-Hypercomputer/maxtext#4990: the policy did nothing, for the name was never attached."""
    mesh = make_mesh(fsdp=8)
    function, params = loss_of("nnx", mesh, offloading("decoder_in"), scan=True, remat="none")
    x = batch_on(mesh, rows(16, 16))
    function(params, x)
    with pytest.raises(ValueError) as error:
        jax.grad(function)(params, x)
    assert "Block: CPUOffloadPolicy(activations=...) names 'decoder_in'" in str(error.value)
    assert "the names there are 'block_in', 'hidden'." in str(error.value)
    assert "jax.ad_checkpoint.checkpoint_name(x, 'decoder_in')" in str(error.value)


def test_a_name_of_which_nothing_is_kept_is_an_error():
    mesh = make_mesh(fsdp=8)
    function, params = loss_of("nnx", mesh, offloading("hidden"), scan=False, remat="plain")
    with pytest.raises(
        ValueError, match="'hidden', but the backward pass keeps no value of that name"
    ):
        jax.grad(function)(params, batch_on(mesh, rows(16, 16)))


def test_auto_partitioning_refuses_names():
    model = Model(16, 2, False, "none", nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"cannot promise offload_policy=.*'hidden'"):
        settings: Any = {"offload_policy": offloading("hidden"), "partitioning": "auto"}
        jfsdp.shard(model, make_mesh(fsdp=8), **settings)


def test_frozen_blocks_keep_nothing_and_that_is_no_error():
    mesh = make_mesh(fsdp=8)
    model = Model(16, 2, False, "none", nnx.Rngs(0))
    model = jfsdp.shard(model, mesh, units=Block, offload_policy=offloading("hidden"))
    only_head = nnx.DiffState(0, lambda path, _: "head" in path)
    loss = lambda model, x: jnp.mean(model(x) ** 2)  # noqa: E731
    grads = nnx.grad(loss, argnums=only_head)(model, batch_on(mesh, rows(16, 16)))
    assert len(jax.tree.leaves(grads)) == 2
