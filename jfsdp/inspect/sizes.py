"""Bytes that a person writes: 17179869184, "16 GiB", "80 GB"."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["parse_bytes"]

_UNITS: Final = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}


def parse_bytes(size: int | float | str) -> int:
    """A number of bytes.

    Args:
        size: a number, or text with a unit: B, KiB, MiB, GiB, TiB (powers of 1024), KB, MB, GB, TB (powers
            of 1000).

    Returns:
        The bytes.

    Raises:
        ValueError: it is neither, or not above zero.
    """
    match = re.fullmatch(r"(\d+\.?\d*)\s*([A-Za-z]*)", str(size).strip())
    if match is None or match[2] not in _UNITS or not float(match[1]) > 0:
        raise ValueError(
            f"{size!r} is no amount of memory; write bytes, or a number with one of "
            f'{", ".join(unit for unit in _UNITS if unit)}, such as "16 GiB"'
        )
    return round(float(match[1]) * _UNITS[match[2]])
