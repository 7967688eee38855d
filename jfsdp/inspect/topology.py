"""Devices that are not here: a TPU slice or a GPU cluster to compile for.

Their compilers come with `pip install 'jfsdp[tpu-aot]'` (libtpu) and `'jfsdp[gpu-aot]'` (JAX's CUDA
plugin and ptxas). Nothing runs on such devices and no array lies on them.
"""

from __future__ import annotations

import functools
import glob
import importlib.util
import math
import os
import pathlib
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh, SingleDeviceSharding

from jfsdp import _compat
from jfsdp.inspect.target import Device, first_device, known_targets
from jfsdp.inspect.target import Target as Target
from jfsdp.inspect.target import find_target as find_target
from jfsdp.inspect.target import target_of as target_of

__all__ = ["Target", "compiler_options", "find_target", "is_absent", "target_of", "topology"]

GPU_OPTIONS = {"xla_gpu_autotune_level": 0}

EXAMPLES = "'v5e:2x4', 'v5p:4x4x4', '2xv5p:4x4x4', 'h100:8', 'h100:64'"


def topology(name: str) -> tuple[Device, ...]:
    """Make devices that are not here, to compile a training step for them.

    Give them to `jax.make_mesh`. On such a mesh `jfsdp.init` returns an abstract model, `nnx.Optimizer`
    of it is abstract too, and the step is lowered and compiled as for real devices; it cannot be run.

    Args:
        name: the kind, a colon, and how many: "v5e:2x4" (chips of a TPU slice by its ICI axes; v4, v5e,
            v5p, v6e), "2xv5p:4x4x4" (two such slices, joined by DCN), "h100:8", "h100:64" (GPUs: up to 8
            of one host, or hosts of 8; a100, h100, h200, b200; A100 and H100 are those of 80 GB, all with
            NVLink).

    Returns:
        The devices. A TPU chip is one device, as in JAX on a TPU VM. `jax.make_mesh` wants the axes of
        a mesh to be products of the slice's, as it does there: (4, 4) or (16,) of "v6e:4x4", not (2, 8).
        It makes no mesh of several slices, there as here: those take a `jax.sharding.Mesh` of what
        `jax.experimental.mesh_utils.create_hybrid_device_mesh` returns.

    Raises:
        ValueError: the name is unknown, or there is no such slice or number; the legal ones are named.
            GPUs have no slices: more hosts are more GPUs.
        ImportError: the compiler for them is not installed; the extra that brings it is named.
        RuntimeError: another process holds libtpu.

    Cost: no device memory and no communication. The first call for a platform loads its compiler (under
    a second); later ones take milliseconds.

    References: `jax.experimental.topologies`; figures and sources: `jfsdp/inspect/targets.toml`.

    Example:
        >>> import jax, jfsdp
        >>> from flax import nnx
        >>> mesh = jax.make_mesh((8,), ("fsdp",), devices=jfsdp.topology("v5e:2x4"))  # doctest: +SKIP
        >>> model = jfsdp.init(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh)  # doctest: +SKIP
        >>> tuple(model.kernel.sharding.spec)  # doctest: +SKIP
        ('fsdp',)
        >>> jfsdp.topology("v5e:3x5")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: topology('v5e:3x5'): v5e has no slice 3x5. It has 1x1, 2x2, ...
    """
    if not isinstance(name, str):
        raise TypeError(f"topology takes a name such as {EXAMPLES}, got {type(name).__name__}.")
    family, _, size = name.partition(":")
    several = re.fullmatch(r"([1-9]\d*)x(.*)", family)
    slices, kind = (int(several[1]), several[2]) if several else (1, family)
    known = known_targets().get(kind)
    if known is None:
        raise ValueError(
            f"topology({name!r}): there is no such target. There are "
            f"{', '.join(sorted(known_targets()))}; for example {EXAMPLES}."
        )
    if known["platform"] == "tpu":
        return _tpus(name, kind, size, slices, known)
    if several:
        raise ValueError(
            f"topology({name!r}): only TPUs come in slices. Hosts of GPUs are counted together, as in "
            f"'{kind}:{2 * known['devices_per_host']}' for two."
        )
    return _gpus(name, size, known)


