"""How much of a training state has to lie in host memory for the rest to fit on a device."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

from jfsdp import linen, linen_plan, nnx_tree
from jfsdp.layout import axes_of_entry
from jfsdp.mesh import AnyMesh
from jfsdp.nnx_parameters import move
from jfsdp.offload import PINNED, UNPINNED, check_offload
from jfsdp.optimizer import names_of, owner_of, spec_in_shape
from jfsdp.placement import Placement, itemsize
from jfsdp.policies import CPUOffloadPolicy
from jfsdp.units import is_array

__all__ = ["Item", "offload_by_budget", "to_offload"]

M = TypeVar("M")

STATE, PARAMETER = "state", "parameter"


@dataclasses.dataclass(frozen=True)
class Item:
    """What goes to the host in one: a parameter, or the optimizer state that lies as it does.

    Attributes:
        path: of the parameter.
        what: "state" or "parameter".
        bytes: of it on one device.
    """

    path: str
    what: str
    bytes: int


def to_offload(items: Iterable[Item], fixed: int, device_bytes: float) -> list[Item]:
    """The items to offload, so that the others and what is fixed take at most `device_bytes`.

    State before parameters, the largest first, ties to the first path: the fewest of that order. A smaller
    budget takes the same ones and more.
    """
    order = sorted(
        (item for item in items if item.bytes), key=lambda x: (x.what != STATE, -x.bytes, x.path)
    )
    left, taken = fixed + sum(item.bytes for item in order), 0
    while left > device_bytes and taken < len(order):
        left -= order[taken].bytes
        taken += 1
    return order[:taken]


def offload_by_budget(
    model: M,
    *args: Any,
    device_bytes: float,
    tx: Any = None,
    wrt: Any = None,
    pin_memory: bool = True,
    **kwargs: Any,
) -> M:
    """Keep just so much in host memory that what a device holds between two steps fits a budget.

    What moves the fewest bytes a step for a byte of the device goes first: the optimizer state of the
    parameters, largest first, then the parameters, largest shard first, ties to the first path; no more of
    that order than it takes. `print(jfsdp.plan(model))` shows it. Without `tx` nothing is known of a state,
    and parameters go with theirs.

    Args:
        model: a module that `shard` was applied to, before its optimizer is made. What a `CPUOffloadPolicy`
            has on the host stays there.
        *args: of a Linen module the inputs that `init` takes, arrays or `jax.ShapeDtypeStruct`s.
        device_bytes: what the parameters, their optimizer state and all other state of the model may take of
            one device, in bytes. Activations, gradients and gathered weights come on top of it.
        tx: the optax optimizer that the parameters are trained by; None if its state does not count.
        wrt: of an NNX module, which Variables `tx` trains, as for `nnx.Optimizer`; None: `nnx.Param`.
        pin_memory: as of `CPUOffloadPolicy`.
        **kwargs: of a Linen module likewise the keyword arguments of `init`.

    Returns:
        NNX: `model`, whose parameters have moved. Linen: a module to use in place of `model`.

    Raises:
        TypeError: `device_bytes` is no number.
        ValueError: it is negative or not a number; or the budget cannot be met: what would stay on the device
            is listed. `model` is not sharded, or is of NNX and inputs are given, or of Linen and `wrt` is
            given. The devices have no such memory. Nothing is changed then.

    Memory: at most `device_bytes` of each device at rest, and as much of the host as went there.
    Communication: none between devices. A step moves what is on the host as `CPUOffloadPolicy` says.

    Reference: ZeRO-Offload (Ren et al., 2021) keeps all optimizer state on the host; PyTorch FSDP2's
    `CPUOffloadPolicy` has no budget.

    Example:
        >>> import jax, jfsdp, optax
        >>> from flax import nnx
        >>> mesh = jax.make_mesh((1,), ("fsdp",))
        >>> model = jfsdp.shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh)
        >>> model = jfsdp.offload_by_budget(model, device_bytes=400, tx=optax.adam(1e-3))
        >>> [row.memory for row in jfsdp.plan(model).rows]
        ['device', 'device, state pinned_host']
    """
    _check_budget(device_bytes)
    if isinstance(model, linen_plan.FSDPModule):
        if wrt is not None:
            raise ValueError("offload_by_budget: wrt chooses Variables of an nnx.Module.")
        return _of_linen(model, args, kwargs, device_bytes, tx, pin_memory)
    if not isinstance(model, nnx.Module) or nnx_tree.mesh_of(model) is None:
        raise ValueError(
            f"offload_by_budget: this {type(model).__name__} is no module that jfsdp.shard was applied to. "
            "Shard it first."
        )
    if args or kwargs:
        raise ValueError(
            "offload_by_budget takes inputs of a Linen module, to initialize it with; this is an nnx.Module. "
            "Leave them out."
        )
    variables = dict(nnx_tree.variables_of(model))
    placements = {
        path: placement
        for path, variable in variables.items()
        if (placement := nnx_tree.placement_of(variable)) is not None
    }
    mesh = nnx_tree.mesh_of(model)
    assert mesh is not None
    others = [v.get_raw_value() for path, v in variables.items() if path not in placements]
    params = nnx.state(model, nnx.Param if wrt is None else wrt)
    count = 0 if tx is None else np.dtype(np.uint32).itemsize  # of steps, in nnx.Optimizer
    moved = _placements(placements, others, params, mesh, device_bytes, tx, pin_memory, count)
    units = nnx_tree.units_of_variables(model)
    for path, placement in moved.items():
        ((_, unit), *_) = units[id(variables[path])]
        move(variables[path], placement, unit.dp)
    return model


def _of_linen(
    model: Any, args: tuple, kwargs: dict, device_bytes: float, tx: Any, pin_memory: bool
) -> Any:
    key = jax.random.key(0)
    described = dict(jax.eval_shape(lambda key: model.init(key, *args, **kwargs), key))
    plan = linen_plan.plan_of(model)
    params = described.pop(linen_plan.PARAMS, {})
    mesh = model.jfsdp.unit.dp.mesh
    placements = {".".join(path): placement for path, placement in plan.placements.items()}
    moved = _placements(placements, [described], params, mesh, device_bytes, tx, pin_memory)
    if not moved:
        return model
    memory = dict(model.jfsdp.memory)
    memory.update({path: (p.memory_kind, p.state_memory_kind) for path, p in moved.items()})
    settings = dataclasses.replace(model.jfsdp, memory=tuple(memory.items()), found=[])
    chosen = linen.shard_module(linen.unsharded_module(model), settings)
    jax.eval_shape(lambda key: chosen.init(key, *args, **kwargs), key)  # so that it has a plan
    return chosen


def _check_budget(device_bytes: Any) -> None:
    if isinstance(device_bytes, bool) or not isinstance(device_bytes, int | float | np.number):
        raise TypeError(f"device_bytes must be a number of bytes, got {device_bytes!r}.")
    if not device_bytes >= 0:
        raise ValueError(f"device_bytes={device_bytes}: a number of bytes of 0 or more.")


def _placements(
    placements: Mapping[str, Placement],
    others: Any,
    params: Any,
    mesh: AnyMesh,
    device_bytes: float,
    tx: Any,
    pin_memory: bool,
    count: int = 0,
) -> dict[str, Placement]:
    """The new placements of the parameters that change theirs, by path.

    Args:
        placements: of all parameters.
        others: the rest of the model's state.
        params: what `tx` trains, as it takes it.
        mesh: the mesh.
        device_bytes: as `offload_by_budget` takes it.
        tx: likewise.
        pin_memory: likewise.
        count: bytes of what is kept beside the state of `tx`.
    """
    kind = PINNED if pin_memory else UNPINNED
    check_offload(CPUOffloadPolicy(pin_memory=pin_memory), mesh)
    states, rest = ({}, 0) if tx is None else _state_bytes(placements, params, mesh, tx)
    items, fixed = [], Counter({"optimizer state that lies as no parameter": rest + count})
    fixed["state that is no parameter"] = sum(map(_bytes_of, jax.tree.leaves(others)))
    for path, placement in placements.items():
        size = placement.shard_bytes(mesh)
        if placement.ignored:
            fixed["parameters in ignored_params, and their state"] += size + states.get(path, 0)
            continue
        if placement.memory_kind is None:
            items.append(Item(path, PARAMETER, size))
        if placement.state_memory_kind is None:
            items.append(Item(path, STATE, states.get(path, 0)))
    if fixed.total() > device_bytes:
        listed = [f"  {size:,} bytes: {what}" for what, size in fixed.items() if size]
        raise ValueError(
            f"offload_by_budget: device_bytes={device_bytes:,} cannot be met. With all else in host memory "
            f"{fixed.total():,} bytes stay on each device:\n" + "\n".join(listed)
        )
    found: dict[str, Placement] = {}
    for item in to_offload(items, fixed.total(), device_bytes):
        placement = found.get(item.path, placements[item.path])
        own = kind if item.what == PARAMETER else placement.memory_kind
        found[item.path] = dataclasses.replace(
            placement, memory_kind=own, state_memory_kind=placement.state_memory_kind or kind
        )
    return found


def _state_bytes(
    placements: Mapping[str, Placement], params: Any, mesh: AnyMesh, tx: Any
) -> tuple[dict[str, int], int]:
    """One device's bytes of the state that lies as each parameter, and of all other state."""
    paths = {tuple(path.split(".")): path for path in placements}
    bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    found, rest = Counter(), 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.eval_shape(tx.init, bare)):
        names = tuple(map(str, names_of(path)))
        owner = owner_of(names, paths)
        size = math.prod(leaf.shape) * itemsize(leaf.dtype)
        placement = None if owner is None else placements[paths[owner]]
        spec = placement and spec_in_shape(placement.spec, placement.shape, leaf.shape)
        if owner is None or spec is None:
            rest += size
        else:
            axes = [axis for entry in spec for axis in axes_of_entry(entry)]
            found[paths[owner]] += size // math.prod(mesh.shape[axis] for axis in axes)
    return dict(found), rest


def _bytes_of(leaf: Any) -> int:
    """One device's bytes of an array, abstract or not."""
    if not is_array(leaf):
        return 0
    sharding = getattr(leaf, "sharding", None)
    shape = leaf.shape if sharding is None else sharding.shard_shape(tuple(leaf.shape))
    return math.prod(shape) * itemsize(leaf.dtype)
