"""What the policies promise of a program, and what it says when a program is not that."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .rows import Minimum

__all__ = ["Departure", "PolicyViolation", "Promise", "Wire", "minima_of"]


@dataclasses.dataclass(frozen=True)
class Wire:
    """One collective of a parameter, in one step.

    Attributes:
        axes: the mesh axes that it runs over.
        dtype: what travels, a NumPy or ml_dtypes name; "" if that is not promised.
        bytes_per_device: bytes that one device receives in one step that calls the model once.
        parts: the kinds of collectives by which it is done, where that is not the one of its name, and what
            each of them sends: an int8 gather sends elements and scales.
    """

    axes: tuple[str, ...]
    dtype: str
    bytes_per_device: float
    parts: tuple[tuple[str, Wire], ...] = ()

    def sent(self, kind: str) -> tuple[tuple[str, Wire], ...]:
        """The collectives by which it is done: its parts, or one of this kind."""
        return self.parts or ((kind, self),)

    def times(self, count: int) -> Wire:
        """The same, done `count` times in a step."""
        parts = tuple((kind, part.times(count)) for kind, part in self.parts)
        return dataclasses.replace(
            self, bytes_per_device=self.bytes_per_device * count, parts=parts
        )

    @property
    def is_own(self) -> bool:
        """Whether a collective of the user's own does it, which states what it sends or does not."""
        return bool(self.parts) or not self.dtype


@dataclasses.dataclass(frozen=True)
class Promise:
    """What the policies say of one parameter.

    Attributes:
        leaf: its path.
        shapes: shapes that it is gathered in: its own, and a layer's if it is a stack of layers.
        shards: shapes of one device's part of these, over the shard axes.
        gather: the all-gather over the shard axes, forward and backward together; None if the
            parameter is replicated.
        scatter: the reduce-scatter of its gradient over the shard axes; None likewise.
        sum: the all-reduce of its gradient over the replicate axes (for a replicated parameter: all
            data-parallel axes); None if there are none.
        unit: path of the unit that it is gathered with.
        again: the part of `gather` that the backward does; None if the whole weight is kept.
        scatters: in how many microbatches the gradient is scattered.
        update: the all-gather of the updated parameter, whose optimizer state lies on more axes than itself;
            None if it does not. Each device updates its own part, so a compiler may reduce-scatter the
            gradient over these axes where it is to be all-reduced.
        shape: its global shape; () for the first of `shapes`.
        memory_kind: the kind of host memory that it lies in; None for the device's own.
        state_memory_kind: that of its optimizer state.
        activations: names of the values that its unit keeps on the host for the backward.
        bytes_at_rest: bytes of one device's part.
        fetched: bytes that one device copies from host memory in one step that calls the model once: its part
            before each gather.
        returned: bytes that it copies back: its part of the gradient.
    """

    leaf: str
    shapes: tuple[tuple[int, ...], ...]
    shards: tuple[tuple[int, ...], ...]
    gather: Wire | None
    scatter: Wire | None
    sum: Wire | None
    unit: str = ""
    again: Wire | None = None
    scatters: int = 1
    update: Wire | None = None
    shape: tuple[int, ...] = ()
    memory_kind: str | None = None
    state_memory_kind: str | None = None
    activations: tuple[str, ...] = ()
    bytes_at_rest: float = 0.0
    fetched: float = 0.0
    returned: float = 0.0

    def wires(self) -> dict[str, Wire]:
        """The collectives of the parameter, by kind."""
        by_kind = {
            "all-gather": self.gather,
            "reduce-scatter": self.scatter,
            "all-reduce": self.sum,
        }
        return {kind: wire for kind, wire in by_kind.items() if wire is not None}

    def accumulated(self, microbatches: int, every: bool) -> Promise:
        """What is promised of a step that calls the model on several microbatches.

        Args:
            microbatches: how many.
            every: whether the gradient is scattered after each; else once. It is all-reduced once.
        """
        scatters = microbatches if every else 1
        return dataclasses.replace(
            self,
            gather=self.gather and self.gather.times(microbatches),
            again=self.again and self.again.times(microbatches),
            scatter=self.scatter and self.scatter.times(scatters),
            scatters=scatters,
            fetched=self.fetched * microbatches,
            returned=self.returned * scatters,
        )

    def sent(self) -> list[tuple[str, Wire]]:
        """The collectives by which those are done, by kind."""
        sent = [part for kind, wire in self.wires().items() for part in wire.sent(kind)]
        return sent if self.update is None else [*sent, ("all-gather", self.update)]


@dataclasses.dataclass(frozen=True)
class Departure:
    """One point in which a program is not what the policies state.

    Attributes:
        leaf: the parameter, parameters of one shape, or "" for the program as a whole.
        rule: what is departed from, such as "dtype of the all-gather".
        expected: what the policy states.
        found: what the program does.
    """

    leaf: str
    rule: str
    expected: str
    found: str

    def __str__(self) -> str:
        return (
            f"{self.leaf or 'the step'}: {self.rule}: expected {self.expected}, found {self.found}"
        )


class PolicyViolation(Exception):
    """A program is not what its policies state.

    Attributes:
        departures: every point in which it is not.
    """

    def __init__(self, title: str, departures: Sequence[Departure]) -> None:
        self.departures = tuple(departures)
        lines = [f"  {number}. {each}" for number, each in enumerate(self.departures, 1)]
        super().__init__("\n".join([title, *lines]))


def minima_of(promises: Sequence[Promise]) -> tuple[Minimum, ...]:
    """The least bytes of each kind of collective, from what is promised of each parameter.

    Args:
        promises: one for each parameter.
    """
    least: dict[str, float] = {}
    for promise in promises:
        for kind, wire in promise.sent():
            least[kind] = least.get(kind, 0.0) + wire.bytes_per_device
    return tuple(Minimum(kind, size) for kind, size in least.items() if size)
