"""Bytes by network: inside TPU slices or GPU hosts, and between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .collective import KINDS, Collective
from .contract import Promise
from .networks import Networks
from .table import aligned, human_bytes

__all__ = ["bytes_by_network", "least_between", "network_table"]


def bytes_by_network(
    collectives: Sequence[Collective], promises: Sequence[Promise], networks: Networks | None
) -> dict[str, dict[str, float]]:
    """What one device receives in one step, by kind and network.

    Args:
        collectives: of a program.
        promises: what the policies say of each parameter.
        networks: what joins the devices.

    Returns:
        For each kind the bytes by the networks' names; "minimum": the least over the slower one; and of a
        compiled program "overlapped": the share of the slower one's bytes beside a matrix multiplication.
        Nothing where the devices are not known, or in one slice or host.
    """
    if networks is None or not networks.several:
        return {}
    least, found = least_between(promises, networks), {}
    for kind in KINDS:
        records = [record for record in collectives if record.kind == kind]
        if records or least.get(kind):
            found[kind] = {
                networks.fast: sum(record.inside_bytes for record in records),
                networks.slow: sum(record.crossing_bytes for record in records),
            }
            if promises:
                found[kind]["minimum"] = least.get(kind, 0.0)
            if any(record.instruction and record.crossing for record in records):
                beside = sum(record.crossing_bytes for record in records if record.overlapped)
                found[kind]["overlapped"] = beside / found[kind][networks.slow]
    return found


def least_between(promises: Sequence[Promise], networks: Networks) -> dict[str, float]:
    """The least bytes of each kind that one device receives from other slices or hosts in one step.

    Args:
        promises: what the policies say of each parameter.
        networks: what joins the devices.
    """
    shares: dict[tuple[str, ...], float] = {}
    least: dict[str, float] = {}
    for promise in promises:
        for kind, wire in promise.sent():
            parts = [wire]
            if wire is promise.gather and promise.again is not None:
                # What is kept over some axes is gathered over the others again.
                rest = wire.bytes_per_device - promise.again.bytes_per_device
                parts = [dataclasses.replace(wire, bytes_per_device=rest), promise.again]
            for part in parts:
                if part.axes not in shares:
                    shares[part.axes] = networks.least_share(part.axes)
                least[kind] = least.get(kind, 0.0) + part.bytes_per_device * shares[part.axes]
    return least


def network_table(
    collectives: Sequence[Collective], promises: Sequence[Promise], networks: Networks | None
) -> str:
    """Those bytes as lines of aligned columns; "" where there are none.

    Args:
        collectives: as for `bytes_by_network`.
        promises: likewise.
        networks: likewise.
    """
    by_kind = bytes_by_network(collectives, promises, networks)
    if networks is None or not by_kind:
        return ""
    columns = [networks.fast, networks.slow, *(["minimum"] if promises else [])]
    head = ["bytes by network", *columns[:2], *(f"least {networks.slow}" for _ in columns[2:])]
    lines = [
        [kind, *(human_bytes(each[column]) for column in columns)] for kind, each in by_kind.items()
    ]
    sums = [sum(each[column] for each in by_kind.values()) for column in columns]
    lines.append(["", *map(human_bytes, sums)])
    if any("overlapped" in each for each in by_kind.values()):
        head.append(f"{networks.slow} beside matmuls")
        shares = [each.get("overlapped") for each in by_kind.values()]
        for line, share in zip(lines, [*shares, None], strict=True):
            line.append("" if share is None else f"{share:.0%}")
    lines = aligned([head, *lines], left=1)
    rule = "-" * max(map(len, lines))
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])
