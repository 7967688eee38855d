"""What jfsdp needs of JAX that JAX has no public name for: the only file that uses `jax._src`.

Each use says which versions of JAX it was tried with; `tests/test_topology.py` notices when one is no
longer needed.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = [
    "compute_on",
    "cuda_topology",
    "function_of",
    "let_gpus_be_absent",
    "scan_counts",
    "scopes_of",
]


def compute_on(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """`jax.experimental.compute_on.compute_on` of jax 0.12.0.1, which jax 0.10.2 calls `compute_on2`."""
    module = importlib.import_module("jax.experimental.compute_on")
    return getattr(module, "compute_on2", module.compute_on)(function, **settings)


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many operands of a scan equation are constant, and how many are carried; the others are sliced.

    Args:
        params: those of the equation. jax 0.10.2 has the numbers in it, 0.12.0.1 a tree of all operands.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def scopes_of(equation: Any) -> str:
    """The scopes (`jax.named_scope`) that an equation was traced in, without those outside of its program.

    Args:
        equation: of a program; jax 0.10.2 and 0.12.0.1 keep them beside the place in the source.
    """
    return str(equation.source_info.name_stack)


def function_of(jaxpr: Any, consts: Sequence[Any] = ()) -> Callable[..., list[Any]]:
    """A program as a function.

    Args:
        jaxpr: the program. jax 0.10.2 keeps programs and their constants in two classes, 0.12.0.1 in one.
        consts: the values of its constants.
    """
    from jax.extend import core

    def function(*values: Any) -> list[Any]:
        bare = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
        return call(bare)(*consts, *values)

    def call(bare: Any) -> Callable[..., list[Any]]:
        closed = bare if hasattr(bare, "consts") else vars(core)["ClosedJaxpr"](bare, ())
        return core.jaxpr_as_fun(closed)

    return function if jaxpr.constvars else call(jaxpr)


def let_gpus_be_absent() -> None:
    """Let programs be lowered for GPUs on a machine that has none; a second call does nothing.

    Lowering asks which GPU backend "gpu" stands for, and JAX raises if none is there
    (jax-ml/jax#23971; jax 0.10.2 and 0.12.0.1). From here on it stands for CUDA then.
    """
    from jax._src import xla_bridge  # jax 0.10.2 to 0.12.0.1

    original: Callable[[str], str] = xla_bridge.canonicalize_platform
    if hasattr(original, "_jfsdp_original"):
        return

    @functools.wraps(original)
    def canonicalize_platform(platform: str) -> str:
        try:
            return original(platform)
        except RuntimeError as error:
            if platform != "gpu" or "Unknown backend" not in str(error):
                raise
            return "cuda"

    setattr(canonicalize_platform, "_jfsdp_original", original)  # noqa: B010
    xla_bridge.canonicalize_platform = canonicalize_platform


def cuda_topology(topology: str, target_config: str) -> list[Any]:
    """Compile-only devices of JAX's CUDA plugin, for the GPU that `target_config` describes.

    JAX registers the plugin by itself where JAX_PLATFORMS names a platform other than CUDA. Where it is
    unset, JAX first looks for cuDNN and the rest of CUDA, which compiling does not need, and gives the
    plugin up without them: then it is registered here, for compiling only.

    Args:
        topology: "slices x hosts x GPUs of a host".
        target_config: text proto of XLA's `GpuTargetConfigProto`.
    """
    from jax.experimental import topologies

    def make() -> list[Any]:
        return topologies.get_topology_desc(
            platform="cuda", topology_name="cuda", topology=topology, target_config=target_config
        ).devices

    with _quiet_unless_a_gpu_is_here():
        try:
            return make()
        except NotImplementedError:  # "topology not implemented for cuda"
            _register_cuda_for_compiling()
            return make()


def _register_cuda_for_compiling() -> None:
    from jax._src import xla_bridge  # jax 0.10.2 to 0.12.0.1

    plugin = _cuda_plugin()
    with _environment("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1"):
        plugin.initialize()
    # It registered a backend too. Where there is a GPU without the libraries JAX would try to start it,
    # and jax.devices() would fail; it now answers as it does without the plugin.
    xla_bridge._backend_factories.pop("cuda", None)


def _cuda_plugin() -> Any:
    for name in ("xla_cuda13", "xla_cuda12"):
        try:
            return importlib.import_module(f"jax_plugins.{name}")
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError("JAX's CUDA plugin is not installed")


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _quiet_unless_a_gpu_is_here() -> Iterator[None]:
    """Keep JAX from printing that CUDA cannot be used, where nobody could use it."""
    logger = logging.getLogger("jax._src.xla_bridge")  # jax 0.10.2 to 0.12.0.1

    def keep(record: logging.LogRecord) -> bool:
        return "jax_plugins.xla_cuda" not in record.getMessage()

    if any(pathlib.Path("/dev", name).exists() for name in ("nvidia0", "nvidiactl", "dxg")):
        yield
        return
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
