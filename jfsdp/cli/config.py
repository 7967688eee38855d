"""The file that describes a training job: TOML, read into dataclasses, mistakes told in one line."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import pathlib
import tomllib
from collections.abc import Iterable
from typing import Any, Final

__all__ = ["ArrayConfig", "ConfigError", "JobConfig", "StepConfig", "did_you_mean", "read_config"]


class ConfigError(Exception):
    """A mistake that whoever wrote the configuration can fix, in one line."""


@dataclasses.dataclass(frozen=True)
class ArrayConfig:
    """One array of the batch: its global shape and dtype."""

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The function that makes the model.

    Attributes:
        source: a Python file, or the name of a module.
        build: the function in it, called with `rngs=` and `arguments`.
        arguments: its other keyword arguments.
    """

    source: str
    build: str
    arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """The training step.

    Attributes:
        loss: a function in the model's source: `loss(model, **batch)` returns a scalar.
        optimizer: the name of a factory in optax.
        arguments: its keyword arguments.
        tokens: of one global batch, for the roofline; None if it is not said.
        microbatches: into how many a device splits its part of the batch.
        update_on: where the update of what lies in host memory is computed, "device" or "host"; None for what
            `jfsdp.update_optimizer` does by itself.
    """

    loss: str
    optimizer: str
    arguments: dict[str, Any]
    tokens: int | None = None
    microbatches: int = 1
    update_on: str | None = None


@dataclasses.dataclass(frozen=True)
class ShardConfig:
    """The policy, as `jfsdp.shard` takes it; `stacked` are paths of scanned stacks of layers.

    `offload` says what lies in host memory: "none", "all", "parameters" (and their gradients), or "optimizer"
    for the optimizer state; `offload_activations` names values that wait there for the backward.
    """

    shard: tuple[str, ...] = ()
    replicate: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    stacked: tuple[str, ...] = ()
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    reshard_after_forward: bool | int | tuple[str, ...] | None = None
    offload: str = "none"
    offload_activations: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class JobConfig:
    """A whole file.

    Attributes:
        path: the file.
        model: what is trained.
        batch: the loss's arguments after the model, by name.
        step: how it is trained.
        mesh: axes and their sizes, in order.
        shard: the policy.
        target: a machine by its name, as `jfsdp.topology` takes it; None for the devices that are here.
    """

    path: pathlib.Path
    model: ModelConfig
    batch: dict[str, ArrayConfig]
    step: StepConfig
    mesh: dict[str, int]
    shard: ShardConfig
    target: str | None = None

    @property
    def data_parallel_size(self) -> int:
        """Number of devices that a batch is split over."""
        return math.prod(self.mesh[axis] for axis in (*self.shard.replicate, *self.shard.shard))

    def error(self, where: str, text: str) -> ConfigError:
        """A mistake in this file.

        Args:
            where: table and key, such as "[mesh] fsdp".
            text: what is wrong with it.
        """
        return ConfigError(f"{self.path.name}: {where}: {text}")


TABLES: Final = {
    "model": {"source": str, "build": str, "arguments": dict},
    "step": {
        "loss": str,
        "optimizer": str,
        "arguments": dict,
        "tokens": int,
        "microbatches": int,
        "update_on": str,
    },
    "shard": {
        "shard": list,
        "replicate": list,
        "units": list,
        "stacked": list,
        "param_dtype": str,
        "reduce_dtype": str,
        "reshard_after_forward": object,
        "offload": str,
        "offload_activations": list,
    },
}
ARRAY: Final = {"shape": list, "dtype": str}
OPTIONAL: Final = ("arguments", "tokens", "microbatches", "update_on", *TABLES["shard"])
CHOICES: Final = {
    "[shard] offload": ("none", "all", "parameters", "optimizer"),
    "[step] update_on": ("device", "host"),
}
KINDS: Final = {
    str: "text",
    int: "a whole number above 0",
    dict: "a table, such as { width = 256 }",
    list: "a name or a list of names",
    object: "true, false, a whole number, or the names of shard axes",
}
FLOATS: Final = ("float32", "bfloat16", "float16")
DTYPES: Final = (*FLOATS, "int32", "int8", "int16", "uint8", "uint16", "uint32", "bool")


def read_config(path: str | os.PathLike[str]) -> JobConfig:
    """Read a job's file; nothing is imported or built.

    Args:
        path: the TOML file.

    Returns:
        What it says.

    Raises:
        ConfigError: it cannot be read, lacks or misspells a key, has a value of the wrong type, or its
            numbers contradict each other. The file, the table and the key are named, and what may be there.
    """
    file = pathlib.Path(path)
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file.name}: not TOML: {error}") from error
    return _Reader(file.name).config(file, tables)


