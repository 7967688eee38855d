"""A program held against what the policies promise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from .collective import Collective
from .contract import Departure, Promise, Wire
from .networks import Networks
from .table import human_bytes
from .verify_networks import crossing, detours
from .verify_sums import SMALL, kept, scattered_once, totals

__all__ = ["LARGE", "SMALL", "departures"]

LARGE: Final = 2**20
"""Bytes from which a collective that no policy speaks of counts. Losses, norms and counters are below."""


def departures(
    collectives: Sequence[Collective],
    promises: Sequence[Promise],
    *,
    calls: int,
    tolerance: float,
    other_axes: Iterable[str] = (),
    networks: Networks | None = None,
) -> list[Departure]:
    """Every point in which a program's collectives are not the promised ones.

    A collective belongs to the parameter that its name tells, else to those that have its shape. What a
    collective of the user's own does for a parameter is held against what it states, if it states anything.
    Not looked at are collectives of integers, those over axes that are not data-parallel, and those of
    less than 1 MiB that belong to no parameter.

    Args:
        collectives: what the program does.
        promises: one for each parameter.
        calls: how often the step calls the model.
        tolerance: by which fraction bytes may exceed the least ones.
        other_axes: the mesh axes that are not data-parallel, of which the policies say nothing.
        networks: what joins the devices, if that is known.

    Returns:
        The departures, those of the same kind for parameters of one shape as one.
    """
    several_slices = networks is not None and networks.several and networks.platform == "tpu"
    book = _Book(promises, calls, tolerance, several_slices)
    others = set(other_axes)
    collectives = [c for c in collectives if _matters(c) and not (c.axes and others >= set(c.axes))]
    found: list[Departure] = []
    for record in collectives:
        if not _moves_padding(record):
            found += book.of_one(record)
    found += kept(collectives, promises, calls)
    found += scattered_once(collectives, promises)
    found += totals(collectives, promises, calls, tolerance)
    if networks is not None:
        found += crossing(collectives, promises, networks)
        found += detours(collectives, promises, networks, calls)
    return _merged(found)


def _moves_padding(record: Collective) -> bool:
    return record.kind == "collective-permute" and record.written == "reduce-scatter"


def _matters(record: Collective) -> bool:
    return record.group_size > 1 and record.dtype.startswith(("float", "bfloat", "int8", "uint8"))


_Index = dict[tuple[int, ...], list[Promise]]


def _index(
    promises: Iterable[Promise], shapes: Callable[[Promise], Iterable[tuple[int, ...]]]
) -> _Index:
    index: _Index = {}
    for promise in promises:
        for shape in shapes(promise):
            index.setdefault(_core(shape), []).append(promise)
    return index


class _Book:
    """The promises, to be found by name and by shape."""

    def __init__(
        self, promises: Iterable[Promise], calls: int, tolerance: float, several_slices: bool
    ) -> None:
        self.calls, self.tolerance = calls, tolerance
        self.several_slices = several_slices
        self.by_leaf = {promise.leaf: promise for promise in promises}
        self.by_shape = _index(self.by_leaf.values(), lambda promise: promise.shapes)
        self.by_shard = _index(self.by_leaf.values(), lambda promise: promise.shards)
        sums = [p.sum for p in self.by_leaf.values() if p.sum]
        self.sum_axes = {axis for wire in sums for axis in wire.axes}
        self.sum_dtypes = {wire.dtype for wire in sums}
        self.scatters = [p.scatter for p in self.by_leaf.values() if p.scatter]

    def owners(self, record: Collective, shape: tuple[int, ...], index: _Index) -> list[Promise]:
        named = self.by_leaf.get(record.leaf)
        if named is not None:
            return [named]
        core = _core(shape)
        # A vector is as often an activation's as a bias's.
        return index.get(core, []) if len(core) > 1 else []

    def of_one(self, record: Collective) -> Iterator[Departure]:
        own = self.own_wire(record)
        if own is not None:
            yield from self._own(record, own)
        elif record.purpose == "all-gather":
            owners = self.owners(record, record.result_shape, self.by_shape)
            # What was updated in parts is the device's part of a parameter, or all of it.
            updated = self.owners(record, record.result_shape, self.by_shard)
            owners += [p for p in updated if p.update]
            if not owners and self.several_slices:
                owners = self._gathered_partly(record)
            yield from self._gather(record, owners)
        elif record.kind in ("reduce-scatter", "all-reduce"):
            owners: list[Promise] = []
            if record.kind == "all-reduce" and _within(record, self.sum_axes):
                owners = self.owners(record, record.shape, self.by_shard)
            owners = owners or self.owners(record, record.shape, self.by_shape)
            yield from self._reduction(record, owners)
        elif record.total_bytes >= LARGE:
            yield _foreign(record)

    def own_wire(self, record: Collective) -> Wire | None:
        """What is stated of the user's own collective that this record is of; None if it is of none."""
        promise = self.by_leaf.get(record.leaf)
        if promise is None or not record.role:
            return None
        wire = promise.gather if record.role == "gather" else promise.scatter
        is_sum = record.role == "reduce" and _within(record, _axes_of(promise.sum))
        return wire if wire is not None and wire.is_own and not is_sum else None

    def _own(self, record: Collective, wire: Wire) -> Iterator[Departure]:
        # XLA moves small arrays by other kinds of collectives.
        most = [
            part.bytes_per_device * self.calls
            for kind, part in wire.parts
            if part.dtype == record.dtype
            and _within(record, part.axes)
            and (kind in (record.kind, record.purpose) or record.total_bytes < LARGE)
        ]
        too_many = record.unpadded_bytes > sum(most) * (1 + self.tolerance) + SMALL
        if wire.parts and (not most or too_many):
            stated = " and ".join(
                f"{kind} of {part.dtype} over {_axes(part.axes)} ({human_bytes(part.bytes_per_device)})"
                for kind, part in wire.parts
            )
            rule = f"what its own collective sends to {record.role}"
            yield Departure(record.leaf, rule, stated, _described(record))

    def _gather(self, record: Collective, owners: list[Promise]) -> Iterator[Departure]:
        if not owners:
            if record.total_bytes >= LARGE:
                yield _foreign(record)
            return
        backward = record.phase == "backward"
        wires = [p.again if backward and p.again else p.gather for p in owners]
        wires += [p.update for p in owners]
        yield from _against(record, owners, _nearest(record, wires))

    def _gathered_partly(self, record: Collective) -> list[Promise]:
        """The parameters of which a gather over some of their axes, or a part of each, may be a stage.

        Programs of several TPU slices name no gather, and what is gathered partly has no shape of theirs.
        """
        before, after = math.prod(record.shape), math.prod(record.result_shape)
        return [
            promise
            for promise in self.by_leaf.values()
            if promise.gather is not None
            and record.axes
            and set(record.axes) <= set(promise.gather.axes)
            and any(before % (math.prod(shard) or 1) == 0 for shard in promise.shards)
            and any(
                math.prod(shape) % (after or 1) == 0
                and not set(record.result_shape).isdisjoint(_core(shape))
                for shape in promise.shapes
            )
        ]

    def _reduction(self, record: Collective, owners: list[Promise]) -> Iterator[Departure]:
        large = record.total_bytes >= LARGE
        if not owners:
            if record.kind == "all-reduce" and _within(record, self.sum_axes):
                # Some backends pack many gradients into one vector.
                if self.sum_dtypes and record.dtype not in self.sum_dtypes and large:
                    stated = " or ".join(sorted(self.sum_dtypes))
                    yield Departure("", "dtype of the all-reduce", stated, _described(record))
            elif large and not _is_small_vector(record) and not self._is_second_part(record):
                yield _foreign(record)
            return
        owner = owners[0]
        if record.kind == "reduce-scatter":
            wires = [p.scatter for p in owners] + [p.sum for p in owners if p.update]
            yield from _against(record, owners, _nearest(record, wires))
        elif any(_within(record, _axes_of(p.sum)) for p in owners):
            yield from _against(record, owners, _nearest(record, [p.sum for p in owners]))
        else:
            # TPUs all-reduce small gradients that are to be reduce-scattered.
            if large:
                steps = [f"a reduce-scatter over {_axes(_axes_of(owner.scatter))}"] * bool(
                    owner.scatter
                )
                steps += [f"an all-reduce over {_axes(_axes_of(owner.sum))}"] * bool(owner.sum)
                stated = " and ".join(steps) or "none"
                yield Departure(_names(owners), "reduction", stated, _described(record))
            wire = owner.scatter or owner.sum
            if wire and not record.groups:
                wire = dataclasses.replace(wire, axes=record.axes)
            yield from _against(record, owners, wire)

    def _is_second_part(self, record: Collective) -> bool:
        """Whether it is the part between TPU slices of a reduce-scatter, which has neither name nor shape."""
        stated = [wire for wire in self.scatters if wire.dtype in ("", record.dtype)]
        whole = record.crossing == 1 and record.kind == "reduce-scatter"
        return whole and any(_within(record, wire.axes) for wire in stated)


