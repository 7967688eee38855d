"""What calling a Linen unit does: lift the call to a function of arrays, and see which view it is in."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax.core.lift import pack

from jfsdp import region as regions
from jfsdp.auto import is_auto
from jfsdp.calls import check_argument_names
from jfsdp.hidden import Absent, Shard
from jfsdp.layout import axes_of_entry
from jfsdp.linen_discovery import discover_alone, is_transformed
from jfsdp.linen_init import initialize_inside
from jfsdp.linen_lift import LiftedCall
from jfsdp.linen_plan import (
    PARAMS,
    ModulePlan,
    Names,
    Settings,
    named_leaves,
    own_parts_explained,
    record,
)
from jfsdp.linen_region import call_in_region
from jfsdp.linen_unit import call_auto, call_here
from jfsdp.units import Unit

__all__ = ["call_module", "called_in_a_region"]


@dataclasses.dataclass(frozen=True)
class _Frame:
    """What the units inside a call know of it.

    Attributes:
        plan: the units and parameters of the outermost module.
        active: the paths of the units that are being called.
        manual: the axes of a region of ours. BatchNorm averages over them, logical constraints leave them
            out.
        statistics: the paths of the BatchNorms that did.
    """

    plan: ModulePlan
    active: frozenset[Names] = frozenset()
    manual: tuple[str, ...] = ()
    statistics: set[Names] = dataclasses.field(default_factory=set)


_frame: contextvars.ContextVar[_Frame | None] = contextvars.ContextVar("frame", default=None)


_region_of_the_loss: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar(
    "region_of_the_loss", default=()
)


@contextlib.contextmanager
def called_in_a_region(axes: tuple[str, ...]) -> Iterator[None]:
    """While a loss is traced in a region of ours that was opened round it: its axes."""
    token = _region_of_the_loss.set(axes)
    try:
        yield
    finally:
        _region_of_the_loss.reset(token)


@contextlib.contextmanager
def _in(frame: _Frame) -> Iterator[None]:
    """Inside a unit's forward, where the units below are called as such.

    Entered whenever jax traces the forward: that of what a `jax.jit` of the user's calls once more when the
    call itself is over, to differentiate it.
    """
    units_below = (
        nn.intercept_methods(_call_units_inside)
        if _frame.get() is None
        else contextlib.nullcontext()
    )
    token = _frame.set(frame)
    try:
        with units_below:
            yield
    finally:
        _frame.reset(token)


def call_module(module: Any, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Call a method of a module that `shard` returned.

    Args:
        module: the module, bound.
        function: the method of the module's own class.
        args: its arguments.
        kwargs: likewise.
    """
    if module.scope is None:  # Flax says what is wrong
        return function(module, *args, **kwargs)
    if module.is_initializing():
        return initialize_inside(module, function, args, kwargs)
    frame = _frame.get()
    if frame is not None:
        unit = frame.plan.units.get(module.path)
        if unit is None or module.path in frame.active:
            return function(module, *args, **kwargs)
        return _call_unit(module, function, args, kwargs, unit, frame)
    plan = _plan_of(module, function, args, kwargs)
    record(plan)
    unit = plan.units[module.path]
    return _call_unit(module, function, args, kwargs, unit, _Frame(plan))


