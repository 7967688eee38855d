"""From a training step to the report of what it communicates and how much memory it needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from . import scopes
from .compiled import compiled_collectives
from .compiled_transfers import compiled_transfers
from .contract import Promise, minima_of
from .host_limits import host_limit
from .memory import Argument, Memory, from_failure, read_memory
from .networks import networks_of_mesh
from .report import Report
from .results import results_of
from .stablehlo import collectives, constant_bytes
from .target import find_target
from .topology import compiler_options
from .transfers import HostWork, Traffic, Transfer, least_bytes
from .verify_host import state_on_host
from .written_transfers import written_transfers

__all__ = ["compiled_report", "inspect", "lower"]


def lower(step: Any, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
    """The step as a lowered program.

    Args:
        step: a `jax.stages.Lowered`, what `nnx.jit(step).lower(...)` returns, a jitted function
            (`jax.jit`, `nnx.jit`, `jax.pmap`), or any function, which `nnx.jit` then jits.
        *args: the step's arguments; none for a program that is lowered already.
        **kwargs: its keyword arguments.

    Returns:
        The program, traced and lowered, not compiled and not run: it costs no device memory, and
        `jax.ShapeDtypeStruct`s do for arrays.

    Raises:
        TypeError: the first argument is neither a lowered program nor callable, or arguments come
            with a program that is lowered already.
    """
    lowered = _as_lowered(step)
    if lowered is None:
        return _lower(step, *args, **kwargs)
    if args or kwargs:
        raise TypeError(
            "jfsdp.inspect: the program is lowered already, so its arguments are settled; "
            "pass either the lowered program alone, or the step and its arguments"
        )
    return lowered


def inspect(
    step: Any,
    *args: Any,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    promises: Sequence[Promise] = (),
    other_axes: Sequence[str] = (),
    arguments: Sequence[Argument] = (),
    minima: Sequence[int | None] = (),
    compile: bool = False,
    **kwargs: Any,
) -> Report:
    """Reports the collectives of a step, as written or as compiled.

    Args:
        step: as for `lower`.
        *args: the step's arguments.
        mesh: the mesh that the step runs on.
        promises: what the policies say of each parameter.
        other_axes: the mesh axes of which they say nothing.
        arguments: what the step's arguments are, for the split of memory.
        minima: the least bytes per device of parameters and of optimizer state in its own memory, then of
            those in host memory; None for what is not known.
        compile: whether to compile the program and read what the compiler made of it, and its memory.
        **kwargs: the step's keyword arguments; those named as an argument here have to be bound
            beforehand.

    Returns:
        The report.

    Raises:
        TypeError: as `lower`.
        ValueError: as `collectives` and `compiled_collectives`; the mesh has no devices to compile for.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jfsdp.inspect.read import inspect
        >>> mesh = jax.make_mesh((1,), ("fsdp",))
        >>> print(inspect(jnp.sin, jnp.ones(3), mesh=mesh).count("all-gather"))
        0
    """
    jaxpr, lowered = _traced(step, *args, **kwargs)
    accumulation = scopes.microbatches(lowered.as_text(debug_info=True)) if promises else None
    if accumulation is not None:
        promises = [promise.accumulated(*accumulation) for promise in promises]
    networks = networks_of_mesh(mesh)
    written = collectives(lowered, mesh)
    report = Report(
        collectives=tuple(written if networks is None else map(networks.shared, written)),
        minima=minima_of(promises),
        mesh_axes=tuple((str(axis), size) for axis, size in mesh.shape.items()),
        promises=tuple(promises),
        other_axes=tuple(other_axes),
        constants=constant_bytes(lowered),
        networks=networks,
        arguments=tuple(arguments),
        results=results_of(lowered, _shares(arguments)),
    )
    if jaxpr is not None:
        updates = any(each.kind == "optimizer" for each in arguments)
        moved = written_transfers(jaxpr, _shares(arguments), updates=updates)
        report = dataclasses.replace(report, traffic=_traffic(report, *moved))
    if not compile:
        return report
    if not isinstance(mesh, jax.sharding.Mesh):
        raise ValueError(
            "jfsdp.inspect: compile=True needs devices to compile for, and the mesh is an AbstractMesh. "
            'Make one with jax.make_mesh(..., devices=jfsdp.topology("v5e:2x4")), or leave compile out.'
        )
    return compiled_report(report, lowered, mesh, arguments, minima)


def compiled_report(
    report: Report,
    lowered: jax.stages.Lowered,
    mesh: jax.sharding.Mesh,
    arguments: Sequence[Argument],
    minima: Sequence[int | None],
) -> Report:
    """Compiles a program and reports what came out.

    Args:
        report: that of the program as lowered.
        lowered: the program.
        mesh: the mesh that it runs on, of devices that are here or not.
        arguments: as for `inspect`.
        minima: as for `inspect`.

    Returns:
        The report of the compiled program. If the compiler refuses the program because it does not fit,
        one without collectives whose memory says so.
    """
    target = find_target(mesh.devices.flat[0])
    available = None if target is None else target.usable_memory_bytes
    compiled_for = f"{mesh.size} x {mesh.devices.flat[0].device_kind}"
    try:
        program = lowered.compile(compiler_options=compiler_options(mesh) or None)
    except jax.errors.JaxRuntimeError as error:
        memory = from_failure(error, arguments)
        if memory is None:
            raise
        found: tuple = ()
        traffic = report.traffic
    else:
        memory = read_memory(program, arguments, available=available)
        text = program.as_text() or ""
        found = tuple(compiled_collectives(text, dict(report.mesh_axes), report.networks))
        # Programs for CPU move nothing: there is one memory.
        is_cpu = mesh.devices.flat[0].platform == "cpu"
        traffic = report.traffic if is_cpu else _traffic(report, *compiled_transfers(text))
    memory = dataclasses.replace(
        _with_minima(memory, minima),
        host_available=None if target is None else target.host_memory_bytes,
        host_limit=host_limit(target, memory.host, mesh.size),
    )
    return dataclasses.replace(
        report,
        collectives=found,
        target=compiled_for,
        memory=memory,
        lowered=report,
        traffic=traffic,
    )


def _with_minima(memory: Memory, minima: Sequence[int | None]) -> Memory:
    names = ("parameters", "optimizer", "host_parameters", "host_optimizer")
    known = {f"{name}_minimum": size for name, size in zip(names, minima, strict=False)}
    return dataclasses.replace(memory, **known)


def _traffic(report: Report, transfers: Sequence[Transfer], work: Sequence[HostWork]) -> Traffic:
    """What is moved, with the least of it by the policies."""
    least = None
    unseen = any(each.memory_kind == "unpinned_host" for each in report.arguments)
    if report.promises and not unseen:
        on_host = any(each.where == "host" and each.asked for each in work)
        least = least_bytes(
            report.promises,
            state_on_host(report.promises, report.arguments),
            updates=any(each.kind == "optimizer" for each in report.arguments),
            on_host=on_host,
        )
    return Traffic(tuple(transfers), tuple(work), least, unseen)


def _shares(arguments: Sequence[Argument]) -> Mapping[tuple[int, ...], tuple[int, ...]]:
    """By the global shape of an argument that of one device's part, in as many elements."""
    return {each.shape: each.local_shape for each in arguments if each.local_shape is not None}


