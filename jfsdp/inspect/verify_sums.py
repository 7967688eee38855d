"""A program as a whole held against what the policies promise: its bytes, and what is gathered again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeGuard

from .collective import Collective, itemsize
from .contract import Departure, Promise, Wire
from .table import human_bytes

__all__ = ["SMALL", "kept", "scattered_once", "totals"]

SMALL: Final = 4096.0
"""Bytes that no sum is held to."""


def kept(
    collectives: Sequence[Collective], promises: Sequence[Promise], calls: int
) -> Iterator[Departure]:
    """Weights that should be dropped after the forward, but are not gathered again for the backward.

    Not every weight has to be: biases and embeddings are not read there, nor those of the first unit if
    the gradient of its input is not taken. So half of the rest will do.
    """
    if not any(c.phase == "backward" and _reduces(c) for c in collectives):
        return
    again: dict[str, float] = {}
    for promise in promises:
        if _is_stated(promise.again) and len(promise.shapes[-1]) > 1:
            size = calls * promise.again.bytes_per_device
            again[promise.unit] = again.get(promise.unit, 0.0) + size
    wanted = sum(again.values()) - max(again.values(), default=0.0)
    received = sum(c.total_bytes for c in collectives if _gathers(c) and c.phase == "backward")
    if received < wanted / 2:
        yield Departure(
            "",
            "weights are dropped after the forward and gathered again for the backward",
            f"about {human_bytes(wanted)} gathered in the backward",
            f"{human_bytes(received)}: the whole weights are kept",
        )


def scattered_once(
    collectives: Sequence[Collective], promises: Sequence[Promise]
) -> Iterator[Departure]:
    """Gradients of several microbatches that should be scattered one by one, but are added up whole."""
    wires = [p.scatter for p in promises if p.scatters > 1 and _is_stated(p.scatter)]
    wanted = sum(wire.bytes_per_device for wire in wires)
    axes = {axis for wire in wires for axis in wire.axes}
    reducing = [c for c in collectives if _reduces(c) and (not c.axes or set(c.axes) & axes)]
    received = sum(record.total_bytes for record in reducing)
    if received < wanted / 2:
        yield Departure(
            "",
            "gradients are reduce-scattered in each microbatch",
            f"about {human_bytes(wanted)}",
            f"{human_bytes(received)}: whole gradients are added up",
        )


def totals(
    collectives: Sequence[Collective],
    promises: Sequence[Promise],
    calls: int,
    tolerance: float,
) -> Iterator[Departure]:
    """More bytes of gathers, or of reductions, than all parameters together need.

    Left out are parameters whose collectives are the user's own and do not say what they send; beside such,
    also what the compiler left without a name.
    """
    gathering = [record for record in collectives if _gathers(record)]
    reducing = [record for record in collectives if _reduces(record)]
    for name, kinds, records in (
        ("all-gathers", ("all-gather",), gathering),
        ("reductions", ("reduce-scatter", "all-reduce"), reducing),
    ):
        wires = [
            (p.leaf, kind, wire)
            for p in promises
            for kind, wire in p.wires().items()
            if kind in kinds
        ]
        stated = [
            (calls * part.bytes_per_device, part.dtype)
            for _, kind, wire in wires
            for _, part in wire.sent(kind)
            if _is_stated(wire)
        ]
        if name == "all-gathers":
            stated += [(p.update.bytes_per_device, p.update.dtype) for p in promises if p.update]
        if unstated := {leaf for leaf, _, wire in wires if not _is_stated(wire)}:
            records = [record for record in records if record.leaf and record.leaf not in unstated]
        wanted = sum(size for size, _ in stated)
        received = sum(record.unpadded_bytes for record in records)
        # In a narrower dtype too many elements may still be few bytes.
        elements = sum(size / itemsize(dtype) for size, dtype in stated)
        moved = sum(record.unpadded_bytes / itemsize(record.dtype) for record in records)
        slack = max(tolerance * wanted, SMALL)
        too_many = moved - elements > max(tolerance * elements, SMALL)
        if received - wanted > slack or too_many:
            ratios = [f"{received / wanted:.3f}x"] if wanted else []
            ratios += [f"{moved / elements:.3f}x the elements"] if too_many and elements else []
            yield Departure(
                "",
                f"bytes of the {name}, per device and step",
                f"at most {human_bytes(wanted)}",
                f"{human_bytes(received)} ({', '.join(ratios) or 'none are stated'})",
            )


def _gathers(record: Collective) -> bool:
    return record.role == "gather" or (not record.role and record.purpose == "all-gather")


def _reduces(record: Collective) -> bool:
    # TPUs all-reduce what is small. Permutes that move the padding of a scatter are not counted.
    return record.role == "reduce" or (
        not _gathers(record)
        and (
            record.kind in ("reduce-scatter", "all-reduce")
            or record.purpose == "collective-permute"
        )
    )


def _is_stated(wire: Wire | None) -> TypeGuard[Wire]:
    """Whether there is one, and not by a collective of the user's own that does not say what it sends."""
    return wire is not None and bool(wire.dtype)
