"""Host memory: which arrays lie there, and how they get there and back.

jax keeps the memory space of an array in its type, in traced code too: what a step takes from host memory it
has to move before it works with it, and two spaces in one operation are an error. That holds for
"pinned_host". The type of what lies in "unpinned_host" says "device" (jax 0.10.2 and 0.12.0.1): only
shardings tell it.

Shards are cast to the dtype of the gather on the device. Cast on the host, half the bytes would move to it,
but XLA makes one host call of all units' casts at the start of the step: on H100 its results all go to the
device, to the host and to the device again (three times the bytes); on v5e it takes 33.9 MB of temporaries
for 22.7 (8 blocks of 1024x4096x1024), and stacks of bfloat16 vectors do not compile (jax 0.12.0.1).

No array of the host may go through `jax.checkpoint`: behind its barrier XLA for TPUs takes a whole backward
pass for work of the host, collectives included, and says nothing (v5e, jax 0.12.0.1; `check` does).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.core import ShapedArray

from jfsdp._compat import compute_on
from jfsdp.inspect.target import first_device
from jfsdp.mesh import AnyMesh
from jfsdp.policies import CPUOffloadPolicy, OffloadPolicy

__all__ = [
    "HOST_KINDS",
    "PINNED",
    "UNPINNED",
    "check_offload",
    "copied_at",
    "is_on_host",
    "memory_kind_of",
    "moved_like",
    "on_host",
    "to_device",
    "to_host",
    "typed_on_device",
]

Space = jax.memory.Space

HOST_KINDS = PINNED, UNPINNED = "pinned_host", "unpinned_host"
"""The kinds of host memory, by the names that jax gives them."""


def check_offload(policy: OffloadPolicy, mesh: AnyMesh) -> None:
    """Check that programs for the devices of a mesh can take arrays from the memory that a policy names.

    Raises:
        ValueError: they cannot; the kinds that there are are named.
    """
    device = first_device(mesh)
    if device is None or not isinstance(policy, CPUOffloadPolicy):
        return
    kind = policy.memory_kind if policy.parameters or policy.optimizer_state else PINNED
    # Devices that are not here may list none.
    legal = [memory.kind for memory in device.addressable_memories()] or ["device", PINNED]
    if device.platform != "cpu":
        legal = [name for name in legal if name != UNPINNED]
    if kind not in legal:
        raise ValueError(
            f"{policy}: programs for {getattr(device, 'device_kind', device)} take no arrays from memory "
            f"of the kind {kind!r}. Kinds that they take: {', '.join(legal)}."
            + (" Pass CPUOffloadPolicy(pin_memory=True)." if PINNED in legal else "")
        )


def memory_kind_of(value: Any) -> str | None:
    """The kind of host memory in which an array that is not traced lies; None for the device's own."""
    kind = getattr(getattr(value, "sharding", None), "memory_kind", None)
    return kind if kind in HOST_KINDS else None


def is_on_host(value: Any) -> bool:
    """Whether an array, a traced or an abstract one, or its type, lies in host memory."""
    if memory_kind_of(value) is not None:
        return True
    kind = value if isinstance(value, ShapedArray) else jax.typeof(value)
    return getattr(kind, "memory_space", None) == Space.Host


def to_device(value: Any) -> Any:
    """An array in the device's own memory, laid as it is; the same object if it lies there."""
    return jax.device_put(value, Space.Device) if is_on_host(value) else value


def to_host(value: Any) -> Any:
    """An array in pinned host memory, laid as it is; the same object if it lies on the host."""
    return value if is_on_host(value) else jax.device_put(value, Space.Host)


def moved_like(value: Any, kind: Any) -> Any:
    """An array in the memory of another one, or of a type; None: on the device."""
    return to_host(value) if kind is not None and is_on_host(kind) else to_device(value)


def typed_on_device(value: Any) -> Any:
    """The type of an array from host memory as it would be on the device; another array as it is."""
    return jax.typeof(value).update(memory_space=Space.Device) if is_on_host(value) else value


def copied_at(value: jax.Array, zero: jax.Array) -> jax.Array:
    """A traced array from host memory on the device, copied when `zero` is known.

    Two slices at dynamic indices are copies that XLA cannot do earlier. What has no dimension to halve is
    small, and is copied at any time.

    Args:
        value: the array.
        zero: an int32 of that value, which XLA must not know.
    """
    dim = next((dim for dim, size in enumerate(value.shape) if size and size % 2 == 0), None)
    if dim is None:
        return to_device(value)
    half = value.shape[dim] // 2
    parts = [jax.lax.dynamic_slice_in_dim(value, zero + at, half, dim) for at in (0, half)]
    return jax.lax.concatenate([to_device(part) for part in parts], dim)


def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays in host memory that the host computes; its results lie there.

    Args:
        function: takes arrays in positional arguments.
    """
    return compute_on(function, compute_type="device_host", out_memory_spaces=Space.Host)
