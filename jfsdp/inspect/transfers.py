"""What a step moves between host memory and the devices, and what is done with host memory beside that."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeAlias

from .collective import nbytes
from .contract import Promise
from .table import human_bytes

__all__ = ["HostWork", "Side", "Traffic", "Transfer", "least_bytes", "traffic_line"]

Side: TypeAlias = Literal["device", "host"]


@dataclasses.dataclass(frozen=True)
class Transfer:
    """An array, or a part of one, on its way between the memories of one device and its host.

    Attributes:
        source: "host" or "device".
        target: likewise. From host to host is the device's own doing: both ways over its link.
        dtype: NumPy or ml_dtypes name.
        shape: what is moved at once, on one device.
        executions: how often in one step: 1, or the product of the trip counts of the loops around it.
        unknown_trips: whether a loop around it has a trip count that cannot be read; it counts once.
        phase: "forward", "backward" or "update"; "" if the compiler dropped the names.
        instruction: of the compiled program; "" before compilation.
    """

    source: Side
    target: Side
    dtype: str
    shape: tuple[int, ...]
    executions: int = 1
    unknown_trips: bool = False
    phase: str = ""
    instruction: str = ""

    @property
    def total_bytes(self) -> float:
        """Bytes of all executions on one device, without padding."""
        return self.executions * nbytes(self.shape, self.dtype)


@dataclasses.dataclass(frozen=True)
class HostWork:
    """Something that a compiled program computes with arrays in host memory.

    Attributes:
        where: "host" if the host does it, "device" for a kernel that works on host memory over the link.
        instruction: of the compiled program.
        operation: the first operation of its name that says where it comes from; "" if none does.
        bytes: of the arrays in host memory that it reads and writes, on one device.
        asked: whether `compute_on` asked for it, or it does no more than copy.
    """

    where: Side
    instruction: str
    operation: str
    bytes: float
    asked: bool


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one step moves between host memory and one device.

    Attributes:
        transfers: in program order.
        work: what is computed on the host, or by the device on host memory; only of compiled programs.
        least: the least bytes to the device and back by the policies; None if there are no policies, or not
            all is counted.
        unseen: whether arrays lie in "unpinned_host", of whose moves jaxprs do not tell.
    """

    transfers: tuple[Transfer, ...] = ()
    work: tuple[HostWork, ...] = ()
    least: tuple[float, float] | None = None
    unseen: bool = False

    @property
    def to_device(self) -> float:
        """Bytes that one device receives from host memory in one step."""
        return self.bytes("device")

    @property
    def to_host(self) -> float:
        """Bytes that one device sends to host memory in one step."""
        return self.bytes("host")

    def bytes(self, target: Side, phase: str | None = None) -> float:
        """Bytes that come from the other side.

        Args:
            target: "device" or "host".
            phase: only of this phase of the step; None for all.
        """
        return sum(
            each.total_bytes
            for each in self.transfers
            if each.target == target != each.source and phase in (None, each.phase)
        )

    def as_dict(self) -> dict[str, Any]:
        """The sums, the least bytes, and everything one by one, for JSON."""
        least = self.least or (None, None)
        return {
            "bytes_to_device": self.to_device,
            "bytes_to_host": self.to_host,
            "least_bytes_to_device": least[0],
            "least_bytes_to_host": least[1],
            "unseen": self.unseen,
            "transfers": [
                dataclasses.asdict(each) | {"total_bytes": each.total_bytes}
                for each in self.transfers
            ],
            "work": [dataclasses.asdict(each) for each in self.work],
        }


def least_bytes(
    promises: tuple[Promise, ...], state: int, *, updates: bool, on_host: bool
) -> tuple[float, float]:
    """The least that one step moves to the device and back by its policies.

    Args:
        promises: one for each parameter.
        state: bytes of optimizer state that one device keeps on the host.
        updates: whether the step updates the parameters.
        on_host: whether the host does that, with what lies there already.
    """
    there = sum(promise.fetched for promise in promises)
    back = sum(promise.returned for promise in promises)
    if updates and not on_host:
        kept = sum(p.bytes_at_rest for p in promises if p.memory_kind is not None)
        there, back = there + 2 * kept + state, back + kept + state
    return there, back


def traffic_line(traffic: Traffic | None) -> str:
    """What is moved, in a line for each thing to say; "" if nothing is, and nothing was to be."""
    if traffic is None:
        return ""
    if not (traffic.transfers or traffic.work or any(traffic.least or ()) or traffic.unseen):
        return ""
    least = traffic.least or (None, None)
    unknown = "+" * any(each.unknown_trips for each in traffic.transfers)
    parts = [
        f"{human_bytes(size)}{unknown} {where}{_against(size, minimum)}"
        for size, where, minimum in (
            (traffic.to_device, "to the device", least[0]),
            (traffic.to_host, "back", least[1]),
        )
    ]
    lines = [f"host memory: {', '.join(parts)}, per device and step"]
    if unknown:
        lines.append("+ inside a loop whose length the program does not say: counted once")
    if traffic.unseen:
        lines.append("not counted: what lies in unpinned_host, which jax's types do not tell")
    within = sum(t.total_bytes for t in traffic.transfers if t.source == t.target)
    if within:
        lines.append(f"{human_bytes(within)} copied from host memory to host memory")
    asked = [each for each in traffic.work if each.where == "host" and each.asked]
    if asked:
        size = human_bytes(sum(each.bytes for each in asked))
        lines.append(f"{size} of host memory are worked on by the host")
    return "\n".join(lines)


def _against(size: float, least: float | None) -> str:
    if least is None:
        return ""
    ratio = f", {size / least:.3f}x" if least else ""
    return f" (least {human_bytes(least)}{ratio})"
