"""What calling an NNX unit does: open the region, gather, call the user's forward."""

from __future__ import annotations

import contextvars
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from jfsdp import auto
from jfsdp import tape as tapes
from jfsdp.activations import names_of, naming
from jfsdp.calls import Result
from jfsdp.hidden import Shard, gathered_types
from jfsdp.nnx_tree import (
    class_name,
    owned,
    placement_of,
    unit_of,
    units_of_variables,
    walk,
)
from jfsdp.offload import to_device, typed_on_device
from jfsdp.remat import refuse_gathered
from jfsdp.schedule import call_scheduled
from jfsdp.units import Unit, cast_floating
from jfsdp.weights import Weight

__all__ = ["Call", "call_auto", "call_here", "called_by_a_unit"]

_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("inside", default=False)


class Call:
    """One call of a unit, as a function of arrays.

    The module and its arguments are split into structure and arrays, and merged again inside every
    function that jax traces: a Variable may only change at the trace level it was made at.
    """

    def __init__(self, module: Any, method: Callable, args: tuple, kwargs: dict[str, Any]):
        self.method = method
        self.name = f"{class_name(module)}.{method.__name__}"
        self.objects = (module, args, kwargs)
        self.graphdef, self.state = nnx.split(self.objects, graph=True)
        self.leaves, self._treedef = jax.tree.flatten(self.state)

    def trace(
        self,
        leaves: Sequence[Any],
        prepare: Callable[..., None],
        invoke: Callable[..., Any],
    ) -> tuple[list[tuple[str, Any]], list[tuple[nnx.Variable, Any]]]:
        """Run the call on `leaves`.

        Args:
            leaves: arrays in place of `self.leaves`.
            prepare: changes the merged (module, args, kwargs) before the forward.
            invoke: calls the forward on them.

        Returns:
            The arrays of the result with their places in it, and the arrays of changed state with the
            Variables that hold them.
        """
        objects = nnx.merge(self.graphdef, jax.tree.unflatten(self._treedef, leaves))
        prepare(*objects)
        before = dict(_variables(objects))
        values = {path: v.get_raw_value() for path, v in before.items()}
        structure = nnx.graphdef(objects, graph=True)
        result = invoke(*objects)
        self._check_structure(before, structure, objects)

        self.result = Result(result)
        changed = {
            path: v
            for path, v in before.items()
            if v.get_raw_value() is not values[path] and not _leaves_as_it_came(v)
        }
        self.changed_paths = list(changed)
        self._changed = {p: jax.tree.structure(v.get_raw_value()) for p, v in changed.items()}
        return self.result.arrays, [
            (v, x) for v in changed.values() for x in jax.tree.leaves(v.get_raw_value())
        ]

    def numbered(self) -> tuple[Any, tuple, dict[str, Any]]:
        """The module, args and kwargs with the index of each array in `leaves` in its place."""
        numbers = jax.tree.unflatten(self._treedef, range(len(self.leaves)))
        return nnx.merge(self.graphdef, numbers)

    def finish(self, arrays: Sequence[Any], states: Sequence[Any]) -> Any:
        """Write changed state to the caller's own Variables and rebuild the result."""
        variables, remaining = dict(_variables(self.objects)), iter(states)
        for path, treedef in self._changed.items():
            value = jax.tree.unflatten(treedef, itertools.islice(remaining, treedef.num_leaves))
            variables[path].set_raw_value(value)
        return self.result.rebuild(arrays)

    def _check_structure(self, before: dict[str, Any], structure: Any, objects: Any) -> None:
        if nnx.graphdef(objects, graph=True) == structure:
            return
        after = dict(_variables(objects))
        new = [_described(path, after[path]) for path in after.keys() - before.keys()]
        gone = [_described(path, before[path]) for path in before.keys() - after.keys()]
        what = (
            f"creates Variables:\n{chr(10).join(sorted(new))}"
            if new
            else f"removes Variables:\n{chr(10).join(sorted(gone))}"
            if gone
            else "changes a plain attribute of a module (a counter, a flag)."
        )
        raise ValueError(
            f"{self.name} is called through a region of jfsdp and {what}\n"
            "State that a forward changes must exist before the call, as an nnx.Variable whose value it "
            "replaces: create it in __init__, or return it (for sown values: out_specs)."
        )


