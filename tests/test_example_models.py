"""The models in examples/models: they are the published ones, and their configs shard all of them."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_close, leaves, make_mesh
from jax.sharding import AbstractMesh, AxisType

import jfsdp

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "examples" / "models"
FAST = {"xla_backend_optimization_level": 0}  # compiling takes most of the time of these tests
FILES = ("transformer", "losses", "gpt2", "llama3", "vit")


@pytest.fixture(scope="module")
def zoo() -> Iterator[Any]:
    """The files of examples/models as modules."""
    sys.path.insert(0, str(MODELS))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in FILES})
    finally:
        sys.path.remove(str(MODELS))
        for name in FILES:
            sys.modules.pop(name, None)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def tokens(batch: int, time: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 64, (batch, time), np.int32)


def abstract(build: Callable[..., nnx.Module], *arguments: Any, **settings: Any) -> nnx.Module:
    """The model without its arrays."""
    return nnx.eval_shape(lambda: build(*arguments, rngs=nnx.Rngs(0), **settings))


def filled(build: Callable[..., nnx.Module], config: Any) -> nnx.Module:
    """The model with random numbers in all its parameters, those that start at 0 or 1 too."""
    kind, state = nnx.split(abstract(build, config))
    rng = np.random.default_rng(0)

    def fill(path: Any, leaf: Any) -> jax.Array:
        mean = float("scale" in jax.tree_util.keystr(path))
        return jnp.asarray(mean + 0.2 * rng.normal(size=leaf.shape), jnp.float32)

    return nnx.merge(kind, jax.tree_util.tree_map_with_path(fill, state))


def tiny_gpt2(zoo: Any, **settings: bool) -> nnx.Module:
    shape = {"vocabulary": 64, "width": 16, "layers": 2, "heads": 2, "context": 32}
    return filled(zoo.gpt2.GPT2, zoo.gpt2.GPT2Config(**shape, **settings))


def tiny_scanned_gpt2(zoo: Any) -> nnx.Module:
    return tiny_gpt2(zoo, scan=True, remat=True)


def tiny_llama(zoo: Any) -> nnx.Module:
    shape = {"vocabulary": 64, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 48}
    return filled(zoo.llama3.Llama, zoo.llama3.LlamaConfig(**shape))


def tiny_vit(zoo: Any) -> nnx.Module:
    shape = {"size": 8, "patch": 4, "width": 16, "layers": 2, "heads": 2, "classes": 8}
    return filled(zoo.vit.ViT, zoo.vit.ViTConfig(**shape, remat=True))


# --------------------------------------------------------------------------------------------------
# The published models

PUBLISHED = {
    ("gpt2", "gpt2_124m"): 124_439_808,
    ("llama3", "llama3_8b"): 8_030_261_248,
    ("llama3", "llama3_70b"): 70_553_706_496,
    ("vit", "vit_b16"): 86_567_656,
}


def parameters(model: nnx.Module) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


@pytest.mark.parametrize("source, name", PUBLISHED)
def test_model_has_the_published_number_of_parameters(zoo, source, name):
    model = abstract(getattr(getattr(zoo, source), name))
    assert parameters(model) == PUBLISHED[source, name]


def test_scanned_gpt2_has_the_published_number_of_parameters(zoo):
    assert parameters(abstract(zoo.gpt2.gpt2_124m, scan=True)) == PUBLISHED["gpt2", "gpt2_124m"]


# --------------------------------------------------------------------------------------------------
# Attention


def heads_of(time: int, heads: int, kv_heads: int) -> tuple[np.ndarray, ...]:
    return normal(0, 2, time, heads, 8), *(normal(i, 2, time, kv_heads, 8) for i in (1, 2))


def by_hand(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
    """All scores of all heads at once."""
    time, share = q.shape[1], q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, share, axis=2), jnp.repeat(v, share, axis=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    if causal:
        scores = jnp.where(jnp.tri(time, dtype=bool)[None, None], scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


@pytest.mark.parametrize(
    "block, causal",
    [
        pytest.param(4, True, id="causal, blocks"),
        pytest.param(5, True, id="causal, the last block not full"),
        pytest.param(12, True, id="causal, one block"),
        pytest.param(5, False, id="full, the last block not full"),
    ],
)
def test_attention_by_blocks_is_attention(zoo, block, causal):
    inputs, weight = heads_of(12, 4, 2), normal(3, 2, 12, 4, 8)

    @functools.partial(jax.jit, compiler_options=FAST)
    def values_and_gradients(inputs: Any) -> Any:
        def blocked(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return zoo.transformer.attention(q, k, v, causal=causal, block=block)

        functions = (blocked, lambda q, k, v: by_hand(q, k, v, causal))
        forward_and_backward = (jax.vjp(function, *inputs) for function in functions)
        return [(out, backward(weight)) for out, backward in forward_and_backward]

    got, expected = values_and_gradients(inputs)
    assert_close(got, expected, rtol=1e-5, atol=1e-5)


def largest(program: Any) -> int:
    """Elements of the largest array in a traced program."""
    shapes = re.findall(r"\w\[([\d,]+)\]", str(program))
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


def test_attention_holds_the_scores_of_one_block_in_forward_and_backward(zoo):
    batch, time, heads, block = 2, 128, 4, 8

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return zoo.transformer.attention(q, k, v, causal=True, block=block).sum()

    program = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*heads_of(time, heads, heads))
    assert largest(program) == batch * heads * time * block


def test_softmax_of_bfloat16_is_in_float32_and_the_products_are_not(zoo):
    inputs = [jnp.asarray(x, jnp.bfloat16) for x in heads_of(8, 2, 2)]

    def attend(*inputs: jax.Array) -> jax.Array:
        return zoo.transformer.attention(*inputs, causal=True)

    program = str(jax.make_jaxpr(attend)(*inputs))
    assert set(re.findall(r":(\w+)\[[\d,]+\] = exp ", program)) == {"f32"}
    products = re.findall(r"= dot_general\[.*?\] (\w+) (\w+)$", program, re.MULTILINE | re.DOTALL)
    assert len(products) == 2
    for name in {name for pair in products for name in pair}:
        assert re.search(rf"\b{name}:bf16\[", program), name


# --------------------------------------------------------------------------------------------------
# Layers


@nnx.jit
def forward(model: nnx.Module, batch: jax.Array) -> jax.Array:
    return model(batch)


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama])
def test_a_later_token_changes_no_earlier_logits(zoo, make):
    model, given, changed = make(zoo), tokens(1, 10), tokens(1, 10)
    changed[0, 6] = (changed[0, 6] + 1) % 64
    before, after = forward(model, given)[0], forward(model, changed)[0]
    np.testing.assert_array_equal(before[:6], after[:6])
    assert np.abs(before[6:] - after[6:]).max(axis=-1).min() > 1e-4


def test_vit_attends_to_all_patches(zoo):
    model, image = tiny_vit(zoo), normal(0, 1, 8, 8, 3)
    changed = np.tile(image, (5, 1, 1, 1))
    for patch in range(4):
        row, column = 4 * (patch // 2), 4 * (patch % 2)
        changed[1 + patch, row : row + 4, column : column + 4] += 1
    logits = forward(model, changed)
    assert np.abs(logits[1:] - logits[:1]).max(axis=-1).min() > 1e-3


def test_rotated_scores_depend_on_the_distance_alone(zoo):
    q, k = (jnp.tile(normal(i, 1, 1, 1, 16), (1, 50, 1, 1)) for i in (0, 1))
    position = jnp.arange(50.0)
    rotated = (zoo.llama3.rotate(x, position, 1e4)[0, :, 0] for x in (q, k))
    scores = jnp.einsum("qd,kd->qk", *rotated)
    for distance in (0, 2, 49):
        same = jnp.diagonal(scores, distance)
        np.testing.assert_allclose(same, same[0], rtol=1e-3, atol=1e-3)
    assert scores[0, 0] == pytest.approx(float(jnp.vdot(q[0, 0], k[0, 0])), rel=1e-5)
    assert np.unique(np.round(scores[0], 3)).size > 40


def test_rotation_of_bfloat16_is_in_float32(zoo):
    x, position = jnp.asarray(normal(0, 1, 4, 1, 16), jnp.bfloat16), jnp.arange(1000.0, 1004.0)
    rotated = zoo.llama3.rotate(x, position, 5e5)
    exact = zoo.llama3.rotate(x.astype(jnp.float32), position, 5e5)
    assert rotated.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rotated, exact.astype(jnp.bfloat16))


# --------------------------------------------------------------------------------------------------
# Losses


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    of_labels = np.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return float(np.mean(np.log(np.exp(logits).sum(-1)) - of_labels))


def test_next_token_loss_is_the_cross_entropy_of_each_next_token_in_float32(zoo):
    logits, given = jnp.asarray(normal(0, 2, 8, 64), jnp.bfloat16), tokens(2, 9)
    expected = cross_entropy(np.asarray(logits, np.float32), given[:, 1:])
    assert zoo.losses.next_token_loss(lambda tokens: logits[:, : tokens.shape[1]], given) == (
        pytest.approx(expected, rel=1e-5)
    )


def test_classification_loss_is_the_cross_entropy_in_float32(zoo):
    images, labels = jnp.asarray(normal(0, 8, 8), jnp.bfloat16), np.arange(8)
    expected = cross_entropy(np.asarray(images, np.float32), labels)
    assert zoo.losses.classification_loss(lambda images: images, images, labels) == (
        pytest.approx(expected, rel=1e-5)
    )


# --------------------------------------------------------------------------------------------------
# Stacks


def loss_and_gradients(zoo: Any, model: nnx.Module, batch: Any) -> tuple[jax.Array, Any]:
    loss = zoo.losses.classification_loss if "images" in batch else zoo.losses.next_token_loss

    kind, state = nnx.split(model)

    @functools.partial(jax.jit, compiler_options=FAST)
    def step(state: Any, batch: Any) -> Any:
        return jax.value_and_grad(lambda state: loss(nnx.merge(kind, state), **batch))(state)

    value, gradients = step(state, batch)
    return value, nnx.to_pure_dict(gradients)


def stacked(layers: Any) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *layers.values())


@pytest.fixture(scope="module")
def unrolled(zoo) -> tuple[Any, Any]:
    """State, and loss and gradients, of GPT-2 with a list of blocks, written as if of a stack."""
    model = tiny_gpt2(zoo)
    value, gradients = loss_and_gradients(zoo, model, {"tokens": tokens(2, 9)})
    state = nnx.to_pure_dict(nnx.state(model))
    for tree in (state, gradients):
        tree["blocks"] = stacked(tree["blocks"])
    return state, (value, gradients)


@pytest.mark.parametrize("remat", [pytest.param(False, marks=pytest.mark.slow), True])
def test_scanned_gpt2_is_the_unrolled_one(zoo, unrolled, remat):
    state, expected = unrolled
    model = tiny_gpt2(zoo, scan=True, remat=remat)
    nnx.update(model, state)
    got = loss_and_gradients(zoo, model, {"tokens": tokens(2, 9)})
    assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_remat_of_unrolled_blocks_changes_nothing(zoo, unrolled):
    model = tiny_gpt2(zoo, remat=True)
    value, gradients = loss_and_gradients(zoo, model, {"tokens": tokens(2, 9)})
    gradients["blocks"] = stacked(gradients["blocks"])
    assert_close((value, gradients), unrolled[1], rtol=1e-5, atol=1e-6)


def saved(zoo: Any, **settings: bool) -> int:
    """Elements that the forward of a tiny GPT-2 keeps for its backward."""
    kind, state = nnx.split(tiny_gpt2(zoo, **settings))

    def backward(state: Any) -> Any:
        return jax.vjp(lambda state: nnx.merge(kind, state)(tokens(8, 16)), state)[1]

    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(backward, state)))


@pytest.mark.parametrize("scan", [False, True])
def test_remat_keeps_less(zoo, scan):
    assert saved(zoo, scan=scan, remat=True) < 0.5 * saved(zoo, scan=scan, remat=False)


def test_scanned_llama_calls_its_layers_in_turn(zoo):
    model, given = tiny_llama(zoo), tokens(2, 9)
    kind, state = nnx.split(model.layers)
    layers = [nnx.merge(kind, jax.tree.map(lambda leaf, i=i: leaf[i], state)) for i in (0, 1)]

    @nnx.jit
    def in_turn(model: nnx.Module, layers: list[nnx.Module]) -> jax.Array:
        x = model.token(given)
        for layer in layers:
            x = layer(x)
        return model.head(model.norm(x))

    np.testing.assert_allclose(forward(model, given), in_turn(model, layers), rtol=1e-5, atol=1e-5)


def test_layers_of_a_stack_start_differently(zoo):
    stack = zoo.transformer.stack_layers(
        lambda rngs: nnx.Linear(4, 4, rngs=rngs), 2, rngs=nnx.Rngs(0)
    )
    assert np.abs(stack.kernel[0] - stack.kernel[1]).max() > 0.01


# --------------------------------------------------------------------------------------------------
# Sharded

TOKENS = {"tokens": tokens(8, 9)}
IMAGES = {"images": normal(0, 8, 8, 8, 3), "labels": np.arange(8)}
SHARDED = {
    "gpt2": (tiny_gpt2, TOKENS, {"units": ["blocks.*"]}),
    "gpt2 scanned": (tiny_scanned_gpt2, TOKENS, {"stack": "blocks"}),
    "llama": (tiny_llama, TOKENS, {"stack": "layers"}),
    "vit": (tiny_vit, IMAGES, {"units": ["blocks.*"]}),
}


def slow_but(*quick: str) -> list[Any]:
    """The names of SHARDED; those that are not `quick` are left out of the quick part."""
    return [pytest.param(n, marks=() if n in quick else pytest.mark.slow) for n in SHARDED]


@pytest.fixture(scope="module")
def unsharded(zoo) -> Any:
    """Loss and gradients of each model of SHARDED, in float32."""

    @functools.cache
    def compute(name: str) -> tuple[jax.Array, Any]:
        make, batch, _ = SHARDED[name]
        return loss_and_gradients(zoo, make(zoo), batch)

    return compute


def shard(model: nnx.Module, mesh: Any, stack: str = "", units: Any = (), **policy: Any) -> Any:
    if stack:
        jfsdp.shard(getattr(model, stack), mesh, stacked_axis=0, **policy)
    return jfsdp.shard(model, mesh, units=units, **policy)


@pytest.mark.parametrize("name", slow_but("llama", "vit"))
def test_sharded_model_is_the_unsharded_one(zoo, unsharded, name):
    make, batch, settings = SHARDED[name]
    model = shard(make(zoo), make_mesh(fsdp=8), **settings)
    assert jfsdp.plan(model).replicated == ()
    got = loss_and_gradients(zoo, model, batch)
    assert_close(got, unsharded(name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", slow_but("llama"))
def test_sharded_model_in_bfloat16_is_close_to_the_float32_one(zoo, unsharded, name):
    make, batch, settings = SHARDED[name]
    policy = jfsdp.MixedPrecisionPolicy(param_dtype="bfloat16", reduce_dtype="float32")
    model = shard(make(zoo), make_mesh(fsdp=8), mp_policy=policy, **settings)
    got, expected = loss_and_gradients(zoo, model, batch), unsharded(name)
    assert got[0] == pytest.approx(float(expected[0]), rel=1e-2)
    for path, leaf in leaves(expected[1]).items():
        error = np.linalg.norm(leaves(got[1])[path] - leaf) / np.linalg.norm(leaf)
        assert error < 0.05, path


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_model_in_bfloat16_multiplies_no_float32(zoo, name):
    make, batch, settings = SHARDED[name]
    policy = jfsdp.MixedPrecisionPolicy(param_dtype="bfloat16", reduce_dtype="float32")
    model = shard(make(zoo), make_mesh(fsdp=8), mp_policy=policy, **settings)
    given = batch["images"] if "images" in batch else batch["tokens"][:, :-1]
    lowered = nnx.jit(lambda model, given: model(given)).lower(model, given).as_text()
    operands = re.findall(r"stablehlo\.(?:dot_general|convolution).*: \((.*)\) ->", lowered)
    assert operands
    assert not [types for types in operands if "f32" in types]


# --------------------------------------------------------------------------------------------------
# Configs

CONFIGS = [
    path
    for path in sorted(ROOT.glob("configs/*.toml"))
    if "source" in tomllib.loads(path.read_text()).get("model", {})
]


@pytest.fixture(params=CONFIGS, ids=lambda path: path.stem)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return tomllib.loads(request.param.read_text())


def built(zoo: Any, config: dict[str, Any]) -> tuple[Any, nnx.Module]:
    model = config["model"]
    source = (ROOT / "configs" / model["source"]).resolve()
    assert source.is_file()
    module = getattr(zoo, source.stem)
    return module, abstract(getattr(module, model["build"]), **model["arguments"])


def test_there_are_configs():
    assert len(CONFIGS) == 9


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_starts_with_its_command(path):
    head = path.read_text().split("\n\n")[0]
    assert f"python -m jfsdp compile configs/{path.name}" in head


def test_config_has_as_many_devices_as_its_target(config):
    kind, _, shape = config["target"].partition(":")
    slices = int(kind.partition("x")[0]) if kind[0].isdigit() else 1
    devices = slices * math.prod(map(int, shape.split("x")))
    assert math.prod(config["mesh"].values()) == devices


def test_loss_and_optimizer_of_config_take_what_it_gives(zoo, config):
    module, model = built(zoo, config)
    step = config["step"]
    batch = {name: jax.ShapeDtypeStruct(**array) for name, array in config["batch"].items()}
    inspect.signature(getattr(module, step["loss"])).bind(model, **batch)
    assert isinstance(
        getattr(optax, step["optimizer"])(**step["arguments"]), optax.GradientTransformation
    )
    devices = math.prod(config["mesh"].values())
    assert all(array.shape[0] % devices == 0 for array in batch.values())


def test_config_shards_every_parameter(zoo, config):
    _, model = built(zoo, config)
    settings, axes = config["shard"], config["mesh"]
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    policy = {
        "dp_mesh_dims": jfsdp.DataParallelMeshDims(settings["shard"], settings.get("replicate")),
        "mp_policy": jfsdp.MixedPrecisionPolicy(settings["param_dtype"], settings["reduce_dtype"]),
    }
    for path in settings.get("stacked", ()):
        jfsdp.shard(getattr(model, path), mesh, stacked_axis=0, **policy)
    jfsdp.shard(model, mesh, units=settings.get("units", ()), **policy)
    assert jfsdp.plan(model).replicated == ()


def test_models_have_no_word_of_sharding():
    for name in FILES:
        text = (MODELS / f"{name}.py").read_text()
        assert re.findall(r"jfsdp|shard|mesh|PartitionSpec", text, re.IGNORECASE) == []
