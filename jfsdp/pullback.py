"""A function, differentiated at trace time: which of its residuals to keep, and which to make again.

What is made of whole weights alone (their casts, transposes, and they themselves) is no residual worth
keeping: the backward pass has those weights again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from jfsdp._compat import function_of
from jfsdp.activations import Value, values_in
from jfsdp.offload import is_on_host, to_device

__all__ = [
    "Pullback",
    "add",
    "differentiable",
    "is_floating",
    "is_variable",
    "run_equations",
    "variables",
    "waiting",
]


@dataclasses.dataclass(frozen=True, eq=False)
class Pullback:
    """A function that was differentiated at trace time: what it is forward, and what it is backward.

    Attributes:
        needed: which of its arguments the backward pass takes as they are, instead of keeping what is made
            of them.
        on_host: for each array to keep the value that it is, if it has to wait on the host; None for others.
        names: those of what is kept, here or there.
        results: the values of the results, where values were asked for.
    """

    needed: tuple[bool, ...]
    on_host: tuple[Value | None, ...]
    names: frozenset[str]
    results: tuple[Value, ...]
    _closed: Any
    _counts: tuple[int, int]
    _treedef: Any
    _again: tuple[bool, ...]
    _places: tuple[int, ...]
    _made_again: Callable[[Sequence[Any]], list[Any]]

    def forward(self, *arguments: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """The results that have gradients, the others, and the arrays to keep for `backward`.

        Those of `on_host` are still on the device.
        """
        flat = jex.jaxpr_as_fun(self._closed)(*(x for values in arguments for x in values))
        first, second = self._counts
        residuals = flat[first + second :]
        kept = {}
        others = (x for x, again in zip(residuals, self._again, strict=True) if not again)
        for place, x in zip(self._places, others, strict=True):
            kept.setdefault(place, x)
        return flat[:first], flat[first : first + second], list(kept.values())

    def backward(
        self, kept: Sequence[Any], needed: Sequence[Any], cotangents: Sequence[Any]
    ) -> list[Any]:
        """The gradients of the first arguments; None for what the results do not depend on.

        Args:
            kept: what `forward` gave.
            needed: the arguments of `needed`.
            cotangents: one for each result.
        """
        kept = [x if v is None else to_device(x) for x, v in zip(kept, self.on_host, strict=True)]
        again, others = iter(self._made_again(needed)), (kept[place] for place in self._places)
        leaves = [next(again) if is_again else next(others) for is_again in self._again]

        def transposed(leaves: list[Any], cotangents: list[Any]) -> list[Any]:
            return jax.tree.unflatten(self._treedef, leaves)(cotangents)[0]

        closed = jax.make_jaxpr(transposed)(leaves, list(cotangents))
        gradients = jex.jaxpr_as_fun(closed)(*leaves, *cotangents)
        reached = set(closed.jaxpr.invars[len(leaves) :])
        for equation in closed.jaxpr.eqns:
            if reached.intersection(variables(equation.invars)):
                reached.update(equation.outvars)
        both = zip(gradients, closed.jaxpr.outvars, strict=True)
        return [x if is_variable(v) and v in reached else None for x, v in both]


def differentiable(
    function: Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]],
    arguments: Sequence[Any],
    others: Sequence[Any],
    sources: Sequence[bool],
    given: Sequence[bool] | None = None,
    values: Sequence[Value] | None = None,
) -> Pullback:
    """Differentiate a function at trace time.

    Args:
        function: takes arguments and others; returns the results that have gradients, and others.
        arguments: arrays or types of what it is differentiated by.
        others: those of the rest.
        sources: for each of both, whether the backward pass has it again: then neither it nor what is made
            of such alone is kept.
        given: for each of both, whether the backward pass has it as it is, but nothing is made of it again.
        values: for each of both the value that it is, to tell what waits on the host; None if nothing does.
    """
    treedefs: list[Any] = []

    def forward(xs: list[Any], ys: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        results, pullback, rest = jax.vjp(lambda xs: function(xs, ys), xs, has_aux=True)
        leaves, treedef = jax.tree.flatten(pullback)
        treedefs[:] = [treedef, len(results), len(rest)]
        return results, rest, leaves

    closed = jax.make_jaxpr(forward)(list(arguments), list(others))
    treedef, first, second = treedefs
    jaxpr, residuals = closed.jaxpr, closed.jaxpr.outvars[first + second :]
    present = {v for v, is_one in zip(jaxpr.invars, given or (), strict=False) if is_one}
    alone = {v for v, is_one in zip(jaxpr.invars, sources, strict=True) if is_one}
    made: dict[Any, Any] = {}
    for equation in jaxpr.eqns:
        if alone.issuperset(variables(equation.invars)) and not equation.effects:
            alone.update(equation.outvars)
            made.update(dict.fromkeys(equation.outvars, equation))
    alone |= present
    again = tuple(is_variable(v) and v in alone for v in residuals)
    wanted = [v for v, is_again in zip(residuals, again, strict=True) if is_again]
    equations = _leading_to(wanted, jaxpr.eqns, made)
    read = set(wanted).union(*(variables(e.invars) for e in equations))
    needed = tuple(v in read for v in jaxpr.invars)
    taken = [v for v in jaxpr.invars if v in read]
    kept = [v for v, is_again in zip(residuals, again, strict=True) if not is_again]
    known = {} if values is None else values_in(jaxpr, values)
    places, on_host = waiting(kept, known)
    return Pullback(
        needed,
        on_host,
        frozenset().union(*(known[v].names for v in kept if v in known)),
        tuple(
            known.get(v, Value()) if is_variable(v) else Value()
            for v in jaxpr.outvars[: first + second]
        ),
        closed,
        (first, second),
        treedef,
        again,
        places,
        lambda values: run_equations(jaxpr, equations, taken, wanted, values),
    )


def waiting(
    kept: Sequence[Any], known: Mapping[Any, Value]
) -> tuple[tuple[int, ...], tuple[Value | None, ...]]:
    """For each operand its place among the arrays to keep, and which values of those wait on the host.

    One value that goes to the host goes once, though it be several operands.
    """
    places: list[int] = []
    arrays: list[Value | None] = []
    found: dict[Value, int] = {}
    for operand in kept:
        value = known.get(operand) if is_variable(operand) else None
        if value is None or not value.names or is_on_host(operand.aval) or not operand.aval.ndim:
            value = None
        elif value in found:
            places.append(found[value])
            continue
        else:
            found[value] = len(arrays)
        places.append(len(arrays))
        arrays.append(value)
    return tuple(places), tuple(arrays)


def _leading_to(wanted: Iterable[Any], equations: Iterable[Any], made: Mapping[Any, Any]) -> list:
    """The equations that make these variables, in order."""
    needed, queue = set(), list(wanted)
    while queue:
        equation = made.get(queue.pop())
        if equation is not None and id(equation) not in needed:
            needed.add(id(equation))
            queue += variables(equation.invars)
    return [e for e in equations if id(e) in needed]


def run_equations(
    jaxpr: Any,
    equations: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    values: Sequence[Any],
) -> list[Any]:
    """Run a part of a program on values of its inputs; the values of its outputs."""
    part = jaxpr.replace(
        constvars=[], invars=list(inputs), outvars=list(outputs), eqns=list(equations)
    )
    return function_of(part)(*values)


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Those of some operands that are no literals."""
    return [v for v in atoms if is_variable(v)]


def is_variable(atom: Any) -> bool:
    """Whether an operand is no literal."""
    return isinstance(atom, jex.Var)


def is_floating(value: Any) -> bool:
    """Whether an array or type is of real or complex floats."""
    return jnp.issubdtype(value.dtype, jnp.inexact)


def add(sums: dict[Any, Any], variable: Any, cotangent: Any) -> None:
    """Add a cotangent of a variable to what is known of it."""
    sums[variable] = sums[variable] + cotangent if variable in sums else cotangent
