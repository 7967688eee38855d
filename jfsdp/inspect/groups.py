"""Which mesh axes a collective's groups of devices run over.

A lowered program names devices by their position in the mesh, in row-major order, whatever the
physical devices are: that holds for reordered device arrays, abstract meshes and regions that are
manual over some axes only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

Groups = tuple[tuple[int, ...], ...]


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
    return tuple(tuple(row) for row in ids.reshape(-1, group_size).tolist())


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
