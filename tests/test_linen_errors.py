"""What is refused of Linen modules: the text says what to change."""

from __future__ import annotations

import functools
from typing import Any

import jax
import optax
import pytest
from flax import linen as nn
from helpers import make_mesh, rows
from jax.sharding import PartitionSpec as P
from linen_models import KEY, MLP, Block, abstract, create, fast_compiler, init, scan

import jfsdp

X = rows(16, 16)


@pytest.fixture(scope="module", autouse=True)
def compiler():
    with fast_compiler():
        yield


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(S=8)


def refused(kind: type[Exception], function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(kind) as error:
        function(*args, **kwargs)
    return str(error.value)


# --------------------------------------------------------------------------------------------------
# shard


def test_stacked_axis_is_refused(mesh):
    assert refused(ValueError, jfsdp.shard, MLP(), mesh, stacked_axis=0) == (
        "stacked_axis=0: in Linen modules jfsdp finds by itself which axis nn.scan stacks the layers along. "
        "Leave it out."
    )


@pytest.mark.parametrize("what", [MLP, MLP()], ids=["class", "instance"])
def test_second_call_on_a_module_is_refused(mesh, what):
    once = jfsdp.shard(what, mesh)
    assert refused(ValueError, jfsdp.shard, once, mesh) == (
        "MLP is sharded already: jfsdp.shard was applied to it before. Apply it once."
    )


def test_instance_of_a_sharded_class_is_refused(mesh):
    unit: Any = jfsdp.shard(Block, mesh)
    assert "Block is sharded already" in refused(ValueError, jfsdp.shard, unit(8), mesh)


def test_bound_module_is_refused(mesh):
    class Parent(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jfsdp.shard(nn.Dense(8), mesh)(x)

    assert refused(ValueError, Parent().init, KEY(0), X) == (
        "jfsdp.shard: this Dense belongs to another module already. Shard the class and make the instance "
        "of that:\n  jfsdp.shard(Dense, ...)(...)\nor shard the outermost module, with units=Dense."
    )


@pytest.mark.parametrize(
    "value", [{"w": 1.0}, None, lambda x: x, int], ids=["dict", "None", "function", "class"]
)
def test_what_is_no_module_is_refused(value):
    text = refused(TypeError, jfsdp.shard, value)
    assert text.startswith(
        "jfsdp.shard takes a module of Flax: a flax.nnx.Module, a flax.linen.Module or a class of such. "
    )


SETTINGS: dict[str, tuple[type[Exception], dict[str, Any], str]] = {
    "mp_policy": (TypeError, {"mp_policy": "bfloat16"}, "mp_policy must be a jfsdp.Mixed"),
    "promises in auto": (
        ValueError,
        {
            "partitioning": "auto",
            "mp_policy": jfsdp.MixedPrecisionPolicy(reduce_dtype="float32"),
        },
        'partitioning="auto" cannot promise mp_policy.reduce_dtype=float32',
    ),
    "in_specs over another axis": (
        ValueError,
        {"in_specs": {"mask": P(None, "model")}},
        "in_specs['mask'] = P(None, 'model') names the axis 'model'; only the data-parallel axes ['S']",
    ),
    "state_specs with types": (
        TypeError,
        {"state_specs": {int: P("S")}},
        "state_specs must have ",
    ),
    "state_specs over another axis": (
        ValueError,
        {"state_specs": {"cache": P("model")}},
        "state_specs['cache'] = P('model',) names the axis 'model'; only the data-parallel axes ['S']",
    ),
}


@pytest.mark.parametrize(("kind", "settings", "text"), SETTINGS.values(), ids=SETTINGS)
def test_setting_is_refused_before_the_module_is_initialized(mesh, kind, settings, text):
    assert refused(kind, jfsdp.shard, MLP(), mesh, **settings).startswith(text)


def test_keys_of_state_specs_are_called_what_they_are(mesh):
    text = refused(TypeError, jfsdp.shard, MLP(), mesh, state_specs={int: P("S")})
    assert "argument names" not in text


def test_unit_selector_of_another_type_is_refused(mesh):
    text = refused(TypeError, jfsdp.shard, MLP(), mesh, units=[nn.Dense, 3])
    assert text == (
        "units takes a module class, a glob over paths such as 'blocks.*', a predicate f(path, module) "
        "-> bool, or several of them, got 3."
    )


def test_settings_in_lists_and_dicts_can_be_hashed(mesh):
    specs = {"in_specs": {"x": P()}, "out_specs": {"y": [P(), None]}, "state_specs": {"cache": P()}}
    hash(jfsdp.shard(MLP(), mesh, units=[nn.Dense, "fc*"], **specs))


# --------------------------------------------------------------------------------------------------
# Initialization


def test_selector_that_matches_nothing_lists_classes_and_paths(mesh):
    model = jfsdp.shard(MLP(), mesh, units="layers_*")
    assert refused(ValueError, init, model, X) == (
        "units='layers_*' matches no module inside MLP. It has modules of the classes Dense, at the "
        "paths fc1, fc2."
    )


def test_selector_beside_one_that_matches_is_refused_too(mesh):
    model = jfsdp.shard(MLP(), mesh, units=(nn.Dense, nn.Conv))
    text = refused(ValueError, jax.eval_shape, model.init, KEY(0), X)
    assert "Conv'> matches no module inside MLP. It has modules of the classes Dense" in text


def test_predicate_that_matches_nothing_is_let_pass(mesh):
    init(jfsdp.shard(MLP(), mesh, units=lambda path, module: False), X)


@pytest.mark.parametrize(
    "asked, kind, text",
    [
        (
            1,
            ValueError,
            "fc2.kernel: shard_placement_fn shards dimension 1 of shape (32, 10) over S=8",
        ),
        (
            2,
            ValueError,
            "fc2.kernel: shard_placement_fn chose dimension 2, but the shape (32, 10) has",
        ),
        ("last", TypeError, "fc2.kernel: shard_placement_fn must return a dimension (int), {dim"),
    ],
)
def test_placement_is_refused_by_its_path(mesh, asked, kind, text):
    choose = lambda path, leaf: asked if path == "fc2.kernel" else None  # noqa: E731
    model = jfsdp.shard(MLP(), mesh, units=nn.Dense, shard_placement_fn=choose)
    assert refused(kind, init, model, X).startswith(text)


def test_stack_of_stacks_in_one_unit_is_refused(mesh):
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(16, use_bias=False)(x), None

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return scan(Inner, 2)(name="inner")(x)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            settings: Any = {
                "in_axes": None,
                "variable_axes": {"params": 0},
                "split_rngs": {"params": True},
            }
            vmapped: Any = nn.vmap(Outer, axis_size=3, **settings)
            return vmapped(name="outer")(x)[0].mean(0)

    text = refused(ValueError, init, jfsdp.shard(Model(), mesh, units="outer.inner"), X)
    assert text == (
        "outer.inner.Dense_0.kernel (shape (3, 2, 16, 16)) is stacked by two transforms (nn.scan, nn.vmap) "
        "round its unit. Make the module that holds the inner one the unit: units=..."
    )
    init(jfsdp.shard(Model(), mesh, units="outer"), X)


def test_train_state_without_a_module_of_jfsdp_is_refused():
    text = refused(TypeError, jfsdp.init, lambda: create(MLP(), X, optax.sgd(0.1)))
    assert text.startswith(
        "jfsdp.init: the function makes TrainState, which holds neither an nnx.Module"
    )
    assert text.endswith("Shard the Linen module first.")


def test_settings_beside_a_train_state_are_refused(mesh):
    model = jfsdp.shard(MLP(), mesh)
    make = functools.partial(create, model, X, optax.sgd(0.1))
    assert refused(ValueError, jfsdp.init, make, mesh, units=nn.Dense) == (
        "jfsdp.init: mesh, units: the Linen modules that the function initializes have their settings "
        "from jfsdp.shard already. Give them there."
    )


def test_modules_on_two_meshes_are_refused(mesh):
    one, two = jfsdp.shard(MLP(), mesh), jfsdp.shard(MLP(), make_mesh(R=2, S=4))
    text = refused(ValueError, jfsdp.init, lambda: (init(one, X), init(two, X)))
    assert text.startswith("jfsdp.init: the modules in it are sharded over different meshes: ")
    assert "R=2, S=4" in text


def test_plan_of_a_module_that_was_not_initialized_says_how(mesh):
    model = jfsdp.shard(MLP(), mesh, units=lambda path, module: False)  # as no other test has it
    assert refused(ValueError, jfsdp.plan, model) == (
        "this MLP was not initialized yet: Linen makes parameters when a module is called. Initialize it "
        "first, for nothing and without memory by\n"
        "  jax.eval_shape(model.init, jax.random.key(0), example_input)"
    )


def test_inspecting_parameters_alone_says_to_give_the_model(mesh):
    model = jfsdp.shard(MLP(), mesh)
    variables = abstract(model, X)
    text = refused(ValueError, jfsdp.inspect, model.apply, variables, X)
    assert "is given as model=" in text
