"""How a user's collective is called, and what of it is checked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jfsdp.comm import AllGather, Comm, ReduceScatter

__all__ = ["all_gather_by", "reduce_scatter_by"]


def all_gather_by(
    comm: AllGather, shard: jax.Array, dim: int, axes: tuple[str, ...], path: str
) -> jax.Array:
    """Gather `shard` on `dim` over `axes` by the user's collective.

    Raises:
        ValueError: what it allocates or returns is of another shape or dtype than asked for.
    """
    moved = jnp.moveaxis(shard, dim, 0)
    size = (moved.shape[0] * jax.lax.axis_size(axes), *moved.shape[1:])
    with _named(comm, path, moved, axes):
        output = _allocate(comm, size, moved.dtype, path)
        result = comm(output, moved, axes)
    return jnp.moveaxis(_checked(comm, result, output, path), 0, dim)


def reduce_scatter_by(
    comm: ReduceScatter, gradient: jax.Array, dim: int, axes: tuple[str, ...], path: str
) -> jax.Array:
    """Sum `gradient` over `axes` and keep this device's part of `dim`, by the user's collective.

    Raises:
        ValueError: what it allocates or returns is of another shape or dtype than asked for.
    """
    moved = jnp.moveaxis(gradient, dim, 0)
    size = (moved.shape[0] // jax.lax.axis_size(axes), *moved.shape[1:])
    with _named(comm, path, moved, axes):
        output = _allocate(comm, size, moved.dtype, path)
        result = comm(output, moved, axes, "sum")
    return jnp.moveaxis(_checked(comm, result, output, path), 0, dim)


@contextlib.contextmanager
def _named(comm: Comm, path: str, tensor: jax.Array, axes: tuple[str, ...]) -> Iterator[None]:
    """Add to what is raised inside a user's collective for which parameter it was called."""
    try:
        yield
    except Exception as error:
        if not str(error).startswith(f"{path}: "):
            error.add_note(
                f"{path}: {type(comm).__name__} raised this. It was called with {tensor.dtype}"
                f"{list(tensor.shape)}, the sharded dimension first, over the mesh axes {list(axes)}."
            )
        raise


def _allocate(comm: Comm, size: tuple[int, ...], dtype: Any, path: str) -> jax.ShapeDtypeStruct:
    output = comm.allocate(size, dtype=dtype, device=None)
    described = isinstance(output, jax.ShapeDtypeStruct)
    if not described or (output.shape, output.dtype) != (size, dtype):
        raise ValueError(
            f"{path}: {type(comm).__name__}.allocate({size}, dtype={dtype}) must return a "
            f"jax.ShapeDtypeStruct of that shape and dtype, got {output!r}."
        )
    return output


def _checked(comm: Comm, result: Any, output: jax.ShapeDtypeStruct, path: str) -> jax.Array:
    got = (getattr(result, "shape", None), getattr(result, "dtype", None))
    if got != (output.shape, output.dtype):
        raise ValueError(
            f"{path}: {type(comm).__name__} must return an array of shape {output.shape} and dtype "
            f"{output.dtype}, got {got[0]} and {got[1]}. It gets one leaf at a time, the sharded "
            "dimension first."
        )
    return result
