"""How much memory of a device a compiled step needs, and what for."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias

import jax

from .allocation import HostShare, host_share, is_on_host, taken_arguments, temporary_bytes
from .buffers import Buffer, bytes_of, largest_buffers, refused_buffers
from .memory_table import figures, memory_table
from .table import human_bytes

__all__ = ["Argument", "Kind", "Memory", "from_failure", "memory_table", "read_memory"]

_OVER: Final = re.compile(r"Used \S+ of (\S+) hbm\. Exceeded hbm capacity by ([\d.]+[BKMGT])")
_EARLY: Final = re.compile(
    r"memory required for HLO temporaries \((\S+)\) exceeds[^(]*HBM \((\S+)\)"
)


Kind: TypeAlias = Literal["parameters", "optimizer", "rest"]


@dataclasses.dataclass(frozen=True)
class Argument:
    """An array among a step's arguments.

    Args:
        path: where it is, such as "model.blocks.0.up.kernel".
        kind: what it is for.
        shape: its global shape.
        dtype: NumPy or ml_dtypes name.
        bytes_per_device: bytes of one device's part, without padding.
        memory_kind: where it lies, such as "pinned_host"; None for the device's own memory.
        axes: the mesh axes that it lies on.
        local_shape: the shape of one device's part; None if it is not known.
    """

    path: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    bytes_per_device: int
    memory_kind: str | None = None
    axes: tuple[str, ...] = ()
    local_shape: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a step needs of one device's memory, in bytes.

    peak = parameters + optimizer + rest - unused + padding + outputs_not_aliased + temporaries + code.

    Attributes:
        parameters: of the arguments, without padding.
        optimizer: the optimizer state among them.
        rest: the other arguments, and those that the caller did not name.
        unused: what the named arguments take beyond what the program takes of them: it drops arguments
            that it does not use. They may lie on the device all the same.
        padding: what the arguments take beyond their elements: arrays fill whole tiles on TPUs.
        outputs_not_aliased: outputs that do not take the place of an argument.
        temporaries: everything else, fragmentation included.
        code: the program itself.
        peak: what has to fit at once.
        aliased: outputs that take the place of donated arguments.
        host: what lies in host memory instead, all in all.
        host_parameters: of the arguments there, without padding.
        host_optimizer: the optimizer state among them.
        host_rest: the others.
        host_padding: as `padding`.
        host_outputs: outputs there that do not take the place of an argument.
        host_temporaries: everything else there, such as activations and gradients.
        host_code: of what the host computes.
        host_told: whether the backend tells what lies on the host, temporaries included. On CPU it does not:
            arguments and outputs are told apart by their shardings, and temporaries are the device's.
        available: what a device has; None if it is not known.
        parameters_minimum: the least bytes of the parameters by the policies; None if not known.
        optimizer_minimum: of the optimizer state.
        host_parameters_minimum: of the parameters that lie on the host by the policies.
        host_optimizer_minimum: of the optimizer state likewise.
        host_available: what a device's share of its host's memory is; None if it is not known.
        host_limit: what keeps a program from more of it than that, in words; "" if nothing does.
        refused: whether the compiler refused the program. Then the figures are those of its message, to
            three digits; what it does not tell is 0.
        buffers: the largest buffers at the peak if the step does not fit, else none.
    """

    parameters: int = 0
    optimizer: int = 0
    rest: int = 0
    unused: int = 0
    padding: int = 0
    outputs_not_aliased: int = 0
    temporaries: int = 0
    code: int = 0
    peak: int = 0
    aliased: int = 0
    host: int = 0
    host_parameters: int = 0
    host_optimizer: int = 0
    host_rest: int = 0
    host_padding: int = 0
    host_outputs: int = 0
    host_temporaries: int = 0
    host_code: int = 0
    host_told: bool = False
    available: int | None = None
    parameters_minimum: int | None = None
    optimizer_minimum: int | None = None
    host_parameters_minimum: int | None = None
    host_optimizer_minimum: int | None = None
    host_available: int | None = None
    host_limit: str = ""
    refused: bool = False
    buffers: tuple[Buffer, ...] = ()

    @property
    def persistent(self) -> int:
        """Bytes of all arguments, without padding."""
        return self.parameters + self.optimizer + self.rest

    @property
    def host_fits(self) -> bool | None:
        """Whether what lies on the host is at most a device's share of it; None if that is not known."""
        return None if self.host_available is None else self.host <= self.host_available

    @property
    def fits(self) -> bool | None:
        """Whether the peak is at most what a device has; None if that is not known."""
        return None if self.available is None else not self.refused and self.peak <= self.available

    @property
    def verdict(self) -> str:
        """Such as "fits: 61.2 of 95.0 GiB per device"."""
        return f"{_verdict(self.peak, self.available, self.fits)} per device"

    @property
    def host_verdict(self) -> str:
        """Such as "host memory fits: 12.0 of 44.7 GiB per device"; "" if nothing lies there."""
        if not self.host:
            return ""
        limit = f"; {self.host_limit}" if self.host_limit else ""
        verdict = _verdict(self.host, self.host_available, self.host_fits)
        return f"host memory {verdict} per device{limit}"

    def by_name(self) -> dict[str, float]:
        """Each figure of the device that is not zero, by the name that it has in the table."""
        return {row.name: row.device for row in figures(self) if row.device}

    def by_name_on_host(self) -> dict[str, float]:
        """Each figure of host memory that is not zero, likewise."""
        return {row.name: row.host for row in figures(self) if row.host}

    def by_place(self) -> dict[str, float]:
        """Both, the latter as "parameters on the host"."""
        there = {f"{name} on the host": size for name, size in self.by_name_on_host().items()}
        return self.by_name() | there

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        derived = {"persistent": self.persistent, "fits": self.fits, "verdict": self.verdict}
        derived |= {"host_fits": self.host_fits, "host_verdict": self.host_verdict}
        return dataclasses.asdict(self) | derived


