"""When the arrays of a compiled program live, and which of them lie in one place, from its text.

Instructions stand in the text in the order of the schedule, so an array lives from the instruction that
makes it to the last one that reads it. What may lie in one place: the elements that a loop carries, an
output and the donated argument that it replaces, the two ends of an asynchronous operation, and what an
instruction overwrites.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Final

from .arrays import Array, Kind, Tree, element, leaves, new_arrays
from .hlo import Computation, Instruction, Module, aliases

__all__ = ["Place", "places_at_peak"]

_IN_PLACE: Final = ("add", "dynamic-update-slice", "multiply", "scatter", "select", "subtract")
_MATMULS: Final = ("convolution", "dot")
_SAME_ARRAY: Final = ("bitcast", "optimization-barrier", "domain", "add-dependency", "async-update")


def places_at_peak(module: Module, header: str) -> list[tuple[Place, Array]]:
    """What lies in a device's memory at the moment when it is the most.

    Args:
        module: the program.
        header: the first line of its text, which says what outputs lie in an argument's place.

    Returns:
        Each place in use, and the array that lies there.
    """
    walk = _Walk(module)
    walk.program(header)
    return _at_peak(walk)


class _Walk:
    """Follows a program in the order of its schedule; a loop's body runs once, where the loop stands."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.time = 0
        self.made: list[Array] = []
        self.overwriting: list[tuple[list[Array], list[Array]]] = []

    def program(self, header: str) -> None:
        """Walks the whole program; its first line says which outputs lie in an argument's place."""
        entry = self.module[self.module.entry]
        parameters = {
            int(at.operand_text): self._make(at) for at in entry if at.opcode == "parameter"
        }
        root = self._run(entry, parameters)
        trees: list[tuple[Kind, Iterable[Tree]]]
        trees = [("output", [root]), ("argument", parameters.values())]
        for kind, results in trees:
            for result in results:
                for leaf in leaves(result):
                    leaf.kind, leaf.start, leaf.end = kind, 0, self.time
        self._alias(header, "input_output_alias", root, parameters)

    # ----------------------------------------------------------------------------------------------
    # One instruction

    def _run(self, computation: Computation, parameters: Mapping[int, Tree]) -> Tree:
        values: dict[str, Tree] = {}
        for at in computation:
            self.time += 1
            if at.opcode == "parameter":
                values[at.name] = parameters[int(at.operand_text)]
            else:
                values[at.name] = self._value(at, [values[name] for name in at.operands])
        return values[computation.root]

    def _value(self, at: Instruction, operands: list[Tree]) -> Tree:
        if at.opcode == "tuple":
            return operands
        if at.opcode == "get-tuple-element":
            return element(operands[0], at.attribute(r"index=(\d+)"))
        if at.opcode in _SAME_ARRAY:
            return operands[0] if len(operands) == 1 else operands
        self._read(operands)
        if at.opcode == "while":
            return self._loop(at, operands[0])
        if at.opcode == "call":
            return self._run(self.module[at.called("to_apply")], dict(enumerate(operands)))
        if at.opcode == "conditional":
            results = [
                self._run(self.module[name], {0: operand})
                for name, operand in zip(at.branches(), operands[1:], strict=True)
            ]
            for other in results[1:]:
                self._unite(other, results[0])
            return results[0]
        result = self._make(at)
        if at.opcode.endswith("-done"):
            # Its result is a part of what the start results in.
            part = {"all-reduce-done": "", "copy-done": "0"}.get(at.opcode, "1")
            self._unite(result, element(operands[0], part))
        elif at.opcode == "copy-start":
            self._unite(element(result, "1"), operands[0])
        elif at.opcode.endswith("-start") and at.opcode != "all-reduce-start":
            self._unite(element(result, "0"), operands)
        self._alias(at.attributes, "output_to_operand_aliasing", result, dict(enumerate(operands)))
        if replaced := self._may_overwrite(at, operands):
            self.overwriting.append((list(leaves(result)), list(leaves(replaced))))
        return result

    def _loop(self, at: Instruction, carried: Tree) -> Tree:
        self._run(self.module[at.called("condition")], {0: carried})
        after = self._run(self.module[at.called("body")], {0: carried})
        self.time += 1
        self._read([after])
        self._unite(after, carried)
        return after

    def _may_overwrite(self, at: Instruction, operands: list[Tree]) -> list[Tree]:
        """The operands in whose place the compiler may put its result if nothing reads them later."""
        if at.opcode in _IN_PLACE or (at.opcode == "fusion" and "kind=kLoop" in at.attributes):
            return operands
        if at.opcode != "fusion" or "kind=kOutput" not in at.attributes:
            return []
        # What a matmul's result is worked on with, but nothing that the matmul itself reads.
        within = list(self.module[at.called("calls")])
        read = {name for inner in within if inner.opcode in _MATMULS for name in inner.operands}
        for inner in reversed(within):
            if inner.name in read:
                read.update(inner.operands)
        names = {int(i.operand_text): i.name for i in within if i.opcode == "parameter"}
        return [value for number, value in enumerate(operands) if names[number] not in read]

    # ----------------------------------------------------------------------------------------------
    # Arrays

    def _make(self, at: Instruction) -> Tree:
        tree = new_arrays(at, self.time)
        self.made += leaves(tree)
        return tree

    def _read(self, trees: list[Tree]) -> None:
        for leaf in leaves(trees):
            leaf.end = self.time

    def _unite(self, left: Tree, right: Tree) -> None:
        for one, other in zip(leaves(left), leaves(right), strict=False):
            one, other = one.owner(), other.owner()
            if one is not other and (one.bytes, one.space) == (other.bytes, other.space):
                one.same_as = other

    def _alias(self, text: str, key: str, results: Tree, operands: Mapping[int, Tree]) -> None:
        """Unites the results and operands of a list of aliases."""
        for result, number, index in aliases(text, key):
            self._unite(element(results, result), element(operands[number], index))


