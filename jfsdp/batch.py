"""A batch on the mesh: its rows split over all data-parallel devices, in order."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jfsdp.inspect.topology import is_absent
from jfsdp.layout import named_sharding
from jfsdp.mesh import AnyMesh, DataParallelMesh, DataParallelMeshDims, describe_mesh, resolve_mesh

__all__ = ["shard_batch"]

REMAINDERS = ("error", "drop", "pad")


def shard_batch(
    batch: Any,
    mesh: AnyMesh | None = None,
    *,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    remainder: str = "error",
    global_size: int | None = None,
) -> Any:
    """Put a batch on the mesh: dimension 0 split over all data-parallel devices, replicas included.

    Over several processes each gives its own rows, and all the same number of them; the global batch is
    the rows of the first process, then those of the second, and so on.

    Args:
        batch: a pytree of arrays, of numpy or JAX, that have the same dimension 0. Numbers and arrays
            without dimensions are copied to every device. What lies in place already is returned as it
            is, other arrays of JAX on several devices are taken for the global ones and moved.
        mesh: as in `jfsdp.shard`: None is the mesh in context, else one axis over all devices.
        dp_mesh_dims: which of its axes are data-parallel, as in `jfsdp.shard`.
        remainder: what to do if the rows do not divide by the number of devices. "error" raises. "drop"
            leaves the last rows out. "pad" adds rows of zeros, and returns a mask as well.
        global_size: how many rows the global batch has to have before anything is dropped or padded;
            raises if it is another number. None: any.

    Returns:
        The batch, as global arrays. With remainder="pad" the tuple (batch, mask): the mask is float32, of
        one dimension, 1 for the rows given and 0 for those added, and lies as they do. Weight the loss with
        it: sum(mask * loss) / sum(mask).

    Raises:
        TypeError: a leaf is no array of numbers, or `mesh` is no mesh.
        ValueError: the leaves have different numbers of rows, or none; the rows do not divide (or, with
            "drop", none is left); `global_size` or `remainder` is wrong; the mesh has no devices here.

    Memory: 1/N of the batch on each of the N data-parallel devices. Communication: none for arrays of the
    host; each device is sent its own rows.

    Example:
        >>> import jax, numpy as np
        >>> mesh = jax.make_mesh((1,), ("fsdp",))
        >>> batch, mask = shard_batch({"x": np.ones((16, 4))}, mesh, remainder="pad")
        >>> batch["x"].shape, float(mask.sum())
        ((16, 4), 16.0)
    """
    if remainder not in REMAINDERS:
        raise ValueError(f"shard_batch: remainder must be one of {REMAINDERS}, got {remainder!r}.")
    split = _split_over(resolve_mesh(mesh, dp_mesh_dims))
    leaves, treedef = jax.tree_util.tree_flatten_with_path(batch)
    leaves = [(path, _checked(path, leaf)) for path, leaf in leaves]
    rows = _rows_of(leaves, split, global_size)
    keep = _kept(rows, split, remainder)
    result = jax.tree.unflatten(treedef, [_laid(path, leaf, keep, split) for path, leaf in leaves])
    if remainder != "pad":
        return result
    if not rows:
        raise ValueError("shard_batch: remainder='pad' needs an array with rows; there is none.")
    mask = (np.arange(keep) < rows).astype(np.float32)
    return result, _laid((), mask, keep, split)


@dataclasses.dataclass(frozen=True)
class _Split:
    """How the rows that this process gives are split.

    Attributes:
        dp: the mesh and its data-parallel axes.
        devices: how many parts of the batch lie on devices of this process.
        parts: how many processes' rows make the global batch.
        alone: whether all devices of the mesh belong to this process.
    """

    dp: DataParallelMesh
    devices: int
    parts: int
    alone: bool

    def sharding(self, ndim: int) -> NamedSharding:
        spec = self.dp.batch_spec if ndim else PartitionSpec()
        return named_sharding(self.dp.mesh, spec, ndim)

    def is_global(self, leaf: Any) -> bool:
        """Whether an array is the whole batch, not the part of this process."""
        return isinstance(leaf, jax.Array) and (self.alone or not leaf.is_fully_addressable)


def _split_over(dp: DataParallelMesh) -> _Split:
    mesh = dp.mesh
    if not isinstance(mesh, Mesh) or is_absent(mesh):
        raise ValueError(
            f"shard_batch: the mesh {describe_mesh(mesh)} has no devices here that could hold arrays. "
            "Describe the batch: jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, "
            f"jax.P({dp.axes!r})))."
        )
    of_axes = [mesh.axis_names.index(axis) for axis in dp.axes]
    all_devices = np.asarray(mesh.devices)
    parts = np.moveaxis(all_devices, of_axes, range(len(of_axes))).reshape(dp.size, -1)
    here = [[d.process_index == jax.process_index() for d in devices] for devices in parts]
    devices = sum(any(part) for part in here)
    if not devices:
        raise ValueError(
            f"shard_batch: process {jax.process_index()} has no device of the mesh {describe_mesh(mesh)}. "
            "Call it in the processes whose devices are in the mesh."
        )
    return _Split(dp, devices, dp.size // devices, all(map(all, here)))


def _checked(path: Any, leaf: Any) -> Any:
    """The leaf as an array of numpy or JAX.

    Raises:
        TypeError: it is traced, or holds no numbers.
    """
    if isinstance(leaf, Tracer):
        raise TypeError(
            f"shard_batch: {_text(path)} is traced. Call shard_batch outside of jit; inside use "
            "jax.lax.with_sharding_constraint."
        )
    array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    kinds = (np.number, np.bool_, jax.dtypes.prng_key)
    if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
        raise TypeError(
            f"shard_batch: {_text(path)} is of type {type(leaf).__name__} and dtype {array.dtype}, which no "
            "device holds. Take it out of the batch."
        )
    return array


def _rows_of(leaves: list[tuple[Any, Any]], split: _Split, global_size: int | None) -> int:
    """The number of rows that each process gives; 0 if no leaf has any dimension."""
    with_rows = [(path, leaf) for path, leaf in leaves if leaf.ndim]
    sizes = {leaf.shape[0] * (1 if split.is_global(leaf) else split.parts) for _, leaf in with_rows}
    if len(sizes) > 1:
        listed = "".join(f"\n  {_text(path)} {leaf.shape}" for path, leaf in with_rows)
        raise ValueError(
            "shard_batch: dimension 0 is the batch, and these differ in it. Leave out what is no batch, or "
            f"give all the same number of rows:{listed}"
        )
    size = next(iter(sizes), 0)
    if with_rows and not size:
        raise ValueError(
            f"shard_batch: {_text(with_rows[0][0])} {with_rows[0][1].shape} has no rows."
        )
    if global_size is not None and size != global_size:
        raise ValueError(
            f"shard_batch: the global batch has {size} rows, of {split.parts} process(es) with "
            f"{size // split.parts} each, not global_size={global_size}. Each gives its own rows only."
        )
    return size // split.parts


def _kept(rows: int, split: _Split, remainder: str) -> int:
    over = rows % split.devices
    if not over:
        return rows
    down, up = rows - over, rows - over + split.devices
    if remainder == "pad":
        return up
    if remainder == "drop" and down:
        return down
    whose = "" if split.alone else " of this process"
    legal = f"{down} or {up}" if down else str(up)
    remedy = f"{legal} rows divide; remainder='pad' adds rows of zeros and returns a mask"
    if down:
        remedy += ", remainder='drop' leaves the last rows out"
    raise ValueError(
        f"shard_batch: {rows} rows{whose} do not divide by {split.devices} data-parallel devices{whose} "
        f"(mesh {describe_mesh(split.dp.mesh)}, data-parallel {', '.join(split.dp.axes)}). {remedy}."
    )


def _laid(path: Any, leaf: Any, rows: int, split: _Split) -> jax.Array:
    sharding = split.sharding(leaf.ndim)
    if split.is_global(leaf):
        # What lies there already comes back as the same object.
        return jax.device_put(_resized(path, leaf, rows * split.parts), sharding)
    part = _resized(path, leaf, rows)
    if split.alone:
        return jax.device_put(part, sharding)
    whole = (part.shape[0] * split.parts, *part.shape[1:]) if part.ndim else ()
    return jax.make_array_from_process_local_data(sharding, part, whole)


def _resized(path: Any, leaf: Any, rows: int) -> Any:
    """The first rows of an array, or zeros behind its own."""
    if not leaf.ndim or leaf.shape[0] == rows:
        return leaf
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise ValueError(
            f"shard_batch: {_text(path)} {leaf.shape} lies on devices of other processes, so it cannot be "
            f"made {rows} rows here. Drop or pad rows before it is made global."
        )
    leaf = np.asarray(leaf)[:rows]
    behind = np.zeros((rows - leaf.shape[0], *leaf.shape[1:]), leaf.dtype)
    return np.concatenate([leaf, behind])


def _text(path: Any) -> str:
    return f"batch{jax.tree_util.keystr(path)}"
