"""Models whose weights travel in 8 bits compute as the unsharded ones, but for the error of quantizing."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import linen_models
import models
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import batch_on, leaves, mean_square, mlp, train
from test_parity import mesh_and_dims

import jfsdp

INT8 = jfsdp.QuantizedAllGather("int8", 64)
FLOAT8 = jfsdp.QuantizedAllGather("float8_e4m3fn", 64)
REDUCE = jfsdp.QuantizedReduceScatter("int8", 64)
STOCHASTIC = jfsdp.QuantizedReduceScatter("int8", 64, stochastic=True)

QUICK = [
    ("S8", "auto", "attention", "linen"),
    ("R2xS4", "explicit_set", "scanned", "nnx"),
    ("S2xS4", "auto", "scanned", "linen"),
    ("S4xT2", "explicit_set", "mlp", "nnx"),
]
SLOW = [
    *((mesh, axes, "mlp", "nnx") for mesh in ("S8", "R2xS4") for axes in ("auto", "explicit_set")),
    *(
        ("S2xS4", "explicit_set", c, front)
        for c in ("mlp", "scanned")
        for front in ("nnx", "linen")
    ),
]


def combinations(first: Any, second: Any, names: tuple[str, str]) -> list[Any]:
    """The first collective everywhere, the second in two of the quick ones."""
    found = []
    for comm, name, cases in (
        (first, names[0], dict.fromkeys([*QUICK, *SLOW])),
        (second, names[1], QUICK[2:]),
    ):
        for case in cases:
            marks = () if case in QUICK else pytest.mark.slow
            found.append(pytest.param(comm, *case, id="-".join((name, *case)), marks=marks))
    return found


def even(tree: Any) -> Any:
    """Parameters of one magnitude in each array, which 8 bits hold exactly, whatever the blocks."""
    random = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: (random.choice([-1, 1], x.shape) / np.sqrt(x.shape[-1] * 3)).astype(x.dtype), tree
    )


def computed(front: str, case: str, mesh: Any = None, **settings: Any) -> Any:
    """Loss and gradients of the case's model with even parameters; unsharded without a mesh."""
    source: Any = models if front == "nnx" else linen_models
    case = source.CASES[case]
    if front == "nnx":
        model = case.make()
        nnx.update(model, even(nnx.state(model, nnx.Param)))
        if mesh is not None:
            if case.stack:
                jfsdp.shard(getattr(model, case.stack), mesh, stacked_axis=0, **settings)
            jfsdp.shard(model, mesh, units=case.units, **settings)
        return nnx.jit(nnx.value_and_grad(mean_square))(model, case.batch)
    model = case.make() if mesh is None else case.sharded(mesh, **settings)
    abstract = linen_models.abstract(model, case.batch)
    variables = even(abstract)
    if mesh is not None:
        variables = jax.device_put(variables, jfsdp.shardings(abstract))
    batch = case.batch if mesh is None else batch_on(mesh, case.batch)
    return linen_models.gradients(model, variables, batch)


expected = functools.cache(functools.partial(computed, mesh=None))


def compared(front: str, case: str, mesh: str, axes: str, **settings: Any) -> Any:
    """Loss and gradients of the sharded model and of the unsharded one."""
    mesh, dims = mesh_and_dims(mesh, axes)
    with jax.set_mesh(mesh) if axes == "explicit_set" else contextlib.nullcontext():
        loss, grads = computed(front, case, mesh, dp_mesh_dims=dims, **settings)
    other_loss, others = expected(front, case)
    np.testing.assert_allclose(loss, other_loss, rtol=1e-5)
    got, wanted = leaves(grads), leaves(others)
    assert got.keys() == wanted.keys() and wanted
    return [(path, np.asarray(got[path]), np.asarray(wanted[path])) for path in wanted]


@pytest.mark.parametrize(
    ("gather", "mesh", "axes", "case", "front"), combinations(INT8, FLOAT8, ("int8", "float8"))
)
def test_gradients_go_straight_through_a_quantized_gather(
    gather: Any, mesh: str, axes: str, case: str, front: str
):
    """Where quantizing changes no weight, loss and gradients are those of the unsharded model."""
    for path, got, wanted in compared(front, case, mesh, axes, all_gather=gather):
        allowed = 1e-5 * max(1.0, np.abs(wanted).max())
        np.testing.assert_allclose(got, wanted, rtol=0, atol=allowed, err_msg=path)


@pytest.mark.parametrize(
    ("reduce", "mesh", "axes", "case", "front"),
    combinations(REDUCE, STOCHASTIC, ("nearest", "stochastic")),
)
def test_gradients_that_are_reduced_in_int8_are_nearly_those_of_the_unsharded_model(
    reduce: Any, mesh: str, axes: str, case: str, front: str
):
    """To 5 % of the largest one of each parameter; and not to 0.01 %, so they were quantized."""
    changed = False
    for path, got, wanted in compared(front, case, mesh, axes, reduce_scatter=reduce):
        largest = np.abs(wanted).max()
        allowed = 0.05 * largest + 1e-6
        np.testing.assert_allclose(got, wanted, rtol=0, atol=allowed, err_msg=path)
        changed |= bool(np.abs(got - wanted).max() > 1e-4 * largest)
    assert changed


def test_a_tiny_model_trains_to_nearly_the_same_loss():
    """40 steps of Adam: 8 bits in both directions change no loss by more than 1 % of the first one."""
    mesh, _ = mesh_and_dims("S8", "auto")
    policy = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 16)), jnp.float32)

    def loss(model: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((model(x).astype(jnp.float32) - jnp.sin(3 * x)) ** 2)

    def losses(**settings: Any) -> np.ndarray:
        model = jfsdp.shard(
            mlp(16, 64, 64, 16), mesh, units=nnx.Linear, mp_policy=policy, **settings
        )
        return np.array(train(model, x, steps=40, loss=loss, tx=optax.adam(3e-3)))

    plain, quantized = losses(), losses(all_gather=INT8, reduce_scatter=REDUCE)
    assert plain[-1] < plain[0] / 3
    assert 0 < np.abs(quantized - plain).max() < 0.01 * plain[0]
