"""What a unit is: the settings of one `shard` call, and how they apply to a leaf."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jfsdp.comm import AllGather, ReduceScatter
from jfsdp.mesh import DataParallelMesh
from jfsdp.offload import is_on_host
from jfsdp.placement import Placement
from jfsdp.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, headroom
from jfsdp.reshard import Reshard, check_reshard
from jfsdp.unshard import Gathering

__all__ = ["Group", "Unit", "cast_floating", "validate"]


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Modules that are one unit together: those whose settings hold the same object of this class."""


@dataclasses.dataclass(frozen=True)
class Unit:
    """The settings that one `shard` call gives to its module.

    Attributes:
        dp: the mesh and its data-parallel axes.
        mp_policy: dtypes.
        reshard_after_forward: True, False, None: True unless this unit is the root of the call; or the axes
            over which weights stay sharded after the forward.
        all_gather: the user's collective, or None for XLA's.
        reduce_scatter: the user's collective, or None for XLA's.
        partitioning: "manual" or "auto".
        in_specs: the data-parallel specs of arguments that do not split on dimension 0, by name.
        out_specs: the data-parallel specs of results that are not batches, as (treedef, leaves).
        state_specs: the data-parallel specs of non-parameter state, by Variable type (NNX) or by
            collection or dotted path (Linen).
        prefetch: how many units ahead the weights of the units inside are gathered.
        offload_policy: in which memory its parameters, their gradients and state, and named values lie.
        group: what it shares with the other modules of a list that is one unit; None for one module.

    A unit is part of its module's structure, which jit hashes: hence tuples instead of dicts.
    """

    dp: DataParallelMesh
    mp_policy: MixedPrecisionPolicy
    reshard_after_forward: Reshard = None
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    partitioning: str = "manual"
    in_specs: tuple[tuple[str, PartitionSpec], ...] = ()
    out_specs: tuple[Any, tuple[PartitionSpec | str, ...]] | None = None
    state_specs: tuple[tuple[Any, PartitionSpec], ...] = ()
    prefetch: int = 1
    offload_policy: OffloadPolicy = OffloadPolicy()
    group: Group | None = None

    def reshards(self, is_root: bool) -> bool:
        """Whether weights are dropped after the forward and gathered again, over all shard axes or some."""
        return (
            not is_root if self.reshard_after_forward is None else bool(self.reshard_after_forward)
        )

    def gathering(self, placement: Placement, shard: Any, *, partial: bool = False) -> Gathering:
        """How this unit gathers the leaf `shard` and reduces its gradient.

        Args:
            placement: where the parameter lies.
            shard: this device's part of it, or of a layer of it.
            partial: whether the gradient is only scattered, in the dtype of `shard`; copies are summed later.
        """
        policy = self.mp_policy
        stored = placement.dtype if partial else shard.dtype
        floating = jnp.issubdtype(stored, jnp.floating) and not placement.ignored
        eight_bit = floating and jnp.finfo(stored).bits <= 8
        param_dtype = placement.param_dtype or (None if eight_bit else policy.param_dtype)
        reduce_dtype = (policy.reduce_dtype if floating else None) or stored
        sharded = {axis for _, axes in placement.dims for axis in axes}
        kept, copies = self.reshard_after_forward, placement.copies(self.dp)
        return Gathering(
            path=placement.path,
            dtype=shard.dtype,
            dims=placement.dims_at_rank(shard.ndim),
            others=placement.others_at_rank(shard.ndim),
            summed_axes=copies,
            partial=partial,
            param_dtype=(param_dtype if floating else None) or stored,
            reduce_dtype=reduce_dtype,
            all_gather=self.all_gather,
            reduce_scatter=self.reduce_scatter,
            staged=self.dp.staged,
            once=tuple(sorted(sharded.difference(kept))) if isinstance(kept, tuple) else (),
            headroom=headroom(reduce_dtype, self.dp.size_of((*sharded, *copies))),
            reducible=policy.reduce_dtype is not None or not eight_bit,
            on_host=is_on_host(shard),
        )

    def kept(self, placement: Placement) -> Placement:
        """The placement of a parameter of this unit, in the memory that its policy states."""
        policy = self.offload_policy
        if placement.ignored or not isinstance(policy, CPUOffloadPolicy):
            return placement
        return dataclasses.replace(
            placement,
            memory_kind=policy.memory_kind if policy.parameters else None,
            state_memory_kind=policy.memory_kind if policy.optimizer_state else None,
        )

    def gathered_types(self, how: Gathering, shard: Any) -> list[jax.ShapeDtypeStruct]:
        """The types that a weight has on its way from `shard` to the whole one, these two included."""
        types = [jax.ShapeDtypeStruct(shard.shape, shard.dtype)]
        for step in [how.first, how] if how.once else [how]:
            shape = list(shard.shape)
            for dim, axes in step.dims:
                shape[dim] *= self.dp.size_of(axes)
            types.append(jax.ShapeDtypeStruct(tuple(shape), how.param_dtype))
        return types

    def stated(self, placement: Placement, is_root: bool) -> dict[str, tuple[Any, str, float]]:
        """What is stated of a parameter's collectives in one step that trains it, by kind.

        For P elements, split over other axes already, F shards, R copies and s bytes an element: an
        all-gather of P * s_p * (F - 1)/F bytes and what `stated_again` says, a reduce-scatter of
        P * s_r * (F - 1)/F, an all-reduce of 2 * P/F * s_r * (R - 1)/R.

        Returns:
            For each kind of collective that there is: its axes, its dtype ("" where the user's own collective
            decides), and the bytes that one device receives.
        """
        how = self.gathering(placement, jax.ShapeDtypeStruct(placement.shape, placement.dtype))
        sharding = {axis for _, axes in how.dims for axis in axes}
        shard_axes = tuple(axis for axis in self.dp.mesh.axis_names if axis in sharding)
        shards, copies = self.dp.size_of(shard_axes), self.dp.size_of(how.summed_axes)
        others = [self.dp.size_of(axes) for _, axes in how.others]
        size = math.prod(placement.whole_shape) // math.prod(others)
        gathered = size * np.dtype(how.param_dtype).itemsize * (shards - 1) / shards
        reduced = size * np.dtype(how.reduce_dtype).itemsize
        param_dtype = np.dtype(how.param_dtype).name if how.all_gather is None else ""
        scatter_dtype = np.dtype(how.reduce_dtype).name if how.reduce_scatter is None else ""
        stated: dict[str, tuple[Any, str, float]] = {}
        border = placement.at_rest_only(self.dp)
        if border:
            parts = self.dp.size_of(border)
            received = size * np.dtype(how.param_dtype).itemsize * (parts - 1) / parts
            stated["all-gather"] = (border, np.dtype(how.param_dtype).name, received)
            # XLA may make one of the sum and the slice behind it, for GPUs and TPUs: half the bytes.
            stated["reduce-scatter"] = (border, np.dtype(how.reduce_dtype).name, 0.0)
        if shards > 1:
            again = self.stated_again(placement, is_root)
            received = gathered if again is None else gathered + again[2]
            stated["all-gather"] = (shard_axes, param_dtype, received)
        if not jnp.issubdtype(how.dtype, jnp.inexact) or not how.reducible:
            return stated
        if shards > 1:
            received = reduced * (shards - 1) / shards
            stated["reduce-scatter"] = (shard_axes, scatter_dtype, received)
        if copies > 1:
            received = 2 * reduced / shards * (copies - 1) / copies
            stated["all-reduce"] = (how.summed_axes, np.dtype(how.reduce_dtype).name, received)
        return stated

    def stated_again(self, placement: Placement, is_root: bool) -> tuple[Any, str, float] | None:
        """The part of the stated all-gather that the backward does: P * s_p * (I - 1)/I bytes.

        I is the number of parts that a weight stays in after the forward: F, or fewer if the unit says over
        which axes.

        Returns:
            Its axes, its dtype as `stated` gives it, and bytes; None if the weight is kept whole.
        """
        how = self.gathering(placement, jax.ShapeDtypeStruct(placement.shape, placement.dtype))
        sharding = {axis for _, axes in how.dims for axis in axes}.difference(how.once)
        axes = tuple(axis for axis in self.dp.mesh.axis_names if axis in sharding)
        if not axes or not self.reshards(is_root):
            return None
        parts, others = self.dp.size_of(axes), [self.dp.size_of(axes) for _, axes in how.others]
        size = math.prod(placement.whole_shape) // math.prod(others)
        received = size * np.dtype(how.param_dtype).itemsize * (parts - 1) / parts
        return axes, np.dtype(how.param_dtype).name if how.all_gather is None else "", received


