"""Clipping and skipping by optax on sharded leaves: the norms, updates and counters of the unsharded run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import linen_models
import models
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import batch_on, leaves, make_mesh, mean_square, rows
from linen_models import TrainState, create

import jfsdp

X = rows(16, 16)
MESHES = [{"S": 8}, {"R": 2, "S": 4}]
every_mesh = pytest.mark.parametrize("sizes", MESHES, ids=["S8", "R2xS4"])
FRONT_ENDS = ["nnx", "linen"]
every_front_end = pytest.mark.parametrize("front_end", FRONT_ENDS)

# Of MLP the bias (10,) divides by neither 8 nor 4.


class Run:
    """An MLP and its optimizer, of NNX or Linen, on a mesh or without one; its gradients and updates."""

    def __init__(self, front_end: str, tx: Any, sizes: dict[str, int] | None):
        self.linen = front_end == "linen"
        self.mesh = make_mesh(**sizes) if sizes else None
        if self.linen:
            model: Any = linen_models.MLP()
            if self.mesh:
                model = jfsdp.shard(model, self.mesh, units=linen_models.nn.Dense)
                self.state = jfsdp.init(lambda: create(model, X, tx))
            else:
                self.state = create(model, X, tx)
        else:
            model = models.MLP(nnx.Rngs(0))
            if self.mesh:
                jfsdp.shard(model, self.mesh, units=nnx.Linear)
            self.state = model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def step(self, x: Any = X) -> Any:
        """One jitted step on this batch; returns the gradients."""
        x = batch_on(self.mesh, x) if self.mesh else x
        if not self.linen:
            return _nnx_step(*self.state, x)
        self.state, grads = _linen_step(self.state, x)
        return grads

    def inspect(self) -> Any:
        x = batch_on(self.mesh, X)
        step, state = (_linen_step, (self.state,)) if self.linen else (_nnx_step, self.state)
        return jfsdp.inspect(step, *state, x, compile=True)

    @property
    def params(self) -> dict[str, np.ndarray]:
        tree = self.state.params if self.linen else nnx.state(self.state[0], nnx.Param)
        return {path: np.array(x) for path, x in leaves(tree).items()}

    @property
    def opt_state(self) -> Any:
        return self.state.opt_state if self.linen else self.state[1].opt_state


@nnx.jit
def _nnx_step(model: Any, optimizer: Any, x: jax.Array) -> Any:
    grads = nnx.grad(mean_square)(model, x)
    optimizer.update(model, grads)
    return grads


@jax.jit
def _linen_step(state: TrainState, x: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        return jnp.mean(state.apply_fn({"params": params}, x) ** 2)

    grads = jax.grad(loss)(state.params)
    return state.apply_gradients(grads=grads), grads


# --------------------------------------------------------------------------------------------------
# Norms


def norm(tree: Any, order: float) -> jax.Array:
    """Of all elements together, as torch's clip_grad_norm_ takes it."""
    parts = [jnp.linalg.norm(jnp.ravel(x), order) for x in jax.tree.leaves(tree)]
    return jnp.linalg.norm(jnp.stack(parts), order)


@pytest.mark.parametrize("order", [1, 2, 3, float("inf")])
@every_mesh
def test_any_norm_of_sharded_gradients_is_that_of_whole_ones(sizes: Any, order: float):
    got, expected = (
        Run("nnx", optax.sgd(0.1), sizes).step(),
        Run("nnx", optax.sgd(0.1), None).step(),
    )
    measured = jax.jit(norm, static_argnums=1)(got, order)
    np.testing.assert_allclose(measured, norm(expected, order), rtol=1e-6)
    if order == 2:
        np.testing.assert_allclose(jax.jit(optax.tree.norm)(got), measured, rtol=1e-6)


CLIPPING = {
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(0.02),
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(0.002),
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.01),
    "clip": lambda: optax.clip(0.002),
}


