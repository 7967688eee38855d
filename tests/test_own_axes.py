"""Parameters with data-parallel axes of their own: each device along the others has its own part."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    Op,
    assert_close,
    assert_spec,
    batch_on,
    both_axis_types,
    compilations,
    gradients,
    leaves,
    local_shape,
    make_mesh,
    mean_square,
    rows,
    stablehlo_ops,
    train,
)
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jfsdp
from jfsdp import DataParallelMeshDims

PARTS, WIDTH = 2, 8
AXES = {"expert": PARTS, "fsdp": 4}
DIMS = DataParallelMeshDims(shard=("expert", "fsdp"))
X = rows(16, WIDTH)


class Local(nnx.Module):
    """A matrix for each part of the batch. On a device: its own matrix, for its own part."""

    def __init__(self, rngs: nnx.Rngs):
        lies = {"out_sharding": ("expert", None, None), "eager_sharding": False}
        value = jax.random.normal(rngs.params(), (PARTS, WIDTH, WIDTH)) / 3
        self.w = nnx.Param(value, **lies)

    def __call__(self, x):
        parts = x.reshape(self.w.shape[0], -1, WIDTH)
        return jnp.einsum("pbi,pio->pbo", parts, self.w[...]).reshape(x.shape)


class Model(nnx.Module):
    """A dense layer, own matrices, and a dense layer."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.local = Local(rngs)
        self.down = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.local(self.up(x))))


def over_fsdp(path: str, param: Any) -> Any:
    return (1, DataParallelMeshDims(shard="fsdp")) if path.endswith("local.w") else None


def make() -> Model:
    return Model(nnx.Rngs(0))


def sharded(mesh: Any, **settings: Any) -> Model:
    settings = {"dp_mesh_dims": DIMS, "shard_placement_fn": over_fsdp, **settings}
    return jfsdp.shard(make(), mesh, **settings)


UNITS = {"one unit": (), "units": [nnx.Linear, Local]}


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("units", UNITS.values(), ids=UNITS)
def test_loss_and_gradients_are_those_of_the_whole(units, reshard):
    mesh = make_mesh(**AXES)
    model = sharded(mesh, units=units, reshard_after_forward=reshard)
    assert_close(gradients(model, batch_on(mesh, X)), gradients(make(), X))


@both_axis_types
def test_training_keeps_every_place_and_compiles_once(mesh_of):
    with mesh_of(**AXES) as mesh:
        model = sharded(mesh)
        before = {path: leaf.sharding for path, leaf in leaves(model).items()}
        with compilations() as counts:
            losses = train(model, batch_on(mesh, X), tx=optax.adam(1e-2))
        assert counts["step"] == 1
        assert {path: leaf.sharding for path, leaf in leaves(model).items()} == before
    np.testing.assert_allclose(losses, train(make(), X, tx=optax.adam(1e-2)), rtol=1e-6)


def test_device_holds_a_shard_of_its_own_part():
    model = sharded(make_mesh(**AXES))
    w = model.local.w.get_raw_value()
    assert_spec(w, "expert", "fsdp")
    assert local_shape(w) == (1, 2, WIDTH)


def test_it_is_gathered_and_reduced_over_its_own_axes_only():
    mesh = make_mesh(**AXES)
    ops = stablehlo_ops(nnx.jit(nnx.grad(mean_square)).lower(sharded(mesh), batch_on(mesh, X)))
    of_local = Counter({op: n for op, n in ops.items() if len(op.shape) == 3})
    gathered, scattered = (1, WIDTH, WIDTH), (1, WIDTH // 4, WIDTH)
    assert of_local == {
        Op("all_gather", "f32", gathered): 1,
        Op("reduce_scatter", "f32", scattered): 1,
    }


def test_report_states_its_own_axes():
    mesh = make_mesh(**AXES)
    report = jfsdp.inspect(nnx.grad(mean_square), sharded(mesh), batch_on(mesh, X))
    report.check()
    (promise,) = [p for p in report.promises if p.leaf == "local.w"]
    assert promise.gather is not None and promise.scatter is not None
    assert (promise.gather.axes, promise.scatter.axes, promise.sum) == (("fsdp",), ("fsdp",), None)
    assert promise.scatter.bytes_per_device == WIDTH * WIDTH * 4 * 3 / 4
    ratios = {total.kind: total.ratio for total in report.totals}
    assert ratios["reduce-scatter"] == ratios["all-gather"] == 1


def test_gradient_is_summed_over_its_own_replicate_axes():
    mesh = make_mesh(expert=2, copies=2, fsdp=2)
    own = (1, DataParallelMeshDims(shard="fsdp", replicate="copies"))
    model = sharded(
        mesh,
        dp_mesh_dims=DataParallelMeshDims(shard=("expert", "copies", "fsdp")),
        shard_placement_fn=lambda path, param: own if path == "local.w" else None,
    )
    assert_spec(model.local.w.get_raw_value(), "expert", "fsdp")
    assert_close(gradients(model, batch_on(mesh, X)), gradients(make(), X))


def test_one_that_is_not_sharded_beside_that_is_all_reduced():
    mesh = make_mesh(**AXES)
    own = (None, DataParallelMeshDims(replicate="fsdp"))
    model = sharded(mesh, shard_placement_fn=lambda p, _: own if p == "local.w" else None)
    assert local_shape(model.local.w.get_raw_value()) == (1, WIDTH, WIDTH)
    ops = stablehlo_ops(nnx.jit(nnx.grad(mean_square)).lower(model, batch_on(mesh, X)))
    of_local = Counter({op: n for op, n in ops.items() if len(op.shape) == 3})
    assert of_local == {Op("all_reduce", "f32", (1, WIDTH, WIDTH)): 1}
    assert_close(gradients(model, batch_on(mesh, X)), gradients(make(), X))


def test_two_axes_on_two_dimensions_of_one_parameter():
    mesh = make_mesh(**AXES)
    model = jfsdp.shard(
        nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(0)),
        mesh,
        dp_mesh_dims=DIMS,
        shard_placement_fn=lambda path, param: {0: "fsdp", -1: "expert"},
    )
    assert_spec(model.kernel.get_raw_value(), "fsdp", "expert")
    plain = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(0))
    assert_close(gradients(model, batch_on(mesh, X)), gradients(plain, X))


