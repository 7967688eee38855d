"""What a job keeps on every device by leaf, and what its policies say it communicates, uncompiled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jfsdp.cli.job import Job
from jfsdp.cli.terminal import Table
from jfsdp.inspect import Row
from jfsdp.inspect.blocks import grouped, pattern, ranged
from jfsdp.inspect.table import human_bytes
from jfsdp.nnx_tree import kind_of_argument, plan_rows
from jfsdp.promises import arguments

__all__ = ["Kept", "Leaf", "kept_by", "promised_rows"]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What one device keeps of one parameter between the start of a step and its end, in bytes.

    Attributes:
        path: of the parameter.
        unit: that gathers it.
        shape: global.
        parameters: of its shard.
        gradients: of the shard of its gradient, in the dtype in which it is reduced.
        optimizer: of the optimizer state that belongs to it.
        gathered: of the whole parameter, or of one layer of a stack, in the dtype in which it is gathered.
        on_host: whether parameter and gradient lie in host memory.
        state_on_host: whether the optimizer state does.
    """

    path: str
    unit: str
    shape: tuple[int, ...]
    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    on_host: bool = False
    state_on_host: bool = False

    @property
    def total(self) -> int:
        """Bytes of the shard, its gradient and its optimizer state."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def host(self) -> int:
        """Of these, bytes in host memory."""
        own = self.on_host * (self.parameters + self.gradients)
        return own + self.state_on_host * self.optimizer

    @property
    def state(self) -> int:
        """Bytes of the shard and its optimizer state that stay on the device from step to step."""
        own = (not self.on_host) * self.parameters
        return own + (not self.state_on_host) * self.optimizer


@dataclasses.dataclass(frozen=True)
class Kept:
    """What one device keeps of all parameters.

    Attributes:
        leaves: the parameters.
        other: bytes of optimizer state that belongs to none of them, such as a count of steps.
    """

    leaves: tuple[Leaf, ...]
    other: int

    @property
    def parameters(self) -> int:
        """Bytes of the parameters."""
        return sum(leaf.parameters for leaf in self.leaves)

    @property
    def gradients(self) -> int:
        """Bytes of the gradients."""
        return sum(leaf.gradients for leaf in self.leaves)

    @property
    def optimizer(self) -> int:
        """Bytes of the optimizer state."""
        return sum(leaf.optimizer for leaf in self.leaves) + self.other

    @property
    def total(self) -> int:
        """Bytes of all three."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def largest_unit(self) -> tuple[str, int]:
        """The unit that takes most bytes while it is gathered, and how many."""
        units = {}
        for leaf in self.leaves:
            units[leaf.unit] = units.get(leaf.unit, 0) + leaf.gathered
        return max(units.items(), key=lambda item: item[1])

    @property
    def state(self) -> int:
        """Bytes that stay on the device from step to step: of parameters and optimizer state."""
        return sum(leaf.state for leaf in self.leaves) + self.other

    @property
    def host(self) -> int:
        """Bytes in host memory."""
        return sum(leaf.host for leaf in self.leaves)

    def verdict(self, limit: int | None) -> str:
        """One line: whether the state fits.

        Args:
            limit: bytes that a device has; None if that is not known.
        """
        total = human_bytes(self.total - self.host)
        if limit is None:
            return f"{total} per device before activations and gathered weights"
        whole = human_bytes(limit)
        if self.state > limit:
            return (
                f"does not fit: parameters and optimizer state take {human_bytes(self.state)} of {whole} "
                "per device"
            )
        return (
            f"{total} of {whole} per device before activations and gathered weights: "
            "`python -m jfsdp compile` says whether these fit"
        )

    def as_dict(self) -> dict[str, Any]:
        """The figures by name, for JSON: bytes per device."""
        names = ("parameters", "gradients", "optimizer", "total")
        unit, size = self.largest_unit
        return {
            "bytes_per_device": {name: getattr(self, name) for name in names},
            "bytes_on_host": self.host,
            "gathered": {"unit": unit, "bytes": size},
            "leaves": [dataclasses.asdict(leaf) for leaf in self.leaves],
        }

    def table(self) -> Table:
        """Bytes per device; the same leaf of repeated blocks is one line, their sum."""
        rows = []
        for group in self._groups():
            unit = ranged([leaf.unit for leaf in group])
            name = group[0].path.removeprefix(f"{group[0].unit}.")
            rows.append((unit, name if unit != name else "", *_figures(group)))
        if self.other:
            rows.append(
                ("-", "other state", "", "", human_bytes(self.other), human_bytes(self.other))
            )
        sums = map(human_bytes, (self.parameters, self.gradients, self.optimizer, self.total))
        head = ("unit", "parameter", "parameters", "gradients", "optimizer", "total")
        last = ("total", "", *sums)
        if not self.host:
            return Table("bytes per device", head, rows, last, left=2)
        hosts = [sum(leaf.host for leaf in group) for group in self._groups()]
        hosts += [0] * bool(self.other)
        rows = [(*row, human_bytes(size)) for row, size in zip(rows, hosts, strict=True)]
        head, last = (*head, "of it on the host"), (*last, human_bytes(self.host))
        return Table("bytes per device", head, rows, last, left=2)

    def _groups(self) -> list[list[Leaf]]:
        return grouped(
            self.leaves,
            lambda f: (pattern(f.unit), pattern(f.path), f.shape, f.on_host, f.state_on_host),
        )


