"""The collectives of a compiled program: what the compiler made of those that were written.

What it does to them, and how they are found again: several are combined into one instruction with many
operands (a record for each operand); they become asynchronous (`-start` and `-done`, an `async-start`
that calls them, or on TPUs a chain of fusions with one chain_id, of which each holds the collective, those
in inner loops too); a reduce-scatter becomes an all-reduce inside a computation named all-reduce-scatter
(TPU) and a small gather an all-reduce; loops lose an iteration to the program around them, which then has
its collectives.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Final

from . import scopes
from .collective import KINDS, Collective, nbytes, ring_bytes
from .dataflow import Users, is_gather, upstream
from .groups import GROUPS, PAIRS, along_axes, axes_of_groups, axes_of_pairs, groups_of_text
from .hlo import Array, Computation, Instruction, Module, parse, trip_count
from .networks import Networks
from .schedule import Schedule, called_computations
from .slices import as_one_machine

__all__ = ["compiled_collectives"]

_PASSING: Final = (
    "get-tuple-element",
    "bitcast",
    "copy",
    "convert",
    "reshape",
    "transpose",
    "fusion",
)


def compiled_collectives(
    text: str, axis_sizes: Mapping[str, int], networks: Networks | None = None
) -> list[Collective]:
    """Reads the collectives that a compiled step executes, from its text.

    The walk starts at the program's entry. The body of a loop counts as often as it runs if that is
    known (see `hlo.trip_count`), else once, and the records say so. Of a conditional every branch
    counts once.

    On CPU the compiler turns bfloat16 collectives into float32 ones: dtypes and bytes of such a program
    are not those of the accelerators'.

    Args:
        text: what `compiled.as_text()` returns.
        axis_sizes: the mesh's axes and their sizes, in its order.
        networks: what joins its devices. Without it a program of several TPU slices cannot be read.

    Returns:
        One record per operand of a collective and call, in the order of the schedule.

    Raises:
        ValueError: the text is no compiled program, or writes device groups in an unknown way.
    """
    # What is in neither derivative runs after them, if the program has any.
    rest = "update" if "transpose(" in text else "forward"
    module = parse(text) if networks is None else as_one_machine(parse(text), networks)
    reader = _Reader(module, axis_sizes, rest, networks)
    return list(reader.read(reader.module[reader.module.entry], scopes.Place()))


@dataclasses.dataclass(eq=False)
class _Reader:
    module: Module
    axis_sizes: Mapping[str, int]
    phase_of_rest: str
    networks: Networks | None
    _users: Users = dataclasses.field(default_factory=Users)

    @functools.cached_property
    def schedule(self) -> Schedule:
        """What runs beside what."""
        return Schedule(self.module)

    def read(
        self, computation: Computation, place: scopes.Place, started: frozenset[str] = frozenset()
    ) -> Iterator[Collective]:
        """The collectives of a computation; `started` are the chains that began around it."""
        chains = set(started)
        for at in computation:
            if at.opcode == "while":
                yield from self._loop(at, computation, place, frozenset(chains))
                continue
            yield from self._records(at, computation, place)
            for name in called_computations(at):
                inner = self.module[name]
                nested = dataclasses.replace(
                    place, op_name=self._nearest_name(at, computation, place)
                )
                if at.opcode.endswith("-start"):
                    beside = self.schedule.overlaps(at, computation)
                    for record in self.read(inner, nested, frozenset(chains)):
                        yield dataclasses.replace(record, asynchronous=True, overlapped=beside)
                elif at.opcode != "fusion":
                    yield from self.read(inner, nested, frozenset(chains))
                elif chain := self.schedule.chain(name):
                    if chain not in chains:
                        overlapped = chain in self.schedule.overlapping_chains
                        yield from self._fused(inner, nested, overlapped)
                    chains.add(chain)
                else:
                    yield from self._fused(inner, nested, None)

    def _loop(
        self, at: Instruction, around: Computation, place: scopes.Place, started: frozenset[str]
    ) -> Iterator[Collective]:
        trips = trip_count(at, around, self.module)
        condition, body = self.module[at.called("condition")], self.module[at.called("body")]
        again = None if trips is None else trips + 1
        yield from self.read(condition, place.in_loop_of(again, at.op_name), started)
        if trips != 0:
            yield from self.read(body, place.in_loop_of(trips, at.op_name), started)

    def _fused(
        self, computation: Computation, place: scopes.Place, overlapped: bool | None
    ) -> Iterator[Collective]:
        """The collectives of a fusion; `overlapped` is None if it runs at once."""
        for at in computation:
            for record in self._records(at, computation, place):
                yield dataclasses.replace(
                    record, asynchronous=overlapped is not None, overlapped=bool(overlapped)
                )
            if at.opcode == "fusion":
                for name in called_computations(at):
                    yield from self._fused(self.module[name], place, overlapped)

    # ----------------------------------------------------------------------------------------------
    # One collective

    def _records(
        self, at: Instruction, computation: Computation, place: scopes.Place
    ) -> Iterator[Collective]:
        kind = at.opcode.removesuffix("-start")
        if kind not in KINDS:
            return
        fused_scatter = kind == "all-reduce" and "all-reduce-scatter" in computation.name
        kind = "reduce-scatter" if fused_scatter else kind
        axes, size, groups, crossing = self._devices(at, kind)
        start = at.opcode.endswith("-start")
        overlapped = start and self.schedule.overlaps(at, computation)
        name = self._nearest_name(at, computation, place)
        written = scopes.written_kind(at.op_name)
        if not written and kind == "collective-permute" and self._after_scatter(at, computation):
            written = "reduce-scatter"
        if not written and kind == "all-reduce" and is_gather(at, computation):
            written = "all-gather"
        parts = zip(
            self._operands(at, computation), self._leaves(at, computation, place), strict=True
        )
        for (array, unpadded), leaf in parts:
            received, least = (_received(kind, each, size, at) for each in (array, unpadded))
            yield Collective(
                kind=kind,
                axes=axes,
                dtype=array.dtype,
                shape=unpadded.shape,
                result_shape=_result_shape(kind, unpadded, size, at),
                group_size=size,
                executions=place.executions,
                bytes_per_device=received,
                in_loop=place.in_loop,
                unknown_trips=place.unknown_trips,
                groups=groups,
                phase=self._phase(at, name, computation),
                leaf=leaf,
                written="" if written == kind else written,
                instruction=at.name,
                asynchronous=start,
                overlapped=overlapped,
                padding=received - least,
                role=scopes.role(name),
                crossing=crossing,
            )

    def _phase(self, at: Instruction, name: str, computation: Computation) -> str:
        """That of its name; of a gather without one, of what uses the weight: it may be of an older shard."""
        gathers = at.opcode.removesuffix("-start") == "all-gather"
        own = scopes.phase(at.op_name) or (gathers and self._users.phase(at, computation))
        return own or scopes.phase(name) or (self.phase_of_rest if name else "")

    def _operands(self, at: Instruction, computation: Computation) -> list[tuple[Array, Array]]:
        """The operands, and what they are before padding.

        In the dtype of the results: TPUs widen bfloat16 as they sum it in float32.
        """
        count = len(at.operands)
        results = at.arrays[count : 2 * count] if len(at.arrays) >= 2 * count else at.arrays
        found = []
        for name, result in zip(at.operands, results, strict=False):
            operand = computation.instructions[name]
            pads = operand.opcode == "pad" and "all-reduce-scatter" in computation.name
            before = computation.instructions[operand.operands[0]] if pads else operand
            shapes = (operand.arrays[0].shape, before.arrays[0].shape)
            found.append((Array(result.dtype, shapes[0]), Array(result.dtype, shapes[1])))
        return found

    def _devices(self, at: Instruction, kind: str) -> tuple[tuple[str, ...], int, str, float]:
        """Axes, group size, the groups' text if there are no axes to name, the share between networks."""
        if kind == "collective-permute":
            text = at.attribute(PAIRS)
            groups = groups_of_text(text)
            axes = axes_of_pairs(groups, self.axis_sizes)
            size = len({device for pair in groups if len(set(pair)) > 1 for device in pair}) or 1
            size = size if axes is None else math.prod(self.axis_sizes[axis] for axis in axes)
        else:
            text = at.attribute(GROUPS) or at.attribute(r"replica_groups=(\S+)")
            groups = groups_of_text(text or "{}") or along_axes(self.axis_sizes, self.axis_sizes)
            axes = axes_of_groups(groups, self.axis_sizes)
            if axes is None and self.networks is not None:
                axes = self.networks.axes_of_part(groups)
            size = max(len(group) for group in groups)
        crossing = 0.0 if self.networks is None else self.networks.share(kind, groups)
        return axes or (), size, text if axes is None else "", crossing

    def _leaves(self, at: Instruction, computation: Computation, place: scopes.Place) -> list[str]:
        """The parameter of each operand, "" where it is not known or several were packed into one."""
        merged = [scopes.leaves(name) for name in _unmerged(at.op_name)]
        if len(merged) != len(at.operands) or any(len(names) > 1 for names in merged):
            merged = [()] * len(at.operands)
        found = [
            ""
            if self._packed(operand, computation)
            else (*names, "")[0] or self._leaf_before(operand, computation)
            for names, operand in zip(merged, at.operands, strict=True)
        ]
        if found == [""] and not self._packed(at.operands[0], computation):
            around = {*scopes.leaves(self._reduction_name(at)), *scopes.leaves(place.op_name)}
            return [around.pop()] if len(around) == 1 else found
        return found

    def _packed(self, operand: str, computation: Computation) -> bool:
        """Whether the compiler concatenated several arrays into this one."""
        at = computation.instructions[operand]
        if at.opcode == "bitcast":
            return self._packed(at.operands[0], computation)
        if at.opcode == "fusion":
            inner = self.module[at.called("calls")]
            return len(at.arrays) == 1 and self._packed(inner.root, inner)
        return at.opcode == "concatenate"

    def _after_scatter(self, at: Instruction, computation: Computation) -> bool:
        """Whether a TPU moves the padding of a reduce-scatter, whose shards it made a bit too large."""
        before = itertools.islice(upstream(at.operands[0], computation), 4)
        return any("all-reduce-scatter" in i.called("calls") for i in before)

    def _reduction_name(self, at: Instruction) -> str:
        to_apply = at.called("to_apply")
        if not to_apply:
            return ""
        reduction = self.module[to_apply]
        return reduction.instructions[reduction.root].op_name

    def _leaf_before(self, name: str, computation: Computation) -> str:
        """The parameter in whose scope the operand was cast, if it was."""
        for at in upstream(name, computation):
            names = scopes.leaves(at.op_name)
            if at.opcode == "fusion" and len(at.arrays) > 1:
                return ""  # named after one of its results
            if names or at.opcode not in _PASSING:
                return names[0] if len(names) == 1 else ""
        return ""

    def _nearest_name(self, at: Instruction, computation: Computation, place: scopes.Place) -> str:
        """The name of the instruction, else of what it adds up by, comes from, or stands in."""
        before = (i.op_name for name in at.operands[:1] for i in upstream(name, computation))
        names = (at.op_name, self._reduction_name(at), *before, place.op_name)
        return next((name for name in names if "jit(" in name or scopes.phase(name)), "")


def _received(kind: str, operand: Array, group_size: int, at: Instruction) -> float:
    result = nbytes(_result_shape(kind, operand, group_size, at), operand.dtype)
    return ring_bytes(kind, nbytes(operand.shape, operand.dtype), result, group_size)


def _result_shape(kind: str, operand: Array, group_size: int, at: Instruction) -> tuple[int, ...]:
    shape = list(operand.shape)
    dim = int(at.attribute(r"dimensions=\{(\d+)") or 0)
    if kind == "all-gather":
        shape[dim] *= group_size
    elif kind == "reduce-scatter" and shape:
        shape[dim] = math.ceil(shape[dim] / group_size)
    return tuple(shape)


def _unmerged(op_name: str) -> list[str]:
    """The names that XLA joined to "prefix/(a:b:c)" when it merged operations."""
    prefix, merged, rest = op_name.partition("/(")
    if not merged or not rest.endswith(")"):
        return [op_name]
    return [f"{prefix}/{part}" for part in rest[:-1].split(":")]
