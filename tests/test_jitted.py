"""`jfsdp.jit` does to NNX objects what `nnx.jit` does, bit for bit, with one program and one walk."""

from __future__ import annotations

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jfsdp
from jfsdp import jitted
from jfsdp.nnx_objects import Walk


class Noisy(nnx.Module):
    """BatchNorm, dropout and a weight that two layers share."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Linear(16, 16, rngs=rngs)
        self.second.kernel = self.first.kernel

    def __call__(self, x):
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))


def train_step(model: Any, optimizer: Any, x: Any) -> Any:
    loss, grads = nnx.value_and_grad(helpers.mean_square)(model, x)
    optimizer.update(model, grads)
    return loss


ADAM = optax.adam(1e-2)


def adam(model: Any) -> nnx.Optimizer:
    return nnx.Optimizer(model, ADAM, wrt=nnx.Param)


def small(mesh: Any = None) -> tuple[models.Stack, Any]:
    model = models.Stack(2, 16, nnx.Rngs(0))
    if mesh is not None:
        jfsdp.shard(model, mesh, units=models.Block)
    return model, adam(model)


X = helpers.repeated(helpers.rows(16, 16), 16)
TOKENS = np.arange(16 * 4).reshape(16, 4) % 32


def assert_equal(got: Any, expected: Any) -> None:
    got, expected = helpers.leaves(got), helpers.leaves(expected)
    assert got.keys() == expected.keys()
    for path, value in expected.items():
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value, got[path] = jax.random.key_data(value), jax.random.key_data(got[path])
        np.testing.assert_array_equal(np.asarray(got[path]), np.asarray(value), err_msg=path)


# --------------------------------------------------------------------------------------------------
# The same as nnx.jit


@pytest.mark.parametrize("sizes", [{"S": 8}, {"R": 2, "S": 4}], ids=["S8", "R2xS4"])
@pytest.mark.parametrize(
    "make, x",
    [
        pytest.param(Noisy, X, id="noisy"),
        pytest.param(models.TiedLM, TOKENS, id="lm", marks=pytest.mark.slow),
        pytest.param(models.Scanned, X, id="scan", marks=pytest.mark.slow),
    ],
)
def test_losses_and_state_after_five_steps_are_those_of_nnx_jit_bit_for_bit(make, x, sizes):
    mesh = helpers.make_mesh(**sizes)
    results = []
    for jit in (nnx.jit, jfsdp.jit):
        model = make(nnx.Rngs(0, dropout=1))
        if make is models.Scanned:
            jfsdp.shard(model.layers, mesh, stacked_axis=0)
        jfsdp.shard(model, mesh)
        optimizer = adam(model)
        step, batch = jit(train_step), helpers.batch_on(mesh, x)
        losses = [float(step(model, optimizer, batch)) for _ in range(5)]
        results.append((losses, model, optimizer))
    (expected, model, optimizer), (losses, ours, our_optimizer) = results
    assert losses == expected and losses[0] != losses[-1]
    assert_equal(ours, model)
    assert_equal(nnx.state(our_optimizer), nnx.state(optimizer))


def test_a_plain_model_on_one_device_trains_as_with_nnx_jit():
    results = []
    for jit in (nnx.jit, jfsdp.jit):
        model = Noisy(nnx.Rngs(0))
        optimizer, step = adam(model), jit(train_step)
        results.append(([float(step(model, optimizer, X)) for _ in range(3)], model))
    assert results[1][0] == results[0][0]
    assert_equal(results[1][1], results[0][1])


def test_metrics_several_models_keyword_arguments_and_rngs_are_all_updated():
    mesh = helpers.make_mesh(S=8)
    results = []
    for jit in (nnx.jit, jfsdp.jit):
        model, optimizer = small(mesh)
        teacher, rngs = models.Block(16, nnx.Rngs(1)), nnx.Rngs(3)
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))

        @jit
        def step(model, optimizer, metrics, *, teacher, batch):
            (teacher, rngs), x = teacher, batch["x"]
            x = x + jax.random.normal(rngs(), x.shape)
            teacher.linear.kernel[...] *= 0.9
            loss = train_step(model, optimizer, teacher(x))
            metrics.update(loss=loss)
            return {"loss": loss}

        pair, batch = (teacher, rngs), {"x": helpers.batch_on(mesh, X)}
        for _ in range(2):
            step(model, optimizer, metrics, teacher=pair, batch=batch)
        out = step(model, optimizer, metrics, teacher=pair, batch=batch)
        results.append((float(out["loss"]), float(metrics.compute()["loss"]), model, teacher, rngs))
    for mine, theirs in zip(results[1], results[0], strict=True):
        if isinstance(mine, float):
            assert mine == theirs
        else:
            assert_equal(nnx.state(mine), nnx.state(theirs))


def test_the_objects_are_up_to_date_after_each_call_and_what_is_set_between_calls_counts():
    model, optimizer = small(helpers.make_mesh(S=8))
    kernel = model.blocks[0].linear.kernel
    step, x = jfsdp.jit(train_step), helpers.batch_on(helpers.make_mesh(S=8), X)
    losses = [float(step(model, optimizer, x)) for _ in range(2)]
    assert int(optimizer.step[...]) == 2 and model.blocks[0].linear.kernel is kernel
    saved = jax.tree.map(np.asarray, nnx.state((model, optimizer)))
    after = [float(step(model, optimizer, x)) for _ in range(2)]
    nnx.update((model, optimizer), saved)
    assert [float(step(model, optimizer, x)) for _ in range(2)] == after
    assert losses[0] > losses[1] > after[0] > after[1]


def test_a_method_can_be_jitted():
    class Counter(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.zeros((), jnp.int32))

        @jfsdp.jit
        def add(self, n):
            self.count[...] += n
            return self.count[...] * 2

    counter = Counter()
    assert [int(counter.add(3)), int(counter.add(1))] == [6, 8]
    assert int(counter.count[...]) == 4


# --------------------------------------------------------------------------------------------------
# One program


@helpers.every_axis_type
def test_five_steps_are_one_compilation_and_the_state_stays_where_it_lay(mesh_of):
    with mesh_of(R=2, S=4) as mesh:
        model, optimizer = small(mesh)
        before = {path: x.sharding for path, x in helpers.leaves(model).items()}
        step, x = jfsdp.jit(train_step), helpers.batch_on(mesh, X)
        with helpers.compilations() as counts:
            for _ in range(5):
                step(model, optimizer, x)
        assert counts["train_step"] == 1
        assert {path: x.sharding for path, x in helpers.leaves(model).items()} == before
        assert all(len(x.sharding.device_set) == 8 for x in helpers.leaves(optimizer).values())


def test_an_unsharded_model_with_a_batch_on_a_mesh_compiles_once_too():
    mesh = helpers.make_mesh(S=8)
    (model, optimizer), step = small(), jfsdp.jit(train_step)
    with helpers.compilations() as counts:
        for _ in range(3):
            step(model, optimizer, helpers.batch_on(mesh, X))
    assert counts["train_step"] == 1
    assert all(x.sharding == NamedSharding(mesh, P()) for x in helpers.leaves(model).values())


@pytest.mark.parametrize(
    "spec, memory_kind",
    [(P(), "device"), (P("S"), "pinned_host")],
    ids=["replicated", "host"],
)
def test_state_comes_back_where_it_lay_whatever_the_step_makes_of_it(spec, memory_kind):
    mesh = helpers.make_mesh(S=8)
    lying = NamedSharding(mesh, spec, memory_kind=memory_kind)
    state = nnx.Variable(jax.device_put(jnp.ones(8), lying))

    @jfsdp.jit
    def step(state, x):
        state[...] = jax.device_put(state[...], jax.memory.Space.Device) + x

    x = jax.device_put(jnp.ones(8), NamedSharding(mesh, P("S")))
    with helpers.compilations() as counts:
        for _ in range(3):
            step(state, x)
    assert state[...].sharding == lying and np.asarray(state[...])[0] == 4
    assert counts["step"] == 1


def test_a_program_is_found_again_after_eval_and_train():
    model = Noisy(nnx.Rngs(0))
    step = jfsdp.jit(lambda model, x: model(x).sum(), donate=False)
    with helpers.compilations() as counts:
        trained = float(step(model, X))
        model.eval()
        evaluated = [float(step(model, X)) for _ in range(2)]
        model.train()
        step(model, X)
    assert evaluated[0] == evaluated[1] != trained
    assert counts["<lambda>"] == 2


def test_static_arguments_by_position_and_by_name_each_have_a_program():
    @jfsdp.jit(static_argnums=2, static_argnames="flag")
    def step(model, x, power, flag=False):
        return (model(x) ** power).sum() if not flag else power

    model = models.Block(16, nnx.Rngs(0))
    with helpers.compilations() as counts:
        results = [float(step(model, X, 2)), float(step(model, X, power=3))]
        results += [float(step(model, X, 2)), float(step(model, X, 3, flag=True))]
    assert counts["step"] == 3 and results[0] == results[2] != results[1] and results[3] == 3


def test_the_same_objects_are_walked_once(monkeypatch):
    walks = []
    monkeypatch.setattr(jitted, "Walk", lambda *args: walks.append(Walk(*args)) or walks[-1])
    (model, optimizer), step = small(), jfsdp.jit(train_step)
    for _ in range(4):
        step(model, optimizer, X)
    assert len(walks) == 1
    setattr(model, "note", "new")  # noqa: B010
    step(model, optimizer, X)
    step(model, optimizer, X)
    assert len(walks) == 2
