"""For your own test suite: a training step that is still what its policies state, and still fits.

    def test_train_step():
        devices = jfsdp.testing.topology_or_skip("v5e:2x4")
        mesh = jax.make_mesh((8,), ("fsdp",), devices=devices)
        model, optimizer, batch = build(mesh)  # as for training; nothing is allocated
        jfsdp.testing.check_step(
            train_step, model, optimizer, batch, gather_dtype="bfloat16", memory="16 GiB"
        )

No TPU or GPU is needed, only their compilers (`jfsdp[tpu-aot]`, `jfsdp[gpu-aot]`).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jfsdp.inspect import Departure, PolicyViolation, Report, topology
from jfsdp.reports import inspect

__all__ = ["check_step", "topology_or_skip"]


def check_step(
    step: Any,
    *args: Any,
    gather_dtype: Any = None,
    reduce_dtype: Any = None,
    memory: int | str | None = None,
    calls: int = 1,
    tolerance: float = 0.01,
    compile: bool = True,
    model: Any = None,
    **kwargs: Any,
) -> Report:
    """Compile a step, not run it, and fail unless it is what its policies state.

    Args:
        step: the step function, jitted or plain.
        *args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
        gather_dtype: what the policies have to say that parameters are gathered in, so that a change of
            the policy fails too. None: whatever they say.
        reduce_dtype: likewise for the reduction of gradients.
        memory: what a device has, in bytes or as text such as "16 GiB". None: what is known of the target.
        calls: how often the step calls the model.
        tolerance: by which fraction bytes may exceed the least ones.
        compile: False checks the program as it is written, in a second or so, without memory.
        model: as for `jfsdp.inspect`.
        **kwargs: the step's keyword arguments.

    Returns:
        The report, for assertions of your own (`report.count("all-gather")`, `report.memory.peak`).

    Raises:
        jfsdp.PolicyViolation: the step departs from the policies or from what is asked here; all departures
            are listed.
        ValueError: as `jfsdp.inspect` and `Report.check`.

    Cost: one compilation; no memory on the devices.

    Example:
        >>> import jax, jfsdp, jfsdp.testing
        >>> from flax import nnx
        >>> mesh = jax.make_mesh((1,), ("fsdp",))
        >>> model = jfsdp.shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh)
        >>> step, batch = lambda model, x: model(x), jax.numpy.ones((4, 8))
        >>> report = jfsdp.testing.check_step(step, model, batch, memory="1 MiB")
        >>> report.memory.peak < 2**20
        True
    """
    report = inspect(step, *args, compile=compile, model=model, **kwargs)
    found = _other_policies(report, gather_dtype, reduce_dtype)
    found += report.departures(calls=calls, tolerance=tolerance, memory=memory)
    if found:
        raise PolicyViolation(f"{report}\n\nThe step is not what is asked for:", found)
    return report


def _other_policies(report: Report, gather_dtype: Any, reduce_dtype: Any) -> list[Departure]:
    asked = (
        ("param_dtype", gather_dtype, "all-gather"),
        ("reduce_dtype", reduce_dtype, "reduce-scatter"),
    )
    return [
        Departure(promise.leaf, f"the policy's {name}", jnp.dtype(dtype).name, wires[kind].dtype)
        for name, dtype, kind in asked
        if dtype is not None
        for promise in report.promises
        if kind in (wires := promise.wires()) and wires[kind].dtype != jnp.dtype(dtype).name
    ]


def topology_or_skip(name: str) -> tuple[Any, ...]:
    """`jfsdp.topology(name)`; where its compiler is not installed, the pytest test is skipped.

    Args:
        name: such as "v5e:2x4" or "h100:8".

    Raises:
        ValueError: as `jfsdp.topology`.
    """
    import pytest

    try:
        return topology(name)
    except ImportError as error:
        return pytest.skip(str(error))
