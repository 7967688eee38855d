"""How values cross the border of a region: which split, which are copies, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jfsdp.layout import axes_of_entry
from jfsdp.mesh import DataParallelMesh
from jfsdp.units import is_array

__all__ = [
    "Row",
    "asked_spec",
    "check_spec",
    "fold",
    "fold_key",
    "freeze_out_specs",
    "freeze_specs",
    "input_specs",
    "is_key",
    "is_spec",
    "next_batch",
    "output_rows",
    "row_of_output",
]


@dataclasses.dataclass(frozen=True)
class Row:
    """A kind of result: the spec it leaves with, and whether copies are averaged."""

    spec: PartitionSpec
    mean: bool = False


def is_key(value: Any) -> bool:
    """Whether `value` is a typed PRNG key or an array of them."""
    return is_array(value) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def fold_key(key: jax.Array, dp: DataParallelMesh) -> jax.Array:
    """A PRNG key of this device alone, or an array of them; old-style keys have their data last."""
    return fold(key, jax.lax.axis_index(dp.axes))


def fold(key: jax.Array, number: Any) -> jax.Array:
    """`jax.random.fold_in` of one key, or of each in an array of them."""
    fold_in = jax.random.fold_in
    for _ in range(key.ndim if is_key(key) else key.ndim - 1):
        fold_in = jax.vmap(fold_in, in_axes=(0, None))
    return fold_in(key, number)


def input_specs(
    caller: str,
    inputs: Sequence[tuple[str, Any]],
    dp: DataParallelMesh,
    asked: Mapping[str, PartitionSpec],
) -> tuple[list[PartitionSpec], int | None]:
    """Decide how the arrays among a call's arguments enter the region.

    Scalars and single keys are copied. Arrays split on dimension 0, which must be the same batch in
    all of them and divide by the number of data-parallel devices. `asked` says otherwise by argument.

    Args:
        caller: the call, for messages.
        inputs: (name, array) of every array; the name is the argument's, dotted into its pytree.
        dp: the mesh and its data-parallel axes.
        asked: `in_specs`: PartitionSpec by argument name or dotted path into it.

    Returns:
        A spec for each input, and the local batch size, None if nothing splits on dimension 0.

    Raises:
        ValueError: batches differ, do not divide, or `asked` does not fit. All arguments at fault
            are listed.
    """
    _check_asked(caller, inputs, dp, asked)
    specs: list[PartitionSpec] = []
    batches: dict[str, tuple[int, ...]] = {}
    for name, array in inputs:
        spec = asked_spec(name, asked)
        if spec is None and array.ndim:
            spec = dp.batch_spec
        if array.ndim and spec and spec == dp.batch_spec:
            batches[name] = tuple(array.shape)
        specs.append(spec if spec is not None else PartitionSpec())
    return specs, _local_batch(caller, batches, dp)


def _local_batch(
    caller: str, batches: dict[str, tuple[int, ...]], dp: DataParallelMesh
) -> int | None:
    sizes = {shape[0] for shape in batches.values()}
    listed = "\n".join(f"  {name}: shape {shape}" for name, shape in batches.items())
    if len(sizes) > 1:
        raise ValueError(
            f"{caller}: its arguments do not agree on the batch, the size of dimension 0:\n{listed}\n"
            "Arguments that are no batch (positions, masks, tables) need in_specs, for example "
            "jfsdp.shard(..., in_specs={'"
            + next(reversed(batches))
            + "': PartitionSpec()}) for a copy "
            "on every device."
        )
    if not sizes:
        return None
    (size,) = sizes
    if size % dp.size:
        raise ValueError(
            f"{caller}: the batch is {size}, which does not divide over {dp.size} data-parallel devices "
            f"({', '.join(f'{axis}={dp.mesh.shape[axis]}' for axis in dp.axes)}):\n{listed}\n"
            f"Use a batch of {next_batch(size, dp.size)}, or if this is no batch, say how it lies with "
            "in_specs, for example jfsdp.shard(..., in_specs={'"
            + next(iter(batches))
            + "': PartitionSpec()}) for a copy on every device."
        )
    return size // dp.size


def next_batch(size: int, parts: int) -> int:
    """The next larger batch that divides into `parts`."""
    return -(-size // parts) * parts


def asked_spec(name: str, asked: Mapping[str, PartitionSpec]) -> PartitionSpec | None:
    """What `in_specs` says of an argument, by its dotted name or the beginning of it."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        spec = asked.get(".".join(parts[:length]))
        if spec is not None:
            return spec
    return None


def _check_asked(
    caller: str,
    inputs: Sequence[tuple[str, Any]],
    dp: DataParallelMesh,
    asked: Mapping[str, PartitionSpec],
) -> None:
    wrong = [
        f"{caller}: in_specs[{key!r}] = {spec}{fault}"
        for key, spec in asked.items()
        for name, array in inputs
        if name == key or name.startswith(f"{key}.")
        for fault in _misfits(name, array, spec, dp)
    ]
    if wrong:
        raise ValueError("\n".join(wrong))


def check_spec(what: str, spec: Any, dp: DataParallelMesh | None) -> None:
    """Check that `spec` is a PartitionSpec over data-parallel axes only.

    Raises:
        TypeError: it is none.
        ValueError: it names another axis.
    """
    if not isinstance(spec, PartitionSpec):
        raise TypeError(f"{what} must be a jax.sharding.PartitionSpec, got {spec!r}.")
    for axis in _axes(spec):
        if dp is not None and axis not in dp.axes:
            raise ValueError(
                f"{what} = {spec} names the axis {axis!r}; only the data-parallel axes "
                f"{list(dp.axes)} can be named, the others are left to XLA."
            )


