"""Finding the units inside a Linen module, and where its parameters lie.

A Linen module makes its submodules while it runs, so they are found by an abstract initialization: it
costs a trace and no memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from jfsdp.ignored import Ignored
from jfsdp.layout import spec_of
from jfsdp.linen_plan import PARAMS, FSDPModule, ModulePlan, Names, Settings, boxed_leaves, unboxed
from jfsdp.linen_track import Track, axes_of, tracked
from jfsdp.placement import Placement, place
from jfsdp.selectors import matcher
from jfsdp.units import Unit, is_array

__all__ = ["discover", "discover_alone", "is_transformed"]


def is_transformed(module: nn.Module) -> bool:
    """Whether the module's class was made by nn.remat, nn.scan, nn.vmap or another lifted transform.

    Inside of it the module of the user's own class is called, on the same path.
    """
    return type(module).__module__ == nn.transforms.__name__


def discover(
    module: Any,
    initialize: Callable[..., Any],
    rngs: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[ModulePlan, Any]:
    """Initialize a module abstractly, and find its units and where its parameters lie.

    Args:
        module: the module that `shard` returned, unbound.
        initialize: initializes it: takes the other arguments and returns (result, variables).
        rngs: what `init` takes.
        args: its arguments.
        kwargs: likewise.

    Returns:
        The plan, and what the initialization returns, of `jax.ShapeDtypeStruct`s.

    Raises:
        ValueError: a selector of `units` matches nothing; a parameter is stacked twice; what `place` raises.
    """
    found = _Found(module.jfsdp)
    flat, treedef = jax.tree.flatten((rngs, args, kwargs))

    def run(arrays: list[Any]) -> Any:
        given = iter(arrays)
        leaves = [next(given) if is_array(x) else x for x in flat]
        rngs, args, kwargs = jax.tree.unflatten(treedef, leaves)
        with nn.intercept_methods(found.note):
            return initialize(rngs, *args, **kwargs)

    described = [_described(x) for x in flat if is_array(x)]
    result, variables = jax.eval_shape(run, described)
    found.check_selectors(module)
    plan = found.plan(variables.get(PARAMS, {}), module.jfsdp)
    found.check_ignored(plan)
    is_track = lambda x: isinstance(x, Track)  # noqa: E731
    variables = jax.tree.map(lambda x: x.value if is_track(x) else x, variables, is_leaf=is_track)
    return plan, (result, variables)


def discover_alone(
    module: Any, function: Callable[..., Any], args: tuple, kwargs: dict
) -> ModulePlan:
    """The plan of a bound module, found as if it were the outermost one."""
    alone = module.clone(parent=None, name=None)
    initialize = nn.init_with_output(function, alone)
    return discover(alone, initialize, jax.random.key(0), args, kwargs)[0]


def _described(array: Any) -> jax.ShapeDtypeStruct:
    # Without its sharding: on Explicit axes it would be the type of what is computed from it.
    weak, dtype = bool(getattr(array, "weak_type", False)), array.dtype
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(dtype)  # numpy's int64 is jax's int32
    return jax.ShapeDtypeStruct(array.shape, dtype, weak_type=weak)


class _Found:
    """What the interceptor of an abstract initialization writes down."""

    def __init__(self, settings: Settings):
        self.settings: dict[Names, tuple[Settings, Ignored]] = {
            (): (settings, Ignored(settings.ignored_params))
        }
        self.selectors = {(): (matcher(settings.units), settings)}
        self.matched: set[int] = set()
        self.units: dict[Names, Unit] = {(): settings.unit}
        self.modules: dict[Names, type] = {}
        self.claims: dict[Names, tuple[Names, int]] = {}
        self.selected: set[Names] = set()
        self.exits: dict[Names, dict[Names, int]] = {}
        self.walked = 0

    def note(self, next_fun: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        """The interceptor: the call, and afterwards a look at the parameters it has made."""
        module: nn.Module = context.module
        before = self.selectors
        if isinstance(module, FSDPModule) and module.path not in self.settings:
            ignored = Ignored(module.jfsdp.ignored_params)
            self.settings[module.path] = (module.jfsdp, ignored)
        if isinstance(module, FSDPModule) and module.path not in self.selectors:
            inner = {module.path: (matcher(module.jfsdp.units), module.jfsdp)}
            self.selectors = {**self.selectors, **inner}
        walks = isinstance(module, nn.WeightNorm | nn.SpectralNorm)
        self.walked += walks  # these name what they find by its path, boxes included
        result = next_fun(*args, **kwargs)
        self.walked -= walks
        if module.scope is not None and context.method_name != "setup":
            self._look(module)
        self.selectors = before
        return result

    def _look(self, module: nn.Module) -> None:
        path = module.path
        self.modules.setdefault(path, _own_class(module))
        unit = self._unit_of(module)
        if unit is not None:
            self.units.setdefault(path, unit)
        assert module.scope is not None
        params = dict(module.scope.variables().get(PARAMS, {}))
        if module.scope.is_mutable_collection(PARAMS) and not self.walked:
            for name, value in params.items():
                if any(not isinstance(leaf, Track) for _, leaf in boxed_leaves({name: value})):
                    module.scope.put_variable(PARAMS, name, tracked(value))
        for below, leaf in boxed_leaves(module.scope.variables().get(PARAMS, {})):
            full, stacked = (*path, *below), len(axes_of(leaf))
            self.exits.setdefault(full, {}).setdefault(path, stacked)
            if path in self.units and not is_transformed(module):
                self.claims.setdefault(full, (path, stacked))

    def _unit_of(self, module: nn.Module) -> Unit | None:
        if isinstance(module, FSDPModule):
            return self.units.get(module.path, module.jfsdp.unit)
        for selectors, settings in self.selectors.values():
            for selector, matches in selectors:
                if is_transformed(module) and not _only_outside(selector, module):
                    continue
                if matches(".".join(module.path), module):
                    self.matched.add(id(selector))
                    self.selected.add(module.path)
                    return settings.inner
        return None

    def check_selectors(self, root: nn.Module) -> None:
        for selector, _ in self.selectors[()][0]:
            if id(selector) in self.matched or (
                callable(selector) and not isinstance(selector, type)
            ):
                continue
            inside = {p: kind for p, kind in self.modules.items() if p}
            kinds = ", ".join(sorted({kind.__name__ for kind in inside.values()})) or "(none)"
            paths = ", ".join([".".join(p) for p in inside][:20]) or "(none)"
            raise ValueError(
                f"units={selector!r} matches no module inside {_own_class(root).__name__}. It has modules "
                f"of the classes {kinds}, at the paths {paths}."
            )

    def plan(self, params: Any, settings: Settings) -> ModulePlan:
        tracks = {path: tracked(leaf) for path, leaf in boxed_leaves(params)}
        for path, track in tracks.items():
            self.claims.setdefault(path, ((), len(track.axes)))
            self._claim_inside_the_loop(path, settings)
        placements, owners = {}, {}
        for path, track in tracks.items():
            owner, known = self.claims[path]
            placements[path] = self._placement(path, track, track.axes[known:], self.units[owner])
            owners[path] = owner
        return ModulePlan(dict(self.units), placements, owners)

    def _claim_inside_the_loop(self, path: Names, settings: Settings) -> None:
        """Give a stack that no selected unit owns to the module that nn.scan runs: one layer at a time."""
        owner, known = self.claims[path]
        exits = self.exits.get(path, {})
        inside = {p: n for p, n in exits.items() if n < known and len(p) > len(owner)}
        if owner in self.selected or not inside:
            return
        body = min(inside, key=lambda p: (-inside[p], len(p)))
        self.units.setdefault(body, settings.inner)
        self.claims[path] = (body, inside[body])

    def _placement(
        self, path: Names, track: Track, stacked: tuple[int, ...], unit: Unit
    ) -> Placement:
        name = ".".join(path)
        value = unboxed(track.value)
        if len(stacked) > 1:
            raise ValueError(
                f"{name} (shape {tuple(value.shape)}) is stacked by two transforms (nn.scan, nn.vmap) round "
                "its unit. Make the module that holds the inner one the unit: units=..."
            )
        asked, ignored = self._asked(path, value)
        placement = place(
            name,
            value,
            unit.dp,
            own_spec=_own_spec(track.value),
            stacked_axis=stacked[0] % len(value.shape) if stacked else None,
            asked=asked,
            ignored=ignored,
            auto=unit.partitioning == "auto",
        )
        override = unit.mp_policy.override(name, value)
        placement = unit.kept(dataclasses.replace(placement, param_dtype=override))
        for at in sorted((at for at in self.settings if path[: len(at)] == at), key=len)[::-1]:
            placement = self.settings[at][0].kept(".".join(path[len(at) :]), placement)
        return placement

    def _asked(self, path: Names, value: Any) -> tuple[Any, bool]:
        """What the innermost `shard_placement_fn` says of a parameter, and whether it is left alone.

        Each `shard` call round the parameter speaks of its path below that call's module.
        """
        ask: Callable[[], Any] = lambda: None  # noqa: E731
        for at in sorted((at for at in self.settings if path[: len(at)] == at), key=len):
            settings, ignored = self.settings[at]
            below = ".".join(path[len(at) :])
            if ignored.selects(below, value):
                return None, True
            if settings.shard_placement_fn is not None:
                ask = functools.partial(settings.shard_placement_fn, below, value)
        return ask(), False

    def check_ignored(self, plan: ModulePlan) -> None:
        """Check that each glob of `ignored_params` has selected a parameter."""
        for at, (_, ignored) in self.settings.items():
            paths = [".".join(p[len(at) :]) for p in plan.placements if p[: len(at)] == at]
            kind = self.modules.get(at)  # not known of a module of which only a part is called
            ignored.check("module" if kind is None else kind.__name__, paths)


def _own_class(module: nn.Module) -> type:
    kind = type(module)
    while kind.__module__ == nn.transforms.__name__:
        kind = kind.__mro__[1]
    return kind


def _only_outside(selector: Any, module: nn.Module) -> bool:
    """Whether a class selects the transformed class itself, not the one that it wraps."""
    return isinstance(selector, type) and not issubclass(_own_class(module), selector)


def _own_spec(box: Any) -> PartitionSpec | None:
    """The PartitionSpec of the user's annotation: `nn.with_partitioning`, `nn.with_logical_partitioning`.

    Logical names become mesh axes by the first rule that fits; a mesh axis that an earlier dimension has
    taken is not given twice.
    """
    if isinstance(box, nn.LogicallyPartitioned):
        rules = box.rules or nn.get_logical_axis_rules()
        spec = nn.spmd.logical_to_mesh_axes(box.names, rules)
        return PartitionSpec(*(None if e is PartitionSpec.UNCONSTRAINED else e for e in spec or ()))
    if isinstance(box, nn.Partitioned):
        return box.get_partition_spec()
    return spec_of(box) if is_array(box) else None
