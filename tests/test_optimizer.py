"""Every public optimizer of optax: its state lies by one rule, stays there, and computes the same."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    AUTO,
    EXPLICIT,
    assert_close,
    compilations,
    explicit_set,
    leaves,
    make_mesh,
    spec_entries,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optimizers import (
    EXCLUDED,
    FUNCTIONS,
    GROWING,
    MADE,
    NAMES,
    WEAKLY_TYPED,
    Problem,
    make,
)

from jfsdp.layout import named_sharding, shardings
from jfsdp.optimizer import init_optimizer

SHAPES = {"w": (16, 8), "b": (8,)}

# Small programs: LLVM's optimizations take a third of the time of these tests.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

# What optimizers are made of, what few use and what is slow to compile runs in the slow tests. The state of
# all is looked at in the quick ones.
SLOW = ("scale", "clip", "stateless", "add", "keep", "set", "lbfgs", "contrib.")
QUICK = ("contrib.muon", "contrib.schedule_free")
RUN = [
    pytest.param(name, marks=pytest.mark.slow)
    if name.startswith(SLOW) and name not in QUICK
    else name
    for name in NAMES
    if name not in GROWING
]


def values(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype("float32") for name, shape in SHAPES.items()}


def laid(tree: Any, mesh: Any) -> Any:
    """Every array with dimension 0 over S."""
    return jax.tree.map(lambda x: jax.device_put(x, named_sharding(mesh, P("S"), x.ndim)), tree)


@functools.cache
def real(name: str) -> Any:
    """The state that jfsdp makes on S8."""
    return init_optimizer(make(name), laid(Problem(name).tree(**values()), make_mesh(S=8)))


def expected_spec(path: str, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """P("S") for an array of w or b, behind the dimensions of a history; P() for all else."""
    for name, of in SHAPES.items():
        front = len(shape) - len(of)
        if path.endswith(f"['{name}']") and front >= 0 and shape[front:] == of:
            return (*(None,) * front, "S", *(None,) * (len(of) - 1))
    return (None,) * len(shape)


def assert_lies_by_the_rule(state: Any, mesh: Any) -> None:
    for path, leaf in leaves(state).items():
        assert leaf.sharding.mesh == mesh, path
        expected = expected_spec(path, leaf.shape)
        assert spec_entries(leaf.sharding.spec, leaf.ndim) == expected, path
        # In any other spelling the second step would compile again.
        assert leaf.sharding == named_sharding(mesh, leaf.sharding.spec, leaf.ndim), path


@pytest.mark.parametrize("name", NAMES)
def test_arrays_of_the_parameters_shape_lie_as_they_do_and_the_rest_on_all_devices(name: str):
    assert_lies_by_the_rule(real(name), make_mesh(S=8))


@pytest.mark.parametrize("name", NAMES)
def test_the_state_has_the_structure_and_values_that_optax_gives(name: str):
    params = jax.tree.map(jnp.asarray, Problem(name).tree(**values()))
    expected = make(name).init(params)
    assert jax.tree.structure(real(name)) == jax.tree.structure(expected)
    assert_close(real(name), expected)


def described(tree: Any, mesh: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=named_sharding(mesh, P("S"), x.ndim)
        ),
        tree,
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_state_of_abstract_parameters_is_the_real_one_without_arrays(name: str):
    """B53: every leaf, keys and counts included, has the sharding that the real one has."""
    abstract = leaves(
        init_optimizer(make(name), described(Problem(name).tree(**values()), make_mesh(S=8)))
    )
    arrays = leaves(real(name))
    assert abstract.keys() == arrays.keys()
    for path, leaf in abstract.items():
        assert type(leaf) is jax.ShapeDtypeStruct
        expected = arrays[path]
        assert (leaf.shape, leaf.dtype) == (expected.shape, expected.dtype), path
        assert jax.typeof(leaf) == jax.typeof(expected), path
        assert leaf.sharding == expected.sharding, path


@pytest.mark.parametrize("name", NAMES)
def test_the_rule_holds_on_explicit_axes(name: str):
    mesh = make_mesh(EXPLICIT, S=8)
    tree = described(Problem(name).tree(**values()), mesh)
    assert_lies_by_the_rule(init_optimizer(make(name), tree), mesh)


@dataclasses.dataclass(frozen=True)
class Run:
    """Four updates of w and b on S8 with `jfsdp.shardings` as the step's, and one without a mesh."""

    before: Any
    first: Any
    last: Any
    compiled: int
    unsharded: Any


