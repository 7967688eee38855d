"""Choosing modules and parameters: by class, by a glob over dotted paths, or by a predicate."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["matcher"]

Selector = type | str | Callable[[str, Any], bool]


_UNITS = (
    "units takes a module class, a glob over paths such as 'blocks.*', a predicate "
    "f(path, module) -> bool, or several of them"
)


def matcher(
    selectors: Selector | Iterable[Selector], taken: str = _UNITS
) -> list[tuple[Selector, Callable[[str, Any], Any]]]:
    """Turn `units=` into predicates over (path, module), `ignored_params=` into such over (path, parameter).

    Args:
        selectors: a class, a glob over dotted paths, a predicate, or several of them.
        taken: what the argument takes, for the message.

    Raises:
        TypeError: something else.
    """
    if isinstance(selectors, type | str) or not isinstance(selectors, Iterable):
        selectors = (selectors,)
    return [(selector, _predicate(selector, taken)) for selector in selectors]


def _predicate(selector: Any, taken: str) -> Callable[[str, Any], Any]:
    if isinstance(selector, type):
        return lambda path, module: isinstance(module, selector)
    if isinstance(selector, str):
        return lambda path, module: _glob(path.split("."), selector.split("."))
    if callable(selector):
        return selector
    raise TypeError(f"{taken}, got {selector!r}.")


def _glob(parts: list[str], pattern: list[str]) -> bool:
    """Whether a dotted path matches: "*" within one name, "**" over any number of names."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_glob(parts[skip:], pattern[1:]) for skip in range(len(parts) + 1))
    return (
        bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0]) and _glob(parts[1:], pattern[1:])
    )