def _within(record: Collective, axes: Iterable[str]) -> bool:
    """Whether it runs over some of these axes only. Groups that no axes explain do not."""
    return not record.groups and set(record.axes) <= set(axes)


def _nearest(record: Collective, wires: Iterable[Wire | None]) -> Wire | None:
    """Of what is stated of parameters of one shape, what the collective departs from least."""
    stated = [wire for wire in wires if wire is not None]
    return min(
        stated,
        key=lambda w: (w.dtype not in ("", record.dtype)) + (not _within(record, w.axes)),
        default=None,
    )


def _is_small_vector(record: Collective) -> bool:
    """Such as the gradient of a norm, which TPUs all-reduce by itself in every layer of a loop."""
    return len(_core(record.shape)) < 2 and record.bytes_per_device < LARGE


def _foreign(record: Collective) -> Departure:
    expected = "none: activations stay split on the batch dimension"
    return Departure("", f"{record.kind}s of no parameter", expected, _described(record))


def _against(record: Collective, owners: list[Promise], wire: Wire | None) -> Iterator[Departure]:
    """A collective of a parameter, held against the stated one."""
    large = record.total_bytes >= LARGE
    if wire is None:
        if large:
            yield Departure(_names(owners), f"its {record.kind}s", "none", _described(record))
        return
    if wire.dtype and record.dtype != wire.dtype:
        rule = f"dtype of the {record.purpose}"
        yield Departure(_names(owners), rule, wire.dtype, _described(record))
    if not _within(record, wire.axes) and (large or record.leaf):
        rule = f"axes of the {record.purpose}"
        yield Departure(_names(owners), rule, _axes(wire.axes), _described(record))


