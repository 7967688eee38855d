"""The public functions that say what a sharded model is and what a step does."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from jfsdp import linen_plan, nnx_tree
from jfsdp.inspect import Report
from jfsdp.inspect.read import inspect as read
from jfsdp.inspect.read import lower
from jfsdp.placement import Placement
from jfsdp.plan import Plan
from jfsdp.policies import MixedPrecisionPolicy
from jfsdp.promises import arguments, minima, promise, state_axes

__all__ = ["inspect", "plan"]


def plan(model: Any) -> Plan:
    """Say where every parameter lies, what it costs a device, and why it is not sharded.

    Args:
        model: a module that `shard` was applied to; an abstract one costs no memory.

    Returns:
        A `Plan`: `print` it for the table, read `rows`, `bytes_per_device`, `replicated`, `warnings`.

    Raises:
        ValueError: nothing in the model is sharded.
    """
    rows, _ = _plan_rows(model)
    root = rows[0][1]
    text = _policy_text(root.mp_policy, rows)
    return Plan(tuple(row for row, *_ in rows), root.dp, text)


def _policy_text(policy: MixedPrecisionPolicy, rows: Sequence[Any]) -> str:
    """The policy of the outermost unit, and how many parameters are computed in another dtype."""
    names = {
        "compute": policy.param_dtype,
        "reduce": policy.reduce_dtype,
        "outputs": policy.output_dtype,
    }
    texts = {name: f"{name} in {dtype}" for name, dtype in names.items() if dtype is not None}
    others = Counter(
        placement.param_dtype.name
        for _, unit, placement, _ in rows
        if placement.param_dtype is not None and placement.param_dtype != unit.mp_policy.param_dtype
    )
    if others:
        counts = (f"{n} parameter{'s' * (n > 1)} in {dtype}" for dtype, n in sorted(others.items()))
        compute = texts.pop("compute", "compute in the parameters' dtypes")
        texts = {"compute": f"{compute} ({', '.join(counts)})", **texts}
    return ", ".join(texts.values())


def inspect(
    step: Any, *args: Any, compile: bool = False, model: Any = None, **kwargs: Any
) -> Report:
    """Say what a step communicates and how much memory it needs, and hold it against the policies.

    `print` the report: kind, axes, dtype, count and bytes that one device receives in one step, beside
    what the policies state for a step that trains all parameters. `report.check()` raises where the
    program is anything else. The ratio is a little below 1 where the backward does not need a weight
    again (a bias, an embedding), so that nothing gathers it twice.

    Of what lies in host memory it has the bytes at rest beside the device's, and what one step moves to the
    device and back, beside the least by the policies: each shard before each of its gathers, its gradient
    back, and for an update on the device parameters, gradients and state there, parameters and state back.

    Args:
        step: the step function, jitted (`nnx.jit`, `jax.jit`) or plain, or its lowered program.
        *args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
        compile: False: the program as it is written; it is lowered, not compiled. True: what the
            compiler made of it, with its memory, for the devices of the mesh, which need not be here (see
            `jfsdp.topology`). It is not run.
        model: the sharded model whose policies the step has to keep. None: the one in the arguments. Give
            it to hold a program of your own, without jfsdp in it, against stated policies.
        **kwargs: the step's keyword arguments.

    Returns:
        A `Report`.

    Raises:
        ValueError: neither the arguments nor `model` hold a sharded module, or `compile=True` with an
            AbstractMesh.

    Cost: tracing, and with compile=True one compilation; no memory on the devices.

    Example:
        >>> import jax, jfsdp
        >>> from flax import nnx
        >>> mesh = jax.make_mesh((1,), ("fsdp",))
        >>> model = jfsdp.shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh)
        >>> report = jfsdp.inspect(lambda model, x: model(x), model, jax.numpy.ones((4, 8)))
        >>> report.check()
        >>> report.count("all-gather")
        0
    """
    given = (args, kwargs)
    module = linen_plan.module_in(given if model is None else model)
    if module is not None and not module.jfsdp.plans_of(module):
        lower(step, *args, **kwargs)  # which finds the units
    rows, kind_of = _plan_rows(given if model is None else model)
    dp = rows[0][1].dp
    named = arguments(given, kind_of)
    sizes = [(placement, row.bytes_per_device) for row, _, placement, _ in rows]

    def axes_of(placement: Placement) -> tuple[str, ...]:
        return state_axes(named, placement)

    return read(
        step,
        *args,
        mesh=dp.mesh,
        promises=[
            promise(row, unit, placement, root, axes_of(placement))
            for row, unit, placement, root in rows
        ],
        other_axes=[axis for axis in dp.mesh.axis_names if axis not in dp.axes],
        arguments=named,
        minima=minima(named, sizes, lambda placement: dp.size_of(axes_of(placement))),
        compile=compile,
        **kwargs,
    )


def _plan_rows(tree: Any) -> tuple[list[Any], Callable[[Any], Any]]:
    """The rows of the plan, and what tells parameters and optimizer state among arguments."""
    module = linen_plan.module_in(tree)
    if module is not None:
        plan = linen_plan.plan_of(module)
        return plan.rows(), functools.partial(linen_plan.kind_of_argument, plan=plan)
    rows = nnx_tree.plan_rows(tree)
    if not rows:
        raise ValueError(
            "nothing here is sharded: apply jfsdp.shard to the model first. A Linen module whose parameters "
            "are passed alone is given as model=."
        )
    return rows, nnx_tree.kind_of_argument
