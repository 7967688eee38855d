"""What a loss of `value_and_grad` takes and returns: batches and copies in, a mean or a weighted sum out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jfsdp.borders import Row, asked_spec, check_spec, input_specs, is_key, row_of_output
from jfsdp.calls import Result
from jfsdp.mesh import DataParallelMesh
from jfsdp.placement import Placement
from jfsdp.units import Unit, is_array

__all__ = [
    "Input",
    "Loss",
    "Options",
    "arguments",
    "check_floating",
    "rows_of_aux",
    "split_result",
]


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of one `jfsdp.value_and_grad` call."""

    microbatches: int = 1
    sync: str = "every"
    has_aux: bool = False
    wrt: Any = None
    in_specs: tuple[tuple[str, PartitionSpec], ...] = ()
    out_specs: tuple[Any, tuple[PartitionSpec | str, ...]] | None = None


@dataclasses.dataclass(frozen=True)
class Input:
    """One array of the call.

    Attributes:
        spec: how it enters the region.
        kind: "parameter"; "batch", split into microbatches; "state", handed from one microbatch to the next;
            "key", another one in each microbatch; "copy", the same in all.
        path: for messages.
        shard: the unit that gathers the parameter and where it lies; None if it is no unit's.
        folds: whether a key is folded with the device's index.
    """

    spec: PartitionSpec
    kind: str
    path: str = ""
    shard: tuple[Unit, Placement] | None = None
    folds: bool = False


@dataclasses.dataclass(frozen=True)
class Loss:
    """What one microbatch gives.

    Attributes:
        total: the loss, or the sum of a weighted one.
        weight: the sum of the weights; None if the loss is a mean.
        aux: the arrays of what the loss returns beside.
        changed: new values of state by the index of the leaf.
    """

    total: jax.Array
    weight: jax.Array | None
    aux: list[jax.Array]
    changed: dict[int, jax.Array]


def split_result(name: str, result: Any, has_aux: bool) -> tuple[jax.Array, Any, Any]:
    """Take apart what a loss returns: the loss or its sum, the sum of weights or None, aux or None.

    Raises:
        TypeError: it is none of `loss`, `(sum, weight)`, `(loss, aux)`, `((sum, weight), aux)`.
    """
    wanted = "a floating scalar, or (sum, weight)"
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(
            f"{name}: with has_aux=True it must return (loss, aux), where loss is {wanted}; got "
            f"{_described(result)}."
        )
    loss, aux = result if has_aux else (result, None)
    total, weight = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, None)
    if not _is_scalar(total, jnp.floating) or not (weight is None or _is_scalar(weight, np.number)):
        hint = "" if has_aux else " For further results pass has_aux=True."
        raise TypeError(f"{name} must return {wanted}; got {_described(loss)}.{hint}")
    return jnp.asarray(total), weight, aux


def _is_scalar(value: Any, kind: Any) -> bool:
    if is_array(value):
        return not value.ndim and jnp.issubdtype(value.dtype, kind)
    return isinstance(value, int | float)


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_described, value))})"
    return str(jax.typeof(value)) if is_array(value) else type(value).__name__


def arguments(
    name: str,
    given: Mapping[int, tuple[str, Any]],
    dp: DataParallelMesh,
    in_specs: tuple[tuple[str, PartitionSpec], ...],
    per_device: bool,
) -> tuple[dict[int, Input], int | None]:
    """What each array among the arguments is, by the index of its leaf, and the rows of one device.

    Raises:
        ValueError: batches differ in size, or do not divide by the devices; `in_specs` does not fit.
    """
    asked = dict(in_specs)
    for key, spec in in_specs:
        check_spec(f"{name}: in_specs[{key!r}]", spec, dp)
    batches = {
        index: (where, array)
        for index, (where, array) in given.items()
        if array.ndim and (asked_spec(where, asked) or dp.batch_spec) == dp.batch_spec
        if asked_spec(where, asked) != PartitionSpec()
    }
    if per_device or dp.size == 1:
        specs = [dp.batch_spec if index in batches else PartitionSpec() for index in given]
        sizes = {array.shape[0] for _, array in batches.values()}
        if len(sizes) > 1:
            listed = "\n".join(f"  {where}: shape {x.shape}" for where, x in batches.values())
            raise ValueError(
                f"{name}: its arguments do not agree on the batch, the size of dimension 0:\n{listed}\n"
                "Name those that are no batch in in_specs, with PartitionSpec()."
            )
        rows = next(iter(sizes), None)
    else:
        specs, rows = input_specs(name, list(given.values()), dp, asked)
    found = {}
    for (index, (where, array)), spec in zip(given.items(), specs, strict=True):
        key = is_key(array)
        kind = "batch" if index in batches else "key" if key else "copy"
        folds = key and not any(spec) and not per_device
        found[index] = Input(spec, kind, where, folds=folds)
    return found, rows


def check_floating(name: str, leaves: Iterable[tuple[str, Any]], remedy: str) -> None:
    """Check that leaves that are to be differentiated can be.

    Raises:
        TypeError: some are not floating; their paths are listed.
    """
    wrong = [
        f"  {path}: {leaf.dtype}"
        for path, leaf in leaves
        if not jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    if wrong:
        listed = "\n".join(wrong)
        raise TypeError(
            f"{name}: these have no gradient, because they are not floating:\n{listed}\n{remedy}"
        )


def rows_of_aux(
    name: str,
    aux: Result,
    rows: int | None,
    dp: DataParallelMesh,
    out_specs: tuple[Any, Sequence[PartitionSpec | str]] | None,
) -> list[tuple[Row, str]]:
    """How the arrays of aux leave, and how those of several microbatches become one.

    Raises:
        ValueError: an array is neither a batch nor a floating scalar, and `out_specs` does not say; or it
            says something else than a copy or a batch.
    """
    found = []
    for (where, array), spec in zip(aux.arrays, aux.spread(name, out_specs), strict=True):
        if spec is not None and spec not in (PartitionSpec(), dp.batch_spec):
            raise ValueError(
                f"{name}: out_specs has {spec} for aux{where}. Of several microbatches jfsdp joins batches, "
                f"{dp.batch_spec}, and averages the rest, PartitionSpec()."
            )
        row = row_of_output(name, where, array, rows, dp, spec, "jfsdp.value_and_grad")
        floating = jnp.issubdtype(array.dtype, jnp.inexact)
        batch = bool(array.ndim) if spec is None else bool(spec)
        found.append((row, "join" if batch else "mean" if floating else "last"))
    return found
