"""Which share of the bytes travels while a matrix multiplication runs, by the schedule of the program.

That a multiplication stands between the start of a collective and its end says that the two may run at the
same time, not that the multiplication takes as long. What is not asynchronous never overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence

from .collective import KINDS, Collective

__all__ = ["PHASES", "overlap", "overlap_by_kind", "overlap_line"]

PHASES = ("forward", "backward", "update")
_SHOWN = ("all-gather", "reduce-scatter", "all-reduce")


def overlap(collectives: Sequence[Collective], kind: str, phase: str | None = None) -> float | None:
    """The share of a kind's bytes that has a matrix multiplication between start and end.

    Args:
        collectives: of a compiled program.
        kind: one of `KINDS`.
        phase: one of `PHASES`; None for all of them, and for what has lost its name.

    Returns:
        From 0.0 to 1.0; None if there are no such bytes.
    """
    records = [
        record
        for record in collectives
        if record.kind == kind and record.instruction and phase in (None, record.phase)
    ]
    size = sum(record.total_bytes for record in records)
    return sum(r.total_bytes for r in records if r.overlapped) / size if size else None


def overlap_by_kind(collectives: Sequence[Collective]) -> dict[str, dict[str, float]]:
    """The shares of every kind that a compiled program has: of all of it ("all"), and by phase.

    Args:
        collectives: as for `overlap`. Before compilation there is no schedule, and nothing in this.
    """
    shares = {
        kind: {
            phase or "all": share
            for phase in (None, *PHASES)
            if (share := overlap(collectives, kind, phase)) is not None
        }
        for kind in KINDS
    }
    return {kind: by_phase for kind, by_phase in shares.items() if by_phase}


def overlap_line(collectives: Sequence[Collective]) -> str:
    """Those shares as one line; "" if nothing says.

    A kind that more than one phase has tells each of them.

    Args:
        collectives: as for `overlap_by_kind`.
    """
    shares = []
    for kind, by_phase in overlap_by_kind(collectives).items():
        if kind in _SHOWN:
            own = [f"{phase} {by_phase[phase]:.0%}" for phase in PHASES if phase in by_phase]
            each = f" ({', '.join(own)})" if len(own) > 1 else ""
            shares.append(f"{kind} {by_phase['all']:.0%}{each}")
    if not shares:
        return ""
    return f"scheduled beside a matrix multiplication: {', '.join(shares)} of the bytes"
