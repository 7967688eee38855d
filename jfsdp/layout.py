"""PartitionSpecs and shardings in the forms that jax compares equal, and arrays laid by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jfsdp.mesh import AnyMesh

__all__ = ["TILE", "Dims", "axes_of_entry", "lay", "named_sharding", "spec_of", "to_spec"]


TILE = 128
"""TPUs keep the last dimension of an array in tiles of this width."""

Dims = tuple[tuple[int, tuple[str, ...]], ...]
"""Sharded dimensions and the mesh axes they lie on: ((dim, axes), ...)."""


def spec_of(array: Any) -> PartitionSpec | None:
    """The PartitionSpec that an array, a tracer or an abstract array carries, or None."""
    sharding = jax.typeof(array).sharding if isinstance(array, Tracer) else None
    sharding = sharding or getattr(array, "sharding", None)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else None
    return spec if spec is not None and any(spec) else None


def named_sharding(mesh: AnyMesh, spec: PartitionSpec, ndim: int) -> NamedSharding:
    """A sharding in the form in which a compiled step returns it.

    jit's cache tells P("x") from P("x", None). On Auto axes XLA leaves trailing Nones out; on Explicit
    ones the array's type names every dimension. In another form the second step would compile again.
    """
    if AxisType.Explicit in mesh.axis_types:
        spec = PartitionSpec(*spec, *(None,) * (ndim - len(spec)))
    return NamedSharding(mesh, spec)  # pyright: ignore[reportArgumentType]


def lay(value: Any, sharding: NamedSharding) -> Any:
    """Lay an array, a tracer or an abstract array as `sharding` says; other values pass."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    if isinstance(value, Tracer):
        if sharding.mesh.are_all_axes_explicit:
            return jax.sharding.reshard(value, sharding)
        return jax.lax.with_sharding_constraint(value, sharding)
    return jax.device_put(value, sharding) if hasattr(value, "dtype") else value


def axes_of_entry(entry: Any) -> tuple[str, ...]:
    """The axes that one entry of a PartitionSpec names."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def to_spec(entries: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """A PartitionSpec in the one form that jit's cache compares equal: no trailing None."""
    parts = [axes if len(axes) > 1 else axes[0] if axes else None for axes in entries]
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)
