"""What the schedule of a compiled program lets run beside its collectives."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Final, TypeAlias

from .collective import KINDS
from .hlo import Computation, Instruction, Module

__all__ = ["Schedule", "called_computations"]

_MATMUL_OPCODES: Final = ("dot", "convolution", "ragged-dot")
# cuBLAS and cuDNN calls, Triton's matmuls, and the Pallas kernels of TPUs.
_MATMUL_CALLS: Final = re.compile(r"gemm|matmul|cudnn|conv|attention|tpu_custom_call|mosaic", re.I)

_Places: TypeAlias = frozenset[tuple[int, ...]]
_Held: TypeAlias = dict[str, _Places]
_SAME: Final = ("copy", "bitcast", "optimization-barrier", "async-update", "while")


def called_computations(at: Instruction) -> tuple[str, ...]:
    """The computations that an instruction runs, loops excepted; of a conditional, every branch."""
    opcode = at.opcode.removesuffix("-start")
    if opcode in ("fusion", "async"):
        return (at.called("calls"),)
    if opcode == "call":
        return (at.called("to_apply"),)
    return at.branches() if opcode in ("conditional", "custom-call") else ()


@dataclasses.dataclass(eq=False)
class Schedule:
    """Instructions stand in the order in which the device starts them.

    Attributes:
        module: the program.
    """

    module: Module
    _matmuls: dict[str, bool] = dataclasses.field(default_factory=dict)

    def overlaps(self, start: Instruction, computation: Computation) -> bool:
        """Whether a matrix multiplication stands between a start and its done.

        The done may stand in a loop that is given what was started, or in the next iteration of the loop that
        the start stands in.
        """
        whole = list(computation)
        held = {start.name: frozenset({()})}
        return self._beside(held, whole[whole.index(start) + 1 :], computation) is True

    def _beside(
        self,
        held: _Held,
        rest: Sequence[Instruction],
        computation: Computation,
        carried: bool = False,
    ) -> bool | None:
        """Follows what was started: True at a multiplication, False at its done, None if `rest` has neither.

        Args:
            held: the instructions that have it, and where in their tuples.
            rest: the instructions to go through.
            computation: the one they stand in.
            carried: whether an iteration before this one has been gone through.
        """
        for at in rest:
            places = _places(at, held)
            if places and at.opcode.endswith("-done"):
                return False
            if places and at.opcode == "while":
                body = self.module[at.called("body")]
                found = self._beside(_given(body, places), list(body), body)
                if found is not None:
                    return found
            elif self._multiplies(at):
                return True
            if places:
                held[at.name] = places
        places = held.get(computation.root)
        if not places or carried or computation.name not in self._bodies:
            return None
        return self._beside(_given(computation, places), list(computation), computation, True)

    @functools.cached_property
    def _bodies(self) -> frozenset[str]:
        """The computations that are bodies of loops."""
        loops = (at for c in self.module.computations.values() for at in c if at.opcode == "while")
        return frozenset(at.called("body") for at in loops)

    def chain(self, name: str) -> str:
        """The chain that a fusion's collective is a part of, or ""."""
        for at in self.module[name]:
            if at.opcode in KINDS and (chain := at.attribute(r'chain_id="(\d+)"')):
                return chain
        return ""

    @functools.cached_property
    def overlapping_chains(self) -> frozenset[str]:
        """The chains of which one fusion, perhaps in a loop inside, multiplies matrices too."""
        names = self.module.computations
        return frozenset(
            chain for name in names if (chain := self.chain(name)) and self._has_matmul(name)
        )

    def _multiplies(self, at: Instruction) -> bool:
        if at.opcode in _MATMUL_OPCODES:
            return True
        if at.opcode == "custom-call":
            return bool(_MATMUL_CALLS.search(at.attribute(r'custom_call_target="([^"]*)"')))
        called = (at.called("body"),) if at.opcode == "while" else called_computations(at)
        return any(self._has_matmul(name) for name in called)

    def _has_matmul(self, name: str) -> bool:
        if name not in self._matmuls:
            self._matmuls[name] = any(self._multiplies(at) for at in self.module[name])
        return self._matmuls[name]


def _places(at: Instruction, held: _Held) -> _Places:
    """Where in the result of an instruction the started collective is, if one of its operands has it."""
    found: set[tuple[int, ...]] = set()
    for number, operand in enumerate(at.operands):
        for place in held.get(operand, ()):
            if at.opcode == "tuple":
                found.add((number, *place))
            elif at.opcode == "get-tuple-element":
                # A start is a tuple itself, of which every element is what was started.
                if not place:
                    found.add(())
                elif place[0] == int(at.attribute(r"index=(\d+)") or -1):
                    found.add(place[1:])
            elif at.opcode in _SAME or at.opcode.endswith("-done"):
                found.add(place)
    return frozenset(found)


def _given(body: Computation, places: _Places) -> _Held:
    """What the body of a loop has of these elements of the tuple that it is given."""
    parameter = body.parameter(0)
    return {} if parameter is None else {parameter.name: places}
