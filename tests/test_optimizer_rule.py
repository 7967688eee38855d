"""Where optimizer state lies: matching by path and shape, finer layouts, and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import freeze
from helpers import explicit_set, leaves, local_shape, make_mesh
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jfsdp.layout import shardings
from jfsdp.optimizer import finer_spec, init_optimizer, names_of, shardings_like

S = P("S")


def on(mesh: Any, spec: P, *shape: int) -> jax.Array:
    return jax.device_put(jnp.ones(shape), NamedSharding(mesh, spec))


def spec_of_each(tree: Any, *parameters: Any) -> list[P]:
    """Specs of abstract leaves beside parameters given as (path, shape, spec)."""
    laid = shardings_like(tree, parameters, make_mesh(R=2, S=4))
    return [sharding.spec for sharding in jax.tree.leaves(laid)]


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


W = (("layer", "w"), (16, 8), S)


@pytest.mark.parametrize(
    "tree, spec",
    [
        ({"mu": {"layer": {"w": array(16, 8)}}}, S),
        ({"mu": {"layer": {"w": array(8, 16)}}}, P()),
        ({"mu": {"other": {"w": array(16, 8)}}}, P()),
        ({"mu": {"layer": {"w": (array(16, 8),)}}}, P()),
        ({"history": {"layer": {"w": array(3, 16, 8)}}}, P(None, "S")),
        ({"step": 0}, P()),
        ({"key": jax.eval_shape(lambda: jax.random.key(0))}, P()),
    ],
    ids=["as it", "other shape", "other path", "a path below", "history", "number", "key"],
)
def test_a_leaf_is_laid_by_the_end_of_its_path_and_its_shape(tree: Any, spec: P):
    assert spec_of_each(tree, W) == [spec]


def test_of_several_parameters_the_one_with_the_longest_path_counts():
    """The inner w, which has another shape, makes its moments no moments of the outer one."""
    tree = {"mu": {"inner": {"w": array(8, 8)}, "w": array(8, 8)}}
    outer, inner = (("w",), (8, 8), S), (("inner", "w"), (4, 4), P())
    assert spec_of_each(tree, outer, inner) == [P(), S]


def test_masks_and_empty_states_pass():
    tree = {"a": optax.MaskedNode(), "b": optax.EmptyState(), "c": None}
    assert shardings_like(tree, [W], make_mesh(S=8)) == tree


def tree_of_boxes(x: Any) -> Any:
    return {"w": nn.Partitioned(x, ("a", None)), "v": nn.LogicallyPartitioned(x, ("b", None))}


CONTAINERS = {
    "dict": lambda x: {"layers_0": {"w": x}},
    "FrozenDict": lambda x: freeze({"layers_0": {"w": x}}),
    "boxes": tree_of_boxes,
    "nnx.State": lambda x: nnx.State({"layers": {0: {"w": nnx.Param(x)}}}),
    "list": lambda x: [x, (x, x)],
    "array": lambda x: x,
    "LookaheadParams": lambda x: optax.LookaheadParams.init_synced({"w": x}),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_parameters_may_be_any_pytree(container: str):
    params = CONTAINERS[container](on(make_mesh(S=8), S, 16, 8))
    tx = optax.adam(0.1)
    if container == "LookaheadParams":
        tx = optax.lookahead(tx, 2, 0.5)
    state = leaves(init_optimizer(tx, params))
    moments = [x for path, x in state.items() if ".mu" in path or ".nu" in path]
    assert len(moments) == 2 * len(jax.tree.leaves(CONTAINERS[container](0))) // (
        2 if container == "LookaheadParams" else 1
    )
    assert {local_shape(x) for x in moments} == {(2, 8)}


def test_a_box_is_no_part_of_the_path():
    (path, _), *_ = jax.tree_util.tree_leaves_with_path(tree_of_boxes(0))
    assert names_of(path) == ("v",)


def test_a_parameter_that_is_called_value_keeps_its_name():
    (path, _), *_ = jax.tree_util.tree_leaves_with_path({"value": 0})
    assert names_of(path) == ("value",)


def test_copies_of_parameters_in_the_state_are_arrays_of_their_own():
    """Otherwise a step that donates both parameters and state would donate one buffer twice."""
    params = {"w": on(make_mesh(S=8), S, 16, 8)}
    state = init_optimizer(optax.contrib.schedule_free(optax.sgd(0.1), 0.1), params)
    jax.tree.map(lambda x: x.delete(), params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


# --------------------------------------------------------------------------------------------------
# Inside jit


def test_inside_jit_on_auto_axes_it_is_refused_with_the_remedy():
    params = {"layer": {"w": on(make_mesh(S=8), S, 16, 8)}}
    with pytest.raises(ValueError, match=r"layer\.w is not known.*outside of jit.*jfsdp\.init"):
        jax.jit(lambda params: init_optimizer(optax.adam(0.1), params))(params)


@pytest.mark.parametrize("shard_over, local", [(None, (4, 8)), ("R", (2, 8))])
def test_inside_jit_on_explicit_axes_the_types_say_where(shard_over: Any, local: tuple[int, ...]):
    tx = optax.adam(0.1)
    with explicit_set(R=2, S=4) as mesh:
        params = {"w": on(mesh, P("S", None), 16, 8)}
        state = jax.jit(lambda params: init_optimizer(tx, params, shard_over=shard_over))(params)
    assert local_shape(state[0].mu["w"]) == local
    assert shardings(state) == shardings(init_optimizer(tx, params, shard_over=shard_over))


# --------------------------------------------------------------------------------------------------
# Finer layouts


@pytest.mark.parametrize(
    "spec, shape, axes, finer",
    [
        (S, (16, 8), ("R",), P(("S", "R"))),
        (S, (4, 8), ("R",), P("S", "R")),
        (S, (4, 3), ("R",), S),
        (P(), (16, 8), ("R",), P("R")),
        (P(), (8, 16), ("R",), P(None, "R")),
        (P(), (2, 4), ("S", "R"), P("R", "S")),
        (P(None, "S"), (64, 16), ("R",), P(None, ("S", "R"))),
        (S, (16, 8), ("S",), S),
        (P(), (), ("R",), P()),
        (P(), (0, 3), ("R",), P()),
        (S, (16, 8), (), S),
    ],
)
def test_a_finer_spec_divides_what_is_sharded_first_then_the_largest(
    spec: P, shape: tuple[int, ...], axes: tuple[str, ...], finer: P
):
    assert finer_spec(spec, shape, axes, make_mesh(R=2, S=4)) == finer


@pytest.mark.parametrize("axes", ["R", ("R",), ["R"], ("R", "one")], ids=str)
def test_shard_over_takes_a_name_or_several(axes: Any):
    params = {"w": on(make_mesh(R=2, S=4, one=1), S, 16, 8)}
    state = init_optimizer(optax.adam(0.1), params, shard_over=axes)
    assert state[0].nu["w"].sharding.spec == P(("S", "R"))


def test_a_leaf_that_cannot_be_finer_lies_as_its_parameter():
    mesh = make_mesh(R=2, S=4)
    params = {"w": on(mesh, S, 16, 8), "b": on(mesh, S, 4)}
    mu = init_optimizer(optax.adam(0.1), params, shard_over="R")[0].mu
    assert (mu["w"].sharding.spec, mu["b"].sharding.spec) == (P(("S", "R")), S)


REFUSED = [
    ("x", ValueError, r"shard_over names the axis 'x'.* R=2, S=4"),
    ((), ValueError, r"shard_over=\(\) shards nothing: it names no axis larger than 1.*R=2, S=4"),
    (3, TypeError, r"shard_over takes names of mesh axes.*got 3"),
    ((0,), TypeError, r"shard_over takes names of mesh axes.*got \(0,\)"),
]


@pytest.mark.parametrize("shard_over, kind, text", REFUSED)
def test_a_shard_over_that_names_no_axis_is_refused(shard_over: Any, kind: Any, text: str):
    params = {"w": on(make_mesh(R=2, S=4), S, 16, 8)}
    with pytest.raises(kind, match=text):
        init_optimizer(optax.adam(0.1), params, shard_over=shard_over)


@pytest.mark.parametrize(
    "tx, shape, listed",
    [(optax.adam(0.1), (4, 3), r"0\.mu\.w \(4, 3\)"), (optax.sgd(0.1), (16, 8), r"empty\.")],
    ids=["does not divide", "no moments"],
)
def test_a_shard_over_that_no_array_can_follow_is_refused(tx: Any, shape: Any, listed: str):
    params = {"w": on(make_mesh(R=2, S=4), S, *shape)}
    with pytest.raises(ValueError, match=rf"(?s)\('R',\) shards nothing on .*R=2, S=4.*{listed}"):
        init_optimizer(tx, params, shard_over="R")


# --------------------------------------------------------------------------------------------------
# Parameters that are refused


def test_parameters_that_lie_on_no_mesh_are_listed():
    params = {"a": jnp.ones(8), "b": on(make_mesh(S=8), S, 8), "c": array(3)}
    with pytest.raises(
        ValueError, match=r"(?s)no mesh.*device_put:\n  a \(8,\): .*\n  c \(3,\): None"
    ):
        init_optimizer(optax.adam(0.1), params)


@pytest.mark.parametrize("leaf", [np.ones(8), 1.0], ids=["numpy", "number"])
def test_a_parameter_that_is_no_array_of_jax_is_refused(leaf: Any):
    with pytest.raises(TypeError, match=rf"layer\.w is of type {type(leaf).__name__}.*device_put"):
        init_optimizer(optax.adam(0.1), {"layer": {"w": leaf}})


def test_parameters_on_two_meshes_are_refused_by_name():
    params = {"a": on(make_mesh(S=8), S, 8), "b": on(make_mesh(T=4), P("T"), 8)}
    with pytest.raises(ValueError, match=r"\['a'\] lies on the mesh S=8.*\['b'\] on T=4"):
        init_optimizer(optax.adam(0.1), params)


def test_no_parameters_are_refused():
    with pytest.raises(ValueError, match="there are no parameters"):
        init_optimizer(optax.adam(0.1), {})


def test_the_state_on_a_mesh_without_devices_is_abstract():
    mesh = AbstractMesh((8,), ("S",))
    leaf = jax.ShapeDtypeStruct((16, 8), jnp.bfloat16, sharding=NamedSharding(mesh, S))
    state = init_optimizer(optax.adam(0.1, mu_dtype=jnp.float32), {"w": leaf})
    assert state[0].mu["w"].dtype == jnp.float32
    assert state[0].mu["w"].sharding.shard_shape((16, 8)) == (2, 8)
