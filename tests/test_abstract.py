"""Models and optimizers without arrays: the script for real devices, on devices that are not here."""

import doctest
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from helpers import AUTO, EXPLICIT, count_ops, make_mesh, mean_square, shard_refused
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_topology import gpu, mesh_of_absent, needs_gpu_compiler, needs_tpu_compiler, tpu

import jfsdp
from jfsdp.inspect.topology import compiler_options


class Model(nnx.Module):
    """Two linear layers, a norm with statistics, dropout, and a bias that no 8 devices can share."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.second = nnx.Linear(32, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.dropout(self.norm(nnx.tanh(self.first(x)))))


@nnx.jit(donate_argnums=(0, 1))
def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(mean_square)(model, x)
    optimizer.update(model, grads)
    return loss


def build(mesh: Any, tx: Any = None) -> tuple[Model, nnx.Optimizer]:
    """What a user's script does, whatever the mesh."""
    policy = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)
    model = jfsdp.init(Model, mesh, units=nnx.Linear, mp_policy=policy)
    return model, nnx.Optimizer(model, tx or optax.adamw(1e-3), wrt=nnx.Param)


def batch_of(mesh: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((16, 16), "float32", sharding=NamedSharding(mesh, P("fsdp")))


def abstract_mesh(axis_type: Any = AUTO, size: int = 8) -> AbstractMesh:
    return AbstractMesh((size,), ("fsdp",), axis_types=(axis_type,))


def described(tree: Any) -> dict[str, Any]:
    """Shape, dtype and spec of every array by its path."""
    flat, _ = jax.tree_util.tree_flatten_with_path(nnx.state(tree))
    return {
        jax.tree_util.keystr(path): (leaf.shape, leaf.dtype, leaf.sharding.spec)
        for path, leaf in flat
    }


def assert_abstract(tree: Any, mesh: Any) -> None:
    leaves = jax.tree.leaves(nnx.state(tree))
    assert leaves
    assert {type(leaf) for leaf in leaves} == {jax.ShapeDtypeStruct}
    assert {leaf.sharding.mesh.shape_tuple for leaf in leaves} == {mesh.shape_tuple}


TRANSFORMATIONS = {
    "adamw": optax.adamw(1e-3),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=4),
    "clipped momentum": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)),
    "hyperparameters": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "accumulated": optax.MultiSteps(optax.adam(1e-3), every_k_schedule=2),
    "masked": optax.masked(optax.adam(1e-3), lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
}


# --------------------------------------------------------------------------------------------------
# Parity with arrays


@pytest.mark.parametrize("tx", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_an_abstract_optimizer_lies_as_one_of_arrays(tx):
    real_model, real = build(make_mesh(fsdp=8), tx)
    mesh = abstract_mesh()
    model, optimizer = build(mesh, tx)
    assert_abstract((model, optimizer), mesh)
    assert described(model) == described(real_model)
    assert described(optimizer) == described(real)
    assert optimizer.tx is tx


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
def test_an_abstract_model_on_a_mesh_of_real_devices_has_an_abstract_optimizer(axis_type):
    mesh = make_mesh(axis_type, fsdp=8)
    model = jfsdp.shard(nnx.eval_shape(Model), mesh, units=nnx.Linear)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    assert_abstract((model, optimizer), mesh)
    assert optimizer.opt_state[0].mu["first"]["kernel"].get_raw_value().sharding.spec == P(
        None, "fsdp"
    )
    assert optimizer.step.get_raw_value().sharding.spec == P()


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
def test_the_step_of_an_abstract_mesh_is_that_of_real_devices(axis_type):
    lowered = {}
    for mesh in (make_mesh(axis_type, fsdp=8), abstract_mesh(axis_type)):
        model, optimizer = build(mesh)
        traced = step.trace(model, optimizer, batch_of(mesh)).traced
        lowered[type(mesh)] = traced.lower(lowering_platforms=("cpu",))
    for kind in ("all_gather", "reduce_scatter"):
        there = count_ops(lowered[AbstractMesh], kind)
        assert there == count_ops(lowered[Mesh], kind) > 0


def test_init_of_a_function_that_shards_by_itself_is_abstract_too():
    mesh = abstract_mesh()

    def make() -> Model:
        model = Model()
        jfsdp.shard(model.first, mesh)
        return jfsdp.shard(model, mesh)

    assert_abstract(jfsdp.init(make), mesh)


def test_the_optimizer_of_an_unsharded_abstract_model_is_left_to_flax():
    jfsdp.init(Model, abstract_mesh())  # has wrapped nnx.Optimizer
    optimizer = nnx.Optimizer(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), optax.adam(1e-3), wrt=nnx.Param)
    assert isinstance(optimizer.step.get_raw_value(), jax.Array)


