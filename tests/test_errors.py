"""What `jfsdp.shard` refuses: the text names what to change, and the model is as it was."""

from collections.abc import Callable
from typing import Any

import jax
import pytest
from flax import nnx
from helpers import shard_refused
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import jfsdp
from jfsdp.comm import DefaultAllGather, DefaultReduceScatter

P = PartitionSpec


def make_mesh(**sizes: int) -> jax.sharding.Mesh:
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)])
        self.head = nnx.Linear(8, 6, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(scope="module")
def model() -> Model:
    """One for all tests: each of them leaves it as it was."""
    return Model(nnx.Rngs(0))


def names(*dims: str) -> Callable[[str, Any], Any]:
    """A shard_placement_fn that does something for one path only."""
    wanted, asked = dims
    return lambda path, leaf: asked if path == wanted else None


SETTINGS: dict[str, tuple[type[Exception], dict[str, Any], str]] = {
    "mp_policy": (
        TypeError,
        {"mp_policy": "bfloat16"},
        "mp_policy must be a jfsdp.MixedPrecisionPolicy, got 'bfloat16'.",
    ),
    "offload_policy": (
        TypeError,
        {"offload_policy": None},
        "offload_policy must be a jfsdp.OffloadPolicy, got None.",
    ),
    "ignored_params": (
        TypeError,
        {"ignored_params": 3},
        "ignored_params takes a Variable type such as nnx.LoRAParam, a glob over the paths of parameters "
        "such as 'lora.*' or '**.lora_a', a predicate f(path, parameter) -> bool, or several of them, got 3.",
    ),
    "reshard to a part of an axis": (
        ValueError,
        {"reshard_after_forward": 4},
        "reshard_after_forward=4: a weight can stay in 1 or 8 parts here, the sizes of the last shard axes "
        "together (fsdp=8). Split an axis in two, the inner one of that size: "
        'jax.make_mesh((2, 4), ("outer", "inner")) and '
        'dp_mesh_dims=DataParallelMeshDims(shard=("outer", "inner")).',
    ),
    "reshard to what does not divide": (
        ValueError,
        {"reshard_after_forward": 3},
        "reshard_after_forward=3: a weight can stay in 1 or 8 parts here, the sizes of the last shard axes "
        "together (fsdp=8). 3 does not divide the 8 shards.",
    ),
    "reshard to an unknown axis": (
        ValueError,
        {"reshard_after_forward": ("fsdp", "inner")},
        "reshard_after_forward=('fsdp', 'inner'): 'inner' is no axis of the mesh (fsdp=8). Weights can stay "
        "sharded over shard axes only: 'fsdp'.",
    ),
    "reshard to no axis": (
        ValueError,
        {"reshard_after_forward": ()},
        "reshard_after_forward=() names no axis. To keep whole weights pass False.",
    ),
    "reshard of another type": (
        TypeError,
        {"reshard_after_forward": 0.5},
        "reshard_after_forward must be True, False, None, the name of a shard axis, a tuple of such names, "
        "or a number of devices (int), got 0.5.",
    ),
    "all_gather that is a class": (
        TypeError,
        {"all_gather": DefaultAllGather},
        "all_gather must be a jfsdp.AllGather, got <class",
    ),
    "reduce_scatter that is an all_gather": (
        TypeError,
        {"reduce_scatter": DefaultAllGather()},
        "reduce_scatter must be a jfsdp.ReduceScatter, got <",
    ),
    "partitioning": (
        ValueError,
        {"partitioning": "automatic"},
        'partitioning must be "manual" or "auto", got \'automatic\'.',
    ),
    "promises in auto": (
        ValueError,
        {
            "partitioning": "auto",
            "mp_policy": jfsdp.MixedPrecisionPolicy(reduce_dtype="float32"),
            "reshard_after_forward": "fsdp",
            "all_gather": DefaultAllGather(),
            "reduce_scatter": DefaultReduceScatter(),
        },
        'partitioning="auto" cannot promise mp_policy.reduce_dtype=float32, '
        "reshard_after_forward='fsdp', all_gather=DefaultAllGather, "
        "reduce_scatter=DefaultReduceScatter: there XLA places the "
        'collectives and chooses their dtype. Drop it, or use partitioning="manual".',
    ),
    "dims of another type": (
        TypeError,
        {"dp_mesh_dims": "fsdp"},
        "dp_mesh_dims must be a jfsdp.DataParallelMeshDims, got str; for example "
        "DataParallelMeshDims(shard='fsdp').",
    ),
    "unknown axis": (
        ValueError,
        {"dp_mesh_dims": jfsdp.DataParallelMeshDims("model")},
        "DataParallelMeshDims.shard names the axis 'model', which the mesh does not have. Its axes: "
        "fsdp=8.",
    ),
    "in_specs that is no dict": (
        TypeError,
        {"in_specs": [P()]},
        "in_specs must be a dict with a PartitionSpec for each key, got [",
    ),
    "in_specs with a string": (
        TypeError,
        {"in_specs": {"mask": "fsdp"}},
        "in_specs['mask'] must be a jax.sharding.PartitionSpec, got 'fsdp'.",
    ),
    "in_specs over another axis": (
        ValueError,
        {"in_specs": {"mask": P(None, "model")}},
        "in_specs['mask'] = P(None, 'model') names the axis 'model'; only the data-parallel axes "
        "['fsdp'] can be named, the others are left to XLA.",
    ),
    "out_specs with a string": (
        TypeError,
        {"out_specs": {"loss": "fsdp"}},
        "out_specs must be a jax.sharding.PartitionSpec, got 'fsdp'.",
    ),
    "out_specs over another axis": (
        ValueError,
        {"out_specs": P("model")},
        "out_specs = P('model',) names the axis 'model'; only the data-parallel axes ['fsdp']",
    ),
    "state_specs that is no dict": (
        TypeError,
        {"state_specs": nnx.Cache},
        "state_specs must be a dict with a PartitionSpec for each key, got <class",
    ),
    "state_specs over another axis": (
        ValueError,
        {"state_specs": {nnx.Cache: P("model")}},
        "state_specs[Cache] = P('model',) names the axis 'model'; only the data-parallel axes",
    ),
    "unknown unit glob": (
        ValueError,
        {"units": "layers.*"},
        "units='layers.*' matches no module inside Model. It has modules of the classes Linear, List, "
        "at the paths blocks, blocks.0, blocks.1, head.",
    ),
    "unit selector of another type": (
        TypeError,
        {"units": [nnx.Linear, 3]},
        "units takes a module class, a glob over paths such as 'blocks.*', a predicate f(path, module) "
        "-> bool, or several of them, got 3.",
    ),
    "unit that is a container": (
        ValueError,
        {"units": ["blocks.*", "blocks"]},
        "blocks (List) is a container without a forward (__call__), so there is nothing to gather its "
        "parameters for. Shard the modules in it, or the module that calls them.",
    ),
    "placement that does not divide": (
        ValueError,
        {"units": "blocks.*", "shard_placement_fn": names("head.kernel", 1)},
        "head.kernel: shard_placement_fn shards dimension 1 of shape (8, 6) over fsdp=8, but 6 does "
        "not divide by 8. Choose a dimension that does, or return None to let jfsdp choose.",
    ),
    "placement in a unit": (
        ValueError,
        {"units": "blocks.*", "shard_placement_fn": names("blocks.1.kernel", 2)},
        "blocks.1.kernel: shard_placement_fn chose dimension 2, but the shape (16, 8) has 2 dimensions.",
    ),
    "placement of another type": (
        TypeError,
        {"shard_placement_fn": names("head.kernel", "last")},
        "head.kernel: shard_placement_fn must return a dimension (int), {dimension: axes}, (dimension, "
        "jfsdp.DataParallelMeshDims(...)) or None, got 'last'.",
    ),
    "layers that do not exist": (
        ValueError,
        {"stacked_axis": 1},
        "blocks.0.bias: stacked_axis=1 does not exist in shape (16,); it must be one of the 1",
    ),
}


@pytest.mark.parametrize(("kind", "settings", "text"), SETTINGS.values(), ids=SETTINGS)
def test_setting_is_refused(model, kind, settings, text):
    assert shard_refused(kind, model, **settings).startswith(text)


def test_unknown_unit_class_is_named(model):
    text = shard_refused(ValueError, model, units=[nnx.Linear, nnx.Conv])
    assert "flax.nnx" in text
    assert "Conv'> matches no module inside Model." in text


def test_mesh_of_three_axes_needs_dims(model):
    text = shard_refused(ValueError, model, make_mesh(a=2, b=2, c=2))
    assert text.startswith(
        "a mesh of 3 axes (a=2, b=2, c=2) needs dp_mesh_dims: say which axes shard"
    )


def test_mesh_of_another_type_is_refused(model):
    text = shard_refused(TypeError, model, [0, 1])
    assert text == "mesh must be a jax.sharding.Mesh (see jax.make_mesh), got list."


@pytest.mark.parametrize("setting", ["in_specs", "state_specs"])
def test_key_of_the_wrong_type_is_refused(setting):
    key = {"in_specs": 0, "state_specs": "Cache"}[setting]
    assert setting in shard_refused(TypeError, Model(nnx.Rngs(0)), **{setting: {key: P()}})


def test_stacked_axis_of_another_type_is_refused(model):
    assert "stacked_axis" in shard_refused(TypeError, model, stacked_axis="0")


def test_abstract_mesh_for_arrays_is_refused():
    mesh = AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    text = shard_refused(ValueError, Model(nnx.Rngs(0)), mesh)
    assert "AbstractMesh" in text
    assert "jax.make_mesh" in text
    assert "jfsdp.init(lambda: Model(...), mesh, ...)" in text


def test_error_of_the_user_s_placement_function_comes_through(model):
    def broken(path: str, leaf: Any) -> int:
        if path == "head.kernel":
            raise KeyError("mine")
        return 0

    assert shard_refused(KeyError, model, units="blocks.*", shard_placement_fn=broken) == "'mine'"
