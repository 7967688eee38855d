"""Auto partitioning: a unit's casts and sharding constraints in the global view, no region.

XLA places the collectives and may choose others. What it chose for a training step of GPT-2 and of an MLP
(TPU v5e:2x4 and 8 x H100, jax 0.10.2 and 0.12.0.1, compiled with no device present) is said at `whole`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from jfsdp import tape as tapes
from jfsdp.layout import lay, named_sharding, spec_of, to_spec
from jfsdp.mesh import DataParallelMesh
from jfsdp.offload import to_device
from jfsdp.placement import Placement
from jfsdp.remat import refuse_gathered
from jfsdp.units import Unit, is_array
from jfsdp.unshard import Gathering, check_reducible

__all__ = ["auto_partitioning", "call_gathered_again", "is_auto", "pin_batch", "whole"]

# Part of the key of every jit cache: a function traced outside is traced again inside.
_everywhere = jax.make_user_context(False)


@contextlib.contextmanager
def auto_partitioning() -> Iterator[None]:
    """Within this context every unit uses auto partitioning, whatever its own `partitioning` says.

    For what a model trained with manual partitioning does beside training and no region can hold: decode
    with a cache, take a batch that does not divide by the devices, mix examples across the batch. Functions
    that `jax.jit` or `nnx.jit` has compiled outside are traced again inside, and the other way round: the
    context is part of their caches' keys. It holds for the thread that enters it. A unit called in
    the per-device view (the user's own shard_map) communicates by name inside as well.

    Raises:
        ValueError: where a unit with a custom `all_gather` is called inside: its weights would be others.
        NotImplementedError: where parameters of a unit with an explicit `reduce_dtype`, a custom
            `reduce_scatter` or axes to reshard to are differentiated inside: XLA chooses all that.

    Cost: one more compilation of each function that is called inside and outside.

    Example:
        >>> import jax, jfsdp
        >>> from flax import nnx
        >>> model = jfsdp.shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jax.make_mesh((1,), ("fsdp",)))
        >>> with jfsdp.auto_partitioning():
        ...     model(jax.numpy.ones((3, 8))).shape
        (3, 8)
    """
    with _everywhere(True):
        yield


def is_auto(unit: Unit) -> bool:
    """Whether a call of `unit` in the global view that is being traced leaves the collectives to XLA."""
    return unit.partitioning == "auto" or _everywhere.value


def whole(value: jax.Array, placement: Placement, unit: Unit) -> jax.Array:
    """A parameter cast to the compute dtype, laid whole over the data-parallel axes.

    The constraint on the cast shards, before the one that gathers, keeps the gather in `param_dtype`;
    without it H100 gathers embeddings in the storage dtype. The gradient is constrained to lie in shards,
    not first to be whole. XLA then reduce-scatters over the shard axes and all-reduces shards over the
    replicate axes, each element once, where it else all-reduces whole gradients over all devices: for
    GPT-2's two first layers and embedding 88 in place of 218 MiB on 8 x H100, 120 in place of 306 MiB with
    two replicas, the same within 15 % on v5e. It reduces in the dtype in which it computed the gradient:
    `param_dtype` after a matmul.

    Args:
        value: the parameter in storage dtype, or a layer's slice of a stack.
        placement: where it lies at rest.
        unit: the unit that owns it.

    Raises:
        ValueError: the unit has an `all_gather` of its own.
        NotImplementedError: it is differentiated, and the unit says how its gradient is reduced.
    """
    if unit.all_gather is not None:
        raise ValueError(
            f"{placement.path} (shape {placement.shape}): its unit is gathered by all_gather="
            f"{type(unit.all_gather).__name__}, which auto partitioning cannot call: XLA's gather would give "
            "other weights. Call the unit outside of jfsdp.auto_partitioning()."
        )
    value = to_device(value)
    how = unit.gathering(placement, value)
    if not jnp.issubdtype(how.dtype, jnp.inexact):
        return _gather(value, placement, unit.dp, how)
    gather = jax.custom_jvp(lambda value: _gather(value, placement, unit.dp, how))

    @gather.defjvp
    def differentiate(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        _refuse_reduction(placement, unit)
        check_reducible(how)
        cast = tangents[0].astype(how.param_dtype)
        laid = _lay(cast, placement, unit.dp, shards=True)
        if unit.dp.explicit:  # there a tangent is typed as its primal
            laid = _lay(laid, placement, unit.dp, shards=False)
        return _gather(primals[0], placement, unit.dp, how), laid

    return gather(value)


def _gather(
    value: jax.Array, placement: Placement, dp: DataParallelMesh, how: Gathering
) -> jax.Array:
    cast = value if value.dtype == how.param_dtype else value.astype(how.param_dtype)
    return _lay(_lay(cast, placement, dp, shards=True), placement, dp, shards=False)


def _lay(value: jax.Array, placement: Placement, dp: DataParallelMesh, shards: bool) -> jax.Array:
    lost = len(placement.shape) - value.ndim  # a scan has taken the stacked axis
    entries = [
        axes
        for dim, axes in enumerate(placement.entries)
        if not lost or dim != placement.stacked_axis
    ]
    if not shards:
        entries = [tuple(axis for axis in axes if axis not in dp.axes) for axes in entries]
    return lay(value, named_sharding(dp.mesh, to_spec(entries), value.ndim))


def _refuse_reduction(placement: Placement, unit: Unit) -> None:
    policy, comm = unit.mp_policy, unit.reduce_scatter
    asked = [f"mp_policy.reduce_dtype={policy.reduce_dtype}"] * (policy.reduce_dtype is not None)
    asked += [f"reduce_scatter={type(comm).__name__}"] * (comm is not None)
    asked += [f"reshard_after_forward={unit.reshard_after_forward}"] * isinstance(
        unit.reshard_after_forward, tuple
    )
    if asked:
        raise NotImplementedError(
            f"{placement.path} (shape {placement.shape}) is differentiated inside "
            f"jfsdp.auto_partitioning(), where {', '.join(asked)} cannot be kept: XLA places the reductions "
            "and chooses their dtype. Either\n"
            "  1. call and differentiate the model outside of the context, or\n"
            '  2. shard it with partitioning="auto" and without '
            f"{' and '.join(text.partition('=')[0] for text in asked)}."
        )


def call_gathered_again(
    body: tapes.Body,
    leaves: Sequence[Any],
    parameters: Sequence[tuple[Any, Placement]],
    unit: Unit,
) -> tapes.Rows:
    """Call `body` so that no whole weight is kept for the backward pass.

    Args:
        body: takes the leaves and returns arrays; lays the unit's parameters `whole`.
        leaves: global arrays.
        parameters: the unit's parameters among them, with their placements.
        unit: the unit.

    Cost: the gathers again in the backward pass. Inside a remat of the user's that is two gathers in the
    backward: reshard_after_forward=False makes it one.
    """
    shards = [value for value, placement in parameters if placement.dims]
    types = [
        jax.ShapeDtypeStruct(value.shape, unit.gathering(placement, value).param_dtype)
        for value, placement in parameters
        if placement.dims
    ]
    refuse = refuse_gathered(shards, [*shards, *types])

    def saveable(primitive: Any, *operands: Any, **params: Any) -> bool:
        # A gather that is not differentiated stays one call, as those of manual partitioning do.
        if primitive.name == "custom_jvp_call":
            return refuse(SimpleNamespace(name="custom_vjp_call"), *operands)
        return refuse(primitive, *operands, **params)

    traced, shapes = jax.make_jaxpr(body, return_shape=True)(leaves)
    treedef = jax.tree.structure(shapes)

    def run(leaves: Sequence[Any]) -> tapes.Rows:
        return jax.tree.unflatten(treedef, jaxpr_as_fun(traced)(*jax.tree.leaves(leaves)))

    # This policy would overrule that of a remat inside, unless differentiated inside: see `tape`. It is
    # not always, because the price is forward mode.
    inside = _holds_remat(traced.jaxpr)
    function = (lambda leaves: tapes.call_here(run, leaves)) if inside else run
    return jax.checkpoint(function, policy=saveable)(leaves)


def _holds_remat(jaxpr: Any) -> bool:
    for equation in jaxpr.eqns:
        if equation.primitive.name == _name_of_remat():
            return True
        if equation.primitive.name == "custom_vjp_call":  # differentiated by its own rules
            continue
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value) and _holds_remat(getattr(value, "jaxpr", value)):
                return True
    return False


@functools.cache
def _name_of_remat() -> str:
    # It is no public name: "remat2" in jax 0.10.2 and 0.12.0.1.
    return jax.make_jaxpr(jax.checkpoint(jnp.sin))(0.0).eqns[0].primitive.name


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns")


def pin_batch(tree: Any, dp: DataParallelMesh, is_leaf: Callable[[Any], bool]) -> Any:
    """Keep dimension 0 of a unit's inputs or results split over the data-parallel axes.

    Without it XLA drops the batch sharding inside scanned stacks, at 6 to 27 times the bytes. Arrays
    that do not divide, and those of another size than the first, stay as they are.

    Args:
        tree: arguments or results.
        dp: the data-parallel axes.
        is_leaf: what is passed over as it is, arrays inside it included.
    """
    arrays = [x for x in jax.tree.leaves(tree, is_leaf=is_leaf) if not is_leaf(x) and is_array(x)]
    sizes = [x.shape[0] for x in arrays if x.ndim]
    if not sizes or sizes[0] % dp.size:
        return tree

    def pin(leaf: Any) -> Any:
        if is_leaf(leaf) or not is_array(leaf) or not leaf.ndim or leaf.shape[0] != sizes[0]:
            return leaf
        others = [PartitionSpec.UNCONSTRAINED] * (leaf.ndim - 1)
        if dp.explicit:
            typed = spec_of(leaf) or PartitionSpec()
            others = [typed[dim] if dim < len(typed) else None for dim in range(1, leaf.ndim)]
        spec = PartitionSpec(*(dp.batch_spec or (None,)), *others)
        put = lay if dp.explicit else jax.lax.with_sharding_constraint  # outside of jit as well
        return put(jnp.asarray(leaf), named_sharding(dp.mesh, spec, leaf.ndim))

    return jax.tree.map(pin, tree, is_leaf=is_leaf)
