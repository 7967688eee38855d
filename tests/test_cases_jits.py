"""Every way to jit a step, and a user's own shard_map round a unit and inside one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    EXPLICIT,
    MeshOf,
    assert_close,
    auto,
    batch_on,
    both_axis_types,
    compilations,
    explicit_set,
    gradients,
    leaves,
    local_shape,
    make_mesh,
    mean_square,
    mlp,
    rows,
)
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jfsdp

# --------------------------------------------------------------------------------------------------
# Jits

State = tuple[Any, nnx.Optimizer]


def update(model: Any, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(mean_square)(model, x)
    optimizer.update(model, grads)
    return loss


def unique_step(model: Any, optimizer: nnx.Optimizer, x: jax.Array) -> State:
    update(model, optimizer, x)
    return model, optimizer


def with_nnx_jit(state: State, x: jax.Array) -> Callable[[State], State]:
    @nnx.jit
    def unique_step(model: Any, optimizer: nnx.Optimizer, x: jax.Array) -> None:
        update(model, optimizer, x)

    def run(state: State) -> State:
        unique_step(*state, x)
        return state

    return run


def with_modules_as_pytrees(state: State, x: jax.Array) -> Callable[[State], State]:
    jitted = jax.jit(lambda *args: unique_step(*args))
    return lambda state: jitted(*state, x)


def with_donated_modules(state: State, x: jax.Array) -> Callable[[State], State]:
    jitted = jax.jit(lambda *args: unique_step(*args), donate_argnums=(0, 1))
    return lambda state: jitted(*state, x)


def with_shardings(state: State, x: jax.Array) -> Callable[[State], State]:
    shardings = jfsdp.shardings(state)
    jitted = jax.jit(
        lambda *args: unique_step(*args),
        in_shardings=(*shardings, x.sharding),
        out_shardings=shardings,
    )
    return lambda state: jitted(*state, x)


def with_split_state(state: State, x: jax.Array) -> Callable[[State], State]:
    graphdef, _ = nnx.split(state)

    def split_step(arrays: nnx.State, x: jax.Array) -> nnx.State:
        return nnx.state(unique_step(*nnx.merge(graphdef, arrays), x))

    jitted = jax.jit(split_step)
    return lambda state: nnx.merge(graphdef, jitted(nnx.state(state), x))


def with_split_state_and_shardings(state: State, x: jax.Array) -> Callable[[State], State]:
    graphdef, arrays = nnx.split(state)
    shardings = jfsdp.shardings(arrays)

    def split_step(arrays: nnx.State, x: jax.Array) -> nnx.State:
        return nnx.state(unique_step(*nnx.merge(graphdef, arrays), x))

    jitted = jax.jit(split_step, in_shardings=(shardings, None), out_shardings=shardings)
    return lambda state: nnx.merge(graphdef, jitted(nnx.state(state), x))


JITS = [
    (auto, with_nnx_jit),
    (auto, with_modules_as_pytrees),
    (auto, with_shardings),
    (auto, with_split_state),
    (explicit_set, with_nnx_jit),
    (explicit_set, with_shardings),
    pytest.param(auto, with_donated_modules, marks=pytest.mark.slow),
    pytest.param(auto, with_split_state_and_shardings, marks=pytest.mark.slow),
    pytest.param(explicit_set, with_split_state, marks=pytest.mark.slow),
]


@functools.cache
def unsharded() -> dict[str, Any]:
    model = mlp(16, 8, 3)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    for _ in range(4):
        nnx.jit(update)(model, optimizer, rows(8, 16))
    return leaves(model)


@pytest.mark.parametrize("mesh_of, jit", JITS, ids=lambda value: value.__name__)
def test_every_jit_trains_the_same_and_compiles_once(mesh_of: MeshOf, jit: Any):
    """B50: 4 steps of adam under each jit: the unsharded parameters, one compilation."""
    with mesh_of(S=8) as mesh:
        model = jfsdp.shard(mlp(16, 8, 3), mesh, units=nnx.Linear)
        state: State = (model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param))
        shardings = jax.tree.leaves(jfsdp.shardings(state))
        step = jit(state, batch_on(mesh, rows(8, 16)))
        with compilations() as compiled:
            for _ in range(4):
                state = step(state)
    assert sum(compiled[name] for name in ("unique_step", "split_step", "<lambda>")) == 1, compiled
    assert jax.tree.leaves(jfsdp.shardings(state)) == shardings
    assert_close(leaves(state[0]), unsharded(), rtol=1e-4, atol=1e-6)


# --------------------------------------------------------------------------------------------------
# shard_map


def regions(function: Any, *args: Any) -> int:
    """How many shard_maps the program holds."""
    return str(jax.make_jaxpr(function)(*args)).count("shard_map[")


@both_axis_types
def test_units_open_no_region_in_the_users_own_shard_map(mesh_of: MeshOf):
    """B52: the parameters enter as local shards by their specs; loss and gradients as unsharded."""
    with mesh_of(S=8) as mesh:
        model = jfsdp.shard(mlp(16, 8, 3), mesh, units=nnx.Linear)
        graphdef, params = nnx.split(model)
        specs = jax.tree.map(lambda s: s.spec, jfsdp.shardings(params))
        seen: list[tuple[int, ...]] = []

        def per_device(params: nnx.State, x: jax.Array) -> tuple[jax.Array, nnx.State]:
            seen.extend(leaf.shape for leaf in jax.tree.leaves(params.layers[0]))
            # The mean over all devices: each adds its share, and the units sum the gradients.
            loss, grads = nnx.value_and_grad(lambda model, x: mean_square(model, x) / 8)(
                nnx.merge(graphdef, params), x
            )
            return jax.lax.psum(loss, "S"), grads

        mapped = jax.shard_map(
            per_device, mesh=mesh, in_specs=(specs, P("S")), out_specs=(P(), specs), check_vma=False
        )
        x = batch_on(mesh, rows(8, 16))
        assert regions(mapped, params, x) == 1
        assert set(seen) == {(2, 8), (1,)}
        assert_close(jax.jit(mapped)(params, x), gradients(mlp(16, 8, 3), rows(8, 16)))


def test_units_refuse_a_shard_map_over_some_of_the_data_axes():
    """B52: R2xS4, mapped over S only: neither view."""
    mesh = make_mesh(R=2, S=4)
    graphdef, params = nnx.split(jfsdp.shard(mlp(16, 8), mesh))
    mapped = jax.shard_map(
        lambda params, x: nnx.merge(graphdef, params)(x),
        mesh=mesh,
        in_specs=(P(), P("S")),
        out_specs=P("S"),
        axis_names={"S"},
        check_vma=False,
    )
    with pytest.raises(ValueError, match=r"shard_map over \['S'\].*\['R', 'S'\]"):
        jax.jit(mapped)(params, rows(8, 16))


class Mapped(nnx.Module):
    """Linear, then tanh(x) @ w in a shard_map of the user's own, then Linear."""

    def __init__(self, function: Any, mesh: Mesh | None = None, **specs: Any):
        self.before = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
        self.w = nnx.Param(jax.random.normal(jax.random.key(1), (8, 8)))
        self.after = nnx.Linear(8, 8, rngs=nnx.Rngs(2))

        # Explicit axes want an argument to lie as its spec says; on Auto ones this changes nothing.
        def mapped(*args: jax.Array) -> jax.Array:
            placed = [_lay(arg, spec) for arg, spec in zip(args, specs["in_specs"], strict=True)]
            return jax.shard_map(function, mesh=mesh, **specs)(*placed)

        self.mapped = nnx.static(mapped)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.after(self.mapped(self.before(x), self.w[...]))