class Place:
    """A buffer, the arrays that lie in it one after the other, and when there is one in it."""

    def __init__(self, arrays: list[Array]) -> None:
        self.arrays = arrays
        self.bytes = max(array.bytes for array in arrays)
        kinds = {array.kind for array in arrays}
        self.kind: Kind = next(k for k in ("argument", "output", "temporary") if k in kinds)
        self.spans: list[list[int]] = []
        for start, end in sorted((array.start, array.end) for array in arrays):
            if self.spans and start <= self.spans[-1][1]:
                self.spans[-1][1] = max(self.spans[-1][1], end)
            else:
                self.spans.append([start, end])

    def array_at(self, moment: int) -> Array | None:
        """The array that lies there at a moment, the newest if there are several; None if it is free."""
        if not any(start <= moment <= end for start, end in self.spans):
            return None
        there = [array for array in self.arrays if array.start <= moment <= array.end]
        return max(
            there or self.arrays, key=lambda array: (bool(array.source.op_name), array.start)
        )


def _at_peak(walk: _Walk) -> list[tuple[Place, Array]]:
    groups: dict[Array, list[Array]] = {}
    for array in walk.made:
        if array.space == 0 and array.bytes:
            groups.setdefault(array.owner(), []).append(array)
    places = {owner: Place(arrays) for owner, arrays in groups.items()}
    for results, operands in walk.overwriting:
        for result in results:
            into = places.get(result.owner())
            any(_overwrite(result, into, places.get(operand.owner())) for operand in operands)
    change = [0] * (walk.time + 2)
    for place in places.values():
        for start, end in place.spans:
            change[start] += place.bytes
            change[end + 1] -= place.bytes
    sums = list(itertools.accumulate(change))
    peak = sums.index(max(sums))
    found = ((place, place.array_at(peak)) for place in places.values())
    return [(place, array) for place, array in found if array is not None]


def _overwrite(result: Array, into: Place | None, operand: Place | None) -> bool:
    """Ends the operand before the result starts if the result may take its place."""
    if into is None or operand is None or into is operand or operand.kind != "temporary":
        return False
    if into.bytes != operand.bytes:
        return False
    for span in operand.spans:
        if span[1] == result.start > span[0]:
            span[1] -= 1
            return True
    return False
