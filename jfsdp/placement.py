"""Which dimension of which parameter lies on which mesh axes, and why."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jfsdp.layout import TILE, Dims, axes_of_entry, named_sharding, to_spec
from jfsdp.mesh import AnyMesh, DataParallelMesh, describe_mesh

__all__ = ["Placement", "place"]

_FAR = 8
_LARGE = 2**18
"""Elements from which a parameter's shards are kept to whole tiles: 1 MiB in float32."""

Entries = tuple[tuple[str, ...], ...]
"""A PartitionSpec with one tuple of axis names for each dimension."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one parameter lies.

    Attributes:
        path: the parameter's path below the module that was sharded, for messages.
        shape: global shape.
        dtype: storage dtype.
        entries: for each dimension the mesh axes it lies on, the user's own axes included.
        dims: the dimensions that jfsdp shards, with their shard axes: ((dim, axes), ...).
        stacked_axis: the layer axis of a scanned stack, or None.
        reason: why the parameter is replicated over the shard axes; "" if it is sharded.
    """

    path: str = dataclasses.field(compare=False)
    shape: tuple[int, ...]
    dtype: Any
    entries: Entries
    dims: Dims
    stacked_axis: int | None = None
    reason: str = ""

    @property
    def spec(self) -> PartitionSpec:
        """The PartitionSpec of the parameter at rest."""
        return to_spec(self.entries)

    def manual_spec(self) -> PartitionSpec:
        """The part of the spec that a region over the data-parallel axes splits by itself."""
        axes_of = dict(self.dims)
        return to_spec([axes_of.get(dim, ()) for dim in range(len(self.shape))])

    def sharding(self, mesh: AnyMesh) -> NamedSharding:
        """The parameter's sharding at rest on `mesh`."""
        return named_sharding(mesh, self.spec, len(self.shape))

    def shard_shape(self, mesh: AnyMesh) -> tuple[int, ...]:
        """Shape of one device's shard."""
        return tuple(
            size // math.prod(mesh.shape[axis] for axis in axes)
            for size, axes in zip(self.shape, self.entries, strict=True)
        )

    @property
    def bytes(self) -> int:
        """Bytes of the whole parameter in storage dtype."""
        return math.prod(self.shape) * _itemsize(self.dtype)

    def shard_bytes(self, mesh: AnyMesh) -> int:
        """Bytes of one device's shard in storage dtype."""
        return math.prod(self.shard_shape(mesh)) * _itemsize(self.dtype)

    def dims_at_rank(self, ndim: int) -> Dims:
        """`dims`, moved to where they are in an array of `ndim` dimensions.

        Inside `nnx.scan` or `nnx.vmap` over a stack, a layer's slice has lost the stacked axis.

        Raises:
            ValueError: the array has another rank than the parameter, with or without that axis.
        """
        return self._at_rank(self.dims, ndim)

    def others_at_rank(self, ndim: int) -> Dims:
        """The dimensions that lie on axes which are not data-parallel, in an array of `ndim` dimensions.

        Raises:
            ValueError: as `dims_at_rank`.
        """
        own = {axis for _, axes in self.dims for axis in axes}
        others = (
            (dim, tuple(axis for axis in axes if axis not in own))
            for dim, axes in enumerate(self.entries)
        )
        return self._at_rank(tuple((dim, axes) for dim, axes in others if axes), ndim)

    def _at_rank(self, dims: Dims, ndim: int) -> Dims:
        if ndim == len(self.shape):
            return dims
        if self.stacked_axis is None or ndim != len(self.shape) - 1:
            raise ValueError(
                f"{self.path}: sharded with shape {self.shape}, but the unit is called with an array "
                f"of {ndim} dimensions. If a scan or vmap removes a layer axis, say which with "
                "jfsdp.shard(..., stacked_axis=0)."
            )
        return tuple((dim - (dim > self.stacked_axis), axes) for dim, axes in dims)


