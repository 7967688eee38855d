"""Calling an NNX unit: which view it is called in, and in the global one what crosses the border how."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from jfsdp import region as regions
from jfsdp.auto import is_auto
from jfsdp.borders import Row, fold_key, input_specs, is_key, output_rows, row_of_output
from jfsdp.calls import argument_names, check_argument_names, key_name, through_region
from jfsdp.mesh import DataParallelMesh
from jfsdp.nnx_call import Call, call_auto, call_here, called_by_a_unit
from jfsdp.nnx_tree import check_axes, placement_of, unit_of, walk
from jfsdp.units import Unit

__all__ = ["arguments", "call_unit", "leaf_specs", "row_of_state", "statistics_over"]


def call_unit(module: Any, method: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a method of a unit: through a region in the global view, here in the per-device view."""
    unit = unit_of(module)
    assert unit is not None
    call = Call(module, method, args, kwargs)
    if regions.in_per_device_view(unit.dp, call.name):
        return call_here(call, unit, outermost=not called_by_a_unit())
    if is_auto(unit):
        return call_auto(call, unit)
    return call_in_region(call, unit)


def call_in_region(call: Call, unit: Unit) -> Any:
    """Open the region over the data-parallel axes and call the unit inside."""
    dp = unit.dp
    check_axes(call.objects[0], dp)
    methods = [
        getattr(type(call.objects[0]), name) for name in type(call.objects[0])._jfsdp_methods
    ]
    check_argument_names(call.name, methods, call.objects[2], unit.in_specs)
    inputs = arguments(call)
    given, local_batch = input_specs(call.name, list(inputs.values()), dp, dict(unit.in_specs))
    specs, reduced, keys = leaf_specs(call, unit, dict(zip(inputs, given, strict=True)))
    asked = (*(unit.out_specs[1] if unit.out_specs else ()), *dict(unit.state_specs).values())
    others = [spec for spec in asked if isinstance(spec, PartitionSpec)]
    region = regions.Region(dp, tuple(specs), tuple(reduced), output_rows(dp, others))
    global_statistics: set[int] = set()

    def prepare(module: Any, args: tuple, kwargs: dict) -> None:
        global_statistics.update(statistics_over(dp.axes, (module, args, kwargs)))

    def invoke(module: Any, args: tuple, kwargs: dict) -> Any:
        try:
            return call_here(Call(module, call.method, args, kwargs), unit, outermost=True)
        except ValueError as error:
            if "passed to shard_map" in str(error) or "axis marked as manual" in str(error):
                raise ValueError(
                    f"{call.name} holds a shard_map of its own, and runs in a region where the axes "
                    f"{list(dp.axes)} are manual already. Over other axes: leave its mesh= out. Over these: "
                    'jfsdp.shard(..., partitioning="auto").'
                ) from error
            raise

    def body(leaves: Sequence[jax.Array]) -> tuple[list[Any], list[Any], list[Row]]:
        folded = [fold_key(x, dp) if is_key else x for x, is_key in zip(leaves, keys, strict=True)]
        arrays, states = call.trace(folded, prepare, invoke)
        wanted = call.result.spread(call.name, unit.out_specs)
        kinds = [
            row_of_output(call.name, name, x, local_batch, dp, spec)
            for (name, x), spec in zip(arrays, wanted, strict=True)
        ]
        kinds += [row_of_state(call, v, unit, same=id(v) in global_statistics) for v, _ in states]
        return [x for _, x in arrays], [x for _, x in states], kinds

    return call.finish(*through_region(body, _entering(call, dp), region))


def _entering(call: Call, dp: DataParallelMesh) -> list[jax.Array]:
    leaves = list(call.leaves)
    for index, _, item in _items(call):
        placement = placement_of(item) if isinstance(item, nnx.Variable) else None
        if placement is not None:
            leaves[index] = placement.tied(leaves[index], dp)
    return leaves


def statistics_over(axes: tuple[str, ...], tree: Any) -> set[int]:
    """Let every BatchNorm take its statistics over these axes; the ids of the Variables that hold them."""
    found: set[int] = set()
    for _, node in walk(tree):
        if isinstance(node, nnx.BatchNorm) and node.axis_name is None:
            node.axis_name = axes  # pyright: ignore[reportAttributeAccessIssue]
            found.update((id(node.mean), id(node.var)))
    return found


