"""The text of a compiled program as data: computations, instructions, and how often loops run.

XLA has no public reader of its own programs, and the text is the only form that every backend gives
(`compiled.as_text()`). Instructions stand in it in the order in which the device starts them.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Final

from .collective import xla_dtype_name

__all__ = ["Array", "Computation", "Instruction", "Module", "aliases", "parse", "trip_count"]

_HEAD: Final = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_INSTRUCTION: Final = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE: Final = re.compile(r"\s*([a-z][\w\-]*)\(")
_ARRAY: Final = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_ESCAPED: Final = re.compile(rb"\\([0-7]{3}|.)")
_NAME: Final = re.compile(r"%?([\w.\-]+)\s*$")
_ALIAS: Final = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")
_OPENING, _CLOSING = "([{", ")]}"


@dataclasses.dataclass(frozen=True)
class Array:
    """Dtype (NumPy or ml_dtypes name) and shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: its name, unique in its module.
        opcode: such as "all-gather-start".
        type_text: the type of its result, as written.
        operand_text: what stands in the parentheses: operands, or the value of a constant.
        attributes: the rest of the line.
    """

    name: str
    opcode: str
    type_text: str
    operand_text: str
    attributes: str

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of the result, those of a tuple in order."""
        return tuple(
            Array(xla_dtype_name(dtype), tuple(int(n.lstrip("<=")) for n in dims.split(",") if n))
            for dtype, dims in _ARRAY.findall(self.type_text)
            if dtype not in ("token", "opaque")
        )

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands."""
        if self.opcode in ("constant", "parameter"):
            return ()
        names = (_NAME.search(text) for text in _split(self.operand_text))
        return tuple(name[1] for name in names if name)

    @functools.cached_property
    def op_name(self) -> str:
        """Where in the user's program it comes from; "" if the compiler lost track."""
        escaped = self.attribute(r'op_name="((?:[^"\\]|\\.)*)"')
        return _ESCAPED.sub(_unescaped, escaped.encode()).decode(errors="replace")

    def attribute(self, pattern: str) -> str:
        """The first group of `pattern` in the attributes, or ""."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else ""

    def called(self, key: str) -> str:
        """Name of the computation that the attribute `key` names, or ""."""
        return self.attribute(rf"\b{key}=%?([\w.\-]+)")

    def branches(self) -> tuple[str, ...]:
        """Names of the computations that a conditional chooses from, or that a custom call calls."""
        listed = self.attribute(r"\b(?:branch|called)_computations=\{([^}]*)\}")
        two = (self.called("true_computation"), self.called("false_computation"))
        return (*re.findall(r"[\w.\-]+", listed), *filter(None, two))


@dataclasses.dataclass(frozen=True)
class Computation:
    """A function of the module.

    Attributes:
        name: its name.
        instructions: in the order of the schedule, by name.
        root: name of the instruction that it returns.
    """

    name: str
    instructions: Mapping[str, Instruction]
    root: str

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def parameter(self, number: int) -> Instruction | None:
        """The parameter with this number."""
        wanted = str(number)
        found = (i for i in self if i.opcode == "parameter" and i.operand_text == wanted)
        return next(found, None)


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program.

    Attributes:
        computations: by name.
        entry: name of the one that runs.
    """

    computations: Mapping[str, Computation]
    entry: str

    def __getitem__(self, name: str) -> Computation:
        return self.computations[name]


def parse(text: str) -> Module:
    """Reads the text of a compiled program.

    Args:
        text: what `compiled.as_text()` returns.

    Returns:
        The module.

    Raises:
        ValueError: the text is no HLO module, or has an instruction that cannot be read.
    """
    computations: dict[str, Computation] = {}
    entry = ""
    head, body, root = None, {}, ""
    for line in text.splitlines():
        if head is None:
            head = _HEAD.match(line)
            continue
        if line.startswith("}"):
            computations[head[2]] = Computation(head[2], body, root or next(reversed(body), ""))
            entry = head[2] if head[1] else entry
            head, body, root = None, {}, ""
            continue
        start = _INSTRUCTION.match(line)
        if start:
            body[start[2]] = _instruction(start[2], line[start.end() :])
            root = start[2] if start[1] else root
    if not entry:
        raise ValueError(
            "jfsdp.inspect: this text is no compiled program: it has no ENTRY computation"
        )
    return Module(computations, entry)


