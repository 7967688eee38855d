"""What a step's policies and arguments say, in the words in which `inspect` reads programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jfsdp.activations import names_of
from jfsdp.inspect import Argument, Promise, Wire
from jfsdp.layout import Dims, axes_of_entry
from jfsdp.placement import Placement
from jfsdp.plan import PlanRow
from jfsdp.units import Unit, is_array
from jfsdp.wires import own_wires

__all__ = ["arguments", "minima", "promise", "state_axes"]

Kind = Literal["parameters", "optimizer", "rest"]


def promise(
    row: PlanRow, unit: Unit, placement: Placement, is_root: bool, state_axes: Sequence[str] = ()
) -> Promise:
    """What is promised of one parameter's collectives.

    Args:
        row: the parameter's line in the plan.
        unit: the unit that gathers it.
        placement: where it lies.
        is_root: whether that unit is the outermost one.
        state_axes: the axes that its optimizer state lies on beside those of the parameter.
    """
    wires = {kind: Wire(*wire) for kind, wire in unit.stated(placement, is_root).items()}
    again = unit.stated_again(placement, is_root)
    own = own_wires(unit, placement, is_root)
    shape, stacked = placement.whole_shape, placement.stacked_axis

    def split(whole: tuple[int, ...], dims: Dims) -> tuple[int, ...]:
        axes_of = dict(dims)
        return tuple(n // unit.dp.size_of(axes_of.get(dim, ())) for dim, n in enumerate(whole))

    # Arrays may still be whole over the axes that are left to the compiler.
    wholes = [shape, split(shape, placement.others_at_rank(len(shape)))]
    return Promise(
        leaf=row.path,
        shapes=_with_layers(wholes, stacked),
        shards=_with_layers([split(whole, placement.dims) for whole in wholes], stacked),
        gather=own.get("all-gather") or wires.get("all-gather"),
        scatter=own.get("reduce-scatter") or wires.get("reduce-scatter"),
        sum=wires.get("all-reduce"),
        unit=row.unit,
        again=own.get("again") or (None if again is None else Wire(*again)),
        update=_update(row, unit, placement, tuple(state_axes)),
        **_on_host(row, unit, placement, is_root),
    )


def _on_host(row: PlanRow, unit: Unit, placement: Placement, is_root: bool) -> dict[str, Any]:
    """What is promised of host memory: what lies there, and what comes from there and goes back."""
    size, there = float(row.bytes_per_device), placement.memory_kind is not None
    # Kept over some axes only, it is gathered again from what the device keeps.
    again = unit.reshards(is_root) and not isinstance(unit.reshard_after_forward, tuple)
    trained = jnp.issubdtype(placement.dtype, jnp.inexact) and not placement.ignored
    return {
        "shape": placement.shape,
        "memory_kind": placement.memory_kind,
        "state_memory_kind": placement.state_memory_kind,
        "activations": names_of(unit.offload_policy),
        "bytes_at_rest": size,
        "fetched": size * (1 + again) * there,
        "returned": size * trained * there,
    }


def _update(row: PlanRow, unit: Unit, placement: Placement, axes: tuple[str, ...]) -> Wire | None:
    """The gather of the updated parameter over axes that its optimizer state is sharded over beside it."""
    parts = unit.dp.size_of(axes)
    if parts == 1:
        return None
    return Wire(axes, np.dtype(placement.dtype).name, row.bytes_per_device * (parts - 1) / parts)


def state_axes(given: Sequence[Argument], placement: Placement) -> tuple[str, ...]:
    """The axes that all optimizer state of a parameter's shape lies on beside those of the parameter."""
    held = {axis for axes in placement.entries for axis in axes}
    found = [
        tuple(axis for axis in leaf.axes if axis not in held)
        for leaf in given
        if leaf.kind == "optimizer" and leaf.shape == placement.shape and leaf.shape
    ]
    return found[0] if found and all(axes == found[0] for axes in found) else ()


def _with_layers(
    shapes: Iterable[tuple[int, ...]], stacked: int | None
) -> tuple[tuple[int, ...], ...]:
    """The shapes, each once, and if they are of stacks those of one layer."""
    found = list(dict.fromkeys(shapes))
    if stacked is not None:
        axis = stacked % len(found[0])
        found += [(*shape[:axis], *shape[axis + 1 :]) for shape in found]
    return tuple(found)


def arguments(tree: Any, kind_of: Callable[[Any], Kind | None]) -> list[Argument]:
    """The arrays of a step's arguments, and what each is for.

    Args:
        tree: the arguments.
        kind_of: for any node of the tree: "parameters", "optimizer" or "rest" if that is what all arrays in
            it are, else None to look inside.

    Returns:
        One entry per array. An array that is met twice counts once.
    """
    found: list[Argument] = []
    seen: set[int] = set()
    nodes, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: kind_of(node) is not None
    )
    for path, node in nodes:
        if id(node) in seen:
            continue
        seen.add(id(node))
        for inner, leaf in jax.tree_util.tree_flatten_with_path(node)[0]:
            if is_array(leaf):
                name = jax.tree_util.keystr((*path, *inner), simple=True, separator=".")
                found.append(_argument(name, kind_of(node) or "rest", leaf))
    return found


def _argument(name: str, kind: Kind, leaf: Any) -> Argument:
    sharding = getattr(leaf, "sharding", None)
    shape = tuple(leaf.shape)
    local = shape if sharding is None else sharding.shard_shape(shape)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(local, leaf.dtype))
        size, dtype = math.prod(data.shape) * data.dtype.itemsize, str(leaf.dtype)
    else:
        size, dtype = math.prod(local) * np.dtype(leaf.dtype).itemsize, np.dtype(leaf.dtype).name
    spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
    axes = tuple(axis for entry in spec for axis in axes_of_entry(entry))
    memory = getattr(sharding, "memory_kind", None)
    return Argument(name, kind, shape, dtype, size, memory, axes, local)


def minima(
    given: Sequence[Argument],
    placements: Iterable[tuple[Placement, int]],
    parts_of: Callable[[Placement], int],
) -> tuple[int, int, int, int]:
    """The bytes of the parameters and of the optimizer state that one device keeps by the policies.

    Optimizer state of a parameter's shape lies as the parameter does, or as it was made to lie on more axes;
    other state is on every device.

    Args:
        given: the step's arguments.
        placements: of each parameter where it lies and the bytes of one device's shard.
        parts_of: into how many parts a parameter's state is split beside the parameter itself.

    Returns:
        Parameters and state in its own memory, then parameters and state in host memory.
    """
    pairs = list(placements)
    shares = {
        placement.shape: size / placement.bytes / parts_of(placement)
        for placement, size in pairs
        if placement.bytes
    }
    kinds = {placement.shape: placement.state_memory_kind for placement, _ in pairs}
    parameters, state = [0.0, 0.0], [0.0, 0.0]
    for placement, size in pairs:
        parameters[placement.memory_kind is not None] += size
    for leaf in given:
        if leaf.kind == "optimizer":
            size = math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
            there = kinds.get(leaf.shape) is not None
            state[there] += size * shares.get(leaf.shape, 1)
    return round(parameters[0]), round(state[0]), round(parameters[1]), round(state[1])
