"""Section I of the bug cases: offload to the host, and donation."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx
from helpers import batch_on, make_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jfsdp
from jfsdp.offload import to_device, to_host

OFF, HOST = jfsdp.OffloadPolicy(), jfsdp.CPUOffloadPolicy()
TX = optax.adam(1e-3)
ONES = nnx.initializers.ones_init()


def kinds(tree: Any) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


# --------------------------------------------------------------------------------------------------
# B56: offloaded state that comes back on the device


class Trained:
    """A model of w, ones of (64, 8), after steps of adam on ones."""

    def __init__(self, policy: Any, steps: int = 3):
        mesh = make_mesh(fsdp=8)
        self.model = nnx.Linear(64, 8, use_bias=False, kernel_init=ONES, rngs=nnx.Rngs(0))
        jfsdp.shard(self.model, mesh, offload_policy=policy)
        self.optimizer = nnx.Optimizer(self.model, TX, wrt=nnx.Param)
        x = batch_on(mesh, jnp.ones((8, 64)))
        self.traced = 0

        @nnx.jit(donate_argnums=(0, 1))
        def step(model: Any, optimizer: Any) -> None:
            self.traced += 1
            gradients = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
            optimizer.update(model, gradients)

        for _ in range(steps):
            step(self.model, self.optimizer)

    @property
    def kernel(self) -> np.ndarray:
        return np.asarray(self.model.kernel.get_raw_value())


def test_b56_memory_kinds_are_a_fixed_point_of_the_step():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run, expected = Trained(HOST), Trained(OFF)
    state: Any = run.optimizer.opt_state[0]
    assert kinds([run.model.kernel, state.mu, state.nu]) == {"pinned_host"}
    assert kinds([state.count, run.optimizer.step]) == {"device"}
    assert run.traced == 1
    np.testing.assert_array_equal(run.kernel, expected.kernel)
    np.testing.assert_allclose(np.sum(run.kernel, dtype=np.float64), 510.46392822, rtol=5e-7)


def linen(policy: Any, steps: int = 3) -> tuple[Any, Any]:
    """The same in Linen with plain optax; parameters and state."""
    mesh = make_mesh(fsdp=8)
    plain = nn.Dense(8, use_bias=False, kernel_init=ONES)
    model = jfsdp.shard(plain, mesh, offload_policy=policy)
    x = batch_on(mesh, jnp.ones((8, 64)))
    params: Any = jfsdp.init(lambda: model.init(jax.random.key(0), jnp.ones((1, 64))))
    state = jfsdp.init_optimizer(TX, params)

    def loss(params: Any) -> Any:
        y: Any = model.apply(params, x)
        return jnp.mean(y**2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any) -> Any:
        return jfsdp.update_optimizer(TX, jax.grad(loss)(params), state, params)

    for _ in range(steps):
        params, state = step(params, state)
    assert step._cache_size() == 1
    return params, state


def test_b56_in_linen():
    (params, state), (expected, _) = linen(HOST), linen(OFF)
    assert kinds([params, state[0].mu, state[0].nu]) == {"pinned_host"}
    assert kinds(state[0].count) == {"device"}
    kernel = np.asarray(params["params"]["kernel"])
    np.testing.assert_array_equal(kernel, expected["params"]["kernel"])
    np.testing.assert_allclose(np.sum(kernel, dtype=np.float64), 510.46392822, rtol=5e-7)


@pytest.mark.parametrize("policy", [HOST, jfsdp.CPUOffloadPolicy(parameters=False)])
def test_b56_a_restored_state_is_in_the_memory_that_it_was_in(policy: Any, tmp_path: Path):
    run = Trained(policy)
    state = nnx.state((run.model, run.optimizer))
    pure = nnx.to_pure_dict(state)

    def described(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", pure)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.tree.map(described, pure))
    pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(pure), strict=True)
    for got, expected in pairs:
        assert got.sharding == expected.sharding
        np.testing.assert_array_equal(got, expected)


# --------------------------------------------------------------------------------------------------
# B58: transfers of what is there already


def test_b58_what_is_there_is_left_alone():
    model = Trained(HOST, steps=0).model
    kernel = model.kernel.get_raw_value()
    assert to_host(kernel) is kernel
    moved = to_device(kernel)
    assert (kinds(moved), to_device(moved) is moved) == ({"device"}, True)
    assert to_host(to_host(moved)).sharding == kernel.sharding


def test_b58_putting_a_state_where_it_lies_gives_the_same_arrays():
    run = Trained(HOST, steps=0)
    state = nnx.to_pure_dict(nnx.state((run.model, run.optimizer)))
    again = jax.device_put(state, jfsdp.shardings(state))
    assert all(x is y for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True))


# --------------------------------------------------------------------------------------------------
# B59: the kind of host memory, and its limit


@pytest.mark.parametrize("pinned, kind", [(True, "pinned_host"), (False, "unpinned_host")])
def test_b59_both_kinds_run_on_cpu(pinned: bool, kind: str):
    run = Trained(jfsdp.CPUOffloadPolicy(pin_memory=pinned), steps=0)
    assert kinds(nnx.state(run.model)) == {kind}
    gradients = nnx.jit(nnx.grad(lambda model: jnp.sum(model(jnp.ones((8, 64))))))(run.model)
    np.testing.assert_array_equal(gradients["kernel"].get_raw_value(), np.full((64, 8), 8.0))


def test_b59_a_kind_that_is_no_such_memory_is_refused():
    with pytest.raises(TypeError, match="pin_memory must be True or False, got 'host'"):
        jfsdp.CPUOffloadPolicy(pin_memory="host")  # pyright: ignore[reportArgumentType]


def test_b59_unpinned_state_keeps_its_kind_where_the_step_names_it():
    mesh = make_mesh(fsdp=8)
    policy = jfsdp.CPUOffloadPolicy(pin_memory=False)
    model = jfsdp.shard(nnx.Linear(64, 8, rngs=nnx.Rngs(0)), mesh, offload_policy=policy)
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @jfsdp.jit
    def step(model: Any, optimizer: Any, x: Any) -> None:
        optimizer.update(model, nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model))

    for _ in range(2):
        step(model, optimizer, batch_on(mesh, jnp.ones((8, 64))))
    assert kinds([model.kernel, optimizer.opt_state[0].mu]) == {"unpinned_host"}


# --------------------------------------------------------------------------------------------------
# B61: donation with some shardings given


@pytest.mark.parametrize("policy", [OFF, HOST], ids=["device", "host"])
def test_b61_a_donated_step_with_the_parameters_shardings_alone(policy: Any):
    mesh = make_mesh(fsdp=8)
    sharding = NamedSharding(
        mesh, P("fsdp"), memory_kind="device" if policy == OFF else "pinned_host"
    )
    params = {"w": jax.device_put(jnp.ones((64, 8)), sharding)}
    state = jfsdp.init_optimizer(TX, params)
    scalars = {"a": jnp.float32(1), "b": jnp.float32(2), "c": jnp.float32(3)}
    before = jfsdp.shardings((params, state))

    @functools.partial(
        jax.jit, donate_argnums=(0, 1, 2), out_shardings=(None, None, {"w": sharding}, None)
    )
    def step(params: Any, state: Any, scalars: Any) -> Any:
        gradients = jax.tree.map(lambda x: x * 0 + 1, jax.tree.map(to_device, params))
        params, state = jfsdp.update_optimizer(TX, gradients, state, params)
        metrics = {"sum": scalars["a"] + scalars["b"] + scalars["c"]}
        return metrics, {name: x * 2 for name, x in scalars.items()}, params, state

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics, scalars, params, state = step(params, state, scalars)
        metrics, scalars, params, state = step(params, state, scalars)
    assert jfsdp.shardings((params, state)) == before
    assert float(metrics["sum"]) == 12.0
    assert {name: float(x) for name, x in scalars.items()} == {"a": 4.0, "b": 8.0, "c": 12.0}
