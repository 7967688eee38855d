"""How much host memory a program may have."""

from __future__ import annotations

import math
from typing import Final

from .table import human_bytes
from .target import Target

__all__ = ["PINNED_POOL", "host_limit"]

PINNED_POOL: Final = 64 * 2**30
"""Bytes of pinned memory that XLA gives a process with GPUs, unless its environment says otherwise."""

_VARIABLE: Final = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


def host_limit(target: Target | None, host: int, devices: int) -> str:
    """What keeps a program from the host memory that it needs, and the remedy; "" if nothing is known to.

    Args:
        target: what it is compiled for.
        host: bytes in host memory per device.
        devices: how many devices run it.
    """
    if target is None or target.platform != "gpu":
        return ""
    devices = max(1, min(devices, target.devices_per_host))
    if host * devices <= PINNED_POOL:
        return ""
    return (
        f"a process with {devices} GPUs pins {human_bytes(host * devices)}, and XLA gives it "
        f"{human_bytes(PINNED_POOL)}: set {_VARIABLE}={math.ceil(host * devices / 2**30 * 1.05)}"
    )
