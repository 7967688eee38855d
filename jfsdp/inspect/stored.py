"""The memory of a program held against what the policies promise."""

from __future__ import annotations

from collections.abc import Iterator

from .contract import Departure
from .memory import Memory
from .table import human_bytes
from .verify import LARGE, SMALL

__all__ = ["stored_departures"]


def stored_departures(
    constants: int, memory: Memory | None, available: int | None
) -> Iterator[Departure]:
    """Points in which a program holds more memory than the policies state, or than there is.

    Args:
        constants: bytes of arrays written into the program.
        memory: what it needs; None if it is not compiled.
        available: bytes that a device has; None for what `memory` says.
    """
    if constants >= LARGE:
        yield Departure(
            "",
            "arrays are arguments of the step",
            "none in the program itself",
            f"{human_bytes(constants)} of constants: pass the model as an argument, do not close over it",
        )
    if memory is None:
        return
    for name, size, least in (
        ("parameters, per device", memory.parameters, memory.parameters_minimum),
        ("optimizer state, per device", memory.optimizer, memory.optimizer_minimum),
        (
            "parameters in host memory, per device",
            memory.host_parameters,
            memory.host_parameters_minimum,
        ),
        (
            "optimizer state in host memory, per device",
            memory.host_optimizer,
            memory.host_optimizer_minimum,
        ),
    ):
        if least is not None and size > least * 1.001 + SMALL:
            yield Departure(
                "",
                f"bytes of the {name}",
                f"at most {human_bytes(least)}",
                f"{human_bytes(size)} ({size / max(least, 1):.3f}x)",
            )
    state = memory.parameters + memory.optimizer
    state += memory.host_parameters + memory.host_optimizer
    if 0 < memory.aliased < state * 0.999:
        yield Departure(
            "",
            "donated state is updated in place",
            human_bytes(state),
            f"{human_bytes(memory.aliased)} reused: a donated array comes out in another layout or dtype",
        )
    limit = memory.available if available is None else available
    if limit is not None and memory.peak > limit:
        yield Departure(
            "", "memory, per device", f"at most {human_bytes(limit)}", human_bytes(memory.peak)
        )
    if memory.host_available is not None and memory.host > memory.host_available:
        share = f"at most {human_bytes(memory.host_available)}"
        found = human_bytes(memory.host) + (f": {memory.host_limit}" if memory.host_limit else "")
        yield Departure("", "host memory, per device", share, found)
