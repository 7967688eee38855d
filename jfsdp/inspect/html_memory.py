"""The part of a report's page that is about memory."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from .buffers import Buffer
from .html_parts import svg, swatch, table
from .memory import Memory
from .table import human_bytes

__all__ = ["buffers_section", "memory_section"]

_MEMORY_COLORS: Final = {
    "parameters": "blue",
    "optimizer state": "violet",
    "other arguments": "teal",
    "temporaries": "amber",
    "outputs": "pink",
    "padding to tiles": "olive",
    "free": "free",
}
_PEAK: Final = "peak"


def memory_section(memory: Memory) -> str:
    """A bar of what takes how much, against what a device has, and the figures."""
    kinds = {name: size for name, size in memory.by_name().items() if name != _PEAK}
    known = sum(kinds.values())
    if memory.peak > known:
        kinds["not told apart by the compiler"] = memory.peak - known
    taken = max(known, memory.peak)
    whole = max(memory.available or 0, taken)
    if whole > taken:
        kinds["free"] = whole - taken
    parts = [(size, _color(name), f"{name}: {human_bytes(size)}") for name, size in kinds.items()]
    rows = [
        (swatch(_color(name)) + name, human_bytes(size), f"{size / whole:.1%}")
        for name, size in kinds.items()
    ]
    rows.append((_PEAK, human_bytes(memory.peak), f"{memory.peak / whole:.1%}"))
    others = {
        "a device has": memory.available,
        **{f"{name} in host memory": n for name, n in memory.by_name_on_host().items()},
        "outputs in the place of donated arguments": memory.aliased,
        "arguments that are not used": memory.unused,
    }
    rows += [(name, human_bytes(size), "") for name, size in others.items() if size]
    mark = memory.available if memory.available and memory.available < whole else None
    label = f"memory of a device, {human_bytes(whole)}"
    return "\n".join(
        [
            "<h2>Memory per device</h2>",
            svg("bar", parts, whole, label, mark),
            table(("", "bytes", "share"), rows, numbers=(1, 2), sums=(_PEAK,), kind="narrow"),
        ]
    )


def _color(name: str) -> str:
    return _MEMORY_COLORS.get(name, "gray")


def buffers_section(buffers: Sequence[Buffer]) -> str:
    """The largest buffers at the peak; "" if they are not known."""
    if not buffers:
        return ""
    rows = [
        (
            human_bytes(each.bytes),
            escape(f"{each.dtype}[{', '.join(map(str, each.shape))}]" if each.dtype else ""),
            escape(each.kind),
            escape(each.op_name or each.instruction),
        )
        for each in buffers
    ]
    head = ("bytes", "array", "kind", "from")
    return f"<h2>Largest buffers at the peak</h2>\n{table(head, rows, numbers=(0,), wrap=3)}"
