"""Where the parameters of an NNX unit lie: planned first, then moved there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from flax.core import spmd
from jax.sharding import NamedSharding, PartitionSpec

from jfsdp.ignored import Ignored
from jfsdp.layout import lay, named_sharding, spec_of
from jfsdp.mesh import DataParallelMesh
from jfsdp.nnx_tree import PLACEMENT, placement_of
from jfsdp.placement import Placement, place
from jfsdp.units import Unit, is_array

__all__ = ["Plan", "move", "plan_of", "replicate"]


Plan = dict[str, tuple[nnx.Variable, Placement]]
"""The parameters of a unit by path, and where they are to lie."""


def plan_of(
    variables: Mapping[str, nnx.Variable],
    unit: Unit,
    stacked_axis: int | None,
    shard_placement_fn: Callable[[str, Any], Any] | None,
    ignored: Ignored,
) -> Plan:
    """Decide where the parameters of a unit lie. What has a placement already is left out.

    Args:
        variables: what the unit owns, by path.
        unit: its settings.
        stacked_axis: as `jfsdp.shard` takes it.
        shard_placement_fn: likewise.
        ignored: which parameters are left alone.

    Raises:
        TypeError: an `nnx.Param` holds no array; what `place` raises.
        ValueError: an annotation is not known; what `place` raises.
    """
    plan: Plan = {}
    for full, variable in variables.items():
        value = variable.get_raw_value()
        if not isinstance(variable, nnx.Param):
            continue
        if not is_array(value):
            raise TypeError(
                f"{full}: an nnx.Param must hold one array to be sharded, got {type(value).__name__}. Make "
                "each array a Param of its own, or use another Variable type."
            )
        if placement_of(variable) is not None:  # tied to a parameter of an earlier unit
            continue
        left_alone = ignored.selects(full, variable)
        asked = None
        if shard_placement_fn is not None and not left_alone:
            asked = shard_placement_fn(full, variable)
        placement = place(
            full,
            value,
            unit.dp,
            own_spec=_own_spec(full, variable, value.ndim, stacked_axis),
            stacked_axis=stacked_axis,
            asked=asked,
            ignored=left_alone,
            auto=unit.partitioning == "auto",
        )
        if not left_alone:
            override = unit.mp_policy.override(full, variable)
            placement = dataclasses.replace(placement, param_dtype=override)
        plan[full] = (variable, unit.kept(placement))
    return plan


_KNOWN_METADATA = {"out_sharding", "sharding", "sharding_names", "sharding_rules", "eager_sharding",
                   "optimizer_sharding"}  # fmt: skip


def _own_spec(
    path: str, variable: nnx.Variable, ndim: int, stacked_axis: int | None
) -> PartitionSpec | None:
    """The parameter's own PartitionSpec: the array's, else what its annotation says.

    The array goes first because flax's transforms add a layer axis to the array but leave the
    annotation as it was (google/flax#5112).
    """
    metadata = variable.get_metadata()
    unknown = [
        k for k in metadata if ("shard" in k or "partition" in k) and k not in _KNOWN_METADATA
    ]
    if unknown:
        raise ValueError(
            f"{path}: its metadata {unknown} looks like a sharding annotation that this version of jfsdp "
            "does not know. Use out_sharding=."
        )
    spec = spec_of(variable.get_raw_value())
    if spec is not None:
        return spec
    names = [
        metadata.get(k) for k in ("out_sharding", "sharding", "sharding_names") if metadata.get(k)
    ]
    if not names:
        return None
    given: Any = names[0]
    spec = given.spec if isinstance(given, NamedSharding) else PartitionSpec(*given)
    spec = spmd.get_pspec(spec, metadata.get("sharding_rules"))
    if stacked_axis is not None and len(spec) == ndim - 1:
        entries = list(spec)
        entries.insert(stacked_axis % ndim, None)
        spec = PartitionSpec(*entries)
    return spec


def move(variable: nnx.Variable, placement: Placement, dp: DataParallelMesh) -> None:
    """Lay a parameter where its placement says, and keep that with it."""
    for stale in ("out_sharding", "sharding", "sharding_names"):
        if variable.has_metadata(stale):
            # From here on the array's own sharding is the truth: flax would put moments by the annotation.
            variable.del_metadata(stale)
    variable.set_metadata(PLACEMENT, placement)
    variable.set_raw_value(lay(variable.get_raw_value(), placement.sharding(dp.mesh)))


def replicate(variable: nnx.Variable, dp: DataParallelMesh) -> None:
    """Lay what is no parameter whole on every device, unless it lies on a mesh already."""

    def move(value: Any) -> Any:
        spec = spec_of(value) if is_array(value) else None
        if not is_array(value) or spec is not None:
            return value
        return lay(value, named_sharding(dp.mesh, PartitionSpec(), value.ndim))

    variable.set_raw_value(jax.tree.map(move, variable.get_raw_value()))
