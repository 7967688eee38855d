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

__all__ = [
    "Pullback",
    "add",
    "differentiable",
    "is_floating",
    "is_variable",
    "run_equations",
    "variables",
]


@dataclasses.dataclass(frozen=True, eq=False)
class Pullback:
    """A function that was differentiated at trace time: what it is forward, and what it is backward.

    Attributes:
        needed: which of its arguments the backward pass takes as they are, instead of keeping what is made
            of them.
    """

    needed: tuple[bool, ...]
    _closed: Any
    _counts: tuple[int, int]
    _treedef: Any
    _again: tuple[bool, ...]
    _made_again: Callable[[Sequence[Any]], list[Any]]

    def forward(self, *arguments: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """The results that have gradients, the others, and the arrays to keep for `backward`."""
        flat = jex.jaxpr_as_fun(self._closed)(*(x for values in arguments for x in values))
        first, second = self._counts
        residuals = flat[first + second :]
        kept = [x for x, again in zip(residuals, self._again, strict=True) if not again]
        return flat[:first], flat[first : first + second], kept

    def backward(
        self, kept: Sequence[Any], needed: Sequence[Any], cotangents: Sequence[Any]
    ) -> list[Any]:
        """The gradients of the first arguments; None for what the results do not depend on.

        Args:
            kept: what `forward` gave.
            needed: the arguments of `needed`.
            cotangents: one for each result.
        """
        again, others = iter(self._made_again(needed)), iter(kept)
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
) -> Pullback:
    """Differentiate a function at trace time.

    Args:
        function: takes arguments and others; returns the results that have gradients, and others.
        arguments: arrays or types of what it is differentiated by.
        others: those of the rest.
        sources: for each of both, whether the backward pass has it again: then neither it nor what is made
            of such alone is kept.
        given: for each of both, whether the backward pass has it as it is, but nothing is made of it again.
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
    return Pullback(
        needed,
        closed,
        (first, second),
        treedef,
        again,
        lambda values: run_equations(jaxpr, equations, taken, wanted, values),
    )


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
