"""Walking NNX modules: their units, their parameters, and who owns which."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from jfsdp.mesh import AnyMesh, DataParallelMesh, describe_mesh
from jfsdp.optimizer import is_of_optax
from jfsdp.placement import Placement
from jfsdp.plan import PlanRow, plan_row
from jfsdp.promises import Kind
from jfsdp.units import Unit, is_array

__all__ = [
    "FSDPModule",
    "check_axes",
    "class_name",
    "kind_of_argument",
    "mesh_of",
    "owned",
    "placement_of",
    "plan_rows",
    "unit_of",
    "units_of_variables",
    "variables_of",
    "walk",
]

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


def variables_of(root: Any) -> list[tuple[str, nnx.Variable]]:
    """Every Variable of a pytree, each once, with its dotted path."""
    return [(path, node) for path, node in walk(root) if isinstance(node, nnx.Variable)]


def owned(module: nnx.Module) -> dict[str, nnx.Variable]:
    """The Variables below `module` that it reaches without going through a nested unit, by path."""
    found = walk(module, descend=lambda node: unit_of(node) is None)
    return {path: node for path, node in found if isinstance(node, nnx.Variable)}


def units_of_variables(module: Any) -> dict[int, list[tuple[int, Unit]]]:
    """For each Variable, by its id, the units that own it, each with its number; the root's is 0."""
    found: dict[int, list[tuple[int, Unit]]] = {}
    units = [(node, unit) for _, node in walk(module) if (unit := unit_of(node)) is not None]
    for number, (node, unit) in enumerate(units):
        for variable in owned(node).values():  # pyright: ignore[reportArgumentType]
            found.setdefault(id(variable), []).append((number, unit))
    return found


def mesh_of(model: Any) -> AnyMesh | None:
    """The mesh of the first unit in a module; None if it has none."""
    units = (unit_of(node) for _, node in walk(model))
    return next((unit.dp.mesh for unit in units if unit is not None), None)


def check_axes(module: Any, dp: DataParallelMesh) -> None:
    """Check that every unit below communicates over the axes of `dp`, in whose region it will run.

    Raises:
        ValueError: one does not; it is named.
    """
    for path, node in walk(module):
        unit = unit_of(node)
        if unit is None or node is module:
            continue
        if unit.dp.mesh != dp.mesh or set(unit.dp.axes) != set(dp.axes):
            raise ValueError(
                f"{path} ({class_name(node)}) is a unit over {unit.dp.axes} of the mesh "
                f"{describe_mesh(unit.dp.mesh)}, the module round it over {dp.axes} of "
                f"{describe_mesh(dp.mesh)}: its gradients would be summed over other devices than its batch "
                "lies on. Give both the same mesh and data-parallel axes."
            )


def kind_of_argument(node: Any) -> Kind | None:
    """What the arrays of a node of a step's arguments are for, as `promises.arguments` asks."""
    if isinstance(node, nnx.Param):
        return "parameters"
    if isinstance(node, nnx.OptState) or is_of_optax(node):
        return "optimizer"
    return "rest" if isinstance(node, nnx.Variable) else None


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


def plan_rows(tree: Any) -> list[tuple[PlanRow, Unit, Placement, bool]]:
    """Every sharded parameter of a module or pytree, tied ones once.

    Returns:
        For each its row, the unit that gathers it, where it lies, and whether that unit is outermost.
    """
    rows: list[tuple[PlanRow, Unit, Placement, bool]] = []
    units: list[tuple[str, Any]] = [
        (p, node) for p, node in walk(tree) if isinstance(node, FSDPModule)
    ]
    roots = [path for path, _ in units if not any(_is_below(path, other) for other, _ in units)]
    cut = roots[0] if len(roots) == 1 else ""
    members = [
        (path.removeprefix(cut).lstrip("."), path, unit_of(node), node) for path, node in units
    ]
    seen: set[int] = set()
    for below, unit_path, unit, node in members:
        assert unit is not None
        together = [b for b, p, u, _ in members if _one_group(unit, unit_path, u, p, roots)]
        for path, variable in owned(node).items():
            placement = placement_of(variable)
            if placement is None or id(variable) in seen:
                continue
            seen.add(id(variable))
            row = plan_row(below, path, placement, unit.dp)
            if together:
                row = dataclasses.replace(row, unit=", ".join(together))
            rows.append((row, unit, placement, unit_path in roots))
    return rows


def _one_group(
    unit: Unit, path: str, other: Unit | None, other_path: str, roots: list[str]
) -> bool:
    """Whether two modules are one unit of one model; a copy of the model has units of its own."""
    if unit.group is None or other is None or unit.group is not other.group:
        return False
    return all(_is_below(path, root) == _is_below(other_path, root) for root in roots)


def _is_below(path: str, other: str) -> bool:
    return path != other and (not other or path.startswith(f"{other}."))