def place(
    path: str,
    leaf: Any,
    dp: DataParallelMesh,
    *,
    own_spec: PartitionSpec | None = None,
    stacked_axis: int | None = None,
    asked: Any = None,
) -> Placement:
    """Decide where a parameter lies.

    The rule: the largest dimension that divides by the number of shards, ties to the first; never
    the stacked axis, never a dimension that another mesh axis holds; of a large parameter the last one
    only if its shards are whole tiles (see `_cuts_tiles`) or nothing else divides. If none divides by the
    product of several shard axes, the axes go to different dimensions. What still does not fit, and
    scalars, is replicated, with the reason.

    Args:
        path: for messages.
        leaf: anything with a shape and a dtype.
        dp: the mesh and its data-parallel axes.
        own_spec: the parameter's own PartitionSpec; its other axes are composed with, and shard axes
            in it are obeyed.
        stacked_axis: the layer axis of a scanned stack.
        asked: the dimension that `shard_placement_fn` chose, negative from the end; None for the rule.

    Raises:
        TypeError: `asked` is no integer.
        ValueError: `asked` does not exist, does not divide, is the stacked axis, or holds another
            axis; `own_spec` names an unknown axis, a replicate axis, or contradicts `asked`.
    """
    shape = tuple(leaf.shape)
    own = _own_entries(path, shape, own_spec, dp)
    stacked_axis = _checked_stacked_axis(path, shape, stacked_axis)
    dims, reason = _choose(path, shape, dp, own, stacked_axis, asked)
    axes_of = dict(dims)
    entries = tuple(
        axes_of[dim] + tuple(axis for axis in own[dim] if axis not in axes_of[dim])
        if dim in axes_of
        else own[dim]
        for dim in range(len(shape))
    )
    return Placement(path, shape, leaf.dtype, entries, dims, stacked_axis, reason)


def _itemsize(dtype: Any) -> int:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return np.dtype(np.uint32).itemsize * 2
    return np.dtype(dtype).itemsize


def _own_entries(
    path: str, shape: tuple[int, ...], spec: PartitionSpec | None, dp: DataParallelMesh
) -> Entries:
    given = tuple(spec or ())
    if len(given) > len(shape):
        raise ValueError(
            f"{path}: its PartitionSpec {spec} has {len(given)} entries but its shape {shape} has "
            f"{len(shape)} dimensions."
        )
    entries = tuple(axes_of_entry(entry) for entry in given) + ((),) * (len(shape) - len(given))
    for axis in itertools.chain(*entries):
        if axis not in dp.mesh.axis_names:
            raise ValueError(
                f"{path}: its PartitionSpec {spec} names the axis {axis!r}, which the mesh does not "
                f"have. Its axes: {describe_mesh(dp.mesh)}."
            )
        if axis in dp.replicate_axes:
            raise ValueError(
                f"{path}: its PartitionSpec {spec} uses {axis!r}, but DataParallelMeshDims says that "
                "axis holds copies. Drop it from the parameter's spec, or make it a shard axis."
            )
    return tuple(dp.larger_than_one(axes) for axes in entries)


def _checked_stacked_axis(path: str, shape: tuple[int, ...], axis: int | None) -> int | None:
    if axis is None or not shape:
        return None
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"{path}: stacked_axis={axis} does not exist in shape {shape}; it must be one of the "
            f"{len(shape)} dimensions. Parameters without the layer axis belong to another shard call."
        )
    return axis % len(shape)


def _choose(
    path: str,
    shape: tuple[int, ...],
    dp: DataParallelMesh,
    own: Entries,
    stacked_axis: int | None,
    asked: Any,
) -> tuple[Dims, str]:
    axes = dp.shard_axes
    if not axes:
        return (), "the mesh has no shard axis larger than 1"
    preset = _preset(path, shape, dp, own, stacked_axis)
    if asked is not None:
        return (_asked(path, shape, dp, own, stacked_axis, asked, preset),), ""
    if preset:
        return preset, ""
    if not shape:
        return (), "a scalar"
    free = [d for d in range(len(shape)) if d != stacked_axis and not own[d] and shape[d] > 0]
    for dims in _candidates(shape, dp, free):
        return dims, ""
    return (), _why_not(shape, dp, free, stacked_axis)


