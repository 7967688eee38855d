"""Which of a forward's values wait for the backward pass in host memory: those that a unit's policy names.

A unit's forward runs in a scope whose name says what its policy says. Every equation that jax traces there
carries it, through jit, remat and scan: so what has a name belongs to the unit in whose own forward it was
named, and two units may differ.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Final
from urllib.parse import quote, unquote

import jax
from jax.extend import core as jex

from jfsdp._compat import scan_counts, scopes_of
from jfsdp.policies import CPUOffloadPolicy, OffloadPolicy

__all__ = ["Value", "check_kept", "check_names", "inside", "names_of", "naming", "values_in"]

_SCOPE: Final = re.compile(r"jfsdp_to_host\[([^\]]*)\]")

_OUR_NAMES: Final = "jfsdp_"

# What has as many elements as its operand: waiting on the host it serves as well as the value that was named.
_RECAST: Final = frozenset(
    {
        *(
            "broadcast_in_dim",
            "convert_element_type",
            "copy",
            "copy_p",
            "device_put",
            "expand_dims",
        ),
        *("reduce_precision", "reshape", "reshard", "sharding_constraint", "squeeze", "transpose"),
    }
)
_CALLS: Final = frozenset(
    {
        *("checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"),
        *("custom_vjp_call_jaxpr", "jit", "pjit", "remat", "remat2"),
    }
)

_named_outside: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "named_outside", default=False
)


def names_of(policy: OffloadPolicy) -> tuple[str, ...]:
    """The names of what a unit keeps on the host between forward and backward."""
    return policy.activations if isinstance(policy, CPUOffloadPolicy) else ()


@contextlib.contextmanager
def naming(caller: str, policy: OffloadPolicy) -> Iterator[None]:
    """While a unit's forward is traced: what it names there is its own.

    Args:
        caller: the unit's class, for messages.
        policy: the unit's.
    """
    names = names_of(policy)
    if not names and not _named_outside.get():
        yield
        return
    token = _named_outside.set(bool(names))
    text = ",".join(quote(word, safe="") for word in (caller, *names))
    try:
        with jax.named_scope(f"jfsdp_to_host[{text}]"):
            yield
    finally:
        _named_outside.reset(token)


@contextlib.contextmanager
def inside(equation: Any) -> Iterator[None]:
    """While what an equation holds runs without it: in the same unit's forward as the equation."""
    scope = _scope_of(equation, "")
    with jax.named_scope(f"jfsdp_to_host[{scope}]") if scope else contextlib.nullcontext():
        yield


@dataclasses.dataclass(eq=False)
class Value:
    """What several variables of a program hold: the operand and the result of `checkpoint_name` are one.

    Attributes:
        own_names: those of its names by which its unit keeps it on the host.
        source: the value of which this one is but a cast, a reshape or a stack; None for others.
    """

    own_names: set[str] = dataclasses.field(default_factory=set)
    source: Value | None = None

    @property
    def names(self) -> set[str]:
        """Those for which it waits on the host, if it is kept at all."""
        return self.own_names if self.source is None else self.own_names | self.source.names


def values_in(
    jaxpr: Any, given: Sequence[Value] | None = None, scope: str = ""
) -> dict[Any, Value]:
    """The values of a program's variables.

    Args:
        jaxpr: the program.
        given: those of its arguments, if they are known.
        scope: the scope that it is called in.
    """
    inputs = [Value() for _ in jaxpr.invars] if given is None else given
    env = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Value:
        return env.setdefault(atom, Value()) if isinstance(atom, jex.Var) else Value()

    for equation in jaxpr.eqns:
        here, primitive = _scope_of(equation, scope), equation.primitive.name
        operands = [read(x) for x in equation.invars]
        results = [Value() for _ in equation.outvars]
        if primitive == "name":
            results = operands
            operands[0].own_names.update({equation.params["name"]}.intersection(_words(here)[1:]))
        elif primitive in _RECAST and len(operands) == 1:
            if equation.invars[0].aval.size == equation.outvars[0].aval.size:
                results = [Value(source=operands[0])]
        elif primitive == "scan":
            results = _of_scan(equation, operands, here)
        elif primitive in _CALLS:
            (inner,) = jex.jaxprs_in_params(equation.params)
            found = values_in(inner, operands, here)
            results = [found.get(x, Value()) for x in map(_hashable, inner.outvars)]
        env.update(zip(equation.outvars, results, strict=True))
    return env