def arguments(call: Call) -> dict[int, tuple[str, Any]]:
    """The arrays among the arguments, each with its dotted name, by their index in `call.leaves`."""
    names = argument_names(call.method, len(call.objects[1]))
    return {
        index: (_argument_path(names, path), leaf)
        for index, path, leaf in _items(call)
        if not isinstance(leaf, nnx.Variable) and key_name(path[0]) != 0
    }


def _items(call: Call) -> Iterator[tuple[int, Any, Any]]:
    """The Variables and arrays of a call, each with the index of its first leaf and its path."""
    items, _ = jax.tree_util.tree_flatten_with_path(
        call.state, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    index = 0
    for path, item in items:
        yield index, path, item
        index += len(jax.tree.leaves(item))


def leaf_specs(
    call: Call, unit: Unit, inputs: Mapping[int, PartitionSpec]
) -> tuple[list[PartitionSpec], list[bool], list[bool]]:
    """For each leaf its spec, whether the unit reduces its gradient, whether it is a key to fold.

    Args:
        call: the call.
        unit: the settings of the unit that is called.
        inputs: how each of `arguments` enters.
    """
    specs, reduced, keys = [], [], []
    for index, path, leaf in _items(call):
        variable = leaf if isinstance(leaf, nnx.Variable) else None
        placement = placement_of(variable) if variable is not None else None
        if placement is not None:
            spec = placement.manual_spec()
        elif variable is not None:
            spec = _spec_of_state(call, path, variable, unit)
        else:
            spec = inputs.get(index, PartitionSpec())
        arrays = jax.tree.leaves(leaf)
        specs += [spec] * len(arrays)
        reduced += [placement is not None] * len(arrays)
        # A key that all devices share would give every shard the same dropout mask.
        folds = isinstance(variable, nnx.RngKey) or (index in inputs and is_key(leaf))
        keys += [folds and not any(spec)] * len(arrays)
    return specs, reduced, keys


def _argument_path(names: list[str], path: tuple) -> str:
    where, *rest = (key_name(key) for key in path)
    first = names[rest[0]] if where == 1 else rest[0]
    return ".".join(map(str, (first, *rest[1:])))


def _state_spec(variable: nnx.Variable, unit: Unit) -> PartitionSpec | None:
    for kind, spec in unit.state_specs:
        if isinstance(variable, kind):
            # A scalar has no batch: the position of a decode cache is the same on all devices.
            return spec if variable.shape else PartitionSpec()
    return None


def _spec_of_state(call: Call, path: tuple, variable: nnx.Variable, unit: Unit) -> PartitionSpec:
    asked = _state_spec(variable, unit)
    if asked is None and isinstance(variable, nnx.Cache) and variable.shape:
        name = ".".join(str(key_name(key)) for key in path[1:])
        raise ValueError(
            f"{call.name}: {name} (shape {tuple(variable.shape)}) is a decode cache, with one row for "
            "each element of the batch. Say how it lies with "
            "jfsdp.shard(..., state_specs={nnx.Cache: PartitionSpec("
            f'{", ".join(map(repr, unit.dp.batch_spec))})}}), or use partitioning="auto".'
        )
    return asked or PartitionSpec()


def row_of_state(call: Call, variable: nnx.Variable, unit: Unit, same: bool) -> Row:
    """How a Variable that the call has changed leaves; `same` if every device has computed the same value."""
    asked = _state_spec(variable, unit)
    if asked is not None:
        return Row(asked)
    if same or isinstance(variable, nnx.RngCount):
        return Row(PartitionSpec())
    if isinstance(variable, nnx.BatchStat):
        return Row(PartitionSpec(), mean=True)
    raise ValueError(
        f"{call.name} changes state of the type {type(variable).__name__} (shape "
        f"{tuple(variable.shape)}), and jfsdp cannot know how it lies on the data-parallel devices. Say "
        f"so with jfsdp.shard(..., state_specs={{{type(variable).__name__}: PartitionSpec(...)}}): "
        "the data-parallel axes where dimension 0 is the batch, PartitionSpec() where every device "
        "computes the same value."
    )
