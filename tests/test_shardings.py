"""`jfsdp.shardings`: what to give jit for an ordinary train state, and as a restore target."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from flax.training.train_state import TrainState
from helpers import auto, batch_on, compilations, make_mesh, rows
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jfsdp.layout import named_sharding, shardings


def train_state(mesh: Any, tx: Any = None) -> TrainState:
    """As a user makes it: parameters on the mesh, a step 0, and what `tx.init` gives."""
    model = linen.Dense(8)
    params = model.init(jax.random.key(0), rows(1, 16))["params"]
    params = jax.tree.map(lambda x: jax.device_put(x, named_sharding(mesh, P("S"), x.ndim)), params)
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx or optax.adam(1e-2))


def unique_step(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss_of(params: Any) -> jax.Array:
        return jnp.mean(state.apply_fn({"params": params}, x) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


@pytest.mark.parametrize("put, compiles", [(True, 1), (False, 2)], ids=["put", "as it is"])
def test_an_ordinary_train_state_stays_in_place(put: bool, compiles: int):
    """B50, B61: in_shardings, out_shardings and donation: 4 steps, no warning, compiled once.

    Twice if it is not put there first: jax 0.10.2 and 0.12.0.1 have the mesh in the type of an array.
    """
    mesh = make_mesh(S=8)
    state, x = train_state(mesh), batch_on(mesh, rows(8, 16))
    given = shardings(state)
    if put:
        state = jax.device_put(state, given)
    step = jax.jit(
        unique_step,
        in_shardings=(given, x.sharding),
        out_shardings=(given, None),
        donate_argnums=0,
    )
    with compilations() as compiled:
        for _ in range(4):
            state, _ = step(state, x)
    assert compiled["unique_step"] == compiles
    assert jax.tree.map(lambda x: x.sharding, state) == given
    assert shardings(state) == given
    assert state.step == 4


def test_only_the_shardings_of_the_parameters_may_be_given():
    """B61: out_shardings of the parameters alone, donated: no warning, and the same shardings."""
    mesh = make_mesh(S=8)
    state, x = train_state(mesh), batch_on(mesh, rows(8, 16))
    given = shardings(state)

    def update(params: Any, opt_state: Any, x: jax.Array) -> tuple[Any, Any]:
        after, _ = unique_step(state.replace(params=params, opt_state=opt_state), x)
        return after.params, after.opt_state

    step = jax.jit(update, donate_argnums=(0, 1), out_shardings=(given.params, None))
    opt_state = jax.device_put(state.opt_state, given.opt_state)
    params, opt_state = step(state.params, opt_state, x)
    assert shardings((params, opt_state)) == (given.params, given.opt_state)


UNPLACED = {
    "int": 0,
    "float": 0.5,
    "bool": True,
    "numpy scalar": np.int32(0),
    "numpy array without dimensions": np.array(0.5),
    "count": jnp.zeros((), jnp.int32),
    "key": jax.random.key(0),
    "vector": jnp.ones(3),
}


@pytest.mark.parametrize("kind", UNPLACED)
def test_what_nobody_placed_goes_to_every_device_of_the_mesh(kind: str):
    mesh = make_mesh(S=8)
    w = jax.device_put(jnp.ones(8), NamedSharding(mesh, P("S")))
    given = shardings({"w": w, "it": UNPLACED[kind]})
    assert given == {"w": w.sharding, "it": NamedSharding(mesh, P())}


def test_on_explicit_axes_it_is_spelled_as_a_step_returns_it():
    explicit = make_mesh(jax.sharding.AxisType.Explicit, S=8)
    w = jax.device_put(jnp.ones(8), NamedSharding(explicit, P("S")))
    assert tuple(shardings((w, jnp.ones((2, 2))))[1].spec) == (None, None)


def test_an_array_that_somebody_placed_keeps_its_sharding():
    device = jax.devices()[3]
    w = jax.device_put(jnp.ones(8), NamedSharding(make_mesh(S=8), P("S")))
    there = jax.device_put(jnp.ones(3), device)
    assert shardings([w, there]) == [w.sharding, SingleDeviceSharding(device)]


def test_without_a_mesh_every_array_keeps_its_sharding():
    x = jnp.ones(3)
    assert shardings({"x": x}) == {"x": x.sharding}


@pytest.mark.parametrize("leaf", [0, np.zeros(()), np.zeros(3)], ids=["int", "0-d", "1-d"])
def test_without_a_mesh_what_has_no_sharding_is_refused(leaf: Any):
    with pytest.raises(TypeError, match=r"\['step'\] .*has no sharding.*device_put"):
        shardings({"x": jnp.ones(3), "step": leaf})


@pytest.mark.parametrize(
    "leaf", [np.zeros(3), jax.ShapeDtypeStruct((3,), jnp.float32)], ids=["numpy", "abstract"]
)
def test_beside_a_mesh_arrays_without_a_sharding_are_still_refused(leaf: Any):
    """They may be large: whether all devices hold them whole is for the user to say."""
    w = jax.device_put(jnp.ones(8), NamedSharding(make_mesh(S=8), P("S")))
    with pytest.raises(TypeError, match=r"\['b'\] .*has no sharding"):
        shardings({"w": w, "b": leaf})


def on_two_meshes() -> dict[str, jax.Array]:
    return {
        "a": jax.device_put(jnp.ones(8), NamedSharding(make_mesh(S=8), P("S"))),
        "b": jax.device_put(jnp.ones(8), NamedSharding(make_mesh(T=4), P())),
    }


def test_what_belongs_to_one_of_two_meshes_is_refused_with_both_paths():
    with pytest.raises(
        ValueError, match=r"\['a'\] lies on the mesh S=8.*\['b'\] on T=4 .*one mesh"
    ):
        shardings({**on_two_meshes(), "step": 0})


def test_two_meshes_are_told_apart_by_their_axis_types():
    explicit = make_mesh(jax.sharding.AxisType.Explicit, S=8)
    tree = {
        "a": jax.device_put(jnp.ones(8), NamedSharding(make_mesh(S=8), P("S"))),
        "b": jax.device_put(jnp.ones(8), NamedSharding(explicit, P("S"))),
    }
    with pytest.raises(ValueError, match=r"S=8 \(Auto axes, .* on S=8 \(Explicit axes, "):
        shardings({**tree, "step": 0})


def test_two_meshes_without_anything_to_place_are_no_mistake():
    tree = on_two_meshes()
    assert shardings(tree) == {name: x.sharding for name, x in tree.items()}


def test_the_tree_may_be_one_array():
    with auto(S=8) as mesh:
        x = jax.device_put(jnp.ones(8), NamedSharding(mesh, P("S")))
    assert shardings(x) == x.sharding
