"""`nnx.Optimizer` on a sharded model: moments lie as their parameters, scalars on the mesh.

optax makes counters with `jnp.zeros`, which lie on one device: the first step would compile once for
them there and once more for where they came out. `nnx.Optimizer` offers no hook, so its two methods
are wrapped, once, when the first module is sharded; optimizers of other models are left as they are.

The optimizer of an abstract model is abstract: descriptions of arrays with the shardings they would have.

With `shard_over` the state lies over more axes than its parameters. Its update then works in the finer
layout: it slices parameters and gradients, and gathers the parameters again.

Where parameters or state lie in host memory, `jfsdp.update_optimizer` does the step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from jfsdp.layout import lay, named_sharding
from jfsdp.mesh import AnyMesh
from jfsdp.nnx_tree import PLACEMENT, class_name, mesh_of, placement_of, walk
from jfsdp.offload import UNPINNED
from jfsdp.optimizer import (
    checked_axes,
    finer_spec,
    init_like,
    names_of,
    spec_in_shape,
    state_kind,
)
from jfsdp.placement import Placement
from jfsdp.policies import OffloadPolicy
from jfsdp.updates import checked_mode, update_optimizer

__all__ = ["init_module_optimizer", "watch_optimizers"]

_PLACED = "_jfsdp_placed"
_SHARD_OVER = "_jfsdp_shard_over"
_UPDATE_ON = "_jfsdp_update_on"


def init_module_optimizer(
    tx: Any,
    model: nnx.Module,
    *,
    wrt: Any = nnx.Param,
    shard_over: str | Sequence[str] | None = None,
    offload_policy: OffloadPolicy | None = None,
    update_on: str | None = None,
) -> nnx.Optimizer:
    """`nnx.Optimizer(model, tx, wrt=wrt)`, over more axes if asked: see `jfsdp.init_optimizer`."""
    checked_mode("init_optimizer: update_on", update_on)
    mesh = mesh_of(model)
    if mesh is None:
        raise ValueError(
            f"init_optimizer: nothing in this {class_name(model)} is sharded. Apply jfsdp.shard to it "
            "first, or take nnx.Optimizer."
        )
    axes = () if shard_over is None else checked_axes(shard_over, mesh)
    asked = () if offload_policy is None else (state_kind(offload_policy),)
    made_by: Any = _Born(tx, mesh, axes, asked, update_on)
    return nnx.Optimizer(model, made_by, wrt=wrt)


def watch_optimizers() -> None:
    """Wrap `nnx.Optimizer.__init__` and `update`; a second call does nothing."""
    init, update = nnx.Optimizer.__init__, nnx.Optimizer.update
    if hasattr(init, _PLACED):
        return

    @functools.wraps(init)
    def placed_init(self: nnx.Optimizer, model: Any, tx: Any, *args: Any, **kwargs: Any) -> None:
        mesh = mesh_of(model)
        if mesh is None:
            return init(self, model, tx, *args, **kwargs)
        born = tx if isinstance(tx, _Born) else _Born(tx, mesh)
        made_by: Any = born if born.axes or born.asked or _is_offloaded(model) else born.tx
        abstract = _is_abstract(model)
        if abstract and made_by is born.tx:
            made_by = _Describing(born.tx)
        init(self, model, made_by, *args, **kwargs)
        self.tx = born.tx
        for kind in born.asked:
            _keep_in(walk(self), kind)
        _place(walk(self), mesh, born.axes, _describe_on if abstract else _lay_on, _state_kind)
        setattr(self, _PLACED, True)
        setattr(self, _SHARD_OVER, born.axes)
        setattr(self, _UPDATE_ON, born.update_on)

    @functools.wraps(update)
    def checked_update(self: nnx.Optimizer, model: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, _PLACED) and mesh_of(model) is not None:
            raise ValueError(
                f"this {type(self).__name__} was built before jfsdp.shard({class_name(model)}): its "
                "state is whole on one device and would stay so. Build it after shard:\n"
                "  jfsdp.shard(model, ...)\n"
                "  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)"
            )
        offloaded = hasattr(self, _PLACED) and (_is_offloaded(model) or _is_offloaded(self))
        step = _update_offloaded if offloaded else update
        if vars(self).get(_SHARD_OVER):
            return _update_finer(functools.partial(step, self, model), self, model, *args, **kwargs)
        updates = step(self, model, *args, **kwargs)
        if hasattr(self, _PLACED):
            _keep_whole(self, mesh_of(model))
        if offloaded:
            _keep_unpinned(self, model)
        return updates

    setattr(placed_init, _PLACED, True)
    nnx.Optimizer.__init__ = placed_init
    nnx.Optimizer.update = checked_update


@dataclasses.dataclass(frozen=True)
class _Describing:
    """A gradient transformation as far as `nnx.Optimizer.__init__` uses it, which makes no arrays."""

    tx: Any

    def init(self, params: Any) -> Any:
        return jax.eval_shape(self.tx.init, params)


@dataclasses.dataclass(frozen=True)
class _Born:
    """A gradient transformation whose state is born where it belongs, and how that is updated.

    Attributes:
        axes: what the state is sharded over in addition to what its parameters are.
        asked: the kind of memory that all of it has, if that was asked for; none: as the placements say.
        update_on: `on` of `jfsdp.update_optimizer`.
    """

    tx: Any
    mesh: AnyMesh
    axes: tuple[str, ...] = ()
    asked: tuple[str | None, ...] = ()
    update_on: str | None = None

    def init(self, params: Any) -> Any:
        variables = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_variable)
        placed = [
            (names_of(path), placement)
            for path, variable in variables
            if (placement := placement_of(variable)) is not None
        ]
        parameters = [(path, placement.shape, placement.spec) for path, placement in placed]
        kinds = {path: (*self.asked, p.state_memory_kind)[0] for path, p in placed}
        return init_like(self.tx, params, parameters, self.mesh, self.axes, kinds)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _update_offloaded(optimizer: nnx.Optimizer, model: Any, grads: Any, /, **kwargs: Any) -> None:
    """What `nnx.Optimizer.update` does, with arrays in host memory. There are no updates to return."""

    def variables(tree: Any) -> Any:
        return nnx.as_pure(nnx.state(tree, optimizer.wrt, graph=optimizer.graph))

    params, state = update_optimizer(
        optimizer.tx,
        variables(grads),
        nnx.as_pure(optimizer.opt_state),
        variables(model),
        on=vars(optimizer)[_UPDATE_ON],
        **nnx.as_pure(kwargs),
    )
    nnx.update(model, params)
    nnx.update(optimizer.opt_state, nnx.state(state, graph=optimizer.graph))
    optimizer.step[...] += 1


def _update_finer(
    update: Callable[..., Any], optimizer: nnx.Optimizer, model: Any, grads: Any, **kwargs: Any
) -> Any:
    """Update in the layout of the state: on Explicit axes all operands must lie alike.

    Parameters and gradients in host memory come to the device for that: nothing is sliced on the host.
    """
    mesh, axes = mesh_of(model), vars(optimizer)[_SHARD_OVER]
    assert mesh is not None

    def variables(tree: Any) -> Any:
        return nnx.state(tree, optimizer.wrt, graph=optimizer.graph)

    def finer(gradient: Any) -> Any:
        if not isinstance(gradient, nnx.Variable):
            return gradient
        gradient = gradient.copy()
        _place([("", gradient)], mesh, axes, _lay_on)
        return gradient

    _place(walk(variables(model)), mesh, axes, _lay_on)
    grads = jax.tree.map(finer, variables(grads), is_leaf=_is_variable)
    updates = update(grads, **kwargs)
    _place(walk(variables(model)), mesh, (), _lay_on)
    _place(walk(variables(model)), mesh, (), _lay_on, _own_kind)
    _place(walk(optimizer), mesh, axes, _lay_on, _state_kind)
    return updates


def _own_kind(placement: Placement) -> str | None:
    return placement.memory_kind


def _state_kind(placement: Placement) -> str | None:
    return placement.state_memory_kind


def _keep_in(nodes: Iterable[tuple[str, Any]], kind: str | None) -> None:
    """Note another kind of memory for state than the placements of its parameters say."""
    for _, variable in nodes:
        placement = placement_of(variable) if isinstance(variable, nnx.Variable) else None
        if placement is not None:
            kept = dataclasses.replace(placement, state_memory_kind=kind)
            variable.set_metadata(PLACEMENT, kept)


def _is_offloaded(tree: Any) -> bool:
    """Whether a placement in a module or an optimizer names host memory."""
    placements = (placement_of(node) for _, node in walk(tree) if isinstance(node, nnx.Variable))
    return any(p is not None and (p.memory_kind or p.state_memory_kind) for p in placements)


def _keep_unpinned(optimizer: nnx.Optimizer, model: Any) -> None:
    """Lay what belongs in unpinned memory there: the types of arrays do not say so."""
    mesh = mesh_of(model)
    assert mesh is not None
    for tree, kind in ((model, _own_kind), (optimizer, _state_kind)):
        for path, variable in walk(tree):
            placement = placement_of(variable) if isinstance(variable, nnx.Variable) else None
            if placement is not None and kind(placement) == UNPINNED:
                _place([(path, variable)], mesh, (), _lay_on, kind)


def _is_abstract(model: Any) -> bool:
    values = [node.get_raw_value() for _, node in walk(model) if isinstance(node, nnx.Variable)]
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(values))


def _place(
    nodes: Iterable[tuple[str, Any]],
    mesh: AnyMesh,
    axes: Sequence[str],
    place: Callable[..., Any],
    kind_of: Callable[[Placement], str | None] | None = None,
) -> None:
    """Lay every Variable as its parameter, over `axes` too; what has another shape, on all devices.

    What lies as its parameter lies in memory of the kind that `kind_of` says; without it in the device's own.
    """
    for _, variable in nodes:
        if not isinstance(variable, nnx.Variable):
            continue
        value, placement = variable.get_raw_value(), placement_of(variable)
        spec = None
        if placement is not None and hasattr(value, "shape"):
            finer = finer_spec(placement.spec, placement.shape, axes, mesh)
            spec = spec_in_shape(finer, placement.shape, value.shape)
        if placement is not None and spec is None:  # a factored moment, or optax's MaskedNode
            variable.del_metadata(PLACEMENT)
        kind = None
        if placement is not None and spec is not None and kind_of is not None:
            kind = kind_of(placement)
        put = functools.partial(place, mesh, spec or PartitionSpec(), kind)
        variable.set_raw_value(jax.tree.map(put, value))


def _keep_whole(optimizer: nnx.Optimizer, mesh: AnyMesh | None) -> None:
    """Lay factored moments where they were: XLA shards those that it reduces sharded gradients to.

    The next step would compile again for them. In the per-device view there is nothing to lay.
    """
    if mesh is None or jax.sharding.get_abstract_mesh().manual_axes:
        return
    for _, variable in walk(optimizer):
        if isinstance(variable, nnx.Variable) and placement_of(variable) is None:
            arrays = jax.tree.leaves(variable.get_raw_value())
            if any(getattr(array, "ndim", 0) for array in arrays):
                _place([("", variable)], mesh, (), _lay_on)


def _lay_on(mesh: AnyMesh, spec: PartitionSpec, kind: str | None, value: Any) -> Any:
    return lay(value, named_sharding(mesh, spec, value.ndim, kind))


def _describe_on(mesh: AnyMesh, spec: PartitionSpec, kind: str | None, value: Any) -> Any:
    return _lay_on(mesh, spec, kind, jax.ShapeDtypeStruct(value.shape, value.dtype))
