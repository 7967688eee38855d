"""When the weights of the units inside a call are gathered, and when their gradients are reduced.

The forward is traced once with whole weights as inputs, and cut where those of the next unit are first
needed (`pieces`). Then both passes are written out here. What runs beside what is settled by what goes
through one `optimization_barrier` between two pieces (`fence`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jfsdp import region as regions
from jfsdp.layers import is_inexact, values_of
from jfsdp.pieces import cut, is_floating, layers_of, misused
from jfsdp.pullback import is_variable
from jfsdp.recorded import Kept, Record, record
from jfsdp.reductions import Reductions
from jfsdp.remat import KEPT
from jfsdp.scanned import Loop, LoopRecord
from jfsdp.unshard import Gathering, check_reducible, gather
from jfsdp.weights import Ahead, Weight, fence

__all__ = ["Scheduled", "call_scheduled"]

Scheduled = Callable[[Sequence[Any], Mapping[int, int]], regions.Rows]
"""A forward as a function of leaves. Those in the second argument, with their groups, are whole."""


def call_scheduled(
    body: Scheduled, leaves: Sequence[Any], weights: Sequence[Weight], prefetch: int
) -> regions.Rows:
    """Call `body`, the weights of each unit whole for as long as it needs them.

    Args:
        body: the forward.
        leaves: its arrays; of `weights` the shards.
        weights: what to gather.
        prefetch: how many units ahead to gather.
    """

    def run(values: Sequence[Any]) -> regions.Rows:
        return _Program(body, values, weights, prefetch).run(values)

    def record(values: Sequence[Any], tape: regions.Tape) -> tuple[regions.Rows, list[Any]]:
        tape.program = _Program(body, values, weights, prefetch)
        return tape.program.record(values, tape.wanted)

    def replay(residuals: list[Any], rows: regions.Rows, tape: regions.Tape) -> list[Any]:
        cotangents: list[Any] = []
        for known, row in zip(tape.present, rows, strict=True):
            values = iter(row)
            cotangents += [next(values) if is_known else None for is_known in known]
        return tape.program.replay(residuals, cotangents)

    return regions.differentiated_inside(run, record, replay, leaves)


class _Program:
    """A forward, traced with whole weights and cut."""

    def __init__(
        self,
        body: Scheduled,
        values: Sequence[Any],
        weights: Sequence[Weight],
        prefetch: int,
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
        types, lengths = list(values), []
        for index, weight in managed.items():
            types[index] = jax.eval_shape(
                lambda x, how=weight.how: gather(_taken(x, how), how), values[index]
            )

        def flat(values: list[Any]) -> list[Any]:
            rows = body(values, {index: w.group for index, w in managed.items()})
            lengths[:] = [len(row) for row in rows]
            return [x for row in rows for x in row]

        closed = jax.make_jaxpr(flat)(types)
        self.jaxpr, self.consts, self.lengths = closed.jaxpr, closed.consts, tuple(lengths)
        invars = enumerate(self.jaxpr.invars)
        self.weights = {v: managed[i] for i, v in invars if i in managed}
        wrong = misused(self.jaxpr, {v: w.group for v, w in self.weights.items()})
        scans = (e for e in self.jaxpr.eqns if e.primitive.name == "scan")
        scanned = {v for equation in scans for v in layers_of(equation)}
        return wrong | {w.group for v, w in self.weights.items() if w.how.once and v in scanned}

    # ----------------------------------------------------------------------------------------------
    # Forward

    def run(self, values: Sequence[Any]) -> regions.Rows:
        """The results, of shards and other leaves."""
        shards = self._shards(values)

        def visit(number: int, env: dict[Any, Any]) -> dict[Any, Any]:
            piece = self.pieces[number]
            if number in self.loops:
                return self.loops[number].run(env, shards)
            made = piece.run([env[v] for v in piece.inputs])
            return dict(zip(piece.outputs, made, strict=True))

        return self._forward(values, shards, visit, dict)[0]

    def record(self, values: Sequence[Any], wanted: Sequence[int]) -> tuple[regions.Rows, list]:
        """The results, and what `replay` needs."""
        self.wanted = list(wanted)
        self.types = [jax.typeof(values[i]) for i in wanted]
        active = {v for i, v in enumerate(self.jaxpr.invars) if i in set(wanted)}
        for v, weight in self.weights.items():
            if weight.whole_gradient in set(wanted):
                active.add(v)
            if v in active:
                check_reducible(weight.how)
        shards = self._shards(values)
        dropped = {v for v, w in self.weights.items() if w.again}
        kept = Kept()
        self.records: dict[int, Record | LoopRecord] = {}

        def visit(number: int, env: dict[Any, Any]) -> dict[Any, Any]:
            piece = self.pieces[number]
            if number in self.loops:
                made, found = self.loops[number].record(env, shards, active, dropped, kept.add)
            else:
                made, found = record(piece, env, active, dropped, kept.add)
            if found is not None:
                self.records[number] = found
                active.update(found.outputs)
            return made

        def again() -> dict[Any, Any]:
            """What the backward pass gathers first, as far as the forward has come."""
            return self._parts(Ahead(self._needs(), self.prefetch).start(), shards, last=True)

        rows, first = self._forward(values, shards, visit, again)
        self.first = {v: kept.add(x) for v, x in first.items()}
        self.kept_shards = {v: kept.add(shards[v]) for _, needed in self._needs() for v in needed}
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

    def _shards(self, values: Sequence[Any]) -> dict[Any, Any]:
        """Of each weight what it is gathered from."""
        return {v: _taken(values[w.index], w.how) for v, w in self.weights.items()}

    def _forward(
        self,
        values: Sequence[Any],
        shards: Mapping[Any, Any],
        visit: Callable[[int, dict[Any, Any]], dict[Any, Any]],
        again: Callable[[], dict[Any, Any]],
    ) -> tuple[regions.Rows, dict[Any, Any]]:
        """Run all pieces; the results, and what `again` gives, tied to what comes behind the last unit.

        The backward's first gathers may then run beside that and the loss. Tied to nothing they would be
        the same to XLA as the forward's, whose weights it would keep.
        """
        env = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        both = zip(self.jaxpr.invars, values, strict=True)
        env.update((v, x) for v, x in both if v not in self.weights)
        made: set[Any] = set()
        ahead = Ahead(
            [(n, piece.first) for n, piece in enumerate(self.pieces) if piece.first], self.prefetch
        )
        self._gather(ahead.start(), shards, env)
        dropped = [
            n for n, p in enumerate(self.pieces) if any(self.weights[v].again for v in p.first)
        ]
        tail, first = max(dropped, default=-1) + 1, None
        for number, piece in enumerate(self.pieces):
            if number in ahead:
                coming = ahead.after(number)
                parts = self._parts(coming, shards, last=False)
                live = [v for v in piece.inputs if v in made and is_floating(v)]
                whole = [v for v in piece.first if v in env]
                first = again() if number == tail else first
                tied, parts, first = fence([env[v] for v in (*live, *whole)], parts, first or {})
                env.update(zip((*live, *whole), tied, strict=True))
                env.update(self._whole(parts))
            new = visit(number, env)
            made.update(new)
            env.update(new)
            for v in piece.last:
                env.pop(v, None)
        for v in self.jaxpr.outvars:  # a weight that is returned as it is
            if is_variable(v) and v in self.weights and v not in env:
                env[v] = self.weights[v].gathered(shards[v])
        results = values_of(env, self.jaxpr.outvars)
        if not first:
            floating = {i: x for i, x in enumerate(results) if is_inexact(x)}
            floating, first = fence(floating, again())
            results = [floating.get(i, x) for i, x in enumerate(results)]
        left = iter(results)
        return tuple([next(left) for _ in range(length)] for length in self.lengths), first

    def _gather(self, coming: Iterable[Any], shards: Mapping[Any, Any], env: dict) -> None:
        env.update(self._whole(self._parts(coming, shards, last=False)))

    def _parts(
        self, coming: Iterable[Any], shards: Mapping[Any, Any], last: bool
    ) -> dict[Any, Any]:
        """What to gather of these weights: of stacked ones the first or the last layer."""
        return {
            v: jax.lax.index_in_dim(shards[v], -1 if last else 0, keepdims=False)
            if v in self.stacked
            else shards[v]
            for v in coming
            if v not in self.stacked or self.prefetch
        }

    def _whole(self, parts: Mapping[Any, Any]) -> dict[Any, Any]:
        return {v: self.weights[v].gathered(x, v in self.stacked) for v, x in parts.items()}

    # ----------------------------------------------------------------------------------------------
    # Backward

    def replay(self, kept: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """The gradients of the wanted leaves, of a cotangent for each result; None for none."""
        sums: dict[Any, Any] = {}
        for v, cotangent in zip(self.jaxpr.outvars, cotangents, strict=True):
            if cotangent is not None:
                _add(sums, v, cotangent)
        shards = {v: kept[place] for v, place in self.kept_shards.items()}
        ahead = Ahead(self._needs(), self.prefetch)
        wholes = self._whole({v: kept[place] for v, place in self.first.items()})
        reductions = Reductions(self.weights)
        for number in sorted(self.records, reverse=True):
            record, piece = self.records[number], self.pieces[number]
            given = [sums.pop(v, None) for v in record.outputs]
            if all(x is None for x in given):
                self._gather_skipped(ahead, number, shards, wholes)
                continue
            given = [
                regions.zeros(v.aval) if x is None else x
                for v, x in zip(record.outputs, given, strict=True)
            ]
            if number in ahead or piece.first:
                coming = ahead.after(number) if number in ahead else ()
                parts = self._parts(coming, shards, last=True)
                given, wholes, parts = reductions.fence(given, wholes, parts)
                wholes.update(reductions.begin(self._whole(parts)))
            if isinstance(record, LoopRecord):
                gradients = record.backward(kept, shards, wholes, given, reductions)
            else:
                gradients = record.backward(kept, wholes, given)
            for v, gradient in gradients.items():
                _add(sums, v, gradient)
            for v in piece.first:
                wholes.pop(v, None)
                if v in sums:
                    reductions.add(v, sums.pop(v))
            if not self.prefetch and number > 0:
                self._settle(reductions, sums, number)
        for v in [v for v in self.weights if v in sums]:  # of those that are returned as they are
            reductions.add(v, sums.pop(v))
        return self._gradients(sums, reductions.finish())

    def _gather_skipped(self, ahead: Any, number: int, shards: Any, wholes: dict) -> None:
        if number in ahead:
            wholes.update(self._whole(self._parts(ahead.after(number), shards, last=True)))

    def _settle(self, reductions: Any, sums: dict[Any, Any], number: int) -> None:
        """Let the gradients of what was made before wait for this unit's reductions."""
        live = [v for v in self.pieces[number].inputs if v in sums]
        tied = reductions.settle([sums[v] for v in live])
        sums.update(zip(live, tied, strict=True))

    def _gradients(self, sums: Mapping[Any, Any], done: Mapping[Any, Any]) -> list[Any]:
        by_index: dict[int, Any] = {}
        for v, weight in self.weights.items():
            if v in done:
                target = weight.whole_gradient
                by_index[weight.index if target is None else target] = done[v]
        for index, v in enumerate(self.jaxpr.invars):
            if v not in self.weights and v in sums:
                by_index[index] = sums[v]
        return [
            by_index[i] if i in by_index else regions.zeros(kind)
            for i, kind in zip(self.wanted, self.types, strict=True)
        ]


def _taken(shard: Any, how: Gathering) -> Any:
    """What the gathers of both passes take: the shard, or what stays of the weight between them."""
    return checkpoint_name(gather(shard, how.first), KEPT) if how.once else shard


def _add(sums: dict[Any, Any], v: Any, cotangent: Any) -> None:
    sums[v] = sums[v] + cotangent if v in sums else cotangent