def cast_floating(tree: Any, dtype: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Cast the real floating arrays of `tree` to `dtype`; None casts nothing.

    What `is_leaf` holds for is passed over as it is, arrays inside it included.
    """
    if dtype is None:
        return tree

    def cast(leaf: Any) -> Any:
        if is_leaf is not None and is_leaf(leaf):
            return leaf
        if is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(leaf, dtype)
        return leaf

    return jax.tree.map(cast, tree, is_leaf=is_leaf)


def is_array(value: Any) -> bool:
    """Whether `value` is an array (numpy's, traced and abstract ones included)."""
    # Not by attributes: nnx.Rngs answers to any name, "dtype" and "shape" included.
    return isinstance(value, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def validate(
    *,
    mp_policy: Any,
    offload_policy: Any,
    reshard_after_forward: Any,
    all_gather: Any,
    reduce_scatter: Any,
    partitioning: Any,
    stacked_axis: Any = None,
    prefetch: Any = 1,
) -> None:
    """Check the arguments of `shard` that need no module.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an unknown partitioning, or one that cannot keep what another argument promises.
    """
    _check_type("mp_policy", mp_policy, MixedPrecisionPolicy)
    _check_type("offload_policy", offload_policy, OffloadPolicy)
    check_reshard(reshard_after_forward)
    if all_gather is not None:
        _check_type("all_gather", all_gather, AllGather)
        _check_hashable("all_gather", all_gather)
    if reduce_scatter is not None:
        _check_type("reduce_scatter", reduce_scatter, ReduceScatter)
        _check_hashable("reduce_scatter", reduce_scatter)
    if stacked_axis is not None and (
        isinstance(stacked_axis, bool) or not isinstance(stacked_axis, int)
    ):
        raise TypeError(f"stacked_axis must be an int or None, got {stacked_axis!r}.")
    if isinstance(prefetch, bool) or not isinstance(prefetch, int):
        raise TypeError(f"prefetch must be an int, a number of units, got {prefetch!r}.")
    if prefetch < 0:
        raise ValueError(f"prefetch={prefetch}: a number of units to gather ahead, 0 for none.")
    if partitioning not in ("manual", "auto"):
        raise ValueError(f'partitioning must be "manual" or "auto", got {partitioning!r}.')
    if partitioning == "auto":
        _refuse_activations_in_auto(offload_policy)
        _refuse_in_auto(mp_policy, reshard_after_forward, all_gather, reduce_scatter)


def _refuse_activations_in_auto(policy: OffloadPolicy) -> None:
    if isinstance(policy, CPUOffloadPolicy) and policy.activations:
        raise ValueError(
            'partitioning="auto" cannot promise offload_policy=CPUOffloadPolicy(activations='
            f"{policy.activations!r}): there jax keeps for the backward pass what it likes. Use "
            'partitioning="manual", or a remat of your own with policy=jax.checkpoint_policies.'
            "save_and_offload_only_these_names(...)."
        )


def _refuse_in_auto(
    mp_policy: MixedPrecisionPolicy, reshard: Any, all_gather: Any, reduce_scatter: Any
) -> None:
    asked = {
        f"mp_policy.reduce_dtype={mp_policy.reduce_dtype}": mp_policy.reduce_dtype is not None,
        f"reshard_after_forward={reshard!r}": not isinstance(reshard, bool | None),
        f"all_gather={type(all_gather).__name__}": all_gather is not None,
        f"reduce_scatter={type(reduce_scatter).__name__}": reduce_scatter is not None,
    }
    kept = [text for text, given in asked.items() if given]
    if kept:
        raise ValueError(
            f'partitioning="auto" cannot promise {", ".join(kept)}: there XLA places the collectives and '
            'chooses their dtype. Drop it, or use partitioning="manual".'
        )


def _check_hashable(name: str, value: Any) -> None:
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(
            f"{name} must be hashable, for it is part of the module's structure, which jit hashes, but "
            f"{type(value).__name__} is not: {error}. Make it a frozen dataclass of hashable fields, or "
            "leave __eq__ alone."
        ) from error


def _check_type(name: str, value: Any, wanted: type) -> None:
    if not isinstance(value, wanted):
        raise TypeError(f"{name} must be a jfsdp.{wanted.__name__}, got {value!r}.")
