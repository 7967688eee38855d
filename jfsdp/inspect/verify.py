"""A program held against what the policies promise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from .collective import Collective, itemsize
from .contract import Departure, Promise, Wire
from .table import human_bytes

__all__ = ["LARGE", "SMALL", "departures"]

LARGE: Final = 2**20
"""Bytes from which a collective that no policy speaks of counts. Losses, norms and counters are below."""

SMALL: Final = 4096.0


def departures(
    collectives: Sequence[Collective],
    promises: Sequence[Promise],
    *,
    calls: int,
    tolerance: float,
    other_axes: Iterable[str] = (),
) -> list[Departure]:
    """Every point in which a program's collectives are not the promised ones.

    A collective belongs to the parameter that its name tells, else to those that have its shape.
    Not looked at are collectives of integers, those over axes that are not data-parallel, and those of
    less than 1 MiB that belong to no parameter.

    Args:
        collectives: what the program does.
        promises: one for each parameter.
        calls: how often the step calls the model.
        tolerance: by which fraction bytes may exceed the least ones.
        other_axes: the mesh axes that are not data-parallel, of which the policies say nothing.

    Returns:
        The departures, those of the same kind for parameters of one shape as one.
    """
    book = _Book(promises)
    others = set(other_axes)
    collectives = [c for c in collectives if _matters(c) and not (c.axes and others >= set(c.axes))]
    found: list[Departure] = []
    for record in collectives:
        if not _moves_padding(record):
            found += book.of_one(record)
    found += _kept(collectives, promises, calls)
    found += _totals(collectives, promises, calls, tolerance)
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

    def __init__(self, promises: Iterable[Promise]) -> None:
        self.by_leaf = {promise.leaf: promise for promise in promises}
        self.by_shape = _index(self.by_leaf.values(), lambda promise: promise.shapes)
        self.by_shard = _index(self.by_leaf.values(), lambda promise: promise.shards)
        sums = [p.sum for p in self.by_leaf.values() if p.sum]
        self.sum_axes = {axis for wire in sums for axis in wire.axes}
        self.sum_dtypes = {wire.dtype for wire in sums}

    def owners(self, record: Collective, shape: tuple[int, ...], index: _Index) -> list[Promise]:
        named = self.by_leaf.get(record.leaf)
        if named is not None:
            return [named]
        core = _core(shape)
        # A vector is as often an activation's as a bias's.
        return index.get(core, []) if len(core) > 1 else []

    def of_one(self, record: Collective) -> Iterator[Departure]:
        if record.purpose == "all-gather":
            owners = self.owners(record, record.result_shape, self.by_shape)
            yield from self._gather(record, owners)
        elif record.kind in ("reduce-scatter", "all-reduce"):
            owners: list[Promise] = []
            if record.kind == "all-reduce" and _within(record, self.sum_axes):
                owners = self.owners(record, record.shape, self.by_shard)
            owners = owners or self.owners(record, record.shape, self.by_shape)
            yield from self._reduction(record, owners)
        elif record.total_bytes >= LARGE:
            yield _foreign(record)

    def _gather(self, record: Collective, owners: list[Promise]) -> Iterator[Departure]:
        if not owners:
            if record.total_bytes >= LARGE:
                yield _foreign(record)
            return
        yield from _against(record, owners, _nearest(record, [p.gather for p in owners]))

    def _reduction(self, record: Collective, owners: list[Promise]) -> Iterator[Departure]:
        large = record.total_bytes >= LARGE
        if not owners:
            if record.kind == "all-reduce" and _within(record, self.sum_axes):
                # Some backends pack many gradients into one vector.
                if self.sum_dtypes and record.dtype not in self.sum_dtypes and large:
                    stated = " or ".join(sorted(self.sum_dtypes))
                    yield Departure("", "dtype of the all-reduce", stated, _described(record))
            elif large and not _is_small_vector(record):
                yield _foreign(record)
            return
        owner = owners[0]
        if record.kind == "reduce-scatter":
            yield from _against(record, owners, _nearest(record, [p.scatter for p in owners]))
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


def _kept(
    collectives: Sequence[Collective], promises: Sequence[Promise], calls: int
) -> Iterator[Departure]:
    """Weights that should be dropped after the forward, but are not gathered again for the backward.

    Not every weight has to be: biases and embeddings are not read there, nor those of the first unit if
    the gradient of its input is not taken. So half of the rest will do.
    """
    if not any(
        c.phase == "backward" and c.kind in ("reduce-scatter", "all-reduce") for c in collectives
    ):
        return
    again: dict[str, float] = {}
    for promise in promises:
        if promise.gathers == 2 and promise.gather is not None and len(promise.shapes[-1]) > 1:
            size = calls * promise.gather.bytes_per_device / 2
            again[promise.unit] = again.get(promise.unit, 0.0) + size
    wanted = sum(again.values()) - max(again.values(), default=0.0)
    received = sum(
        c.total_bytes for c in collectives if c.purpose == "all-gather" and c.phase == "backward"
    )
    if received < wanted / 2:
        yield Departure(
            "",
            "weights are dropped after the forward and gathered again for the backward",
            f"about {human_bytes(wanted)} gathered in the backward",
            f"{human_bytes(received)}: the whole weights are kept",
        )


def _totals(
    collectives: Sequence[Collective],
    promises: Sequence[Promise],
    calls: int,
    tolerance: float,
) -> Iterator[Departure]:
    gathering = [record for record in collectives if record.purpose == "all-gather"]
    # TPUs all-reduce what is small. Permutes that move the padding of a scatter are not counted.
    reducing = [
        record
        for record in collectives
        if record.purpose != "all-gather"
        and (
            record.kind in ("reduce-scatter", "all-reduce")
            or record.purpose == "collective-permute"
        )
    ]
    for name, kinds, records in (
        ("all-gathers", ("all-gather",), gathering),
        ("reductions", ("reduce-scatter", "all-reduce"), reducing),
    ):
        stated = [
            (calls * wire.bytes_per_device, wire.dtype)
            for p in promises
            for kind, wire in p.wires().items()
            if kind in kinds
        ]
        wanted = sum(size for size, _ in stated)
        received = sum(record.unpadded_bytes for record in records)
        # In a narrower dtype too many elements may still be few bytes.
        elements = sum(size / itemsize(dtype) for size, dtype in stated if dtype)
        moved = sum(record.unpadded_bytes / itemsize(record.dtype) for record in records)
        slack = max(tolerance * wanted, SMALL)
        too_many = all(dtype for _, dtype in stated) and moved - elements > max(
            tolerance * elements, SMALL
        )
        if received - wanted > slack or too_many:
            ratios = [f"{received / wanted:.3f}x"] if wanted else []
            ratios += [f"{moved / elements:.3f}x the elements"] if too_many and elements else []
            yield Departure(
                "",
                f"bytes of the {name}, per device and step",
                f"at most {human_bytes(wanted)}",
                f"{human_bytes(received)} ({', '.join(ratios) or 'none are stated'})",
            )


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