def _described(path: str, variable: nnx.Variable) -> str:
    where, _, rest = path.partition(".")
    return f"  {rest if where == '0' else f'arguments.{rest}'}: {type(variable).__name__}"


def _variables(tree: Any) -> list[tuple[str, nnx.Variable]]:
    return [(path, node) for path, node in walk(tree) if isinstance(node, nnx.Variable)]


def _leaves_as_it_came(variable: nnx.Variable) -> bool:
    # nnx.remat and friends hand every Variable back as a new tracer, changed or not.
    return placement_of(variable) is not None or isinstance(variable, nnx.RngKey)


# --------------------------------------------------------------------------------------------------
# In the per-device view


def called_by_a_unit() -> bool:
    """Whether the code being traced was called by a unit's forward."""
    return _inside.get()


def call_here(call: Call, unit: Unit, outermost: bool) -> Any:
    """Call a unit in the per-device view: gather its parameters, run its forward.

    Args:
        call: the call.
        unit: the unit's settings.
        outermost: no unit outside of this one has hidden the shards of what is below yet. It says when the
            parameters of all are gathered.
    """
    units = (unit_of(node) for _, node in walk(call.objects[0]))
    named = any(names_of(u.offload_policy) for u in units if u is not None)
    if outermost:
        _check_shards(call.objects, unit)
        weights, paths = _weights(call)
        if weights or named:

            def scheduled(leaves: Sequence[Any], groups: Mapping[int, int]) -> tapes.Rows:
                known = {paths[index]: group for index, group in groups.items()}
                return _gathering(call, unit, known)(leaves)

            rows = call_scheduled(scheduled, call.leaves, weights, prefetch=unit.prefetch)
            return call.finish(*rows)
    body = run = _gathering(call, unit, {} if outermost else None)
    shards, wholes = gathered_types(_shards(call, outermost), unit)
    if shards and unit.reshards(is_root=not _inside.get()):
        run = jax.checkpoint(
            lambda leaves: tapes.call_here(body, leaves, named),
            policy=refuse_gathered(shards, wholes),
        )
    return call.finish(*run([to_device(x) for x in call.leaves]))


def _gathering(call: Call, unit: Unit, gathered: Mapping[str, int] | None) -> tapes.Body:
    """The forward, its unit's parameters whole.

    Args:
        call: the call.
        unit: the unit's settings.
        gathered: None inside of another unit. Of the outermost one: the parameters that are whole already,
            by path, each with the number of its unit.
    """

    def prepare(module: Any, args: tuple, kwargs: dict) -> None:
        if gathered is not None:
            _hide_shards((module, args, kwargs), gathered)
        _refuse_strangers(call.name, module)
        for variable in owned(module).values():
            value = variable.get_raw_value()
            if isinstance(value, Shard):
                variable.set_raw_value(value.unsharded(unit))

    return _body(call, unit, prepare, lambda tree: tree)


def _weights(call: Call) -> tuple[list[Weight], dict[int, str]]:
    """What the schedule of the outermost unit's call may gather, and the path of each by its index."""
    numbered = call.numbered()
    owners = units_of_variables(numbered[0])
    weights, paths = [], {}
    for path, variable in _variables(numbered):
        placement, units = placement_of(variable), owners.get(id(variable), ())
        if placement is None or len(units) != 1:
            continue  # a parameter tied between units is gathered by each of them
        ((group, unit),) = units
        places = variable.get_raw_value()
        if not isinstance(places, Shard):
            places = Shard(places, placement)
        shard = jax.tree.map(lambda index: call.leaves[index], places)
        weight = shard.weight(unit, group == 0, group, places)
        if weight is not None:
            weights.append(weight)
            paths[weight.index] = path
    return weights, paths


