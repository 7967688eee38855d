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
from jfsdp.policies import MixedPrecisionPolicy, OffloadPolicy
from jfsdp.units import Unit, validate

__all__ = ["described", "register_forward_method", "shard"]

M = TypeVar("M", bound=flax_nnx.Module | nn.Module | type[nn.Module])


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
            `linen.Module`, unbound; or a class of such.
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
        units: which modules inside become units of their own: a class, a glob over dotted paths
            ("blocks.*"; "**" for any depth), a predicate `f(path, module)`, or several. In Linen they are
            found when the module is first initialized or applied, by an abstract initialization.
        stacked_axis: NNX only: the layer axis of parameters that `nnx.vmap` stacked and `nnx.scan` runs
            over; it is never sharded, so that each layer is gathered inside the loop.
        all_gather: your own collective for every sharded leaf, in place of XLA's.
        reduce_scatter: likewise for the gradients.
        partitioning: "manual": jfsdp places every collective by name. "auto": sharding constraints in
            the global view, XLA places the collectives; refuses reduce_dtype, all_gather and reduce_scatter.
            `jfsdp.auto_partitioning()` is auto for a while, for generation and odd batches.
        in_specs: data-parallel PartitionSpec by argument name, or dotted path into an argument, for
            arguments that are no batch: {"mask": PartitionSpec()} for a copy on every device.
        out_specs: prefix of the result with data-parallel PartitionSpecs for what is no batch and no
            scalar mean; None where the rule holds. PartitionSpec() is the mean over the devices.
        state_specs: data-parallel PartitionSpecs for state that a forward changes and that jfsdp does not
            know, by Variable type in NNX ({nnx.Cache: PartitionSpec("fsdp")}), by collection or dotted
            path in Linen ({"cache": PartitionSpec("fsdp"), "intermediates.scores": PartitionSpec()}).

    Returns:
        NNX: `module`. Linen: a module, or class, of a subclass under the same name.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: the mesh lacks an axis; the module is a container, a unit already, or part of another
            module; a placement does not exist, does not divide or contradicts the parameter's own spec;
            `units` matches nothing. Of NNX nothing is changed then. Linen says the last two at the first
            `init` or `apply`.
        NotImplementedError: offload, ignored_params, or resharding to some axes only.

    Memory: parameters and moments 1/F of the whole per device, but for leaves that do not divide (see
    `jfsdp.plan`); while a unit runs, its weights whole in `param_dtype`.

    Communication, per device and step, for P parameters, F shards, R replicas: (1 + reshard) * P *
    (F - 1)/F gathered in `param_dtype`, P * (F - 1)/F reduce-scattered and 2 * P/F * (R - 1)/R
    all-reduced in `reduce_dtype`.

    Called inside your own `jax.shard_map` or `jax.pmap` over all data-parallel axes, a unit takes local
    shards and does the same collectives there. The gradient that comes out is the sum over the devices of
    what each differentiates.

    Limits of manual partitioning: reverse-mode differentiation only; dimension 0 of every argument is
    taken for the batch (an input without one needs `in_specs`); operations across the batch see one
    device's part of it, BatchNorm excepted, which is global; a forward that walks another unit's
    parameters as a pytree sees shards.

    References: Rajbhandari et al., ZeRO (2020); Zhao et al., PyTorch FSDP (2023); PyTorch FSDP2's
    `fully_shard`.

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
        ignored_params=ignored_params,
        reshard_after_forward=reshard_after_forward,
        all_gather=all_gather,
        reduce_scatter=reduce_scatter,
        partitioning=partitioning,
        stacked_axis=stacked_axis,
    )
    linen_kind = isinstance(module, nn.Module) or _is_linen_class(module)
    if not linen_kind and not isinstance(module, flax_nnx.Module):
        raise TypeError(
            "jfsdp.shard takes a module of Flax: a flax.nnx.Module, a flax.linen.Module or a class of such. "
            f"Got {described(module)}."
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
        state_specs=freeze_specs("state_specs", state_specs, str if linen_kind else type, dp),
    )
    if linen_kind:
        if stacked_axis is not None:
            raise ValueError(
                f"stacked_axis={stacked_axis}: in Linen modules jfsdp finds by itself which axis nn.scan "
                "stacks the layers along. Leave it out."
            )
        return linen.shard_module(module, Settings(unit, _hashable(units), shard_placement_fn))
    nnx.shard_module(
        cast(flax_nnx.Module, module),
        unit,
        units=units,
        stacked_axis=stacked_axis,
        shard_placement_fn=shard_placement_fn,
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
