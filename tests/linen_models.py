"""The models of `models.py` in Linen: the same layers, the same parameters under the same names."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training import train_state
from helpers import batch_on
from jax.sharding import Mesh

import jfsdp

KEY = jax.random.key


class Block(nn.Module):
    """Dense(width) without bias, and tanh: one leaf."""

    width: int

    def setup(self):
        self.linear = nn.Dense(self.width, use_bias=False)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class Stack(nn.Module):
    """A list of blocks; `remat` puts the user's own nn.remat round each."""

    depth: int
    width: int
    remat: bool = False

    def setup(self):
        block: Any = nn.remat(Block) if self.remat else Block
        self.blocks = [block(self.width) for _ in range(self.depth)]

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class MLP(nn.Module):
    """With biases, one of which (10) divides by no mesh of the tests."""

    def setup(self):
        self.fc1 = nn.Dense(32)
        self.fc2 = nn.Dense(10)

    def __call__(self, x):
        return self.fc2(nn.gelu(self.fc1(x)))


class AttentionBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def setup(self):
        self.norm1 = nn.LayerNorm()
        self.attention = nn.MultiHeadDotProductAttention(2)
        self.norm2 = nn.RMSNorm()
        self.up = nn.Dense(32)
        self.down = nn.Dense(16)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nn.gelu(self.up(self.norm2(x))))


class Attention(nn.Module):
    """Two attention blocks on continuous inputs."""

    def setup(self):
        self.blocks = [AttentionBlock() for _ in range(2)]

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class ConvNet(nn.Module):
    """Convolution and BatchNorm."""

    def setup(self):
        self.conv = nn.Conv(8, (3, 3))
        self.norm = nn.BatchNorm(use_running_average=False)
        self.head = nn.Dense(16)

    def __call__(self, x):
        return self.head(jnp.mean(nn.relu(self.norm(self.conv(x))), axis=(1, 2)))


class TiedLM(nn.Module):
    """Embedding, a block, and the embedding again as the head."""

    def setup(self):
        self.embed = nn.Embed(32, 16)
        self.block = AttentionBlock()
        self.norm = nn.LayerNorm()

    def __call__(self, tokens):
        return self.embed.attend(self.norm(self.block(self.embed(tokens))))


class Layer(nn.Module):
    """One layer of a scanned stack, which returns what nn.scan wants: the carry, and nothing to stack."""

    def setup(self):
        self.up = nn.Dense(32)
        self.down = nn.Dense(16)

    def __call__(self, x):
        return x + self.down(nn.gelu(self.up(x))), None


def scan(body: Any, depth: int, **settings: Any) -> Any:
    """nn.scan with the layers' parameters along axis 0."""
    settings = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, **settings}
    return nn.scan(body, length=depth, **settings)


class Scanned(nn.Module):
    """`nn.scan` over layers, as many as the tests have devices: axis 0 is a tempting choice."""

    depth: int = 8
    remat: bool = False

    def setup(self):
        body: Any = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
        self.layers = scan(body, self.depth)()
        self.head = nn.Dense(8)

    def __call__(self, x):
        return self.head(self.layers(x)[0])


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, how it becomes units, and a batch."""

    make: Callable[[], nn.Module]
    batch: Any
    units: Any = ()

    def sharded(self, mesh: Any, **settings: Any) -> Any:
        """The model, sharded."""
        return jfsdp.shard(self.make(), mesh, units=self.units, **settings)


_BATCH = {name: case.batch for name, case in models.CASES.items()}

CASES = {
    "mlp": Case(MLP, _BATCH["mlp"], nn.Dense),
    "attention": Case(Attention, _BATCH["attention"], AttentionBlock),
    "conv": Case(ConvNet, _BATCH["conv"]),
    "tied": Case(TiedLM, _BATCH["tied"], AttentionBlock),
    "scanned": Case(Scanned, _BATCH["scanned"]),
}


# --------------------------------------------------------------------------------------------------
# Using them


class TrainState(train_state.TrainState):
    """With what `apply` mutates beside the parameters."""

    others: Any = None


def init(model: Any, x: Any) -> Any:
    """Its variables, of key 0."""
    return model.init(KEY(0), x)


def create(model: Any, x: Any, tx: optax.GradientTransformation) -> Any:
    """A train state."""
    others = dict(init(model, x))
    params = others.pop("params")
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx, others=others)


def mean_square(model: Any, variables: Any, *args: Any, **kwargs: Any) -> jax.Array:
    """A loss."""
    y: Any = model.apply(variables, *args, **kwargs)
    return jnp.mean(y.astype(jnp.float32) ** 2)


def gradients(model: nn.Module, variables: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The loss and its gradients under jit; keyword arguments are static."""
    loss = functools.partial(mean_square, model, **kwargs)
    return jax.jit(jax.value_and_grad(loss))(variables, *args)


