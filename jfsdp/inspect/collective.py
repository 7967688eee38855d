"""What one collective costs: its record, its dtype and the bytes a device receives."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Final

KINDS: Final = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)

# MLIR spells a float8 or float4 format in capitals behind the width (f8E4M3FN); NumPy and ml_dtypes
# write float8_e4m3fn. The rule is the same for every such format, so new ones need no entry here.
_FLOAT: Final = re.compile(r"f(\d+)(E\w+)?")
_INTEGER: Final = re.compile(r"(u?)i(\d+)")
_XLA_DTYPE: Final = re.compile(r"([sufc])(\d+)(e\w+)?")
_COMPLEX: Final = re.compile(r"complex<f(\d+)>")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program, as one device sees it.

    Attributes:
        kind: one of `KINDS`.
        axes: the mesh axes over which a group of devices varies, in the mesh's order. Axes of size
            1 never vary and are not named. Empty when the group is one device, or when no axes of
            the mesh explain the groups: then `groups` has their text.
        dtype: the NumPy or ml_dtypes name of what travels, such as "bfloat16".
        shape: shape of the operand on one device. Only axes that are manual where the collective
            stands are divided out: over an axis left to the compiler the shape is still the whole
            one.
        result_shape: shape of the result on one device, with the same reservation.
        group_size: number of devices in a group.
        executions: how often the step executes it: 1, or the product of the trip counts of the
            loops around it.
        bytes_per_device: bytes that one device receives in one execution of the ring algorithm (see
            `ring_bytes`).
        in_loop: whether a loop is around it.
        unknown_trips: whether a loop around it has a trip count that cannot be read; that loop then
            counts once.
        groups: the text of the device groups if `axes` could not be resolved, else empty.
        phase: "forward", "backward" or "update", from the names that JAX gives to derivatives; empty
            if the compiler dropped them.
        leaf: path of the parameter that is gathered or whose gradient is reduced; empty for
            collectives that are not of a parameter, and where the compiler dropped the name.
        role: "gather" if it gathers a parameter, "reduce" if it reduces a gradient, by whatever kind of
            collective; empty as `leaf` is.
        written: the kind that the program asks for where the compiler emitted another one (TPUs
            gather small arrays by an all-reduce); else empty.
        instruction: name of the instruction in the compiled program; a combined one has a record
            for each of its operands. Empty before compilation.
        asynchronous: whether other instructions may run while it does. Always False before compilation.
        overlapped: whether a matrix multiplication is scheduled to run while it does.
        padding: bytes among `bytes_per_device` that the compiler only pads with (TPUs, whose shards of a
            reduce-scatter it rounds up).
        crossing: the share of its bytes that travels between TPU slices or GPU hosts; 0.0 where the devices
            are not known.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    result_shape: tuple[int, ...]
    group_size: int
    executions: int
    bytes_per_device: float
    in_loop: bool = False
    unknown_trips: bool = False
    groups: str = ""
    phase: str = ""
    leaf: str = ""
    written: str = ""
    instruction: str = ""
    asynchronous: bool = False
    overlapped: bool = False
    padding: float = 0.0
    role: str = ""
    crossing: float = 0.0

    @property
    def purpose(self) -> str:
        """The kind that the program asks for, whatever the compiler made of it."""
        return self.written or self.kind

    @property
    def unpadded_bytes(self) -> float:
        """Of `total_bytes`, those that are no padding."""
        return self.executions * (self.bytes_per_device - self.padding)

    @property
    def total_bytes(self) -> float:
        """Bytes that one device receives in all executions."""
        return self.executions * self.bytes_per_device

    @property
    def crossing_bytes(self) -> float:
        """Of `total_bytes`, those that come from another TPU slice or GPU host."""
        return self.total_bytes * self.crossing

    @property
    def inside_bytes(self) -> float:
        """Of `total_bytes`, those that come from the same TPU slice or GPU host."""
        return self.total_bytes - self.crossing_bytes


def dtype_name(spelling: str) -> str:
    """The NumPy or ml_dtypes name of an MLIR element type.

    Args:
        spelling: the element type as MLIR prints it, such as "bf16", "f8E4M3FN", "ui32" or "i1".

    Returns:
        The name, such as "bfloat16", "float8_e4m3fn", "uint32" or "bool".

    Raises:
        ValueError: the element type is none that NumPy or ml_dtypes has.
    """
    if spelling == "i1":
        return "bool"
    if spelling == "bf16":
        return "bfloat16"
    if match := _INTEGER.fullmatch(spelling):
        return f"{match[1]}int{match[2]}"
    if match := _FLOAT.fullmatch(spelling):
        return f"float{match[1]}" + (f"_{match[2].lower()}" if match[2] else "")
    if match := _COMPLEX.fullmatch(spelling):
        return f"complex{2 * int(match[1])}"
    raise ValueError(
        f"jfsdp.inspect: no NumPy or ml_dtypes dtype for the element type {spelling!r}"
    )


def xla_dtype_name(spelling: str) -> str:
    """The NumPy or ml_dtypes name of an element type as compiled programs spell it.

    Args:
        spelling: such as "bf16", "s32", "pred", "c64" or "f8e4m3fn".

    Returns:
        The name; a spelling that is not known is returned as it is.
    """
    if spelling == "pred":
        return "bool"
    if spelling == "bf16":
        return "bfloat16"
    if match := _XLA_DTYPE.fullmatch(spelling):
        kind = {"s": "int", "u": "uint", "f": "float", "c": "complex"}[match[1]]
        return f"{kind}{match[2]}" + (f"_{match[3]}" if match[3] else "")
    return spelling


def nbytes(shape: tuple[int, ...], dtype: str) -> float:
    """Bytes of an array on the wire.

    Args:
        shape: its shape.
        dtype: its NumPy or ml_dtypes name.

    Returns:
        The bytes; not a whole number for an odd count of elements of less than a byte.
    """
    return math.prod(shape) * itemsize(dtype)


def itemsize(dtype: str) -> float:
    """Bytes of one element on the wire.

    Args:
        dtype: its NumPy or ml_dtypes name. The width is read from the name: ml_dtypes gives int4 an
            item size of a whole byte, while XLA packs two.
    """
    if dtype == "bool":
        return 1.0
    bits = re.search(r"\d+", dtype)
    assert bits is not None, dtype
    return int(bits[0]) / 8


def ring_bytes(kind: str, operand: float, result: float, group_size: int) -> float:
    """Bytes that one device receives in one execution, by the ring algorithm.

    Args:
        kind: one of `KINDS`.
        operand: bytes of the operand on one device.
        result: bytes of the result on one device.
        group_size: number of devices in a group. In a group of one nothing travels.

    Returns:
        With g devices: all-gather result * (g-1)/g; reduce-scatter and all-to-all operand *
        (g-1)/g; all-reduce twice that (a reduce-scatter and an all-gather); permute and broadcast
        the operand. Not a whole number where the array does not divide by g.

    References:
        Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
        JPDC 2009.
    """
    others = group_size - 1
    if kind == "all-gather":
        return result * others / group_size
    if kind == "all-reduce":
        return 2 * operand * others / group_size
    if kind in ("reduce-scatter", "all-to-all"):
        return operand * others / group_size
    return operand if others else 0.0


def check_kind(kind: str) -> None:
    """Refuses what is no kind of collective.

    Args:
        kind: a name that a user gave.

    Raises:
        ValueError: it is not one of `KINDS`.
    """
    if kind not in KINDS:
        raise ValueError(f"jfsdp.inspect: no kind of collective {kind!r}; there are {list(KINDS)}")
