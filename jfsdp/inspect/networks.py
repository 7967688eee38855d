"""The two networks of a machine, and which bytes of a collective travel over the slower one.

TPU chips of one slice are joined by ICI, slices by DCN; GPUs of one host by NVLink, hosts by the network
between them. A slice or a host is an island here. Of a collective over several islands a part of the bytes
stays inside them:

- TPU: XLA takes it apart into one over the chips of each slice and one over the slices. Of N devices on S
  slices a device receives S - 1 of N - 1 parts from other slices.
- GPU: the ring of NCCL goes through all GPUs of a host before it leaves it. Of N steps, S go to another host,
  so that the devices receive S of N parts from there on average.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from jax.sharding import AbstractMesh, Mesh

from .collective import Collective
from .groups import Groups, along_axes, axes_of_pairs
from .target import Device, Target, target_of

__all__ = ["NAMES", "Networks", "is_slow", "island_of", "networks_of", "networks_of_mesh"]

NAMES: Final = {"tpu": ("ICI", "DCN"), "gpu": ("NVLink", "network")}
"""The faster and the slower network by platform."""


@dataclasses.dataclass(frozen=True)
class Networks:
    """The networks of a mesh's devices.

    Attributes:
        platform: "tpu" or "gpu".
        mesh_axes: names and sizes of the mesh's axes, in its order.
        islands: which slice or host each device is in, row-major over the mesh.
        devices: their ids, likewise.
    """

    platform: str
    mesh_axes: tuple[tuple[str, int], ...]
    islands: tuple[int, ...]
    devices: tuple[int, ...]

    @property
    def fast(self) -> str:
        """What joins the devices of an island."""
        return NAMES[self.platform][0]

    @property
    def slow(self) -> str:
        """What joins the islands."""
        return NAMES[self.platform][1]

    @property
    def island(self) -> str:
        """What the islands are called."""
        return {"tpu": "slice", "gpu": "host"}[self.platform]

    @property
    def several(self) -> bool:
        """Whether there is more than one island."""
        return len(set(self.islands)) > 1

    def across(self, axes: Iterable[str]) -> bool:
        """Whether groups of devices along these axes reach over more than one island."""
        return any(self._islands_in(group) > 1 for group in self._along(axes))

    def share(self, kind: str, groups: Groups) -> float:
        """The share of its bytes that a collective moves between islands.

        Args:
            kind: such as "all-gather".
            groups: positions in the mesh; of a permute, source and target.
        """
        if kind == "collective-permute":
            moved = [pair for pair in groups if len(set(pair)) > 1]
            return sum(self._islands_in(pair) > 1 for pair in moved) / max(len(moved), 1)
        return max((self._share_of(kind, group) for group in groups), default=0.0)

    def shared(self, record: Collective) -> Collective:
        """A collective of a program before compilation, with the share that it moves between islands."""
        if not self.several:
            return record
        if record.groups:
            share = self.share(record.kind, tuple(map(tuple, json.loads(record.groups))))
        elif record.kind == "collective-permute":
            # Between which devices is not recorded: at most all.
            share = float(self.across(record.axes))
        else:
            share = self.share_along(record.kind, record.axes)
        return dataclasses.replace(record, crossing=share)

    def share_along(self, kind: str, axes: Sequence[str]) -> float:
        """The share of a collective over these axes."""
        return self.share(kind, self._along(axes))

    def least_share(self, axes: Sequence[str]) -> float:
        """The least share of a gather or a reduction over these axes: an island receives each part once."""
        groups = self._along(axes)
        return max(((self._islands_in(g) - 1) / max(len(g) - 1, 1) for g in groups), default=0.0)

    def axes_of_part(self, groups: Groups) -> tuple[str, ...] | None:
        """The mesh axes of groups that are only the part inside an island, or only that between islands.

        Args:
            groups: positions in the mesh, perhaps of one island only.

        Returns:
            The axes over which the whole collective varies, in the mesh's order; None if these are no such
            parts of it.
        """
        axes = axes_of_pairs(groups[:1], dict(self.mesh_axes))
        if axes is None:
            return None
        parts = {part for group in self._along(axes) for part in self._parts(group)}
        return axes if parts.issuperset(map(frozenset, groups)) else None

    def _along(self, axes: Iterable[str]) -> Groups:
        return along_axes(dict(self.mesh_axes), axes)

    def _parts(self, group: Sequence[int]) -> list[frozenset[int]]:
        by_island: dict[int, list[int]] = {}
        for position in group:
            by_island.setdefault(self.islands[position], []).append(position)
        inside = [frozenset(part) for part in by_island.values()]
        return [*inside, *map(frozenset, zip(*by_island.values(), strict=False))]

    def _islands_in(self, group: Sequence[int]) -> int:
        return len({self.islands[position] for position in group})

    def _share_of(self, kind: str, group: Sequence[int]) -> float:
        counts = Counter(self.islands[position] for position in group)
        size, islands = len(group), len(counts)
        if islands == 1:
            return 0.0
        if kind == "all-to-all":
            outside = size**2 - sum(count**2 for count in counts.values())
            return outside / (size * (size - 1))
        return (islands - 1) / (size - 1) if self.platform == "tpu" else islands / size


def networks_of_mesh(mesh: Mesh | AbstractMesh) -> Networks | None:
    """The networks of a mesh; None if its devices are not known, such as CPUs.

    Args:
        mesh: of devices that are here or not.
    """
    target = target_of(mesh)
    return networks_of(mesh, target) if target is not None and isinstance(mesh, Mesh) else None


def networks_of(mesh: Mesh, target: Target) -> Networks:
    """The networks of a mesh of known devices.

    Args:
        mesh: of devices that are here or not.
        target: what they are.
    """
    devices = list(mesh.devices.flat)
    return Networks(
        platform=target.platform,
        mesh_axes=tuple(zip(map(str, mesh.axis_names), mesh.devices.shape, strict=True)),
        islands=tuple(island_of(device, target) for device in devices),
        devices=tuple(device.id for device in devices),
    )


def is_slow(name: str, networks: Networks | None) -> bool:
    """Whether a network is the one between TPU slices or GPU hosts.

    Raises:
        ValueError: the devices are not known, or have no such network.
    """
    if networks is None:
        raise ValueError(
            f"jfsdp.inspect: network={name!r}: which networks join the devices of this mesh is not known. "
            'It is of TPUs and GPUs, here or as jfsdp.topology("2xv5p:2x2x2") makes them.'
        )
    names = [networks.fast.lower(), networks.slow.lower()]
    if name.lower() not in names:
        raise ValueError(
            f"jfsdp.inspect: no network {name!r}: these devices have {networks.fast!r} inside a "
            f"{networks.island} and {networks.slow!r} between them."
        )
    return name.lower() == names[1]


def island_of(device: Device, target: Target) -> int:
    """Which slice of TPUs or host of GPUs a device is in."""
    if target.devices_per_host:
        return device.id // target.devices_per_host
    return getattr(device, "slice_index", None) or 0
