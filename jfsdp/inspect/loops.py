"""How often a StableHLO loop runs, where the program says so.

A loop that JAX writes for `scan` or `fori_loop` counts an integer from a constant to a constant.
Either may stand inside the loop, or arrive as an operand: through an enclosing loop that carries it
unchanged, or as an argument of the function that the loop stands in. So integers are followed
backward through all of these, as a base value plus an offset.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from jax.extend.mlir import ir

# Operations whose result i is their operand i. With Explicit mesh axes JAX puts a constraint on
# every value, even on those that count.
_FORWARDING = frozenset(
    {"stablehlo.convert", "stablehlo.optimization_barrier", "sdy.sharding_constraint"}
)
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE", "EQ": "EQ"}


@dataclasses.dataclass(frozen=True)
class Frame:
    """One call of a function: what its arguments are, and where.

    Attributes:
        functions: the module's functions by name, as their first block.
        arguments: the values passed to this call, to be read in `caller`. Those of the program
            itself are not known.
        caller: the frame that the call stands in, None for the program itself.
    """

    functions: Mapping[str, ir.Block]
    arguments: tuple[ir.Value, ...] = ()
    caller: Frame | None = None

    def enter(self, call: ir.Operation) -> Frame:
        """The frame of a function that `call`, an operation of this frame, calls."""
        return Frame(self.functions, tuple(call.operands), self)


@dataclasses.dataclass(frozen=True)
class _Integer:
    """`base + offset`, a constant if there is no base. A base is always an argument of a loop."""

    base: ir.BlockArgument | None
    frame: Frame
    offset: int


def called_function(op: ir.Operation) -> str | None:
    """Name of the function that an operation calls.

    Args:
        op: any operation.

    Returns:
        The callee of a call, the decomposition of a composite; None for other operations.
    """
    attribute = {"func.call": "callee", "stablehlo.composite": "decomposition"}.get(op.name)
    if attribute is None:
        return None
    symbol = op.attributes[attribute]
    assert isinstance(symbol, ir.FlatSymbolRefAttr)
    return symbol.value


def trip_count(loop: ir.Operation, frame: Frame) -> int | None:
    """How often the body of a loop runs.

    Args:
        loop: a `stablehlo.while`.
        frame: the call that the loop stands in.

    Returns:
        The count, or None where the condition is anything but a comparison of a counter, which
        starts at a constant and moves by a constant, with a constant.
    """
    comparison = _defining(_origin(_terminator(loop.regions[0].blocks[0]).operands[0]))
    if comparison is None or comparison.name != "stablehlo.compare":
        return None
    left, right = (_integer(operand, frame) for operand in comparison.operands)
    if left is None or right is None:
        return None
    direction = _direction(comparison)
    if _constant(left) is not None:
        left, right, direction = right, left, _MIRRORED[direction]
    bound = _constant(right)
    if left.base is None or left.base.owner.owner.operation != loop or bound is None:
        return None
    step = _step(loop, left.base.arg_number, frame)
    start = _integer(loop.operands[left.base.arg_number], frame)
    first = None if start is None else _constant(start)
    if step is None or first is None:
        return None
    return _count(first + left.offset, bound, step, direction)


def _count(first: int, bound: int, step: int, direction: str) -> int | None:
    """Trips of a counter that goes from `first` by `step` while it is <direction> `bound`."""
    if direction in ("GT", "GE"):
        first, bound, step = -first, -bound, -step
    if direction in ("LE", "GE"):
        bound += 1
    distance = bound - first
    if direction == "NE":
        exact = step != 0 and distance % step == 0 and distance // step >= 0
        return distance // step if exact else None
    if direction == "EQ":
        return None
    if distance <= 0:
        return 0
    return -(-distance // step) if step > 0 else None


def _constant(value: _Integer) -> int | None:
    """The value as a number, if the loop arguments that it rests on never change."""
    if value.base is None:
        return value.offset
    loop, index = value.base.owner.owner.operation, value.base.arg_number
    if _step(loop, index, value.frame) != 0:
        return None
    start = _integer(loop.operands[index], value.frame)
    number = None if start is None else _constant(start)
    return None if number is None else number + value.offset


def _step(loop: ir.Operation, index: int, frame: Frame) -> int | None:
    """What one iteration adds to operand `index` of a loop."""
    body = loop.regions[1].blocks[0]
    after = _integer(_terminator(body).operands[index], frame)
    return after.offset if after is not None and after.base == body.arguments[index] else None


def _integer(value: ir.Value, frame: Frame) -> _Integer | None:
    value = _origin(value)
    if isinstance(value, ir.BlockArgument):
        return _argument(value, frame)
    op = _defining(value)
    assert op is not None, value
    index = ir.OpResult(value).result_number
    if op.name == "stablehlo.constant":
        literal = _literal(value)
        return None if literal is None else _Integer(None, frame, literal)
    if op.name in ("stablehlo.add", "stablehlo.subtract"):
        return _sum(op, frame)
    callee = called_function(op)
    if callee is not None:
        return _integer(_terminator(frame.functions[callee]).operands[index], frame.enter(op))
    return None


def _argument(value: ir.BlockArgument, frame: Frame) -> _Integer | None:
    owner = value.owner.owner.operation
    if owner.name == "stablehlo.while":
        return _Integer(value, frame, 0)
    if owner.name == "sdy.manual_computation":
        return _integer(owner.operands[value.arg_number], frame)
    if owner.name == "func.func" and frame.caller is not None:
        return _integer(frame.arguments[value.arg_number], frame.caller)
    return None


def _sum(op: ir.Operation, frame: Frame) -> _Integer | None:
    # One side has to be a literal: to search both sides of each sum would take exponential time.
    left, right = op.operands
    if op.name == "stablehlo.add" and _literal(right) is None:
        left, right = right, left
    addend = _literal(right)
    base = None if addend is None else _integer(left, frame)
    if addend is None or base is None:
        return None
    sign = -1 if op.name == "stablehlo.subtract" else 1
    return dataclasses.replace(base, offset=base.offset + sign * addend)


def _literal(value: ir.Value) -> int | None:
    op = _defining(_origin(value))
    if op is None or op.name != "stablehlo.constant":
        return None
    elements = op.attributes["value"]
    if not isinstance(elements, ir.DenseIntElementsAttr):
        return None
    number = elements.get_splat_value()
    return int(number.value) if isinstance(number, ir.IntegerAttr) else None


def _origin(value: ir.Value) -> ir.Value:
    op = _defining(value)
    while op is not None and op.name in _FORWARDING:
        value = op.operands[ir.OpResult(value).result_number]
        op = _defining(value)
    return value


def _defining(value: ir.Value) -> ir.Operation | None:
    return None if isinstance(value.owner, ir.Block) else value.owner.operation


def _terminator(block: ir.Block) -> ir.Operation:
    return list(block.operations)[-1].operation


def _direction(comparison: ir.Operation) -> str:
    # The attribute's own class belongs to a dialect that jax.extend does not offer: read its text.
    match = re.search(
        r"comparison_direction (\w+)", str(comparison.attributes["comparison_direction"])
    )
    assert match is not None, comparison
    return match[1]
