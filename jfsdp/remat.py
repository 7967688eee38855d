"""The remat policy of a unit that is gathered again in the backward: no gathered weight is kept."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["KEPT", "keep_recomputed_gathers", "refuse_gathered"]

KEPT = "jfsdp_kept"
"""Name, for remat policies, of what stays of weights that are gathered again over some axes only."""

_recomputing: contextvars.ContextVar[bool] = contextvars.ContextVar("recomputing", default=False)


@contextlib.contextmanager
def keep_recomputed_gathers() -> Iterator[None]:
    """While a backward pass is traced: let `refuse_gathered` save everything.

    A user's remat round a unit runs the unit's forward, gather included, again in the backward
    pass. That gather serves the gradients too; refusing to save it there would make it three
    gathers a step instead of two.
    """
    token = _recomputing.set(True)
    try:
        yield
    finally:
        _recomputing.reset(token)


_RESHAPES = frozenset(
    {
        *("broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "name"),
        *("optimization_barrier", "reduce_precision", "reshape", "reshard", "rev"),
        *("sharding_constraint", "slice", "split", "squeeze", "transpose"),
    }
)


def refuse_gathered(shards: Iterable[Any], wholes: Iterable[Any]) -> Callable[..., bool]:
    """A `jax.checkpoint` policy that saves everything but gathered weights.

    Refused are the gathers of these shards, and what merely reshapes, transposes, slices or casts an
    array of a gathered weight's shape and dtype: saving the kernel that `einsum` has transposed would
    keep the whole weight alive just as well. An activation of the very same shape and dtype costs at
    most such a reshape or cast again.

    Args:
        shards: arrays or descriptions of what its gathers take: its shards, and what stays of those
            weights that are gathered again over some axes only.
        wholes: descriptions of its gathered weights.
    """
    shard_types = {(tuple(leaf.shape), jnp.dtype(leaf.dtype)) for leaf in shards}
    whole_types = {(tuple(leaf.shape), jnp.dtype(leaf.dtype)) for leaf in wholes}

    def saveable(primitive: Any, *operands: Any, **params: Any) -> bool:
        if _recomputing.get():
            return True
        if primitive.name == "name" and params["name"] == KEPT:
            return True
        types = [(tuple(x.shape), x.dtype) for x in operands if hasattr(x, "dtype")]
        if primitive.name == "custom_vjp_call" and 1 <= len(types) <= 2:
            return not shard_types.issuperset(types)
        if len(types) != 1 or len(operands) != 1:
            return primitive.name != "all_gather"
        (operand,) = types
        if primitive.name in _RESHAPES and operand in whole_types:
            results = jax.eval_shape(lambda x: primitive.bind(x, **params), operands[0])
            whole_types.update(
                (r.shape, r.dtype) for r in jax.tree.leaves(results) if math.prod(r.shape) > 1
            )
            return False
        return True

    return saveable
