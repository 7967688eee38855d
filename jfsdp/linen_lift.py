"""A call of a Linen unit as a function of arrays: its variables, keys and arguments in one list."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax.core import freeze, meta

from jfsdp.calls import Result, argument_names, key_name
from jfsdp.hidden import Shard
from jfsdp.linen_plan import ModulePlan, Names, unboxed
from jfsdp.units import is_array

__all__ = ["Arrays", "LiftedCall", "is_box"]

Arrays = tuple[list[Any], list[Any]]
"""The arrays of a call's result, and those of the variables that it has written."""


class LiftedCall:
    """One call of a unit: its variables, keys and arguments as a list of arrays.

    Attributes:
        leaves: the arrays.
        places: where each stands in (variables, keys, args, kwargs).
        hidden: as what a unit outside has hidden it: the shard of a unit that is not being called; or None.
        result: after `run`, what the call returned.
        written_paths: after `run`, the collections and paths of the variables that it wrote.
    """

    result: Result
    written_paths: list[Names]

    def __init__(self, name: str, scopes: list[Any], plan: ModulePlan, core: tuple, tree: tuple):
        self.name = name
        self._core, self._scope_fn, self._repack = core
        roots = _outermost(scopes)
        self._paths = [scope.path for scope in roots]
        self._counters = [(scope, dict(scope.rng_counters)) for scope in roots]
        (params, others), *rest = tree
        known = [
            _known(group, plan, scope.path) for group, scope in zip(params, roots, strict=True)
        ]
        tree = ((tuple(known), others), *rest)
        self._boxes = _boxes(others)
        held, self._treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_holds_an_array)
        flat = [(path, _array(x)) for path, x in held]
        self._constants = [_ARRAY if is_array(x) else x for _, x in flat]
        self.leaves = [x for _, x in flat if is_array(x)]
        self.places = [path for path, x in flat if is_array(x)]
        arrays = zip(held, flat, strict=True)
        self.hidden = [
            x if isinstance(x, Shard) else None for (_, x), (_, array) in arrays if is_array(array)
        ]
        self._names: list[str] | None = None
        self._positional = len(tree[2])

    def parameter(self, place: tuple) -> Names | None:
        """The path of a parameter; None for any other leaf."""
        if place[0].idx != 0 or place[1].idx != 0:
            return None
        return self._path_of(place[2:])[1:]

    def variable(self, place: tuple) -> Names | None:
        """The collection and the path of a variable that is no parameter; None for any other leaf."""
        if place[0].idx != 0 or place[1].idx == 0:
            return None
        return self._path_of(place[2:])

    def _path_of(self, place: tuple) -> Names:
        scope, collection, *names = place
        return (str(key_name(collection)), *self._paths[scope.idx], *map(_text, names))

    def argument(self, place: tuple, function: Callable) -> str | None:
        """The name of an argument, dotted into its pytree; None for any other leaf."""
        where, first, *rest = place
        if where.idx < 2:
            return None
        if self._names is None:
            self._names = argument_names(function, self._positional)
        head = self._names[first.idx] if where.idx == 2 else key_name(first)
        return ".".join(map(str, (head, *map(key_name, rest))))

    def run(
        self, leaves: Sequence[Any], change_arguments: Callable, change_result: Callable
    ) -> Arrays:
        """Run the call on these leaves."""
        values = iter(leaves)
        filled = [next(values) if x is _ARRAY else x for x in self._constants]
        variables, rngs, args, kwargs = jax.tree.unflatten(self._treedef, filled)
        for scope, counters in self._counters:  # jax may trace this more than once
            scope.rng_counters.clear()
            scope.rng_counters.update(counters)
        scope = self._scope_fn(variables, rngs)
        args, kwargs = change_arguments((args, kwargs))
        self.result = Result(change_result(self._core(scope, *args, **kwargs)))
        self._written = Result(self._repack(scope))
        self.written_paths = [self._path_of(place[1:]) for place in self._written.places]
        return [x for _, x in self.result.arrays], [x for _, x in self._written.arrays]

    def finish(self, arrays: Sequence[Any], written: Sequence[Any]) -> tuple[Any, Any]:
        """The result, and the variables to write, of these arrays."""
        return self.result.rebuild(arrays), _boxed(self._written.rebuild(written), self._boxes)


_ARRAY = object()


def _text(key: Any) -> str:
    return str(key_name(key))


def _known(collections: Any, plan: ModulePlan, path: Names) -> Any:
    """The parameters that the plan knows. What no method of the call reaches stays out of its program."""

    def keep(tree: Any, path: Names) -> dict[str, Any]:
        found = {}
        for name, value in tree.items():
            if isinstance(value, Mapping):
                found[name] = keep(value, (*path, name))
            elif (*path, name) in plan.placements:
                found[name] = value
        return found

    return {name: freeze(keep(tree, path)) for name, tree in collections.items()}


def _outermost(scopes: list[Any]) -> list[Any]:
    """The scopes that lie in no other one, in the order in which Flax packs their variables."""
    unique = list(dict.fromkeys(scopes))

    def inside_another(scope: Any) -> bool:
        parent = scope.parent
        while parent is not None:
            if parent in unique:
                return True
            parent = parent.parent
        return False

    return [scope for scope in unique if not inside_another(scope)]


def _holds_an_array(value: Any) -> bool:
    return is_box(value) or isinstance(value, Shard)


def _array(value: Any) -> Any:
    return value.array if isinstance(value, Shard) else unboxed(value)


def is_box(value: Any) -> bool:
    """Whether a value is a box of Flax round a variable."""
    return isinstance(value, meta.AxisMetadata)


def _boxes(groups: Any) -> dict[str, Any]:
    flat, _ = jax.tree_util.tree_flatten_with_path(groups, is_leaf=is_box)
    return {jax.tree_util.keystr(path): box for path, box in flat if is_box(box)}


def _boxed(tree: Any, boxes: dict[str, Any]) -> Any:
    if not boxes:
        return tree

    def box(path: Any, value: Any) -> Any:
        found = boxes.get(jax.tree_util.keystr(path[1:]))  # without the index of the group
        return value if found is None else found.replace_boxed(value)

    return jax.tree_util.tree_map_with_path(box, tree)