def call_auto(call: Call, unit: Unit) -> Any:
    """Call a unit in the global view with casts and sharding constraints; XLA communicates."""

    def prepare(module: Any, args: tuple, kwargs: dict) -> None:
        _refuse_strangers(call.name, module)
        for variable in owned(module).values():
            placement = placement_of(variable)
            if placement is not None:
                variable.set_raw_value(auto.whole(variable.get_raw_value(), placement, unit))

    body = _body(call, unit, prepare, lambda tree: auto.pin_batch(tree, unit.dp, _is_node))
    placed = [(v.get_raw_value(), placement_of(v)) for v in owned(call.objects[0]).values()]
    parameters = [(typed_on_device(value), p) for value, p in placed if p is not None]
    leaves = [to_device(x) for x in call.leaves]
    if any(p.dims for _, p in parameters) and unit.reshards(is_root=not _inside.get()):
        return call.finish(*auto.call_gathered_again(body, leaves, parameters, unit))
    return call.finish(*body(leaves))


def _body(
    call: Call, unit: Unit, prepare: Callable[..., None], pin: Callable[[Any], Any]
) -> tapes.Body:
    """The forward with casts, as a function of arrays."""
    policy = unit.mp_policy

    def invoke(module: Any, args: tuple, kwargs: dict) -> Any:
        if policy.cast_forward_inputs:
            args, kwargs = cast_floating((args, kwargs), policy.param_dtype, is_leaf=_is_node)
        args, kwargs = pin((args, kwargs))
        token = _inside.set(True)
        try:
            with naming(class_name(module), unit.offload_policy):
                result = call.method(module, *args, **kwargs)
        finally:
            _inside.reset(token)
        return pin(cast_floating(result, policy.output_dtype, is_leaf=_is_node))

    def body(leaves: Sequence[Any]) -> tapes.Rows:
        arrays, states = call.trace(leaves, prepare, invoke)
        return [x for _, x in arrays], [x for _, x in states]

    return body


def _is_node(value: Any) -> bool:
    return isinstance(value, nnx.Pytree | nnx.Variable)


def _hide_shards(tree: Any, gathered: Mapping[str, int]) -> None:
    for path, variable in _variables(tree):
        placement = placement_of(variable)
        if placement is None:
            continue
        value = variable.get_raw_value()
        shard = value if isinstance(value, Shard) else Shard(value, placement)
        if path in gathered:
            shard = Shard(shard.array, placement, group=gathered[path])
        variable.set_raw_value(shard)


def _check_shards(tree: Any, unit: Unit) -> None:
    for _, variable in _variables(tree):
        placement, shard = placement_of(variable), variable.get_raw_value()
        if placement is None or isinstance(shard, Shard):
            continue
        expected = placement.part_at_rank(shard.ndim, unit.dp)
        if any(shard.shape[dim] != expected[dim] for dim in placement.telling_at_rank(shard.ndim)):
            raise ValueError(
                f"{placement.path}: sharded with shape {placement.shape}, so that a device's shard is "
                f"{expected}, but this call sees {shard.shape}. Either it was set to another shape "
                "after jfsdp.shard, or your own shard_map closes over the model: pass the model's state "
                "through its in_specs"
                + (", what is in ignored_params whole." if placement.ignored else ".")
            )


def _refuse_strangers(caller: str, module: Any) -> None:
    strangers = [
        f"  {path}: shape {tuple(variable.shape)}, dtype {variable.dtype}"
        for path, variable in owned(module).items()
        if isinstance(variable, nnx.Param) and placement_of(variable) is None
    ]
    if strangers:
        raise ValueError(
            f"{caller}: these parameters were added after jfsdp.shard and are not sharded:\n"
            + "\n".join(strangers)
            + "\nAdd them first and shard the model afterwards."
        )


def _shards(call: Call, outermost: bool) -> Iterator[Shard]:
    """The shards of the unit that is called."""
    for variable in owned(call.objects[0]).values():
        value, placement = variable.get_raw_value(), placement_of(variable)
        if isinstance(value, Shard):
            yield value
        elif placement is not None and outermost:
            yield Shard(value, placement)
