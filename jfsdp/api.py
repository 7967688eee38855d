"""The public functions: argument checks and dispatch to a front end, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx as flax_nnx

from jfsdp import nnx
from jfsdp.comm import AllGather, ReduceScatter
from jfsdp.mesh import AnyMesh, DataParallelMeshDims, resolve_mesh
from jfsdp.policies import MixedPrecisionPolicy, OffloadPolicy
from jfsdp.units import Unit, validate


def shard(module, mesh=None, *, dp_mesh_dims=None, mp_policy=MixedPrecisionPolicy(), offload_policy=OffloadPolicy(),
      reshard_after_forward=None, shard_placement_fn=None, ignored_params=None, units=(), stacked_axis=None,
      all_gather=None, reduce_scatter=None, partitioning="manual", in_specs=None, out_specs=None, state_specs=None):
    validate(mp_policy=mp_policy, offload_policy=offload_policy, reshard_after_forward=reshard_after_forward,
             all_gather=all_gather, reduce_scatter=reduce_scatter, partitioning=partitioning)
    dp = resolve_mesh(mesh, dp_mesh_dims)
    unit = Unit(dp, mp_policy, reshard_after_forward, all_gather, reduce_scatter, partitioning, in_specs, out_specs, state_specs)
    return nnx.shard_module(module, unit, units=units, stacked_axis=stacked_axis, shard_placement_fn=shard_placement_fn)
