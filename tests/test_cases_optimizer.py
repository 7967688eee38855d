"""Optimizer state: sharded as its parameters or more finely, and a train state that stays in place."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    MeshOf,
    assert_close,
    assert_spec,
    batch_on,
    both_axis_types,
    compilations,
    leaves,
    local_bytes,
    local_shape,
    make_mesh,
    mean_square,
    mlp,
    rows,
    train,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jfsdp
from jfsdp.layout import named_sharding, shardings
from jfsdp.nnx_optimizer import init_module_optimizer
from jfsdp.optimizer import init_optimizer


def on(mesh: Any, tree: Any, *spec: Any) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, named_sharding(mesh, P(*spec), x.ndim)), tree)


@both_axis_types
def test_moments_lie_as_the_parameter_and_the_count_on_the_mesh(mesh_of: MeshOf):
    """B02: w (16,8), S8: local (2,8) for mu and nu, `count.sharding == NamedSharding(mesh, P())`."""
    with mesh_of(S=8) as mesh:
        params = on(mesh, {"w": rows(16, 8)}, "S")
        adam = init_optimizer(optax.adam(1e-3), params)[0]
    for moment in (adam.mu["w"], adam.nu["w"]):
        assert moment.sharding == params["w"].sharding
        assert local_shape(moment) == (2, 8)
    assert adam.count.sharding == NamedSharding(mesh, P())


# --------------------------------------------------------------------------------------------------
# State over more devices than the parameters


@both_axis_types
def test_state_over_the_one_axis_of_copies(mesh_of: MeshOf):
    """B03: R8, replicated parameters: local bytes of mu are the eighth of the whole."""
    with mesh_of(R=8) as mesh:
        params = on(mesh, {"w": rows(16, 8)})
        adam = init_optimizer(optax.adam(1e-3), params, shard_over="R")[0]
    assert local_bytes(adam.mu["w"]) == params["w"].nbytes
    assert local_bytes(params["w"]) == 8 * params["w"].nbytes


def ddp(mesh: Any, **sizes: Any) -> nnx.Module:
    dims = jfsdp.DataParallelMeshDims(replicate="R")
    return jfsdp.shard(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), mesh, dp_mesh_dims=dims)


def test_state_of_a_module_over_the_one_axis_of_copies():
    """B03: the NNX part."""
    model = ddp(make_mesh(R=8))
    optimizer = init_module_optimizer(optax.adam(1e-3), model, shard_over="R")
    assert local_bytes(optimizer.opt_state[0].mu.kernel[...]) == model.kernel.nbytes
    assert local_bytes(model.kernel[...]) == 8 * model.kernel.nbytes


@pytest.mark.parametrize("shard_over", ["one", ("one",)], ids=str)
def test_an_option_that_cannot_be_applied_raises(shard_over: Any):
    """B03: an axis of size 1 and a request to shard the state over it."""
    mesh = make_mesh(R=8, one=1)
    with pytest.raises(ValueError, match=r"shard_over=.*one.* shards nothing.*R=8, one=1"):
        init_optimizer(optax.adam(1e-3), on(mesh, {"w": rows(16, 8)}), shard_over=shard_over)
    with pytest.raises(ValueError, match=r"shard_over=.*one.* shards nothing.*R=8, one=1"):
        init_module_optimizer(optax.adam(1e-3), ddp(mesh), shard_over=shard_over)


HSDP: dict[str, Any] = {"R": 2, "S": 4}


def finer(mesh: Any, *, jitted: bool = False) -> tuple[nnx.Module, nnx.Optimizer]:
    model = jfsdp.shard(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), mesh)

    def make(model: nnx.Module) -> nnx.Optimizer:
        return init_module_optimizer(optax.adamw(1e-2), model, shard_over="R")

    return model, (nnx.jit(make) if jitted else make)(model)


@pytest.mark.parametrize("shard_over, local", [(None, (4, 8)), ("R", (2, 8))])
def test_building_the_optimizer_leaves_the_parameters_where_they_are(shard_over: Any, local: Any):
    """B07: Linear 16->8, R2xS4: the parameters' shardings before and after are the same."""
    model = jfsdp.shard(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), make_mesh(**HSDP))
    before = jfsdp.shardings(nnx.state(model))
    optimizer = init_module_optimizer(optax.adam(1e-3), model, shard_over=shard_over)
    assert jfsdp.shardings(nnx.state(model)) == before
    assert local_shape(optimizer.opt_state[0].mu.kernel[...]) == local


