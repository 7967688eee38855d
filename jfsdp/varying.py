"""Arrays in a shard_map with check_vma=True, where jax tracks over which axes they differ among devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jfsdp.offload import is_on_host, to_host

__all__ = ["is_tracked", "varying_axes", "varying_over", "zeros"]


def varying_axes(kind: Any) -> frozenset[str]:
    """The manual axes over whose devices an array of this type (`jax.typeof`) differs; none if untracked."""
    return kind.manual_axis_type.varying


def is_tracked(axis: str) -> bool:
    """Whether jax tracks which arrays differ over a manual axis."""
    return axis in varying_axes(jax.typeof(jax.lax.axis_index(axis)))


def varying_over(array: jax.Array, axes: Iterable[str]) -> jax.Array:
    """The array, typed as one that differs over these axes too."""
    missing = tuple(axis for axis in axes if axis not in varying_axes(jax.typeof(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def zeros(kind: Any, *stacked: int) -> jax.Array:
    """Zeros of an array's type (`jax.typeof`), or a stack of such: of its memory, varying as it does."""
    made = varying_over(jnp.zeros((*stacked, *kind.shape), kind.dtype), varying_axes(kind))
    return to_host(made) if is_on_host(kind) else made
