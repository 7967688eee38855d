"""`jfsdp.value_and_grad` of Linen parameters: gradients over microbatches are those of one batch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import linen_models as models
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from helpers import batch_on, compilations, make_mesh, repeated, rows, uneven_weights
from jax.sharding import PartitionSpec as P

import jfsdp

EVERY_SYNC = pytest.mark.parametrize("sync", ["every", "last"])


def weighted(model: Any, params: Any, x: Any, weights: Any) -> tuple[jax.Array, jax.Array]:
    """The sum of the rows' losses by their weights, and the sum of the weights."""
    y: Any = model.apply({"params": params}, x)
    each = jnp.mean(y.astype(jnp.float32) ** 2, axis=tuple(range(1, y.ndim)))
    return jnp.sum(each * weights), jnp.sum(weights)


def mean_of_weighted(model: Any, params: Any, x: Any, weights: Any) -> jax.Array:
    total, weight = weighted(model, params, x, weights)
    return total / weight


def assert_as_one_batch(name: str, microbatches: int, sync: str, **sizes: int) -> None:
    case, mesh = models.CASES[name], make_mesh(**sizes)
    model, x, weights = case.sharded(mesh), repeated(case.batch), uneven_weights()
    described = models.abstract(model, x)["params"]
    params = models.filled(described)
    loss_fn = functools.partial(weighted, model)
    both = jax.jit(jfsdp.value_and_grad(loss_fn, microbatches=microbatches, sync=sync))
    loss, grads = both(params, batch_on(mesh, x), batch_on(mesh, weights))
    plain = case.make()
    whole = models.filled(models.abstract(plain, x)["params"])
    expected = jax.jit(jax.value_and_grad(functools.partial(mean_of_weighted, plain)))
    expected_loss, expected_grads = expected(whole, x, weights)
    np.testing.assert_allclose(loss, expected_loss, rtol=2e-6)
    models.assert_same(grads, expected_grads)
    for got, parameter in zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True):
        assert got.sharding.is_equivalent_to(parameter.sharding, got.ndim)


@EVERY_SYNC
@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
def test_masked_means_are_those_of_one_batch(microbatches, sync):
    assert_as_one_batch("mlp", microbatches, sync, R=2, S=4)


@EVERY_SYNC
def test_masked_means_without_replicas(sync):
    assert_as_one_batch("mlp", 4, sync, S=8)


@EVERY_SYNC
@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.slow) for n in ("attention", "tied")), "scanned"]
)
def test_every_kind_of_model_is_as_on_one_batch(name, sync):
    assert_as_one_batch(name, 4, sync, R=2, S=4)


class Net(nn.Module):
    """BatchNorm, dropout and a dense layer."""

    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        x = nn.Dense(16, name="first")(x)
        x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(8, name="last")(x)


