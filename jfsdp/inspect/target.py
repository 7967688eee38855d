"""The hardware that jfsdp knows: how much memory, how fast, how connected (figures in targets.toml)."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import tomllib
from typing import Any, TypeAlias

from jax.sharding import AbstractMesh, Mesh

__all__ = ["Device", "Target", "find_target", "first_device", "known_targets", "target_of"]

Device: TypeAlias = Any
"""A `jax.Device`, which jaxlib does not declare as a type."""


@dataclasses.dataclass(frozen=True)
class Target:
    """One kind of TPU or GPU. A TPU chip (both of its cores) or a GPU is one device.

    Args:
        name: as `jfsdp.topology` has it before the colon: "v5e", "h100".
        platform: "tpu" or "gpu".
        chips: how many devices the mesh has, or the machine or topology that the device belongs to.
        memory_bytes: HBM per device as it is sold.
        usable_memory_bytes: what the compiler lets one program have of it.
        peak_flops: dense bfloat16 FLOP/s per device.
        link_bandwidth: bytes/s in one direction of one link: of an ICI link (TPU); of all NVLinks of
            a GPU together.
        links: such links per device: `link_bandwidth * links` leave it at most.
        torus_dims: dimensions of the ICI torus, two links each; 0 where every device of a host reaches
            every other alike (NVLink).
        network_bandwidth: bytes/s per device in one direction between TPU slices or GPU hosts.
        devices_per_host: how many GPUs share NVLink; 0 for TPUs, where ICI joins hosts.
        source: where each figure is from.
        host_memory_bytes: a device's share of its host's memory; None where there are hosts of many sizes.
    """

    name: str
    platform: str
    chips: int
    memory_bytes: int
    usable_memory_bytes: int
    peak_flops: float
    link_bandwidth: float
    links: int
    torus_dims: int
    network_bandwidth: float
    devices_per_host: int
    source: str
    host_memory_bytes: int | None = None


@functools.cache
def known_targets() -> dict[str, dict[str, Any]]:
    """What targets.toml says, by name."""
    return tomllib.loads(
        importlib.resources.files("jfsdp.inspect").joinpath("targets.toml").read_text("utf-8")
    )


def find_target(device: Device) -> Target | None:
    """The Target of a device, here or not, by its `device_kind`.

    Args:
        device: of `jax.devices()` or `jfsdp.topology`.

    Returns:
        None for CPUs and for what targets.toml does not know.

    Example:
        >>> import jax
        >>> find_target(jax.devices("cpu")[0]) is None
        True
    """
    return _target(device, device.client.device_count())


def target_of(mesh: Mesh | AbstractMesh) -> Target | None:
    """The Target of a mesh's devices; None if it has none, or as `find_target`.

    Args:
        mesh: of devices that are here or not.
    """
    device = first_device(mesh)
    return None if device is None or isinstance(mesh, AbstractMesh) else _target(device, mesh.size)


def first_device(mesh_or_device: Mesh | AbstractMesh | Device) -> Device | None:
    """The first device of a mesh, or the device itself; None for a mesh without devices."""
    if isinstance(mesh_or_device, AbstractMesh):
        return None
    if isinstance(mesh_or_device, Mesh):
        return next(iter(mesh_or_device.devices.flat), None)
    return mesh_or_device


def _target(device: Device, chips: int) -> Target | None:
    for name, known in known_targets().items():
        if device.device_kind in known["kinds"]:
            return Target(
                name=name,
                platform=known["platform"],
                chips=chips,
                memory_bytes=known["memory"],
                usable_memory_bytes=known["usable_memory"],
                peak_flops=known["peak_flops"],
                link_bandwidth=known["link_bandwidth"],
                links=known["links"],
                torus_dims=known["torus_dims"],
                network_bandwidth=known["network_bandwidth"],
                devices_per_host=known.get("devices_per_host", 0),
                source="\n".join(f"{key}: {text}" for key, text in known["sources"].items()),
                host_memory_bytes=known.get("host_memory"),
            )
    return None
