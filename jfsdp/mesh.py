"""The data-parallel axes: their names, and what they mean on a `jax.sharding.Mesh`."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

__all__ = ["DataParallelMesh", "DataParallelMeshDims", "resolve_mesh"]

AnyMesh = Mesh | AbstractMesh


@dataclasses.dataclass(frozen=True)
class DataParallelMeshDims:
    """Which mesh axes are data-parallel, and of which kind.

    Only `shard`: FSDP, every device of those axes keeps 1/F of each parameter. Only `replicate`:
    DDP, whole parameters everywhere. Both: HSDP, shards within the shard axes, copies over the
    replicate axes. All other axes of the mesh (tensor, sequence, expert) stay the user's.

    Args:
        shard: name or names of the axes that parameters are sharded over; of several, the first
            varies slowest. None: none.
        replicate: name or names of the axes that hold copies. None: none.

    Raises:
        ValueError: both are None, one is an empty tuple, or a name occurs twice.
        TypeError: a name is no string.

    Reference: PyTorch FSDP2, `DataParallelMeshDims`.

    Example:
        >>> dims = DataParallelMeshDims(shard="fsdp", replicate=("slice", "replica"))
        >>> dims.shard_names, dims.replicate_names
        (('fsdp',), ('slice', 'replica'))
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError(
                "DataParallelMeshDims needs shard or replicate (or both): with neither there is no "
                "data-parallel axis."
            )
        for field in ("shard", "replicate"):
            value = getattr(self, field)
            if isinstance(value, list):
                value = tuple(value)
                object.__setattr__(self, field, value)
            names = _names(value) if value is None or isinstance(value, str | tuple) else (value,)
            if not all(isinstance(name, str) for name in names):
                raise TypeError(
                    f"DataParallelMeshDims.{field} takes axis names (str or tuple of str), got "
                    f"{value!r}."
                )
            if value is not None and not names:
                raise ValueError(
                    f"DataParallelMeshDims.{field} is empty: pass None for no axis, or name one."
                )
        names = self.replicate_names + self.shard_names
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"DataParallelMeshDims(shard={self.shard!r}, replicate={self.replicate!r}) names "
                f"{', '.join(map(repr, twice))} more than once: an axis either shards or replicates."
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The shard axes as a tuple, empty for None."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The replicate axes as a tuple, empty for None."""
        return _names(self.replicate)


