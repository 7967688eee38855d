"""What `reshard_after_forward` means on a mesh: which part of a weight stays after the forward."""

from __future__ import annotations

from typing import Any

from jfsdp.mesh import DataParallelMesh, describe_mesh

__all__ = ["check_reshard", "resolved"]

Reshard = bool | tuple[str, ...] | None
"""True, False, None, or the axes over which weights stay sharded: some shard axes, not all."""


def check_reshard(value: Any) -> None:
    """Check the type of `reshard_after_forward`.

    Raises:
        TypeError: it is no bool, int, name or tuple of names.
        ValueError: it is an empty tuple.
    """
    names = (value,) if isinstance(value, str) else value
    if value is None or isinstance(value, int):
        return
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            "reshard_after_forward must be True, False, None, the name of a shard axis, a tuple of such "
            f"names, or a number of devices (int), got {value!r}."
        )
    if not names:
        raise ValueError(
            "reshard_after_forward=() names no axis. To keep whole weights pass False."
        )


def resolved(value: bool | int | str | tuple[str, ...] | None, dp: DataParallelMesh) -> Reshard:
    """`reshard_after_forward` on this mesh.

    Args:
        value: what the user gave, of a type that `check_reshard` accepts.
        dp: the mesh and its data-parallel axes.

    Returns:
        True if the axes are all shard axes, False if they are of size 1.

    Raises:
        ValueError: a name is of no shard axis, or no last shard axes have `value` devices.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        axes = _innermost(value, dp)
    else:
        axes = (value,) if isinstance(value, str) else value
        _check_names(value, axes, dp)
    kept = tuple(axis for axis in dp.shard_axes if axis in axes)
    if kept == dp.shard_axes:
        return True
    return kept or False


def _check_names(value: Any, axes: tuple[str, ...], dp: DataParallelMesh) -> None:
    for axis in axes:
        if axis in dp.dims.shard_names:
            continue
        what = (
            "a replicate axis"
            if axis in dp.dims.replicate_names
            else "no data-parallel axis"
            if axis in dp.mesh.axis_names
            else "no axis of the mesh"
        )
        shards = ", ".join(map(repr, dp.dims.shard_names)) or "none"
        raise ValueError(
            f"reshard_after_forward={value!r}: {axis!r} is {what} ({describe_mesh(dp.mesh)}). Weights can "
            f"stay sharded over shard axes only: {shards}."
        )


def _innermost(count: int, dp: DataParallelMesh) -> tuple[str, ...]:
    """The last shard axes, of `count` devices together."""
    axes = dp.shard_axes
    ends = [axes[start:] for start in range(len(axes), -1, -1)]
    for end in ends:
        if dp.size_of(end) == count:
            return end
    shards = dp.size_of(axes)
    *fewer, most = (str(dp.size_of(end)) for end in ends)
    possible = " or ".join([", ".join(fewer), most] if fewer else [most])
    sizes = ", ".join(f"{axis}={dp.mesh.shape[axis]}" for axis in axes) or "none larger than 1"
    remedy = f"{count} does not divide the {shards} shards."
    if count > 1 and shards % count == 0:
        remedy = (
            "Split an axis in two, the inner one of that size: "
            f'jax.make_mesh(({shards // count}, {count}), ("outer", "inner")) and '
            'dp_mesh_dims=DataParallelMeshDims(shard=("outer", "inner")).'
        )
    raise ValueError(
        f"reshard_after_forward={count}: a weight can stay in {possible} parts here, the sizes of the last "
        f"shard axes together ({sizes}). {remedy}"
    )
