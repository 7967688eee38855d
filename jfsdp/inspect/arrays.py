"""The arrays that an instruction of a compiled program results in, and the bytes that they take."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Final, Literal

from .collective import nbytes, xla_dtype_name
from .hlo import Instruction

__all__ = ["Array", "Kind", "Tree", "element", "leaves", "new_arrays"]

Kind = Literal["argument", "output", "temporary"]

_COMMENT: Final = re.compile(r"/\*.*?\*/")
_ARRAY: Final = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")


@dataclasses.dataclass(eq=False)
class Array:
    """One array that an instruction results in.

    Attributes:
        bytes: its size, tile padding included.
        shape: its shape on one device.
        dtype: NumPy or ml_dtypes name.
        space: number of the memory that it lies in; 0 is the device's own (HBM).
        source: the instruction.
        start: when it is made.
        end: when it is read for the last time.
        kind: what it is to the whole program.
        same_as: an array in whose place it lies; None for its own.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    space: int
    source: Instruction
    start: int
    end: int
    kind: Kind = "temporary"
    same_as: Array | None = None

    def owner(self) -> Array:
        """The array in whose place it lies."""
        at = self
        while at.same_as is not None:
            at = at.same_as
        return at


# What an instruction results in: an array, or a tuple of results.
Tree = Array | list["Tree"]


def leaves(tree: Tree) -> Iterator[Array]:
    """All arrays of a result, in order."""
    if isinstance(tree, Array):
        yield tree
    else:
        for part in tree:
            yield from leaves(part)


def element(tree: Tree, index: str) -> Tree:
    """The part of a result at an index such as "1, 0"; the whole at ""."""
    for number in index.replace(" ", "").split(","):
        if number and not isinstance(tree, Array):
            tree = tree[int(number)]
    return tree


def new_arrays(at: Instruction, time: int) -> Tree:
    """New arrays for what an instruction results in, made at `time`."""
    open_tuples: list[list[Tree]] = [[]]
    text, position = _COMMENT.sub("", at.type_text), 0
    while position < len(text):
        array = _ARRAY.match(text, position)
        if array is not None:
            open_tuples[-1].append(_leaf(array, at, time))
        elif text[position] == "(":
            open_tuples.append([])
        elif text[position] == ")":
            closed = open_tuples.pop()
            open_tuples[-1].append(closed)
        position = array.end() if array else position + 1
    return open_tuples[0][0]


def _leaf(array: re.Match[str], at: Instruction, time: int) -> Array:
    if array[1] in ("token", "opaque"):
        return Array(0, (), "", 0, at, time, time)
    dtype, layout = xla_dtype_name(array[1]), array[3] or ""
    shape = tuple(int(size.lstrip("<=")) for size in array[2].split(",") if size)
    space = re.search(r"S\((\d+)\)", layout)
    size = math.ceil(nbytes(_in_memory(shape, layout), dtype))
    return Array(size, shape, dtype, int(space[1]) if space else 0, at, time, time)


def _in_memory(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """The shape as it lies in memory, its last dimensions filled up to whole tiles (TPU)."""
    order, _, rest = layout.partition(":")
    dims = [shape[int(dim)] for dim in reversed(order.split(","))] if order else list(shape)
    tile = re.search(r"T\(([\d,]+)\)", rest)
    if tile is None:
        return tuple(dims)
    sizes = [int(size) for size in tile[1].split(",")]
    dims = [1] * (len(sizes) - len(dims)) + dims
    inner = [-(-n // size) * size for n, size in zip(dims[-len(sizes) :], sizes, strict=True)]
    return (*dims[: -len(sizes)], *inner)
