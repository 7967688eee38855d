"""`jfsdp.jit`: what is donated, how long arrays and objects live, changes of structure, and errors."""

from __future__ import annotations

import gc
import weakref
from typing import Any, cast

import helpers
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_jitted import ADAM, X, small, train_step

import jfsdp

MESHES = pytest.mark.parametrize("sizes", [{"S": 8}, {"R": 2, "S": 4}], ids=["S8", "R2xS4"])
# --------------------------------------------------------------------------------------------------
# Donation, and the life of arrays and objects


@MESHES
def test_all_of_the_state_is_donated_and_inspect_reads_the_step(sizes):
    mesh = helpers.make_mesh(**sizes)
    model, optimizer = small(mesh)
    step, x = jfsdp.jit(train_step), helpers.batch_on(mesh, X)
    report = jfsdp.inspect(step, model, optimizer, x, compile=True)
    report.check()
    state = jax.tree.leaves(nnx.state((model, optimizer)))
    assert report.memory is not None and report.memory.aliased == sum(
        x.addressable_shards[0].data.nbytes for x in state
    )
    assert float(step(model, optimizer, x)) > 0 and all(x.is_deleted() for x in state[1:])


def test_abstract_objects_can_be_lowered():
    mesh = helpers.make_mesh(S=8)
    make = lambda: models.Stack(2, 16, nnx.Rngs(0))  # noqa: E731
    model = jfsdp.init(make, mesh, abstract=True, units=models.Block)
    optimizer = jfsdp.init_optimizer(ADAM, model, wrt=nnx.Param)
    x = jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=NamedSharding(mesh, P("S")))
    report = jfsdp.inspect(jfsdp.jit(train_step), model, optimizer, x)
    report.check()
    assert report.count("reduce-scatter") == 2


def test_without_donation_old_arrays_stay_and_what_is_only_read_is_left_alone():
    model = models.ConvNet(nnx.Rngs(0))
    before = helpers.leaves(model)
    step, images = jfsdp.jit(lambda model, x: model(x).sum(), donate=False), jnp.ones((2, 4, 4, 3))
    step(model, images)
    step(model, images)
    changed = [path for path, x in helpers.leaves(model).items() if x is not before[path]]
    assert changed == ["['norm']['mean'].value", "['norm']['var'].value"]
    assert not any(x.is_deleted() for x in before.values())


def test_two_variables_with_one_array_come_apart():
    model, target = models.Block(16, nnx.Rngs(0)), models.Block(16, nnx.Rngs(1))

    @jfsdp.jit
    def step(model, target):
        model.linear.kernel[...] += 1

    for _ in range(2):
        nnx.update(target, nnx.state(model))
        step(model, target)
    difference = model.linear.kernel[...] - target.linear.kernel[...]
    np.testing.assert_allclose(difference, 1, rtol=1e-6)


def test_a_step_does_not_keep_models_alive():
    step = jfsdp.jit(train_step)
    model, optimizer = small()
    step(model, optimizer, X)
    step(model, optimizer, X)
    gone = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.blocks[0])]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
    assert float(step(*small(), X)) > 0


def test_models_take_turns():
    step, pairs = jfsdp.jit(train_step), [small(), small()]
    with helpers.compilations() as counts:
        losses = [[float(step(*pair, X)) for pair in pairs] for _ in range(3)]
    assert counts["train_step"] == 1
    assert all(first == second for first, second in losses) and losses[0] > losses[2]


# --------------------------------------------------------------------------------------------------
# Changes of structure, and errors


def test_a_layer_or_variable_that_was_replaced_is_seen():
    model = models.Stack(1, 16, nnx.Rngs(0))
    step = jfsdp.jit(lambda model, x: model(x).sum())
    step(model, X)
    model.blocks[0] = models.Block(16, nnx.Rngs(1))
    assert float(step(model, X)) == pytest.approx(float(model(X).sum()), rel=1e-5)
    model.blocks[0].linear.kernel = nnx.Param(jnp.zeros((16, 16)))
    assert float(step(model, X)) == 0


def test_a_dict_of_models_that_grew_is_seen():
    step = jfsdp.jit(lambda models: len(models))
    pair = {"a": models.Block(16, nnx.Rngs(0)), "b": models.Block(16, nnx.Rngs(1))}
    assert step(pair) == 2
    pair["c"] = models.Block(16, nnx.Rngs(2))
    assert step(pair) == 3