def is_absent(mesh_or_device: Mesh | AbstractMesh | Device) -> bool:
    """Whether these devices are only to compile for, so that no array can lie on them.

    Args:
        mesh_or_device: a mesh, or one device.

    Returns:
        False for an AbstractMesh, which has no devices at all.

    Example:
        >>> is_absent(jax.devices()[0])
        False
    """
    device = first_device(mesh_or_device)
    return device is not None and not device.client.local_devices()


def compiler_options(mesh_or_device: Mesh | AbstractMesh | Device) -> dict[str, Any]:
    """What compiling for these devices needs beside what the user says.

    XLA measures which GPU kernel is the fastest; for GPUs that are not here it has to be told not to.

    Args:
        mesh_or_device: a mesh, or one device.

    Returns:
        For `lowered.compile(compiler_options=...)`. {} for TPUs and for devices that are here.

    Cost: the first call for absent GPUs compiles an empty program (0.3 s), to see whether this version
    of XLA knows the option; one that does not is left out with a warning.

    Example:
        >>> compiler_options(jax.devices()[0])
        {}
    """
    device = first_device(mesh_or_device)
    if device is None or device.platform != "gpu" or not is_absent(device):
        return {}
    return dict(_gpu_options(device))


@functools.cache
def _gpu_options(device: Device) -> tuple[tuple[str, Any], ...]:
    scalar = jax.ShapeDtypeStruct((), "float32", sharding=SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x).lower(scalar).compile(compiler_options=GPU_OPTIONS)
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        warnings.warn(
            f"this version of XLA does not know all of {GPU_OPTIONS}: compiling without, which may choose "
            "other kernels. Please report it to jfsdp.",
            stacklevel=3,
        )
        return ()
    return tuple(GPU_OPTIONS.items())


# --------------------------------------------------------------------------------------------------
# TPUs


def _tpus(
    name: str, kind: str, shape: str, slices: int, known: dict[str, Any]
) -> tuple[Device, ...]:
    _check_shape(name, kind, shape, known)
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise ImportError(
            f"topology({name!r}) needs libtpu, the TPU compiler, which is not installed:\n"
            "  pip install 'jfsdp[tpu-aot]'"
        )
    options = dict(known.get("libtpu", {}))
    if shape == "1x1":  # libtpu 0.0.42 takes every host for one of 2x2
        options["chips_per_host_bounds"] = (1, 1, 1)
    if slices > 1:
        options["num_slices"] = slices
    with _environment_of_libtpu():
        try:
            made = topologies.get_topology_desc(f"{kind}:{shape}", platform="tpu", **options)
        except jax.errors.JaxRuntimeError as error:
            if "lockfile" not in str(error):
                raise
            raise RuntimeError(
                f"topology({name!r}): another process has loaded libtpu and holds its lock file. Either "
                "end that process, or let several share libtpu by setting ALLOW_MULTIPLE_LIBTPU_LOAD=1 "
                "in the environment of this one (jfsdp does, unless you have set it or TPUs are here). "
                "If no such process is left, remove the file that libtpu names: "
                f"{error}"
            ) from error
    return tuple(made.devices)


def _check_shape(name: str, kind: str, shape: str, known: dict[str, Any]) -> None:
    if shape in known["shapes"]:
        return
    legal = ", ".join(known["shapes"])
    cube = known.get("cube")
    if cube:
        sizes = [int(part) for part in shape.split("x") if part.isdecimal()]
        whole = "x".join(map(str, sizes)) == shape and len(sizes) == known["torus_dims"]
        if (
            whole
            and sizes == sorted(sizes)
            and sizes[0] > 0
            and not any(size % cube for size in sizes)
            and math.prod(sizes) <= known["max_devices"]
        ):
            return
        legal += (
            f", and three multiples of {cube} in ascending order ({cube}x{cube}x{cube}, "
            f"{cube}x{cube}x{2 * cube}, ...) of at most {known['max_devices']} chips"
        )
    raise ValueError(
        f"topology({name!r}): {kind} has no slice {shape or '(none)'}. It has {legal}."
    )


