"""The optimizer's step over parameters, gradients and state in host memory.

jax keeps arrays of the host and of the device apart by type, so that optax can do nothing with a mixture. Its
step is traced as if all were on the device, split by groups of parameters (`updates_split`), and run by
groups (`updates_run`):

- on="device": what is shared comes first: of each group what that needs, such as the norm of its gradients.
  Then each group by itself: its arrays come to the device, and the results go back.
- on="host": the same by calls of the host, for groups that have something there.

The default is "device". Adam on 4 and 8 matrices of 8192 x 8192, all on the host, jax 0.12.0.1, on a device
in arrays of the size of a matrix's shard, as the compiler counts them:

                              on="device"            on="host"
                              v5e:2x4     h100:8     v5e:2x4     h100:8
    work on the device, peak  9, 9        11, 11     0, 0        0, 0
    work on the host          0, 0        0, 0       12, 24      12, 24
    copied to the device      16, 32      16, 32     0, 0        0, 0
    copied to the host        12, 24      12, 24     0, 0        0, 0

What the host computes goes into new buffers, and from there into those of the state: three quarters of what
lies on the host come on top. On H100 XLA makes one call of all groups, and nothing runs beside it. The
compilers state no time for either; others measured computing on a host to be 2 to 3 times slower than moving
(apple/axlearn#867).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding

from jfsdp.layout import lay
from jfsdp.offload import UNPINNED, is_on_host, typed_on_device
from jfsdp.optimizer import names_of, owner_of
from jfsdp.updates_run import Run
from jfsdp.updates_split import split

__all__ = ["checked_mode", "update_optimizer"]

MODES = ("device", "host")
FASTER = "device"


def update_optimizer(
    tx: Any, grads: Any, state: Any, params: Any, *, on: str | None = None, **extra: Any
) -> tuple[Any, Any]:
    """`tx.update` and `optax.apply_updates`: see `jfsdp.update_optimizer`."""
    mode = checked_mode("update_optimizer: on", on)
    _check_same("gradients", grads, params)
    arrays = (grads, state, params, extra)
    leaves, treedef = jax.tree.flatten(arrays)
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        return _update(tx, arrays, mode)
    dynamic = [leaf if _is_array(leaf) else None for leaf in leaves]
    static = tuple(None if _is_array(leaf) else leaf for leaf in leaves)
    places = tuple(_place(leaf) for leaf in jax.tree.leaves((params, state)))
    results, out = jax.tree.flatten(_jitted(tx, mode, treedef, static, places, dynamic))
    # A program only gives unpinned memory to what its out_shardings say.
    kept = [
        jax.device_put(x, to) if to is not None and to.memory_kind == UNPINNED else x
        for x, to in zip(results, places, strict=True)
    ]
    return out.unflatten(kept)


def checked_mode(what: str, on: Any) -> str:
    """Where a step is computed; None stands for the faster.

    Raises:
        ValueError: it is none of "device" and "host".
    """
    if on is not None and on not in MODES:
        raise ValueError(f'{what} says where the step is computed: "device" or "host", got {on!r}.')
    return on or FASTER


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype")


def _place(leaf: Any) -> NamedSharding | None:
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _jitted(
    tx: Any, on: str, treedef: Any, static: Sequence[Any], places: Sequence[Any], dynamic: list[Any]
) -> Any:
    both = zip(static, dynamic, strict=True)
    results = _update(tx, treedef.unflatten([y if x is None else x for x, y in both]), on)
    leaves, out = jax.tree.flatten(results)
    laid = [x if to is None else lay(x, to) for x, to in zip(leaves, places, strict=True)]
    return out.unflatten(laid)


def _update(tx: Any, arrays: tuple[Any, Any, Any, Any], on: str) -> tuple[Any, Any]:
    """The step inside a program."""

    def step(arrays: Any) -> tuple[Any, Any]:
        grads, state, params, extra = arrays
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    _, state, params, _ = arrays
    leaves, treedef = jax.tree.flatten(arrays)
    if not any(_is_array(leaf) and is_on_host(leaf) for leaf in leaves):
        with _explained(tx, state, params):
            return step(arrays)
    traced = [index for index, leaf in enumerate(leaves) if _is_array(leaf)]
    made: list[Any] = []

    def function(*values: Any) -> list[Any]:
        given = list(leaves)
        for index, value in zip(traced, values, strict=True):
            given[index] = value
        results, out = jax.tree.flatten(step(treedef.unflatten(given)))
        made[:] = [out]
        return results

    gradients = len(jax.tree.leaves(arrays[0]))
    values = [_settled(leaves[i]) if i < gradients else leaves[i] for i in traced]
    kinds = [typed_on_device(value) for value in values]
    groups = _groups(arrays)
    with _explained(tx, state, params):
        parts = split(function, kinds, [groups[index] for index in traced])
    homes = jax.tree.leaves((params, state))
    if made != [jax.tree.structure((params, state))]:
        raise ValueError(
            "update_optimizer: the optimizer returns a state of another structure than it takes, so that it "
            "cannot be said which array belongs in which memory:\n"
            f"  {jax.tree.structure(state)}\n  {made[0]}"
        )
    return jax.tree.unflatten(made[0], Run(parts, values, on).results(homes))


def _settled(gradient: Any) -> Any:
    """A gradient that XLA does not follow to where it was made: for TPUs it cannot, through a branch."""
    return jax.lax.optimization_barrier(gradient) if is_on_host(gradient) else gradient


def _groups(arrays: tuple[Any, Any, Any, Any]) -> list[int | None]:
    """To which group of parameters each leaf belongs; None: to no parameter.

    Group 0 is of parameters that have nothing on the host. Small parameters share a group that is no larger
    than the largest parameter.
    """
    grads, state, params, extra = arrays
    strip = (
        1 if isinstance(params, optax.LookaheadParams) else 0
    )  # the state is that of `fast` alone
    owners: dict[tuple[str, ...], list[Any]] = {
        names_of(path)[strip:]: [] for path, _ in jax.tree_util.tree_leaves_with_path(params)
    }
    of: list[tuple[str, ...] | None] = []
    for tree, is_params in ((grads, False), (state, False), (params, True), (extra, False)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            names = names_of(path)[strip if is_params else 0 :]
            owner = None if tree is extra else owner_of(names, owners)
            of.append(owner)
            if owner is not None and _is_array(leaf):
                owners[owner].append(leaf)
    numbers = _packed({name: _bytes_on_host(leaves) for name, leaves in owners.items()})
    return [None if owner is None else numbers[owner] for owner in of]


def _bytes_on_host(leaves: Iterable[Any]) -> int:
    return sum(x.size * x.dtype.itemsize for x in leaves if is_on_host(x))


def _packed(sizes: Mapping[Any, int]) -> dict[Any, int]:
    """Numbers of groups, none of which is larger than the largest of these; 0 for what has no size."""
    limit = max(sizes.values(), default=0)
    room: list[int] = [0]
    numbers = {}
    for name, size in sizes.items():
        fitting = (number for number, left in enumerate(room) if number and left >= size)
        number = next(fitting, len(room)) if size else 0
        if number == len(room):
            room.append(limit)
        room[number] -= size
        numbers[name] = number
    return numbers


def _check_same(what: str, tree: Any, params: Any) -> None:
    """Check that there is a gradient for each parameter, at the same path and in its shape.

    Raises:
        ValueError: there is not; all paths are listed.
    """
    params = params.fast if isinstance(params, optax.LookaheadParams) else params
    if jax.tree.structure(tree) == jax.tree.structure(params):
        return
    raise ValueError(
        f"update_optimizer: the {what} are not of the structure of the parameters:"
        f"{_differences(tree, params, what)}"
    )


def _differences(tree: Any, expected: Any, what: str) -> str:
    ours, theirs = (
        {".".join(names_of(path)) for path, _ in jax.tree_util.tree_leaves_with_path(x)}
        for x in (tree, expected)
    )
    listed = [f"\n  {path}: missing in the {what}" for path in sorted(theirs - ours)]
    listed += [f"\n  {path}: in the {what} only" for path in sorted(ours - theirs)]
    if listed:
        return "".join(listed)
    return f"\n  {jax.tree.structure(tree)}\n  {jax.tree.structure(expected)}"


@contextlib.contextmanager
def _explained(tx: Any, state: Any, params: Any) -> Iterator[None]:
    """Say which leaves a state lacks, or has too many, if that is why optax failed.

    Raises:
        ValueError: the state is none of these parameters.
    """
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        described = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        try:
            expected = jax.eval_shape(tx.init, described)
        except Exception:
            raise error from None
        if jax.tree.structure(expected) == jax.tree.structure(state):
            raise
        raise ValueError(
            "update_optimizer: the state is not what the optimizer makes of these parameters, "
            f"jfsdp.init_optimizer(tx, params):{_differences(state, expected, 'state')}"
        ) from error
