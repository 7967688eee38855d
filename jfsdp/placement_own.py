"""What a parameter's own PartitionSpec says of where it lies."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from jax.sharding import PartitionSpec

from jfsdp.layout import Dims, axes_of_entry, to_spec
from jfsdp.mesh import DataParallelMesh, describe_mesh
from jfsdp.placement_rule import Entries, Leaf, check_divides, check_not_stacked

__all__ = ["axes_in", "check_copies", "entries_of", "preset_dims", "quoted", "staying_split"]


def axes_in(dims: Dims) -> tuple[str, ...]:
    """All axes of the dimensions."""
    return tuple(itertools.chain.from_iterable(axes for _, axes in dims))


def quoted(axes: Iterable[str]) -> str:
    """Names of axes for messages."""
    return ", ".join(map(repr, axes))


def entries_of(
    path: str, shape: tuple[int, ...], spec: PartitionSpec | None, dp: DataParallelMesh
) -> Entries:
    """The axes of each dimension, without those of size 1.

    Raises:
        ValueError: there are more entries than dimensions, or the mesh lacks an axis.
    """
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
    return tuple(dp.larger_than_one(axes) for axes in entries)


def check_copies(path: str, spec: PartitionSpec | None, own: Entries, dp: DataParallelMesh) -> None:
    """Check that no entry is of an axis that holds copies.

    Raises:
        ValueError: one is.
    """
    for axis in itertools.chain(*own):
        if axis in dp.replicate_axes:
            raise ValueError(
                f"{path}: its PartitionSpec {spec} uses {axis!r}, but DataParallelMeshDims says that "
                "axis holds copies. Drop it from the parameter's spec, or make it a shard axis."
            )


def staying_split(leaf: Leaf, unit_dp: DataParallelMesh) -> Dims:
    """The dimensions on data-parallel axes of the unit that are none of the parameter's, with those axes.

    Raises:
        ValueError: such an axis is in no entry; or its dimension is the stacked axis or does not divide.
    """
    left_out = [a for a in unit_dp.larger_than_one(unit_dp.axes) if a not in leaf.dp.axes]
    found = [(dim, tuple(a for a in axes if a in left_out)) for dim, axes in enumerate(leaf.own)]
    local = tuple((dim, axes) for dim, axes in found if axes)
    missing = tuple(axis for axis in left_out if axis not in axes_in(local))
    if missing:
        raise ValueError(
            f"{leaf.path} (shape {leaf.shape}): shard_placement_fn returned data-parallel axes without "
            f"{quoted(missing)} ({describe_mesh(unit_dp.mesh)}), so that nothing says what its devices "
            "hold. Either\n"
            f"  1. name {missing[0]!r} in DataParallelMeshDims, as shard= or replicate=, or\n"
            "  2. if each device along it has its own part, such as its experts, say so in the parameter's "
            f"own PartitionSpec: out_sharding=({missing[0]!r},) in NNX, nn.with_partitioning in Linen."
        )
    for dim, axes in local:
        check_not_stacked(leaf, dim, f"its own PartitionSpec puts {quoted(axes)} on")
        check_divides(leaf, dim, leaf.own[dim], "its own PartitionSpec")
        _check_first(leaf, dim, axes)
    return local


def preset_dims(leaf: Leaf) -> Dims:
    """The shard axes that the parameter's own spec already names."""
    shard_axes, local = leaf.dp.shard_axes, dict(leaf.local)
    found = [(dim, tuple(a for a in axes if a in shard_axes)) for dim, axes in enumerate(leaf.own)]
    dims = tuple((dim, axes) for dim, axes in found if axes)
    named = axes_in(dims)
    if not named:
        return ()
    if sorted(named) != sorted(shard_axes):
        raise ValueError(
            f"{leaf.path}: its own PartitionSpec {to_spec(leaf.own)} uses {list(named)} of the shard axes "
            f"{list(shard_axes)}. Name all of them or none; or if it is to stay split over them in the "
            "forward, return (dimension, jfsdp.DataParallelMeshDims(...)) of the others from "
            "shard_placement_fn."
        )
    for dim, axes in dims:
        check_not_stacked(leaf, dim, f"its own PartitionSpec {to_spec(leaf.own)} shards")
        _check_first(leaf, dim, (*local.get(dim, ()), *axes))
        check_divides(leaf, dim, leaf.own[dim], "its own PartitionSpec")
    return dims


def _check_first(leaf: Leaf, dim: int, axes: tuple[str, ...]) -> None:
    if leaf.own[dim][: len(axes)] != axes:
        raise ValueError(
            f"{leaf.path}: its own PartitionSpec {to_spec(leaf.own)} puts {leaf.own[dim]} on dimension "
            f"{dim}; the shard axes {axes} must come first there."
        )
