"""`nnx.Optimizer` on a sharded model: moments lie as their parameters, scalars on the mesh.

optax makes counters with `jnp.zeros`, which lie on one device: the first step would compile once for
them there and once more for where they came out. `nnx.Optimizer` offers no hook, so its two methods
are wrapped, once, when the first module is sharded; optimizers of other models are left as they are.
"""

from __future__ import annotations

import functools
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
    def placed_init(self: nnx.Optimizer, model: Any, *args: Any, **kwargs: Any) -> None:
        init(self, model, *args, **kwargs)
        mesh = mesh_of(model)
        if mesh is not None:
            _place(self, mesh)
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


def _place(optimizer: nnx.Optimizer, mesh: AnyMesh) -> None:
    for _, variable in walk(optimizer):
        if not isinstance(variable, nnx.Variable):
            continue
        value, placement = variable.get_raw_value(), placement_of(variable)
        spec = PartitionSpec()
        if placement is not None and value.shape == placement.shape:
            spec = placement.spec
        elif placement is not None:  # a factored moment has not its parameter's dimensions
            variable.del_metadata(PLACEMENT)
        move = functools.partial(_lay_on, mesh, spec)
        variable.set_raw_value(jax.tree.map(move, value))


def _lay_on(mesh: AnyMesh, spec: PartitionSpec, value: Any) -> Any:
    return lay(value, named_sharding(mesh, spec, value.ndim))