def read_memory(
    compiled: jax.stages.Compiled, arguments: Sequence[Argument] = (), available: int | None = None
) -> Memory:
    """Reads what a compiled program needs of one device's memory.

    Args:
        compiled: the program, for devices that are here or not.
        arguments: what its arguments are, in any order. What is not named counts as `rest`.
        available: bytes that a device has.

    Returns:
        The figures; with the largest buffers if the program does not fit.

    Raises:
        ValueError: the backend does not say what its programs need.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError("jfsdp.inspect: this backend does not say how much memory a program needs")
    share = host_share(compiled, stats)
    taken = taken_arguments(compiled)
    on_host = sum(size for size, kind in taken if is_on_host(kind))
    on_device = sum(size for size, kind in taken if not is_on_host(kind))
    here, there = _parted(arguments)
    given = stats.argument_size_in_bytes - share.counted_arguments
    outputs = stats.output_size_in_bytes - share.counted_outputs
    aliased = stats.alias_size_in_bytes - share.counted_aliased
    fixed = given + outputs - aliased
    counted = share.counted_arguments + share.counted_outputs - share.counted_aliased
    temporaries = temporary_bytes(compiled, stats, fixed + counted)
    memory = dataclasses.replace(
        _of_arguments(here, on_device),
        padding=given - on_device,
        outputs_not_aliased=outputs - aliased,
        temporaries=temporaries,
        code=stats.generated_code_size_in_bytes,
        peak=fixed + temporaries + stats.generated_code_size_in_bytes,
        aliased=aliased + share.aliased,
        available=available,
        **_on_host(_of_arguments(there, on_host), share, stats, on_host),
    )
    if memory.fits is not False:
        return memory
    return dataclasses.replace(memory, buffers=tuple(largest_buffers(compiled)))


def from_failure(error: BaseException, arguments: Sequence[Argument] = ()) -> Memory | None:
    """Reads what a program would need from the exception of a compiler that refused it for its size.

    Compilers for TPUs do; those for CPU and GPU compile what does not fit. Where the arrays alone are too
    much, the message has two figures, needed and available, and Memory no more than these. Otherwise it
    has a table of the largest allocations too.

    Args:
        error: what `lowered.compile()` raised.
        arguments: as for `read_memory`.

    Returns:
        The figures of the message; None for any other error.
    """
    text = str(error)
    over, early = _OVER.search(text), _EARLY.search(text)
    if "RESOURCE_EXHAUSTED" not in text or not (over or early):
        return None
    if early is not None:
        needed, there = map(bytes_of, early.groups())
        memory = _of_arguments(_parted(arguments)[0], 0)
        return dataclasses.replace(
            memory, **_at_rest(arguments), peak=needed, available=there, refused=True
        )
    assert over is not None
    there, beyond = map(bytes_of, over.groups())
    program, code = _size(r"^    program +", text), _size(r"^    overlays +", text)
    outputs, shared = _size("^Output size ", text), _size("; shares ", text)
    return dataclasses.replace(
        _of_arguments(_parted(arguments)[0], _size("^    arguments +", text)),
        **_at_rest(arguments),
        outputs_not_aliased=outputs - shared,
        temporaries=program - code,
        code=code,
        peak=there + beyond,
        aliased=shared,
        available=there,
        refused=True,
        buffers=tuple(refused_buffers(text)[:10]),
    )


# --------------------------------------------------------------------------------------------------
# Figures


def _on_host(host: Memory, share: HostShare, stats: Any, taken: int) -> dict[str, Any]:
    """The figures of host memory, from the arguments there, what they share, and the bytes of those taken."""
    code = stats.host_generated_code_size_in_bytes
    temporaries = stats.host_temp_size_in_bytes
    return {
        "host_parameters": host.parameters,
        "host_optimizer": host.optimizer,
        "host_rest": host.rest,
        "host_padding": share.arguments - taken,
        "host_outputs": share.outputs - share.aliased,
        "host_temporaries": temporaries,
        "host_code": code,
        "host_told": share.told,
        "host": share.arguments + share.outputs - share.aliased + temporaries + code,
    }


def _at_rest(arguments: Sequence[Argument]) -> dict[str, int]:
    """The arguments in host memory, of which the compiler's message does not tell."""
    host = _of_arguments(_parted(arguments)[1], 0)
    kinds = {f"host_{kind}": getattr(host, kind) for kind in ("parameters", "optimizer", "rest")}
    return kinds | {"host": host.persistent}


