"""Which mesh axes a collective's groups of devices run over.

A lowered program names devices by their position in the mesh, in row-major order, whatever the
physical devices are: that holds for reordered device arrays, abstract meshes and regions that are
manual over some axes only.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

Groups = tuple[tuple[int, ...], ...]

GROUPS: Final = (
    r"replica_groups=(\{(?:\{[\d,]*\},?)*\}"
    r"|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    r"|@?mesh\[[^\]]*\](?:, ?device_ids=\([^{}]*\))? ?\{[^}]*\})"
)
"""How a compiled program writes the device groups of a collective."""

PAIRS: Final = r"source_target_pairs=(\{(?:\{[\d,]*\},?)*\})"
"""How it writes those of a permute."""

_MESH: Final = r"@?mesh\[([^\]]*)\](?:, ?device_ids=\(([^{}]*)\))? ?\{([^}]*)\}"
# Some versions of XLA put the names in quotes.
_AXIS_SIZE: Final = re.compile(r"'?([^',=]+)'?=(\d+)")
_AXIS_REF: Final = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")


def along_axes(axis_sizes: Mapping[str, int], axes: Iterable[str]) -> Groups:
    """The groups of devices that differ in some axes of a mesh only.

    Args:
        axis_sizes: the mesh's axes and their sizes, in its order.
        axes: the axes that vary inside a group.

    Returns:
        The groups, each a tuple of row-major positions in the mesh.
    """
    names = list(axis_sizes)
    varying = [names.index(axis) for axis in axes]
    ids = np.arange(math.prod(axis_sizes.values())).reshape(tuple(axis_sizes.values()))
    ids = np.moveaxis(ids, varying, range(ids.ndim - len(varying), ids.ndim))
    group_size = math.prod(axis_sizes[names[index]] for index in varying)
    return _rows(ids, group_size)


def axes_of_groups(groups: Groups, axis_sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    """The mesh axes over which groups of devices vary.

    Args:
        groups: row-major positions in the mesh, one tuple per group, in any order.
        axis_sizes: the mesh's axes and their sizes, in its order.

    Returns:
        The axes in the mesh's order, or None when the groups are not exactly those of some of its
        axes.
    """
    axes = _varying(groups[:1], axis_sizes)
    if axes is None or _as_sets(along_axes(axis_sizes, axes)) != _as_sets(groups):
        return None
    return axes


def axes_of_pairs(pairs: Groups, axis_sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    """The mesh axes along which a permute moves data.

    Args:
        pairs: source and target, row-major positions in the mesh.
        axis_sizes: the mesh's axes and their sizes, in its order.

    Returns:
        The axes in which some source and its target differ, in the mesh's order, or None when a
        position is not in the mesh.
    """
    return _varying(pairs, axis_sizes)


def groups_of_text(text: str) -> Groups:
    """The groups of devices that a compiled program writes in one of XLA's three spellings.

    Args:
        text: `{{0,1},{2,3}}`, or `[2,4]<=[8]` (a list cut into groups, perhaps transposed before:
            `[4,2]<=[2,4]T(1,0)`), or `mesh['replica'=2,'fsdp'=4] {'fsdp'}` (axes of a mesh, whose devices
            may be in another order: `mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}`).

    Returns:
        The groups; none stand for one group of all devices.

    Raises:
        ValueError: the text is none of these.
    """
    if re.fullmatch(r"\{(\{[\d,]*\},?)*\}", text):
        return tuple(
            tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", text)
        )
    if match := re.fullmatch(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        ids = np.arange(int(match[1]) * int(match[2]))
        ids = _transposed(ids, [int(n) for n in match[3].split(",")], match[4])
        return _rows(ids, int(match[2]))
    unknown = ValueError(f"jfsdp.inspect: device groups written in an unknown way: {text}")
    match = re.fullmatch(_MESH, text)
    if match is None:
        raise unknown
    axes, refs = _AXIS_SIZE.findall(match[1]), _AXIS_REF.findall(match[3])
    in_mesh = {name for name, _, _ in refs} <= {name for name, _ in axes}
    if not in_mesh or _AXIS_REF.sub("", match[3]).strip(", "):
        raise unknown
    # A reference to part of an axis, 'fsdp':(2)4, is to 4 of it with 2 before: the axis is cut in three.
    sizes: dict[str, int] = {}
    for name, size in axes:
        parts = [(int(before), int(width)) for n, before, width in refs if n == name and before]
        edges = sorted({1, int(size), *(b for b, _ in parts), *(b * w for b, w in parts)})
        for before, after in itertools.pairwise(edges):
            sizes[f"{name}:{before}"] = after // before
    varying = [
        axis
        for axis in sizes
        for name, before, width in refs
        if axis.rpartition(":")[0] == name
        and (not before or int(before) <= int(axis.rpartition(":")[2]) < int(before) * int(width))
    ]
    positions = along_axes(sizes, varying)
    if not match[2]:
        return positions
    ids = _device_ids(match[2])
    return tuple(tuple(ids[position] for position in group) for group in positions)


def _device_ids(text: str) -> list[int]:
    """The devices at the positions of a mesh: `3,1,0,2`, or transposed from a range, `[2,4]T(1,0)`."""
    match = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if match is None:
        return [int(n) for n in text.split(",")]
    shape = [int(n) for n in match[1].split(",")]
    return _transposed(np.arange(math.prod(shape)), shape, match[2]).ravel().tolist()


def _transposed(ids: np.ndarray, shape: Sequence[int], order: str | None) -> np.ndarray:
    ids = ids.reshape(shape)
    return ids.transpose([int(n) for n in order.split(",")]) if order else ids


def _rows(ids: np.ndarray, size: int) -> Groups:
    return tuple(tuple(row) for row in ids.reshape(-1, size).tolist())


def _varying(
    groups: Sequence[Sequence[int]], axis_sizes: Mapping[str, int]
) -> tuple[str, ...] | None:
    if any(position >= math.prod(axis_sizes.values()) for group in groups for position in group):
        return None
    moved = np.zeros(len(axis_sizes), dtype=bool)
    for group in groups:
        coordinates = np.stack(np.unravel_index(np.asarray(group), tuple(axis_sizes.values())))
        moved |= (coordinates != coordinates[:, :1]).any(axis=1)
    return tuple(axis for axis, moves in zip(axis_sizes, moved, strict=True) if moves)


def _as_sets(groups: Groups) -> frozenset[frozenset[int]]:
    return frozenset(frozenset(group) for group in groups)
