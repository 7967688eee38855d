"""What is known of a sharded Linen module: its settings, its units, and where its parameters lie."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax.core import meta
from flax.errors import ScopeParamShapeError
from jax.sharding import PartitionSpec

from jfsdp.optimizer import is_of_optax
from jfsdp.placement import Placement
from jfsdp.plan import PlanRow, plan_row
from jfsdp.promises import Kind
from jfsdp.units import Unit

__all__ = [
    "PARAMS",
    "FSDPModule",
    "ModulePlan",
    "Names",
    "Settings",
    "attributes",
    "boxed_leaves",
    "kind_of_argument",
    "module_in",
    "named_leaves",
    "own_parts_explained",
    "plan_of",
    "record",
    "recording",
    "state_spec",
    "unboxed",
]

PARAMS = "params"
"""The collection that is sharded."""

Names = tuple[str, ...]
"""The path of a module or parameter: the names of the modules from the root on."""


class FSDPModule:
    """Mixed into the class of every Linen module that `jfsdp.shard` returned.

    `isinstance(module, FSDPModule)` tells them from plain modules; `isinstance(module, Transformer)`
    stays true for the module's own class.
    """

    jfsdp: Any


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of one `shard` call on a Linen module.

    Attributes:
        unit: the settings of the module itself.
        units: which modules inside become units of their own, as `jfsdp.shard` takes it.
        shard_placement_fn: as `jfsdp.shard` takes it.
        ignored_params: likewise.
        memory: for parameters that `jfsdp.offload_by_budget` has chosen, by dotted path, the kind of memory
            of each and that of its state.
        found: plans of earlier calls, each with the attributes of the module that it is of.
    """

    unit: Unit
    units: Any = ()
    shard_placement_fn: Callable[[str, Any], Any] | None = None
    ignored_params: Any = None
    memory: tuple[tuple[str, tuple[str | None, str | None]], ...] = ()
    found: list[tuple[dict[str, Any], ModulePlan]] = dataclasses.field(
        default_factory=list, compare=False, repr=False
    )

    def kept(self, path: str, placement: Placement) -> Placement:
        """The placement of the parameter at this dotted path, in the memory chosen for it, if any."""
        own = (placement.memory_kind, placement.state_memory_kind)
        kind, of_state = dict(self.memory).get(path, own)
        return dataclasses.replace(placement, memory_kind=kind, state_memory_kind=of_state)

    def keep(self, module: Any, plan: ModulePlan) -> None:
        """Remember the plan of a module that has these settings."""
        if plan not in self.plans_of(module):
            self.found.append((_unnamed(module), plan))

    def plans_of(self, module: Any) -> list[ModulePlan]:
        """The plans of earlier calls of this module, or one like it."""
        own = _unnamed(module)
        return [plan for other, plan in self.found if other == own]

    @property
    def inner(self) -> Unit:
        """The settings of the units that `units` selects."""
        return dataclasses.replace(
            self.unit, in_specs=(), out_specs=None
        )  # those speak of the module


def attributes(module: Any) -> dict[str, Any]:
    """What a module of the same class is made with, its parent excepted."""
    names = [f.name for f in dataclasses.fields(module) if f.init and f.name != "parent"]
    return {name: getattr(module, name) for name in names}


def _unnamed(module: Any) -> dict[str, Any]:
    return {name: value for name, value in attributes(module).items() if name != "name"}


@dataclasses.dataclass(frozen=True)
class ModulePlan:
    """The units of a module and the placements of its parameters, by path from the outermost scope."""

    units: Mapping[Names, Unit]
    placements: Mapping[Names, Placement]
    owners: Mapping[Names, Names]

    def under(self, path: Names) -> ModulePlan:
        """The plan of a module that is itself at `path`."""
        if not path:
            return self
        return ModulePlan(
            {(*path, *p): unit for p, unit in self.units.items()},
            {(*path, *p): placement for p, placement in self.placements.items()},
            {(*path, *p): (*path, *owner) for p, owner in self.owners.items()},
        )

    def owned(self, unit: Names) -> dict[Names, Placement]:
        """The parameters of one unit."""
        return {path: p for path, p in self.placements.items() if self.owners[path] == unit}

    def covers(self, shapes: Mapping[Names, tuple[int, ...]], whole: bool) -> bool:
        """Whether every parameter is known, with the shape that it has here."""

        def expected(path: Names) -> tuple[int, ...] | None:
            if path not in self.placements:
                return None
            return self.placements[path].shape if whole else self.local_shape(path)

        return all(expected(path) == shape for path, shape in shapes.items())

    def local_shape(self, path: Names) -> tuple[int, ...]:
        """Shape of one device's shard of a parameter, in the per-device view over the data-parallel axes."""
        placement, dp = self.placements[path], self.units[self.owners[path]].dp
        return placement.part_at_rank(len(placement.shape), dp)

    def rows(self) -> list[tuple[PlanRow, Unit, Placement, bool]]:
        """For each parameter its row, its unit, where it lies, and whether the unit is the outermost."""
        root = min(self.units, key=len)
        rows = []
        for path, placement in self.placements.items():
            owner = self.owners[path]
            unit = self.units[owner]
            row = plan_row(
                ".".join(owner[len(root) :]), ".".join(path[len(owner) :]), placement, unit.dp
            )
            rows.append((row, unit, placement, owner == root))
        return rows


