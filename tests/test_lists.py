"""A list of modules as one unit: FSDP2's final norm and head."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers import (
    assert_close,
    assert_spec,
    batch_on,
    both_partitionings,
    compilations,
    count_ops,
    gradients,
    local_shape,
    make_mesh,
    mean_square,
    rows,
    shard_refused,
    train,
)
from models import Block

import jfsdp

X = rows(16, 16)


class Model(nnx.Module):
    """Blocks, a norm and a head; `tied` gives the head the kernel of the first layer."""

    def __init__(self, rngs: nnx.Rngs, tied: bool = False):
        self.embed = nnx.Linear(16, 16, use_bias=False, rngs=rngs)
        self.block = Block(16, rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.head = nnx.Linear(16, 16, use_bias=False, rngs=rngs)
        if tied:
            self.head.kernel = self.embed.kernel

    def __call__(self, x):
        return self.head(self.norm(self.block(self.embed(x))))


def sharded(mesh: Any, **settings: Any) -> Model:
    model = Model(nnx.Rngs(0))
    jfsdp.shard([model.norm, model.head], mesh, **settings)
    return jfsdp.shard(model, mesh, units=Block, **settings)


def test_list_comes_back_and_its_modules_are_units():
    model = Model(nnx.Rngs(0))
    given = [model.norm, model.head]
    assert jfsdp.shard(given, make_mesh(S=8)) is given
    assert isinstance(model.norm, nnx.LayerNorm)
    assert local_shape(model.head.kernel.get_raw_value()) == (2, 16)


def test_tuple_is_taken_as_well():
    model = Model(nnx.Rngs(0))
    given = (model.norm, model.head)
    assert jfsdp.shard(given, make_mesh(S=8)) is given


@both_partitionings
def test_training_is_that_of_the_unsharded_model(partitioning):
    mesh = make_mesh(R=2, S=4)
    model = sharded(mesh, partitioning=partitioning)
    assert_close(gradients(model, batch_on(mesh, X)), gradients(Model(nnx.Rngs(0)), X))
    with compilations() as counts:
        losses = train(model, batch_on(mesh, X))
    assert counts["step"] == 1
    np.testing.assert_allclose(losses, train(Model(nnx.Rngs(0)), X), rtol=1e-6)


def test_plan_and_report_have_one_name_for_it():
    mesh = make_mesh(S=8)
    model = sharded(mesh)
    rows = jfsdp.plan(model).rows
    named = {row.path: row.unit for row in rows}
    assert named == {
        "embed.kernel": "(root)",
        "block.linear.kernel": "block",
        "norm.bias": "head, norm",
        "norm.scale": "head, norm",
        "head.kernel": "head, norm",
    }
    assert "head, norm  norm.scale" in str(jfsdp.plan(model))
    report = jfsdp.inspect(nnx.grad(mean_square), model, batch_on(mesh, X))
    report.check()
    assert {p.leaf: p.unit for p in report.promises} == named


def test_messages_name_its_parameters_by_their_path_in_the_model():
    model = sharded(make_mesh(S=8))
    scale: Any = model.norm.scale
    found = [v.get_metadata()["jfsdp_placement"].path for v in (scale, model.head.kernel)]
    assert found == ["norm.scale", "head.kernel"]


@pytest.mark.parametrize("reshard, gathers", [(None, 8), (True, 8), (False, 5)])
def test_all_of_it_reshards_alike(reshard, gathers):
    """Inside a root None is True for every member. The bias and the first layer are not read again."""
    mesh = make_mesh(S=8)
    model = sharded(mesh, reshard_after_forward=reshard)
    step = nnx.jit(lambda m, x: nnx.grad(lambda m: mean_square(m, x))(m))
    assert count_ops(step.lower(model, batch_on(mesh, X)), "all_gather") == gathers


def test_parameter_tied_between_its_members_counts_once():
    mesh = make_mesh(S=8)

    def make() -> nnx.Sequential:
        first = nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(0))
        second = nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(1))
        second.kernel = first.kernel
        return nnx.Sequential(first, jnp.tanh, second)

    model = make()
    jfsdp.shard([model.layers[0], model.layers[2]], mesh)
    jfsdp.shard(model, mesh)
    (row,) = jfsdp.plan(model).rows
    assert (row.path, row.unit) == ("layers.0.kernel", "layers.0, layers.2")
    assert_close(gradients(model, batch_on(mesh, X)), gradients(make(), X))


def test_parameter_tied_to_a_module_outside_counts_once():
    mesh = make_mesh(S=8)
    model = Model(nnx.Rngs(0), tied=True)
    jfsdp.shard([model.norm, model.head], mesh)
    jfsdp.shard(model, mesh)
    paths = [row.path for row in jfsdp.plan(model).rows if "kernel" in row.path]
    assert paths == ["block.linear.kernel", "embed.kernel"]
    expected = gradients(Model(nnx.Rngs(0), tied=True), X)
    assert_close(gradients(model, batch_on(mesh, X)), expected)


def test_two_lists_are_two_units():
    mesh, model = make_mesh(S=8), Model(nnx.Rngs(0))
    jfsdp.shard([model.embed, model.block], mesh)
    jfsdp.shard([model.norm, model.head], mesh)
    jfsdp.shard(model, mesh)
    assert {row.unit for row in jfsdp.plan(model).rows} == {"block, embed", "head, norm"}


def test_copy_of_a_model_has_units_of_its_own():
    model = sharded(make_mesh(S=8))
    both = nnx.List([model, nnx.clone(model)])
    units = {row.unit for row in jfsdp.plan(both).rows}
    assert {"0.head, 0.norm", "1.head, 1.norm"} <= units


def test_members_called_by_no_unit_open_their_own_regions():
    mesh, model = make_mesh(S=8), Model(nnx.Rngs(0))
    jfsdp.shard([model.norm, model.head], mesh)
    plain = Model(nnx.Rngs(0))
    np.testing.assert_allclose(model(batch_on(mesh, X)), plain(X), rtol=1e-5, atol=1e-6)
    assert {row.unit for row in jfsdp.plan(model).rows} == {"head, norm"}


def test_units_and_paths_begin_with_the_index_in_the_list():
    asked: list[str] = []
    model = Model(nnx.Rngs(0))
    jfsdp.shard(
        [model.norm, model.block],
        make_mesh(S=8),
        units="1.linear",
        ignored_params="0.*",
        shard_placement_fn=lambda path, param: asked.append(path),
    )
    assert asked == ["1.linear.kernel"]
    scale: Any = model.norm.scale
    assert_spec(scale.get_raw_value())
    assert {row.unit for row in jfsdp.plan(model).rows} == {"block, norm", "block.linear"}


def test_unshard_gives_plain_modules():
    whole = jfsdp.unshard(sharded(make_mesh(S=8)))
    assert (type(whole.norm), type(whole.head)) == (nnx.LayerNorm, nnx.Linear)


def test_init_may_shard_a_list():
    mesh = make_mesh(S=8)
    born = jfsdp.init(lambda: sharded(mesh))
    assert_close(born, sharded(mesh))
    assert {row.unit for row in jfsdp.plan(born).rows} == {"(root)", "block", "head, norm"}


# --------------------------------------------------------------------------------------------------
# Errors


def refused(kind: type[Exception], given: Any, **settings: Any) -> str:
    with pytest.raises(kind) as error:
        jfsdp.shard(given, make_mesh(fsdp=8), **settings)
    return str(error.value)


def test_empty_list_is_refused():
    text = "jfsdp.shard was given an empty list: there is no module to make a unit of."
    assert refused(ValueError, []) == text


def test_module_twice_is_refused():
    layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    assert refused(ValueError, [layer, layer]) == (
        "jfsdp.shard was given a list in which modules[1] (Linear) is modules[0] again. Give each once, and "
        "of two that lie in each other the outer one."
    )


@pytest.mark.parametrize("inner_first", [False, True])
def test_member_inside_another_is_refused(inner_first):
    block = Block(16, nnx.Rngs(0))
    given = [block.linear, block] if inner_first else [block, block.linear]
    inner, outer = (0, 1) if inner_first else (1, 0)
    assert refused(ValueError, given).startswith(
        f"jfsdp.shard was given a list in which modules[{inner}] (Linear) lies in modules[{outer}], as linear"
    )


def test_member_that_is_a_unit_already_is_refused():
    layers = [nnx.Linear(8, 8, rngs=nnx.Rngs(0)) for _ in range(2)]
    jfsdp.shard(layers[1], make_mesh(fsdp=8))
    text = refused(ValueError, layers)
    assert text.startswith(
        "modules[1] (Linear) is a unit already: jfsdp.shard was applied to it before."
    )
    assert type(layers[0]) is nnx.Linear


def test_what_is_no_module_is_refused():
    layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    assert refused(TypeError, [layer, jax.numpy.tanh]).startswith(
        "jfsdp.shard takes a list of instances of flax.nnx.Module; modules[1] is of another kind: "
    )
    assert refused(TypeError, [layer, nnx.Linear]).endswith("kind: Linear.")


def test_container_is_refused():
    given = [nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(0))])]
    assert refused(ValueError, given).startswith(
        "modules[1] (List) is a container without a forward"
    )


@pytest.mark.parametrize("name", ["in_specs", "out_specs"])
def test_specs_of_one_module_s_arguments_are_refused(name):
    layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    settings: Any = {name: {"x": jax.sharding.PartitionSpec()}}
    assert refused(ValueError, [layer], **settings).startswith(
        f"{name} speaks of the arguments or results of one module, and jfsdp.shard was given a list."
    )


def test_linen_modules_are_refused_with_the_remedy():
    assert refused(TypeError, [nn.LayerNorm(), nn.Dense(8)]) == (
        "jfsdp.shard was given a list of Linen modules (modules[0] is LayerNorm), which have no parameters "
        "of their own to put into one unit. Make a parent module that calls them the unit, or each of them "
        "one: jfsdp.shard(model, units=[Norm, Head])."
    )


def test_nothing_changes_where_one_member_is_refused():
    layer = nnx.Linear(16, 6, use_bias=False, rngs=nnx.Rngs(0))
    other = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    both = nnx.Sequential(other, layer)
    ask = lambda path, param: 1 if path == "1.kernel" else None  # noqa: E731
    text = refused(ValueError, [other, layer], shard_placement_fn=ask)
    assert text.startswith("1.kernel: shard_placement_fn shards dimension 1 of shape (16, 6)")
    assert [type(m) for m in both.layers] == [nnx.Linear, nnx.Linear]
    assert "fsdp" not in str(shard_refused(ValueError, both, units="no such"))
