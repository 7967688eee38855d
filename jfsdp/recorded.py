"""A piece of a schedule that has run forward, and what its backward pass needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jfsdp.activations import Value
from jfsdp.offload import copied_at, is_on_host, to_host
from jfsdp.pieces import Piece
from jfsdp.pullback import Pullback, differentiable
from jfsdp.weights import fence, index_for

__all__ = ["Kept", "Record", "record"]


class Kept:
    """Arrays to hand to the backward pass, each once."""

    def __init__(self, on_tpu: bool = False) -> None:
        """Nothing is kept yet.

        Args:
            on_tpu: whether this is for TPUs.
        """
        self._on_tpu = on_tpu
        self.arrays: list[Any] = []
        self._slots: dict[Any, int] = {}
        self._leaving: list[int] = []
        self._left: list[int] = []

    def add(self, array: Any, on_host: Value | None = None) -> int:
        """The place of an array among them.

        Args:
            array: the array.
            on_host: the value that it is, if it has to wait on the host: there is one copy of it there.
        """
        key = id(array) if on_host is None else on_host
        if key not in self._slots:
            self._slots[key] = len(self.arrays)
            self.arrays.append(array if on_host is None else to_host(array))
            # Without a barrier that waits for it XLA lets much of it stay (of 50 MB on H100 0 were ever on
            # the host, of 34 MB on v5e 13; jax 0.12.0.1). With one the user's own offload stays on TPUs.
            if is_on_host(self.arrays[-1]) and not (self._on_tpu and on_host is None):
                self._leaving.append(self._slots[key])
        return self._slots[key]

    def leaving(self, all_of_them: bool = False) -> dict[int, Any]:
        """What began to go to the host before this was last called, by places; once tied it is there."""
        found = {place: self.arrays[place] for place in self._left}
        self._left, self._leaving = self._leaving, []
        return found | self.leaving() if all_of_them else found

    def tie(self, arrays: Mapping[int, Any]) -> None:
        """Have other arrays in these places."""
        for place, array in arrays.items():
            self.arrays[place] = array


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

    @property
    def names(self) -> frozenset[str]:
        """The names of what it keeps."""
        return self.pullback.names

    def backward(
        self, kept: Sequence[Any], wholes: Mapping[Any, Any], cotangents: list[Any]
    ) -> dict[Any, Any]:
        """The gradients of `wanted`, but of those that are zero."""
        needed = [wholes[v] for v in self.needed]
        arrays = [kept[i] for i in self.kept]
        moved = [i for i, value in enumerate(self.pullback.on_host) if value is not None]
        if moved:
            cotangents, (ticket,) = fence(cotangents, [index_for(arrays[moved[0]])])
            for i in moved:
                arrays[i] = copied_at(arrays[i], ticket)
        gradients = self.pullback.backward(arrays, needed, cotangents)
        both = zip(self.wanted, gradients, strict=True)
        return {v: x for v, x in both if x is not None}


def record(
    piece: Piece,
    env: Mapping[Any, Any],
    active: set[Any],
    dropped: set[Any],
    keep: Callable[[Any, Value | None], int],
    values: Mapping[Any, Value] | None,
) -> tuple[dict[Any, Any], Record | None]:
    """Run a piece forward; its outputs, and what its backward pass needs.

    Args:
        piece: the piece.
        env: its inputs.
        active: the variables that are differentiated.
        dropped: the weights that the backward pass gathers again.
        keep: puts an array away for the backward pass, on the host if it is this value.
        values: those of all variables, if any waits on the host.
    """
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
    arrays = [env[v] for v in wanted], [env[v] for v in others]
    known = None if values is None else [values[v] for v in inputs]
    pullback = differentiable(function, *arrays, [v in dropped for v in inputs], values=known)
    results, further, kept = pullback.forward(*arrays)
    needed = [v for v, is_needed in zip(inputs, pullback.needed, strict=True) if is_needed]
    # What a later piece keeps of the same value is the same array.
    made = zip(pullback.results, [*outputs, *rest], strict=True)
    known = {} if values is None else {own: values[v] for own, v in made}
    both = zip(kept, pullback.on_host, strict=True)
    places = [keep(x, value and known.get(value, value)) for x, value in both]
    recorded = Record(wanted, outputs, needed, places, pullback)
    return dict(zip([*outputs, *rest], [*results, *further], strict=True)), recorded