def test_a_train_state_trains_as_on_one_batch_and_compiles_once():
    case, mesh, x = models.CASES["mlp"], make_mesh(R=2, S=4), rows(32, 16)
    model = case.sharded(mesh)

    def loss_fn(params: Any, x: Any, model: Any = model) -> jax.Array:
        return jnp.mean(model.apply({"params": params}, x) ** 2)

    def create(model: Any) -> TrainState:
        params = model.init(jax.random.key(0), x[:1])["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1))

    @jax.jit
    def step(state: TrainState, x: Any) -> Any:
        loss, grads = jfsdp.value_and_grad(loss_fn, microbatches=4)(state.params, x)
        return state.apply_gradients(grads=grads), loss

    @jax.jit
    def plain_step(state: TrainState, x: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, x, case.make())
        return state.apply_gradients(grads=grads), loss

    state, plain = jfsdp.init(lambda: create(model)), create(case.make())
    with compilations() as counts:
        for _ in range(3):
            state, loss = step(state, x)
            plain, expected = plain_step(plain, x)
            np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert counts["step"] == 1


def test_batch_statistics_are_returned_beside_and_averaged():
    """Of all devices' rows of a microbatch, averaged over the microbatches."""
    model = jfsdp.shard(Net(), make_mesh(S=8))
    x = rows(64, 16) * jnp.linspace(1, 2, 64)[:, None]
    variables = model.init(jax.random.key(0), x[:1], train=False)

    def loss_fn(params: Any, statistics: Any, x: Any, key: Any) -> Any:
        given = {"params": params, "batch_stats": statistics}
        y, new = model.apply(given, x, rngs={"dropout": key}, mutable="batch_stats")
        return jnp.mean(y**2), new["batch_stats"]

    both = jfsdp.value_and_grad(
        loss_fn, microbatches=4, has_aux=True, out_specs=P(), in_specs={"statistics": P()}
    )
    (_, statistics), _ = jax.jit(both)(
        variables["params"], variables["batch_stats"], x, jax.random.key(1)
    )
    hidden = nn.Dense(16).apply({"params": jax.device_get(variables["params"]["first"])}, x)
    parts = np.asarray(hidden).reshape(8, 4, 2, 16).swapaxes(0, 1).reshape(4, 16, 16)
    expected = 0.99 * 1 + 0.01 * parts.var(1).mean(0)
    np.testing.assert_allclose(statistics["norm"]["var"], expected, rtol=1e-5)
    np.testing.assert_allclose(
        statistics["norm"]["mean"], 0.01 * parts.mean((0, 1)), rtol=1e-4, atol=1e-6
    )


def test_a_key_is_another_one_on_every_device_and_in_every_microbatch():
    class Dropped(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dropout(0.5, deterministic=False)(x), nn.Dense(16)(x)

    model = jfsdp.shard(Dropped(), make_mesh(S=8))
    x = jnp.ones((32, 16))
    variables = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x[:1])

    def loss_fn(params: Any, x: Any, key: Any) -> Any:
        kept, y = model.apply({"params": params}, x, rngs={"dropout": key})
        return jnp.mean(y**2), kept

    both = jax.jit(jfsdp.value_and_grad(loss_fn, microbatches=4, has_aux=True))
    (_, kept), _ = both(variables["params"], x, jax.random.key(2))
    assert len({tuple(row) for row in np.asarray(kept).tolist()}) == 32


@EVERY_SYNC
@pytest.mark.parametrize(
    "wrt", ["last.*", lambda path, leaf: path.startswith("last")], ids=["glob", "predicate"]
)
def test_only_the_selected_parameters_are_differentiated_and_reduced(wrt, sync):
    model = jfsdp.shard(Net(), make_mesh(R=2, S=4))
    x = rows(32, 16)
    variables = model.init(jax.random.key(0), x[:1], train=False)

    def loss_fn(params: Any, statistics: Any, x: Any, model: Any = model) -> jax.Array:
        y = model.apply({"params": params, "batch_stats": statistics}, x, train=False)
        return jnp.mean(y**2)

    both = jfsdp.value_and_grad(
        loss_fn, microbatches=4, sync=sync, wrt=wrt, in_specs={"statistics": P()}
    )
    step = jax.jit(both)
    _, grads = step(variables["params"], variables["batch_stats"], x)
    host = jax.device_get(variables)
    expected = jax.grad(loss_fn)(host["params"], host["batch_stats"], x, Net())
    models.assert_same(grads["last"], expected["last"])
    assert not any(np.any(leaf) for leaf in jax.tree.leaves([grads["first"], grads["norm"]]))
    report = jfsdp.inspect(step, variables["params"], variables["batch_stats"], x, model=model)
    assert report.count("reduce-scatter") == (2 * 4 if sync == "every" else 2)


def test_frozen_parameters_in_another_argument():
    model = jfsdp.shard(Net(), make_mesh(S=8))
    x = rows(32, 16)
    variables = model.init(jax.random.key(0), x[:1], train=False)
    params = dict(variables["params"])
    trained = {"last": params.pop("last")}

    def loss_fn(trained: Any, frozen: Any, x: Any, model: Any = model) -> jax.Array:
        given = {"params": {**frozen, **trained}, "batch_stats": statistics}
        return jnp.mean(model.apply(given, x, train=False) ** 2)

    statistics = {"norm": {"mean": jnp.zeros(16), "var": jnp.ones(16)}}
    step = jax.jit(jfsdp.value_and_grad(loss_fn, microbatches=2))
    _, grads = step(trained, params, x)
    expected = jax.grad(loss_fn)(*jax.device_get((trained, params)), x, Net())
    models.assert_same(grads, expected)
    assert jfsdp.inspect(step, trained, params, x, model=model).count("reduce-scatter") == 2 * 2


def test_boxed_parameters_have_boxed_gradients():
    class Boxed(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "T"))
            return nn.Dense(16, kernel_init=init)(x)

    mesh = make_mesh(S=4, T=2)
    model = jfsdp.shard(Boxed(), mesh, dp_mesh_dims=jfsdp.DataParallelMeshDims(shard="S"))
    x = rows(32, 16)
    params = model.init(jax.random.key(0), x[:1])["params"]

    def loss_fn(params: Any, x: Any, model: Any = model) -> jax.Array:
        return jnp.mean(model.apply({"params": params}, x) ** 2)

    _, grads = jax.jit(jfsdp.value_and_grad(loss_fn, microbatches=2))(params, x)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    plain = jax.tree.map(np.asarray, nn.meta.unbox(params))
    expected = jax.grad(loss_fn)(plain, x, Boxed())
    for got, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_a_model_called_through_a_jit_of_the_users():
    """Which jax differentiates when the call itself is over, and whose cache knows it from before."""
    case, mesh, x = models.CASES["mlp"], make_mesh(S=8), rows(32, 16)
    model = case.sharded(mesh)
    params = model.init(jax.random.key(0), x[:1])["params"]
    apply = jax.jit(model.apply)

    def loss_fn(params: Any, x: Any, apply: Any = apply) -> jax.Array:
        return jnp.mean(apply({"params": params}, x) ** 2)

    expected = jax.value_and_grad(loss_fn)(jax.device_get(params), x, case.make().apply)
    models.assert_same(jax.value_and_grad(loss_fn)(params, x), expected)
    for _ in range(2):
        got = jax.jit(jfsdp.value_and_grad(loss_fn, microbatches=2))(params, x)
        models.assert_same(got, expected)