def _names(owners: Iterable[Promise]) -> str:
    return ", ".join(sorted({promise.leaf for promise in owners}))


def _axes_of(wire: Wire | None) -> tuple[str, ...]:
    return () if wire is None else wire.axes


def _merged(found: Iterable[Departure]) -> list[Departure]:
    """One departure for each text, with all its parameters, in order of appearance."""
    groups: dict[tuple[str, str, str], dict[str, None]] = {}
    for each in found:
        leaves = groups.setdefault((each.rule, each.expected, each.found), {})
        leaves.update(dict.fromkeys(filter(None, each.leaf.split(", "))))
    return [Departure(shortened(list(leaves)), *texts) for texts, leaves in groups.items()]


def shortened(leaves: Sequence[str], limit: int = 4) -> str:
    """The leaves' names, the first few of many."""
    text = ", ".join(leaves[:limit])
    return text if len(leaves) <= limit else f"{text} and {len(leaves) - limit} more"


def _core(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without dimensions of size 1, which compilers add and drop; in any order."""
    return tuple(sorted(size for size in shape if size != 1))


def _axes(axes: Sequence[str]) -> str:
    return " and ".join(axes) or "one device"


def _described(record: Collective) -> str:
    times = f" x{record.executions}" if record.executions > 1 else ""
    loop = " in a loop" if record.in_loop else ""
    phase = f", {record.phase}" if record.phase else ""
    shape = ",".join(map(str, record.result_shape if record.kind == "all-gather" else record.shape))
    over = _axes(record.axes) if record.axes else record.groups
    return (
        f"{record.kind} of {record.dtype}[{shape}] over {over}{times}{loop}{phase} "
        f"({human_bytes(record.total_bytes)})"
    )
