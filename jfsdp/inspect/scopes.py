"""What the name of an operation tells: which phase of the step, which parameter, which primitive.

JAX names every operation by the transformations and scopes it was traced in, such as
"jit(step)/transpose(jvp())/.../jfsdp_reduce[blocks.0.up.kernel]/reduce_scatter". Programs before and
after compilation carry these names; compilers drop some.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Final, Self

__all__ = ["Place", "leaves", "microbatches", "phase", "role", "written_kind"]

_LEAF: Final = re.compile(r"jfsdp_(?:gather|reduce)\[([^\]]*)\]")
_MICROBATCHES: Final = re.compile(r"jfsdp_microbatches\[(\d+),(every|last)\]")
_PRIMITIVES: Final = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a walk through a program is: inside which loops, and under which name."""

    executions: int = 1
    in_loop: bool = False
    unknown_trips: bool = False
    op_name: str = ""

    def in_loop_of(self, trips: int | None, op_name: str) -> Self:
        """The place inside a loop of so many iterations; None if that cannot be read: it counts once."""
        return dataclasses.replace(
            self,
            executions=self.executions * (1 if trips is None else trips),
            in_loop=True,
            unknown_trips=self.unknown_trips or trips is None,
            op_name=op_name or self.op_name,
        )


def phase(op_name: str) -> str:
    """Which derivative the name speaks of: "backward", "forward", or "" for none."""
    if "transpose(" in op_name or "rematted_computation" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name else ""


def leaves(op_name: str) -> tuple[str, ...]:
    """The parameters named in it; an operation that was merged from several names them all."""
    return tuple(_LEAF.findall(op_name))


def role(op_name: str) -> str:
    """What it does for a parameter: "gather" it or "reduce" its gradient; "" for neither, or for several."""
    found = {name for name in ("gather", "reduce") if f"jfsdp_{name}[" in op_name}
    return found.pop() if len(found) == 1 else ""


def microbatches(text: str) -> tuple[int, bool] | None:
    """Into how many microbatches a step with these names splits its batch, and whether each is reduced."""
    found = [(int(count), sync == "every") for count, sync in _MICROBATCHES.findall(text)]
    return max(found, default=None)


def written_kind(op_name: str) -> str:
    """The kind of collective that the program asks for, or ""."""
    return _PRIMITIVES.get(op_name.rstrip(")").rpartition("/")[2], "")