def _lay(array: jax.Array, spec: P) -> jax.Array:
    explicit = EXPLICIT in jax.sharding.get_abstract_mesh().axis_types
    return jax.sharding.reshard(array, spec) if explicit else array


class Unmapped(Mapped):
    """The same mathematics without a shard_map."""

    def __init__(self):
        super().__init__(None)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.after(jnp.tanh(self.before(x)) @ self.w[...])


def over_the_batch(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x) @ w


def over_the_contraction(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.psum(jnp.tanh(x) @ w, "T")


BATCH = {"in_specs": (P("S"), P()), "out_specs": P("S")}
CONTRACTION = {"in_specs": (P(None, "T"), P("T")), "out_specs": P(), "axis_names": {"T"}}


@both_axis_types
def test_a_shard_map_over_the_shard_axis_runs_inside_an_auto_unit(mesh_of: MeshOf):
    """B52: partitioning="auto" keeps the global view: output and gradients are the reference's."""
    with mesh_of(S=8) as mesh:
        model = Mapped(over_the_batch, mesh, **BATCH)
        jfsdp.shard(model, mesh, units=nnx.Linear, partitioning="auto")
        x = batch_on(mesh, rows(8, 16))
        np.testing.assert_allclose(
            nnx.jit(lambda model, x: model(x))(model, x),
            Unmapped()(rows(8, 16)),
            rtol=1e-5,
            atol=1e-6,
        )
        assert_close(gradients(model, x), gradients(Unmapped(), rows(8, 16)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "mesh_of",
    [auto, pytest.param(explicit_set, marks=pytest.mark.slow)],
    ids=["auto", "explicit_set"],
)
def test_a_shard_map_over_another_axis_runs_inside_a_region(mesh_of: MeshOf):
    """B52: S4xT2, the region over S, the user's shard_map over T."""
    with mesh_of(S=4, T=2) as mesh:
        model = Mapped(over_the_contraction, **CONTRACTION)
        dims = jfsdp.DataParallelMeshDims(shard="S")
        jfsdp.shard(model, mesh, dp_mesh_dims=dims, units=nnx.Linear)
        x = jax.device_put(rows(8, 16), NamedSharding(mesh, P("S")))
        y = nnx.jit(lambda model, x: model(x))(model, x)
        assert local_shape(y) == (2, 8)
        np.testing.assert_allclose(y, Unmapped()(rows(8, 16)), rtol=1e-5, atol=1e-6)
        assert_close(gradients(model, x), gradients(Unmapped(), rows(8, 16)), rtol=1e-5, atol=1e-6)


def test_a_shard_map_over_the_shard_axis_inside_a_region_says_what_to_do():
    """B52: the axis is manual there already; jax's own text would name neither that nor the remedy."""
    mesh = make_mesh(S=8)

    class Mapped(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            tanh = jax.shard_map(jnp.tanh, mesh=mesh, in_specs=P("S"), out_specs=P("S"))
            return tanh(self.layer(x))

    model = jfsdp.shard(Mapped(), mesh)
    with pytest.raises(
        ValueError, match=r"Mapped\.__call__ holds a shard_map .*partitioning=\"auto\""
    ):
        model(rows(16, 16))