@nnx.jit
def unique_step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(mean_square)(model, x)
    optimizer.update(model, grads)
    return loss


@both_axis_types
def test_a_finer_state_trains_as_the_unsharded_one_and_stays_in_place(mesh_of: MeshOf):
    """B07: after 3 steps param local (4,8), mu local (2,8), the losses unsharded; one compilation."""
    with mesh_of(**HSDP) as mesh:
        model, optimizer = finer(mesh)
        before = shardings(nnx.state((model, optimizer)))
        x = batch_on(mesh, rows(8, 16))
        with compilations() as compiled:
            losses = [float(unique_step(model, optimizer, x)) for _ in range(3)]
    assert local_shape(model.kernel[...]) == (4, 8)
    assert local_shape(optimizer.opt_state[0].mu.kernel[...]) == (2, 8)
    assert shardings(nnx.state((model, optimizer))) == before
    assert compiled["unique_step"] == 1
    alone = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    expected = train(alone, rows(8, 16), tx=optax.adamw(1e-2))
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert_close(model, alone)


@pytest.mark.parametrize("how", ["eager", "donated", "made in jit"])
def test_a_finer_state_stays_in_place_however_the_step_is_run(how: str):
    """B07: an update outside of jit, a step that donates, an optimizer that was built inside nnx.jit."""
    mesh = make_mesh(**HSDP)
    model, optimizer = finer(mesh, jitted=how == "made in jit")
    before = shardings(nnx.state((model, optimizer)))
    step = unique_step.__wrapped__
    if how != "eager":
        step = nnx.jit(step, donate_argnums=(0, 1))
    for _ in range(2):
        step(model, optimizer, batch_on(mesh, rows(8, 16)))
    assert shardings(nnx.state((model, optimizer))) == before
    assert local_shape(optimizer.opt_state[0].nu.kernel[...]) == (2, 8)


def test_a_finer_state_of_an_abstract_model_is_the_real_one_without_arrays():
    """B53: on a mesh whose devices are not here it is what one would have."""
    mesh = make_mesh(**HSDP)
    _, real = finer(mesh)
    abstract = jfsdp.shard(nnx.eval_shape(lambda: nnx.Linear(16, 8, rngs=nnx.Rngs(0))), mesh)
    optimizer = init_module_optimizer(optax.adamw(1e-2), abstract, shard_over="R")
    described, arrays = leaves(nnx.state(optimizer)), leaves(nnx.state(real))
    assert {path: x.sharding for path, x in described.items()} == {
        path: x.sharding for path, x in arrays.items()
    }
    assert {type(x) for x in described.values()} == {jax.ShapeDtypeStruct}


def test_the_state_of_a_module_that_is_not_sharded_is_refused():
    with pytest.raises(ValueError, match=r"nothing in this Linear is sharded.*jfsdp\.shard"):
        init_module_optimizer(optax.adam(1e-3), nnx.Linear(16, 8, rngs=nnx.Rngs(0)))


def test_frozen_parameters_are_not_gathered_for_a_finer_state():
    """Only what the optimizer trains is laid finely and gathered again."""
    mesh = make_mesh(**HSDP)
    model = jfsdp.shard(mlp(16, 16, 8), mesh, units=nnx.Linear)
    last = nnx.All(nnx.Param, nnx.PathContains(2))
    optimizer = init_module_optimizer(optax.adam(1e-2), model, wrt=last, shard_over="R")
    frozen = model.layers[0].kernel.get_raw_value()
    grads = nnx.grad(mean_square, argnums=nnx.DiffState(0, last))(model, rows(8, 16))
    optimizer.update(model, grads)
    assert model.layers[0].kernel.get_raw_value() is frozen
    assert_spec(model.layers[2].kernel, "S")


@pytest.mark.parametrize("shard_over", [None, "R"])
@both_axis_types
def test_factored_moments_stay_whole(mesh_of: MeshOf, shard_over: Any):
    """B13: XLA would shard what it sums up of sharded gradients, and compile the next step again."""
    with mesh_of(**HSDP) as mesh:
        model = jfsdp.shard(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), mesh)
        tx = optax.adafactor(1e-2, min_dim_size_to_factor=4)
        optimizer = init_module_optimizer(tx, model, shard_over=shard_over)
        before = shardings(nnx.state((model, optimizer)))
        with compilations() as compiled:
            for _ in range(3):
                unique_step(model, optimizer, batch_on(mesh, rows(8, 16)))
    assert compiled["unique_step"] == 1
    assert shardings(nnx.state((model, optimizer))) == before


