"""One leaf that is differentiated over microbatches: what its gradient is added up in, and how reduced."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jfsdp.hidden import Shard
from jfsdp.losses import Input
from jfsdp.mesh import DataParallelMesh
from jfsdp.offload import is_on_host, to_device, to_host
from jfsdp.unshard import Gathering, reduce

__all__ = ["Trained"]


class Trained:
    """One leaf that is differentiated: what its gradient is accumulated in, and how it is reduced."""

    def __init__(self, index: int, one: Input, value: jax.Array, dp: DataParallelMesh, sync: str):
        self.index, self._shard, self._dtype = index, one.shard, value.dtype
        self._whole = sync == "last" and one.shard is not None
        self._shape: tuple[int, ...] = value.shape
        if one.shard is None:  # no unit's: every device has all of it
            axes, kind = dp.larger_than_one(dp.axes), value.dtype
            self._how = Gathering(
                one.path,
                kind,
                (),
                axes,
                param_dtype=kind,
                reduce_dtype=kind,
                on_host=is_on_host(value),
            )
        else:
            unit, placement = one.shard
            self._how = unit.gathering(placement, value)
            if self._whole:
                self._shape = unit.gathered_types(self._how, value)[-1].shape
        self._reduced_in = jnp.promote_types(self._how.reduce_dtype, value.dtype)
        self._accumulated_in = self._how.reduce_dtype if self._whole else self._reduced_in

    def zeros(self) -> jax.Array:
        """The gradient of no microbatch."""
        return jnp.zeros(self._shape, self._accumulated_in)

    def point(self, value: jax.Array, accumulated: jax.Array) -> jax.Array:
        """The array that the loss is differentiated by: of the shape and dtype to accumulate in."""
        return accumulated if self._whole else to_device(value).astype(self._accumulated_in)

    def held(self, value: jax.Array, point: jax.Array) -> Any:
        """What the loss finds in place of the parameter."""
        if self._shard is None:
            return point
        placement = dataclasses.replace(self._shard[1], dtype=self._dtype)
        if self._whole:
            return Shard(value, placement, whole_gradient=point)
        return Shard(point, placement, partial=True)

    def reduced(self, accumulated: jax.Array, factor: jax.Array | None) -> jax.Array:
        """The gradient as it leaves, of the parameter's dtype and in its memory."""
        how = dataclasses.replace(self._how, dtype=self._reduced_in, on_host=False)
        if not self._whole:  # what is left is the sum over copies
            how = dataclasses.replace(how, dims=())
        elif how.headroom != 1:  # `unshard` has multiplied each by it, and `reduce` does once more
            accumulated = accumulated.astype(self._reduced_in) / how.headroom
        gradient = reduce(accumulated, how) if how.dims or how.summed_axes else accumulated
        if factor is not None:
            gradient = gradient * factor.astype(gradient.dtype)
        gradient = gradient.astype(self._dtype)
        return to_host(gradient) if self._how.on_host else gradient
