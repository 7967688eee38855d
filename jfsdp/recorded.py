"""A piece of a schedule that has run forward, and what its backward pass needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jfsdp.pieces import Piece
from jfsdp.pullback import Pullback, differentiable

__all__ = ["Kept", "Record", "record"]


class Kept:
    """Arrays to hand to the backward pass, each once."""

    def __init__(self) -> None:
        self.arrays: list[Any] = []
        self._slots: dict[int, int] = {}

    def add(self, array: Any) -> int:
        """The place of an array among them."""
        if id(array) not in self._slots:
            self._slots[id(array)] = len(self.arrays)
            self.arrays.append(array)
        return self._slots[id(array)]


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
    """A piece that has run forward.

    Attributes:
        wanted: the inputs that it has gradients of.
        outputs: the outputs that it takes cotangents of.
        needed: the inputs that the backward pass takes as they are: weights.
        kept: the places of what it keeps.
    """

    wanted: list[Any]
    outputs: list[Any]
    needed: list[Any]
    kept: list[int]
    pullback: Pullback

    def backward(
        self, kept: Sequence[Any], wholes: Mapping[Any, Any], cotangents: list[Any]
    ) -> dict[Any, Any]:
        """The gradients of `wanted`, but of those that are zero."""
        needed = [wholes[v] for v in self.needed]
        gradients = self.pullback.backward([kept[i] for i in self.kept], needed, cotangents)
        both = zip(self.wanted, gradients, strict=True)
        return {v: x for v, x in both if x is not None}


def record(
    piece: Piece, env: Mapping[Any, Any], active: set[Any], dropped: set[Any], keep: Callable
) -> tuple[dict[Any, Any], Record | None]:
    """Run a piece forward; its outputs, and what its backward pass needs."""
    wanted = [v for v in piece.inputs if v in active]
    others = [v for v in piece.inputs if v not in active]
    outputs = piece.active_outputs(wanted)
    if not outputs:
        made = piece.run([env[v] for v in piece.inputs])
        return dict(zip(piece.outputs, made, strict=True)), None
    chosen = set(outputs)
    rest = [v for v in piece.outputs if v not in chosen]

    def function(xs: list[Any], ys: list[Any]) -> tuple[list[Any], list[Any]]:
        known = dict(zip([*wanted, *others], [*xs, *ys], strict=True))
        made = piece.run([known[v] for v in piece.inputs])
        found = dict(zip(piece.outputs, made, strict=True))
        return [found[v] for v in outputs], [found[v] for v in rest]

    inputs = [*wanted, *others]
    values = [env[v] for v in wanted], [env[v] for v in others]
    pullback = differentiable(function, *values, [v in dropped for v in inputs])
    results, further, kept = pullback.forward(*values)
    needed = [v for v, is_needed in zip(inputs, pullback.needed, strict=True) if is_needed]
    recorded = Record(wanted, outputs, needed, [keep(x) for x in kept], pullback)
    return dict(zip([*outputs, *rest], [*results, *further], strict=True)), recorded
