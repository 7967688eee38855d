"""What an instruction's operands come from, and what uses its result."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from . import scopes
from .hlo import Computation, Instruction

__all__ = ["Users", "is_gather", "upstream"]

_MOST = 32


@dataclasses.dataclass(eq=False)
class Users:
    """The users of the instructions of a program, found once for each computation."""

    _of: dict[str, dict[str, list[Instruction]]] = dataclasses.field(default_factory=dict)

    def phase(self, at: Instruction, computation: Computation) -> str:
        """The phase of the first instruction that uses the result and has a name, or ""."""
        found = (scopes.phase(user.op_name) for user in self._after(at, computation))
        return next(filter(None, found), "")

    def name(self, at: Instruction, computation: Computation) -> str:
        """The name of the nearest user that has one, or "". The end of what `at` starts is none."""
        users = self._after(at, computation)
        names = (user.op_name for user in users if not user.opcode.endswith("-done"))
        return next(filter(None, names), "")

    def _after(self, at: Instruction, computation: Computation) -> Iterator[Instruction]:
        """The users, their users and so on, the nearest first."""
        if computation.name not in self._of:
            users: dict[str, list[Instruction]] = {}
            for user in computation:
                for operand in user.operands:
                    users.setdefault(operand, []).append(user)
            self._of[computation.name] = users
        pending, seen = [at.name], {at.name}
        while pending and len(seen) < _MOST:
            for user in self._of[computation.name].get(pending.pop(0), ()):
                if user.name not in seen:
                    seen.add(user.name)
                    pending.append(user.name)
                    yield user


def upstream(name: str, computation: Computation, steps: int = 12) -> Iterator[Instruction]:
    """The instruction, its first operand, the first operand of that, and so on."""
    for _ in range(steps):
        at = computation.instructions[name]
        yield at
        if not at.operands:
            return
        name = at.operands[0]


def is_gather(at: Instruction, computation: Computation) -> bool:
    """Whether an all-reduce adds up arrays in which each device has filled its own part only."""
    update = computation.instructions[at.operands[0]]
    if update.opcode != "dynamic-update-slice":
        return False
    seen, pending = set(), list(update.operands[2:])
    while pending:
        name = pending.pop()
        before = computation.instructions[name]
        if before.opcode in ("partition-id", "replica-id"):
            return True
        if name not in seen:
            seen.add(name)
            pending += before.operands
    return False