@contextlib.contextmanager
def own_parts_explained(plan: ModulePlan) -> Iterator[None]:
    """Say how a module reads a parameter that stays split, where Flax finds another shape than it makes."""
    try:
        yield
    except ScopeParamShapeError as error:
        split = [(".".join(path), p) for path, p in plan.placements.items() if p.local]
        if not split:
            raise
        path, placement = split[0]
        name = path.rpartition(".")[2]
        raise ValueError(
            f"{path} (shape {placement.shape}) stays split in the forward, where a device has its own part "
            f"of shape {placement.whole_shape}, but Flax's self.param wants the shape that it would make. "
            "Read it with\n"
            f'  if self.has_variable("params", "{name}"):\n'
            f'      {name} = nn.unbox(self.get_variable("params", "{name}"))\n'
            "  else:\n"
            f'      {name} = self.param("{name}", ...)'
        ) from error


def unboxed(value: Any) -> Any:
    """The array in a box of Flax, or the value itself.

    Not by the box's `unbox`, which lays the array by its annotation; it may be one device's part of it.
    """
    while isinstance(value, meta.AxisMetadata):
        (value,) = jax.tree.leaves(value)
    return value


def boxed_leaves(tree: Any) -> Iterator[tuple[Names, Any]]:
    """The leaves of nested dicts with their paths, in whatever boxes they are."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from (((name, *path), leaf) for path, leaf in boxed_leaves(value))
        else:
            yield (name,), value


def named_leaves(tree: Any) -> Iterator[tuple[Names, Any]]:
    """The arrays of nested dicts, boxes opened, with their paths."""
    return ((path, unboxed(leaf)) for path, leaf in boxed_leaves(tree))


def state_spec(path: Names, leaf: Any, unit: Unit) -> PartitionSpec | None:
    """What `state_specs` says of a variable: by its collection, or by a dotted path that begins with it."""
    asked = dict(unit.state_specs)
    for length in range(len(path), 0, -1):
        spec = asked.get(".".join(path[:length]))
        if spec is not None:
            return spec if leaf.ndim else PartitionSpec()
    return None


def module_in(tree: Any) -> FSDPModule | None:
    """A module that `shard` returned: the tree itself, a leaf of it, or whose `apply` a train state holds."""
    if isinstance(tree, FSDPModule):
        return tree

    def module_of(node: Any) -> Any:
        if isinstance(node, FSDPModule):
            return node
        owner = getattr(getattr(node, "apply_fn", None), "__self__", None)
        return owner if isinstance(owner, FSDPModule) else None

    nodes = jax.tree.leaves(tree, is_leaf=lambda node: module_of(node) is not None)
    return next((found for node in nodes if (found := module_of(node)) is not None), None)


def plan_of(module: FSDPModule) -> ModulePlan:
    """The plan of a module that was initialized, if only abstractly.

    Raises:
        ValueError: it was not.
    """
    found: list[ModulePlan] = module.jfsdp.plans_of(module)
    if not found:
        raise ValueError(
            f"this {type(module).__name__} was not initialized yet: Linen makes parameters when a module is "
            "called. Initialize it first, for nothing and without memory by\n"
            "  jax.eval_shape(model.init, jax.random.key(0), example_input)"
        )
    return max(found, key=lambda plan: len(plan.placements))


def kind_of_argument(node: Any, plan: ModulePlan) -> Kind | None:
    """What the arrays of a node of a step's arguments are for, as `promises.arguments` asks."""
    if is_of_optax(node):
        return "optimizer"
    if isinstance(node, Mapping):
        shapes = {path: tuple(getattr(leaf, "shape", ())) for path, leaf in named_leaves(node)}
        if shapes == {path: placement.shape for path, placement in plan.placements.items()}:
            return "parameters"
    return None


_recorded: contextvars.ContextVar[list[ModulePlan] | None] = contextvars.ContextVar(
    "recorded", default=None
)


@contextlib.contextmanager
def recording() -> Iterator[list[ModulePlan]]:
    """The plans of the modules that are initialized inside."""
    plans: list[ModulePlan] = []
    token = _recorded.set(plans)
    try:
        yield plans
    finally:
        _recorded.reset(token)


def record(plan: ModulePlan) -> None:
    """Note that a module of this plan was initialized."""
    plans = _recorded.get()
    if plans is not None:
        plans.append(plan)