def kept_by(job: Job) -> Kept:
    """What one device keeps, from the shardings of the abstract model and optimizer."""
    rows = plan_rows(job.model)
    state, other = _optimizer_bytes(job, [row.path for row, *_ in rows])
    leaves = []
    for row, unit, placement, _ in rows:
        shape = row.shape
        how = unit.gathering(placement, jax.ShapeDtypeStruct(shape, row.dtype))
        shards = row.bytes_per_device // np.dtype(row.dtype).itemsize
        leaves.append(
            Leaf(
                path=row.path,
                unit=row.unit,
                shape=shape,
                parameters=row.bytes_per_device,
                gradients=shards * np.dtype(how.reduce_dtype).itemsize * how.reducible,
                optimizer=state[row.path],
                gathered=math.prod(shape) // row.layers * np.dtype(how.param_dtype).itemsize,
                on_host=bool(row.memory_kind),
                state_on_host=bool(row.state_memory_kind),
            )
        )
    return Kept(tuple(leaves), other)


def promised_rows(job: Job) -> list[Row]:
    """What one step communicates by its policies, for the roofline."""
    rows = []
    for _, unit, placement, is_root in plan_rows(job.model):
        again = unit.stated_again(placement, is_root)
        for kind, (axes, dtype, size) in unit.stated(placement, is_root).items():
            if kind == "all-gather" and again is not None and again[0] != axes:
                rows.append(Row(kind, *again[:2], 1, again[2]))
                size -= again[2]
            rows.append(Row(kind, axes, dtype, 1, size))
    return rows


def _optimizer_bytes(job: Job, paths: Sequence[str]) -> tuple[dict[str, int], int]:
    """Bytes of optimizer state by the parameter whose path it ends in, and of what has none."""
    state, other = dict.fromkeys(paths, 0), 0
    for leaf in arguments(job.optimizer, kind_of_argument):
        owner = _owner(leaf.path, state)
        if owner is None:
            other += leaf.bytes_per_device
        else:
            state[owner] += leaf.bytes_per_device
    return state, other


def _owner(path: str, known: dict[str, Any]) -> str | None:
    parts = path.removesuffix(".value").split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((end for end in ends if end in known), None)


def _figures(group: Sequence[Leaf]) -> list[str]:
    names = ("parameters", "gradients", "optimizer", "total")
    return [human_bytes(sum(getattr(leaf, name) for leaf in group)) for name in names]
