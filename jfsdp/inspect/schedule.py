"""What the schedule of a compiled program lets run beside its collectives."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Final

from .collective import KINDS
from .hlo import Computation, Instruction, Module

__all__ = ["Schedule", "called_computations"]

_MATMUL_OPCODES: Final = ("dot", "convolution", "ragged-dot")
# cuBLAS and cuDNN calls, Triton's matmuls, and the Pallas kernels of TPUs.
_MATMUL_CALLS: Final = re.compile(r"gemm|matmul|cudnn|conv|attention|tpu_custom_call|mosaic", re.I)


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
        """Whether a matrix multiplication stands between a start and its done."""
        running = False
        for at in computation:
            if at is start:
                running = True
            elif running and at.opcode.endswith("-done") and start.name in at.operands:
                return False
            elif running and self._multiplies(at):
                return True
        return False

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
