"""Repeated blocks of a model under one name: "blocks.0" to "blocks.11" are "blocks.0-11"."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

__all__ = ["grouped", "module_of", "pattern", "ranged"]

T = TypeVar("T")


def pattern(path: str) -> str:
    """The path with "*" in place of its numbers.

    Example:
        >>> pattern("blocks.3.mlp.up.kernel")
        'blocks.*.mlp.up.kernel'
    """
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


def ranged(paths: Sequence[str]) -> str:
    """One name for paths of one pattern.

    Args:
        paths: at least one.

    Example:
        >>> ranged(["blocks.0.up", "blocks.1.up", "blocks.2.up"])
        'blocks.0-2.up'
    """
    return ".".join(map(_range, zip(*(path.split(".") for path in paths), strict=True)))


def module_of(leaf: str) -> str:
    """The block that a parameter is in: its path up to the first number, else up to the first dot.

    Example:
        >>> module_of("blocks.3.mlp.up.kernel"), module_of("head.kernel")
        ('blocks.3', 'head')
    """
    match = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", leaf)
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
    numbers = sorted({int(part) for part in parts})
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]}-{numbers[-1]}" if whole else ",".join(map(str, numbers))
