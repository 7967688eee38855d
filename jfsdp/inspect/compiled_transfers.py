"""What a compiled program moves between host memory and the device, from its text.

Arrays in host memory have S(5) in their layout, on TPU and GPU. What moves them: copies; slices of a stack
and updates of one, alone or as a fusion, which XLA turns into copies at run time; each of them also as
`-start` and `-done`. Computations that the host does are custom calls to HostExecute: what they take from
host memory and leave there is not moved, what they take from the device or give to it is. Anything else
that touches host memory is a kernel that reads or writes it element by element over the link.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from . import scopes
from .arrays import Array, leaves, new_arrays
from .collective import nbytes
from .dataflow import Users, upstream
from .hlo import Computation, Instruction, Module, parse, trip_count
from .schedule import called_computations
from .transfers import HostWork, Side, Transfer

__all__ = ["compiled_transfers"]

_HOST: Final = 5
_PASSING: Final = frozenset(
    (
        "parameter",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "optimization-barrier",
        "add-dependency",
        "domain",
        "constant",
        "after-all",
        "async-update",
        "partition-id",
        "replica-id",
    )
)
_SLICES: Final = ("dynamic-slice", "slice", "dynamic-update-slice")
_MOVING: Final = _PASSING.union(_SLICES, ("copy", "reshape", "fusion", "call", "async-start"))
_NO_WORK: Final = ("AllocateBuffer", "MoveToHost", "MoveToDevice", "Sharding")


def compiled_transfers(text: str) -> tuple[list[Transfer], list[HostWork]]:
    """Reads what a compiled step moves to and from host memory, and computes with it.

    Loops count as for `compiled_collectives`; of a conditional the branch that moves most counts, since one
    of them runs. Programs for CPU have one memory and move nothing.

    Args:
        text: what `compiled.as_text()` returns.

    Returns:
        One record per array and instruction that moves it, and one per instruction that computes with arrays
        in host memory.
    """
    if f"S({_HOST})" not in text:
        return [], []
    module = parse(text)
    reader = _Reader(module, "update" if "transpose(" in text else "forward")
    reader.read(module[module.entry], scopes.Place())
    return reader.transfers, reader.work


class _Reader:
    def __init__(self, module: Module, phase_of_rest: str) -> None:
        self.module = module
        self.phase_of_rest = phase_of_rest
        self.transfers: list[Transfer] = []
        self.work: list[HostWork] = []
        self._users = Users()

    def read(self, computation: Computation, place: scopes.Place) -> None:
        """Adds what a computation moves."""
        for at in computation:
            if at.opcode == "while":
                trips = trip_count(at, computation, self.module)
                if trips != 0:
                    inside = place.in_loop_of(trips, at.op_name)
                    self.read(self.module[at.called("body")], inside)
            elif _is_host_call(at):
                self._host_call(at, computation, place)
            elif at.opcode in ("call", "conditional"):
                self._most([self.module[name] for name in called_computations(at)], place)
            elif at.opcode not in _PASSING and not at.opcode.endswith("-done"):
                self._instruction(at, computation, place)

    def _most(self, branches: Sequence[Computation], place: scopes.Place) -> None:
        """Adds what the branch moves that moves most, and what any of them computes."""
        each = [_Reader(self.module, self.phase_of_rest) for _ in branches]
        for reader, computation in zip(each, branches, strict=True):
            reader.read(computation, place)
            self.work += reader.work
        self.transfers += max(
            (reader.transfers for reader in each),
            key=lambda moved: sum(t.total_bytes for t in moved),
        )

    # ----------------------------------------------------------------------------------------------
    # One instruction

    def _instruction(self, at: Instruction, computation: Computation, place: scopes.Place) -> None:
        given, made = _given(at, computation), _made(at)
        if not any(array.space == _HOST for array in (*given, *made)):
            return
        if any(name in at.attributes for name in _NO_WORK):
            return
        inner = list(self._inside(at, computation))
        names = [i for i, _ in inner]
        if at.opcode.removesuffix("-start") not in _MOVING or not all(map(_moves, names)):
            touched = [array for array in (*given, *made) if array.space == _HOST]
            self.work.append(
                HostWork("device", at.name, _operation([at, *names]), _size(touched), asked=False)
            )
            return
        updates = [array for i, around in inner for array in _updates(i, around)]
        for array in made:
            if array.space == _HOST:
                from_device = any(each.space != _HOST and each.shape for each in given)
                source: Side = "device" if from_device else "host"
                self._moved((updates or [array])[0], source, "host", at, computation, place)
            else:
                self._moved(array, "host", "device", at, computation, place)

    def _inside(
        self, at: Instruction, around: Computation
    ) -> Iterator[tuple[Instruction, Computation]]:
        """The instructions of a fusion, those of fusions in it included; of anything else itself."""
        called = at.called("calls")
        if not called:
            yield at, around
            return
        for inner in self.module[called]:
            yield from self._inside(inner, self.module[called])

    def _host_call(self, at: Instruction, computation: Computation, place: scopes.Place) -> None:
        if at.opcode.endswith("-done"):
            return
        given, made = _given(at, computation), _made(at)
        names = [*at.branches(), *filter(None, [at.called("calls"), at.called("to_apply")])]
        inner = [i for name in names for i in self._deep(self.module[name])]
        computes = [i for i in inner if not _moves(i)]
        # What XLA makes of an instruction has a name without a path, such as "multiply.12".
        names_of_jax = [i.op_name for i in computes if "/" in i.op_name]
        asked = bool(names_of_jax) and all("compute_on" in name for name in names_of_jax)
        touched = [array for array in (*given, *made) if array.space == _HOST]
        unasked = [name for name in names_of_jax if "compute_on" not in name]
        operation = (*unasked, *names_of_jax, "")[0]
        work = HostWork("host", at.name, operation, _size(touched), asked)
        if computes:
            self.work.append(work)
        for array in given:
            if array.space != _HOST and array.shape:
                self._moved(array, "device", "host", at, computation, place)
        for array in made:
            if array.space != _HOST and array.shape:
                self._moved(array, "host", "device", at, computation, place)

    def _deep(self, computation: Computation) -> Iterator[Instruction]:
        """The instructions of a computation and of all that it calls."""
        for at in computation:
            called = [at.called(k) for k in ("calls", "to_apply", "body", "condition")]
            names = [name for name in (*called, *at.branches()) if name]
            if not names:
                yield at
            for name in names:
                yield from self._deep(self.module[name])

    def _moved(
        self,
        array: Array,
        source: Side,
        target: Side,
        at: Instruction,
        computation: Computation,
        place: scopes.Place,
    ) -> None:
        transfer = Transfer(
            source,
            target,
            array.dtype,
            array.shape,
            place.executions,
            place.unknown_trips,
            self._phase(target, at, computation, place),
            at.name,
        )
        self.transfers.append(transfer)

    def _phase(
        self, target: Side, at: Instruction, computation: Computation, place: scopes.Place
    ) -> str:
        """That of its name; else of what uses it on the device, of what made it there; else of the loop."""
        user = self._users.name(at, computation)
        before = [i.op_name for i in upstream(at.name, computation, 4)]
        around = [user, *before] if target == "device" else [*before, user]
        for name in (at.op_name, *around, place.op_name):
            if found := scopes.phase(name):
                return found
            if "jit(" in name:
                return self.phase_of_rest
        inside = () if computation.name == self.module.entry else computation
        return next(filter(None, (scopes.phase(i.op_name) for i in inside)), "")


# --------------------------------------------------------------------------------------------------
# Arrays and names


def _is_host_call(at: Instruction) -> bool:
    return 'execution_thread="host"' in at.attributes or '"HostExecute"' in at.attributes


def _given(at: Instruction, computation: Computation) -> list[Array]:
    operands = (computation.instructions[name] for name in at.operands)
    return [array for operand in operands for array in leaves(new_arrays(operand, 0))]


def _made(at: Instruction) -> list[Array]:
    """The arrays that an instruction results in; of a `-start` those of its done."""
    tree = new_arrays(at, 0)
    if at.opcode.endswith("-start") and isinstance(tree, list):
        tree = tree[0 if at.opcode == "copy-start" else 1]
    return [array for array in leaves(tree) if array.dtype]


def _moves(at: Instruction) -> bool:
    """Whether an instruction leaves every element as it is; what computes where to is a scalar."""
    opcode = at.opcode.removesuffix("-start")
    return opcode in _MOVING or all(not array.shape for array in _made(at))


def _updates(at: Instruction, around: Computation) -> Iterator[Array]:
    """What an instruction, alone or in a fusion, writes into a larger array."""
    if at.opcode.removesuffix("-start") == "dynamic-update-slice":
        yield from leaves(new_arrays(around.instructions[at.operands[1]], 0))


def _size(arrays: Sequence[Array]) -> float:
    return sum(nbytes(array.shape, array.dtype) for array in arrays)


def _operation(instructions: Sequence[Instruction]) -> str:
    return next((i.op_name for i in instructions if i.op_name), "")