@pytest.mark.parametrize("shard_over, spec", [(None, (None, "S")), ("R", (None, ("S", "R")))])
def test_a_history_of_gradients_is_sharded_behind_its_own_dimension(shard_over: Any, spec: Any):
    """Whole, the memory of L-BFGS is 20 times the parameters on every device."""
    model = jfsdp.shard(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), make_mesh(**HSDP))
    optimizer = init_module_optimizer(optax.scale_by_lbfgs(), model, shard_over=shard_over)
    assert_spec(optimizer.opt_state.diff_params_memory.kernel, *spec)


# --------------------------------------------------------------------------------------------------
# Wrappers


def test_partition_keeps_no_state_of_what_it_freezes():
    """B09: w (256,128), b (128,), S8, adam on w and set_to_zero on b: {count, mu.w, nu.w}."""
    params = on(make_mesh(S=8), {"w": rows(256, 128), "b": rows(1, 128)[0]}, "S")
    tx = optax.partition(
        {"train": optax.adam(1e-2), "freeze": optax.set_to_zero()}, {"w": "train", "b": "freeze"}
    )
    state = init_optimizer(tx, params)
    names = {path.rsplit(".")[-1] for path in leaves(state)}
    assert names == {"count", "mu['w']", "nu['w']"}
    (mu,) = (x for path, x in leaves(state).items() if ".mu" in path)
    assert local_shape(mu) == (32, 128)
    structure, frozen = jax.tree.structure(state), np.asarray(params["b"])
    for _ in range(2):
        updates, state = jax.jit(tx.update)(params, state, params)
        params = optax.apply_updates(params, updates)
    assert jax.tree.structure(state) == structure
    assert np.asarray(params["b"]).tobytes() == frozen.tobytes()


def test_labels_may_be_made_of_a_modules_parameters():
    """B09: the NNX part, with a function that labels them."""
    mesh = make_mesh(S=8)
    model = jfsdp.shard(nnx.Linear(256, 128, rngs=nnx.Rngs(0)), mesh)

    def label(params: Any) -> Any:
        return jax.tree.map(lambda x: "train" if x.ndim > 1 else "freeze", params)

    tx = optax.partition({"train": optax.adam(1e-2), "freeze": optax.set_to_zero()}, label)
    optimizer = init_module_optimizer(tx, model)
    mu = optimizer.opt_state.inner_states["train"].inner_state[0].mu
    assert local_shape(mu.kernel[...]) == (32, 128)
    bias, kernel = np.asarray(model.bias[...]), np.asarray(model.kernel[...])
    for _ in range(2):
        unique_step(model, optimizer, batch_on(mesh, rows(8, 256)))
    assert np.asarray(model.bias[...]).tobytes() == bias.tobytes()
    assert not np.array_equal(model.kernel[...], kernel)


def test_accumulated_gradients_are_sharded():
    """B11: w (16,4), S8, MultiSteps(adam, 4): acc_grads local (2,4); 8 microsteps, 2 changes."""
    mesh = make_mesh(S=8)
    tx = optax.MultiSteps(optax.adam(1e-1), every_k_schedule=4)

    def run(params: Any, state: Any) -> list[np.ndarray]:
        seen = [np.asarray(params["w"])]
        step = jax.jit(tx.update)
        for _ in range(8):
            updates, state = step(params, state, params)
            params = optax.apply_updates(params, updates)
            seen.append(np.asarray(params["w"]))
        return seen

    params = on(mesh, {"w": rows(16, 4)}, "S")
    state = init_optimizer(tx, params)
    assert local_shape(state.acc_grads["w"]) == (2, 4)
    assert {x.sharding for x in (state.mini_step, state.gradient_step)} == {
        NamedSharding(mesh, P())
    }
    got = run(params, state)
    changes = [n for n in range(8) if not np.array_equal(got[n], got[n + 1])]
    assert changes == [3, 7]
    expected = run({"w": rows(16, 4)}, tx.init({"w": rows(16, 4)}))
    np.testing.assert_allclose(got[-1], expected[-1], atol=1e-6)


def test_an_optimizer_that_was_built_before_shard_is_refused():
    """B12: adagrad on an unsharded Linear(16,8), then S8: the error tells the order."""
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adagrad(1e-2), wrt=nnx.Param)
    jfsdp.shard(model, make_mesh(S=8))
    grads = nnx.grad(mean_square)(model, rows(8, 16))
    with pytest.raises(ValueError, match=r"built before jfsdp\.shard\(Linear\).*Build it after"):
        optimizer.update(model, grads)
