"""Times steps of several programs beside each other on simulated devices: only ratios mean something."""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
from gpt_program import Program

WARM_UP = 3


def compare(programs: dict[str, Program], pairs: int = 40) -> dict[str, Any]:
    """Run all of them in turn, again and again, and compare each with "by-hand" in the same round.

    Args:
        programs: by name. "again" is the reference itself, built once more: its ratio is the noise.
        pairs: how many rounds; 40 or more for a figure to quote.

    Returns:
        milliseconds: median of each program.
        ratio: median, over the rounds, of each program's time over the reference's of that round.
        quartiles: the first and the third of the same.
        losses: after the warm-up, to see that all compute the same kind of thing.
    """
    # By name, so that no local variable keeps donated arrays alive.
    states = {name: program.state for name, program in programs.items()}
    losses: dict[str, float] = {}

    def step(name: str) -> float:
        program = programs[name]
        start = time.perf_counter()
        states[name], loss = program.step(states[name], program.tokens)
        jax.block_until_ready((states[name], loss))
        elapsed = time.perf_counter() - start
        losses.setdefault(name, float(loss))
        return elapsed

    for name in programs:
        for _ in range(WARM_UP):
            step(name)
    times: dict[str, list[float]] = {name: [] for name in programs}
    names = list(programs)
    for i in range(pairs):
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(step(name))
    ratios = {
        name: [b / a for a, b in zip(times["by-hand"], times[name], strict=True)]
        for name in names
        if name != "by-hand"
    }
    return {
        "pairs": pairs,
        "milliseconds": {name: 1e3 * statistics.median(times[name]) for name in names},
        "ratio": {name: statistics.median(found) for name, found in ratios.items()},
        "quartiles": {name: _quartiles(found) for name, found in ratios.items()},
        "losses": losses,
    }


def _quartiles(values: list[float]) -> list[float]:
    low, _, high = statistics.quantiles(values, n=4)
    return [low, high]