def _traced(step: Any, *args: Any, **kwargs: Any) -> tuple[Any, jax.stages.Lowered]:
    """The step's jaxpr, None if it is lowered already or has no `trace`; and the lowered program."""
    if _as_lowered(step) is not None or not callable(step):
        return None, lower(step, *args, **kwargs)
    step = _jitted(step)
    if not hasattr(step, "trace"):
        return None, _lower(step, *args, **kwargs)
    traced = step.trace(*args, **kwargs)
    own = traced if isinstance(traced, jax.stages.Traced) else getattr(traced, "traced", None)
    lowered = _as_lowered(traced.lower())
    if own is None or lowered is None:
        return None, _lower(step, *args, **kwargs)
    return own.jaxpr, lowered


def _jitted(step: Any) -> Any:
    if hasattr(step, "lower"):
        return step
    # Reading a lowered program needs no Flax.
    from flax import nnx

    return nnx.jit(step)


def _as_lowered(candidate: Any) -> jax.stages.Lowered | None:
    """The program itself, out of Flax's wrapper if it is in one; None for anything else."""
    for program in (candidate, getattr(candidate, "lowered", None)):
        if isinstance(program, jax.stages.Lowered):
            return program
    return None


def _lower(step: Callable[..., Any], *args: Any, **kwargs: Any) -> jax.stages.Lowered:
    if not callable(step):
        raise TypeError(
            f"jfsdp.inspect: expected a function or a lowered program, got {type(step).__name__}"
        )
    step = _jitted(step)
    lowered = _as_lowered(step.lower(*args, **kwargs))  # pyright: ignore[reportFunctionMemberAccess]
    if lowered is None:
        raise TypeError(
            f"jfsdp.inspect: {type(step).__name__}.lower returned no jax.stages.Lowered; "
            "pass a function jitted with jax.jit or nnx.jit"
        )
    return lowered