def _parted(arguments: Sequence[Argument]) -> tuple[list[Argument], list[Argument]]:
    """Those in the device's memory, and those in host memory."""
    there = [each for each in arguments if is_on_host(each.memory_kind)]
    return [each for each in arguments if not is_on_host(each.memory_kind)], there


def _verdict(size: int, available: int | None, fits: bool | None) -> str:
    if available is None:
        return f"needs {human_bytes(size)}"
    needed, there = human_bytes(size), human_bytes(available)
    if needed == there:
        needed, there = f"{size:,}", f"{available:,} B"
    elif needed.split()[1] == there.split()[1]:
        needed = needed.split()[0]
    return f"{'fits' if fits else 'does not fit'}: {needed} of {there}"


def _of_arguments(arguments: Sequence[Argument], taken: int) -> Memory:
    """The arguments by kind. What the program takes and nobody named is the rest."""
    sizes = {"parameters": 0, "optimizer": 0, "rest": 0}
    for each in arguments:
        sizes[each.kind] += each.bytes_per_device
    missing = taken - sum(sizes.values())
    return Memory(
        parameters=sizes["parameters"],
        optimizer=sizes["optimizer"],
        rest=sizes["rest"] + max(missing, 0),
        unused=max(-missing, 0) if taken else 0,
    )


def _size(label: str, text: str) -> int:
    """The size behind a label of a refusal; 0 if the compiler does not know it."""
    found = re.search(rf"{label}([\d.]+[BKMGT])", text, re.M)
    return bytes_of(found[1]) if found else 0
