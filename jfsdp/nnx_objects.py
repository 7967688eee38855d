"""The NNX objects among a step's arguments: walked once, taken for arrays, and told from changed ones."""

from __future__ import annotations

import dataclasses
import operator
import textwrap
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import jax
import jax.core
from flax import nnx

from jfsdp.units import is_array

__all__ = ["Structure", "Walk", "check_result", "differences", "holds_objects"]

_value = nnx.Variable.get_raw_value


def _is_object(node: Any) -> bool:
    return isinstance(node, nnx.Pytree | nnx.Variable)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def holds_objects(tree: Any) -> bool:
    """Whether a pytree has modules or Variables in it."""
    return any(map(_is_object, jax.tree.leaves(tree, is_leaf=_is_object)))


@dataclasses.dataclass(frozen=True)
class Structure:
    """What objects are beside the arrays in them; hashable, and holds no array.

    Attributes:
        graphdef: of all objects together.
        treedef: of their State.
        kinds: for each entry of the State whether it is a Variable; others are attributes that are arrays.
    """

    graphdef: Any
    treedef: Any
    kinds: tuple[bool, ...]

    @classmethod
    def of(cls, objects: Mapping[str, Any]) -> tuple[Structure, list[Any], list[Any]]:
        """The structure, the Variables of the objects (their own), and the other arrays."""
        graphdef, state = nnx.split(objects, graph=True)
        entries = jax.tree.leaves(state, is_leaf=_is_variable)
        kinds = tuple(map(_is_variable, entries))
        variables = [entry for entry, kind in zip(entries, kinds, strict=True) if kind]
        arrays = [entry for entry, kind in zip(entries, kinds, strict=True) if not kind]
        return cls(graphdef, jax.tree.structure(state), kinds), variables, arrays

    def objects(self, values: Iterable[Any], arrays: Iterable[Any]) -> dict[str, Any]:
        """New objects of this structure, which share nothing with those it was taken from.

        Args:
            values: what the Variables hold.
            arrays: the other arrays.
        """
        values, arrays = iter(values), iter(arrays)
        entries = [next(values) if kind else next(arrays) for kind in self.kinds]
        state = jax.tree.unflatten(self.treedef, jax.tree.leaves(entries))
        return nnx.merge(self.graphdef, state)


class Walk:
    """The Variables of a call's objects, and what tells that the next call's are the same.

    It does not keep the objects alive.

    Attributes:
        structure: theirs.
        variables: every Variable once.
        arrays: every other array once.
    """

    def __init__(self, objects: Mapping[str, Any], forget: Callable[[Walk], None]):
        """Walk `objects`; `forget` is called when one of them is gone."""
        self.structure, self.variables, self.arrays = Structure.of(objects)
        _check_plain(self.variables)
        self._fields = list(_mutable_fields(objects))
        self._held = list(chain.from_iterable(self._fields))
        this = weakref.ref(self)

        def gone(_: Any) -> None:
            walk = this()
            if walk is not None:
                forget(walk)

        self._objects = {key: _weak(node, gone) for key, node in objects.items()}

    def is_of(self, objects: Mapping[str, Any]) -> bool:
        """Whether these are the very objects; more in the mapping do not count."""
        return all(objects.get(key) is node() for key, node in self._objects.items())

    def holds(self) -> bool:
        """Whether nothing was set, added or taken away since: all that the objects hold is what it was."""
        return sum(map(len, self._fields)) == len(self._held) and all(
            map(operator.is_, chain.from_iterable(self._fields), self._held)
        )

    def values(self) -> list[Any]:
        """What the Variables hold."""
        return list(map(_value, self.variables))

    def put_back(self, new: Sequence[Any], whole: bool) -> None:
        """Let the Variables hold a program's results.

        Args:
            new: one entry for each, None to leave it.
            whole: whether there is an entry for all of them.
        """
        if whole and not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(new[:1])):
            # `set_raw_value` asks JAX for the current trace, 3 to 4 us a Variable (flax 0.12.8 and 0.12.12),
            # as much as all of jax.jit. These arrays are of no trace; nnx.jit_partial too sets the slot.
            deque(map(object.__setattr__, self.variables, repeat("_raw_value"), new), maxlen=0)
            return
        for variable, value in zip(self.variables, new, strict=True):
            if value is not None:
                variable.set_raw_value(value)


def _check_plain(variables: Iterable[nnx.Variable]) -> None:
    for variable in variables:
        if variable.ref or variable.hijax:
            raise ValueError(
                f"jfsdp.jit: a {type(variable).__name__} of shape {variable.shape} is a reference (ref=True "
                "or hijax=True): it cannot be given to a program and put back. Make it without, or jit this "
                "step with nnx.jit."
            )


def _mutable_fields(objects: Any) -> Iterator[Any]:
    """A live view of what each object and container holds.

    Tuples are left out: they never hold anything else, and what holds them is asked whether it still does.
    """
    for _, node in nnx.iter_graph(objects, graph=True):
        if node is objects or isinstance(node, nnx.Variable) or is_array(node):
            continue
        if isinstance(node, list):
            yield node
        elif isinstance(node, nnx.State):
            yield node.raw_mapping.values()
        elif isinstance(node, dict):
            yield node.values()
        elif isinstance(node, nnx.Pytree) or dataclasses.is_dataclass(type(node)):
            yield vars(node).values()


def _weak(node: Any, gone: Callable[[Any], None]) -> Callable[[], Any]:
    try:
        return weakref.ref(node, gone)
    except TypeError:  # A list, tuple or dict of objects, or a Variable.
        return lambda: node


def check_result(result: Any, objects: Any) -> None:
    """Check that what a step returns is arrays, or State of its own.

    Args:
        result: what it returns.
        objects: its arguments.

    Raises:
        TypeError: a module, or a Variable of the arguments, is in it.
    """
    own = {id(node) for _, node in nnx.iter_graph(objects, graph=True) if _is_variable(node)}
    paths, _ = jax.tree_util.tree_flatten_with_path(result, is_leaf=_is_object)
    for path, node in paths:
        if isinstance(node, nnx.Pytree) or id(node) in own:
            raise TypeError(
                f"jfsdp.jit: the function returns a {type(node).__name__} "
                f"(result{jax.tree_util.keystr(path)}). Return arrays, or an nnx.State of them: the "
                "arguments are updated in place. A function that makes modules is for nnx.jit."
            )


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What two sets of objects differ in beside the values of Variables, in words, by path."""
    old, new = dict(_facts(before)), dict(_facts(after))
    nothing = ("nothing", None)
    return [
        f"{path}: {old.get(path, nothing)[0]} -> {new.get(path, nothing)[0]}"
        for path in dict.fromkeys([*new, *old])
        if old.get(path) != new.get(path)
    ]


def _facts(objects: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Of every node what it is in words, and which one if it is an array."""
    for path, node in nnx.iter_graph(objects, graph=True):
        if not path or "_pytree__" in str(path[-1]):
            continue
        identity = None
        if isinstance(node, nnx.Variable):
            leaves = jax.tree.leaves(node.get_raw_value())
            metadata = sorted(node.get_metadata(exclude_required=True).items())
            text = f"{type(node).__name__}{metadata or ''}{'' if len(leaves) == 1 else len(leaves)}"
        elif is_array(node):
            text, identity = "an array", id(node)
        elif isinstance(node, nnx.Pytree | nnx.State | dict | list | tuple):
            text = type(node).__name__
        else:
            text = repr(node)
        yield ".".join(map(str, path)), (textwrap.shorten(text, 100), identity)
