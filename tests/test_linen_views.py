"""The per-device view, and sharded classes inside plain modules."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn
from helpers import batch_on, both_axis_types, make_mesh, rows
from jax.sharding import PartitionSpec as P
from linen_models import (
    KEY,
    MLP,
    Block,
    Scanned,
    abstract,
    assert_same,
    fast_compiler,
    filled,
    gradients,
    mean_square,
)

import jfsdp

X = rows(16, 16)


@pytest.fixture(scope="module", autouse=True)
def compiler():
    with fast_compiler():
        yield


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(R=2, S=4)


MODULES = {"mlp": (MLP(), nn.Dense), "scanned": (Scanned(4), ())}
each_module = pytest.mark.parametrize("plain, units", MODULES.values(), ids=MODULES)


def specs_of(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding.spec, tree)


def mapped(model: Any, mesh: Any, variables: Any) -> Any:
    """Loss and gradients in a shard_map of the user's own; the mean over all devices."""
    axes, specs = tuple(mesh.axis_names), specs_of(variables)

    def per_device(variables: Any, x: Any) -> Any:
        loss = lambda v: mean_square(model, v, x) / mesh.size  # noqa: E731
        value, grads = jax.value_and_grad(loss)(variables)
        return jax.lax.psum(value, axes), grads

    in_specs, out_specs = (specs, P(axes)), (P(), specs)
    settings = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs, "check_vma": False}
    return jax.jit(jax.shard_map(per_device, **settings))


# --------------------------------------------------------------------------------------------------
# The user's own shard_map or pmap


@each_module
@both_axis_types
def test_units_in_the_users_shard_map_train_as_unsharded(mesh_of, plain, units):
    with mesh_of(R=2, S=4) as mesh:
        model = jfsdp.shard(plain, mesh, units=units)
        variables = filled(abstract(model, X))
        got = mapped(model, mesh, variables)(variables, batch_on(mesh, X))
    assert_same(got, gradients(plain, filled(abstract(plain, X)), X))


@each_module
def test_units_in_the_users_shard_map_communicate_as_in_a_region(mesh, plain, units):
    model = jfsdp.shard(plain, mesh, units=units)
    variables = abstract(model, X)
    step = jax.jit(jax.value_and_grad(functools.partial(mean_square, model)))
    region = jfsdp.inspect(step, variables, X, model=model)
    own = jfsdp.inspect(mapped(model, mesh, variables), variables, X, model=model)
    both = [(c.kind, c.axes, c.dtype, c.shape, c.executions) for c in own.collectives]
    losses = [c for c in both if c[0] == "all-reduce" and c[3] == ()]
    assert sorted(set(both) - set(losses)) == sorted(
        {(c.kind, c.axes, c.dtype, c.shape, c.executions) for c in region.collectives}
    )
    assert len(both) - len(losses) == len(region.collectives)


def test_init_in_the_users_shard_map_makes_local_shards(mesh):
    model = jfsdp.shard(MLP(), mesh, units=nn.Dense)
    specs = specs_of(abstract(model, X))

    def per_device(key: Any, x: Any) -> Any:
        variables: Any = model.init(key, x)
        assert variables["params"]["fc1"]["kernel"].shape == (16, 8)
        return variables

    settings = {"in_specs": (P(), P(("R", "S"))), "out_specs": specs, "check_vma": False}
    got = jax.jit(jax.shard_map(per_device, mesh=mesh, **settings))(KEY(0), X)
    assert_same(got, MLP().init(KEY(0), X))