def _of_scan(equation: Any, operands: Sequence[Value], scope: str) -> list[Value]:
    (inner,) = jex.jaxprs_in_params(equation.params)
    consts, carry = scan_counts(equation.params)
    others = [Value() for _ in operands[consts:]]
    found = values_in(inner, [*operands[:consts], *others], scope)
    stacked = [found.get(x, Value()) for x in map(_hashable, inner.outvars[carry:])]
    return [*(Value() for _ in range(carry)), *(Value(source=x) for x in stacked)]


def _hashable(atom: Any) -> Any:
    return atom if isinstance(atom, jex.Var) else None


def _scope_of(equation: Any, outside: str) -> str:
    return (_SCOPE.findall(scopes_of(equation)) or [outside])[-1]


def _words(scope: str) -> list[str]:
    return [unquote(word) for word in scope.split(",")]


# --------------------------------------------------------------------------------------------------
# Names that nothing has, or nothing that is kept


def check_names(jaxpr: Any) -> bool:
    """Check that the names of each unit's policy are given to values in the forwards of a program.

    Returns:
        Whether there are any.

    Raises:
        ValueError: in no forward of the units that name it a value has it; the names there are listed.
    """
    found = _names_in(jaxpr.eqns)
    asked: dict[str, dict[str, None]] = {}
    for scope in found:
        unit, *names = _words(scope)
        for name in names:
            asked.setdefault(name, {})[unit] = None
    given = _given(found)
    missing = [_missing(name, list(asked[name]), found) for name in asked if name not in given]
    if missing:
        raise ValueError("\n".join(missing))
    return bool(asked)


def check_kept(equations: Iterable[Any], kept: Set[str]) -> None:
    """Check that the backward pass of a program has values of the names that are given in it.

    Args:
        equations: those of its pieces that are differentiated.
        kept: the names of what they keep.

    Raises:
        ValueError: it has none of a name.
    """
    lost = sorted(_given(_names_in(equations)).difference(kept))
    if lost:
        raise ValueError(
            f"CPUOffloadPolicy(activations=...) names {', '.join(map(repr, lost))}, but the backward pass "
            "keeps no value of that name, so that nothing would go to the host: what takes it is computed "
            "again by a remat or keeps something else that it has made of it, as a norm does. Either\n"
            "  1. name what is kept (the input of a matmul, say), or\n"
            "  2. inside of a remat, give that\n"
            "     policy=jax.checkpoint_policies.save_and_offload_only_these_names(...), or\n"
            "  3. drop the name."
        )


def _given(found: Mapping[str, Iterable[str]]) -> set[str]:
    """The names that a unit's policy names and that a value in its forward has."""
    return {n for scope, names in found.items() for n in names if n in _words(scope)[1:]}


def _names_in(equations: Iterable[Any], scope: str = "") -> dict[str, dict[str, None]]:
    """The names that values have, by the scope that they were given in."""
    found: dict[str, dict[str, None]] = {}
    for equation in equations:
        here = _scope_of(equation, scope)
        names = found.setdefault(here, {})
        if equation.primitive.name == "name":
            name = equation.params["name"]
            names.update({} if name.startswith(_OUR_NAMES) else {name: None})
        for inner in jex.jaxprs_in_params(equation.params):
            for within, others in _names_in(inner.eqns, here).items():
                found.setdefault(within, {}).update(others)
    return found


def _missing(name: str, units: Sequence[str], found: Mapping[str, Iterable[str]]) -> str:
    own = {n: None for scope, names in found.items() if _words(scope)[0] in units for n in names}
    where = {_words(scope)[0] for scope, names in found.items() if name in names} - {""}
    elsewhere = (
        f" {', '.join(sorted(where))} has one, whose policy does not name it." if where else ""
    )
    return (
        f"{', '.join(units)}: CPUOffloadPolicy(activations=...) names {name!r}, but no value in the forward "
        f"has that name; the names there are {', '.join(map(repr, own)) or 'none'}.{elsewhere} Name the "
        f"value, x = jax.ad_checkpoint.checkpoint_name(x, {name!r}), in the forward of the unit, or drop "
        "the name."
    )
