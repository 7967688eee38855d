"""What a unit is: the settings of one `shard` call, and how they apply to a leaf."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jfsdp.comm import AllGather, ReduceScatter
from jfsdp.mesh import DataParallelMesh
from jfsdp.placement import Placement
from jfsdp.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from jfsdp.unshard import Gathering

__all__ = ["Unit", "cast_floating", "matcher", "validate"]


@dataclasses.dataclass(frozen=True)
class Unit:
    """The settings that one `shard` call gives to its module.

    Attributes:
        dp: the mesh and its data-parallel axes.
        mp_policy: dtypes.
        reshard_after_forward: True, False, or None: True unless this unit is the root of the call.
        all_gather: the user's collective, or None for XLA's.
        reduce_scatter: the user's collective, or None for XLA's.
        partitioning: "manual" or "auto".
        in_specs: the data-parallel specs of arguments that do not split on dimension 0, by name.
        out_specs: the data-parallel specs of results that are not batches, as (treedef, leaves).
        state_specs: the data-parallel specs of non-parameter state, by Variable type (NNX) or by
            collection or dotted path (Linen).

    A unit is part of its module's structure, which jit hashes: hence tuples instead of dicts.
    """

    dp: DataParallelMesh
    mp_policy: MixedPrecisionPolicy
    reshard_after_forward: bool | None = None
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    partitioning: str = "manual"
    in_specs: tuple[tuple[str, PartitionSpec], ...] = ()
    out_specs: tuple[Any, tuple[PartitionSpec | str, ...]] | None = None
    state_specs: tuple[tuple[Any, PartitionSpec], ...] = ()

    def reshards(self, is_root: bool) -> bool:
        """Whether gathered weights are dropped after the forward and gathered again."""
        return not is_root if self.reshard_after_forward is None else self.reshard_after_forward

    def gathering(self, placement: Placement, shard: Any) -> Gathering:
        """How this unit gathers the leaf `shard` and reduces its gradient."""
        floating = jnp.issubdtype(shard.dtype, jnp.floating)
        policy = self.mp_policy
        sharded = {axis for _, axes in placement.dims for axis in axes}
        return Gathering(
            path=placement.path,
            dtype=shard.dtype,
            dims=placement.dims_at_rank(shard.ndim),
            others=placement.others_at_rank(shard.ndim),
            summed_axes=tuple(a for a in self.dp.larger_than_one(self.dp.axes) if a not in sharded),
            param_dtype=(policy.param_dtype if floating else None) or shard.dtype,
            reduce_dtype=(policy.reduce_dtype if floating else None) or shard.dtype,
            all_gather=self.all_gather,
            reduce_scatter=self.reduce_scatter,
            staged=self.dp.staged,
        )

    def stated(self, placement: Placement, is_root: bool) -> dict[str, tuple[Any, str, float]]:
        """What is stated of a parameter's collectives in one step that trains it, by kind.

        For P elements, split over other axes already, F shards, R copies and s bytes an element: an
        all-gather of (1 + reshard) * P * s_p * (F - 1)/F bytes, a reduce-scatter of P * s_r * (F - 1)/F, an
        all-reduce of 2 * P/F * s_r * (R - 1)/R.

        Returns:
            For each kind of collective that there is: its axes, its dtype ("" where the user's own collective
            decides), and the bytes that one device receives.
        """
        how = self.gathering(placement, jax.ShapeDtypeStruct(placement.shape, placement.dtype))
        sharding = {axis for _, axes in how.dims for axis in axes}
        shard_axes = tuple(axis for axis in self.dp.mesh.axis_names if axis in sharding)
        shards, copies = self.dp.size_of(shard_axes), self.dp.size_of(how.summed_axes)
        others = [self.dp.size_of(axes) for _, axes in how.others]
        size = math.prod(placement.shape) // math.prod(others)
        gathered = size * np.dtype(how.param_dtype).itemsize * (shards - 1) / shards
        reduced = size * np.dtype(how.reduce_dtype).itemsize
        param_dtype = np.dtype(how.param_dtype).name if how.all_gather is None else ""
        scatter_dtype = np.dtype(how.reduce_dtype).name if how.reduce_scatter is None else ""
        stated: dict[str, tuple[Any, str, float]] = {}
        if shards > 1:
            times = 1 + self.reshards(is_root)
            stated["all-gather"] = (shard_axes, param_dtype, gathered * times)
        if not jnp.issubdtype(how.dtype, jnp.inexact):
            return stated
        if shards > 1:
            received = reduced * (shards - 1) / shards
            stated["reduce-scatter"] = (shard_axes, scatter_dtype, received)
        if copies > 1:
            received = 2 * reduced / shards * (copies - 1) / copies
            stated["all-reduce"] = (how.summed_axes, np.dtype(how.reduce_dtype).name, received)
        return stated


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
    ignored_params: Any,
    reshard_after_forward: Any,
    all_gather: Any,
    reduce_scatter: Any,
    partitioning: Any,
    stacked_axis: Any = None,
) -> None:
    """Check the arguments of `shard` that need no module.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an unknown partitioning, or one that cannot keep what another argument promises.
        NotImplementedError: offload, and resharding to an inner axis, are not in this version.
    """
    _check_type("mp_policy", mp_policy, MixedPrecisionPolicy)
    _check_type("offload_policy", offload_policy, OffloadPolicy)
    if isinstance(offload_policy, CPUOffloadPolicy):
        raise NotImplementedError(
            "offload_policy=CPUOffloadPolicy() is not implemented in this version of jfsdp; it is "
            "refused rather than ignored. Pass OffloadPolicy()."
        )
    if ignored_params is not None:
        raise NotImplementedError(
            "ignored_params is not implemented in this version of jfsdp; it is refused rather than "
            "ignored. Leave it None: what cannot be sharded is replicated and trained exactly."
        )
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        if isinstance(reshard_after_forward, int | str | tuple):
            raise NotImplementedError(
                f"reshard_after_forward={reshard_after_forward!r}: keeping a shard over some axes only "
                "is not implemented in this version of jfsdp. Pass True, False or None."
            )
        raise TypeError(
            f"reshard_after_forward must be True, False or None, got {reshard_after_forward!r}."
        )
    if all_gather is not None:
        _check_type("all_gather", all_gather, AllGather)
    if reduce_scatter is not None:
        _check_type("reduce_scatter", reduce_scatter, ReduceScatter)
    if stacked_axis is not None and (
        isinstance(stacked_axis, bool) or not isinstance(stacked_axis, int)
    ):
        raise TypeError(f"stacked_axis must be an int or None, got {stacked_axis!r}.")
    if partitioning not in ("manual", "auto"):
        raise ValueError(f'partitioning must be "manual" or "auto", got {partitioning!r}.')
    if partitioning == "auto":
        _refuse_in_auto(mp_policy, all_gather, reduce_scatter)


def _refuse_in_auto(mp_policy: MixedPrecisionPolicy, all_gather: Any, reduce_scatter: Any) -> None:
    asked = {
        f"mp_policy.reduce_dtype={mp_policy.reduce_dtype}": mp_policy.reduce_dtype is not None,
        f"all_gather={type(all_gather).__name__}": all_gather is not None,
        f"reduce_scatter={type(reduce_scatter).__name__}": reduce_scatter is not None,
    }
    kept = [text for text, given in asked.items() if given]
    if kept:
        raise ValueError(
            f'partitioning="auto" cannot promise {", ".join(kept)}: there XLA places the collectives and '
            'chooses their dtype. Drop it, or use partitioning="manual".'
        )


def _check_type(name: str, value: Any, wanted: type) -> None:
    if not isinstance(value, wanted):
        raise TypeError(f"{name} must be a jfsdp.{wanted.__name__}, got {value!r}.")


Selector = type | str | Callable[[str, Any], bool]


def matcher(
    selectors: Selector | Iterable[Selector],
) -> list[tuple[Selector, Callable[[str, Any], Any]]]:
    """Turn `units=` into predicates over (path, module).

    Args:
        selectors: a module class, a glob over dotted paths, a predicate, or several of them.

    Raises:
        TypeError: something else.
    """
    if isinstance(selectors, type | str) or not isinstance(selectors, Iterable):
        selectors = (selectors,)
    return [(selector, _predicate(selector)) for selector in selectors]


def _predicate(selector: Any) -> Callable[[str, Any], Any]:
    if isinstance(selector, type):
        return lambda path, module: isinstance(module, selector)
    if isinstance(selector, str):
        return lambda path, module: _glob(path.split("."), selector.split("."))
    if callable(selector):
        return selector
    raise TypeError(
        "units takes a module class, a glob over paths such as 'blocks.*', a predicate "
        f"f(path, module) -> bool, or several of them, got {selector!r}."
    )


def _glob(parts: list[str], pattern: list[str]) -> bool:
    """Whether a dotted path matches: "*" within one name, "**" over any number of names."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_glob(parts[skip:], pattern[1:]) for skip in range(len(parts) + 1))
    return (
        bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0]) and _glob(parts[1:], pattern[1:])
    )
