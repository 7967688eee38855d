"""The configuration of train_lm.py: a TOML file read into dataclasses, mistakes told in one line."""

import difflib
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import text
from gpt import GPTConfig


class ConfigError(Exception):
    """A mistake that whoever wrote the configuration can fix: shown as one line."""


@dataclass(frozen=True)
class MeshConfig:
    replica: int = 1
    fsdp: int = 1


@dataclass(frozen=True)
class PolicyConfig:
    param_dtype: str = "float32"
    reduce_dtype: str = "float32"
    offload: str = "none"  # what lies in host memory between steps


@dataclass(frozen=True)
class TrainConfig:
    steps: int
    batch_size: int  # sequences, over all devices
    learning_rate: float
    output: str  # a folder
    microbatches: int = 1  # that the batch is split into, one after the other
    warmup: float = 0.05  # a fraction of the steps
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    validate_every: int = 100
    validation_batches: int = 8
    log_every: int = 10
    prompt: str = "def "
    sample_bytes: int = 200
    temperature: float = 0.8
    seed: int = 0


@dataclass(frozen=True)
class Config:
    model: GPTConfig
    data: text.DataConfig
    mesh: MeshConfig
    policy: PolicyConfig
    train: TrainConfig


TYPE_NAMES = {int: "an integer", float: "a number", str: "a string"}
MAY_BE_ZERO = ("dropout", "warmup", "weight_decay", "sample_bytes", "seed")
FRACTIONS = ("dropout", "warmup")
DTYPES = ("float32", "bfloat16")  # float16 would need loss scaling
OFFLOAD = ("none", "optimizer", "all")


@contextmanager
def blame(what: str) -> Iterator[None]:
    """Turn an error that a wrong value of `what` explains into a ConfigError."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what}: {error}") from error


def read_config(path: str, overrides: Iterable[str] = ()) -> Config:
    """The TOML file at `path`, with each `section.key=value` of `overrides` put in its place."""
    with blame("cannot be read"):
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{name} = {table!r} is in no [section]")
    for override in overrides:
        apply_override(tables, override)
    kinds = {section.name: section.type for section in fields(Config)}
    reject_unknown(tables, kinds, "section")
    sections = {name: read_section(name, kinds[name], tables.get(name, {})) for name in kinds}
    config = Config(**sections)
    check_sizes(config)
    return config


def check_sizes(config: Config) -> None:
    model, mesh, train = config.model, config.mesh, config.train
    check_divides("[model] width", model.width, model.heads, "heads")
    devices, parts = "data-parallel devices", mesh.replica * mesh.fsdp
    if train.microbatches > 1:
        devices, parts = f"{devices} x microbatches", parts * train.microbatches
    check_divides("[train] batch_size", train.batch_size, parts, devices)
    if not 0 < len(train.prompt.encode()) <= model.context:
        raise ConfigError(f"[train] prompt must have 1 to {model.context} bytes ([model] context)")


def apply_override(tables: dict[str, Any], override: str) -> None:
    name, equals, value = override.removeprefix("--").partition("=")
    section, dot, key = name.partition(".")
    if not (equals and dot):
        raise ConfigError(f"cannot read {override!r}; write section.key=value")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value  # a string whose quotes the shell took
    tables.setdefault(section, {})[key] = parsed


def read_section(name: str, kind: Any, table: dict[str, Any]) -> Any:
    known = {key.name: key for key in fields(kind)}
    reject_unknown(table, known, f"[{name}] key")
    for key in known.values():
        if key.name not in table and key.default is MISSING:
            raise ConfigError(f"[{name}] lacks {key.name}, {TYPE_NAMES[key.type]}")
    return kind(**{key: read_value(name, key, known[key].type, table[key]) for key in table})


def read_value(section: str, key: str, kind: type, value: Any) -> Any:
    shown = f"[{section}] {key} = {value!r} must be"
    if type(value) is not kind and (kind, type(value)) != (float, int):
        raise ConfigError(f"{shown} {TYPE_NAMES[kind]}")
    if key.endswith("_dtype") and value not in DTYPES:
        raise ConfigError(f"{shown} one of {', '.join(DTYPES)}")
    if key == "offload" and value not in OFFLOAD:
        raise ConfigError(f"{shown} one of {', '.join(OFFLOAD)}")
    if kind is not str and not (value >= 0 if key in MAY_BE_ZERO else value > 0):
        raise ConfigError(f"{shown} {'at least' if key in MAY_BE_ZERO else 'above'} 0")
    if key in FRACTIONS and value >= 1:
        raise ConfigError(f"{shown} below 1")
    return kind(value)


def reject_unknown(given: Iterable[str], known: Iterable[str], what: str) -> None:
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ConfigError(f"unknown {what} {name}{hint}; known: {', '.join(known)}")


def check_divides(where: str, size: int, parts: int, what: str) -> None:
    if size % parts:
        below = size // parts * parts
        use = f"{below} or {below + parts}" if below else parts
        raise ConfigError(f"{where} = {size} does not divide over {parts} {what}; use {use}")
