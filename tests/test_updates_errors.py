"""`jfsdp.update_optimizer` and `jfsdp.init_optimizer`: what they refuse, and where state is born."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AUTO, make_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jfsdp
from jfsdp.layout import named_sharding, one_mesh

HOST = "pinned_host"


def parameters(kind: str | None = HOST, **shapes: Any) -> Any:
    mesh = make_mesh(AUTO, S=8)
    shapes = shapes or {"w": (16, 8), "b": (8,)}
    return {
        name: jax.device_put(np.ones(shape, "float32"), named_sharding(mesh, P("S"), 1, kind))
        for name, shape in shapes.items()
    }


def test_another_place_to_compute_names_the_two():
    with pytest.raises(ValueError, match='computed: "device" or "host", got \'cpu\''):
        jfsdp.update_optimizer(optax.sgd(1.0), {}, (), {}, on="cpu")


def test_gradients_of_another_structure_are_listed_by_path():
    params = parameters()
    grads = {"w": params["w"], "x": params["b"]}
    with pytest.raises(
        ValueError, match=r"b: missing in the gradients\n  x: in the gradients only"
    ):
        jfsdp.update_optimizer(optax.sgd(1.0), grads, (), params)


@pytest.mark.parametrize("kind", [HOST, None])
def test_a_state_of_other_parameters_is_listed_by_path(kind: Any):
    tx, params = optax.adam(1e-3), parameters(kind)
    state = jfsdp.init_optimizer(tx, {"w": params["w"]})
    with pytest.raises(ValueError, match=r"0\.mu\.b: missing in the state\n  0\.nu\.b"):
        jfsdp.update_optimizer(tx, params, state, params)


def test_a_state_that_changes_its_structure_is_refused():
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, (state, state)

    tx, params = optax.GradientTransformation(lambda params: jnp.zeros(()), update), parameters()
    with pytest.raises(ValueError, match="returns a state of another structure than it takes"):
        jfsdp.update_optimizer(tx, params, jnp.zeros(()), params)


def _printing() -> optax.GradientTransformation:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        jax.debug.print("{}", updates["b"][0])
        return updates, state

    return optax.GradientTransformation(lambda params: (), update)


def test_side_effects_are_refused_by_name():
    params = parameters()
    with pytest.raises(ValueError, match=r"side effects \(debug_print\).*OffloadPolicy\(\)"):
        jfsdp.update_optimizer(_printing(), params, (), params)


def test_what_the_host_cannot_compute_names_the_remedy():
    def halve(x: Any) -> Any:
        return jax.lax.fori_loop(0, 2, lambda _, y: y * jnp.full(y.shape, 0.5), x)

    tx, params = optax.stateless_with_tree_map(lambda g, _: halve(g)), parameters()
    with pytest.raises(
        ValueError, match=r"makes arrays of its own inside, which .* Take on=.device."
    ):
        jfsdp.update_optimizer(tx, params, tx.init(params), params, on="host")
    new, _ = jfsdp.update_optimizer(tx, params, tx.init(params), params, on="device")
    assert float(np.asarray(new["b"])[0]) == 1.25


def kinds(tree: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf.sharding.memory_kind for path, leaf in leaves}


CASES = {
    "as the parameters": (HOST, None, HOST),
    "as unpinned parameters": ("unpinned_host", None, "unpinned_host"),
    "on the device": (HOST, jfsdp.OffloadPolicy(), "device"),
    "state only": (None, jfsdp.CPUOffloadPolicy(), HOST),
    "unpinned": (None, jfsdp.CPUOffloadPolicy(pin_memory=False), "unpinned_host"),
    "parameters only": (HOST, jfsdp.CPUOffloadPolicy(optimizer_state=False), "device"),
}


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("abstract", [False, True], ids=["arrays", "abstract"])
def test_state_is_born_in_the_memory_of_its_parameter_or_the_policy(case: str, abstract: bool):
    of, policy, expected = CASES[case]
    params = parameters(of)
    if abstract:
        params = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
        )
    state = jfsdp.init_optimizer(optax.adam(1e-3), params, offload_policy=policy)
    found = kinds(state)
    assert found.pop("[0].count") == "device"
    assert set(found.values()) == {expected}


def test_state_over_more_axes_is_born_on_the_host_too():
    mesh = make_mesh(AUTO, R=2, S=4)
    params = {"w": jax.device_put(np.ones((16, 8)), named_sharding(mesh, P("S"), 2, HOST))}
    state = jfsdp.init_optimizer(optax.adam(1e-3), params, shard_over="R")
    assert state[0].mu["w"].sharding == named_sharding(mesh, P(("S", "R")), 2, HOST)


def test_factored_moments_are_whole_on_the_device():
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=8)
    found = kinds(jfsdp.init_optimizer(tx, parameters()))
    assert {kind for path, kind in found.items() if ".v_row" in path} == {"device"}
    assert {kind for path, kind in found.items() if ".v['b']" in path} == {HOST}


def test_a_wrong_policy_is_a_type_error():
    with pytest.raises(TypeError, match=r"must be jfsdp\.OffloadPolicy\(\) or .*got 'cpu'"):
        jfsdp.init_optimizer(optax.sgd(1.0), parameters(), offload_policy="cpu")  # pyright: ignore


def test_where_to_update_is_for_modules():
    with pytest.raises(
        ValueError, match=r"update_optimizer\(tx, grads, state, params, on='host'\)"
    ):
        jfsdp.init_optimizer(optax.sgd(1.0), parameters(), update_on="host")


def test_a_mesh_without_its_devices_is_the_same_mesh():
    mesh = make_mesh(AUTO, S=8)
    leaves = [("a", mesh.abstract_mesh), ("b", mesh), ("c", mesh.abstract_mesh)]
    described = [
        ((), jax.ShapeDtypeStruct((8,), "float32", sharding=NamedSharding(m, P())))
        for _, m in leaves
    ]
    assert one_mesh("test", described) is mesh
