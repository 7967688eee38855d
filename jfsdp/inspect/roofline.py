"""From how many tokens per device on a step computes for longer than it communicates.

A training step of P parameters on T tokens per device takes 6 P T floating-point operations per device, two
for each parameter and token in the forward and four in the backward, and moves V bytes to every device
whatever T is. With C operations and W bytes a second the first takes longer than the second from

    T* = V C / (6 P W)

tokens on. Activations that are computed again, attention, and embedding tables that are only looked up
are left out; so is that XLA may not run the two at the same time.

References:
    Kaplan et al., Scaling Laws for Neural Language Models, 2020 (arXiv:2001.08361): 6 P T.
    Austin et al., How to Scale Your Model, 2025: the comparison, and the bandwidth of a torus.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from jax.sharding import Mesh

from .networks import NAMES, island_of, networks_of
from .rows import Row
from .target import Device, Target

__all__ = ["Network", "Roofline", "network_of", "roofline", "threshold"]

FLOPS_PER_PARAMETER_AND_TOKEN: Final = 6
_NEGLIGIBLE: Final = 0.01
_CUBE: Final = 4  # TPU v4 and v5p are wired as cubes of 4x4x4, whose opposite faces are joined
_FULL_AXIS: Final = 16  # TPU v5e and v6e: only an axis of a whole pod is closed to a ring


def threshold(
    bytes_per_device: float, *, parameters: int, peak_flops: float, bandwidth: float
) -> float:
    """Tokens per device from which a step is compute-bound: V C / (6 P W).

    Args:
        bytes_per_device: V, bytes that one device receives in one step.
        parameters: P, of the whole model.
        peak_flops: C, FLOP/s of one device.
        bandwidth: W, bytes/s into one device.

    Returns:
        T*; a step with fewer tokens per device waits for the network.

    Example:
        >>> threshold(6e9, parameters=10**9, peak_flops=200e12, bandwidth=100e9)
        2000.0
    """
    per_token = FLOPS_PER_PARAMETER_AND_TOKEN * parameters
    return bytes_per_device * peak_flops / (per_token * bandwidth)


@dataclasses.dataclass(frozen=True)
class Network:
    """What joins the devices of a group.

    Attributes:
        name: "ICI", "NVLink", "DCN" or "network".
        link_bandwidth: bytes/s in one direction of one link.
        links: how many of them bring bytes to a device at the same time; below 1 if groups share one.
    """

    name: str
    link_bandwidth: float
    links: float = 1

    @property
    def bandwidth(self) -> float:
        """Bytes/s into one device."""
        return self.link_bandwidth * self.links

    def __str__(self) -> str:
        each = f"{self.name} {self.link_bandwidth / 1e9:g} GB/s"
        return f"{each} x {self.links:.3g} links" if self.links != 1 else each


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Computation against the communication over some mesh axes, in one step.

    Attributes:
        axes: the mesh axes.
        network: what they run over.
        bytes_per_device: bytes that one device receives over them.
        parameters: of the whole model.
        peak_flops: FLOP/s of one device.
        tokens_per_device: of one step; None if it is not known.
    """

    axes: tuple[str, ...]
    network: Network
    bytes_per_device: float
    parameters: int
    peak_flops: float
    tokens_per_device: float | None = None

    @property
    def threshold(self) -> float:
        """Tokens per device from which the step is compute-bound."""
        return threshold(
            self.bytes_per_device,
            parameters=self.parameters,
            peak_flops=self.peak_flops,
            bandwidth=self.network.bandwidth,
        )

    @property
    def communication_seconds(self) -> float:
        """Time of the communication at full bandwidth."""
        return self.bytes_per_device / self.network.bandwidth

    @property
    def compute_seconds(self) -> float | None:
        """Time of the matrix products at peak FLOP/s; None without a number of tokens."""
        if self.tokens_per_device is None:
            return None
        per_token = FLOPS_PER_PARAMETER_AND_TOKEN * self.parameters
        return per_token * self.tokens_per_device / self.peak_flops

    @property
    def compute_bound(self) -> bool | None:
        """Whether there are tokens enough; None without a number of tokens."""
        return None if self.tokens_per_device is None else self.tokens_per_device >= self.threshold

    def as_dict(self) -> dict[str, object]:
        """The figures by name, for JSON."""
        return {
            "axes": list(self.axes),
            "network": str(self.network),
            "bandwidth": self.network.bandwidth,
            "bytes_per_device": self.bytes_per_device,
            "parameters": self.parameters,
            "peak_flops": self.peak_flops,
            "tokens_per_device": self.tokens_per_device,
            "threshold": self.threshold,
            "compute_bound": self.compute_bound,
        }

    def __str__(self) -> str:
        axes = f"ax{'e' if len(self.axes) > 1 else 'i'}s {', '.join(self.axes)}"
        limit = f"compute-bound from {math.ceil(self.threshold)} on {axes} ({self.network})"
        if self.tokens_per_device is None:
            return f"roofline: {limit}, in tokens per chip"
        waits = "" if self.compute_bound else ": bound by communication"
        return f"roofline: {self.tokens_per_device:g} tokens per chip, {limit}{waits}"