@contextlib.contextmanager
def fast_compiler() -> Iterator[None]:
    """XLA without its costly passes, which change no number that is tested: half the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


def filled(tree: Any, seed: int = 0) -> Any:
    """Arrays in place of abstract ones, no two alike, laid as those say; numpy compiles nothing."""
    random = np.random.default_rng(seed)

    def fill(path: Any, leaf: Any) -> Any:
        positive = any(word in jax.tree_util.keystr(path) for word in ("scale", "var"))
        value = np.asarray(positive + random.normal(size=leaf.shape) / 5, leaf.dtype)
        placed = leaf.sharding is not None and isinstance(leaf.sharding.mesh, Mesh)
        return jax.device_put(value, leaf.sharding) if placed else value

    return jax.tree_util.tree_map_with_path(fill, tree)


def abstract(model: Any, x: Any) -> Any:
    """The variables of a module, abstract; of one that is sharded, with their shardings."""
    make = functools.partial(init, model, x)
    is_sharded = hasattr(model, "jfsdp")
    return jfsdp.init(make, abstract=True) if is_sharded else jax.eval_shape(make)


def assert_same(got: Any, expected: Any, tolerance: float = 1e-6) -> None:
    """The same pytree, boxes and all, with the same shapes and dtypes and nearly the same values."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True)
    for (path, one), other in pairs:
        name = jax.tree_util.keystr(path)
        assert (one.shape, one.dtype) == (other.shape, other.dtype), name
        if isinstance(other, jax.ShapeDtypeStruct):
            continue
        large = max(1.0, float(np.max(np.abs(other), initial=0)))
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * large, err_msg=name)


def assert_as_unsharded(
    plain: nn.Module, mesh: Any, x: Any, *, apply: Any = None, **settings: Any
) -> tuple[Any, Any]:
    """Shard a module; it has the same variables, loss and gradients as before.

    Args:
        plain: the module.
        mesh: the mesh.
        x: its argument, the batch.
        apply: static keyword arguments of `apply`.
        **settings: of `shard`.

    Returns:
        The module and its variables.
    """
    model = jfsdp.shard(plain, mesh, **settings)
    described = abstract(model, x)
    assert_same(described, abstract(plain, x))
    variables, expected = filled(described), filled(abstract(plain, x))
    got = gradients(model, variables, batch_on(mesh, x), **(apply or {}))
    assert_same(got, gradients(plain, expected, x, **(apply or {})))
    return model, variables


def nested(state: Any, *kinds: Any) -> dict[str, Any]:
    """The arrays of an NNX module or state as Linen nests them: {"blocks_0": {"linear": ...}}."""
    if isinstance(state, nnx.Module):
        state = nnx.state(state, *kinds)
    found: dict[str, Any] = {}
    for path, variable in nnx.to_flat_state(state):
        names: list[str] = []
        for part in path:
            if isinstance(part, int):
                names[-1] = f"{names[-1]}_{part}"
            else:
                names.append(str(part))
        inner = found
        for name in names[:-1]:
            inner = inner.setdefault(name, {})
        inner[names[-1]] = variable.get_raw_value()
    return found