def _preset(
    path: str,
    shape: tuple[int, ...],
    dp: DataParallelMesh,
    own: Entries,
    stacked_axis: int | None,
) -> Dims:
    """The shard axes that the parameter's own spec already names."""
    found = [(dim, tuple(a for a in axes if a in dp.shard_axes)) for dim, axes in enumerate(own)]
    dims = tuple((dim, axes) for dim, axes in found if axes)
    named = [axis for _, axes in dims for axis in axes]
    if not named:
        return ()
    if sorted(named) != sorted(dp.shard_axes):
        raise ValueError(
            f"{path}: its own PartitionSpec {to_spec(own)} uses {named} of the shard axes "
            f"{list(dp.shard_axes)}. Name all of them or none."
        )
    for dim, axes in dims:
        if dim == stacked_axis:
            raise ValueError(
                f"{path}: its own PartitionSpec {to_spec(own)} shards dimension {dim} of {shape}, which is "
                "the stacked (layer) axis: every layer would be gathered at once. Shard another."
            )
        if own[dim][: len(axes)] != axes:
            raise ValueError(
                f"{path}: its own PartitionSpec {to_spec(own)} puts {own[dim]} on dimension {dim}; "
                f"the shard axes {axes} must come first there."
            )
        _check_divides(path, shape, dim, dp, own[dim], "its own PartitionSpec")
    return dims


def _asked(
    path: str,
    shape: tuple[int, ...],
    dp: DataParallelMesh,
    own: Entries,
    stacked_axis: int | None,
    asked: Any,
    preset: Dims,
) -> tuple[int, tuple[str, ...]]:
    try:
        if isinstance(asked, bool):
            raise TypeError
        dim = operator.index(asked)
    except TypeError as error:
        raise TypeError(
            f"{path}: shard_placement_fn must return a dimension (int) or None, got {asked!r}."
        ) from error
    if not -len(shape) <= dim < len(shape):
        raise ValueError(
            f"{path}: shard_placement_fn chose dimension {dim}, but the shape {shape} has "
            f"{len(shape)} dimensions."
        )
    dim %= len(shape)
    if dim == stacked_axis:
        raise ValueError(
            f"{path}: shard_placement_fn chose dimension {dim} of {shape}, which is the stacked (layer) "
            "axis: every layer would be gathered at once. Choose another."
        )
    if preset and preset != ((dim, dp.shard_axes),):
        raise ValueError(
            f"{path}: shard_placement_fn chose dimension {dim}, but the parameter's own PartitionSpec "
            f"{to_spec(own)} already uses {', '.join(dp.shard_axes)}. Drop one of the two."
        )
    if own[dim] and not preset:
        raise ValueError(
            f"{path}: shard_placement_fn chose dimension {dim} of {shape}, which already lies on "
            f"{', '.join(own[dim])}. Choose another dimension or return None."
        )
    _check_divides(path, shape, dim, dp, dp.shard_axes, "shard_placement_fn")
    return dim, dp.shard_axes


def _check_divides(
    path: str,
    shape: tuple[int, ...],
    dim: int,
    dp: DataParallelMesh,
    axes: tuple[str, ...],
    who: str,
) -> None:
    parts = dp.size_of(axes)
    if shape[dim] % parts:
        raise ValueError(
            f"{path}: {who} shards dimension {dim} of shape {shape} over "
            f"{' x '.join(f'{a}={dp.mesh.shape[a]}' for a in axes)}, but {shape[dim]} does not divide "
            f"by {parts}. Choose a dimension that does, or return None to let jfsdp choose."
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


def _why_not(
    shape: tuple[int, ...], dp: DataParallelMesh, free: list[int], stacked_axis: int | None
) -> str:
    if 0 in shape:
        return "it has no elements"
    rest = [dim for dim in range(len(shape)) if dim != stacked_axis]
    if not rest:
        return "only the stacked (layer) axis is left"
    if not free:
        return "other mesh axes hold its dimensions"
    sizes = ", ".join(str(shape[dim]) for dim in free)
    parts = dp.size_of(dp.shard_axes)
    return f"no free dimension ({sizes}) divides by {parts}"
