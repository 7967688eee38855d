"""A unit's call, of either front end: names of arguments, arrays of results, the way through a region."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jfsdp import region as regions
from jfsdp.borders import RULE, Row, is_spec
from jfsdp.explicit import leave
from jfsdp.tape import Rows
from jfsdp.units import is_array

__all__ = [
    "Result",
    "argument_names",
    "check_argument_names",
    "key_name",
    "sorted_into",
    "through_region",
]


def key_name(key: Any) -> Any:
    """The name, index or dictionary key that one step of a pytree's path stands for."""
    return getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))


def argument_names(method: Callable[..., Any], count: int) -> list[str]:
    """Names of the `count` positional arguments of a method, without `self`, in order."""
    try:
        parameters = list(inspect.signature(method).parameters.values())[1:]
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [*names, *(f"args[{i}]" for i in range(len(names), count))]


def check_argument_names(
    caller: str,
    methods: Iterable[Callable[..., Any]],
    kwargs: dict[str, Any],
    in_specs: Iterable[tuple[str, PartitionSpec]],
) -> None:
    """Check that `in_specs` speaks of arguments that one of the methods has.

    Raises:
        ValueError: it names another; the arguments are listed.
    """
    parameters = [p for m in methods for p in list(inspect.signature(m).parameters.values())[1:]]
    names = {p.name for p in parameters} | set(kwargs)
    open_ended = any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)
    for key, spec in in_specs:
        if key.partition(".")[0] not in names and not open_ended:
            raise ValueError(
                f"{caller}: in_specs[{key!r}] = {spec} names no argument. Its arguments: "
                f"{', '.join(sorted(names)) or '(none)'}."
            )


def through_region(
    body: Callable[[Sequence[Any]], tuple[list[Any], list[Any], list[Row]]],
    leaves: Sequence[Any],
    region: regions.Region,
) -> tuple[list[Any], list[Any]]:
    """Call `body` in the region, whose results are of kinds that are known once it has run.

    Args:
        body: takes the local leaves; returns the arrays of the result, those of changed state, and how each
            of both leaves the region.
        leaves: global arrays.
        region: the region.

    Returns:
        The arrays of the result and those of the state, as global arrays.
    """
    order: list[tuple[int, int]] = []
    count: list[int] = []

    def sorted_body(leaves: Sequence[Any]) -> Rows:
        arrays, states, kinds = body(leaves)
        rows, order[:] = sorted_into(region.rows, [*arrays, *states], kinds)
        count[:] = [len(arrays)]
        return rows

    rows = regions.call(sorted_body, leaves, region)
    values = [rows[row][column] for row, column in order]
    specs = [region.rows[row].spec for row, _ in order]
    arrays = zip(values[: count[0]], specs, strict=False)
    return [leave(x, spec, region.dp, leaves) for x, spec in arrays], values[count[0] :]


def sorted_into(
    rows: Sequence[Row], values: Iterable[Any], kinds: Iterable[Row]
) -> tuple[Rows, list[tuple[int, int]]]:
    """Sort values by how they leave a region.

    Returns:
        One list for each of `rows`, and for each value the list and the place in it where it is.
    """
    found: Rows = tuple([] for _ in rows)
    order = []
    for value, kind in zip(values, kinds, strict=True):
        index = rows.index(kind)
        order.append((index, len(found[index])))
        found[index].append(value)
    return found, order


_ARRAY = object()


class Result:
    """A call's result, taken apart into its arrays and the rest."""

    def __init__(self, result: Any):
        flat, self._treedef = jax.tree_util.tree_flatten_with_path(result)
        self._constants = [_ARRAY if is_array(x) else x for _, x in flat]
        self.arrays = [(jax.tree_util.keystr(path), x) for path, x in flat if is_array(x)]
        """The arrays with their places in the result, as text."""
        self.places = [path for path, x in flat if is_array(x)]
        """Those places as paths of keys."""

    def rebuild(self, arrays: Iterable[Any]) -> Any:
        """The result with these arrays in place of its own."""
        values = iter(arrays)
        leaves = [next(values) if x is _ARRAY else x for x in self._constants]
        return jax.tree.unflatten(self._treedef, leaves)

    def spread(
        self, caller: str, out_specs: tuple[Any, Sequence[PartitionSpec | str]] | None
    ) -> list[PartitionSpec | None]:
        """The spec that `out_specs`, a prefix of the result, has for each array of it.

        Raises:
            ValueError: it is no prefix.
        """
        result = jax.tree.unflatten(self._treedef, self._constants)
        treedef, leaves = out_specs or (jax.tree.structure(0), (RULE,))
        prefix = jax.tree.unflatten(treedef, leaves)
        try:
            specs = jax.tree.leaves(
                jax.tree.broadcast(prefix, result, is_leaf=is_spec), is_leaf=is_spec
            )
        except ValueError as error:
            raise ValueError(
                f"{caller}: out_specs={prefix!r} is no prefix of the result, whose structure is "
                f"{self._treedef}."
            ) from error
        both = zip(specs, self._constants, strict=True)
        return [None if spec is RULE else spec for spec, x in both if x is _ARRAY]
