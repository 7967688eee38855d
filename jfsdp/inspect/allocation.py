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
- Host memory has fields of its own on TPU and GPU. GPUs that are not here list no memories: there only
  shardings on an abstract mesh keep the kind, and `compiled.input_shardings` have lost it. CPU counts it as
  the device's.
- Not in any of them: what the runtime and NCCL take, and arguments that the program does not use.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from .collective import nbytes
from .hlo import aliases

__all__ = ["HostShare", "host_share", "is_on_host", "taken_arguments", "temporary_bytes"]


@dataclasses.dataclass(frozen=True)
class HostShare:
    """What of a program's arguments and outputs lies in host memory, in bytes on one device.

    Attributes:
        arguments: with padding.
        outputs: likewise, of all outputs there.
        aliased: the outputs among them that take the place of arguments.
        counted_arguments: what of `arguments` the backend counts as the device's.
        counted_outputs: of `outputs`.
        counted_aliased: of `aliased`.
        told: whether the backend's own figures tell host memory from the device's.
    """

    arguments: int = 0
    outputs: int = 0
    aliased: int = 0
    counted_arguments: int = 0
    counted_outputs: int = 0
    counted_aliased: int = 0
    told: bool = True


def host_share(compiled: jax.stages.Compiled, stats: Any) -> HostShare:
    """What of a program lies in host memory: by the backend's figures, else by its arrays' memory kinds."""
    arguments, outputs = stats.host_argument_size_in_bytes, stats.host_output_size_in_bytes
    if _platform(compiled) != "cpu":
        return HostShare(arguments, outputs, stats.host_alias_size_in_bytes)
    taken = taken_arguments(compiled)
    made = [
        (_bytes(each.sharding.shard_shape(each.shape), each.dtype), each.sharding.memory_kind)
        for each in jax.tree.leaves(compiled.out_info)
    ]
    arguments, outputs = (sum(n for n, kind in each if is_on_host(kind)) for each in (taken, made))
    if not (arguments or outputs):
        return HostShare(told=False)
    header = (compiled.as_text() or "").partition("\n")[0]
    pairs = [(int(result or 0), n) for result, n, _ in aliases(header, "input_output_alias")]
    aliased = sum(
        made[result][0]
        for result, argument in pairs
        if is_on_host(taken[argument][1]) and is_on_host(made[result][1])
    )
    return HostShare(arguments, outputs, aliased, arguments, outputs, aliased, told=False)


def taken_arguments(compiled: jax.stages.Compiled) -> list[tuple[int, str | None]]:
    """Bytes on one device, without padding, and memory kind of each argument that the program takes."""
    arrays = jax.tree.leaves(compiled.in_avals)
    # None for an argument that it does not use.
    shardings = jax.tree.leaves(compiled.input_shardings, is_leaf=lambda leaf: leaf is None)
    return [
        (
            _bytes(sharding.shard_shape(array.shape), array.dtype),
            sharding.memory_kind or _kind_of_type(array),
        )
        for array, sharding in zip(arrays, shardings, strict=True)
        if sharding is not None
    ]


def _bytes(shape: tuple[int, ...], dtype: Any) -> int:
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return math.prod(shape) * dtype.itemsize
    return math.ceil(nbytes(shape, dtype.name))


def _kind_of_type(array: Any) -> str | None:
    """The memory kind that the type of an argument tells, where its sharding has none."""
    space = getattr(array, "memory_space", None)
    return "pinned_host" if space == jax.memory.Space.Host else None


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
