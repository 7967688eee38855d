"""`value_and_grad` of a loss of Linen parameters: which arrays are whose, gradients in a tree like them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jfsdp import region as regions
from jfsdp.accumulate import Step, differentiate
from jfsdp.auto import is_auto
from jfsdp.borders import output_rows
from jfsdp.calls import Result, argument_names, key_name
from jfsdp.layout import lay
from jfsdp.linen_call import called_in_a_region
from jfsdp.linen_lift import is_box
from jfsdp.linen_plan import ModulePlan, recording, unboxed
from jfsdp.losses import (
    Input,
    Loss,
    Options,
    arguments,
    check_floating,
    rows_of_aux,
    split_result,
)
from jfsdp.mesh import DataParallelMesh
from jfsdp.optimizer import names_of
from jfsdp.placement import Placement
from jfsdp.selectors import matcher
from jfsdp.units import Unit, is_array

__all__ = ["value_and_grad"]

# Part of the key of every jit cache: under a new value what a loss calls through jax.jit is traced again.
_anew = jax.make_user_context(None)


def value_and_grad(
    loss_fn: Callable[..., Any], options: Options, params: Any, args: tuple, kwargs: dict
) -> tuple[Any, Any, Any]:
    """The loss, what it returns beside, and the gradients of `params`.

    Raises: see `jfsdp.value_and_grad`.
    """
    name = f"value_and_grad({loss_fn.__name__})"
    call = _Call(name, loss_fn, (params, args, kwargs))
    plans = call.plans()
    dp = _one_mesh(name, plans)
    per_device = regions.in_per_device_view(dp, name)
    shards = call.parameters(plans, per_device)
    trained = call.trained(options.wrt, shards)
    given = {
        index: (where, call.leaves[index])
        for index, where in call.arguments()
        if index not in shards and index not in trained
    }
    found, rows = arguments(name, given, dp, options.in_specs, per_device)
    inputs = [
        found.get(index)
        or _parameter(
            call.path(index), shards.get(index), "parameter" if index in trained else "copy"
        )
        for index in range(len(call.leaves))
    ]
    results: list[Result] = []

    def run(leaves: list[Any]) -> Loss:
        with called_in_a_region(() if per_device else dp.axes):
            total, weight, aux = split_result(name, call.run(leaves), options.has_aux)
        results[:] = [Result(aux)]
        return Loss(total, weight, [x for _, x in results[0].arrays], {})

    step = Step(
        name=name,
        dp=dp,
        inputs=inputs,
        trained=trained,
        rows=rows,
        run=run,
        rows_of_aux=lambda rows: rows_of_aux(name, results[0], rows, dp, options.out_specs),
        rows_of_state=dict,
        kinds=output_rows(dp, []),
    )
    found_results = differentiate(step, call.leaves, options)
    gradients = dict(zip(trained, found_results.gradients, strict=True))
    aux = results[0].rebuild(found_results.aux)
    return found_results.loss, aux, call.gradients(gradients, shards, per_device)


def _one_mesh(name: str, plans: list[ModulePlan]) -> DataParallelMesh:
    units = [unit for plan in plans for unit in plan.units.values()]
    if not units:
        raise ValueError(
            f"{name} calls no module that jfsdp.shard returned, so there is nothing to gather and to reduce. "
            "For other modules there is jax.value_and_grad."
        )
    if any(is_auto(unit) for unit in units):
        raise ValueError(
            f"{name} calls a module with auto partitioning, where XLA decides when gradients are reduced. "
            'Use jax.value_and_grad, or partitioning="manual".'
        )
    others = [unit.dp for unit in units if unit.dp != units[0].dp]
    if others:
        raise ValueError(
            f"{name} calls modules over different data-parallel axes: {units[0].dp.axes} and "
            f"{others[0].axes}, or of different meshes. Give all the same."
        )
    return units[0].dp


def _parameter(path: str, shard: tuple[Unit, Placement] | None, kind: str) -> Input:
    if shard is None:
        return Input(jax.sharding.PartitionSpec(), kind, path)
    return Input(shard[1].manual_spec(), "parameter", path, shard)


class _Call:
    """A call of a loss as a function of arrays, the boxes round parameters opened."""

    def __init__(self, name: str, loss_fn: Callable[..., Any], tree: tuple[Any, tuple, dict]):
        self.name, self._loss_fn, self._tree = name, loss_fn, tree
        flat, self._treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_box)
        opened = [(path, unboxed(value)) for path, value in flat]
        self._constants = [_ARRAY if is_array(x) else x for _, x in opened]
        self.leaves = [x for _, x in opened if is_array(x)]
        self._places = [path for path, x in opened if is_array(x)]

    def run(self, leaves: list[Any]) -> Any:
        """The loss on these leaves."""
        values = iter(leaves)
        filled = [next(values) if x is _ARRAY else x for x in self._constants]
        params, args, kwargs = jax.tree.unflatten(self._treedef, filled)
        return self._loss_fn(params, *args, **kwargs)

    def plans(self) -> list[ModulePlan]:
        """Those of the modules that the loss calls, found by tracing it."""
        with recording() as plans, _anew(object()):
            jax.eval_shape(self.run, self.leaves)
        return plans

    def path(self, index: int) -> str:
        """The path of a leaf, for messages: of a parameter below the first argument."""
        return ".".join(names_of(self._places[index])[1:])

    def arguments(self) -> Iterator[tuple[int, str]]:
        """The leaves that are not of the first argument, with the names of the arguments they are in."""
        names = argument_names(self._loss_fn, len(self._tree[1]))
        for index, (where, *rest) in enumerate(self._places):
            if where.idx:
                first, *below = map(key_name, rest)
                head = names[first] if where.idx == 1 else first
                yield index, ".".join(map(str, (head, *below)))

    def parameters(self, plans: list[ModulePlan], local: bool) -> dict[int, tuple[Unit, Placement]]:
        """The leaves that lie as a parameter of these plans: by the end of their path, and their shape."""
        found = {}
        for index, (place, leaf) in enumerate(zip(self._places, self.leaves, strict=True)):
            names = names_of(place)
            for plan in plans:
                for start in range(len(names)):
                    path = names[start:]
                    placement = plan.placements.get(path)
                    if placement is None:
                        continue
                    shape = plan.local_shape(path) if local else placement.shape
                    if tuple(leaf.shape) == shape:
                        found.setdefault(index, (plan.units[plan.owners[path]], placement))
        return found

    def trained(self, wrt: Any, shards: dict[int, tuple[Unit, Placement]]) -> list[int]:
        """The leaves of the first argument that are differentiated."""
        first = [index for index, (where, *_) in enumerate(self._places) if not where.idx]
        if not any(index in shards for index in first):
            raise ValueError(
                f"{self.name}: its first argument holds no parameter of the sharded modules that it calls. "
                "Give it what model.init returned, or its params."
            )
        if wrt is None:
            chosen = set(first)
        else:
            chosen = set()
            for selector, matches in matcher(wrt):
                hits = [index for index in first if matches(self.path(index), self.leaves[index])]
                if not hits:
                    listed = ", ".join([self.path(index) for index in first][:20])
                    raise ValueError(f"{self.name}: wrt={selector!r} selects none of {listed}.")
                chosen.update(hits)
        check_floating(
            self.name,
            ((self.path(index), self.leaves[index]) for index in sorted(chosen)),
            "Leave them out by wrt=, a glob over dotted paths or a predicate f(path, leaf).",
        )
        return sorted(chosen)

    def gradients(
        self,
        gradients: dict[int, jax.Array],
        shards: dict[int, tuple[Unit, Placement]],
        local: bool,
    ) -> Any:
        """A tree like the first argument; zeros, laid as the parameters, for what is not differentiated."""

        def zeros(index: int) -> jax.Array:
            value = jnp.zeros_like(self.leaves[index])
            if local or index not in shards:
                return value
            unit, placement = shards[index]
            return lay(value, placement.sharding(unit.dp.mesh))

        params = self._tree[0]
        count = len(jax.tree.leaves(params))
        leaves = [gradients[i] if i in gradients else zeros(i) for i in range(count)]
        return jax.tree.unflatten(jax.tree.structure(params), leaves)


_ARRAY = object()
