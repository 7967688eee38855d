"""`jfsdp.update_optimizer`: the step of optax over arrays in host memory, to the bit."""

from __future__ import annotations

import functools
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AUTO, auto, compilations, explicit_set, make_mesh
from jax.sharding import PartitionSpec as P
from offloaded import OPTIMIZERS, SHAPES, clipped, values

import jfsdp
from jfsdp.layout import named_sharding

HOST, DEVICE = "pinned_host", None
ON = ["device", "host"]
BOTH, STATE_ONLY, PARAMS_ONLY = (HOST, HOST), (DEVICE, HOST), (HOST, DEVICE)
PLACES = pytest.mark.parametrize(
    "places", [BOTH, STATE_ONLY, PARAMS_ONLY], ids=["both", "state", "params"]
)


def laid(tree: Any, mesh: Any, kind: str | None) -> Any:
    return jax.tree.map(
        lambda x: jax.device_put(x, named_sharding(mesh, P("S"), x.ndim, kind)), tree
    )


def policy(kind: str | None) -> jfsdp.OffloadPolicy:
    return jfsdp.CPUOffloadPolicy() if kind else jfsdp.OffloadPolicy()


def train_state(tx: Any, mesh: Any, places: Any, shapes: Any = SHAPES) -> tuple[Any, Any]:
    params = laid(values(0, shapes), mesh, places[0])
    return params, jfsdp.init_optimizer(tx, params, offload_policy=policy(places[1]))


def kinds(tree: Any) -> list[str]:
    return [leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)]


def raw(tree: Any) -> list[np.ndarray]:
    leaves = jax.tree.leaves(tree)
    keys = (jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves)
    return [
        np.asarray(jax.random.key_data(x) if is_key else x)
        for x, is_key in zip(leaves, keys, strict=True)
    ]


def trained(tx: Any, mesh: Any, places: Any, on: str | None, steps: int = 20) -> Any:
    """Parameters and state after some steps, checked to stay where they are in one compiled program."""
    params, state = train_state(tx, mesh, places)
    grads = [laid(values(seed), mesh, places[0]) for seed in (1, 2, 3)]
    there = jfsdp.shardings((params, state))

    def step(params: Any, state: Any, grads: Any) -> Any:
        return jfsdp.update_optimizer(tx, grads, state, params, on=on)

    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=there)
    with compilations() as compiled:
        for index in range(steps):
            params, state = jitted(params, state, grads[index % 3])
            assert jfsdp.shardings((params, state)) == there
    assert compiled["step"] == 1
    return params, state


QUICK = ("sgd", "clipped")
NAMES = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in OPTIMIZERS]


@functools.cache
def not_offloaded(name: str) -> list[np.ndarray]:
    return raw(trained(OPTIMIZERS[name](), make_mesh(AUTO, S=8), (DEVICE, DEVICE), None))


@PLACES
@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("name", NAMES)
def test_twenty_steps_are_those_of_optax_to_the_bit(name: str, on: str, places: Any):
    found = raw(trained(OPTIMIZERS[name](), make_mesh(AUTO, S=8), places, on))
    for x, y in zip(found, not_offloaded(name), strict=True):
        np.testing.assert_array_equal(x, y)


