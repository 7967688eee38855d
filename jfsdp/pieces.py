"""A traced forward, cut into pieces where the weights of the next unit are first needed."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend import core as jex

from jfsdp._compat import scan_counts
from jfsdp.pullback import is_floating, run_equations, variables

__all__ = ["OUTERMOST", "Piece", "cut", "layers_of", "misused", "used_name"]


OUTERMOST = 0
"""The group of the unit round all others."""


def used_name(group: int) -> str:
    """The name that a unit gives to its whole weights when it is called."""
    return f"jfsdp_unit[{group}]"


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """Equations that run in one go.

    Attributes:
        equations: in the order in which they were traced.
        inputs: the variables that they read and do not make.
        outputs: those that they make and that are read later.
        first: the weights that are read here for the first time.
        last: the weights that are read here for the last time.
        jaxpr: the program that they are from.
    """

    equations: tuple[Any, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    first: tuple[Any, ...]
    last: tuple[Any, ...]
    jaxpr: Any = dataclasses.field(repr=False)

    @property
    def loop(self) -> Any:
        """The scan over layers that this is; None if it is none."""
        (equation, *others) = self.equations
        is_loop = equation.primitive.name == "scan" and not others
        return equation if is_loop and set(self.first).intersection(layers_of(equation)) else None

    def run(self, values: Sequence[Any]) -> list[Any]:
        """The outputs of these inputs."""
        return run_equations(self.jaxpr, self.equations, self.inputs, self.outputs, values)

    def active_outputs(self, active: Iterable[Any]) -> list[Any]:
        """The outputs that have a gradient with respect to variables of `active`."""
        found = set(active)
        for equation in self.equations:
            if found.intersection(variables(equation.invars)):
                found.update(v for v in equation.outvars if is_floating(v.aval))
        return [v for v in self.outputs if v in found]


def cut(jaxpr: Any, weights: Mapping[Any, int]) -> list[Piece]:
    """Cut a program before every equation that reads weights of a group none of which was read so far.

    What the outermost unit reads between two others makes no piece of its own, only what it reads after one.

    Args:
        jaxpr: the program.
        weights: the variables of whole weights, and the group of each.
    """
    blocks: list[list[Any]] = [[]]
    seen: set[Any] = set()
    groups: set[int] = set()
    in_unit = after_loop = False
    for equation in jaxpr.eqns:
        read = [v for v in variables(equation.invars) if v in weights]
        new = [v for v in read if v not in seen]
        inner = {weights[v] for v in new} - {OUTERMOST} - groups
        behind = in_unit and any(weights[v] == OUTERMOST for v in new)
        if inner or behind or after_loop:
            if blocks[-1]:
                blocks.append([])
            in_unit = bool(inner)
        after_loop = bool(inner) and equation.primitive.name == "scan"
        seen.update(new)
        groups |= inner
        blocks[-1].append(equation)
    return _pieces(jaxpr, [block for block in blocks if block], weights)


def _pieces(jaxpr: Any, blocks: list[list[Any]], weights: Mapping[Any, int]) -> list[Piece]:
    made_by = [{v for e in block for v in e.outvars} for block in blocks]
    read_by = [set(variables(v for e in block for v in e.invars)) for block in blocks]
    later = set(variables(jaxpr.outvars))
    pieces = []
    for index in reversed(range(len(blocks))):
        block, earlier = blocks[index], read_by[:index]
        inputs = dict.fromkeys(variables(v for e in block for v in e.invars))
        inputs = [v for v in inputs if v not in made_by[index]]
        read = [v for v in inputs if v in weights]
        outputs = [v for e in block for v in e.outvars if v in later]
        first = [v for v in read if not any(v in others for others in earlier)]
        last = [v for v in read if v not in later]
        parts = map(tuple, (block, inputs, outputs, first, last))
        pieces.append(Piece(*parts, jaxpr=jaxpr))
        later |= read_by[index]
    return pieces[::-1]


def misused(jaxpr: Any, weights: Mapping[Any, int]) -> set[int]:
    """The groups whose weights cannot be gathered outside of the equations that use them.

    Those of units that are called several times, or in a loop over something else than their own layers,
    and of several units in one equation, such as in a remat of the user's round both.
    """
    members = Counter(weights.values())
    names = list(_names(jaxpr, ()))
    calls = Counter(name for name, _ in names)
    inside = {
        group: {path for name, path in names if name == used_name(group)} for group in members
    }
    found = {group for group, count in members.items() if calls[used_name(group)] > count}
    layers: Counter[Any] = Counter()
    for equation in jaxpr.eqns:
        read = {v for v in variables(equation.invars) if v in weights}
        groups = {weights[v] for v in read} - {OUTERMOST}
        if len(groups) > 1:
            found |= groups
        if equation.primitive.name == "scan" and not equation.params["reverse"]:
            layers.update(v for v in layers_of(equation) if v in read)
        layers.update({v: 2 for v in read if equation.primitive.name != "scan"})
    for group, paths in inside.items():
        own = [v for v, other in weights.items() if other == group]
        if paths - {()} and (paths != {("scan",)} or any(layers[v] != 1 for v in own)):
            found.add(group)
    return found - {OUTERMOST}


def layers_of(equation: Any) -> list[Any]:
    """What a scan takes one layer of in each iteration."""
    return variables(equation.invars[sum(scan_counts(equation.params)) :])


def _names(jaxpr: Any, path: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The names that a program gives to values, each with the control flow that it is in."""
    for equation in jaxpr.eqns:
        primitive = equation.primitive.name
        if primitive == "name":
            yield equation.params["name"], path
        inside = (*path, primitive) if primitive in ("scan", "while", "cond") else path
        for inner in jex.jaxprs_in_params(equation.params):
            yield from _names(inner, inside)
