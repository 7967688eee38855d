"""Which dimension of which parameter lies on which mesh axes, and why."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jfsdp.layout import Dims, lay, named_sharding, to_spec
from jfsdp.mesh import AnyMesh, DataParallelMesh
from jfsdp.placement_asked import by_answer, own_axes
from jfsdp.placement_own import (
    axes_in,
    check_copies,
    entries_of,
    preset_dims,
    quoted,
    staying_split,
)
from jfsdp.placement_rule import Entries, Leaf, by_rule, check_divides

__all__ = ["IGNORED", "Placement", "itemsize", "place"]

IGNORED = "ignored"
"""The reason of parameters that `ignored_params` selects."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one parameter lies.

    Attributes:
        path: the parameter's path below the module that was sharded, for messages.
        shape: global shape.
        dtype: storage dtype.
        whole_shape: shape that the forward sees: `shape`, or one device's part of it along `local`.
        entries: for each dimension the mesh axes it lies on, the user's own axes included.
        dims: the dimensions that jfsdp shards, with their shard axes: ((dim, axes), ...).
        local: the dimensions that stay split while the unit is called, with those data-parallel axes: along
            them each device has a parameter of its own, such as its experts.
        others: the dimensions that lie on axes which are not data-parallel, with those axes.
        stacked_axis: the layer axis of a scanned stack, or None.
        reason: why the parameter is not sharded over its shard axes; "" if it is.
        param_dtype: dtype of its gather and of the whole weight; None: the one that its unit's policy states.
        memory_kind: the kind of host memory in which it lies; None: the device's own.
        state_memory_kind: that of the optimizer state which lies as it does.
    """

    path: str = dataclasses.field(compare=False)
    shape: tuple[int, ...]
    dtype: Any
    whole_shape: tuple[int, ...]
    entries: Entries
    dims: Dims = ()
    local: Dims = ()
    others: Dims = ()
    stacked_axis: int | None = None
    reason: str = ""
    param_dtype: Any = None
    memory_kind: str | None = None
    state_memory_kind: str | None = None

    @property
    def ignored(self) -> bool:
        """Whether jfsdp leaves the parameter alone: it lies as its own spec says, and is never cast."""
        return self.reason == IGNORED

    @property
    def spec(self) -> PartitionSpec:
        """The PartitionSpec of the parameter at rest."""
        return to_spec(self.entries)

    @property
    def split(self) -> Dims:
        """The dimensions that a region over the data-parallel axes splits by itself."""
        local, dims = dict(self.local), dict(self.dims)
        return tuple((d, local.get(d, ()) + dims.get(d, ())) for d in sorted({*local, *dims}))

    def copies(self, dp: DataParallelMesh) -> tuple[str, ...]:
        """The data-parallel axes over which the gradient is summed whole: they hold copies of the shard."""
        split = axes_in(self.split)
        return tuple(axis for axis in dp.larger_than_one(dp.axes) if axis not in split)

    def manual_spec(self) -> PartitionSpec:
        """The part of the spec that a region over the data-parallel axes splits by itself."""
        axes_of = dict(self.split)
        return to_spec([axes_of.get(dim, ()) for dim in range(len(self.shape))])

    def sharding(self, mesh: AnyMesh) -> NamedSharding:
        """The parameter's sharding at rest on `mesh`."""
        return named_sharding(mesh, self.spec, len(self.shape), self.memory_kind)

    def at_rest_only(self, dp: DataParallelMesh) -> tuple[str, ...]:
        """The data-parallel axes of a parameter left alone, over which it is gathered as it enters."""
        lies = set(itertools.chain.from_iterable(self.entries)) if self.ignored else ()
        return tuple(axis for axis in dp.mesh.axis_names if axis in lies and axis in dp.axes)

    def tied(self, value: Any, dp: DataParallelMesh) -> Any:
        """`value` on its way into a region, so that its gradient comes out where the parameter lies.

        That of a parameter left alone would come out whole on every device.
        """
        if not self.at_rest_only(dp) or value.ndim != len(self.shape):
            return value
        return lay(value, self.sharding(dp.mesh))

    def shard_shape(self, mesh: AnyMesh) -> tuple[int, ...]:
        """Shape of one device's shard."""
        return tuple(
            size // math.prod(mesh.shape[axis] for axis in axes)
            for size, axes in zip(self.shape, self.entries, strict=True)
        )

    @property
    def bytes(self) -> int:
        """Bytes of the whole parameter in storage dtype."""
        return math.prod(self.shape) * itemsize(self.dtype)

    def shard_bytes(self, mesh: AnyMesh) -> int:
        """Bytes of one device's shard in storage dtype."""
        return math.prod(self.shard_shape(mesh)) * itemsize(self.dtype)

    def dims_at_rank(self, ndim: int) -> Dims:
        """`dims`, moved to where they are in an array of `ndim` dimensions.

        Inside `nnx.scan` or `nnx.vmap` over a stack, a layer's slice has lost the stacked axis.

        Raises:
            ValueError: the array has another rank than the parameter, with or without that axis.
        """
        return self._at_rank(self.dims, ndim)

    def others_at_rank(self, ndim: int) -> Dims:
        """`others`, moved to where they are in an array of `ndim` dimensions.

        Raises:
            ValueError: as `dims_at_rank`.
        """
        return self._at_rank(self.others, ndim)

    def part_at_rank(self, ndim: int, dp: DataParallelMesh) -> tuple[int, ...]:
        """Shape of one device's part in the per-device view, of an array of `ndim` dimensions.

        Raises:
            ValueError: as `dims_at_rank`.
        """
        sizes = list(self.shape)
        if ndim < len(sizes) and self.stacked_axis is not None:
            del sizes[self.stacked_axis]
        for dim, axes in self._at_rank(self.split, ndim):
            sizes[dim] //= dp.size_of(axes)
        return tuple(sizes)

    def telling_at_rank(self, ndim: int) -> tuple[int, ...]:
        """The dimensions of an array of `ndim` dimensions whose sizes tell if it is one device's part.

        Raises:
            ValueError: as `dims_at_rank`.
        """
        dims = self.split
        if self.ignored:  # it enters whole, however it lies at rest
            unclear = {self.stacked_axis, *dict(self.others)}
            dims = tuple((d, axes) for d, axes in enumerate(self.entries) if d not in unclear)
        return tuple(dim for dim, _ in self._at_rank(dims, ndim))

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
    ignored: bool = False,
    auto: bool = False,
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
        asked: what `shard_placement_fn` returned; None for the rule.
        ignored: whether it lies as its own spec says, on data-parallel axes too, and `asked` is not heard.
        auto: whether XLA places the collectives, so that no parameter can stay split in the forward.

    Raises:
        TypeError: `asked` is nothing that `shard_placement_fn` may return.
        ValueError: `asked` does not exist, does not divide, is the stacked axis, or holds another
            axis; it leaves out a data-parallel axis that `own_spec` does not name; `own_spec` names an
            unknown axis, a replicate axis, or contradicts `asked`.
    """
    shape = tuple(leaf.shape)
    stacked_axis = _checked_stacked_axis(path, shape, stacked_axis)
    own = entries_of(path, shape, own_spec, dp)
    if ignored:
        alone = Leaf(path, shape, own, (), stacked_axis, dp)
        for dim, axes in enumerate(own):
            check_divides(alone, dim, axes, "its own PartitionSpec")
        return _composed(alone, leaf.dtype, (), IGNORED)
    where, own_dp = own_axes(path, asked, dp)
    check_copies(path, own_spec, own, own_dp)
    known = Leaf(path, shape, own, (), stacked_axis, own_dp)
    local = staying_split(known, dp)
    if local and auto:
        raise ValueError(
            f"{path}: its data-parallel axes leave out {quoted(axes_in(local))}, along which each device "
            'would compute with its own part. With partitioning="auto" the forward sees whole arrays only: '
            'use partitioning="manual".'
        )
    known = dataclasses.replace(known, local=local)
    dims, reason = _choose(known, where, own_axes_given=own_dp is not dp)
    return _composed(known, leaf.dtype, dims, reason)


def _composed(leaf: Leaf, dtype: Any, dims: Dims, reason: str) -> Placement:
    placed = {*axes_in(leaf.local), *axes_in(dims)}
    local, ours = dict(leaf.local), dict(dims)
    rest = [tuple(axis for axis in axes if axis not in placed) for axes in leaf.own]
    theirs = [tuple(axis for axis in axes if axis not in leaf.dp.axes) for axes in rest]
    return Placement(
        path=leaf.path,
        shape=leaf.shape,
        dtype=dtype,
        whole_shape=tuple(
            size // leaf.dp.size_of(local.get(dim, ())) for dim, size in enumerate(leaf.shape)
        ),
        entries=tuple(
            local.get(dim, ()) + ours.get(dim, ()) + others for dim, others in enumerate(rest)
        ),
        dims=dims,
        local=leaf.local,
        others=tuple((dim, axes) for dim, axes in enumerate(theirs) if axes),
        stacked_axis=leaf.stacked_axis,
        reason=reason,
    )


def itemsize(dtype: Any) -> int:
    """Bytes of an element; of a PRNG key those of its data."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return np.dtype(np.uint32).itemsize * 2
    return np.dtype(dtype).itemsize


def _checked_stacked_axis(path: str, shape: tuple[int, ...], axis: int | None) -> int | None:
    if axis is None or not shape:
        return None
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"{path}: stacked_axis={axis} does not exist in shape {shape}; it must be one of the "
            f"{len(shape)} dimensions. Parameters without the layer axis belong to another shard call."
        )
    return axis % len(shape)


def _choose(leaf: Leaf, where: Any, own_axes_given: bool) -> tuple[Dims, str]:
    if not leaf.dp.shard_axes:
        who = "shard_placement_fn names" if own_axes_given else "the mesh has"
        return (), f"{who} no shard axis larger than 1"
    preset = preset_dims(leaf)
    if where is not None:
        return by_answer(leaf, where, preset), ""
    return (preset, "") if preset else by_rule(leaf)
