"""The bytes of a device's memory that a compiled program allocates.

How the fields of `jax.stages.Compiled.memory_analysis()` relate (jax 0.10.2 and 0.12.0.1; CPU, 8 x H100
and TPU v5e:2x4 that are not here). With fixed = argument + output - alias:

- CPU, GPU: fixed + temp is what is allocated; jax 0.12 says it too, as total_allocation_bytes.
  peak_memory_in_bytes is fixed alone on CPU, which simulates no heap; on GPU it leaves out what is lost
  between buffers (up to 3 %).
- TPU: temp counts some of that loss twice (up to 21 %), and peak_memory_in_bytes adds on-chip memory (VMEM)
  to HBM. total_allocation_bytes + generated_code is what the compiler holds against the HBM, to within the
  scoped memory of a collective (up to 1 MiB, of which no field tells). jax 0.10.2 has no such field: half
  the sum of temp and the peak, or temp if that is less, is an upper bound.
- Host memory has fields of its own on TPU. CPU, and GPU where there is no GPU, count it as the device's.
- Not in any of them: what the runtime and NCCL take, and arguments that the program does not use.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from .collective import nbytes

__all__ = ["is_on_host", "taken_arguments", "temporary_bytes"]


def taken_arguments(compiled: jax.stages.Compiled) -> list[tuple[int, str | None]]:
    """Bytes on one device, without padding, and memory kind of each argument that the program takes."""
    arrays = jax.tree.leaves(compiled.in_avals)
    # None for an argument that it does not use.
    shardings = jax.tree.leaves(compiled.input_shardings, is_leaf=lambda leaf: leaf is None)
    return [
        (_bytes(sharding.shard_shape(array.shape), array.dtype), sharding.memory_kind)
        for array, sharding in zip(arrays, shardings, strict=True)
        if sharding is not None
    ]


def _bytes(shape: tuple[int, ...], dtype: Any) -> int:
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return math.prod(shape) * dtype.itemsize
    return math.ceil(nbytes(shape, dtype.name))


def is_on_host(memory_kind: str | None) -> bool:
    """Whether it is a kind of host memory: "pinned_host", "unpinned_host"."""
    return memory_kind is not None and "host" in memory_kind


def temporary_bytes(compiled: jax.stages.Compiled, stats: Any, fixed: int) -> int:
    """What is allocated beside arguments and outputs; see the module's docstring."""
    allocated = getattr(stats, "total_allocation_bytes", 0)
    if allocated:
        return allocated - fixed
    temporaries = stats.temp_size_in_bytes
    if _platform(compiled) != "tpu":
        return temporaries
    return min(temporaries, (temporaries + stats.peak_memory_in_bytes - fixed) // 2)


def _platform(compiled: jax.stages.Compiled) -> str:
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return next(iter(shardings[0].device_set)).platform if shardings else ""
