"""The measures of one program as ratios to their minimum or to the reference, each beside its gate."""

from __future__ import annotations

import dataclasses
from typing import Any

from minima import Minima

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One measure of one program.

    Attributes:
        measure: its number in the list of twelve.
        name: what it is.
        value: the figure.
        gate: what it may be at most (of a share: at least).
        met: whether it is.
    """

    measure: int
    name: str
    value: float
    gate: float
    met: bool


def verdicts(record: Record, reference: Record | None, least: Minima, target: str) -> list[Verdict]:
    """Holds a compiled program against its gates.

    Args:
        record: what `measures.measure` returned.
        reference: that of the hand-written step; without it measures 7, 8 and 12 are left out.
        least: the formulas.
        target: the devices; it decides which figure of memory is the sound one.
    """
    moved, memory, counts = record["bytes"], record["memory"], record["counts"]
    found = [
        at_most(1, "gathered", moved["all-gather"] / least.gathered, 1.01),
        at_most(2, "scattered", scattered(record, least) / least.scattered, 1.01),
        at_most(2, "large all-reduces", record["large_all_reduces"], 0),
        at_most(6, "persistent", memory["persistent"] / least.persistent, 1.001),
        at_least(6, "aliased", memory["aliased"] / memory["persistent"], 1),
    ]
    if record["dtypes"]:
        found += [
            at_least(4, "gathered in bfloat16", share(record, "all-gather", "bfloat16"), 1),
            at_least(4, "reduced in float32", share(record, "reduce-scatter", "float32"), 1),
        ]
    if "all-gather" in counts:  # Else XLA places the collectives, and none are written.
        found += [
            at_most(5, "gathers, count", counts["all-gather"] / least.gathers, 1),
            at_most(5, "scatters, count", counts["reduce-scatter"] / least.scatters, 1),
        ]
    if least.summed:
        found.append(at_most(3, "summed over replicas", moved["all-reduce"] / least.summed, 1.01))
    if reference is None:
        return sorted(found, key=lambda verdict: verdict.measure)
    found.append(at_most(7, "peak", needed(record, target) / needed(reference, target), 1.05))
    for kind, share_of in record["overlap"].items():
        if target != "cpu":
            found.append(at_least(8, f"{kind} overlapped", share_of, reference["overlap"][kind]))
    hlo = record["hlo"]["compiled"] / reference["hlo"]["compiled"]
    seconds = record["seconds"]["compile"] / reference["seconds"]["compile"]
    found += [at_most(12, "program size", hlo, 1.25), at_most(12, "compile time", seconds, 1.25)]
    return sorted(found, key=lambda verdict: verdict.measure)


def at_most(measure: int, name: str, value: float, gate: float) -> Verdict:
    return Verdict(measure, name, value, gate, value <= gate + 1e-4)


def at_least(measure: int, name: str, value: float | None, gate: float | None) -> Verdict:
    value, gate = value or 0.0, gate or 0.0
    return Verdict(measure, name, value, gate, value >= gate - 1e-4)


def scattered(record: Record, least: Minima) -> float:
    """Bytes of reductions beyond the sum over replicas: TPUs all-reduce what is small."""
    moved = record["bytes"]
    return moved["reduce-scatter"] + max(0.0, moved["all-reduce"] - least.summed)


def needed(record: Record, target: str) -> float:
    """The memory to compare: of temporaries; on TPUs, whose temporaries leave VMEM out, the peak of all."""
    memory = record["memory"]
    return memory["xla_peak"] if target.startswith("v") else memory["temporaries"]


def worked(record: Record, target: str) -> float:
    """The same without parameters and optimizer state."""
    kept = record["memory"]["persistent"] if target.startswith("v") else 0
    return needed(record, target) - kept


def share(record: Record, kind: str, dtype: str) -> float:
    """Share of a kind's bytes that travel in this dtype."""
    of_kind = record["dtypes"].get(kind, {})
    return of_kind.get(dtype, 0.0) / sum(of_kind.values()) if of_kind else 0.0
