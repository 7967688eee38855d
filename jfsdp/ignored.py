"""Which parameters jfsdp leaves alone: `ignored_params`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jfsdp.selectors import matcher

__all__ = ["Ignored"]

_SEVERAL = 20
"""How many paths a message lists."""


class Ignored:
    """The selectors of one `shard` call, and which of them have selected something.

    Args:
        selectors: a glob over dotted paths, a predicate f(path, parameter), or several; None for none.
        kind: the class of which a Variable type has to be, to select by type; None where there are no types.

    Raises:
        TypeError: something else is given.
    """

    def __init__(self, selectors: Any, kind: type | None = None):
        types = "a Variable type such as nnx.LoRAParam, " if kind else ""
        taken = (
            f"ignored_params takes {types}a glob over the paths of parameters such as 'lora.*' or "
            "'**.lora_a', a predicate f(path, parameter) -> bool, or several of them"
        )
        given: Any = () if selectors is None else selectors
        one = isinstance(given, kind) if kind else False  # a Variable is iterable, and callable
        self._matchers = matcher((given,) if one else given, taken)  # pyright: ignore
        for selector, _ in self._matchers:
            wrong = isinstance(selector, type) and not (kind and issubclass(selector, kind))
            if wrong or (kind and isinstance(selector, kind)):
                raise TypeError(f"{taken}, got {selector!r}.")
        self._hit: set[int] = set()

    def selects(self, path: str, parameter: Any) -> bool:
        """Whether a parameter is to be left alone."""
        hits = [id(selector) for selector, matches in self._matchers if matches(path, parameter)]
        self._hit.update(hits)
        return bool(hits)

    def check(self, module: str, paths: Iterable[str], kinds: Iterable[str] = ()) -> None:
        """Check that each glob and type has selected something.

        Args:
            module: what the module is called.
            paths: of the parameters that it has.
            kinds: the names of their types, where they have any.

        Raises:
            ValueError: one has not; what is there is listed.
        """
        for selector, _ in self._matchers:
            if id(selector) in self._hit or not isinstance(selector, str | type):
                continue
            shown = getattr(selector, "__name__", repr(selector))
            there, types = list(paths), ", ".join(sorted(set(kinds)))
            listed = ", ".join(there[:_SEVERAL]) or "(none)"
            more = f" and {len(there) - _SEVERAL} more" if len(there) > _SEVERAL else ""
            raise ValueError(
                f"ignored_params={shown} matches no parameter of {module}. It has parameters "
                f"{f'of the types {types}, ' if types else ''}at the paths {listed}{more}."
            )
