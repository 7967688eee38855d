"""When the weights of the units inside a call are gathered, and when their gradients are reduced.

The forward is traced once with whole weights as inputs, and cut where those of the next unit are first
needed (`pieces`). Then both passes are written out here. What runs beside what is settled by what goes
through one `optimization_barrier` between two pieces (`fence`):

- forward: the activations, the weights of the unit that runs next, gathered by then, and the shards of the
  one after it, to be gathered beside it;
- backward: the cotangents, the weights again, the shards of the unit before, the whole gradients of the last
  unit, to be reduced beside the next one's, and those of the one before, reduced by then.

Every one of them is necessary (8 x H100, jax 0.12.0.1, a GPT of 6 to 16 blocks of width 512, remat): without
the whole weights XLA gathers two units at once, beside nothing; without whole or reduced gradients it merges
the reductions of all units at the end of the backward, until when their whole gradients are alive (16
blocks: 250 MB of temporaries, not 83). Thresholds for its combiners, as compiler options, help neither in
place of the barriers nor beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jfsdp import tape as tapes
from jfsdp.activations import check_kept, check_names, values_in
from jfsdp.layers import values_of
from jfsdp.offload import moved_like, to_device, typed_on_device
from jfsdp.opened import opened
from jfsdp.pieces import cut, layers_of, misused
from jfsdp.pullback import add, is_floating, is_variable
from jfsdp.recorded import Kept, Record, record
from jfsdp.reductions import Reductions
from jfsdp.scanned import Loop, LoopRecord
from jfsdp.unshard import check_reducible
from jfsdp.varying import zeros
from jfsdp.weights import Ahead, Weight, fence

__all__ = ["Scheduled", "call_scheduled"]

Scheduled = Callable[[Sequence[Any], Mapping[int, int]], tapes.Rows]
"""A forward as a function of leaves. Those in the second argument, with their groups, are whole."""


def call_scheduled(
    body: Scheduled, leaves: Sequence[Any], weights: Sequence[Weight], prefetch: int
) -> tapes.Rows:
    """Call `body`, the weights of each unit whole for as long as it needs them.

    Args:
        body: the forward.
        leaves: its arrays; of `weights` the shards.
        weights: what to gather.
        prefetch: how many units ahead to gather.
    """

    def run(values: Sequence[Any]) -> tapes.Rows:
        return _Program(body, values, weights, prefetch).run(values)

    def record(values: Sequence[Any], tape: tapes.Tape) -> tuple[tapes.Rows, list[Any]]:
        tape.program = _Program(body, values, weights, prefetch)
        return tape.program.record(values, tape.wanted)

    def replay(residuals: list[Any], rows: tapes.Rows, tape: tapes.Tape) -> list[Any]:
        cotangents: list[Any] = []
        for known, row in zip(tape.present, rows, strict=True):
            values = iter(row)
            cotangents += [next(values) if is_known else None for is_known in known]
        return tape.program.replay(residuals, cotangents)

    return tapes.differentiated_inside(run, record, replay, leaves)


class _Program:
    """A forward, traced with whole weights and cut."""

    def __init__(
        self, body: Scheduled, values: Sequence[Any], weights: Sequence[Weight], prefetch: int
    ):
        self.prefetch = prefetch
        managed = {w.index: w for w in weights}
        while wrong := self._trace(body, values, managed):
            managed = {i: w for i, w in managed.items() if w.group not in wrong}
        self.pieces = cut(self.jaxpr, {v: w.group for v, w in self.weights.items()})
        self.loops = {
            n: Loop(piece, self.weights, prefetch)
            for n, piece in enumerate(self.pieces)
            if piece.loop is not None
        }
        self.stacked = {v for loop in self.loops.values() for v in loop.layers}

    def _trace(
        self, body: Scheduled, values: Sequence[Any], managed: Mapping[int, Weight]
    ) -> set[int]:
        """Trace the forward with the managed weights whole; the groups with which that cannot be done."""
        # What is gathered by others would go through their remats, where XLA for TPUs would compute with host
        # memory: it comes to the device as it is.
        types, lengths = [typed_on_device(x) for x in values], []
        for index, weight in managed.items():
            types[index] = weight.whole_type(values[index])

        def flat(values: list[Any]) -> list[Any]:
            rows = body(values, {index: w.group for index, w in managed.items()})
            lengths[:] = [len(row) for row in rows]
            return [x for row in rows for x in row]

        closed = jax.make_jaxpr(flat)(types)
        whole = [index in managed for index in range(len(types))]
        self.jaxpr, self.consts = opened(closed.jaxpr, closed.consts, whole)
        self.lengths = tuple(lengths)
        invars = enumerate(self.jaxpr.invars)
        self.weights = {v: managed[i] for i, v in invars if i in managed}
        wrong = misused(self.jaxpr, {v: w.group for v, w in self.weights.items()})
        scans = (e for e in self.jaxpr.eqns if e.primitive.name == "scan")
        scanned = {v for equation in scans for v in layers_of(equation)}
        return wrong | {w.group for v, w in self.weights.items() if w.how.once and v in scanned}

    # ----------------------------------------------------------------------------------------------
    # Forward

    def run(self, values: Sequence[Any]) -> tapes.Rows:
        """The results, of shards and other leaves."""
        shards = {v: w.taken(values[w.index]) for v, w in self.weights.items()}

        def visit(number: int, env: dict[Any, Any]) -> dict[Any, Any]:
            piece = self.pieces[number]
            if number in self.loops:
                return self.loops[number].run(env, shards)
            made = piece.run([env[v] for v in piece.inputs])
            return dict(zip(piece.outputs, made, strict=True))

        return self._forward(values, shards, visit, dict, Kept())[0]

    def record(self, values: Sequence[Any], wanted: Sequence[int]) -> tuple[tapes.Rows, list]:
        """The results, and what `replay` needs."""
        self.wanted = list(wanted)
        self.types = [jax.typeof(values[i]) for i in wanted]
        active = {v for i, v in enumerate(self.jaxpr.invars) if i in set(wanted)}
        for v, weight in self.weights.items():
            if weight.whole_gradient in set(wanted):
                active.add(v)
            if v in active:
                check_reducible(weight.how)
        shards = {v: w.taken(values[w.index]) for v, w in self.weights.items()}
        dropped = {v for v, w in self.weights.items() if w.again}
        kept = Kept(on_tpu=any(w.how.staged for w in self.weights.values()))
        named = values_in(self.jaxpr) if check_names(self.jaxpr) else None
        self.records: dict[int, Record | LoopRecord] = {}

        def visit(number: int, env: dict[Any, Any]) -> dict[Any, Any]:
            piece = self.pieces[number]
            if number in self.loops:
                made, found = self.loops[number].record(
                    env, shards, active, dropped, kept.add, named
                )
            else:
                made, found = record(piece, env, active, dropped, kept.add, named)
            if found is not None:
                self.records[number] = found
                active.update(found.outputs)
            return made

        def again() -> dict[Any, Any]:
            """What the backward pass gathers first, as far as the forward has come."""
            return self._parts(Ahead(self._needs(), self.prefetch).start(), shards, last=True)

        rows, first = self._forward(values, shards, visit, again, kept)
        if named is not None:
            differentiated = [e for n in self.records for e in self.pieces[n].equations]
            check_kept(differentiated, set().union(*(x.names for x in self.records.values())))
        self.first = {v: kept.add(x) for v, x in first.items()}
        needed = [v for _, new in self._needs() for v in new]
        self.kept_shards = {
            v: kept.add(shards[v])
            for v in needed
            if v not in first or v in self.stacked or self.weights[v].late
        }
        return rows, kept.arrays

    def _needs(self) -> list[tuple[int, list[Any]]]:
        """The pieces that need weights again, last first, and which they are the first to need."""
        seen: set[Any] = set()
        needs = []
        for number in sorted(self.records, reverse=True):
            new = [v for v in self.records[number].needed if v not in seen]
            seen.update(new)
            needs += [(number, new)] if new else []
        return needs

    def _forward(
        self,
        values: Sequence[Any],
        shards: Mapping[Any, Any],
        visit: Callable[[int, dict[Any, Any]], dict[Any, Any]],
        again: Callable[[], dict[Any, Any]],
        kept: Kept,
    ) -> tuple[tapes.Rows, dict[Any, Any]]:
        """Run all pieces; the results, and what `again` gives, tied to what comes behind the last unit.

        The backward's first gathers may then run beside that and the loss. Tied to nothing they would be
        the same to XLA as the forward's, whose weights it would keep.
        """
        env = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        both = zip(self.jaxpr.invars, values, strict=True)
        env.update((v, to_device(x)) for v, x in both if v not in self.weights)
        made: set[Any] = set()
        ahead = Ahead(
            [(n, piece.first) for n, piece in enumerate(self.pieces) if piece.first], self.prefetch
        )
        env.update(self._whole(self._parts(ahead.start(), shards, last=False), shards))
        dropped = [any(self.weights[v].again for v in piece.first) for piece in self.pieces]
        tail, first = len(dropped) - [*reversed(dropped), True].index(True), {}
        for number, piece in enumerate(self.pieces):
            if number in ahead:
                coming = ahead.after(number)
                parts = self._parts(coming, shards, last=False)
                live = [v for v in piece.inputs if v in made and is_floating(v.aval)]
                whole = [v for v in piece.first if v in env]
                first = again() if number == tail else first
                tied, parts, first, gone = fence(
                    [env[v] for v in (*live, *whole)], parts, first, kept.leaving()
                )
                kept.tie(gone)
                env.update(zip((*live, *whole), tied, strict=True))
                env.update(self._whole(parts, shards))
            new = visit(number, env)
            made.update(new)
            env.update(new)
            for v in piece.last:
                env.pop(v, None)
        for v in self.jaxpr.outvars:  # a weight that is returned as it is
            if is_variable(v) and v in self.weights and v not in env:
                env[v] = self.weights[v].gathered(shards[v])
        results = values_of(env, self.jaxpr.outvars)
        gone = kept.leaving(all_of_them=True)
        if not first or gone:
            floating = {i: x for i, x in enumerate(results) if is_floating(x)}
            floating, first, gone = fence(floating, first or again(), gone)
            kept.tie(gone)
            results = [floating.get(i, x) for i, x in enumerate(results)]
        left = iter(results)
        return tuple([next(left) for _ in range(length)] for length in self.lengths), first

    def _parts(
        self, coming: Iterable[Any], shards: Mapping[Any, Any], last: bool
    ) -> dict[Any, Any]:
        """What to gather of these weights behind a fence: of stacked ones the first or the last layer."""
        return {
            v: to_device(jax.lax.index_in_dim(shards[v], -1 if last else 0, keepdims=False))
            if v in self.stacked
            else self.weights[v].ticket(shards[v])
            for v in coming
            if v not in self.stacked or self.prefetch
        }

    def _whole(self, parts: Mapping[Any, Any], shards: Mapping[Any, Any]) -> dict[Any, Any]:
        return {
            v: self.weights[v].gathered(x, stacked=True)
            if v in self.stacked
            else self.weights[v].gathered(self.weights[v].admitted(shards.get(v), x))
            for v, x in parts.items()
        }

    # ----------------------------------------------------------------------------------------------
    # Backward

    def replay(self, kept: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """The gradients of the wanted leaves, of a cotangent for each result; None for none."""
        sums: dict[Any, Any] = {}
        for v, cotangent in zip(self.jaxpr.outvars, cotangents, strict=True):
            if cotangent is not None:
                add(sums, v, cotangent)
        shards = {v: kept[place] for v, place in self.kept_shards.items()}
        ahead = Ahead(self._needs(), self.prefetch)
        wholes = self._whole({v: kept[place] for v, place in self.first.items()}, shards)
        reductions = Reductions(self.weights)
        for number in sorted(self.records, reverse=True):
            record, piece = self.records[number], self.pieces[number]
            given = [sums.pop(v, None) for v in record.outputs]
            if all(x is None for x in given):
                continue
            given = [
                zeros(v.aval) if x is None else x
                for v, x in zip(record.outputs, given, strict=True)
            ]
            if number in ahead or piece.first:
                coming = ahead.after(number) if number in ahead else ()
                parts = self._parts(coming, shards, last=True)
                given, wholes, parts = reductions.fence(given, wholes, parts)
                wholes.update(reductions.begin(self._whole(parts, shards)))
            late = [v for v in record.needed if v not in wholes]  # nobody looked so far ahead
            wholes.update(self._whole(self._parts(late, shards, last=True), shards))
            if isinstance(record, LoopRecord):
                gradients = record.backward(kept, shards, wholes, given, reductions)
            else:
                gradients = record.backward(kept, wholes, given)
            for v, gradient in gradients.items():
                add(sums, v, gradient)
            for v in piece.first:
                wholes.pop(v, None)
                if v in sums:
                    reductions.add(v, sums.pop(v))
            if not self.prefetch and number > 0:
                live = [v for v in piece.inputs if v in sums]
                tied = reductions.settle([sums[v] for v in live])
                sums.update(zip(live, tied, strict=True))
        for v in [v for v in self.weights if v in sums]:  # of those that are returned as they are
            reductions.add(v, sums.pop(v))
        return self._gradients(sums, reductions.finish())

    def _gradients(self, sums: Mapping[Any, Any], done: Mapping[Any, Any]) -> list[Any]:
        by_index: dict[int, Any] = {}
        for v, weight in self.weights.items():
            if v in done:
                target = weight.whole_gradient
                by_index[weight.index if target is None else target] = done[v]
        for index, v in enumerate(self.jaxpr.invars):
            if v not in self.weights and v in sums:
                by_index[index] = sums[v]
        both = zip(self.wanted, self.types, strict=True)
        return [moved_like(by_index[i], kind) if i in by_index else zeros(kind) for i, kind in both]
