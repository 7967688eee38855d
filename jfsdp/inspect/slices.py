"""Programs of several TPU slices, read as programs of one machine.

Each slice runs a program of its own chips, whose collectives name them by their place in the slice. What goes
between slices is sent to the host and received from it, over DCN: a `send` and a `recv` that say which
collective they stand for, between which devices.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Final

from .collective import KINDS
from .groups import GROUPS, PAIRS, Groups, groups_of_text
from .hlo import Array, Computation, Instruction, Module
from .networks import Networks

__all__ = ["as_one_machine"]

_KINDS: Final = {
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_REDUCE": "all-reduce",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_FIRST_SLICE: Final = 100_000
"""Chip c of slice s, from 0 on, is device (s + 1) * 100000 + c (libtpu 0.0.42 to 0.0.50)."""
_TARGET: Final = r'_xla_megascale_target=("[^"]*"|\{(?:\{[^{}]*\},?)*\})'


def as_one_machine(module: Module, networks: Networks) -> Module:
    """The program with what goes between slices as asynchronous collectives, of positions in the mesh.

    Args:
        module: the program of one slice.
        networks: of the mesh that it is a part of.

    Returns:
        The program; the same one if there is one slice only.

    Raises:
        ValueError: a transfer is of an unknown kind, or between devices that the mesh has not.
    """
    if networks.platform != "tpu" or not networks.several:
        return module
    reader = _Slices(networks)
    return Module(
        {name: reader.computation(c) for name, c in module.computations.items()}, module.entry
    )


@dataclasses.dataclass(frozen=True)
class _Slices:
    networks: Networks

    def computation(self, computation: Computation) -> Computation:
        ends = {_rendezvous(at): at for at in computation if at.opcode == "recv"}
        starts = {
            at.name: self._start(at, ends[_rendezvous(at)], computation)
            for at in computation
            if at.opcode == "send" and _transfer(at)
        }
        # The receipt is the end of the collective; that the operand is sent frees memory only.
        started = {ends[_rendezvous(computation.instructions[name])].name: name for name in starts}
        changed = {}
        for at in computation:
            if at.opcode == "recv-done" and at.operands[0] in started:
                start = starts[started[at.operands[0]]]
                done = f"{start.opcode.removesuffix('-start')}-done"
                changed[at.name] = dataclasses.replace(
                    at, opcode=done, operand_text=f"%{start.name}"
                )
            elif at.opcode == "send-done" and at.operands[0] in starts:
                changed[at.name] = dataclasses.replace(at, opcode="after-all", operand_text="")
            elif at.opcode.removesuffix("-start") in KINDS:
                changed[at.name] = self._of_mesh(at)
            else:
                changed[at.name] = starts.get(at.name, at)
        return Computation(computation.name, changed, computation.root)

    def _start(
        self, send: Instruction, receive: Instruction, computation: Computation
    ) -> Instruction:
        written = _transfer(send)
        if written not in _KINDS:
            raise ValueError(
                f"jfsdp.inspect: {send.name} is a transfer between TPU slices of an unknown kind: {written}"
            )
        kind = _KINDS[written]
        operand, sent, got = send.operands[0], _type(send), _type(receive)
        before = computation.instructions[operand]
        if before.opcode == "bitcast" and kind == "all-reduce":
            operand = before.operands[0]  # of the gradient's own shape
        key = "source_target_pairs" if kind == "collective-permute" else "replica_groups"
        dim = _dim(send.arrays[0], receive.arrays[0])
        return Instruction(
            send.name,
            f"{kind}-start",
            f"({sent}, {got})",
            f"%{operand}",
            f", {key}={_text(self._between(send))}, dimensions={{{dim}}}",
        )

    def _between(self, send: Instruction) -> Groups:
        """The mesh positions between which something is sent."""
        text = send.attribute(_TARGET).strip('"')
        positions = {device: at for at, device in enumerate(self.networks.devices)}
        if match := re.fullmatch(r"\{([\d,]+)\}x\{([\d,:]+)\}", text):
            slices = [int(n) for n in match[1].split(",")]
            groups = [[_FIRST_SLICE * s + chip for s in slices] for chip in _numbers(match[2])]
        else:
            groups = groups_of_text(text.replace("->", ","))
        try:
            return tuple(tuple(positions[device] for device in group) for group in groups)
        except KeyError as error:
            raise ValueError(
                f"jfsdp.inspect: {send.name} is sent to device {error}, which is not in the mesh: {text}"
            ) from error

    def _of_mesh(self, at: Instruction) -> Instruction:
        """A collective inside a slice, in the positions that the chips of the first one have in the mesh."""
        islands = self.networks.islands
        own = [position for position, island in enumerate(islands) if island == islands[0]]
        match = re.search(GROUPS, at.attributes) or re.search(PAIRS, at.attributes)
        if match is None:
            return at
        groups = groups_of_text(match[1]) or (tuple(range(len(own))),)
        text = _text(tuple(tuple(own[chip] for chip in group) for group in groups))
        attributes = at.attributes[: match.start(1)] + text + at.attributes[match.end(1) :]
        return dataclasses.replace(at, attributes=attributes)


def _type(transfer: Instruction) -> str:
    """The type of the array that is sent or received."""
    return transfer.type_text[1:].partition("}, ")[0] + "}"


def _transfer(send: Instruction) -> str:
    return send.attribute(r'_xla_megascale_transfer_type="(\w+)"')


def _rendezvous(at: Instruction) -> str:
    return at.attribute(r'_xla_host_transfer_rendezvous="([^"]*)"')


def _text(groups: Groups) -> str:
    return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups) + "}"


def _numbers(text: str) -> Iterator[int]:
    """The numbers of `0:3` or `0,2:3`, of which a range has its end."""
    for part in text.split(","):
        first, _, last = part.partition(":")
        yield from range(int(first), int(last or first) + 1)


def _dim(sent: Array, got: Array) -> int:
    """The dimension that a gather or a scatter changes."""
    sizes = enumerate(zip(sent.shape, got.shape, strict=True))
    return next((dim for dim, (before, after) in sizes if before != after), 0)
