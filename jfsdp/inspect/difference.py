"""What changed from one report to another."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence

from .collective import Collective
from .table import aligned, human_bytes

__all__ = ["Change", "Difference", "difference"]


@dataclasses.dataclass(frozen=True)
class Change:
    """One figure that is not the same in two reports.

    Attributes:
        what: such as "all-gather over fsdp in bfloat16, forward" or "memory: temporaries".
        before: bytes per device in the first report (0.0 if it has none).
        after: bytes per device in the second.
        count_before: collectives executed in one step in the first report; 0 for memory.
        count_after: in the second.
    """

    what: str
    before: float
    after: float
    count_before: int = 0
    count_after: int = 0


@dataclasses.dataclass(frozen=True)
class Difference:
    """Every figure that changed; empty (and False) if none did. `print` it for a table.

    Attributes:
        changes: the figures, collectives first.
    """

    changes: tuple[Change, ...]

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __str__(self) -> str:
        if not self.changes:
            return "no difference"
        cells: list[Sequence[str]] = [("", "count", "", "bytes", "", "change")]
        for change in self.changes:
            counts = ("", "")
            if change.count_before or change.count_after:
                counts = (f"{change.count_before}", f"-> {change.count_after}")
            cells.append(
                (
                    change.what,
                    *counts,
                    human_bytes(change.before),
                    f"-> {human_bytes(change.after)}",
                    _relative(change),
                )
            )
        return "\n".join(aligned(cells, left=1))


def difference(
    before: Sequence[Collective],
    after: Sequence[Collective],
    memory_before: dict[str, float],
    memory_after: dict[str, float],
) -> Difference:
    """Compares two programs.

    Args:
        before: the collectives of the first.
        after: the collectives of the second.
        memory_before: bytes per device of the first, by name; empty if they are not known.
        memory_after: of the second. Memory is compared only if both are known.

    Returns:
        What changed.
    """
    bytes_before, bytes_after = (
        _sums(before, lambda c: c.total_bytes),
        _sums(after, lambda c: c.total_bytes),
    )
    counts_before, counts_after = (
        _sums(before, lambda c: c.executions),
        _sums(after, lambda c: c.executions),
    )
    changes = [
        Change(
            key,
            bytes_before[key],
            bytes_after[key],
            int(counts_before[key]),
            int(counts_after[key]),
        )
        for key in dict.fromkeys([*bytes_before, *bytes_after])
        if (bytes_before[key], counts_before[key]) != (bytes_after[key], counts_after[key])
    ]
    if memory_before and memory_after:
        changes += [
            Change(f"memory: {key}", memory_before.get(key, 0.0), memory_after.get(key, 0.0))
            for key in dict.fromkeys([*memory_before, *memory_after])
            if memory_before.get(key, 0.0) != memory_after.get(key, 0.0)
        ]
    return Difference(tuple(changes))


def _sums(
    records: Sequence[Collective], figure: Callable[[Collective], float]
) -> defaultdict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for record in records:
        over = ", ".join(record.axes) or record.groups or "one device"
        phase = f", {record.phase}" if record.phase else ""
        sums[f"{record.kind} over {over} in {record.dtype}{phase}"] += figure(record)
    return sums


def _relative(change: Change) -> str:
    if not change.before:
        return "new"
    return "gone" if not change.after else f"{change.after / change.before - 1:+.1%}"
