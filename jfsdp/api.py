"""The public functions: arguments checked, then handed to a front end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from flax import linen as nn
from flax import nnx as flax_nnx
from jax.sharding import PartitionSpec

from jfsdp import linen, nnx
from jfsdp.borders import freeze_out_specs, freeze_specs
from jfsdp.comm import AllGather, ReduceScatter
from jfsdp.linen_plan import Settings
from jfsdp.mesh import AnyMesh, DataParallelMeshDims, resolve_mesh
from jfsdp.offload import check_offload
from jfsdp.placement_asked import Answer
from jfsdp.policies import MixedPrecisionPolicy, OffloadPolicy
from jfsdp.reshard import resolved
from jfsdp.units import Unit, validate

__all__ = ["described", "register_forward_method", "shard"]

M = TypeVar(
    "M",
    bound=flax_nnx.Module | nn.Module | type[nn.Module] | list[Any] | tuple[Any, ...],
)


def shard(
    module: M,
    mesh: AnyMesh | None = None,
    *,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    reshard_after_forward: bool | int | str | tuple[str, ...] | None = None,
    shard_placement_fn: Callable[[str, Any], Answer] | None = None,
    ignored_params: Any = None,
    units: Any = (),
    stacked_axis: int | None = None,
    prefetch: int = 1,
    all_gather: AllGather | None = None,
    reduce_scatter: ReduceScatter | None = None,
    partitioning: str = "manual",
    in_specs: Mapping[str, PartitionSpec] | None = None,
    out_specs: Any = None,
    state_specs: Mapping[Any, PartitionSpec] | None = None,
) -> M:
    """Shard a Flax module: every device keeps 1/F of its parameters, gradients and moments.

    The parameters below `module` that no nested unit owns become one unit: gathered together when the
    module is called, dropped afterwards. Make the repeated blocks units of their own, by `units` or by
    calling `shard` on each of them first. Then train with an ordinary step, jitted or per device; the
    loss and its gradient are those of the unsharded program.

    NNX: the module is changed in place: its class becomes a subclass of itself, its parameters are laid
    on the mesh in their own dtype, everything else is replicated. Build the optimizer afterwards.

    Linen: a module is returned that is used as the one given: `init`, whose parameters are born sharded,
    `apply` with any `method=`, `mutable=`, `rngs=`, `bind`, `tabulate`. A class gives a class, for use
    inside compact parents as with `nn.remat`. What `nn.scan` stacks is gathered layer by layer, by itself.

    Args:
        module: an `nnx.Module` with a `__call__`, concrete, abstract (`nnx.eval_shape`) or traced; or a
            `linen.Module`, unbound; or a class of such. Or a list of NNX modules, such as [norm, head], which
            are one unit: they have one name in `jfsdp.plan` and `jfsdp.inspect` and reshard alike, and what
            is tied between them counts once; each is gathered when it is called, and when collectives
            start is XLA's decision for a unit of one module as well. Paths of its parameters, for the
            arguments below, begin with the index in the list.
        mesh: the device mesh, of Auto or Explicit axes. None: the one in context, else one axis
            "fsdp" over all devices.
        dp_mesh_dims: which axes shard and which replicate. None: a 1-D mesh shards, a 2-D mesh
            replicates over its first axis and shards over its second.
        mp_policy: dtypes of compute, of reduction, of inputs and outputs.
        offload_policy: in which memory the unit's parameters, gradients and optimizer state lie:
            `CPUOffloadPolicy()` keeps them on the host. Units may differ. Parameters in `ignored_params` stay
            on the device.
        reshard_after_forward: True drops the gathered weights after the forward and gathers them again
            in the backward (one more all-gather, no recomputation); False keeps them (memory of the
            whole unit until the backward is through). None: True for every unit but the outermost. The
            name of a shard axis, or a tuple of names: the weights stay sharded over these only, I parts, and
            the backward gathers over these only, such as within a host (ZeRO++ hpZ). An int is I, the size of
            the last shard axes together; all of them is True, 1 is False. With your own remat round a
            layer of a scan it holds if that keeps what stays, as `jax.checkpoint(..., policy=
            jax.checkpoint_policies.save_only_these_names("jfsdp_kept"))` does.
        shard_placement_fn: `f(path, param)` returns the dimension to shard, or None for the rule: the
            largest dimension that divides, ties to the first, never the stacked one; of 2**18 elements or
            more the last one only if its shards are whole tiles of 128, or nothing else will do. Or
            {0: "host", 1: ("x", "y")}: each shard axis on one of several dimensions. Or a dimension (a dict,
            None) with data-parallel axes of this parameter alone, for experts:
            `(1, DataParallelMeshDims(shard="fsdp"))`. Along the unit's other data-parallel axes, which have
            to be in the parameter's own PartitionSpec (`out_sharding` in NNX, `nn.with_partitioning` in
            Linen), the parameter stays split while its unit is called: the forward sees this device's part,
            sends it what belongs to it (`jax.lax.all_to_all`), and its gradient is not summed over them.
        ignored_params: parameters that jfsdp leaves alone: a glob over dotted paths ("lora.*"), a predicate
            `f(path, param)`, in NNX a Variable type, or several. They lie as their own PartitionSpec says, on
            data-parallel axes too, else whole on every device; `mp_policy` never casts them, the forward has
            them whole, and their gradients are summed over all data-parallel devices in their own dtype.
            In a `jax.shard_map` of your own give them whole.
        units: which modules inside become units of their own: a class, a glob over dotted paths
            ("blocks.*"; "**" for any depth), a predicate `f(path, module)`, or several. In Linen they are
            found when the module is first initialized or applied, by an abstract initialization.
        stacked_axis: NNX only: the layer axis of parameters that `nnx.vmap` stacked and `nnx.scan` runs
            over; it is never sharded, so that each layer is gathered inside the loop.
        prefetch: how many units ahead of the one that runs weights are gathered, in the forward and in the
            backward, as the outermost unit says. 1: while a unit runs, the next one's weights are gathered
            and the last one's gradients reduced, and no others. 0: a unit waits for its own; least memory, no
            overlap. Layers of a scan look ahead by one at most. A unit that is called twice, in a loop, or
            with another one in one remat, gathers for itself; so do weights tied between units.
        all_gather: your own collective for every sharded leaf, in place of XLA's.
        reduce_scatter: likewise for the gradients.
        partitioning: "manual": jfsdp places every collective by name. "auto": sharding constraints in
            the global view, XLA places the collectives; refuses reduce_dtype, all_gather, reduce_scatter and
            axes to reshard to.
            `jfsdp.auto_partitioning()` is auto for a while, for generation and odd batches.
        in_specs: data-parallel PartitionSpec by argument name, or dotted path into an argument, for
            arguments that are no batch: {"mask": PartitionSpec()} for a copy on every device.
        out_specs: prefix of the result with data-parallel PartitionSpecs for what is no batch and no
            scalar mean; None where the rule holds. PartitionSpec() is the mean over the devices.
        state_specs: data-parallel PartitionSpecs for state that a forward changes and that jfsdp does not
            know, by Variable type in NNX ({nnx.Cache: PartitionSpec("fsdp")}), by collection or dotted
            path in Linen ({"cache": PartitionSpec("fsdp"), "intermediates.scores": PartitionSpec()}).

    Returns:
        NNX: `module`, or the list. Linen: a module, or class, of a subclass under the same name.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: the mesh lacks an axis; the module is a container, a unit already, or part of another
            module; a list is empty, names a module twice or two that lie in each other; a placement does not
            exist, does not divide, contradicts the parameter's own spec, or leaves out an axis that this
            does not name; `units` or `ignored_params` matches nothing. Of NNX nothing is changed then. Linen
            says what is wrong with parameters, and what matches nothing, at the first `init` or `apply`.

    Memory: parameters and moments 1/F of the whole per device, but for leaves that do not divide (see
    `jfsdp.plan`); while a unit runs, its weights whole in `param_dtype`. From the forward to the backward
    1/I of the weights in `param_dtype`, if they stay in I parts.

    Communication, per device and step, for P parameters, F shards, R replicas: (1 + reshard) * P *
    (F - 1)/F gathered in `param_dtype`, P * (F - 1)/F reduce-scattered and 2 * P/F * (R - 1)/R
    all-reduced in `reduce_dtype`. If weights stay in I parts, P * (F - 1)/F + P * (I - 1)/I are gathered.
    For experts F and R are those of their own axes, and P one device's part of them. For ignored parameters
    2 * P * (N - 1)/N all-reduced over all N devices, and P * (S - 1)/S gathered once if they lie in S parts.

    Called inside your own `jax.shard_map` or `jax.pmap` over all data-parallel axes, a unit takes local
    shards and does the same collectives there. The gradient that comes out is the sum over the devices of
    what each differentiates.

    Limits of manual partitioning: reverse-mode differentiation only; dimension 0 of every argument is
    taken for the batch (an input without one needs `in_specs`); operations across the batch see one
    device's part of it, BatchNorm excepted, which is global; a forward that walks another unit's
    parameters as a pytree sees shards.

    References: Rajbhandari et al., ZeRO (2020); Zhao et al., PyTorch FSDP (2023); Wang et al., ZeRO++
    (2023); PyTorch FSDP2's `fully_shard`.

    Example:
        >>> import jax, jfsdp
        >>> from flax import linen, nnx
        >>> mesh = jax.make_mesh((1,), ("fsdp",))
        >>> model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(1)))
        >>> model = jfsdp.shard(model, mesh, units=nnx.Linear)
        >>> model(jax.numpy.ones((4, 8))).shape
        (4, 8)
        >>> model = jfsdp.shard(linen.Dense(8), mesh)
        >>> variables = model.init(jax.random.key(0), jax.numpy.ones((1, 8)))
        >>> model.apply(variables, jax.numpy.ones((4, 8))).shape
        (4, 8)
    """
    validate(
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        reshard_after_forward=reshard_after_forward,
        all_gather=all_gather,
        reduce_scatter=reduce_scatter,
        partitioning=partitioning,
        stacked_axis=stacked_axis,
        prefetch=prefetch,
    )
    linen_kind = isinstance(module, nn.Module) or _is_linen_class(module)
    several = isinstance(module, list | tuple)
    if several:
        _check_list(module, in_specs, out_specs)
    if not linen_kind and not several and not isinstance(module, flax_nnx.Module):
        raise TypeError(
            "jfsdp.shard takes a module of Flax: a flax.nnx.Module, a flax.linen.Module or a class of such. "
            f"Got {described(module)}."
        )
    dp = resolve_mesh(mesh, dp_mesh_dims)
    check_offload(offload_policy, dp.mesh)
    unit = Unit(
        dp=dp,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        reshard_after_forward=resolved(reshard_after_forward, dp),
        all_gather=all_gather,
        reduce_scatter=reduce_scatter,
        partitioning=partitioning,
        prefetch=prefetch,
        in_specs=freeze_specs("in_specs", in_specs, str, dp),
        out_specs=freeze_out_specs(out_specs, dp),
        state_specs=freeze_specs("state_specs", state_specs, str if linen_kind else type, dp),
    )
    if linen_kind:
        if stacked_axis is not None:
            raise ValueError(
                f"stacked_axis={stacked_axis}: in Linen modules jfsdp finds by itself which axis nn.scan "
                "stacks the layers along. Leave it out."
            )
        settings = Settings(unit, _hashable(units), shard_placement_fn, _hashable(ignored_params))
        return linen.shard_module(module, settings)
    nnx.shard_module(
        cast(Any, module),
        unit,
        units=units,
        stacked_axis=stacked_axis,
        shard_placement_fn=shard_placement_fn,
        ignored_params=ignored_params,
    )
    return module


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


def _check_list(modules: Any, in_specs: Any, out_specs: Any) -> None:
    for index, module in enumerate(modules):
        if isinstance(module, nn.Module) or _is_linen_class(module):
            raise TypeError(
                f"jfsdp.shard was given a list of Linen modules (modules[{index}] is {described(module)}), "
                "which have no parameters of their own to put into one unit. Make a parent module that calls "
                "them the unit, or each of them one: jfsdp.shard(model, units=[Norm, Head])."
            )
    for name, given in (("in_specs", in_specs), ("out_specs", out_specs)):
        if given is not None:
            raise ValueError(
                f"{name} speaks of the arguments or results of one module, and jfsdp.shard was given a list. "
                "Give it where you shard the module that calls them."
            )


def _is_linen_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _hashable(units: Any) -> Any:
    """`units` as part of a Linen module, which is hashed."""
    if isinstance(units, str | type) or not isinstance(units, Iterable):
        return units
    return tuple(units)


def described(value: Any) -> str:
    """What a value is, for messages."""
    return (
        f"the class {value.__name__}: make an instance"
        if isinstance(value, type)
        else type(value).__name__
    )
