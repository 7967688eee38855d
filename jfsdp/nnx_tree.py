"""Walking NNX modules: their units, their parameters, and who owns which."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from jfsdp.placement import Placement
from jfsdp.units import Unit, is_array

__all__ = ["FSDPModule", "class_name", "owned", "placement_of", "unit_of", "walk"]

PLACEMENT = "jfsdp_placement"
"""Name of the Variable metadata that holds a parameter's Placement."""

UNIT = "_jfsdp_unit"
"""Name of the module attribute that holds a unit's settings."""


class FSDPModule:
    """Mixed into the class of every NNX module that `jfsdp.shard` made a unit.

    `isinstance(module, FSDPModule)` tells units from plain modules; `isinstance(module, Block)` stays
    true for the module's own class.
    """

    __slots__ = ()  # the layout of an instance stays that of its own class
    _jfsdp_methods: tuple[str, ...] = ()


def unit_of(node: Any) -> Unit | None:
    """The settings of a unit; None for everything else."""
    return vars(node).get(UNIT) if isinstance(node, FSDPModule) else None


def class_name(module: Any) -> str:
    """Name of the module's own class, for messages."""
    own = type(module)
    return (own.__mro__[1] if isinstance(module, FSDPModule) else own).__name__


def placement_of(variable: nnx.Variable) -> Placement | None:
    """Where `shard` put the parameter, or None if it did not."""
    return variable.get_metadata().get(PLACEMENT)


def walk(
    root: Any, descend: Callable[[Any], bool] = lambda node: True
) -> Iterator[tuple[str, nnx.Module | nnx.Variable]]:
    """Every module and Variable of a pytree, each once, parents first, with its dotted path.

    Args:
        root: a module or any pytree of modules.
        descend: whether to go below a node; the root is always gone below.
    """
    seen: set[int] = set()

    def visit(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        if id(node) in seen:
            return
        seen.add(id(node))
        if isinstance(node, nnx.Module | nnx.Variable):
            yield ".".join(path), node
        if not isinstance(node, nnx.Variable) and (node is root or descend(node)):
            for name, child in _children(node):
                yield from visit(child, (*path, name))

    return visit(root, ())


def owned(module: nnx.Module) -> dict[str, nnx.Variable]:
    """The Variables below `module` that it reaches without going through a nested unit, by path."""
    found = walk(module, descend=lambda node: unit_of(node) is None)
    return {path: node for path, node in found if isinstance(node, nnx.Variable)}


def _children(node: Any) -> list[tuple[str, Any]]:
    if is_array(node):
        return []
    children, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return [(_name(path[0]), child) for path, child in children if path]


def _name(key: Any) -> str:
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