def roofline(
    rows: Iterable[Row],
    *,
    mesh: Mesh,
    target: Target,
    parameters: int,
    tokens: int | None = None,
) -> tuple[Roofline, ...]:
    """Holds a step's computation against its communication, for each set of mesh axes that it uses.

    Axes along which devices of several TPU slices or GPU hosts lie have a line for each of the two networks.

    Args:
        rows: what one step communicates: `Report.rows`.
        mesh: the mesh, of devices.
        target: what the devices are.
        parameters: number of parameters of the whole model.
        tokens: of one global batch, over all devices; None if it is not known.

    Returns:
        One for each set of axes and network, the longest communication first. Those that take less than 1 %
        of the communication time are left out.
    """
    received: dict[tuple[str, ...], float] = {}
    for row in rows:
        if row.axes and row.bytes_per_device:
            received[row.axes] = received.get(row.axes, 0.0) + row.bytes_per_device
    each = None if tokens is None else tokens / mesh.size
    networks = networks_of(mesh, target)
    found = []
    for axes, size in received.items():
        between = size * networks.share_along("all-gather", axes)
        parts = {network_of(mesh, axes, target): between or size}
        if 0 < between < size:
            parts[network_of(mesh, axes, target, inside=True)] = size - between
        found += [
            Roofline(axes, network, part, parameters, target.peak_flops, each)
            for network, part in parts.items()
        ]
    found.sort(key=lambda line: -line.communication_seconds)
    least = _NEGLIGIBLE * sum(line.communication_seconds for line in found)
    return tuple(line for line in found if line.communication_seconds >= least)


def network_of(mesh: Mesh, axes: Sequence[str], target: Target, *, inside: bool = False) -> Network:
    """The network over which the devices of one group along some mesh axes are joined.

    In a torus a group receives over two links in each dimension that it spans all round, and over one
    where it spans a part, or where the dimension is not closed to a ring: there the device at the end has
    one neighbor. Where other groups lie in between, all of them share the links. A group that is no box
    counts one link. Groups of several TPU slices or GPU hosts are bound by the network between them.

    Args:
        mesh: the mesh, of devices.
        axes: its axes that the group varies over.
        target: what the devices are.
        inside: only the devices of the group that are in one slice or host.
    """
    fast, slow = NAMES[target.platform]
    index = tuple(slice(None) if name in axes else 0 for name in mesh.axis_names)
    group = list(np.asarray(mesh.devices[index]).flat)
    if inside:
        first = island_of(group[0], target)
        group = [device for device in group if island_of(device, target) == first]
    if len({island_of(device, target) for device in group}) > 1:
        return Network(slow, target.network_bandwidth)
    if not target.torus_dims:
        return Network(fast, target.link_bandwidth, target.links)
    own, whole = _positions(group), _positions(list(mesh.devices.flat))
    if math.prod(map(len, own)) != len(group):
        return Network(fast, target.link_bandwidth)
    closed = _closed([len(each) for each in whole], target.torus_dims)
    links = sum(map(_links, own, map(len, whole), closed))
    return Network(fast, target.link_bandwidth, links or 1)


def _positions(devices: Sequence[Device]) -> list[list[int]]:
    """The positions that devices have in each dimension of the torus."""
    return [sorted(set(column)) for column in zip(*(d.coords for d in devices), strict=True)]


def _links(positions: list[int], size: int, closed: bool) -> float:
    """Links into a device along one dimension of `size`, of which a group has these positions."""
    if len(positions) == 1:
        return 0
    stride = (positions[-1] - positions[0]) / (len(positions) - 1)
    return (2 if closed and len(positions) * stride == size else 1) / stride


def _closed(bounds: Sequence[int], dims: int) -> list[bool]:
    """Which dimensions of a slice are closed to a ring."""
    if dims == 2:
        return [size == _FULL_AXIS for size in bounds]
    cubes = all(size % _CUBE == 0 for size in bounds)
    return [cubes] * len(bounds)