def host(tree: Any) -> Any:
    """A copy that the next step does not donate."""
    return jax.tree.map(
        lambda x: x if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x), tree
    )


@functools.cache
def run(name: str) -> Run:
    problem, mesh = Problem(name), make_mesh(S=8)
    params, grads = laid(problem.tree(**values()), mesh), laid(values(seed=1), mesh)
    state = (params, init_optimizer(make(name), params))
    before = shardings(state)
    step = jax.jit(
        problem.unique_step,
        donate_argnums=(0, 1),
        out_shardings=before,
        compiler_options=QUICKLY,
    )
    # optax's scale_by_distance_over_gradients multiplies arrays of rank 1 and 2.
    with compilations() as compiled, jax.numpy_rank_promotion("allow"):
        state = step(*state, grads)
        first = host(state)
        for _ in range(3):
            state = step(*state, grads)
    count = compiled["unique_step"]
    with jax.numpy_rank_promotion("allow"):
        params, grads = jax.tree.map(jnp.asarray, (problem.tree(**values()), values(seed=1)))
        reference = jax.jit(problem.unique_step, compiler_options=QUICKLY)
        unsharded = reference(params, make(name).init(params), grads)
    return Run(before, first, state, count, unsharded)


@pytest.mark.parametrize("name", RUN)
def test_an_update_is_that_of_the_unsharded_optimizer(name: str):
    got, expected = leaves(run(name).first), leaves(run(name).unsharded)
    arrays = {path for path, x in got.items() if isinstance(x, np.ndarray)}
    assert_close({p: got[p] for p in arrays}, {p: expected[p] for p in arrays})


@pytest.mark.parametrize("name", RUN)
def test_four_donated_steps_compile_once(name: str):
    assert run(name).compiled == (2 if name in WEAKLY_TYPED else 1)


@pytest.mark.parametrize("name", RUN)
def test_the_state_stays_where_it_is(name: str):
    assert shardings(run(name).last) == run(name).before


def test_every_transformation_of_optax_is_tested_or_excluded_with_a_reason():
    """A new one fails here until MADE, EXTRA or EXCLUDED says how to run it, or why not."""
    needs = {
        name
        for name in set(FUNCTIONS) - set(MADE) - set(EXCLUDED)
        if required(FUNCTIONS[name]) - {"learning_rate"}
    }
    assert not needs, "say in tests/optimizers.py how to make these"
    assert set(EXCLUDED) | set(MADE) <= {*FUNCTIONS, "MultiSteps"}, "optax no longer has these"
    assert all(EXCLUDED.values())


def required(function: Any) -> set[str]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.default is p.empty and p.kind not in kinds}


def test_factored_moments_are_whole_on_every_device():
    state = leaves(real("adafactor"))
    factored = {path: x for path, x in state.items() if "v_row" in path or "v_col" in path}
    assert {x.shape for x in factored.values()} == {(8,), (16,), (1,)}
    assert {x.sharding for x in factored.values()} == {NamedSharding(make_mesh(S=8), P())}


def test_a_history_of_gradients_is_sharded_behind_its_own_dimension():
    """Whole, the memory of L-BFGS is 20 times the parameters on every device."""
    (memory,) = (x for p, x in leaves(real("lbfgs")).items() if "diff_params_memory['w']" in p)
    assert memory.shape == (10, 16, 8)
    assert memory.sharding.spec == P(None, "S")


@pytest.mark.parametrize("name", ["adam", "contrib.schedule_free"])
def test_on_explicit_axes_the_types_keep_the_state_in_place(name: str):
    """Without out_shardings: 4 steps compile once and change no sharding."""
    with explicit_set(S=8) as mesh:
        params, grads = laid(values(), mesh), laid(values(seed=1), mesh)
        state = (params, init_optimizer(make(name), params))
        before = shardings(state)
        step = jax.jit(Problem(name).unique_step, donate_argnums=(0, 1))
        with compilations() as compiled:
            for _ in range(4):
                state = step(*state, grads)
    assert compiled["unique_step"] == 1
    assert shardings(state) == before


def test_moments_need_no_out_shardings_on_auto_axes():
    mesh = make_mesh(AUTO, S=8)
    params, grads = laid(values(), mesh), laid(values(seed=1), mesh)
    state = (params, init_optimizer(optax.adam(0.01), params))
    before = shardings(state)
    step = jax.jit(Problem("adam").unique_step)
    with compilations() as compiled:
        for _ in range(4):
            state = step(*state, grads)
    assert compiled["unique_step"] == 1
    assert shardings(state) == before
