"""An optimizer's step, traced and split by parameters: what each needs alone, and what they share.

optax updates all parameters in one go. Most of its equations read what belongs to one parameter (its
gradient, its moments), few read several (a global norm), and few read none (the count of steps).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from jfsdp.pullback import is_variable, run_equations, variables

__all__ = ["Part", "Split", "makes_arrays", "split"]

_CALLS = {
    **dict.fromkeys(("jit", "pjit", "closed_call", "remat2", "checkpoint"), "jaxpr"),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
}
"""Equations that only stand for others, and which of their parameters holds these."""


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Some of a program's equations.

    Attributes:
        equations: in the order in which they were traced.
        inputs: the variables that they read and do not make.
        outputs: what is wanted of them.
        jaxpr: the program.
    """

    equations: tuple[Any, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    jaxpr: Any = dataclasses.field(repr=False)

    def run(self, values: Sequence[Any]) -> list[Any]:
        """The outputs of these inputs."""
        return run_equations(self.jaxpr, self.equations, self.inputs, self.outputs, values)

    def run_each(self, values: Sequence[Any], then: Callable[[Any], Any]) -> list[Any]:
        """The same, with `then` applied to every result on the way."""
        env = dict(zip(self.inputs, values, strict=True))
        for equation in self.equations:
            read = list(dict.fromkeys(variables(equation.invars)))
            made = [v for v in equation.outvars if not isinstance(v, jex.DropVar)]
            results = run_equations(self.jaxpr, [equation], read, made, [env[v] for v in read])
            env.update(zip(made, map(then, results), strict=True))
        return [env[v] for v in self.outputs]


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """A program, split.

    Attributes:
        jaxpr: the program.
        consts: the values of its constants.
        group: the group of what is made from the arguments of one, whatever is shared with it.
        rounds: what is shared, to be made in this order: each needs of the groups only what these make from
            the rounds before it.
    """

    jaxpr: Any
    consts: Sequence[Any]
    group: Mapping[Any, int]
    rounds: tuple[frozenset[Any], ...]
    _made_by: Mapping[Any, int]

    def shared(self, index: int) -> Part:
        """The equations of a round. Its inputs that have a group are what this has to make first."""
        given = self.group.keys() | frozenset().union(*self.rounds[:index])
        return self._leading_to(self.rounds[index], given)

    def alone(self, wanted: Iterable[Any]) -> Part:
        """What leads to variables of a group, from its arguments and from what is shared."""
        return self._leading_to(wanted, frozenset().union(*self.rounds))

    def _leading_to(self, wanted: Iterable[Any], given: Iterable[Any]) -> Part:
        wanted, given = tuple(wanted), frozenset(given)
        needed: set[int] = set()
        inputs: dict[Any, None] = {}
        queue = list(wanted)
        while queue:
            variable = queue.pop()
            index = None if variable in given else self._made_by.get(variable)
            if index is None:
                inputs[variable] = None
            elif index not in needed:
                needed.add(index)
                queue += variables(self.jaxpr.eqns[index].invars)
        equations = tuple(self.jaxpr.eqns[index] for index in sorted(needed))
        return Part(equations, tuple(inputs), wanted, self.jaxpr)


def split(
    function: Callable[..., list[Any]], kinds: Sequence[Any], groups: Sequence[int | None]
) -> Split:
    """Trace a function, and split it.

    Args:
        function: takes arrays, and returns a list of such.
        kinds: the types of its arguments.
        groups: to which group each belongs; None: it is shared.

    Raises:
        ValueError: the function has side effects.
    """
    closed = _without_calls(jax.make_jaxpr(function)(*kinds), groups)
    jaxpr = closed.jaxpr
    effects = {e.primitive.name for e in jaxpr.eqns if e.effects}
    if effects:
        raise ValueError(
            f"update_optimizer: the optimizer's update has side effects ({', '.join(sorted(effects))}), and "
            "with arrays on the host it is done in parts, some of them twice. Take that out of the gradient "
            "transformation, or keep parameters and state on the device: jfsdp.OffloadPolicy()."
        )
    group = {v: g for v, g in zip(jaxpr.invars, groups, strict=True) if g is not None}
    level: dict[Any, int] = {}
    spread: set[Any] = set()
    made_by: dict[Any, int] = {}
    rounds: list[set[Any]] = [set()]
    for index, equation in enumerate(jaxpr.eqns):
        read = variables(equation.invars)
        made = [v for v in equation.outvars if not isinstance(v, jex.DropVar)]
        made_by.update(dict.fromkeys(made, index))
        of = {group[v] for v in read if v in group}
        depth = max((level.get(v, 0) for v in read), default=0)
        # What is summed up over all groups one by one, as a norm is, is shared from the second on.
        deep = any(level.get(v, 0) for v in read if v not in group)
        if len(of) == 1 and not (deep and all(v.aval.ndim == 0 for v in made)):
            group.update(dict.fromkeys(made, *of))
        elif not of and _spreads(read, made, spread):
            spread.update(made)
        else:
            depth += bool(of) and max(level.get(v, 0) for v in read if v in group) == depth
            rounds += [set() for _ in range(depth + 1 - len(rounds))]
            rounds[depth].update(made)
        level.update(dict.fromkeys(made, depth))
    return Split(jaxpr, closed.consts, group, tuple(map(frozenset, rounds)), made_by)


def _spreads(read: Sequence[Any], made: Sequence[Any], spread: set[Any]) -> bool:
    """Whether an equation of shared variables makes more than it reads, or works on what one such made.

    A scalar in the shape of a parameter, zeros, noise: they are made where they are used, each time.
    """
    if not any(v.aval.ndim for v in made):
        return False
    return bool(spread.intersection(read)) or max(v.aval.size for v in made) > sum(
        v.aval.size for v in read
    )


def makes_arrays(equation: Any) -> bool:
    """Whether a program inside an equation makes arrays from nothing."""

    def inside(jaxpr: Any) -> bool:
        alone = (e for e in jaxpr.eqns if not variables(e.invars))
        return any(v.aval.ndim for e in alone for v in e.outvars) or any(
            map(makes_arrays, jaxpr.eqns)
        )

    found = (getattr(x, "jaxpr", x) for x in jax.tree.leaves(list(equation.params.values())))
    return any(inside(x) for x in found if hasattr(x, "eqns"))


def _without_calls(closed: Any, groups: Sequence[int | None]) -> Any:
    """A program in which the equations of calls stand in their place.

    `optax.tree.bias_correction` is a call that takes the moments of all parameters. Of a `lax.cond` that
    takes several groups both branches are made, and selected from.
    """
    if not any(_is_call(e) or e.primitive.name == "cond" for e in closed.jaxpr.eqns):
        return closed

    def function(*values: Any) -> list[Any]:
        flags = [frozenset() if group is None else frozenset((group,)) for group in groups]
        results = _inlined(closed.jaxpr, closed.consts, list(zip(values, flags, strict=True)))
        return [x for x, _ in results]

    return jax.make_jaxpr(function)(*(v.aval for v in closed.jaxpr.invars))


def _is_call(equation: Any) -> bool:
    return _CALLS.get(equation.primitive.name, "") in equation.params


def _inlined(
    jaxpr: Any, consts: Sequence[Any], given: Sequence[tuple[Any, frozenset[int]]]
) -> list[Any]:
    """Results, each with the groups that it is made from, as are the arguments."""
    env = dict(zip(jaxpr.invars, given, strict=True))
    env.update((v, (x, frozenset())) for v, x in zip(jaxpr.constvars, consts, strict=True))

    def read(atom: Any) -> tuple[Any, frozenset[int]]:
        return env[atom] if is_variable(atom) else (atom.val, frozenset())

    for equation in jaxpr.eqns:
        operands = [read(x) for x in equation.invars]
        groups = frozenset().union(*(of for _, of in operands))
        made = equation.outvars
        if _is_call(equation):
            results = _called(equation.params[_CALLS[equation.primitive.name]], operands)
        elif equation.primitive.name == "cond" and len(groups) > 1 and not _is_opaque(equation):
            results = _selected(equation, operands)
        else:
            inputs = list(dict.fromkeys(variables(equation.invars)))
            made = [v for v in made if not isinstance(v, jex.DropVar)]
            values = run_equations(jaxpr, [equation], inputs, made, [env[v][0] for v in inputs])
            of = frozenset() if len(groups) > 1 else groups
            results = [(x, of) for x in values]
        env.update(zip(made, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _called(inner: Any, operands: Sequence[Any]) -> list[Any]:
    return _inlined(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), operands)


def _is_opaque(equation: Any) -> bool:
    """Whether a `lax.cond` has side effects, or a branch for each platform."""
    return bool(equation.effects) or equation.params.get("branches_platforms") is not None


def _selected(equation: Any, operands: Sequence[Any]) -> list[Any]:
    (index, of), *others = operands
    made = [_called(branch, others) for branch in equation.params["branches"]]
    results = []
    for variable, *cases in zip(equation.outvars, *made, strict=True):
        values = [jnp.asarray(x, variable.aval.dtype) for x, _ in cases]
        groups = of.union(*(groups for _, groups in cases))
        chosen = jax.lax.select_n(index, *values)
        results.append((chosen, groups if len(groups) == 1 else frozenset()))
    return results
