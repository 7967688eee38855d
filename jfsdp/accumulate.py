"""Loss and gradients of a step over microbatches: what is accumulated in which dtype, and reduced when.

The region is opened at the loss: inside, gradients of several microbatches can be added up before they are
reduced over all axes, which the program round an ordinary call cannot say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jfsdp import region as regions
from jfsdp.borders import Row, fold, fold_key, next_batch
from jfsdp.calls import sorted_into
from jfsdp.explicit import enter, leave
from jfsdp.hidden import Shard
from jfsdp.losses import Input, Loss, Options
from jfsdp.mesh import DataParallelMesh
from jfsdp.trained import Trained
from jfsdp.varying import is_tracked, varying_over

__all__ = ["Results", "Step", "differentiate"]

MICROBATCHES = "jfsdp_microbatches"
"""Scope round all microbatches, by which a program tells how often it is to gather and to reduce."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A call of `jfsdp.value_and_grad`, taken apart.

    Attributes:
        name: for messages.
        dp: the mesh and its data-parallel axes.
        inputs: what each leaf is.
        trained: the indices of the leaves that are differentiated.
        rows: rows of the batch on one device; None without a batch.
        run: the loss on local leaves, where every parameter of a unit is a `Shard`.
        rows_of_aux: how the arrays of `Loss.aux` leave, given the rows of one microbatch, and how those of
            several become one: "join", "mean" or "last".
        rows_of_state: how state leaves, by the index of its leaf, once `run` has changed it.
        kinds: all kinds of results that can leave.
    """

    name: str
    dp: DataParallelMesh
    inputs: Sequence[Input]
    trained: Sequence[int]
    rows: int | None
    run: Callable[[list[Any]], Loss]
    rows_of_aux: Callable[[int | None], list[tuple[Row, str]]]
    rows_of_state: Callable[[], dict[int, Row]]
    kinds: tuple[Row, ...]


@dataclasses.dataclass(frozen=True)
class Results:
    """The loss, the gradient of each trained leaf, the arrays of aux, and changed state by its index."""

    loss: jax.Array
    gradients: list[jax.Array]
    aux: list[jax.Array]
    changed: dict[int, jax.Array]


def differentiate(step: Step, leaves: Sequence[jax.Array], options: Options) -> Results:
    """The loss and its gradients: in a region in the global view, where we are in the per-device one."""
    _check_batch(step, options.microbatches)
    dp, specs = step.dp, [one.spec for one in step.inputs]
    region = regions.Region(dp, tuple(specs), (True,) * len(specs), step.kinds)
    order: list[tuple[int, int]] = []
    kinds: list[Row] = []
    changed: list[int] = []

    def local(values: Sequence[jax.Array]) -> Any:
        loss, gradients, aux, state = _on_this_device(step, values, options, region)
        kinds[:] = [row for _, row in [*aux, *state.values()]]
        changed[:] = state
        results = [x for x, _ in [*aux, *state.values()]]
        rows, order[:] = sorted_into(region.rows, results, kinds)
        return loss, gradients, rows

    if regions.in_per_device_view(dp, step.name):
        loss, gradients, rows = local(leaves)
    else:
        trained = [specs[index] for index in step.trained]
        mapped = region.map(local, specs, (PartitionSpec(), trained, region.out_specs))
        entering = [enter(x, spec, dp) for x, spec in zip(leaves, specs, strict=True)]
        loss, gradients, rows = mapped(entering)
        loss = leave(loss, PartitionSpec(), dp, leaves)
        for place, index in enumerate(step.trained):
            one = step.inputs[index]
            gradient = leave(gradients[place], one.spec, dp, [leaves[index]])
            gradients[place] = gradient if one.shard is None else one.shard[1].tied(gradient, dp)
    values = [rows[row][column] for row, column in order]
    count = len(values) - len(changed)
    aux = [leave(x, row.spec, dp, leaves) for x, row in zip(values[:count], kinds, strict=False)]
    return Results(loss, gradients, aux, dict(zip(changed, values[count:], strict=True)))


def _check_batch(step: Step, count: int) -> None:
    if count == 1:
        return
    if step.rows is None:
        raise ValueError(
            f"{step.name}: microbatches={count}, but none of its arguments is a batch to split: there is no "
            "array with a dimension 0 beside what in_specs copies."
        )
    if step.rows % count:
        parts = step.dp.size * count
        size = step.rows * step.dp.size
        raise ValueError(
            f"{step.name}: the batch is {size}, {step.rows} on each of {step.dp.size} data-parallel "
            f"devices, which does not divide into microbatches={count}. Use a batch of "
            f"{next_batch(size, parts)}, or a number of microbatches that divides {step.rows}."
        )


# --------------------------------------------------------------------------------------------------
# On one device

Left = tuple[jax.Array, Row]
"""A result, and how it leaves the region."""


def _on_this_device(
    step: Step, values: Sequence[jax.Array], options: Options, region: regions.Region
) -> tuple[jax.Array, list[jax.Array], list[Left], dict[int, Left]]:
    """The loss, the reduced gradients, aux, and changed state by the index of its leaf."""
    count, dp, inputs = options.microbatches, step.dp, step.inputs
    values = [fold_key(x, dp) if one.folds else x for x, one in zip(values, inputs, strict=True)]
    rows = None if step.rows is None else step.rows // count
    split = {
        index: values[index].reshape(count, -1, *values[index].shape[1:])
        for index, one in enumerate(inputs)
        if one.kind == "batch"
    }
    state = [index for index, one in enumerate(inputs) if one.kind == "state"]
    trained = [
        Trained(index, inputs[index], values[index], dp, options.sync) for index in step.trained
    ]
    seen = _Seen()

    def microbatch(carry: Any, number: Any, batch: dict[int, jax.Array]) -> tuple[Any, Any]:
        accumulated, sums, kept = carry
        given = dict(enumerate(values)) | dict(zip(state, kept, strict=True)) | batch
        if count > 1:
            given = _another(given, inputs, number, sums)

        def differentiated(points: list[jax.Array]) -> tuple[jax.Array, Any]:
            held = [_held(given[index], one) for index, one in enumerate(inputs)]
            for one, point in zip(trained, points, strict=True):
                held[one.index] = one.held(given[one.index], point)
            loss = step.run(held)
            seen.note(loss, dp.size * count, rows)
            weight = 1 if loss.weight is None else jax.lax.stop_gradient(loss.weight)
            total = loss.total.astype(jnp.float32)
            after = [_as_before(inputs[i], loss.changed.get(i), given[i]) for i in state]
            sums = jnp.stack([total, jnp.asarray(weight, jnp.float32)])
            return total / seen.parts, (sums, after, loss.aux)

        both = zip(trained, accumulated, strict=True)
        points = typed([one.point(given[one.index], x) for one, x in both])
        (_, rest), gradients = jax.value_and_grad(differentiated, has_aux=True)(points)
        if count > 1 and options.sync == "every":
            # XLA for TPUs would take the scatter out of the loop and add up whole gradients (v5e:2x4, jax
            # 0.12.0.1): the memory of "last", and wrong for embeddings (openxla/xla#49143).
            gradients = [jax.lax.optimization_barrier(gradient) for gradient in gradients]
        added = [x + gradient for x, gradient in zip(accumulated, gradients, strict=True)]
        return typed((added, sums + rest[0], rest[1])), rest[2]

    # In a shard_map of the user's jax may track over which axes arrays differ: here over all, until reduced.
    tracked = [axis for axis in dp.larger_than_one(dp.axes) if is_tracked(axis)]

    def typed(tree: Any) -> Any:
        return jax.tree.map(lambda x: varying_over(x, tracked), tree)

    start = typed(([one.zeros() for one in trained], jnp.zeros(2), [values[i] for i in state]))
    with jax.named_scope(f"{MICROBATCHES}[{count},{options.sync}]"):
        if count == 1:
            first = {index: x[0] for index, x in split.items()}
            (accumulated, sums, after), aux = microbatch(start, 0, first)
            aux = [x[None] for x in aux]
        else:
            (accumulated, sums, after), aux = jax.lax.scan(
                lambda carry, each: microbatch(carry, *each), start, (jnp.arange(count), split)
            )
    axes = dp.larger_than_one(dp.axes)
    sums = jax.lax.psum(sums, axes) if axes else sums
    loss = sums[0] / (sums[1] if seen.weighted else dp.size * count)
    factor = seen.parts / sums[1] if seen.weighted else None
    gradients = [one.reduced(x, factor) for one, x in zip(trained, accumulated, strict=True)]
    kinds = step.rows_of_aux(rows)
    left = [
        (_averaged(_combined(x, how), row, region), row)
        for x, (row, how) in zip(aux, kinds, strict=True)
    ]
    rows_of_state = step.rows_of_state()
    new = {
        index: (_averaged(x, rows_of_state[index], region), rows_of_state[index])
        for index, x in zip(state, after, strict=True)
        if index in seen.changed
    }
    return loss, gradients, left, new


class _Seen:
    """What is known of a loss once it was traced."""

    weighted = False
    parts = 1
    """What the loss of a microbatch is divided by before it is differentiated.

    Of a mean the number of microbatches on all devices; of a sum also their rows, so that its gradients are
    about as large as those of a mean, whatever they are reduced in.
    """
    changed: frozenset[int] = frozenset()

    def note(self, loss: Loss, microbatches: int, rows: int | None) -> None:
        self.weighted = loss.weight is not None
        self.parts = microbatches * ((rows or 1) if self.weighted else 1)
        self.changed = frozenset(loss.changed)


def _held(value: jax.Array, one: Input) -> Any:
    return value if one.shard is None else Shard(value, one.shard[1])


def _another(
    given: dict[int, jax.Array], inputs: Sequence[Input], number: jax.Array, sums: jax.Array
) -> dict[int, jax.Array]:
    """What differs in each of several microbatches."""
    # Tied to the loop: XLA would take the gathers out of it, and keep all whole weights alive.
    shards = {index: given[index] for index, one in enumerate(inputs) if one.shard is not None}
    tied, _ = jax.lax.optimization_barrier((shards, sums))
    keys = [index for index, one in enumerate(inputs) if one.kind == "key"]
    return given | tied | {index: fold(given[index], number) for index in keys}


def _as_before(one: Input, new: jax.Array | None, old: jax.Array) -> jax.Array:
    if new is None:
        return old
    if (new.shape, new.dtype) != (old.shape, old.dtype):
        raise ValueError(
            f"{one.path}: the loss turns this state of shape {old.shape} and dtype {old.dtype} into shape "
            f"{new.shape} and dtype {new.dtype}, which the next microbatch cannot take. Keep both."
        )
    return jax.lax.convert_element_type(new, old.dtype)  # not weakly typed


def _combined(stacked: jax.Array, how: str) -> jax.Array:
    """One array of what the microbatches return."""
    if how == "join":
        return stacked.reshape(-1, *stacked.shape[2:])
    return stacked.mean(0) if how == "mean" else stacked[-1]


def _averaged(value: jax.Array, row: Row, region: regions.Region) -> jax.Array:
    axes = region.copies(row.spec) if row.mean else ()
    return jax.lax.pmean(value, axes) if axes else value
