"""A traced program in which what takes weights is not called but stands in place.

JAX differentiates a call (`jax.jit` inside a model; `jnp.take`, `jnp.einsum` are such) as one equation, which
gives the weights that it takes as residuals of its own: nobody could tell that they are to be gathered again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core as jex

from jfsdp.activations import inside
from jfsdp.pullback import is_variable, run_equations

__all__ = ["opened"]

_CALLS = ("jit", "pjit")


def opened(jaxpr: Any, consts: Sequence[Any], is_weight: Sequence[bool]) -> tuple[Any, Any]:
    """A program with such calls opened, and its constants; the same if there are none.

    Args:
        jaxpr: the program.
        consts: the values of its constants.
        is_weight: of its arguments, which are weights.
    """
    alone = {v for v, is_one in zip(jaxpr.invars, is_weight, strict=True) if is_one}
    for equation in jaxpr.eqns:
        read = {x for x in equation.invars if is_variable(x)}
        if equation.primitive.name in _CALLS and alone & read:
            break
        if read and alone.issuperset(read):
            alone.update(equation.outvars)
    else:
        return jaxpr, consts

    def function(*values: Any) -> list[Any]:
        return [x for x, _ in _run(jaxpr, consts, list(zip(values, is_weight, strict=True)))]

    closed = jax.make_jaxpr(function)(*(v.aval for v in jaxpr.invars))
    return closed.jaxpr, closed.consts


def _run(jaxpr: Any, consts: Sequence[Any], given: Sequence[tuple[Any, bool]]) -> list[Any]:
    """Results, each with whether it is made of weights alone, as are the arguments."""
    env = dict(zip(jaxpr.invars, given, strict=True))
    env.update((v, (x, False)) for v, x in zip(jaxpr.constvars, consts, strict=True))

    def read(atom: Any) -> tuple[Any, bool]:
        return env[atom] if is_variable(atom) else (atom.val, False)

    for equation in jaxpr.eqns:
        operands = [read(x) for x in equation.invars]
        inputs = list(dict.fromkeys(x for x in equation.invars if is_variable(x)))
        outputs = [v for v in equation.outvars if not isinstance(v, jex.DropVar)]
        if equation.primitive.name in _CALLS and any(flag for _, flag in operands):
            inner = equation.params["jaxpr"]
            with inside(equation):
                made = _run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), operands)
            env.update(zip(equation.outvars, made, strict=True))
        else:
            values = run_equations(jaxpr, [equation], inputs, outputs, [env[v][0] for v in inputs])
            flag = bool(inputs) and all(env[v][1] for v in inputs)
            env.update((v, (x, flag)) for v, x in zip(outputs, values, strict=True))
    return [read(x) for x in jaxpr.outvars]
