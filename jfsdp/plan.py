"""The plan: where every parameter lies, what it costs a device, and why it is not sharded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from jfsdp.inspect.blocks import grouped, pattern, ranged
from jfsdp.inspect.table import aligned, human_bytes
from jfsdp.mesh import DataParallelMesh, describe_mesh
from jfsdp.placement import IGNORED, Placement

__all__ = ["Plan", "PlanRow", "plan_row"]

ROOT = "(root)"


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """One parameter.

    Attributes:
        path: dotted path in the model.
        unit: dotted path of the unit that gathers it; "(root)" for the outermost.
        shape: global shape.
        dtype: storage dtype.
        spec: PartitionSpec at rest.
        bytes: bytes of the whole parameter in storage dtype.
        bytes_per_device: bytes of one device's part.
        reason: why it is replicated over the shard axes, or "ignored"; "" if it is sharded.
        layers: layers of a scanned stack, which are gathered one by one; 1 for everything else.
        memory_kind: the kind of host memory that it lies in, such as "pinned_host"; "" for the device's own.
        state_memory_kind: that of the optimizer state that lies as it does.
    """

    path: str
    unit: str
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    bytes: int
    bytes_per_device: int
    reason: str = ""
    layers: int = 1
    memory_kind: str = ""
    state_memory_kind: str = ""

    @property
    def memory(self) -> str:
        """Where it and its state lie: "device", "pinned_host", or "device, state pinned_host"."""
        own, state = self.memory_kind or "device", self.state_memory_kind or "device"
        return own if own == state else f"{own}, state {state}"


def plan_row(unit: str, path: str, placement: Placement, dp: DataParallelMesh) -> PlanRow:
    """The row of a parameter at the dotted `path` below its unit, "" being the outermost unit."""
    stacked = placement.stacked_axis
    return PlanRow(
        path=f"{unit}.{path}" if unit else path,
        unit=unit or ROOT,
        shape=placement.shape,
        dtype=placement.dtype,
        spec=placement.spec,
        bytes=placement.bytes,
        bytes_per_device=placement.shard_bytes(dp.mesh),
        reason=placement.reason,
        layers=1 if stacked is None else max(1, placement.shape[stacked]),
        memory_kind=placement.memory_kind or "",
        state_memory_kind=placement.state_memory_kind or "",
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """The table that `jfsdp.plan` returns; `print` it, or read `rows`.

    Attributes:
        rows: one for each parameter, tied ones once.
        dp: the mesh and its data-parallel axes.
        policy: the mixed precision policy of the outermost unit, as text.
    """

    rows: tuple[PlanRow, ...]
    dp: DataParallelMesh
    policy: str = ""

    @property
    def parameters(self) -> int:
        """Number of parameter elements of the whole model."""
        return sum(math.prod(row.shape) for row in self.rows)

    @property
    def bytes(self) -> int:
        """Bytes of all parameters in storage dtype."""
        return sum(row.bytes for row in self.rows)

    @property
    def bytes_per_device(self) -> int:
        """Bytes of one device's parameters in storage dtype, in whichever memory."""
        return sum(row.bytes_per_device for row in self.rows)

    @property
    def bytes_on_host(self) -> int:
        """Of `bytes_per_device`, those in host memory."""
        return sum(row.bytes_per_device for row in self.rows if row.memory_kind)

    @property
    def offloads(self) -> bool:
        """Whether a parameter, or its optimizer state, is to lie in host memory."""
        return any(row.memory_kind or row.state_memory_kind for row in self.rows)

    @property
    def replicated(self) -> tuple[PlanRow, ...]:
        """The parameters that jfsdp could not shard, and why."""
        return tuple(row for row in self.rows if row.reason not in ("", IGNORED))

    @property
    def ignored(self) -> tuple[PlanRow, ...]:
        """The parameters that `ignored_params` selects, which lie as they did."""
        return tuple(row for row in self.rows if row.reason == IGNORED)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is probably not meant: one unit that holds most of the model."""
        units: dict[str, int] = {}
        for row in self.rows:
            gathered = 0 if row.reason == IGNORED else row.bytes // row.layers
            units[row.unit] = units.get(row.unit, 0) + gathered
        if not units or not self.bytes:
            return ()
        unit, size = max(units.items(), key=lambda item: item[1])
        if 2 * size <= self.bytes:
            return ()
        return (
            f"the unit {unit} holds {size / self.bytes:.0%} of the model ({human_bytes(size)}), which is "
            "gathered at once. Make the repeated blocks units of their own: jfsdp.shard(model, units=Block).",
        )

    def _places(self) -> str:
        """How much lies where."""
        there = self.bytes_on_host
        text = f"of it {human_bytes(self.bytes_per_device - there)} in the device's memory and "
        text += f"{human_bytes(there)} in host memory"
        state = sum(bool(row.state_memory_kind) for row in self.rows)
        return (
            f"{text}; the optimizer state of {state} of {len(self.rows)} parameters in host memory"
        )

    def __str__(self) -> str:
        head = f"parameters on {describe_mesh(self.dp.mesh)}{f'; {self.policy}' if self.policy else ''}"
        cells = [("unit", "parameter", "shape", "dtype", "spec", "memory", "per device")]
        cells += [_cells(group) for group in _groups(self.rows)]
        if not self.offloads:
            cells = [(*cell[:-2], cell[-1]) for cell in cells]
        whole, part = self.bytes, self.bytes_per_device
        header, *table = aligned(cells, left=len(cells[0]))
        rule = "-" * max(len(line) for line in (header, *table))
        lines = [head, header, rule, *table, rule]
        lines.append(
            f"total: {self.parameters:,} parameters, {human_bytes(whole)}; {human_bytes(part)} per device "
            f"({part / max(whole, 1):.1%})"
        )
        if self.offloads:
            lines.append(self._places())
        lines += _reasons(self.replicated)
        if self.ignored:
            ignored = [ranged([row.path for row in group]) for group in _groups(self.ignored)]
            lines.append(f"ignored, lying as they did: {', '.join(ignored)}")
        return "\n".join([*lines, *(f"warning: {text}" for text in self.warnings)])


def _groups(rows: Sequence[PlanRow]) -> list[list[PlanRow]]:
    """Rows that differ in the numbers of their path only (the same leaf of repeated blocks)."""

    def key(row: PlanRow) -> tuple[Any, ...]:
        names = (pattern(row.unit), pattern(row.path))
        return (*names, row.shape, str(row.dtype), row.spec, row.reason, row.memory)

    return grouped(rows, key)


def _cells(group: list[PlanRow]) -> tuple[str, ...]:
    row, times = group[0], f" x{len(group)}" if len(group) > 1 else ""
    path = row.path.removeprefix(f"{row.unit}.")
    unit = ranged([r.unit for r in group])
    shape = "x".join(map(str, row.shape)) or "scalar"
    spec = "P(" + ", ".join(map(repr, row.spec)) + ")"
    size = human_bytes(row.bytes_per_device) + times
    return (unit, path, shape, str(row.dtype), spec, row.memory, size)


def _reasons(rows: Sequence[PlanRow]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for group in _groups(rows):
        by_reason.setdefault(group[0].reason, []).append(ranged([row.path for row in group]))
    return [f"replicated, {reason}: {', '.join(paths)}" for reason, paths in by_reason.items()]