def _call_units_inside(next_fun: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
    module: nn.Module = context.module
    frame = _frame.get()
    if frame is None or module.scope is None:
        return next_fun(*args, **kwargs)
    if context.method_name == "setup":
        with _absent_shards(module.scope):
            return next_fun(*args, **kwargs)
    unit = frame.plan.units.get(module.path)
    if unit is not None and module.path not in frame.active and not is_transformed(module):
        function = context.orig_method.func
        return _call_unit(module, function, args, kwargs, unit, frame, captured=True)
    if frame.manual and isinstance(module, nn.BatchNorm) and module.axis_name is None:
        frame.statistics.add(module.path)
        object.__setattr__(module, "axis_name", frame.manual)
        try:
            return next_fun(*args, **kwargs)
        finally:
            object.__setattr__(module, "axis_name", None)
    return next_fun(*args, **kwargs)


@contextlib.contextmanager
def _absent_shards(scope: Any) -> Iterator[None]:
    """Let a module set itself up before its unit is called, as Flax does.

    It compares the shapes of the parameters with those that it would make: of shards it must see nothing.
    What it sets up this way is done anew when the unit is called, with whole weights.
    """

    def absent(value: Any) -> Any:
        return Absent(value.placement) if isinstance(value, Shard) else value

    present = scope.variables().get(PARAMS)
    if present is None:
        yield
        return
    held = scope._variables[PARAMS]
    scope._variables[PARAMS] = jax.tree.map(absent, held, is_leaf=lambda x: isinstance(x, Shard))
    try:
        yield
    finally:
        scope._variables[PARAMS] = held


def _plan_of(module: Any, function: Callable, args: tuple, kwargs: dict) -> ModulePlan:
    settings: Settings = module.jfsdp
    whole = not regions.in_per_device_view(settings.unit.dp, _name(module, function))
    present = module.scope.variables().get(PARAMS, {})
    shapes = {path: _shape(leaf) for path, leaf in named_leaves(present)}
    for plan in settings.plans_of(module):
        if plan.covers(shapes, whole):
            return plan.under(module.path)
    plan = discover_alone(module, function, args, kwargs)
    settings.keep(module, plan)
    _check_shapes(_name(module, function), plan, shapes, whole)
    return plan.under(module.path)


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple((leaf.array if isinstance(leaf, Shard) else leaf).shape)


def _check_shapes(
    name: str, plan: ModulePlan, shapes: Mapping[Names, tuple[int, ...]], whole: bool
) -> None:
    wrong = [
        f"  {'.'.join(path)}: shape {shapes[path]}, expected {expected}"
        + ("" if whole else f", the shard of {placement.shape}")
        for path, placement in plan.placements.items()
        if path in shapes
        and shapes[path] != (expected := placement.shape if whole else plan.local_shape(path))
    ]
    if not wrong:
        return
    listed = "\n".join(wrong)
    if whole:
        raise ValueError(
            f"{name} is called with parameters that are not those it makes itself:\n{listed}\nThey are of "
            "another configuration, or the arguments have another shape than in model.init."
        )
    raise ValueError(
        f"{name} is called per device, in a shard_map or pmap of your own, with parameters that are not the "
        f"device's shards:\n{listed}\nGive them to shard_map by in_specs=jax.tree.map(lambda x: "
        "x.sharding.spec, params), or make them by model.init in the same pmap."
    )


def _name(module: Any, function: Callable) -> str:
    return f"{type(module).__name__}.{getattr(function, '__name__', 'method')}"


def _call_unit(
    module: Any,
    function: Callable,
    args: tuple,
    kwargs: dict,
    unit: Unit,
    frame: _Frame,
    captured: bool = False,
) -> Any:
    """Call a unit; `captured` if Flax captures its result outside of it, as if it were not one."""

    def core(inner: Any, *args: Any, **kwargs: Any) -> Any:
        return function(inner, *args, **kwargs)

    functools.update_wrapper(core, function)
    lift = functools.partial(_lifted, module, unit, frame, function, captured)
    return nn.transforms.decorator_lift_transform(lift, core)(module, *args, **kwargs)


@contextlib.contextmanager
def _rules_without(axes: tuple[str, ...]) -> Iterator[None]:
    """Keep `nn.with_logical_constraint` in the model from naming the axes that are manual in a region."""

    def rest(entry: Any) -> Any:
        kept = tuple(axis for axis in axes_of_entry(entry) if axis not in axes)
        return kept if len(kept) > 1 else kept[0] if kept else None

    rules = nn.get_logical_axis_rules()
    if not axes or not rules:
        yield
        return
    with nn.logical_axis_rules([(name, rest(entry)) for name, entry in rules]):
        yield


def _forget(path: Names, function: Callable, scopes: list[Any]) -> None:
    """Drop what Flax's capture_intermediates has captured inside; it captures the same outside."""
    name = function.__name__
    for scope in scopes:
        kept = scope.path == path and scope.get_variable("intermediates", name)
        if kept and scope.is_mutable_collection("intermediates"):
            scope.put_variable("intermediates", name, kept[:-1])
            return


def _lifted(
    module: Any, unit: Unit, frame: _Frame, function: Callable, captured: bool, core: Callable
) -> Callable[..., Any]:
    """`core`, a function of scopes, called as a unit."""
    name, is_root = _name(module, function), not frame.active
    per_device = regions.in_per_device_view(unit.dp, name)
    by_xla = is_auto(unit)
    inside = dataclasses.replace(frame, active=frame.active | {module.path})
    if not per_device and not by_xla:
        inside = dataclasses.replace(inside, manual=unit.dp.axes, statistics=set())
    elif is_root and per_device:
        inside = dataclasses.replace(inside, manual=_region_of_the_loss.get())

    def within(scopes: list[Any], *args: Any, **kwargs: Any) -> Any:
        with _in(inside), _rules_without(inside.manual), own_parts_explained(frame.plan):
            result = core(scopes, *args, **kwargs)
        if captured:
            _forget(module.path, function, scopes)
        return result

    def wrapper(scopes: list[Any], *args: Any, **kwargs: Any) -> Any:
        def inner(
            scope_fn: Any, repack: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any
        ) -> tuple[Any, Any]:
            functions = (within, scope_fn, repack)
            call = LiftedCall(name, scopes, frame.plan, functions, (variables, rngs, args, kwargs))
            if per_device:
                return call.finish(
                    *call_here(call, call.leaves, unit, frame.plan, module.path, is_root)
                )
            if by_xla:
                return call.finish(*call_auto(call, unit, frame.plan.owned(module.path), is_root))
            check_argument_names(name, [function], kwargs, unit.in_specs)
            return call_in_region(call, unit, frame.plan, module.path, function, inside.statistics)

        filters = ((PARAMS, True), (False, nn.DenyList(PARAMS)), (True,))
        return pack(inner, *filters, enable_kwargs=True)(scopes, *args, **kwargs)

    return wrapper