@contextmanager
def _environment_of_libtpu() -> Iterator[None]:
    """What libtpu reads when it is loaded, where there is no TPU; nothing that the user has set.

    Without the first it asks a metadata server which TPU this is, without the next two it complains on
    stderr that nobody says so (the type does not limit what can be compiled for), and without the last
    a second process cannot load it. Set for the call only: a program may start TPUs later.
    """
    needed = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    tpus_are_here = glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*")
    ours = {} if tpus_are_here else {k: v for k, v in needed.items() if k not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for key in ours:
            os.environ.pop(key, None)


# --------------------------------------------------------------------------------------------------
# GPUs


def _gpus(name: str, size: str, known: dict[str, Any]) -> tuple[Device, ...]:
    per_host = known["devices_per_host"]
    count = int(size) if size.isdecimal() else 0
    if count < 1 or (count > per_host and count % per_host):
        raise ValueError(
            f"topology({name!r}): the number of GPUs is 1 to {per_host} (one host), or a multiple of "
            f"{per_host} (hosts of {per_host}); for example 'h100:{per_host}', 'h100:{8 * per_host}'."
        )
    missing = [what for what, here in _gpu_compiler() if not here]
    if missing:
        raise ImportError(
            f"topology({name!r}) needs {' and '.join(missing)}, not installed:\n"
            "  pip install 'jfsdp[gpu-aot]'"
        )
    _compat.let_gpus_be_absent()
    hosts = max(1, count // per_host)
    return tuple(_compat.cuda_topology(f"1x{hosts}x{count // hosts}", _target_config(known)))


def _gpu_compiler() -> tuple[tuple[str, bool], ...]:
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    return (
        ("JAX's CUDA plugin", any(importlib.util.find_spec(plugin) for plugin in plugins)),
        ("ptxas (nvidia-cuda-nvcc)", _has_ptxas()),
    )


def _has_ptxas() -> bool:
    """Whether ptxas is where XLA looks for it: its PyPI package, PATH, a CUDA toolkit, XLA_FLAGS."""
    nvidia = importlib.util.find_spec("nvidia")
    packages = [pathlib.Path(path) for path in (nvidia and nvidia.submodule_search_locations) or ()]
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_DIR"), "/usr/local/cuda"]
    folders = [
        *(package / part / "bin" for package in packages for part in ("cuda_nvcc", "cu13")),
        *(pathlib.Path(toolkit) / "bin" for toolkit in toolkits if toolkit),
    ]
    told = "xla_gpu_cuda_data_dir" in os.environ.get("XLA_FLAGS", "")
    return (
        told
        or bool(shutil.which("ptxas"))
        or any((folder / "ptxas").exists() for folder in folders)
    )


def _target_config(known: dict[str, Any]) -> str:
    """Text proto of XLA's `GpuTargetConfigProto`: what the compiler would ask a GPU that is here."""
    xla = dict(known["xla"])
    major, minor = xla.pop("compute_capability").split(".")
    info = {
        # The same on all of them: CUDA C++ Programming Guide, compute capabilities 8.0 to 10.0.
        "threads_per_warp": 32,
        "threads_per_block_limit": 1024,
        "threads_per_core_limit": 2048,
        "registers_per_block_limit": 2**16,
        "registers_per_core_limit": 2**16,
        "shared_memory_per_block": 48 * 2**10,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "device_memory_size": known["xla_memory"],
        **xla,
    }
    fields = "\n".join(f"  {key}: {value}" for key, value in info.items())
    return f"""gpu_device_info {{
{fields}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{known["kinds"][0]}"
"""
