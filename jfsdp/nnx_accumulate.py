"""`value_and_grad` of a loss of an NNX module: what its arguments hold, gradients as `nnx.grad` has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from jfsdp import region as regions
from jfsdp.accumulate import Step, differentiate
from jfsdp.auto import is_auto
from jfsdp.borders import Row, output_rows
from jfsdp.calls import check_argument_names
from jfsdp.losses import (
    Input,
    Loss,
    Options,
    arguments,
    check_floating,
    rows_of_aux,
    split_result,
)
from jfsdp.nnx_call import Call
from jfsdp.nnx_region import arguments as found_in
from jfsdp.nnx_region import leaf_specs, row_of_state, statistics_over
from jfsdp.nnx_tree import (
    FSDPModule,
    check_axes,
    class_name,
    placement_of,
    unit_of,
    units_of_variables,
    walk,
)
from jfsdp.placement import Placement
from jfsdp.units import Unit

__all__ = ["value_and_grad"]


def value_and_grad(
    loss_fn: Callable[..., Any], options: Options, module: nnx.Module, args: tuple, kwargs: dict
) -> tuple[Any, Any, Any]:
    """The loss, what it returns beside, and the gradients of `module`.

    Raises: see `jfsdp.value_and_grad`.
    """
    call = Call(module, loss_fn, args, kwargs)
    call.name = f"value_and_grad({loss_fn.__name__})"
    unit = _outermost(call.name, module)
    check_axes(module, unit.dp)
    check_argument_names(call.name, [call.method], kwargs, options.in_specs)
    per_device = regions.in_per_device_view(unit.dp, call.name)
    given, rows = arguments(call.name, found_in(call), unit.dp, options.in_specs, per_device)
    held = _Held(call, options.wrt)
    inputs = held.inputs(call, unit, given, per_device)
    specs = [spec for _, spec in unit.state_specs]
    statistics: set[int] = set()
    changed: dict[int, Any] = {}

    def run(leaves: list[Any]) -> Loss:
        parts: list[Any] = []

        def prepare(*objects: Any) -> None:
            if not per_device:
                statistics.update(statistics_over(unit.dp.axes, objects))

        def invoke(module: Any, args: tuple, kwargs: dict) -> Any:
            total, weight, aux = split_result(
                call.name, loss_fn(module, *args, **kwargs), options.has_aux
            )
            parts[:] = [total, weight]
            return aux

        arrays, states = call.trace(leaves, prepare, invoke)
        places = [held.leaves_at[path] for path in call.changed_paths]
        indices = [index for place in places for index in place]
        changed.clear()
        changed.update(zip(indices, (variable for variable, _ in states), strict=True))
        new = dict(zip(indices, (x for _, x in states), strict=True))
        return Loss(parts[0], parts[1], [x for _, x in arrays], new)

    def rows_of_state() -> dict[int, Row]:
        return {
            index: row_of_state(call, variable, unit, same=id(variable) in statistics)
            for index, variable in changed.items()
        }

    step = Step(
        name=call.name,
        dp=unit.dp,
        inputs=inputs,
        trained=held.trained,
        rows=rows,
        run=run,
        rows_of_aux=lambda rows: rows_of_aux(
            call.name, call.result, rows, unit.dp, options.out_specs
        ),
        rows_of_state=rows_of_state,
        kinds=output_rows(unit.dp, specs),
    )
    results = differentiate(step, call.leaves, options)
    aux = call.finish(results.aux, list(results.changed.values()))
    return results.loss, aux, jax.tree.unflatten(held.structure, results.gradients)


def _outermost(name: str, module: nnx.Module) -> Unit:
    """The settings of the outermost unit of a module that is sharded as a whole."""
    unit = next((unit_of(node) for _, node in walk(module) if isinstance(node, FSDPModule)), None)
    if unit is None:
        raise ValueError(
            f"{name}: this {class_name(module)} holds no unit. Apply jfsdp.shard to it first; for an "
            "unsharded module there is nnx.value_and_grad."
        )
    if is_auto(unit):
        raise ValueError(
            f"{name}: this {class_name(module)} has auto partitioning, where XLA decides when gradients are "
            'reduced. Use nnx.value_and_grad, or partitioning="manual".'
        )
    return unit


class _Held:
    """Where the arrays of a call are in its module and arguments.

    Attributes:
        leaves_at: for each Variable, by its path in (module, args, kwargs), the indices of its arrays.
        trained: the indices of the arrays that are differentiated, in the order of their gradients.
        structure: of the gradients.
    """

    def __init__(self, call: Call, wrt: Any):
        module, args, kwargs = call.numbered()
        variables = [(p, v) for p, v in walk((module, args, kwargs)) if isinstance(v, nnx.Variable)]
        self.leaves_at = {path: jax.tree.leaves(v.get_raw_value()) for path, v in variables}
        selected = nnx.state(module, nnx.Param if wrt is None else wrt)
        self.trained, self.structure = jax.tree.flatten(selected)
        self._variable_at = {i: (p, v) for p, v in variables for i in self.leaves_at[p]}
        self._units = units_of_variables(module)
        self._check(call, wrt)

    def _check(self, call: Call, wrt: Any) -> None:
        if not self.trained:
            raise ValueError(f"{call.name}: wrt={wrt!r} selects no Variable of the module.")
        check_floating(
            call.name,
            ((self._path(index), call.leaves[index]) for index in self.trained),
            "Leave them out by wrt=, for example wrt=nnx.All(nnx.Param, lambda path, x: ...).",
        )

    def _path(self, index: int) -> str:
        return self._variable_at[index][0].removeprefix("0.")

    def inputs(
        self, call: Call, unit: Unit, given: Mapping[int, Input], per_device: bool
    ) -> list[Input]:
        """What each array is; `given` says it of those among the arguments."""
        specs, _, keys = leaf_specs(call, unit, {index: one.spec for index, one in given.items()})
        found = []
        for index, (spec, folds) in enumerate(zip(specs, keys, strict=True)):
            if index in given:
                found.append(given[index])
                continue
            variable = self._variable_at[index][1]
            placement = placement_of(variable)
            shard = None if placement is None else self._shard(call, variable, placement)
            if shard is not None or index in self.trained:
                kind = "parameter"
            else:
                kind = "copy" if isinstance(variable, nnx.RngKey) else "state"
            found.append(Input(spec, kind, self._path(index), shard, folds and not per_device))
        return found

    def _shard(self, call: Call, variable: Any, placement: Placement) -> tuple[Unit, Placement]:
        units = self._units.get(id(variable))
        assert units, f"{call.name}: {placement.path} is placed, but no unit owns it"
        return units[0][1], placement