def test_what_branches_over_several_parameters_is_that_of_optax_to_rounding():
    """XLA rounds a branch otherwise than what it selects from."""
    tx, mesh = optax.apply_if_finite(optax.adam(1e-2), 2), make_mesh(AUTO, S=8)
    expected = raw(trained(tx, mesh, (DEVICE, DEVICE), None))
    for x, y in zip(raw(trained(tx, mesh, BOTH, "device")), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_two_rounds_of_norms_are_those_of_optax_to_rounding():
    """The norm of the updates needs what the norm of the gradients scales."""
    parts = optax.clip_by_global_norm(0.5), optax.scale_by_adam(), optax.clip_by_global_norm(0.1)
    tx, mesh = optax.chain(*parts, optax.scale(-1e-2)), make_mesh(AUTO, S=8)
    expected = raw(trained(tx, mesh, (DEVICE, DEVICE), None))
    for x, y in zip(raw(trained(tx, mesh, BOTH, "device")), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_units_may_lie_in_different_memories_and_the_norm_spans_both():
    mesh, tx = make_mesh(AUTO, S=8), clipped()

    def split(tree: Any) -> Any:
        return {k: laid(x, mesh, HOST if k in ("embed", "up") else DEVICE) for k, x in tree.items()}

    step = jax.jit(lambda p, s, g: jfsdp.update_optimizer(tx, g, s, p))
    params, grads = split(values(0)), split(values(1))
    state = jfsdp.init_optimizer(tx, params)
    new = step(params, state, grads)
    assert kinds(new) == kinds((params, state))
    whole = laid(values(0), mesh, DEVICE)
    expected = step(whole, jfsdp.init_optimizer(tx, whole), laid(values(1), mesh, DEVICE))
    for x, y in zip(raw(new), raw(expected), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("check_vma", [True, False])
def test_it_works_inside_shard_map(on: str, check_vma: bool):
    mesh, tx = make_mesh(AUTO, S=8), OPTIMIZERS["adamw"]()
    params, state = train_state(tx, mesh, BOTH)
    specs = jax.tree.map(lambda x: P("S") if x.ndim else P(), (params, state))
    grads = laid(values(1), mesh, HOST)

    def step(params: Any, state: Any, grads: Any) -> Any:
        return jfsdp.update_optimizer(tx, grads, state, params, on=on)

    inside = jax.shard_map(
        step, mesh=mesh, in_specs=(*specs, specs[0]), out_specs=specs, check_vma=check_vma
    )
    new = jax.jit(inside)(params, state, grads)
    assert kinds(new) == kinds((params, state))
    for x, y in zip(raw(new), raw(jax.jit(step)(params, state, grads)), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("mesh_of", [auto, explicit_set], ids=["auto", "explicit"])
def test_outside_of_jit_it_compiles_itself_and_keeps_every_place(mesh_of: Any, on: str):
    tx = OPTIMIZERS["adam"]()
    with mesh_of(S=8) as mesh:
        params, state = train_state(tx, mesh, BOTH)
        grads = laid(values(1), mesh, DEVICE)  # a gradient may lie elsewhere than its parameter
        new = jfsdp.update_optimizer(tx, grads, state, params, on=on)
        assert jfsdp.shardings(new) == jfsdp.shardings((params, state))


def test_unpinned_arrays_keep_their_place_outside_of_jit():
    mesh, tx = make_mesh(AUTO, S=8), OPTIMIZERS["adam"]()
    params = laid(values(0), mesh, "unpinned_host")
    state = jfsdp.init_optimizer(tx, params)
    new = jfsdp.update_optimizer(tx, laid(values(1), mesh, "unpinned_host"), state, params)
    assert jfsdp.shardings(new) == jfsdp.shardings((params, state))
    assert "unpinned_host" in kinds(new)


def moves(
    tx: Any, places: Any, on: str | None, *, platform: str = "cuda", leaves: int = 6
) -> dict[str, int]:
    """Copies to each memory, of more than a scalar, in the program before any pass of the compiler."""
    shapes = {f"w{i}": (64, 8) for i in range(leaves)}
    mesh = make_mesh(AUTO, S=8)
    params, state = train_state(tx, mesh, places, shapes)
    step = jax.jit(lambda p, s, g: jfsdp.update_optimizer(tx, g, s, p, on=on))
    text = step.trace(params, state, params).lower(lowering_platforms=(platform,)).as_text()
    lines = [x for x in text.splitlines() if "annotate_device_placement" in x and "64x8" in x]
    found = (re.search(r'_xla_buffer_placement = "(\w+)"', line) for line in lines)
    return dict(Counter(match[1] for match in found if match))


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@PLACES
def test_each_array_comes_once_and_each_result_goes_back_once(places: Any, platform: str):
    in_and_out = {BOTH: (4, 3), STATE_ONLY: (2, 2), PARAMS_ONLY: (2, 1)}[places]
    found = moves(optax.adam(1e-3), places, "device", platform=platform)
    assert found == {"device": 6 * in_and_out[0], "pinned_host": 6 * in_and_out[1]}


def test_a_global_norm_costs_the_gradients_one_more_copy():
    assert moves(clipped(), BOTH, "device") == {"device": 6 * 5, "pinned_host": 6 * 3}


def test_the_host_computes_without_a_copy_to_the_device():
    assert "device" not in moves(clipped(), BOTH, "host")


def test_nothing_is_added_where_nothing_is_on_the_host():
    tx, mesh = clipped(), make_mesh(AUTO, S=8)
    params, state = train_state(tx, mesh, (DEVICE, DEVICE))

    def plain(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def step(params: Any, state: Any, grads: Any) -> Any:
        return jfsdp.update_optimizer(tx, grads, state, params)

    texts = [jax.jit(f).lower(params, state, params).as_text() for f in (plain, step)]
    assert texts[0].replace("jit_plain", "jit_step") == texts[1]
