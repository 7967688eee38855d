"""Repeated blocks of a model under one name: "blocks.0" to "blocks.11" are "blocks.0-11".

Linen numbers modules by a suffix: "Block_0" to "Block_11" are "Block_0-11".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

__all__ = ["grouped", "module_of", "pattern", "ranged"]

T = TypeVar("T")

_NUMBER = re.compile(r"(?:^|(?<=_))\d+$")
"""Of a part of a path: all of it, or what follows its last underscore."""


def pattern(path: str) -> str:
    """The path with "*" in place of its numbers.

    Example:
        >>> pattern("blocks.3.mlp.up.kernel"), pattern("Block_3.Dense_0.kernel")
        ('blocks.*.mlp.up.kernel', 'Block_*.Dense_*.kernel')
    """
    return ".".join(_NUMBER.sub("*", part) for part in path.split("."))


def ranged(paths: Sequence[str]) -> str:
    """One name for paths of one pattern.

    Args:
        paths: at least one.

    Example:
        >>> ranged(["blocks.0.up", "blocks.1.up", "blocks.2.up"]), ranged(["Block_0", "Block_1"])
        ('blocks.0-2.up', 'Block_0-1')
    """
    return ".".join(map(_range, zip(*(path.split(".") for path in paths), strict=True)))


def module_of(leaf: str) -> str:
    """The block that a parameter is in: its path up to the first number, else up to the first dot.

    Example:
        >>> module_of("blocks.3.mlp.up.kernel"), module_of("Block_3.Dense_0.kernel"), module_of("head.kernel")
        ('blocks.3', 'Block_3', 'head')
    """
    match = re.match(r"(?:[^.]+\.)*?(?:[^.]*_)?\d+(?=\.)", leaf)
    return match[0] if match else leaf.split(".")[0]


def grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Items with the same key as lists, in the order of their first ones."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _range(parts: tuple[str, ...]) -> str:
    if len(set(parts)) == 1:
        return parts[0]
    name = _NUMBER.sub("", parts[0])
    numbers = sorted({int(part.removeprefix(name)) for part in parts})
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    return name + (f"{numbers[0]}-{numbers[-1]}" if whole else ",".join(map(str, numbers)))
