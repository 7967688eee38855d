"""Linen: parameters that are left alone, and parameters with data-parallel axes of their own."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from helpers import (
    Op,
    assert_spec,
    batch_on,
    compilations,
    local_shape,
    make_mesh,
    rows,
    stablehlo_ops,
)
from helpers import both_axis_types_and_partitionings as everywhere
from jax.sharding import PartitionSpec as P
from linen_models import (
    MLP,
    Block,
    Scanned,
    Stack,
    abstract,
    assert_as_unsharded,
    assert_same,
    create,
    filled,
    gradients,
    init,
    mean_square,
)

import jfsdp
from jfsdp import DataParallelMeshDims

X = rows(16, 16)


def refused(kind: type[Exception], model: Any) -> str:
    with pytest.raises(kind) as error:
        init(model, X)
    return str(error.value)


# --------------------------------------------------------------------------------------------------
# ignored_params


@everywhere
def test_ddp_a_fsdp_b(mesh_of, partitioning):
    with mesh_of(R=2, S=4) as mesh:
        settings: Any = {"units": nn.Dense, "partitioning": partitioning}
        _, variables = assert_as_unsharded(MLP(), mesh, X, ignored_params="fc1.*", **settings)
        params = variables["params"]
        assert_spec(params["fc1"]["kernel"])
        assert_spec(params["fc2"]["kernel"], "S")


class Boxed(nn.Module):
    """A layer whose kernel its user lays over data-parallel axes."""

    @nn.compact
    def __call__(self, x):
        names: Any = (None, ("R", "S"))
        lies = nn.with_partitioning(nn.initializers.lecun_normal(), names)
        return nn.Dense(16)(jnp.tanh(nn.Dense(32, kernel_init=lies, name="laid")(x)))


def test_box_over_data_parallel_axes_is_kept_by_a_step():
    mesh = make_mesh(R=2, S=4)
    model = jfsdp.shard(Boxed(), mesh, ignored_params="laid.*")
    state = create(model, X, optax.adam(1e-2))
    state = jax.device_put(state, jfsdp.shardings(state))
    before = jfsdp.shardings(state)

    @jax.jit
    def step(state: Any, x: jax.Array) -> Any:
        return state.apply_gradients(
            grads=jax.grad(lambda params: mean_square(model, {"params": params}, x))(state.params)
        )

    with compilations() as counts:
        for _ in range(3):
            state = step(state, batch_on(mesh, X))
    assert counts["step"] == 1
    assert jfsdp.shardings(state) == before
    kernel = state.params["laid"]["kernel"].value
    assert local_shape(kernel) == (16, 4)
    assert_spec(kernel, None, ("R", "S"))


def test_gradient_comes_out_where_the_parameter_lies():
    mesh = make_mesh(R=2, S=4)
    model, variables = assert_as_unsharded(Boxed(), mesh, X, ignored_params="laid.*")
    _, grads = gradients(model, variables, batch_on(mesh, X))
    assert_spec(grads["params"]["laid"]["kernel"].value, None, ("R", "S"))


def test_it_is_neither_cast_nor_gathered_and_summed_in_its_own_dtype():
    mesh = make_mesh(S=8)
    policy = jfsdp.MixedPrecisionPolicy(param_dtype="bfloat16", reduce_dtype="bfloat16")
    model = jfsdp.shard(Block(16), mesh, mp_policy=policy, ignored_params="linear.kernel")
    step = jax.jit(jax.grad(lambda variables, x: mean_square(model, variables, x)))
    ops = stablehlo_ops(step.lower(filled(abstract(model, X)), batch_on(mesh, X)))
    assert ops == {Op("all_reduce", "f32", (16, 16)): 1}


def test_scanned_stack_is_summed_layer_by_layer():
    mesh = make_mesh(S=8)
    _, variables = assert_as_unsharded(Scanned(), mesh, X, ignored_params="layers.up.*")
    assert_spec(variables["params"]["layers"]["up"]["kernel"])


def test_plan_lists_it():
    model = jfsdp.shard(MLP(), make_mesh(S=8), ignored_params=lambda path, leaf: leaf.ndim < 2)
    init(model, X)
    assert [row.path for row in jfsdp.plan(model).ignored] == ["fc1.bias", "fc2.bias"]


def test_glob_that_matches_nothing_lists_what_is_there():
    model = jfsdp.shard(MLP(), make_mesh(S=8), ignored_params=["fc1.*", "lora.*"])
    assert refused(ValueError, model) == (
        "ignored_params='lora.*' matches no parameter of MLP. It has parameters at the paths fc1.bias, "
        "fc1.kernel, fc2.bias, fc2.kernel."
    )


@pytest.mark.parametrize("selector", [nn.Dense, 3], ids=["class", "number"])
def test_what_selects_nothing_it_could_is_refused(selector):
    with pytest.raises(TypeError, match="ignored_params takes a glob over the paths of parameters"):
        jfsdp.shard(MLP(), make_mesh(S=8), ignored_params=selector)


def test_call_inside_speaks_of_paths_below_its_own_module():
    mesh = make_mesh(S=8)
    asked: list[str] = []

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            place = lambda path, leaf: asked.append(path)  # noqa: E731
            inner = jfsdp.shard(Block, mesh, ignored_params="*.kernel")
            other = jfsdp.shard(nn.Dense, mesh, shard_placement_fn=place)
            return other(16, name="other")(inner(16, name="inner")(x))

    model = jfsdp.shard(Outer(), mesh)
    variables = init(model, X)
    assert set(asked) == {"kernel", "bias"}
    assert_spec(variables["params"]["inner"]["linear"]["kernel"])


# --------------------------------------------------------------------------------------------------
# Data-parallel axes of their own

PARTS, WIDTH = 2, 16
AXES = {"expert": PARTS, "fsdp": 4}
DIMS = DataParallelMeshDims(shard=("expert", "fsdp"))


class Local(nn.Module):
    """A matrix for each part of the batch. On a device: its own matrix, for its own part."""

    checked: bool = False

    @nn.compact
    def __call__(self, x):
        lies = nn.with_partitioning(nn.initializers.normal(0.2), ("expert", None, None))
        if self.has_variable("params", "w") and not self.checked:
            w: Any = nn.unbox(self.get_variable("params", "w"))
        else:
            w = self.param("w", lies, (PARTS, WIDTH, WIDTH))
        parts = x.reshape(w.shape[0], -1, WIDTH)
        return jnp.einsum("pbi,pio->pbo", parts, w).reshape(x.shape)


class Model(nn.Module):
    """A dense layer, own matrices, and a dense layer."""

    checked: bool = False

    def setup(self):
        self.up, self.down = nn.Dense(WIDTH), nn.Dense(WIDTH)
        self.local = Local(self.checked)

    def __call__(self, x):
        return self.down(jnp.tanh(self.local(self.up(x))))


def over_fsdp(path: str, param: Any) -> Any:
    return (1, DataParallelMeshDims(shard="fsdp")) if path.endswith("local.w") else None


SETTINGS: Any = {"dp_mesh_dims": DIMS, "shard_placement_fn": over_fsdp}


@pytest.mark.parametrize("units", [(), (nn.Dense, Local)], ids=["one unit", "units"])
@pytest.mark.parametrize("reshard", [True, False])
def test_own_parts_train_as_the_whole(units, reshard):
    settings = {**SETTINGS, "units": units, "reshard_after_forward": reshard}
    _, variables = assert_as_unsharded(Model(), make_mesh(**AXES), X, **settings)
    w = variables["params"]["local"]["w"].value
    assert_spec(w, "expert", "fsdp")
    assert local_shape(w) == (1, 4, WIDTH)


def test_own_parts_are_gathered_and_reduced_over_their_own_axes_only():
    mesh = make_mesh(**AXES)
    model = jfsdp.shard(Model(), mesh, **SETTINGS)
    variables = filled(abstract(model, X))
    step = jax.grad(lambda variables, x: mean_square(model, variables, x))
    ops = stablehlo_ops(jax.jit(step).lower(variables, batch_on(mesh, X)))
    assert Counter({op: n for op, n in ops.items() if len(op.shape) == 3}) == {
        Op("all_gather", "f32", (1, WIDTH, WIDTH)): 1,
        Op("reduce_scatter", "f32", (1, WIDTH // 4, WIDTH)): 1,
    }
    report = jfsdp.inspect(step, variables, batch_on(mesh, X), model=model)
    report.check()
    assert {t.kind: t.ratio for t in report.totals}["reduce-scatter"] == 1


def test_init_makes_own_parts_of_whole_ones():
    """As unsharded: the values do not depend on the mesh."""
    variables = init(jfsdp.shard(Model(), make_mesh(**AXES), **SETTINGS), X)
    assert_same(variables, init(Model(), X))


def test_per_device_view_takes_shards_of_own_parts():
    mesh = make_mesh(**AXES)
    model = jfsdp.shard(Model(), mesh, **SETTINGS)
    variables = filled(abstract(model, X))
    specs = jax.tree.map(lambda x: x.sharding.spec, variables)

    def share(variables: Any, x: jax.Array) -> Any:
        # The mean over the global batch: so the shares of all devices add up to it.
        return jax.grad(lambda v: mean_square(model, v, x) * x.size / X.size)(variables)

    settings: Any = {"mesh": mesh, "out_specs": specs, "check_vma": False}
    mapped = jax.shard_map(share, in_specs=(specs, P(("expert", "fsdp"))), **settings)
    got = jax.jit(mapped)(variables, batch_on(mesh, X))
    assert_same(got, gradients(Model(), filled(abstract(Model(), X)), X)[1])


def test_self_param_of_an_own_part_says_how_to_read_it():
    mesh = make_mesh(**AXES)
    model = jfsdp.shard(Model(checked=True), mesh, **SETTINGS)
    variables = filled(abstract(model, X))
    with pytest.raises(ValueError) as error:
        model.apply(variables, batch_on(mesh, X))
    assert str(error.value) == (
        "local.w (shape (2, 16, 16)) stays split in the forward, where a device has its own part of shape "
        "(1, 16, 16), but Flax's self.param wants the shape that it would make. Read it with\n"
        '  if self.has_variable("params", "w"):\n'
        '      w = nn.unbox(self.get_variable("params", "w"))\n'
        "  else:\n"
        '      w = self.param("w", ...)'
    )


def test_own_parts_are_refused_where_xla_communicates():
    model = jfsdp.shard(Model(), make_mesh(**AXES), partitioning="auto", **SETTINGS)
    assert refused(ValueError, model).startswith(
        "local.w: its data-parallel axes leave out 'expert'"
    )


def test_two_axes_on_two_dimensions_of_one_parameter():
    place = lambda path, leaf: {0: "fsdp", -1: "expert"} if leaf.ndim == 2 else None  # noqa: E731
    settings: Any = {"dp_mesh_dims": DIMS, "shard_placement_fn": place}
    _, variables = assert_as_unsharded(Stack(1, 16), make_mesh(**AXES), X, **settings)
    assert_spec(variables["params"]["blocks_0"]["linear"]["kernel"], "fsdp", "expert")


def test_train_state_of_own_parts_is_born_where_they_lie():
    mesh = make_mesh(**AXES)
    model = jfsdp.shard(Model(), mesh, **SETTINGS)
    state = jfsdp.init(lambda: create(model, X, optax.adam(1e-2)))
    w, mu = state.params["local"]["w"].value, state.opt_state[0].mu["local"]["w"].value
    assert w.sharding == mu.sharding
    np.testing.assert_array_equal(mu, 0)
    assert local_shape(w) == (1, 4, WIDTH)
