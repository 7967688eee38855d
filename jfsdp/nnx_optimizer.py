"""`nnx.Optimizer` on a sharded model: moments lie as their parameters, scalars on the mesh.

optax makes counters with `jnp.zeros`, which lie on one device: the first step would compile once for
them there and once more for where they came out. `nnx.Optimizer` offers no hook, so its two methods
are wrapped, once, when the first module is sharded; optimizers of other models are left as they are.

The optimizer of an abstract model is abstract: descriptions of arrays with the shardings they would have.

With `shard_over` the state lies over more axes than its parameters. Its update then works in the finer
layout: it slices parameters and gradients, and gathers the parameters again.
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
from jfsdp.optimizer import checked_axes, finer_spec, init_like, names_of, spec_in_shape

__all__ = ["init_module_optimizer", "watch_optimizers"]

_PLACED = "_jfsdp_placed"
_SHARD_OVER = "_jfsdp_shard_over"


def init_module_optimizer(
    tx: Any,
    model: nnx.Module,
    *,
    wrt: Any = nnx.Param,
    shard_over: str | Sequence[str] | None = None,
) -> nnx.Optimizer:
    """`nnx.Optimizer(model, tx, wrt=wrt)`, over more axes if asked: see `jfsdp.init_optimizer`."""
    mesh = mesh_of(model)
    if mesh is None:
        raise ValueError(
            f"init_optimizer: nothing in this {class_name(model)} is sharded. Apply jfsdp.shard to it "
            "first, or take nnx.Optimizer."
        )
    if shard_over is None:
        return nnx.Optimizer(model, tx, wrt=wrt)
    finer: Any = _Finer(tx, checked_axes(shard_over, mesh), mesh)
    return nnx.Optimizer(model, finer, wrt=wrt)


def watch_optimizers() -> None:
    """Wrap `nnx.Optimizer.__init__` and `update`; a second call does nothing."""
    init, update = nnx.Optimizer.__init__, nnx.Optimizer.update
    if hasattr(init, _PLACED):
        return

    @functools.wraps(init)
    def placed_init(self: nnx.Optimizer, model: Any, tx: Any, *args: Any, **kwargs: Any) -> None:
        mesh = mesh_of(model)
        abstract = mesh is not None and _is_abstract(model)
        axes = tx.axes if isinstance(tx, _Finer) else ()
        made_by: Any = _Describing(tx) if abstract and not axes else tx
        init(self, model, made_by, *args, **kwargs)
        if mesh is not None:
            self.tx = tx.tx if isinstance(tx, _Finer) else tx
            _place(walk(self), mesh, axes, _describe_on if abstract else _lay_on)
            setattr(self, _PLACED, True)
            setattr(self, _SHARD_OVER, axes)

    @functools.wraps(update)
    def checked_update(self: nnx.Optimizer, model: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, _PLACED) and mesh_of(model) is not None:
            raise ValueError(
                f"this {type(self).__name__} was built before jfsdp.shard({class_name(model)}): its "
                "state is whole on one device and would stay so. Build it after shard:\n"
                "  jfsdp.shard(model, ...)\n"
                "  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)"
            )
        if vars(self).get(_SHARD_OVER):
            return _update_finer(
                functools.partial(update, self, model), self, model, *args, **kwargs
            )
        updates = update(self, model, *args, **kwargs)
        if hasattr(self, _PLACED):
            _keep_whole(self, mesh_of(model))
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
class _Finer:
    """A gradient transformation whose state is born over more axes than its parameters."""

    tx: Any
    axes: tuple[str, ...]
    mesh: AnyMesh

    def init(self, params: Any) -> Any:
        variables = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_variable)
        parameters = [
            (names_of(path), placement.shape, placement.spec)
            for path, variable in variables
            if (placement := placement_of(variable)) is not None
        ]
        return init_like(self.tx, params, parameters, self.mesh, self.axes)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _update_finer(
    update: Callable[..., Any], optimizer: nnx.Optimizer, model: Any, grads: Any, **kwargs: Any
) -> Any:
    """Update in the layout of the state: on Explicit axes all operands must lie alike."""
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
    _place(walk(optimizer), mesh, axes, _lay_on)
    return updates


def _is_abstract(model: Any) -> bool:
    values = [node.get_raw_value() for _, node in walk(model) if isinstance(node, nnx.Variable)]
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(values))


def _place(
    nodes: Iterable[tuple[str, Any]], mesh: AnyMesh, axes: Sequence[str], place: Callable[..., Any]
) -> None:
    """Lay every Variable as its parameter, over `axes` too; what has another shape, on all devices."""
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
        spec = spec or PartitionSpec()
        variable.set_raw_value(jax.tree.map(functools.partial(place, mesh, spec), value))


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


def _lay_on(mesh: AnyMesh, spec: PartitionSpec, value: Any) -> Any:
    return lay(value, named_sharding(mesh, spec, value.ndim))


def _describe_on(mesh: AnyMesh, spec: PartitionSpec, value: Any) -> Any:
    return _lay_on(mesh, spec, jax.ShapeDtypeStruct(value.shape, value.dtype))
