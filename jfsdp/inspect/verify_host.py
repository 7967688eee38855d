"""What lies in host memory, and what is done there, held against what the policies promise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from .allocation import is_on_host
from .contract import Departure, Promise
from .memory import Argument, Kind, Memory
from .table import human_bytes
from .transfers import Traffic
from .verify import shortened

__all__ = ["host_departures", "state_on_host"]

_MOVE: Final = "move arrays to the device before they are used"
_WHAT: Final = {
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "rest": "other arguments",
}
_DEVICE: Final = "the device's own memory"
_LAY: Final = (
    "pass what jfsdp.shard and jfsdp.init_optimizer made, or jax.device_put(x, jfsdp.shardings(x))"
)
_RETURN: Final = (
    "update with jfsdp.update_optimizer, give jax.jit out_shardings=jfsdp.shardings(state), or use "
    "jfsdp.jit"
)


def host_departures(
    promises: Sequence[Promise],
    arguments: Sequence[Argument],
    results: Sequence[Argument],
    traffic: Traffic | None,
    written: Traffic | None,
    memory: Memory | None,
) -> Iterator[Departure]:
    """Every point in which what lies on the host is not what the policies say.

    Args:
        promises: one for each parameter.
        arguments: of the step.
        results: of the step.
        traffic: of the program that is read.
        written: of the program before compilation, which has names; None if it is not known.
        memory: of the compiled program; None before.
    """
    book = _Book(promises)
    if arguments:
        yield from _mislaid(book, arguments)
        yield from _returned(book, arguments, results)
    yield from _activations(promises, written, memory)
    yield from _work(traffic)


def state_on_host(promises: Sequence[Promise], arguments: Sequence[Argument]) -> int:
    """Bytes of optimizer state that one device keeps in host memory, by the policies."""
    book = _Book(promises)
    kept = [each for each in arguments if each.kind == "optimizer" and book.asked(each) is not None]
    return sum(each.bytes_per_device for each in kept)


class _Book:
    """The promises, to be found by the path of an argument and by shape."""

    def __init__(self, promises: Sequence[Promise]) -> None:
        self.promises = {promise.leaf: promise for promise in promises}
        self.by_shape: dict[tuple[int, ...], Promise] = {}
        for promise in promises:
            # Where shapes alone decide, what is asked for on the host comes first.
            known = self.by_shape.setdefault(_shape(promise), promise)
            if known.memory_kind is None and known.state_memory_kind is None:
                self.by_shape[_shape(promise)] = promise

    def asked(self, each: Argument) -> str | None:
        """The kind of host memory that an argument is to lie in; None for the device's own."""
        owner = self.owner(each)
        if owner is None or each.shape != _shape(owner) or each.kind == "rest":
            return None
        return owner.memory_kind if each.kind == "parameters" else owner.state_memory_kind

    def owner(self, each: Argument) -> Promise | None:
        """The parameter whose path an argument's path ends in, else one of its shape."""
        parts = each.path.removesuffix(".value").split(".")
        ends = (".".join(parts[start:]) for start in range(len(parts)))
        found = next((self.promises[end] for end in ends if end in self.promises), None)
        return found or self.by_shape.get(each.shape)


def _mislaid(book: _Book, arguments: Sequence[Argument]) -> Iterator[Departure]:
    """Arguments that do not lie where they should."""
    groups: dict[tuple[Kind, str | None, str | None], list[Argument]] = {}
    for each in arguments:
        asked, lies = book.asked(each), _kind(each)
        if asked != lies:
            groups.setdefault((each.kind, asked, lies), []).append(each)
    for (kind, asked, lies), group in groups.items():
        remedy = f": {_LAY}" if asked else ", for which no policy asks"
        yield Departure(
            shortened([each.path for each in group]),
            f"memory of the {_WHAT[kind]}",
            asked or _DEVICE,
            f"{lies or _DEVICE} for {_arrays(group)}{remedy}",
        )


def _returned(
    book: _Book, arguments: Sequence[Argument], results: Sequence[Argument]
) -> Iterator[Departure]:
    """State that comes back in another memory than it is to lie in.

    Results have no names that tell what they are (NNX numbers them), so those of a shape and dtype are
    counted. A step that returns fewer than it takes need not return state: of such shapes nothing is said.
    """
    missing: dict[str, list[Argument]] = {}
    beyond: dict[str, list[Argument]] = {}
    for key in dict.fromkeys((each.shape, each.dtype) for each in arguments if each.shape):
        taken = [each for each in arguments if (each.shape, each.dtype) == key]
        back = [each for each in results if (each.shape, each.dtype) == key]
        asked = [each for each in taken if book.asked(each) is not None]
        there = [kind for each in back if (kind := _kind(each)) is not None]
        if len(there) < len(asked) and len(back) >= len(taken):
            group = missing.setdefault(book.asked(asked[0]) or "", [])
            group += asked[len(there) :]
        elif there and not asked:
            beyond.setdefault(there[0], []).extend(taken[: len(there)])
    rule = "memory of what the step returns"
    for kind, group in missing.items():
        paths = shortened([each.path for each in group])
        yield Departure(paths, rule, kind, f"{_DEVICE} for {_arrays(group)}: {_RETURN}")
    for kind, group in beyond.items():
        paths, found = shortened([each.path for each in group]), f"{kind} for {_arrays(group)}"
        yield Departure(paths, rule, _DEVICE, f"{found}, for which no policy asks")


def _activations(
    promises: Sequence[Promise], written: Traffic | None, memory: Memory | None
) -> Iterator[Departure]:
    names = tuple(dict.fromkeys(name for promise in promises for name in promise.activations))
    if not names:
        return
    rule, expected = (
        "where activations wait for the backward",
        f"host memory for {', '.join(names)}",
    )
    remedy = "name them in the unit's forward: jax.ad_checkpoint.checkpoint_name(x, name)"
    if written is not None and not written.bytes("host", "forward"):
        yield Departure(
            "", rule, expected, f"nothing is moved to host memory in the forward: {remedy}"
        )
    elif memory is not None and memory.host_told and not memory.host_temporaries:
        yield Departure(
            "", rule, expected, "no temporary of the compiled program lies in host memory"
        )


def _work(traffic: Traffic | None) -> Iterator[Departure]:
    for each in () if traffic is None else traffic.work:
        if each.asked:
            continue
        of = f" ({each.operation})" if each.operation else ""
        size = human_bytes(each.bytes)
        if each.where == "host":
            yield Departure(
                "",
                "what the host computes",
                "what compute_on asks for",
                f"{each.instruction}{of} on {size} of host memory, by XLA's choice: {_MOVE}, and keep "
                "arrays in host memory out of jax.checkpoint",
            )
        else:
            yield Departure(
                "",
                "what the device does with host memory",
                "copies",
                f"{each.instruction}{of} reads or writes {size} of it in place: {_MOVE}",
            )


def _shape(promise: Promise) -> tuple[int, ...]:
    return promise.shape or promise.shapes[0]


def _kind(each: Argument) -> str | None:
    """The kind of host memory that an array lies in; None for the device's own."""
    return each.memory_kind if is_on_host(each.memory_kind) else None


def _arrays(group: Sequence[Argument]) -> str:
    """Such as "3 arrays, 48.0 KiB per device, the largest float32[64,64]"."""
    size = human_bytes(sum(each.bytes_per_device for each in group))
    most = max(group, key=lambda each: each.bytes_per_device)
    array = f"{most.dtype}[{','.join(map(str, most.shape))}]"
    if len(group) == 1:
        return f"{array}, {size} per device"
    return f"{len(group)} arrays, {size} per device, the largest {array}"