def did_you_mean(name: str, known: Iterable[str], limit: int = 24) -> str:
    """The end of a message about an unknown name: a guess, and what is known unless it is too much."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    guess = f" (did you mean {close[0]}?)" if close else ""
    return f"{guess}; known: {', '.join(known)}" if len(known) <= limit else guess


class _Reader:
    def __init__(self, name: str) -> None:
        self.name = name

    def fail(self, text: str) -> ConfigError:
        return ConfigError(f"{self.name}: {text}")

    def config(self, path: pathlib.Path, tables: dict[str, Any]) -> JobConfig:
        self.known(tables, ("target", "model", "batch", "step", "mesh", "shard"), "table or key")
        for name in ("model", "batch", "step", "mesh"):
            if not isinstance(tables.get(name), dict) or not tables[name]:
                raise self.fail(f"[{name}] is missing")
        target = tables.get("target")
        if target is not None and not isinstance(target, str):
            raise self.fail(f'target = {target!r} must be a machine\'s name, such as "v5e:2x4"')
        model, step, shard = (self.table(name, tables.get(name, {})) for name in TABLES)
        config = JobConfig(
            path=path,
            model=ModelConfig(**{"arguments": {}, **model}),
            batch={name: self.array(name, table) for name, table in tables["batch"].items()},
            step=StepConfig(**{"arguments": {}, **step}),
            mesh=self.mesh(tables["mesh"]),
            shard=self.shard(shard, tables["mesh"]),
            target=target,
        )
        check_sizes(config)
        return config

    def table(self, name: str, table: Any) -> dict[str, Any]:
        if not isinstance(table, dict):
            raise self.fail(f"{name} = {table!r} must be a table, [{name}]")
        return self.keys(f"[{name}]", TABLES[name], table)

    def keys(self, where: str, kinds: dict[str, type], table: dict[str, Any]) -> dict[str, Any]:
        self.known(table, kinds, "key", where)
        for key in kinds:
            if key not in table and key not in OPTIONAL:
                raise self.fail(f"{where} lacks {key}, {KINDS[kinds[key]]}")
        return {
            key: self.value(f"{where} {key}", kinds[key], value) for key, value in table.items()
        }

    def value(self, where: str, kind: type, value: Any) -> Any:
        if kind is object and type(value) in (bool, int):
            right = True
        elif kind in (list, object):
            value = [value] if isinstance(value, str) else value
            right = isinstance(value, list) and all(isinstance(name, str) for name in value)
            value = tuple(value) if right else value
        else:
            right = type(value) is kind and (kind is not int or value > 0)
        if not right:
            raise self.fail(f"{where} = {value!r} must be {KINDS[kind]}")
        if where.endswith("_dtype"):
            self.one_of(where, value, FLOATS)
        if where in CHOICES:
            self.one_of(where, value, CHOICES[where])
        return value

    def one_of(self, where: str, value: Any, known: tuple[str, ...]) -> str:
        if value not in known:
            raise self.fail(f"{where} = {value!r} must be one of {', '.join(known)}")
        return value

    def array(self, name: str, table: Any) -> ArrayConfig:
        where = f"[batch.{name}]"
        if not isinstance(table, dict):
            raise self.fail(f"[batch] {name} must be a table, {where}, with shape and dtype")
        self.known(table, ARRAY, "key", where)
        for key in ARRAY:
            if key not in table:
                raise self.fail(f"{where} lacks {key}")
        shape = table["shape"]
        if not isinstance(shape, list) or not shape or not all(map(_is_size, shape)):
            raise self.fail(f"{where} shape = {shape!r} must be a list of whole numbers above 0")
        return ArrayConfig(tuple(shape), self.one_of(f"{where} dtype", table["dtype"], DTYPES))

    def mesh(self, table: dict[str, Any]) -> dict[str, int]:
        for axis, size in table.items():
            if not _is_size(size):
                raise self.fail(f"[mesh] {axis} = {size!r} must be {KINDS[int]}")
        return dict(table)

    def shard(self, table: dict[str, Any], mesh: dict[str, Any]) -> ShardConfig:
        for key in ("shard", "replicate"):
            for axis in table.get(key, ()):
                if axis not in mesh:
                    raise self.fail(
                        f"[shard] {key}: [mesh] has no axis {axis}{did_you_mean(axis, mesh)}"
                    )
        if twice := set(table.get("shard", ())).intersection(table.get("replicate", ())):
            raise self.fail(f"[shard] {', '.join(twice)} is in both shard and replicate")
        if not table.get("shard") and not table.get("replicate"):
            raise self.fail(
                f"[shard] lacks shard, the axis to shard over; [mesh] has {', '.join(mesh)}"
            )
        return ShardConfig(**table)

    def known(self, given: Iterable[str], known: Iterable[str], what: str, where: str = "") -> None:
        for name in given:
            if name not in known:
                place = f"{where}: " if where else ""
                raise self.fail(f"{place}unknown {what} {name}{did_you_mean(name, known)}")


def check_sizes(config: JobConfig) -> None:
    """Check that every array of the batch divides over the data-parallel devices.

    Raises:
        ConfigError: one does not; the next sizes that do are named.
    """
    devices, count = config.data_parallel_size, config.step.microbatches
    over = f"{devices} data-parallel devices ({_axes(config)})"
    if count > 1:
        devices, over = devices * count, f"{over} x {count} microbatches"
    for name, array in config.batch.items():
        size = array.shape[0]
        if size % devices:
            below = size // devices * devices
            use = f"{below} or {below + devices}" if below else devices
            raise config.error(
                f"[batch.{name}] shape",
                f"{size} does not divide over {over}; use {use}",
            )
    sizes = {name: array.shape[0] for name, array in config.batch.items()}
    if len(set(sizes.values())) > 1:
        raise config.error("[batch]", f"dimension 0 is the batch, but differs: {sizes}")


def _axes(config: JobConfig) -> str:
    axes = (*config.shard.replicate, *config.shard.shard)
    return " x ".join(f"{axis}={config.mesh[axis]}" for axis in axes)


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0
