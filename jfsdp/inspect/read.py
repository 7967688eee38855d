"""From a training step to the report of what it communicates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax

from .report import Report
from .rows import Minimum
from .stablehlo import collectives

__all__ = ["inspect"]


def inspect(
    lowered_or_step: Any,
    *args: Any,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    minima: Iterable[Minimum] = (),
    **kwargs: Any,
) -> Report:
    """Reports the collectives of a step as it was written, before any compiler pass.

    The step is traced and lowered, not compiled and not run: it costs no device memory, and
    `jax.ShapeDtypeStruct`s do for arrays.

    Args:
        lowered_or_step: a `jax.stages.Lowered`, what `nnx.jit(step).lower(...)` returns, a jitted
            function (`jax.jit`, `nnx.jit`, `jax.pmap`), or any function, which `nnx.jit` then jits.
        *args: the step's arguments.
        mesh: the mesh that the step runs on, of which only axis names and sizes are used.
        minima: the least bytes to hold the program against.
        **kwargs: the step's keyword arguments; those named `mesh` or `minima` have to be bound
            beforehand.

    Returns:
        The report.

    Raises:
        TypeError: the first argument is neither a lowered program nor callable, or arguments come
            with a program that is lowered already.
        ValueError: as `collectives`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jfsdp.inspect.read import inspect
        >>> mesh = jax.make_mesh((1,), ("fsdp",))
        >>> print(inspect(jnp.sin, jnp.ones(3), mesh=mesh).count("all-gather"))
        0
    """
    lowered = _as_lowered(lowered_or_step)
    if lowered is None:
        lowered = _lower(lowered_or_step, *args, **kwargs)
    elif args or kwargs:
        raise TypeError(
            "jfsdp.inspect: the program is lowered already, so its arguments are settled; "
            "pass either the lowered program alone, or the step and its arguments"
        )
    return Report(
        collectives=tuple(collectives(lowered, mesh)),
        minima=tuple(minima),
        mesh_axes=tuple((str(axis), size) for axis, size in mesh.shape.items()),
    )


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
    if not hasattr(step, "lower"):
        # Reading a lowered program needs no Flax.
        from flax import nnx

        step = nnx.jit(step)
    lowered = _as_lowered(step.lower(*args, **kwargs))  # pyright: ignore[reportFunctionMemberAccess]
    if lowered is None:
        raise TypeError(
            f"jfsdp.inspect: {type(step).__name__}.lower returned no jax.stages.Lowered; "
            "pass a function jitted with jax.jit or nnx.jit"
        )
    return lowered
