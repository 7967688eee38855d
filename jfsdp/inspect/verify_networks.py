"""Collectives of parameters that leave the TPU slice or GPU host which their policy keeps them in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from .collective import Collective
from .contract import Departure, Promise
from .networks import Networks
from .networks_table import least_between
from .table import human_bytes

__all__ = ["crossing", "detours"]

_SMALL: Final = 2**20
_DETOUR: Final = 1.5


def crossing(
    collectives: Sequence[Collective], promises: Sequence[Promise], networks: Networks
) -> Iterator[Departure]:
    """Gathers and reduce-scatters that travel between islands, of parameters whose shards lie inside one.

    A collective belongs to the parameter that its name tells; without a name, from 1 MiB on, it counts if all
    parameters lie inside.

    Args:
        collectives: what the program does.
        promises: one for each parameter.
        networks: what joins the devices.

    Returns:
        The departures, if there are any.
    """
    outside = {promise.leaf: _across(promise, networks) for promise in promises}
    anywhere = any(outside.values())
    for record in collectives:
        if not record.crossing_bytes or record.purpose not in ("all-gather", "reduce-scatter"):
            continue
        if record.leaf in outside:
            stray = not outside[record.leaf]
        else:
            stray = not anywhere and record.crossing_bytes >= _SMALL
        if stray:
            yield Departure(
                record.leaf if record.leaf in outside else "",
                f"network of the {record.purpose}",
                f"{networks.fast}: its shards lie inside one {networks.island}",
                f"{human_bytes(record.crossing_bytes)} of a {record.kind} over {networks.slow}",
            )


def detours(
    collectives: Sequence[Collective], promises: Sequence[Promise], networks: Networks, calls: int
) -> Iterator[Departure]:
    """Far more bytes between TPU slices than the policies need, because stages go in the wrong order.

    Over several shard axes XLA for TPUs is given one collective for each. Whole weights and gradients travel
    over DCN where that of the slices is not the first of the gathers and the last of the reductions.

    Args:
        collectives: what the program does.
        promises: one for each parameter.
        networks: what joins the devices.
        calls: how often the step calls the model.

    Returns:
        The departure, if there is one.
    """
    if networks.platform != "tpu" or not networks.several:
        return
    least = calls * sum(least_between(promises, networks).values())
    found = sum(record.crossing_bytes for record in collectives)
    if found > _DETOUR * least + _SMALL:
        yield Departure(
            "",
            f"bytes over {networks.slow}, per device and step",
            f"about {human_bytes(least)}",
            f"{human_bytes(found)}; of several shard axes name the one between slices last, "
            'as in shard=("x", "y", "slice"): it is gathered first and reduced last',
        )


def _across(promise: Promise, networks: Networks) -> bool:
    """Whether the policy itself sends a part of the parameter between islands."""
    wires = (promise.gather, promise.scatter, promise.update)
    return any(networks.across(wire.axes) for wire in wires if wire is not None)