def test_a_pmap_trains_as_unsharded():
    """`init` in one pmap, loss and gradients in another; parameters with a leading device axis."""
    mesh, plain = make_mesh(S=8), MLP()
    model = jfsdp.shard(plain, mesh, units=nn.Dense)
    x = X.reshape(8, 2, 16)
    variables = jax.pmap(model.init, axis_name="S", in_axes=(None, 0))(KEY(0), x)
    assert variables["params"]["fc1"]["kernel"].shape == (8, 16, 4)

    def per_device(variables: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(lambda v: mean_square(model, v, x) / 8)(variables)
        return jax.lax.psum(value, "S"), grads

    losses, grads = jax.pmap(per_device, axis_name="S")(variables, x)
    loss, expected = gradients(plain, plain.init(KEY(0), X), X)
    np.testing.assert_allclose(losses, np.full(8, loss), atol=1e-6)
    kernel = grads["params"]["fc1"]["kernel"]
    np.testing.assert_allclose(
        np.concatenate(list(kernel), axis=1), expected["params"]["fc1"]["kernel"], atol=1e-6
    )
    for bias in grads["params"]["fc2"]["bias"]:  # (10,) divides by no 8: whole on every device
        np.testing.assert_allclose(bias, expected["params"]["fc2"]["bias"], atol=1e-6)


def test_shard_map_over_some_of_the_data_axes_is_refused(mesh):
    """Neither view."""
    model = jfsdp.shard(MLP(), mesh)
    variables = abstract(model, X)
    call = functools.partial(jax.shard_map, axis_names={"S"}, check_vma=False)
    mapped = call(model.apply, mesh=mesh, in_specs=(P(), P("S")), out_specs=P("S"))
    with pytest.raises(ValueError, match=r"shard_map over \['S'\].*\['R', 'S'\]"):
        jax.eval_shape(mapped, variables, X)


def test_batch_norm_in_the_users_shard_map_has_that_devices_statistics():
    """There the user is asked for `axis_name`, as in any per-device program."""
    mesh = make_mesh(S=8)

    class Norm(nn.Module):
        axis_name: Any = None

        @nn.compact
        def __call__(self, x):
            return nn.BatchNorm(use_running_average=False, axis_name=self.axis_name)(x)

    def means(axis_name: Any) -> jax.Array:
        model = jfsdp.shard(Norm(axis_name), mesh)
        variables = filled(abstract(Norm(), X[:, :3]))  # (3,) is whole on every device

        def per_device(variables: Any, x: Any) -> Any:
            _, updates = model.apply(variables, x, mutable=["batch_stats"])
            return updates["batch_stats"]["BatchNorm_0"]["mean"][None]

        settings = {"in_specs": (P(), P("S")), "out_specs": P("S"), "check_vma": False}
        return jax.jit(jax.shard_map(per_device, mesh=mesh, **settings))(variables, X[:, :3])

    assert len(np.unique(np.asarray(means(None))[:, 0])) == 8
    assert len(np.unique(np.asarray(means("S"))[:, 0])) == 1


# --------------------------------------------------------------------------------------------------
# Sharded classes, as nn.remat is used


def parent(block: Any) -> nn.Module:
    class Parent(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x = block(16)(x)
            return nn.Dense(4, name="head")(x)

    return Parent()


def test_sharded_class_keeps_its_name_and_docstring(mesh):
    unit: Any = jfsdp.shard(Block, mesh)
    assert (unit.__name__, unit.__doc__, unit.__module__) == (
        "Block",
        Block.__doc__,
        Block.__module__,
    )
    assert issubclass(unit, Block)
    assert isinstance(unit(16), Block)


@both_axis_types
def test_sharded_class_in_a_plain_parent_trains_as_unsharded(mesh_of):
    """The head is the plain module's: XLA's."""
    with mesh_of(R=2, S=4) as mesh:
        unit: Any = jfsdp.shard(Block, mesh)
        model, plain = parent(unit), parent(Block)
        expected = filled(abstract(plain, X))
        assert_same(jax.eval_shape(model.init, KEY(0), X), abstract(plain, X))
        got = gradients(model, expected, batch_on(mesh, X))
    assert_same(got, gradients(plain, expected, X))


def test_sharded_class_in_a_plain_parent_initializes_in_shards(mesh):
    unit: Any = jfsdp.shard(Block, mesh)
    variables = jax.jit(parent(unit).init)(KEY(0), X)
    assert_same(variables, parent(Block).init(KEY(0), X))
    assert variables["params"]["Block_0"]["linear"]["kernel"].sharding.spec == P("S")


def test_sharded_class_in_the_users_shard_map_trains_as_unsharded(mesh):
    unit: Any = jfsdp.shard(Block, mesh)
    model, plain = parent(unit), parent(Block)
    specs = jax.tree.map(lambda x: P(), abstract(plain, X))
    for name in ("Block_0", "Block_1"):
        specs["params"][name]["linear"]["kernel"] = P("S")

    def per_device(variables: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(lambda v: mean_square(model, v, x) / 8)(variables)
        head = jax.lax.psum(grads["params"]["head"], ("R", "S"))
        return jax.lax.psum(value, ("R", "S")), {"params": {**grads["params"], "head": head}}

    settings = {"in_specs": (specs, P(("R", "S"))), "out_specs": (P(), specs), "check_vma": False}
    expected = filled(abstract(plain, X))
    got = jax.jit(jax.shard_map(per_device, mesh=mesh, **settings))(expected, X)
    assert_same(got, gradients(plain, expected, X))


@pytest.mark.parametrize("wrap", [nn.remat, nn.jit], ids=["remat", "jit"])
@pytest.mark.parametrize(
    "inside",
    [True, False],
    ids=["shard(wrap)", "wrap(shard)"],
)
def test_sharded_class_goes_with_the_other_transforms(mesh, wrap, inside):
    unit: Any = jfsdp.shard(wrap(Block), mesh) if inside else wrap(jfsdp.shard(Block, mesh))
    plain = parent(wrap(Block))
    expected = filled(abstract(plain, X))
    assert_same(gradients(parent(unit), expected, X), gradients(plain, expected, X))


def test_sharded_class_is_the_body_of_a_scan(mesh):
    """One region for each layer, in the loop."""

    class Body(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.tanh(nn.Dense(16)(x)), None

    def model(body: Any) -> nn.Module:
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                settings = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
                return nn.scan(body, length=4, **settings)(name="layers")(x)[0]

        return Model()

    expected = filled(abstract(model(Body), X))
    got = gradients(model(jfsdp.shard(Body, mesh)), expected, X)
    assert_same(got, gradients(model(Body), expected, X))
