"""`nnx.Optimizer` on modules whose parameters or state lie in host memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import AUTO, compilations, make_mesh
from jax.sharding import PartitionSpec as P

import jfsdp
from jfsdp.layout import named_sharding

OFFLOAD = jfsdp.CPUOffloadPolicy
NO_OFFLOAD = jfsdp.OffloadPolicy()
PINNED, UNPINNED, DEVICE = "pinned_host", "unpinned_host", "device"


class Net(nnx.Module):
    """Two layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(16, 32, rngs=rngs)
        self.second = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(jnp.tanh(self.first(x)))


def tx() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def net(policy: jfsdp.OffloadPolicy, **sizes: int) -> Any:
    mesh = make_mesh(AUTO, **(sizes or {"S": 8}))
    dims = jfsdp.DataParallelMeshDims(shard="S", replicate="R" if "R" in sizes else None)
    return jfsdp.shard(Net(nnx.Rngs(0)), mesh, dp_mesh_dims=dims, offload_policy=policy)


def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def train(model: Any, optimizer: Any, steps: int = 5) -> list[float]:
    jitted, x = jfsdp.jit(step), np.ones((8, 16), "float32")
    with compilations() as compiled:
        losses = [float(jitted(model, optimizer, x)) for _ in range(steps)]
    assert sum(count for name, count in compiled.items() if "step" in name) == 1
    return losses


def kinds(tree: Any) -> set[str]:
    """Where what has the shape of a parameter lies."""
    arrays = (x for x in jax.tree.leaves(nnx.state(tree)) if x.ndim)
    return {x.sharding.memory_kind for x in arrays}


CASES = {
    "pinned": (OFFLOAD(), {}, PINNED, PINNED),
    "unpinned": (OFFLOAD(pin_memory=False), {}, UNPINNED, UNPINNED),
    "on the host": (OFFLOAD(), {"update_on": "host"}, PINNED, PINNED),
    "parameters only": (OFFLOAD(optimizer_state=False), {}, PINNED, DEVICE),
    "state only": (OFFLOAD(parameters=False), {}, DEVICE, PINNED),
    "state by argument": (NO_OFFLOAD, {"offload_policy": OFFLOAD()}, DEVICE, PINNED),
    "state back by argument": (OFFLOAD(), {"offload_policy": NO_OFFLOAD}, PINNED, DEVICE),
}


@pytest.mark.parametrize("case", list(CASES))
def test_a_module_trains_to_the_bit_and_everything_stays_where_it_is(case: str):
    policy, settings, own, of_state = CASES[case]
    plain = net(NO_OFFLOAD)
    expected = train(plain, nnx.Optimizer(plain, tx(), wrt=nnx.Param))
    model = net(policy)
    optimizer = jfsdp.init_optimizer(tx(), model, **settings)
    assert (kinds(model), kinds(optimizer.opt_state)) == ({own}, {of_state})
    before = jfsdp.shardings(nnx.state((model, optimizer)))
    assert train(model, optimizer) == expected
    assert jfsdp.shardings(nnx.state((model, optimizer))) == before
    for x, y in zip(*(jax.tree.leaves(nnx.state(m)) for m in (model, plain)), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_an_optimizer_of_flax_serves_an_offloaded_module():
    model = net(OFFLOAD())
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    assert kinds(optimizer.opt_state) == {PINNED}
    x = jnp.ones((8, 16))
    nnx.jit(step)(model, optimizer, x)
    assert (kinds(model), kinds(optimizer.opt_state)) == ({PINNED}, {PINNED})
    assert int(optimizer.step[...]) == 1


def test_an_update_outside_of_jit_keeps_every_place():
    model = net(OFFLOAD(pin_memory=False))
    optimizer = jfsdp.init_optimizer(optax.adam(1e-3), model)
    grads = nnx.state(model, nnx.Param)
    assert optimizer.update(model, grads) is None
    assert (kinds(model), kinds(optimizer.opt_state)) == ({UNPINNED}, {UNPINNED})


def test_state_over_the_replicas_lies_on_the_host_too():
    plain = net(NO_OFFLOAD, R=2, S=4)
    expected = train(plain, jfsdp.init_optimizer(tx(), plain, shard_over="R"))
    model = net(OFFLOAD(), R=2, S=4)
    optimizer = jfsdp.init_optimizer(tx(), model, shard_over="R")
    mesh = make_mesh(AUTO, R=2, S=4)
    moment = jax.tree.leaves(nnx.state(optimizer.opt_state))[2]
    assert moment.sharding.memory_kind == PINNED
    np.testing.assert_allclose(train(model, optimizer), expected, rtol=1e-6)
    assert (kinds(model), kinds(optimizer.opt_state)) == ({PINNED}, {PINNED})
    assert {"R", "S"} <= {
        axis
        for x in jax.tree.leaves(nnx.state(optimizer.opt_state))
        for entry in x.sharding.spec
        for axis in (entry if isinstance(entry, tuple) else (entry,))
    }
    assert model.first.kernel[...].sharding == named_sharding(mesh, P(None, "S"), 2, PINNED)


def test_the_optimizer_of_an_abstract_module_lies_as_the_real_one():
    def make() -> Any:
        return jfsdp.shard(Net(nnx.Rngs(0)), make_mesh(AUTO, S=8), offload_policy=OFFLOAD())

    abstract = jfsdp.init(make, abstract=True)
    described = jfsdp.init_optimizer(optax.adam(1e-3), abstract)
    model = make()
    real = jfsdp.init_optimizer(optax.adam(1e-3), model)
    assert jfsdp.shardings(nnx.state(described)) == jfsdp.shardings(nnx.state(real))


def test_where_to_update_has_to_be_known():
    with pytest.raises(ValueError, match=r"update_on says .*, got 'cpu'"):
        jfsdp.init_optimizer(optax.sgd(1.0), net(OFFLOAD()), update_on="cpu")
