"""What a step moves between host memory and the device as it was written, from its jaxpr.

Programs for CPU have one memory: jax leaves every move out of them, of StableHLO too. The jaxpr has them all,
with the memory space of every value in its type. That leaves "unpinned_host" out, whose type says "device"
(jax 0.10.2 and 0.12.0.1): moves of such arrays are not seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from . import scopes
from .allocation import is_on_host
from .transfers import HostWork, Side, Transfer

__all__ = ["written_transfers"]

_Shares: TypeAlias = Mapping[tuple[int, ...], tuple[int, ...]]


def written_transfers(
    jaxpr: Any, shares: _Shares, *, updates: bool
) -> tuple[list[Transfer], list[HostWork]]:
    """Reads what a traced step moves to and from host memory, and computes there.

    A `while` counts once, as its records say; of a conditional the branch that moves most counts, since one
    of them runs. What nothing uses is not moved.

    Args:
        jaxpr: of `jax.jit(step).trace(...)`.
        shares: by the global shape of an argument that of one device's part, for what is moved outside of
            manual regions, where jaxprs have global shapes.
        updates: whether the step has an update, to which what is in neither derivative then belongs.

    Returns:
        One record for each array and place where it is moved, and one for each computation that `compute_on`
        puts on the host.
    """
    reader = _Reader(shares, "update" if updates else "forward")
    reader.read(getattr(jaxpr, "jaxpr", jaxpr), _Place())
    return reader.transfers, reader.work


@dataclasses.dataclass(frozen=True)
class _Place(scopes.Place):
    """With whether shapes are those of one device's parts."""

    manual: bool = False


class _Reader:
    def __init__(self, shares: _Shares, phase_of_rest: str) -> None:
        self.shares = shares
        self.phase_of_rest = phase_of_rest
        self.transfers: list[Transfer] = []
        self.work: list[HostWork] = []

    def read(self, jaxpr: Any, place: _Place) -> None:
        """Adds what a jaxpr moves."""
        used = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | {id(v) for v in jaxpr.outvars}
        for eqn in jaxpr.eqns:
            name = f"{place.op_name}/{eqn.source_info.name_stack}"
            inside = dataclasses.replace(place, op_name=name)
            kind = eqn.primitive.name
            if kind == "device_put":
                for source, result, target in zip(
                    eqn.invars, eqn.outvars, eqn.params["devices"], strict=True
                ):
                    if id(result) in used:
                        self._moved(source.aval, target, inside)
            elif kind == "compute_on":
                self._host_work(eqn, inside)
            else:
                if kind == "scan":
                    inside = inside.in_loop_of(eqn.params["length"], name)
                elif kind == "while":
                    inside = inside.in_loop_of(None, name)
                elif kind == "shard_map":
                    inside = dataclasses.replace(inside, manual=True)
                inner = list(_inner(eqn.params.values()))
                if kind == "cond":
                    self._most(inner, inside)
                else:
                    for each in inner:
                        self.read(each, inside)

    def _most(self, branches: list[Any], place: _Place) -> None:
        each = [_Reader(self.shares, self.phase_of_rest) for _ in branches]
        for reader, jaxpr in zip(each, branches, strict=True):
            reader.read(jaxpr, place)
        most = max(each, key=lambda reader: sum(t.total_bytes for t in reader.transfers))
        self.transfers += most.transfers
        self.work += most.work

    def _moved(self, array: Any, target: Any, place: _Place) -> None:
        space = getattr(array, "memory_space", None)
        source: Side = "host" if space == jax.memory.Space.Host else "device"
        to = _side(target)
        if to is None or to == source:
            return
        phase = scopes.phase(place.op_name) or self.phase_of_rest
        dtype, shape = np.dtype(array.dtype).name, self._on_one_device(array.shape, place)
        self.transfers.append(
            Transfer(source, to, dtype, shape, place.executions, place.unknown_trips, phase)
        )

    def _host_work(self, eqn: Any, place: _Place) -> None:
        if "host" not in eqn.params["compute_type"]:
            return
        arrays = [v.aval for v in (*eqn.invars, *eqn.outvars) if v.aval.shape]
        size = sum(
            np.prod(self._on_one_device(array.shape, place)) * np.dtype(array.dtype).itemsize
            for array in arrays
            if getattr(array, "memory_space", None) == jax.memory.Space.Host
        )
        self.work.append(HostWork("host", "", place.op_name, float(size), asked=True))

    def _on_one_device(self, shape: tuple[int, ...], place: _Place) -> tuple[int, ...]:
        return shape if place.manual else self.shares.get(shape, shape)


def _side(target: Any) -> Side | None:
    """Where a device_put goes; None where it leaves an array in its memory."""
    if isinstance(target, jax.memory.Space):
        return {jax.memory.Space.Host: "host", jax.memory.Space.Device: "device"}.get(target)  # pyright: ignore[reportReturnType]
    kind = getattr(target, "memory_kind", None)
    return None if kind is None else "host" if is_on_host(kind) else "device"


def _inner(values: Any) -> Iterator[Any]:
    """The jaxprs among the parameters of an equation."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from _inner(value)
            continue
        jaxpr = getattr(value, "jaxpr", value)
        if hasattr(jaxpr, "eqns"):
            yield jaxpr