def freeze_specs(
    name: str, asked: Any, key_type: type, dp: DataParallelMesh | None = None
) -> tuple[tuple[Any, PartitionSpec], ...]:
    """Check a dict of PartitionSpecs over data-parallel axes and make it hashable.

    Without `dp` the axes are left to be checked where they are known.

    Raises:
        TypeError: it is no dict, a key is not of `key_type`, or a value no PartitionSpec.
        ValueError: a spec names another axis.
    """
    if asked is None:
        return ()
    if not isinstance(asked, Mapping):
        raise TypeError(f"{name} must be a dict with a PartitionSpec for each key, got {asked!r}.")
    for key, spec in asked.items():
        if not isinstance(key, key_type):
            types = (
                "Variable types" if key_type is type else "collections, or dotted paths in them,"
            )
            wanted = types if name == "state_specs" else "argument names"
            raise TypeError(f"{name} must have {wanted} as keys, got {key!r}.")
        check_spec(f"{name}[{getattr(key, '__name__', repr(key))}]", spec, dp)
    return tuple(asked.items())


def freeze_out_specs(
    asked: Any, dp: DataParallelMesh | None = None
) -> tuple[Any, tuple[PartitionSpec | str, ...]] | None:
    """Check a pytree of PartitionSpecs and None, and make it hashable: (treedef, leaves).

    Without `dp` the axes are left to be checked where they are known.

    Raises:
        TypeError: a leaf is neither.
        ValueError: a spec names an axis that is not data-parallel.
    """
    if asked is None:
        return None
    leaves, treedef = jax.tree.flatten(
        asked, is_leaf=lambda x: x is None or isinstance(x, PartitionSpec)
    )
    for spec in leaves:
        if spec is not None:
            check_spec("out_specs", spec, dp)
    return treedef, tuple(RULE if spec is None else spec for spec in leaves)


RULE = "the rule"
"""Stands for None in frozen out_specs: a result may hold None itself, which is no leaf."""


def is_spec(value: Any) -> bool:
    """Whether `value` is a leaf of frozen out_specs."""
    return value is RULE or isinstance(value, PartitionSpec)


def _misfits(name: str, array: Any, spec: PartitionSpec, dp: DataParallelMesh) -> list[str]:
    """What keeps an argument from being split as `spec` says."""
    if len(spec) > array.ndim:
        return [f" has more entries than {name} of shape {tuple(array.shape)} has dimensions."]
    parts = [dp.size_of(_axes((entry,))) for entry in spec]
    return [
        f": dimension {dim} of {name} (shape {tuple(array.shape)}) does not divide by {count}."
        for dim, count in enumerate(parts)
        if array.shape[dim] % count
    ]


def _axes(spec: Iterable[Any]) -> tuple[str, ...]:
    return tuple(axis for entry in spec for axis in axes_of_entry(entry))


def output_rows(dp: DataParallelMesh, others: Iterable[PartitionSpec]) -> tuple[Row, ...]:
    """All kinds of results that can leave: batches, means, copies, and those of other specs."""
    copy = PartitionSpec()
    rows = [Row(dp.batch_spec), Row(copy, mean=True), Row(copy)]
    for spec in others:
        rows += [Row(spec), Row(spec, mean=True)]
    return tuple(dict.fromkeys(rows))


def row_of_output(
    caller: str,
    name: str,
    array: Any,
    local_batch: int | None,
    dp: DataParallelMesh,
    asked: Any,
    taken_by: str = "jfsdp.shard",
) -> Row:
    """Decide how one array of a call's result leaves the region.

    Args:
        caller: the call, for messages.
        name: where the array stands in the result.
        array: the local array.
        local_batch: size of dimension 0 of the split inputs on one device, None without any.
        dp: the mesh and its data-parallel axes.
        asked: the PartitionSpec of `out_specs` for it, or None.
        taken_by: the function that takes `out_specs`, for messages.

    Raises:
        ValueError: it is neither a batch nor a floating scalar, and `out_specs` does not say.
    """
    floating = jnp.issubdtype(array.dtype, jnp.inexact)
    if asked is not None and len(asked) > array.ndim:
        raise ValueError(
            f"{caller}: out_specs has {asked} for its result{name}, whose shape on each device is "
            f"{tuple(array.shape)}: more entries than dimensions."
        )
    if asked is not None:
        return Row(asked, mean=floating and asked != dp.batch_spec)
    if array.ndim and array.shape[0] == local_batch:
        return Row(dp.batch_spec)
    if not array.ndim and floating:
        return Row(PartitionSpec(), mean=True)
    raise ValueError(
        f"{caller}: its result{name} has shape {tuple(array.shape)} and dtype {array.dtype} on each of "
        f"{dp.size} data-parallel devices, whose local batch is {local_batch}. It is neither a batch "
        "(dimension 0 = local batch: concatenated) nor a floating scalar (averaged). Say what it is with "
        f"{taken_by}(..., out_specs=...): PartitionSpec({', '.join(map(repr, dp.batch_spec))}) where "
        "dimension 0 is split, PartitionSpec() where every device has the same value or its mean is meant."
    )
