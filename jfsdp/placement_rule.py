"""The rule that places a parameter whose place nobody has named."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

from jfsdp.layout import TILE, Dims
from jfsdp.mesh import DataParallelMesh

__all__ = ["Entries", "Leaf", "by_rule", "check_divides", "check_not_stacked"]

_FAR = 8
_LARGE = 2**18
"""Elements from which a parameter's shards are kept to whole tiles: 1 MiB in float32."""

Entries = tuple[tuple[str, ...], ...]
"""A PartitionSpec with one tuple of axis names for each dimension."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter as far as its place is settled before jfsdp chooses one.

    Attributes:
        path: for messages.
        shape: global shape.
        own: for each dimension the axes of the parameter's own spec.
        local: those of them that it stays split over while its unit is called.
        stacked_axis: the layer axis of a scanned stack, or None.
        dp: the mesh and the data-parallel axes of this parameter.
    """

    path: str
    shape: tuple[int, ...]
    own: Entries
    local: Dims
    stacked_axis: int | None
    dp: DataParallelMesh

    def held(self, dim: int) -> tuple[str, ...]:
        """The axes on a dimension that shards cannot share it with."""
        local = dict(self.local).get(dim, ())
        return tuple(axis for axis in self.own[dim] if axis not in local)


def by_rule(leaf: Leaf) -> tuple[Dims, str]:
    """The dimensions to shard, with their axes; or none, and the reason."""
    if not leaf.shape:
        return (), "a scalar"
    dims = range(len(leaf.shape))
    free = [d for d in dims if d != leaf.stacked_axis and not leaf.own[d] and leaf.shape[d] > 0]
    for found in _candidates(leaf.shape, leaf.dp, free):
        return found, ""
    return (), _why_not(leaf, free)


def check_divides(leaf: Leaf, dim: int, axes: tuple[str, ...], who: str) -> None:
    """Check that a dimension divides by the devices of `axes`.

    Raises:
        ValueError: it does not.
    """
    mesh, size = leaf.dp.mesh, leaf.shape[dim]
    parts = leaf.dp.size_of(axes)
    if size % parts:
        raise ValueError(
            f"{leaf.path}: {who} shards dimension {dim} of shape {leaf.shape} over "
            f"{' x '.join(f'{a}={mesh.shape[a]}' for a in axes)}, but {size} does not divide "
            f"by {parts}. Choose a dimension that does, or return None to let jfsdp choose."
        )


def check_not_stacked(leaf: Leaf, dim: int, what: str) -> None:
    """Check that a dimension is not the layer axis.

    Raises:
        ValueError: it is.
    """
    if dim == leaf.stacked_axis:
        raise ValueError(
            f"{leaf.path}: {what} dimension {dim} of {leaf.shape}, which is the stacked (layer) "
            "axis: every layer would be gathered at once. Choose another."
        )


def _candidates(shape: tuple[int, ...], dp: DataParallelMesh, free: list[int]) -> Iterator[Dims]:
    """Ways to place all shard axes on free dimensions, best first."""
    by_size = sorted(free, key=lambda dim: (-shape[dim], dim))
    narrow = _cuts_tiles(shape, dp, free)
    choices = itertools.product(by_size, repeat=len(dp.shard_axes))
    for choice in sorted(
        choices, key=lambda dims: (len(set(dims)), narrow and max(dims) == narrow)
    ):
        axes_of: dict[int, tuple[str, ...]] = {}
        for dim, axis in zip(choice, dp.shard_axes, strict=True):
            axes_of[dim] = (*axes_of.get(dim, ()), axis)
        if all(shape[dim] % dp.size_of(axes) == 0 for dim, axes in axes_of.items()):
            yield tuple(sorted(axes_of.items()))


def _cuts_tiles(shape: tuple[int, ...], dp: DataParallelMesh, free: list[int]) -> int:
    """The last dimension, if sharding it would cut a large parameter inside tiles; else 0.

    TPUs keep the last dimension in tiles 128 wide. Narrower shards are padded, and XLA all-reduces their
    gradients, twice the bytes (float32[4096,14336] over 16x4 of v5p:4x4x4, jax 0.12.0.1). Not so if the
    others are far smaller: float32[4096,128256] is scattered on its last dimension alone.
    """
    last = len(shape) - 1
    others = max((shape[dim] for dim in free if dim != last), default=0)
    whole = shape[last] // dp.size_of(dp.shard_axes) % TILE == 0
    small = math.prod(shape) < _LARGE or _FAR * others < shape[last]
    return 0 if whole or small else last


def _why_not(leaf: Leaf, free: list[int]) -> str:
    if 0 in leaf.shape:
        return "it has no elements"
    rest = [dim for dim in range(len(leaf.shape)) if dim != leaf.stacked_axis]
    if not rest:
        return "only the stacked (layer) axis is left"
    if not free:
        return "other mesh axes hold its dimensions"
    sizes = ", ".join(str(leaf.shape[dim]) for dim in free)
    parts = leaf.dp.size_of(leaf.dp.shard_axes)
    return f"no free dimension ({sizes}) divides by {parts}"