def test_a_batch_in_whose_place_a_module_comes_is_state_from_then_on():
    step = jfsdp.jit(lambda model, x: model(jax.tree.leaves(x)[0]).sum())
    block, other = models.Block(16, nnx.Rngs(0)), models.Block(16, nnx.Rngs(1))
    step(block, {"a": X})
    expected = float(block(other.linear.kernel[...]).sum())
    assert float(step(block, {"a": other})) == pytest.approx(expected, rel=1e-5)


def _sets_attribute(model):
    model.linear.in_features = 3


def _adds_variable(model):
    model.seen = nnx.Intermediate(jnp.ones(3))


def _sets_array(model):
    model.table = model.table + 1


@pytest.mark.parametrize(
    "change, text",
    [
        (_sets_attribute, "model.linear.in_features: 16 -> 3"),
        (_adds_variable, "model.seen: nothing -> Intermediate"),
        (_sets_array, "model.table: an array -> an array"),
    ],
    ids=["attribute", "variable", "array"],
)
def test_a_change_of_structure_inside_the_step_is_refused_and_changes_nothing(change, text):
    model = models.Block(16, nnx.Rngs(0))
    setattr(model, "table", jnp.ones(3))  # noqa: B010
    before = nnx.graphdef(model)
    with pytest.raises(ValueError) as error:
        jfsdp.jit(change)(model)
    assert f"jfsdp.jit: {change.__name__} changes more of its arguments than the arrays" in str(
        error.value
    )
    assert text in str(error.value) and "or jit the step with nnx.jit" in str(error.value)
    assert nnx.graphdef(model) == before and not model.linear.kernel[...].is_deleted()


def test_a_variable_that_is_popped_before_the_step_returns_is_no_change():
    @jfsdp.jit
    def step(model):
        model.seen = nnx.Intermediate(model.linear.kernel[...].sum())
        return nnx.pop(model, nnx.Intermediate)

    model = models.Block(16, nnx.Rngs(0))
    (seen,) = jax.tree.leaves(step(model))
    np.testing.assert_allclose(seen, model.linear.kernel[...].sum(), rtol=1e-5)


@pytest.mark.parametrize(
    "fun, kind",
    [(lambda model: model, "Block"), (lambda model: [model.linear.kernel], "Param")],
    ids=["module", "variable"],
)
def test_returning_an_object_of_the_arguments_is_refused(fun, kind):
    with pytest.raises(
        TypeError, match=f"jfsdp.jit: the function returns a {kind} .*Return arrays"
    ):
        jfsdp.jit(fun)(models.Block(16, nnx.Rngs(0)))


def test_gradients_and_metrics_can_be_returned():
    fun = jfsdp.jit(lambda model, x: nnx.grad(helpers.mean_square)(model, x), donate=False)
    model = models.Block(16, nnx.Rngs(0))
    helpers.assert_close(fun(model, X), helpers.gradients(model, X)[1])


@pytest.mark.parametrize(
    "make, kind, text",
    [
        (lambda: jfsdp.jit(cast(Any, 3)), TypeError, "jfsdp.jit takes a function, got int."),
        (
            lambda: jfsdp.jit(train_step, static_argnames="flag"),
            ValueError,
            r"the static arguments \['flag'\] are none of the function's, which are",
        ),
        (
            lambda: jfsdp.jit(train_step, static_argnums=3),
            ValueError,
            r"the static arguments \[3\] are none of the function's",
        ),
        (
            lambda: jfsdp.jit(lambda state: state)({"params": X}),
            TypeError,
            "no argument holds modules or Variables of NNX.* jax.jit",
        ),
        (
            lambda: jfsdp.jit(lambda x, n: x, static_argnums=1)(models.Block(16, nnx.Rngs(0)), []),
            TypeError,
            "have to be hashable, and something is not: unhashable type: 'list'",
        ),
        (
            lambda: jfsdp.jit(lambda v: None)(nnx.Variable(jnp.ones(3), ref=True)),
            ValueError,
            r"a Variable of shape \(3,\) is a reference",
        ),
    ],
    ids=[
        "no function",
        "no such name",
        "no such position",
        "no objects",
        "unhashable",
        "reference",
    ],
)
def test_mistakes_are_named(make, kind, text):
    with pytest.raises(kind, match=text):
        make()
