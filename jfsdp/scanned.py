"""A scan over layers, each of them a unit: the next layer's weights are gathered while one runs.

A loop cannot look ahead by itself, so the whole weights of the next layer, and in the backward pass the
unreduced gradients of the last one, are carried from one iteration to the next. The first and the last layer
stand outside of the loop, so that nothing is gathered or reduced in vain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jfsdp._compat import function_of, scan_counts
from jfsdp.activations import Value, inside
from jfsdp.layers import (
    Derivative,
    HostStack,
    at,
    chosen,
    filled,
    join,
    put,
    shards_at,
    values_of,
)
from jfsdp.offload import is_on_host
from jfsdp.opened import opened
from jfsdp.pieces import Piece
from jfsdp.pullback import add, is_floating, is_variable
from jfsdp.reductions import Reductions
from jfsdp.varying import zeros
from jfsdp.weights import Weight, fence

__all__ = ["Loop", "LoopRecord"]

Layer = Callable[[list[Any], list[Any], list[Any]], tuple[list[Any], list[Any]]]
"""Takes the carry, whole weights and one layer of the rest; returns the carry, and what is stacked."""


class Loop:
    """A scan over stacked weights.

    Attributes:
        length: the number of layers.
        ahead: 1 if a layer's weights are gathered while the one before runs, else 0.
        consts: its operands that are the same in every layer.
        layers: the variables of its stacked weights.
        weights: what is known of those.
        others: its other stacked operands.
        outputs: the variables of the last carry, and of what is stacked and read later.
    """

    def __init__(self, piece: Piece, weights: Mapping[Any, Weight], prefetch: int):
        equation = piece.loop
        params = equation.params
        first, second = scan_counts(params)
        self._xs = equation.invars[first + second :]
        self._is_layer = [is_variable(x) and x in weights for x in self._xs]
        jaxpr, consts = params["jaxpr"], getattr(params["jaxpr"], "consts", ())
        body = opened(
            getattr(jaxpr, "jaxpr", jaxpr), consts, [False] * (first + second) + self._is_layer
        )
        self._body, self._equation = function_of(*body), equation
        self._unroll = params["unroll"]
        # NNX hands all weights back, whole, layer by layer: what nobody reads is not stacked.
        self._read = [v in piece.outputs for v in equation.outvars[second:]]
        self.length: int = params["length"]
        self.ahead = min(prefetch, 1)
        self.consts = equation.invars[:first]
        self.carry = equation.invars[first : first + second]
        self.layers = chosen(self._xs, self._is_layer)
        self.weights = [weights[v] for v in self.layers]
        self.others = chosen(self._xs, [not x for x in self._is_layer])
        self.outputs = [*equation.outvars[:second], *chosen(equation.outvars[second:], self._read)]

    def run(self, env: Mapping[Any, Any], shards: Mapping[Any, Any]) -> dict[Any, Any]:
        """The outputs, when nothing is differentiated."""
        consts = values_of(env, self.consts)
        results = self.forward(env, shards, lambda *layer: self.layer(consts, *layer))
        return dict(zip(self.outputs, results, strict=True))

    def record(
        self,
        env: Mapping[Any, Any],
        shards: Mapping[Any, Any],
        active: set[Any],
        dropped: set[Any],
        keep: Callable[[Any], int],
        values: Mapping[Any, Value] | None,
    ) -> tuple[dict[Any, Any], LoopRecord | None]:
        """The outputs, and what the backward pass needs; as `schedule` records other pieces."""
        operands = (*self.consts, *self.carry, *self._xs)
        if not any(x in active for x in operands if is_variable(x)):
            return self.run(env, shards), None
        consts, carry = values_of(env, self.consts), values_of(env, self.carry)
        others = values_of(env, self.others)
        parts = at([shards[v] for v in self.layers], 0)
        whole = [w.whole_type(x, stacked=True) for w, x in zip(self.weights, parts, strict=True)]
        derivative = Derivative(
            self.layer,
            (consts, carry, whole, at(others, 0)),
            (
                [is_variable(x) and x in active for x in self.consts],
                # If anything has a gradient: what it depends on shows only after several iterations.
                [is_floating(x) for x in carry],
                [v in active for v in self.layers],
                [is_variable(x) and x in active for x in self.others],
            ),
            [v in dropped for v in self.layers],
            None if values is None else self._values(values),
        )
        results = self.forward(env, shards, lambda *layer: derivative.forward(consts, *layer))
        kept = filled(results[len(self.outputs) :], keep)
        operands = [keep(x) for x in (*consts, *others)]
        record = LoopRecord(self, derivative, kept, operands)
        return dict(zip(self.outputs, results, strict=False)), record

    def _values(self, known: Mapping[Any, Value]) -> list[list[Value]]:
        """The values of a layer's constants, carry, weights and other operands."""
        consts = [known[x] if is_variable(x) else Value() for x in self.consts]
        return [consts, *([Value() for _ in x] for x in (self.carry, self.layers, self.others))]

    def layer(
        self, consts: list[Any], carry: list[Any], wholes: list[Any], xs: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """One layer: the carry, and what is stacked."""
        (given,) = join(wholes, xs, [self._is_layer])
        with inside(self._equation):
            results = self._body(*consts, *carry, *given)
        return results[: len(carry)], chosen(results[len(carry) :], self._read)

    def forward(self, env: Mapping[Any, Any], shards: Mapping[Any, Any], layer: Layer) -> list[Any]:
        """Run all layers: the last carry, and what each gives, stacked."""
        stacks = [shards[v] for v in self.layers]
        others = values_of(env, self.others)

        def step(state: Any, number: Any, is_last: bool = False) -> tuple[Any, list[Any]]:
            carry, wholes, made = state
            parts = [] if is_last else shards_at(stacks, number + self.ahead)
            if is_last or not self.ahead:
                carry, wholes, parts = fence(carry, wholes, parts)
            both = zip(self.weights, parts, strict=False)
            coming = [w.gathered(x, stacked=True) for w, x in both]
            carry, given = layer(carry, wholes if self.ahead else coming, at(others, number))
            if not self.ahead:
                return (carry, [], []), given
            (mine, on_host), _ = _by_memory(given)
            return (carry, coming, put(made, mine, number)), on_host

        carry = values_of(env, self.carry)
        if not self.ahead:
            (carry, _, _), made = self.scan(step, (carry, [], []), range(self.length))
            return [*carry, *made]
        wholes, last = [env[v] for v in self.layers], self.length - 1
        first = jax.make_jaxpr(lambda *state: layer(*state)[1])(carry, wholes, at(others, 0))
        kinds: list[Any] = list(first.out_avals)
        # Filled in place: what the loop and the last layer give is not joined, which would copy it.
        (here, _), are_here = _by_memory(kinds)
        made = [zeros(x, self.length) for x in here]
        state, stacks_on_host = self.scan(step, (carry, wholes, made), range(last))
        (carry, _, made), lasts = step(state, last, is_last=True)
        both = zip(stacks_on_host or [None] * len(lasts), lasts, strict=True)
        there = [HostStack(self.length, stack, x) for stack, x in both]
        return [*carry, *join(made, there, [are_here])[0]]

    def scan(self, step: Any, state: Any, numbers: range) -> tuple[Any, list[Any]]:
        """Carry `state` through `step` over these layers."""
        if not len(numbers):
            return state, []
        order = jnp.arange(numbers.start, numbers.stop, numbers.step)
        return jax.lax.scan(step, state, order, unroll=self._unroll)


def _by_memory(arrays: Sequence[Any]) -> tuple[tuple[list[Any], list[Any]], list[bool]]:
    """The arrays or types on the device and those on the host; and of each whether it is on the device."""
    flags = [not is_on_host(x) for x in arrays]
    return (chosen(arrays, flags), chosen(arrays, [not x for x in flags])), flags


@dataclasses.dataclass(frozen=True, eq=False)
class LoopRecord:
    """A loop that has run forward.

    Attributes:
        kept: the places of what each layer keeps, stacked.
        operands: the places of its constants and of what is stacked beside weights.
    """

    loop: Loop
    derivative: Derivative
    kept: list[Any]
    operands: list[int]

    @property
    def outputs(self) -> list[Any]:
        """The outputs that it takes cotangents of."""
        flags = (x for kind in self.derivative.outputs for x in kind)
        return chosen(self.loop.outputs, flags)

    @property
    def names(self) -> frozenset[str]:
        """The names of what it keeps."""
        return self.derivative.names

    @property
    def needed(self) -> list[Any]:
        """The weights that are gathered again."""
        return chosen(self.loop.layers, self.derivative.needed)

    def backward(
        self,
        arrays: Sequence[Any],
        shards: Mapping[Any, Any],
        wholes: Mapping[Any, Any],
        cotangents: Sequence[Any],
        reductions: Reductions,
    ) -> dict[Any, Any]:
        """The gradients of all but weights; those go to `reductions`.

        Args:
            arrays: all that the forward pass kept.
            shards: of `needed`, stacked.
            wholes: of `needed` the last layer, gathered; empty without prefetch.
            cotangents: of `outputs`.
            reductions: those of the call.
        """
        loop, active = self.loop, self.derivative.active
        kept, operands = filled(self.kept, arrays.__getitem__), [arrays[i] for i in self.operands]
        consts, others = operands[: len(loop.consts)], operands[len(loop.consts) :]
        needed, stacks = self.needed, [shards[v] for v in self.needed]
        known = dict(zip(loop.layers, loop.weights, strict=True))
        trained = chosen(loop.layers, active[2])
        weights = [known[v] for v in trained]
        count = sum(self.derivative.outputs[0])
        stacked = list(cotangents[count:])

        def gathered(parts: Sequence[Any]) -> list[Any]:
            both = zip(needed, parts, strict=False)
            return [known[v].gathered(x, stacked=True) for v, x in both]

        def reduced(gradients: Sequence[Any], waiting: bool) -> list[Any]:
            """Those that are to be reduced now; the others as they are."""
            both = zip(weights, gradients, strict=True)
            return [w.reduced(x, stacked=True) if w.waits == waiting else x for w, x in both]

        def landed(gradients: Sequence[Any]) -> list[Any]:
            return [w.landed(x) for w, x in zip(weights, gradients, strict=True)]

        def layer(carried: Any, sums: Any, wholes: Any, number: Any) -> Any:
            own = dict(zip(needed, wholes, strict=True))
            nothing = [None] * len(loop.carry)
            given = (consts, nothing, [own.get(v) for v in loop.layers], at(others, number))
            cotangents = [*carried, *at(stacked, number)]
            new, carried, own, rest = self.derivative.backward(at(kept, number), given, cotangents)
            sums = [x + y for x, y in zip(sums, new, strict=True)]
            return carried, sums, reduced(own, waiting=False), rest

        def step(state: Any, number: Any) -> tuple[Any, None]:
            carried, sums, wholes, running, done, rests = state
            done = put(done, landed(reduced(running, waiting=True)), number + 1)
            coming = gathered(shards_at(stacks, number - 1))
            carried, sums, own, rest = layer(carried, sums, wholes, number)
            return (carried, sums, coming, own, done, put(rests, rest, number)), None

        def alone(state: Any, number: Any) -> tuple[Any, None]:
            carried, sums, done, rests = state
            carried, parts = fence(carried, shards_at(stacks, number))
            carried, sums, own, rest = layer(carried, sums, gathered(parts), number)
            carried, own = fence(carried, reduced(own, waiting=True))
            done = put(done, landed(own), number)
            return (carried, sums, done, put(rests, rest, number)), None

        def start(kinds: Sequence[Any]) -> list[Any]:
            return [zeros(x, loop.length) for x in kinds]

        results = jax.make_jaxpr(
            lambda xs: landed([w.reduced(x, True) for w, x in zip(weights, xs, strict=True)])
        )(chosen(self.derivative.weights, active[2])).out_avals
        done = start(results)
        rests = start([jax.typeof(x) for x in at(chosen(others, active[3]), 0)])
        sums = [zeros(jax.typeof(x)) for x in chosen(consts, active[0])]
        carried, last = list(cotangents[:count]), loop.length - 1
        if not loop.ahead:
            state = (carried, sums, done, rests)
            (carried, sums, done, rests), _ = loop.scan(alone, state, range(last, -1, -1))
        else:
            parts = shards_at(stacks, last - 1) if last else []
            carried, own, parts = fence(carried, [wholes[v] for v in needed], parts)
            coming = reductions.begin(gathered(parts))
            carried, sums, running, rest = layer(carried, sums, own, last)
            rests = put(rests, rest, last)
            carried, coming, running = reductions.fence(carried, coming, running)
            state = (carried, sums, coming, running, done, rests)
            state, _ = loop.scan(step, state, range(last - 1, 0, -1))
            carried, sums, coming, running, done, rests = state
            if last:
                carried, coming, running = fence(carried, coming, running)
                for v, x in zip(trained, reduced(running, waiting=True), strict=True):
                    reductions.track(v, x, 1)
                carried, sums, running, rest = layer(carried, sums, coming, 0)
                rests = put(rests, rest, 0)
            for v, weight, x in zip(trained, weights, running, strict=True):
                (reductions.add if weight.waits else reductions.track)(v, x, 0)
        for v, x in zip(trained, done, strict=True):
            reductions.stack(v, x)
        gradients: dict[Any, Any] = {}
        for atoms, flags, values in (
            (loop.consts, active[0], sums),
            (loop.carry, active[1], carried),
            (loop.others, active[3], rests),
        ):
            for x, gradient in zip(chosen(atoms, flags), values, strict=True):
                if is_variable(x):
                    add(gradients, x, gradient)
        return gradients
