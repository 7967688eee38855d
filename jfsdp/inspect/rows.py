"""A program's collectives added up: per kind, mesh axes and dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .collective import Collective, check_kind

__all__ = ["Minimum", "Row", "kind_rows", "kind_total"]


@dataclasses.dataclass(frozen=True)
class Minimum:
    """The least that a step can communicate with one kind of collective.

    Args:
        kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute" or
            "collective-broadcast".
        bytes_per_device: bytes that one device has to receive in one step. Several minima of one
            kind add up.
        label: where the figure comes from, printed below the table if not empty.

    Raises:
        ValueError: the kind is none of these, or the bytes are negative.
    """

    kind: str
    bytes_per_device: float
    label: str = ""

    def __post_init__(self) -> None:
        check_kind(self.kind)
        if self.bytes_per_device < 0:
            raise ValueError(
                f"jfsdp.inspect: the minimum of {self.kind} is {self.bytes_per_device} bytes; "
                "give a number of bytes from 0 up"
            )


@dataclasses.dataclass(frozen=True)
class Row:
    """Collectives of one kind that go over the same axes in the same dtype, or a kind's total.

    Attributes:
        kind: the kind, such as "all-gather".
        axes: mesh axes, in the mesh's order. Empty where a group is one device, where no axes
            explain the groups (then `groups` has their text), and in a total.
        dtype: NumPy or ml_dtypes name; empty in a total.
        count: how many collectives one step executes.
        bytes_per_device: bytes that one device receives in one step.
        minimum: the least bytes for the whole kind, if the caller gave any and this row is all
            there is of its kind or the kind's total. Else None.
        groups: text of the device groups if no mesh axes explain them, else empty.
        unknown_trips: whether a loop of unknown length is around one of the collectives; such a
            loop counts once, so that count and bytes are a lower bound.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    count: int
    bytes_per_device: float
    minimum: float | None = None
    groups: str = ""
    unknown_trips: bool = False

    @property
    def ratio(self) -> float | None:
        """Bytes over the minimum; None where there is no minimum, or a minimum of zero."""
        return self.bytes_per_device / self.minimum if self.minimum else None


def kind_rows(
    kind: str, collectives: Sequence[Collective], minima: Sequence[Minimum]
) -> tuple[Row, ...]:
    """One kind's rows, one for each combination of axes and dtype, most bytes first.

    Args:
        kind: the kind.
        collectives: a program's collectives, of all kinds.
        minima: the least bytes, of all kinds.

    Returns:
        The rows. A kind that does not occur has an empty one if it has a minimum, else none.
    """
    minimum = _minimum(kind, minima)
    groups: dict[tuple[tuple[str, ...], str, str], list[Collective]] = {}
    for record in _of_kind(kind, collectives):
        groups.setdefault((record.axes, record.dtype, record.groups), []).append(record)
    if not groups:
        return () if minimum is None else (Row(kind, (), "", 0, 0.0, minimum),)
    own = minimum if len(groups) == 1 else None
    rows = [
        _add_up(records, Row(kind, axes, dtype, 0, 0.0, own, text))
        for (axes, dtype, text), records in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.bytes_per_device, row.axes, row.dtype)))


def kind_total(kind: str, collectives: Sequence[Collective], minima: Sequence[Minimum]) -> Row:
    """One kind's total.

    Args:
        kind: the kind.
        collectives: a program's collectives, of all kinds.
        minima: the least bytes, of all kinds.

    Returns:
        A row with neither axes nor dtype.
    """
    total = Row(kind, (), "", 0, 0.0, _minimum(kind, minima))
    return _add_up(_of_kind(kind, collectives), total)


def _of_kind(kind: str, collectives: Sequence[Collective]) -> list[Collective]:
    return [record for record in collectives if record.kind == kind]


def _minimum(kind: str, minima: Sequence[Minimum]) -> float | None:
    given = [minimum.bytes_per_device for minimum in minima if minimum.kind == kind]
    return sum(given) if given else None


def _add_up(records: Sequence[Collective], empty: Row) -> Row:
    return dataclasses.replace(
        empty,
        count=sum(record.executions for record in records),
        bytes_per_device=sum((record.total_bytes for record in records), 0.0),
        unknown_trips=any(record.unknown_trips for record in records),
    )
