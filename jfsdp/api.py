"""The public functions: arguments checked, then handed to a front end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
from flax import nnx as flax_nnx
from jax.sharding import PartitionSpec

from jfsdp import nnx
from jfsdp.borders import freeze_out_specs, freeze_specs
from jfsdp.comm import AllGather, ReduceScatter
from jfsdp.inspect import Report
from jfsdp.inspect.read import inspect as read
from jfsdp.mesh import AnyMesh, DataParallelMeshDims, resolve_mesh
from jfsdp.nnx_init import init_module
from jfsdp.nnx_tree import kind_of_argument, mesh_of, plan_rows
from jfsdp.plan import Plan
from jfsdp.policies import MixedPrecisionPolicy, OffloadPolicy
from jfsdp.promises import arguments, minima, promise
from jfsdp.units import Unit, validate

__all__ = ["init", "inspect", "plan", "register_forward_method", "shard", "shardings"]

M = TypeVar("M", bound=flax_nnx.Module)


def shard(
    module: M,
    mesh: AnyMesh | None = None,
    *,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    reshard_after_forward: bool | None = None,
    shard_placement_fn: Callable[[str, Any], int | None] | None = None,
    ignored_params: Any = None,
    units: Any = (),
    stacked_axis: int | None = None,
    all_gather: AllGather | None = None,
    reduce_scatter: ReduceScatter | None = None,
    partitioning: str = "manual",
    in_specs: Mapping[str, PartitionSpec] | None = None,
    out_specs: Any = None,
    state_specs: Mapping[type, PartitionSpec] | None = None,
) -> M:
    """Shard a Flax NNX module: every device keeps 1/F of its parameters, gradients and moments.

    The parameters below `module` that no earlier (nested) call owns become one unit: gathered together
    when the module is called, dropped afterwards. Apply it bottom-up, to the repeated blocks first and
    to the whole model last, or let `units` do that. Then build the optimizer, and train with an
    ordinary `nnx.jit` or `jax.jit` step; the loss and its gradient are those of the unsharded program.

    Args:
        module: an `nnx.Module` with a `__call__`, concrete, abstract (`nnx.eval_shape`) or traced. It
            is changed in place: its class becomes a subclass of itself, its parameters are laid on
            the mesh in their own dtype, everything else is replicated.
        mesh: the device mesh, of Auto or Explicit axes. None: the one in context, else one axis
            "fsdp" over all devices.
        dp_mesh_dims: which axes shard and which replicate. None: a 1-D mesh shards, a 2-D mesh
            replicates over its first axis and shards over its second.
        mp_policy: dtypes of compute, of reduction, of inputs and outputs.
        offload_policy: only `OffloadPolicy()` in this version.
        reshard_after_forward: True drops the gathered weights after the forward and gathers them again
            in the backward (one more all-gather, no recomputation); False keeps them (memory of the
            whole unit until the backward is through). None: True for every unit but the outermost.
        shard_placement_fn: `f(path, param)` returns the dimension to shard, or None for the rule: the
            largest dimension that divides, ties to the first, never the stacked one; of 2**18 elements or
            more the last one only if its shards are whole tiles of 128, or nothing else will do.
        ignored_params: not in this version.
        units: which modules inside become units of their own first: a class, a glob over dotted paths
            ("blocks.*"; "**" for any depth), a predicate `f(path, module)`, or several.
        stacked_axis: the layer axis of parameters that `nnx.vmap` stacked and `nnx.scan` runs over; it
            is never sharded, so that each layer is gathered inside the loop.
        all_gather: your own collective for every sharded leaf, in place of XLA's.
        reduce_scatter: likewise for the gradients.
        partitioning: "manual": jfsdp places every collective by name. "auto": sharding constraints in
            the global view, XLA places the collectives and nothing is promised about their dtype.
        in_specs: data-parallel PartitionSpec by argument name, or dotted path into an argument, for
            arguments that are no batch: {"mask": PartitionSpec()} for a copy on every device.
        out_specs: prefix of the result with data-parallel PartitionSpecs for what is no batch and no
            scalar mean; None where the rule holds. PartitionSpec() is the mean over the devices.
        state_specs: data-parallel PartitionSpec by Variable type for state that a forward changes and
            that jfsdp does not know: {nnx.Cache: PartitionSpec("fsdp")}.

    Returns:
        `module`.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: the mesh lacks an axis; the module is a container, or a unit already; `units` matches
            nothing; a placement does not exist, does not divide or contradicts the parameter's own
            spec. Nothing is changed then.
        NotImplementedError: offload, ignored_params, or resharding to some axes only.

    Memory: parameters and moments 1/F of the whole per device, but for leaves that do not divide (see
    `jfsdp.plan`); while a unit runs, its weights whole in `param_dtype`.

    Communication, per device and step, for P parameters, F shards, R replicas: (1 + reshard) * P *
    (F - 1)/F gathered in `param_dtype`, P * (F - 1)/F reduce-scattered and 2 * P/F * (R - 1)/R
    all-reduced in `reduce_dtype`.

    Limits of manual partitioning: reverse-mode differentiation only; dimension 0 of every argument is
    taken for the batch (an input without one needs `in_specs`); operations across the batch see one
    device's part of it, BatchNorm excepted, which is global; a forward that walks another unit's
    parameters as a pytree sees shards.

    References: Rajbhandari et al., ZeRO (2020); Zhao et al., PyTorch FSDP (2023); PyTorch FSDP2's
    `fully_shard`.

    Example:
        >>> import jax, jfsdp
        >>> from flax import nnx
        >>> model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(1)))
        >>> mesh = jax.make_mesh((1,), ("fsdp",))
        >>> model = jfsdp.shard(model, mesh, units=nnx.Linear)
        >>> model(jax.numpy.ones((4, 8))).shape
        (4, 8)
    """
    validate(
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        ignored_params=ignored_params,
        reshard_after_forward=reshard_after_forward,
        all_gather=all_gather,
        reduce_scatter=reduce_scatter,
        partitioning=partitioning,
        stacked_axis=stacked_axis,
    )
    if not isinstance(module, flax_nnx.Module):
        raise TypeError(
            f"jfsdp.shard takes a flax.nnx.Module, got {_described(module)}. Linen modules are not served "
            "by this version."
        )
    dp = resolve_mesh(mesh, dp_mesh_dims)
    unit = Unit(
        dp=dp,
        mp_policy=mp_policy,
        reshard_after_forward=reshard_after_forward,
        all_gather=all_gather,
        reduce_scatter=reduce_scatter,
        partitioning=partitioning,
        in_specs=freeze_specs("in_specs", in_specs, str, dp),
        out_specs=freeze_out_specs(out_specs, dp),
        state_specs=freeze_specs("state_specs", state_specs, type, dp),
    )
    return nnx.shard_module(
        module,
        unit,
        units=units,
        stacked_axis=stacked_axis,
        shard_placement_fn=shard_placement_fn,
    )


def init(fn: Callable[[], M], mesh: AnyMesh | None = None, **settings: Any) -> M:
    """Make a module whose parameters are born sharded, never whole on one device.

    Args:
        fn: makes the module, without arguments. It may call `jfsdp.shard` itself, bottom-up; then
            give no mesh and no settings.
        mesh: as in `shard`. Its devices may be those of `jfsdp.topology`, which are not here, or none
            (an AbstractMesh).
        **settings: the keyword arguments of `shard`.

    Returns:
        The module, sharded. On a mesh whose devices are not here it is abstract: `jax.ShapeDtypeStruct`s
        with their shardings in place of arrays, to build the optimizer of and to lower the step with.

    Raises:
        What `shard` raises.

    Memory: the initial values are computed by one jitted program in which each device computes its own
    part of every random array. The values are those of the unsharded initialization (to rounding).

    Example:
        >>> import jax, jfsdp
        >>> from flax import nnx
        >>> mesh = jax.make_mesh((1,), ("fsdp",))
        >>> model = jfsdp.init(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh)
        >>> model.kernel.shape
        (8, 8)
    """

    def apply(module: Any) -> Any:
        has_units = mesh_of(module) is not None
        return (
            module
            if has_units and mesh is None and not settings
            else shard(module, mesh, **settings)
        )

    return init_module(fn, apply)


def register_forward_method(module: Any, name: str) -> None:
    """Make another method than `__call__` gather the unit's parameters.

    Args:
        module: a unit; anything else is left as it is, as in FSDP2.
        name: the method, for example "encode".

    Raises:
        ValueError: the module has no such method.

    Reference: PyTorch FSDP2, `register_fsdp_forward_method`.
    """
    nnx.register_forward_method(module, name)


def plan(model: Any) -> Plan:
    """Say where every parameter lies, what it costs a device, and why it is not sharded.

    Args:
        model: a module that `shard` was applied to; an abstract one costs no memory.

    Returns:
        A `Plan`: `print` it for the table, read `rows`, `bytes_per_device`, `replicated`, `warnings`.

    Raises:
        ValueError: nothing in the model is sharded.
    """
    rows = _plan_rows(model)
    root = rows[0][1]
    policy = root.mp_policy
    names = {
        "compute": policy.param_dtype,
        "reduce": policy.reduce_dtype,
        "outputs": policy.output_dtype,
    }
    text = ", ".join(f"{name} in {dtype}" for name, dtype in names.items() if dtype is not None)
    return Plan(tuple(row for row, *_ in rows), root.dp, text)


def inspect(
    step: Any, *args: Any, compile: bool = False, model: Any = None, **kwargs: Any
) -> Report:
    """Say what a step communicates and how much memory it needs, and hold it against the policies.

    `print` the report: kind, axes, dtype, count and bytes that one device receives in one step, beside
    what the policies state for a step that trains all parameters. `report.check()` raises where the
    program is anything else. The ratio is a little below 1 where the backward does not need a weight
    again (a bias, an embedding), so that nothing gathers it twice.

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
    rows = _plan_rows(given if model is None else model)
    dp = rows[0][1].dp
    named = arguments(given, kind_of_argument)
    sizes = [(placement, row.bytes_per_device) for row, _, placement, _ in rows]
    return read(
        step,
        *args,
        mesh=dp.mesh,
        promises=[promise(row, unit, placement, root) for row, unit, placement, root in rows],
        other_axes=[axis for axis in dp.mesh.axis_names if axis not in dp.axes],
        arguments=named,
        minima=minima(named, sizes),
        compile=compile,
        **kwargs,
    )


def shardings(tree: Any) -> Any:
    """The shardings of a module, optimizer or any pytree of arrays, in the same structure.

    Use it as `in_shardings` or `out_shardings` of `jax.jit`, or as a restore target.

    Args:
        tree: arrays or abstract arrays that carry a sharding.

    Returns:
        `tree` with a `jax.sharding.Sharding` in place of every array.

    Raises:
        TypeError: a leaf has no sharding; its path is named.
    """

    def sharding(path: Any, leaf: Any) -> Any:
        if getattr(leaf, "sharding", None) is None:
            raise TypeError(
                f"shardings: {jax.tree_util.keystr(path)} ({type(leaf).__name__}) has no sharding. Put it "
                "on the mesh with jax.device_put, or leave it out."
            )
        return leaf.sharding

    return jax.tree_util.tree_map_with_path(sharding, tree)


def _described(value: Any) -> str:
    return (
        f"the class {value.__name__}: make an instance"
        if isinstance(value, type)
        else type(value).__name__
    )


def _plan_rows(tree: Any) -> list[Any]:
    rows = plan_rows(tree)
    if not rows:
        raise ValueError("nothing here is sharded: apply jfsdp.shard to the model first.")
    return rows