@pytest.mark.parametrize("tracked", [True, False])
@EVERY_SYNC
def test_it_runs_in_the_users_own_shard_map(tracked, sync):
    case, mesh, x = models.CASES["mlp"], make_mesh(R=2, S=4), rows(64, 16)
    model = case.sharded(mesh)
    params = model.init(jax.random.key(0), x[:1])["params"]
    specs = jax.tree.map(lambda x: x.sharding.spec, params)
    loss_fn = functools.partial(weighted, model)
    both = jfsdp.value_and_grad(loss_fn, microbatches=2, sync=sync)
    batch = P(("R", "S"))
    step = jax.shard_map(
        both, mesh=mesh, in_specs=(specs, batch, batch), out_specs=(P(), specs), check_vma=tracked
    )
    plain = functools.partial(mean_of_weighted, case.make())
    expected = jax.value_and_grad(plain)(jax.device_get(params), x, uneven_weights())
    models.assert_same(jax.jit(step)(params, x, jnp.asarray(uneven_weights())), expected, 2e-6)


# --------------------------------------------------------------------------------------------------
# What is refused


def refused(loss_fn: Any, params: Any, kind: type[Exception] = ValueError, **options: Any) -> str:
    with pytest.raises(kind) as error:
        jax.jit(jfsdp.value_and_grad(loss_fn, **options))(params, rows(32, 16))
    return str(error.value)


def mlp_loss(**settings: Any) -> tuple[Any, Any]:
    model = models.CASES["mlp"].sharded(make_mesh(S=8), **settings)
    params = model.init(jax.random.key(0), rows(1, 16))["params"]
    return lambda params, x: jnp.mean(model.apply({"params": params}, x) ** 2), params


def test_a_loss_that_calls_no_sharded_module():
    text = refused(lambda params, x: jnp.mean(x * params), jnp.ones((1, 16)))
    assert "calls no module that jfsdp.shard returned" in text


def test_a_first_argument_without_parameters():
    loss_fn, params = mlp_loss()
    text = refused(lambda scale, x: scale * loss_fn(params, x), jnp.ones(()))
    assert "its first argument holds no parameter of the sharded modules that it calls" in text


def test_auto_partitioning():
    loss_fn, params = mlp_loss(partitioning="auto")
    assert "calls a module with auto partitioning" in refused(loss_fn, params)


def test_a_selection_of_nothing():
    loss_fn, params = mlp_loss()
    text = refused(loss_fn, params, wrt="head.*")
    assert "wrt='head.*' selects none of " in text and "kernel" in text


def test_a_parameter_read_outside_of_its_module():
    loss_fn, params = mlp_loss()
    text = refused(
        lambda p, x: (
            loss_fn(p, x) + sum(jnp.sum(leaf) for leaf in nn.meta.unbox(p)["fc1"].values())
        ),
        params,
        TypeError,
    )
    assert "is used while it is sharded" in text
