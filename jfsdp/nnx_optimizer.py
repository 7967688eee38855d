"""`nnx.Optimizer` on a sharded model: moments lie as their parameters, scalars on the mesh.

optax makes counters with `jnp.zeros`, which lie on one device: the first step would compile once for
them there and once more for where they came out. `nnx.Optimizer` offers no hook, so its two methods
are wrapped, once, when the first module is sharded; optimizers of other models are left as they are.

The optimizer of an abstract model is abstract: descriptions of arrays with the shardings they would have.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from jfsdp.layout import lay, named_sharding
from jfsdp.mesh import AnyMesh
from jfsdp.nnx_tree import PLACEMENT, class_name, mesh_of, placement_of, walk

__all__ = ["watch_optimizers"]

_PLACED = "_jfsdp_placed"


def watch_optimizers() -> None:
    """Wrap `nnx.Optimizer.__init__` and `update`; a second call does nothing."""
    init, update = nnx.Optimizer.__init__, nnx.Optimizer.update
    if hasattr(init, _PLACED):
        return

    @functools.wraps(init)
    def placed_init(self: nnx.Optimizer, model: Any, tx: Any, *args: Any, **kwargs: Any) -> None:
        mesh = mesh_of(model)
        abstract = mesh is not None and _is_abstract(model)
        made_by: Any = _Describing(tx) if abstract else tx
        init(self, model, made_by, *args, **kwargs)
        if mesh is not None:
            self.tx = tx
            _place(self, mesh, _describe_on if abstract else _lay_on)
            setattr(self, _PLACED, True)

    @functools.wraps(update)
    def checked_update(self: nnx.Optimizer, model: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, _PLACED) and mesh_of(model) is not None:
            raise ValueError(
                f"this {type(self).__name__} was built before jfsdp.shard({class_name(model)}): its "
                "state is whole on one device and would stay so. Build it after shard:\n"
                "  jfsdp.shard(model, ...)\n"
                "  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)"
            )
        return update(self, model, *args, **kwargs)

    setattr(placed_init, _PLACED, True)
    nnx.Optimizer.__init__ = placed_init
    nnx.Optimizer.update = checked_update


@dataclasses.dataclass(frozen=True)
class _Describing:
    """A gradient transformation as far as `nnx.Optimizer.__init__` uses it, which makes no arrays."""

    tx: Any

    def init(self, params: Any) -> Any:
        return jax.eval_shape(self.tx.init, params)


def _is_abstract(model: Any) -> bool:
    values = [node.get_raw_value() for _, node in walk(model) if isinstance(node, nnx.Variable)]
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(values))


def _place(optimizer: nnx.Optimizer, mesh: AnyMesh, place: Callable[..., Any]) -> None:
    for _, variable in walk(optimizer):
        if not isinstance(variable, nnx.Variable):
            continue
        value, placement = variable.get_raw_value(), placement_of(variable)
        spec = PartitionSpec()
        if placement is not None and getattr(value, "shape", None) == placement.shape:
            spec = placement.spec
        elif placement is not None:  # a factored moment, or optax's MaskedNode in place of one
            variable.del_metadata(PLACEMENT)
        variable.set_raw_value(jax.tree.map(functools.partial(place, mesh, spec), value))


def _lay_on(mesh: AnyMesh, spec: PartitionSpec, value: Any) -> Any:
    return lay(value, named_sharding(mesh, spec, value.ndim))


def _describe_on(mesh: AnyMesh, spec: PartitionSpec, value: Any) -> Any:
    return _lay_on(mesh, spec, jax.ShapeDtypeStruct(value.shape, value.dtype))
