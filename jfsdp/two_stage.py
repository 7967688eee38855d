"""An all-gather in two stages, for shards that lie on slow and fast axes of the mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jfsdp.comm import AllGather, Group, Message, refuse_async

__all__ = ["TwoStageAllGather"]


@dataclasses.dataclass(frozen=True)
class TwoStageAllGather(AllGather):
    """An all-gather over the slow axes first, while the piece is small, then over the fast ones.

    For leaves that are sharded over several axes of unequal speed, such as the network between hosts and
    the links inside one. With a group of one axis, or of slow or fast axes only, it is XLA's own all-gather.

    Args:
        slow: mesh axes between which communication is slow. None: the first axis of the group.

    Raises:
        TypeError: `slow` is no tuple of names.
        ValueError: when it is called, `slow` names what is no data-parallel axis of the mesh.

    Cost: for shards of s bytes, S devices along the slow axes and Q along the fast ones, a device receives
    s * (S - 1) over the slow axes and s * S * (Q - 1) over the fast ones: together the bytes of one
    all-gather, s * (S * Q - 1), but the least possible over the slow axes, received by all Q neighbors at
    once. The other order receives s * Q * (S - 1) over the slow ones. Where a slow axis comes before
    a fast one in the group, the whole weight is copied once more to put the shards in order.

    Reference: hierarchical all-gather of Wang et al., ZeRO++: Extremely Efficient Collective Communication
    for Giant Model Training (2023).

    Example:
        >>> import jax, jfsdp
        >>> from flax import nnx
        >>> mesh = jax.make_mesh((1, 1), ("host", "chip"))
        >>> dims = jfsdp.DataParallelMeshDims(shard=("host", "chip"))
        >>> gather = jfsdp.TwoStageAllGather(slow=("host",))
        >>> model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        >>> model = jfsdp.shard(model, mesh, dp_mesh_dims=dims, all_gather=gather)
    """

    slow: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.slow is not None and not (
            isinstance(self.slow, tuple) and all(isinstance(axis, str) for axis in self.slow)
        ):
            raise TypeError(
                'TwoStageAllGather.slow must be a tuple of mesh axes such as ("host",), or None for the '
                f"first axis of each group, got {self.slow!r}."
            )

    def allocate(self, size: Sequence[int], *, dtype: Any, device: Any) -> jax.ShapeDtypeStruct:
        """Describe the gathered weight."""
        return super().allocate(size, dtype=dtype, device=device)

    def wire(
        self, size: Sequence[int], *, dtype: Any, group: Mapping[str, int]
    ) -> tuple[Message, ...]:
        """State the bytes of each stage."""
        piece = math.prod(size) * jnp.dtype(dtype).itemsize / math.prod(group.values())
        messages = []
        for axes in self._stages(tuple(group)):
            count = math.prod(group[axis] for axis in axes)
            messages.append(Message("all-gather", dtype, axes, piece * (count - 1)))
            piece *= count
        return tuple(messages)

    def __call__(
        self,
        output_tensor: jax.ShapeDtypeStruct,
        input_tensor: jax.Array,
        group: Group,
        async_op: bool = False,
    ) -> jax.Array:
        """Gather on dimension 0. Raises ValueError for an unknown slow axis or `async_op=True`."""
        refuse_async(self, async_op)
        self._check_axes()
        stages = self._stages(group)
        if len(stages) == 1:
            return jax.lax.all_gather(input_tensor, group, axis=0, tiled=True)
        pieces = input_tensor
        for axes in stages:
            pieces = jax.lax.all_gather(pieces, axes, axis=0, tiled=False)
        # One dimension for each axis, the last gathered first.
        axes = [axis for stage in reversed(stages) for axis in stage]
        pieces = pieces.reshape(*map(jax.lax.axis_size, axes), *input_tensor.shape)
        pieces = jnp.moveaxis(pieces, [axes.index(axis) for axis in group], list(range(len(group))))
        return pieces.reshape(output_tensor.shape)

    def _stages(self, group: Group) -> tuple[Group, ...]:
        slow = group[:1] if self.slow is None else self.slow
        stages = (
            tuple(axis for axis in group if axis in slow),
            tuple(axis for axis in group if axis not in slow),
        )
        return tuple(filter(None, stages))

    def _check_axes(self) -> None:
        for axis in self.slow or ():
            try:
                jax.lax.axis_size(axis)
            except NameError as error:
                raise ValueError(
                    f"TwoStageAllGather: slow={self.slow} names {axis!r}, which is no data-parallel axis of "
                    "the mesh."
                ) from error
