"""The Python file that a job's model and loss come from."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import pathlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jfsdp.cli.config import JobConfig, did_you_mean

__all__ = ["check_call", "function", "load", "one_line"]


def load(config: JobConfig) -> types.ModuleType:
    """Import the source of the model.

    Args:
        config: of the job. A source that ends in ".py" is a file, relative to the config's own; its
            folder comes first on `sys.path` while it is loaded, as for a script. Else it is a module.

    Raises:
        ConfigError: it is not there, or is no Python, or what it imports is not there.
    """
    source = config.model.source
    path = config.path.parent / source
    try:
        if not source.endswith(".py"):
            return importlib.import_module(source)
        if not path.is_file():
            raise config.error(
                "[model] source", f"there is no file {source} beside {config.path.name}"
            )
        return _run(path)
    except (ImportError, SyntaxError) as error:
        raise config.error("[model] source", f"{source}: {one_line(error)}") from error


def _run(path: pathlib.Path) -> types.ModuleType:
    """Load a file as a script is: its own folder is where its imports are looked for first."""
    spec = importlib.util.spec_from_file_location(f"_jfsdp_job_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    with _first_on_path(str(path.parent.resolve())):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _first_on_path(folder: str) -> Iterator[None]:
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def function(
    config: JobConfig, where: str, module: types.ModuleType, name: str
) -> Callable[..., Any]:
    """A function of the source.

    Args:
        config: of the job.
        where: table and key that name it.
        module: the source.
        name: its name.

    Raises:
        ConfigError: there is none.
    """
    found = getattr(module, name, None)
    if not callable(found):
        own = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise config.error(
            where, f"{config.model.source} has no function {name}{did_you_mean(name, own)}"
        )
    return found


def check_call(
    config: JobConfig, where: str, called: Callable[..., Any], names: Iterable[str], before: int
) -> None:
    """Check that a function can be called as it will be.

    Args:
        config: of the job.
        where: table and key that give the arguments.
        called: the function.
        names: of its keyword arguments.
        before: number of positional ones before them.

    Raises:
        ConfigError: it lacks one, or does not take one.
    """
    signature = inspect.signature(called)
    try:
        signature.bind(*[None] * before, **dict.fromkeys(names))
    except TypeError as error:
        own = list(signature.parameters)[before:]
        unknown = [name for name in names if name not in own]
        hint = did_you_mean(unknown[0], own) if unknown else ""
        name = getattr(called, "__name__", "it")
        raise config.error(where, f"{name}(): {error}{hint}") from error


def one_line(error: Exception) -> str:
    """An error's text without line breaks."""
    return " ".join(str(error).split())