def test_a_model_initialized_on_an_abstract_mesh_has_a_plan():
    model, _ = build(abstract_mesh())
    assert [row.path for row in jfsdp.plan(model).replicated] == ["second.bias"]


# --------------------------------------------------------------------------------------------------
# Devices that are not here


def new_arrays(before: set[int]) -> list[Any]:
    return [x for x in jax.live_arrays() if id(x) not in before]


@pytest.mark.parametrize("name", [tpu("v5e:2x4"), gpu("h100:8")])
def test_nothing_of_the_script_makes_an_array(name):
    mesh = mesh_of_absent(name)
    build(mesh)
    before = {id(x) for x in jax.live_arrays()}
    kept = build(mesh)
    assert new_arrays(before) == []
    assert_abstract(kept, mesh)


@pytest.mark.parametrize(
    "name", [tpu("v5e:2x4"), pytest.param("h100:8", marks=[needs_gpu_compiler, pytest.mark.slow])]
)
def test_the_script_of_real_devices_compiles_for_absent_ones(name):
    mesh = mesh_of_absent(name)
    model, optimizer = build(mesh)
    lowered = step.lower(model, optimizer, batch_of(mesh)).lowered
    compiled = lowered.compile(compiler_options=compiler_options(mesh))
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.argument_size_in_bytes > 0
    assert "all-gather" in compiled.as_text()


@pytest.mark.parametrize(
    "name",
    [
        *map(tpu, ["v4:2x2x1", "v5p:2x2x1", "v6e:2x4", "v5e:16x16", "v5p:4x4x4"]),
        *map(gpu, ["a100:2", "h100:64", "h200:8", "b200:8"]),
    ],
)
def test_a_sum_over_shards_compiles_for_every_kind_of_device(name):
    mesh = mesh_of_absent(name, AUTO)
    x = jax.ShapeDtypeStruct((mesh.size, 128), "float32", sharding=NamedSharding(mesh, P("fsdp")))
    lowered = jax.jit(lambda x: x.sum(0)).lower(x)
    assert "all-reduce" in lowered.compile(compiler_options=compiler_options(mesh)).as_text()


@pytest.mark.parametrize("name", [tpu("v5e:2x4"), gpu("h100:8")])
def test_arrays_on_devices_that_are_not_here_are_refused_with_the_remedy(name):
    mesh = mesh_of_absent(name)
    text = shard_refused(ValueError, Model(), mesh, units=nnx.Linear)
    assert (
        f"the devices of the mesh (fsdp=8; {mesh.devices.flat[0].device_kind}) are not here" in text
    )
    assert "jfsdp.init(lambda: Model(...), mesh, ...)" in text
    assert "nnx.eval_shape(lambda: Model(...))" in text


@needs_tpu_compiler
def test_shard_takes_an_abstract_model_on_devices_that_are_not_here():
    mesh = mesh_of_absent("v5e:2x4")
    model = jfsdp.shard(nnx.eval_shape(Model), mesh, units=nnx.Linear)
    assert_abstract(model, mesh)


@needs_tpu_compiler
def test_the_example_of_topology_runs():
    (example,) = doctest.DocTestFinder(recurse=False).find(jfsdp.topology, globs={})
    for line in example.examples:
        line.options.pop(doctest.SKIP, None)
    failures: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(example, out=failures.append)
    assert result.attempted > 4
    assert not failures, "".join(failures)