def test_init_makes_it_where_shard_lays_it():
    mesh = make_mesh(**AXES)
    born = jfsdp.init(make, mesh, dp_mesh_dims=DIMS, shard_placement_fn=over_fsdp)
    laid = sharded(mesh)
    assert_close(born, laid)
    got = {path: leaf.sharding for path, leaf in leaves(born).items()}
    assert got == {path: leaf.sharding for path, leaf in leaves(laid).items()}


def test_annotated_array_that_lies_there_already_is_taken_as_it_lies():
    types = (AxisType.Auto,) * 2
    mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=types)
    with jax.set_mesh(mesh):
        model = make()
        model.local.w = nnx.Param(model.local.w[...], out_sharding=("expert", None, None))
    jfsdp.shard(model, mesh, dp_mesh_dims=DIMS, shard_placement_fn=over_fsdp)
    assert_spec(model.local.w.get_raw_value(), "expert", "fsdp")


def test_unshard_gives_all_parts():
    whole = jfsdp.unshard(sharded(make_mesh(**AXES)))
    np.testing.assert_array_equal(whole.local.w[...], make().local.w[...])
    assert local_shape(whole.local.w.get_raw_value()) == (PARTS, WIDTH, WIDTH)


def test_per_device_view_takes_shards_of_its_own_part():
    mesh = make_mesh(**AXES)
    model = sharded(mesh)
    kind, state = nnx.split(model)
    specs = jax.tree.map(lambda x: x.sharding.spec, state)

    def share(state: Any, x: jax.Array) -> Any:
        # The mean over the global batch: so the shares of all devices add up to it.
        loss = lambda state: jnp.sum(nnx.merge(kind, state)(x) ** 2) / X.size  # noqa: E731
        value, grads = jax.value_and_grad(loss)(state)
        return jax.lax.psum(value, ("expert", "fsdp")), grads

    mapped = jax.shard_map(
        share,
        mesh=mesh,
        in_specs=(specs, P(("expert", "fsdp"))),
        out_specs=(P(), specs),
        check_vma=False,
    )
    got = jax.jit(mapped)(state, batch_on(mesh, X))
    value, grads = gradients(make(), X)
    np.testing.assert_allclose(got[0], value, rtol=1e-6)
    assert_close(got[1], grads)


class Stack(nnx.Module):
    """`nnx.scan` over layers that have own matrices."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs: nnx.Rngs) -> Local:
            return Local(rngs)

        self.layers = stack(rngs)

    def __call__(self, x):
        return nnx.scan(lambda m, x: jnp.tanh(m(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(
            self.layers, x
        )


def test_scanned_stack_gathers_own_parts_layer_by_layer():
    mesh, model = make_mesh(**AXES), Stack(nnx.Rngs(0))
    own = (-1, DataParallelMeshDims(shard="fsdp"))
    settings: Any = {"dp_mesh_dims": DIMS, "shard_placement_fn": lambda path, param: own}
    jfsdp.shard(model.layers, mesh, stacked_axis=0, **settings)
    jfsdp.shard(model, mesh, dp_mesh_dims=DIMS)
    assert_spec(model.layers.w.get_raw_value(), None, "expert", None, "fsdp")
    assert_close(gradients(model, batch_on(mesh, X)), gradients(Stack(nnx.Rngs(0)), X))


def test_shape_outside_of_its_unit_is_that_of_the_own_part():
    """What a caller sees of a hidden parameter is what the unit's own forward will see."""

    class Outer(Model):
        def __call__(self, x):
            shapes.append(self.local.w.shape)
            return super().__call__(x)

    shapes: list[tuple[int, ...]] = []
    mesh = make_mesh(**AXES)
    model = jfsdp.shard(
        Outer(nnx.Rngs(0)), mesh, dp_mesh_dims=DIMS, units=Local, shard_placement_fn=over_fsdp
    )
    model(batch_on(mesh, X))
    assert set(shapes) == {(1, WIDTH, WIDTH)}