def _names(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


@dataclasses.dataclass(frozen=True)
class DataParallelMesh:
    """A mesh with its data-parallel axes told apart.

    Axes of size 1 are data-parallel like the others but never named in a PartitionSpec or a
    collective: a spec that names one is not equal to one that leaves it out, which breaks Explicit
    meshes and jit's cache.
    """

    mesh: AnyMesh
    dims: DataParallelMeshDims

    @property
    def axes(self) -> tuple[str, ...]:
        """All data-parallel axes, in the order in which they split a batch: replicate, then shard."""
        return self.dims.replicate_names + self.dims.shard_names

    @property
    def size(self) -> int:
        """Number of data-parallel devices N."""
        return self.size_of(self.axes)

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The shard axes larger than 1."""
        return self.larger_than_one(self.dims.shard_names)

    @property
    def replicate_axes(self) -> tuple[str, ...]:
        """The replicate axes larger than 1."""
        return self.larger_than_one(self.dims.replicate_names)

    @property
    def batch_spec(self) -> PartitionSpec:
        """Dimension 0 over all data-parallel axes."""
        axes = self.larger_than_one(self.axes)
        return PartitionSpec(*((axes,) if len(axes) > 1 else axes))

    def size_of(self, axes: tuple[str, ...]) -> int:
        """Product of the sizes of `axes`."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def larger_than_one(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Those of `axes` that have more than one device."""
        return tuple(axis for axis in axes if self.mesh.shape[axis] > 1)

    @property
    def staged(self) -> bool:
        """Whether collectives over several axes go over one axis after the other.

        XLA for TPUs turns one reduce-scatter over several axes of a torus into an all-reduce, and from 64
        chips on the all-gather as well: twice the bytes and three times the estimated cycles (v5p:4x4x4,
        4096x14336, jax 0.12.0.1). Axis by axis the bytes are the least ones. On GPUs one collective over all
        is best: it uses the network between hosts for the least part.
        """
        return isinstance(self.mesh, Mesh) and self.mesh.devices.flat[0].platform == "tpu"

    @property
    def explicit(self) -> bool:
        """Whether a data-parallel axis is of JAX's Explicit type."""
        types = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        return any(types[axis] == AxisType.Explicit for axis in self.axes)


def resolve_mesh(mesh: AnyMesh | None, dims: DataParallelMeshDims | None) -> DataParallelMesh:
    """Find the mesh and its data-parallel axes.

    Args:
        mesh: the mesh; None takes the one in context (`jax.set_mesh`), else one axis "fsdp" over
            all devices.
        dims: the data-parallel axes; None shards over the axis of a 1-D mesh, and of a 2-D mesh
            replicates over the first and shards over the second.

    Raises:
        TypeError: `mesh` is no mesh, or `dims` no DataParallelMeshDims.
        ValueError: the mesh has no axes; it has three or more and `dims` is None; `dims` names an
            axis that the mesh lacks.
    """
    if mesh is None:
        mesh = _mesh_in_context() or jax.make_mesh((jax.device_count(),), ("fsdp",))
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(
            f"mesh must be a jax.sharding.Mesh (see jax.make_mesh), got {type(mesh).__name__}."
        )
    if not mesh.axis_names:
        raise ValueError(
            "the mesh is empty: it has no axes. Make one with jax.make_mesh((8,), ('fsdp',))."
        )
    if dims is None:
        dims = _dims_by_position(mesh)
    if not isinstance(dims, DataParallelMeshDims):
        raise TypeError(
            "dp_mesh_dims must be a jfsdp.DataParallelMeshDims, got "
            f"{type(dims).__name__}; for example DataParallelMeshDims(shard={mesh.axis_names[-1]!r})."
        )
    for field, names in (("shard", dims.shard_names), ("replicate", dims.replicate_names)):
        for name in names:
            if name not in mesh.axis_names:
                raise ValueError(
                    f"DataParallelMeshDims.{field} names the axis {name!r}, which the mesh does not "
                    f"have. Its axes: {describe_mesh(mesh)}."
                )
    return DataParallelMesh(_usable(mesh), dims)


def _usable(mesh: AnyMesh) -> AnyMesh:
    """The mesh itself, or the same devices and axes as Auto ones.

    `jax.make_mesh` makes Explicit axes unless told otherwise. Arrays on them are typed, and ordinary
    code (the gradient of a cross entropy by labels, a whole-matrix optimizer) does not type-check. Who
    wants that says so with `jax.set_mesh`.
    """
    context = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in mesh.axis_types or context == getattr(mesh, "abstract_mesh", mesh):
        return mesh
    return with_axis_types(mesh, (AxisType.Auto,) * len(mesh.axis_names))


def with_axis_types(mesh: AnyMesh, axis_types: tuple[AxisType, ...]) -> AnyMesh:
    """The same devices and axes with other axis types."""
    if isinstance(mesh, AbstractMesh):
        return mesh.update(axis_types=axis_types)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=axis_types)


_traced_under: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar(
    "traced_under", default=None
)


@contextlib.contextmanager
def mesh_known_to_traced_code() -> Iterator[None]:
    """Let `resolve_mesh` find the mesh in context while a function is traced, where jax hides it."""
    token = _traced_under.set(None if jax.sharding.get_mesh().empty else jax.sharding.get_mesh())
    try:
        yield
    finally:
        _traced_under.reset(token)


def _mesh_in_context() -> AnyMesh | None:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None
    try:
        return jax.sharding.get_mesh()
    except ValueError:  # under a jax transformation only the abstract mesh is known
        return _traced_under.get() or mesh


def _dims_by_position(mesh: AnyMesh) -> DataParallelMeshDims:
    names = mesh.axis_names
    if len(names) == 1:
        return DataParallelMeshDims(shard=names[0])
    if len(names) == 2:
        return DataParallelMeshDims(replicate=names[0], shard=names[1])
    raise ValueError(
        f"a mesh of {len(names)} axes ({describe_mesh(mesh)}) needs dp_mesh_dims: say which axes "
        f"shard and which replicate, for example DataParallelMeshDims(shard={names[-1]!r})."
    )


def describe_mesh(mesh: AnyMesh) -> str:
    """The mesh's axes and sizes as text: "replica=2, fsdp=4"."""
    return ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