@pytest.mark.parametrize(
    "name", [n if "norm" in n else pytest.param(n, marks=pytest.mark.slow) for n in CLIPPING]
)
@every_mesh
@every_front_end
def test_clipped_updates_are_those_of_the_unsharded_model(front_end: str, sizes: Any, name: str):
    def run(tx: Any, sizes: Any) -> dict[str, np.ndarray]:
        one = Run(front_end, tx, sizes)
        for _ in range(3):
            one.step()
        return one.params

    def clipped() -> Any:
        return optax.chain(CLIPPING[name](), optax.sgd(1.0, momentum=0.9))

    expected, got = run(clipped(), None), run(clipped(), sizes)
    for path, value in expected.items():
        np.testing.assert_allclose(got[path], value, rtol=1e-5, atol=1e-6, err_msg=path)
    free = run(optax.sgd(1.0, momentum=0.9), sizes)
    assert any(np.abs(free[path] - value).max() > 1e-3 for path, value in expected.items())


@pytest.mark.parametrize("front_end", ["nnx", pytest.param("linen", marks=pytest.mark.slow)])
@every_mesh
def test_the_norm_costs_one_number_per_sharded_leaf_over_the_shard_axis(front_end: str, sizes: Any):
    """3 of the 4 leaves are sharded. The replicas hold the same shards: nothing moves over R for it."""

    def moved(tx: Any) -> Counter[Any]:
        report = Run(front_end, tx, sizes).inspect()
        counts: Counter[Any] = Counter()
        for one in report.collectives:
            counts[one.kind, one.axes, one.shape] += one.executions
        return counts

    sgd = optax.sgd(0.1)
    added = moved(optax.chain(optax.clip_by_global_norm(0.1), sgd))
    added.subtract(moved(sgd))
    assert {key: n for key, n in added.items() if n} == {("all-reduce", ("S",), ()): 3}


# --------------------------------------------------------------------------------------------------
# A step that is not finite


def counters(opt_state: Any) -> dict[str, set[int]]:
    """The counters of apply_if_finite, and the values they have on the devices."""
    names = ("notfinite_count", "total_notfinite", "last_finite")
    found = {}
    for name in names:
        value = getattr(opt_state, name)
        array = value.get_raw_value() if isinstance(value, nnx.Variable) else value
        found[name] = {int(shard.data) for shard in array.addressable_shards}
    return found


@every_mesh
@every_front_end
def test_a_nan_in_the_rows_of_one_device_is_skipped_by_all(front_end: str, sizes: Any):
    run = Run(front_end, optax.apply_if_finite(optax.adam(1e-2), 5), sizes)
    run.step()
    before, moments = run.params, counters(run.opt_state)
    run.step(X.at[1, 3].set(jnp.nan))  # row 1 lies on the first device
    after = run.params
    for path, value in before.items():
        np.testing.assert_array_equal(after[path], value, err_msg=path)
    assert moments == {"notfinite_count": {0}, "total_notfinite": {0}, "last_finite": {1}}
    skipped = {"notfinite_count": {1}, "total_notfinite": {1}, "last_finite": {0}}
    assert counters(run.opt_state) == skipped
    run.step()
    assert any((run.params[path] != value).any() for path, value in after.items())
    trained = {"notfinite_count": {0}, "total_notfinite": {1}, "last_finite": {1}}
    assert counters(run.opt_state) == trained


class Sum(nnx.Module):
    """x @ w: the gradient of w's row i depends on column i of x alone."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones((16, 8)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w[...]


def test_a_gradient_that_is_not_finite_in_the_shard_of_one_device_is_skipped_by_all():
    """The nan is in one row of w, and only the second device holds it."""
    mesh = make_mesh(S=8)
    model = jfsdp.shard(Sum(), mesh)
    tx = optax.apply_if_finite(optax.adam(1e-2), 5)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: jax.Array) -> Any:
        grads = nnx.grad(lambda model: jnp.sum(model(x)))(model)
        optimizer.update(model, grads)
        return grads

    grads = step(model, optimizer, batch_on(mesh, jnp.ones((8, 16)).at[0, 3].set(jnp.nan)))
    finite = [bool(np.isfinite(s.data).all()) for s in grads.w[...].addressable_shards]
    assert finite == [True, False, *[True] * 6]
    np.testing.assert_array_equal(model.w[...], np.ones((16, 8)))
    assert counters(optimizer.opt_state)["notfinite_count"] == {1}
