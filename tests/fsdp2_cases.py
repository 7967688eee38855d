"""Runs of PyTorch's FSDP2, rebuilt for jfsdp: models, weights, data, and comparing.

The recorded numbers lie in data/fsdp2_parity; its README.md says where they come from.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jfsdp

DATA = Path(__file__).parent / "data" / "fsdp2_parity"


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run of FSDP2, and the case (model, data, optimizers, meshes) it belongs to."""

    case: dict[str, Any]
    recorded: dict[str, Any]
    numbers: dict[str, Any]
    """The run itself, or the one that it is bitwise equal to."""

    def __str__(self) -> str:
        return f"{self.case['name']}-{self.recorded['name']}"

    @property
    def parameters(self) -> dict[str, Any]:
        return self.case["model"]["parameters"]

    @property
    def units(self) -> list[str]:
        """Paths of the units inside the root."""
        return self.case["model"]["units"][:-1]

    @property
    def policy(self) -> dict[str, Any]:
        return self.recorded["policy"]["every unit"]

    @property
    def is_bf16(self) -> bool:
        return self.policy["param_dtype"] == "bfloat16"

    @property
    def is_uneven(self) -> bool:
        """Whether no dimension of any parameter divides by the number of shards."""
        return self.case["name"].startswith("uneven")

    @property
    def is_transformer(self) -> bool:
        return self.case["model"]["name"] == "transformer"

    @property
    def frozen(self) -> frozenset[str]:
        return frozenset(name for name, grad in self.numbers["grads_step0"].items() if grad is None)

    @property
    def parts(self) -> int:
        """In how many parts weights stay after the forward, if fewer than they are stored in; else 0."""
        reshard = self.recorded["reshard_after_forward"]
        return 0 if isinstance(reshard, bool | None) else reshard

    def mesh(self) -> jax.sharding.Mesh:
        mesh = self.case["meshes"][self.recorded["mesh"]]
        shape, axes = tuple(mesh["shape"]), tuple(mesh["axes"])
        if self.parts:  # the axis, split in two
            (ranks,) = shape
            shape, axes = (ranks // self.parts, self.parts), ("outer", "inner")
        return jax.make_mesh(shape, axes, devices=jax.devices()[: mesh["ranks"]])

    def dims(self) -> jfsdp.DataParallelMeshDims | None:
        """Which axes of the mesh are data-parallel; None where their number says it."""
        return jfsdp.DataParallelMeshDims(shard=("outer", "inner")) if self.parts else None

    def initial(self, name: str) -> np.ndarray:
        """A parameter before training."""
        spec = self.parameters[name]
        i = np.arange(spec["shape"][0], dtype=np.float64)
        angle = 0.7 * i
        if len(spec["shape"]) == 2:
            i, j = i[:, None], np.arange(spec["shape"][1], dtype=np.float64)[None]
            angle = 0.7 * i + 1.3 * j + 0.31 * i * j
        return (spec["base"] + spec["amp"] * np.sin(angle + spec["phase"])).astype(np.float32)

    def model(self) -> nnx.Module:
        def weight(name: str) -> nnx.Param:
            return nnx.Param(jnp.asarray(self.initial(name)))

        return Transformer(weight) if self.is_transformer else MLP(weight)

    @property
    def loss_fn(self) -> Callable[..., Any]:
        return cross_entropy if self.is_transformer else squared_error

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of the global batch."""
        rows = self.case["data"]["global_rows"]
        return self.rows((step % 3) * rows + np.arange(rows))

    def microbatches(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Those of all microbatches, rank by rank: a rank has its rows of the first, then of the second."""
        data = self.case["data"]
        count, rows, each = (
            data[name] for name in ("microbatches_per_step", "global_rows", "rows_per_rank")
        )
        first = (step % 3) * count * rows
        numbers = first + np.arange(count * rows).reshape(count, rows // each, each)
        return self.rows(numbers.swapaxes(0, 1).reshape(-1))

    def rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of the rows of these numbers."""
        n = numbers[:, None]
        if self.is_transformer:
            t = np.arange(9)[None]
            tokens = ((7 * n + 3 * t + 5 * n * t + t * t) % 32).astype(np.int32)
            return tokens[:, :-1], tokens[:, 1:]
        i = np.arange(self.parameters["fc1.kernel"]["shape"][0])[None]
        j = np.arange(self.parameters["fc2.bias"]["shape"][0])[None]
        inputs = np.sin(0.9 * n + 0.4 * i + 0.37 * n * i)
        targets = 1.5 * np.cos(0.5 * n + 0.8 * j + 0.23 * n * j)
        return inputs.astype(np.float32), targets.astype(np.float32)

    def collectives(self) -> dict[tuple[str, str, int], tuple[int, int]]:
        """The least and the most elements of step 0, by kind, dtype and ranks in a group.

        What FSDP2 sent is the most. It gathers whole units for the backward pass; what that pass does
        not read, biases say, need not be gathered again. Nothing divides in the uneven cases: jfsdp
        gathers nothing there and all-reduces whole gradients, where FSDP2 pads.
        """
        sent = {
            (one["kind"].replace("_", "-"), one["dtype"], one["ranks_in_group"]): one["elements"]
            for one in self.recorded["collectives_step0"]
        }
        if self.is_uneven:
            size = sum(math.prod(spec["shape"]) for spec in self.parameters.values())
            dtypes = {dtype for kind, dtype, _ in sent if kind == "reduce-scatter"}
            return {("all-reduce", dtype, 4): (size, size) for dtype in dtypes}
        spared = self._unread_in_backward()
        if self.parts:
            # In the forward FSDP2 gathers over all 4 ranks at once. jfsdp sends the same bytes in two steps,
            # each over 2 ranks: what stays of the weights first, then the whole from that.
            (dtype,) = {dtype for kind, dtype, _ in sent if kind == "all-gather"}
            at_once = sent.pop(("all-gather", dtype, 4))
            sent["all-gather", dtype, 2] += at_once // self.parts + at_once
        return {k: (n - spared if k[0] == "all-gather" else n, n) for k, n in sent.items()}

    def _unread_in_backward(self) -> int:
        """Elements of resharded units that the backward pass does not read."""
        reshard = self.recorded["reshard_after_forward"]
        inner = tuple(f"{unit}." for unit in self.units)
        resharded = ("",) if reshard else () if reshard is False else inner  # prefixes of names
        unread = (".bias", "embed.weight", "position.weight")
        if not self.is_transformer:  # its input is the batch, which needs no gradient
            unread += ("fc1.kernel",)
        names = [n for n in self.parameters if n.startswith(resharded) and n.endswith(unread)]
        return sum(math.prod(self.parameters[name]["shape"]) for name in names)


def load(*cases: str) -> Iterator[Run]:
    """Every run of these cases."""
    for name in cases:
        case = json.loads((DATA / f"{name}.json").read_text())
        runs = {run["name"]: run for run in case["runs"]}
        for run in case["runs"]:
            yield Run(case, run, runs[run.get("numbers", run["name"]).split()[-1]])


# --------------------------------------------------------------------------------------------------
# Models. What is not a matrix product is evaluated in float32 and cast back once, as in the runs of
# FSDP2; rows are flattened before a product, which jax 0.12.0.1 otherwise rounds more than once.


def _f32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _add(x: jax.Array, y: jax.Array) -> jax.Array:
    y = y.reshape((1,) * (x.ndim - y.ndim) + y.shape)
    return (_f32(x) + _f32(y)).astype(x.dtype)


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(_f32(x), approximate=True).astype(x.dtype)


def _matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return (x.reshape(-1, x.shape[-1]) @ kernel).reshape(*x.shape[:-1], kernel.shape[-1])


Weight = Callable[[str], nnx.Param]


class Dense(nnx.Module):
    def __init__(self, path: str, weight: Weight):
        self.kernel = weight(f"{path}.kernel")
        self.bias = weight(f"{path}.bias")

    def __call__(self, x: jax.Array) -> jax.Array:
        return _add(_matmul(x, self.kernel[...]), self.bias[...])


class MLP(nnx.Module):
    def __init__(self, weight: Weight):
        self.fc1 = Dense("fc1", weight)
        self.fc2 = Dense("fc2", weight)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc2(_gelu(self.fc1(x)))


class LayerNorm(nnx.Module):
    def __init__(self, path: str, weight: Weight):
        self.scale = weight(f"{path}.scale")
        self.bias = weight(f"{path}.bias")

    def __call__(self, h: jax.Array) -> jax.Array:
        x = _f32(h)  # once: the gradients of two casts would be added in bfloat16
        x = x - x.mean(-1, keepdims=True)
        x = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        scale, bias = (_f32(p[...])[None, None] for p in (self.scale, self.bias))
        return (x * scale + bias).astype(h.dtype)


class Block(nnx.Module):
    def __init__(self, path: str, weight: Weight):
        self.ln1 = LayerNorm(f"{path}.ln1", weight)
        self.wqkv = weight(f"{path}.wqkv")
        self.wo = weight(f"{path}.wo")
        self.ln2 = LayerNorm(f"{path}.ln2", weight)
        self.fc1 = Dense(f"{path}.fc1", weight)
        self.fc2 = Dense(f"{path}.fc2", weight)

    def __call__(self, h: jax.Array) -> jax.Array:
        h = _add(h, _matmul(self._mixed(self.ln1(h)), self.wo[...]))
        return _add(h, self.fc2(_gelu(self.fc1(self.ln2(h)))))

    def _mixed(self, x: jax.Array) -> jax.Array:
        rows, length, width = x.shape
        qkv = _matmul(x, self.wqkv[...]).reshape(rows, length, 3, 2, width // 2)
        q, k, v = jnp.moveaxis(qkv, (2, 3), (0, 2))
        scores = _f32(q @ k.swapaxes(-1, -2)) / np.float32(math.sqrt(width // 2))
        causal = np.tril(np.ones((1, 1, length, length), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)).astype(x.dtype)
        return (weights @ v).swapaxes(1, 2).reshape(x.shape)


class Table(nnx.Module):
    """A weight of the root unit under a name of its own."""

    def __init__(self, name: str, path: str, weight: Weight):
        setattr(self, name, weight(f"{path}.{name}"))


class Transformer(nnx.Module):
    def __init__(self, weight: Weight):
        self.embed = Table("weight", "embed", weight)
        self.position = Table("weight", "position", weight)
        self.blocks = nnx.List([Block(f"blocks.{i}", weight) for i in range(2)])
        self.ln_f = LayerNorm("ln_f", weight)
        self.head = Table("kernel", "head", weight)

    def __call__(self, ids: jax.Array) -> jax.Array:
        embed = self.embed.weight[...]
        h = _add(_f32(embed)[ids].astype(embed.dtype), self.position.weight[...])
        for block in self.blocks:
            h = block(h)
        return _matmul(self.ln_f(h), self.head.kernel[...])


def squared_error(output: jax.Array, targets: jax.Array) -> jax.Array:
    return (_f32(output) - targets) ** 2


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(jax.nn.log_softmax(_f32(logits)), labels[..., None], axis=-1)
    return -picked[..., 0]


# --------------------------------------------------------------------------------------------------
# Comparing. Every function lists what is off by more than it may be.


def off_numbers(what: str, got: Any, recorded: Any, allowed: float) -> list[str]:
    """Compares numbers one by one; names the first index, the step, of each that is off."""
    return [
        f"{what} {i}: {g:.9g}, FSDP2 {r:.9g}: off by {abs(g - r):.3g}, allowed {allowed:.3g}"
        for i, (g, r) in enumerate(zip(got, recorded, strict=True))
        if not abs(g - r) <= allowed
    ]


def off_arrays(run: Run, which: str, got: dict[str, np.ndarray], tolerance: float) -> Iterator[str]:
    """Compares "grads_step0" or "params_final" by sums, largest and some elements of each array.

    The tolerance of a gradient is relative to its largest element.
    """
    recorded = {name: n for name, n in run.numbers[which].items() if n is not None}
    if got.keys() != recorded.keys():
        yield f"{which} has {sorted(got)}, FSDP2 {sorted(recorded)}"
        return
    for name, numbers in recorded.items():
        array = np.asarray(got[name], np.float64)
        bound = tolerance * (numbers["max_abs"] if which == "grads_step0" else 1)
        at = [tuple(index) for index in run.parameters[name]["at"]]
        elements = [array[index] for index in at]
        yield from off_numbers(f"{which}, {name}, element", elements, numbers["at"], bound)
        for key, value, allowed in (
            ("max_abs", np.abs(array).max(), bound),
            ("sum", array.sum(), array.size * bound),
            ("abs_sum", np.abs(array).sum(), array.size * bound),
            ("sum_sq", (array**2).sum(), bound * (2 * numbers["abs_sum"] + array.size * bound)),
        ):
            yield from off_numbers(f"{which}, {name}, {key}", [value], [numbers[key]], allowed)