def _instruction(name: str, text: str) -> Instruction:
    end = _balanced(text, 0) if text.startswith("(") else len(text.partition(" ")[0])
    opcode = _OPCODE.match(text, end)
    if opcode is None:
        raise ValueError(f"jfsdp.inspect: cannot read the instruction {name}: {text[:200]}")
    close = _balanced(text, opcode.end() - 1)
    return Instruction(
        name, opcode[1], text[:end], text[opcode.end() : close - 1].strip(), text[close:]
    )


def _balanced(text: str, start: int) -> int:
    """The position behind the bracket that closes the one at `start`."""
    depth = 0
    for match in re.compile(r'[(){}\[\]]|"(?:[^"\\]|\\.)*"').finditer(text, start):
        depth += (match[0] in _OPENING) - (match[0] in _CLOSING)
        if not depth:
            return match.end()
    return len(text)


def _unescaped(match: re.Match[bytes]) -> bytes:
    return bytes([int(match[1], 8)]) if len(match[1]) == 3 else match[1]


def _split(text: str) -> Iterator[str]:
    """The parts between the commas that stand in no bracket."""
    depth = start = 0
    for position, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if character == "," and not depth:
            yield text[start:position]
            start = position + 1
    yield text[start:]


# --------------------------------------------------------------------------------------------------
# Loops


def trip_count(loop: Instruction, computation: Computation, module: Module) -> int | None:
    """How often the body of a loop runs.

    CPU and GPU programs say so. In TPU programs the counter is followed: from a constant, by a
    constant, while it is below a constant.

    Args:
        loop: a `while`.
        computation: the one it stands in.
        module: the program.

    Returns:
        The count, or None if it is not known.
    """
    known = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"\}')
    if known:
        return int(known)
    condition, body = module[loop.called("condition")], module[loop.called("body")]
    comparison = condition.instructions[condition.root]
    if comparison.opcode != "compare":
        return None
    initial = computation.instructions.get(loop.operands[0])
    if initial is None or initial.opcode != "tuple":
        return None

    def constant(name: str, where: Computation) -> int | None:
        at = _origin(where.instructions[name], where)
        if at.opcode == "constant":
            return _integer(at)
        index = _element(at, where)
        if index is None or where is not condition or _step(body, index, module) != 0:
            return None
        return constant(initial.operands[index], computation)

    left, right = comparison.operands
    direction = comparison.attribute(r"direction=(\w+)")
    if constant(left, condition) is not None:
        left, right = right, left
        direction = {"GT": "LT", "GE": "LE", "LT": "GT", "LE": "GE"}.get(direction, direction)
    bound = constant(right, condition)
    index = _element(_origin(condition.instructions[left], condition), condition)
    if bound is None or index is None or direction not in ("LT", "LE", "GT", "GE"):
        return None
    start, step = constant(initial.operands[index], computation), _step(body, index, module)
    if start is None or not step:
        return None
    if direction in ("GT", "GE"):
        start, bound, step = -start, -bound, -step
    distance = bound - start + (direction in ("LE", "GE"))
    return None if step < 0 else max(0, -(-distance // step))


def _origin(at: Instruction, where: Computation) -> Instruction:
    while at.opcode in ("copy", "bitcast", "convert", "copy-done", "copy-start"):
        at = where.instructions[at.operands[0]]
    return at


def _element(at: Instruction, where: Computation) -> int | None:
    """Which element of its computation's one tuple parameter the instruction is."""
    if at.opcode != "get-tuple-element" or where.instructions[at.operands[0]].opcode != "parameter":
        return None
    return int(at.attribute(r"index=(\d+)"))


def _step(body: Computation, index: int, module: Module) -> int | None:
    """What one iteration adds to element `index` of the loop's tuple."""
    after = body.instructions[body.root]
    if after.opcode != "tuple":
        return None
    at = _origin(body.instructions[after.operands[index]], body)
    if _element(at, body) == index:
        return 0
    if at.opcode != "add":
        return None
    sides = [_origin(body.instructions[name], body) for name in at.operands]
    step = [_integer(s) for s in sides if s.opcode == "constant"]
    return step[0] if len(step) == 1 and any(_element(s, body) == index for s in sides) else None


def _integer(constant: Instruction) -> int | None:
    digits = constant.operand_text.removeprefix("-").isdigit()
    return int(constant.operand_text) if digits else None


def aliases(text: str, key: str) -> list[tuple[str, int, str]]:
    """Index of a result, number and index of the operand in whose place it is: "key={ {1}: (0, {}) }"."""
    pairs = text.partition(f"{key}={{")[2].partition("entry_computation_layout")[0]
    return [(result, int(number), index) for result, number, index in _ALIAS.findall(pairs)]
