"""The communication a user may replace: how shards are gathered and how gradients are reduced."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

__all__ = [
    "AllGather",
    "Comm",
    "DefaultAllGather",
    "DefaultReduceScatter",
    "Message",
    "ReduceScatter",
]

Group = tuple[str, ...]


class Message(NamedTuple):
    """One collective of a `Comm`, for one leaf: see `Comm.wire`.

    Attributes:
        kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute" or
            "collective-broadcast".
        dtype: what travels, as a name or anything else that `jnp.dtype` takes.
        axes: the mesh axes that it runs over.
        bytes: bytes that one device receives.
    """

    kind: str
    dtype: Any
    axes: Group
    bytes: float


class Comm(abc.ABC):
    """Base class of the collectives that `jfsdp.shard` accepts.

    A collective is called while the program is traced, once for each sharded leaf, inside the
    per-device view: `jax.lax` collectives over the axes of its `group` are available. It is part of the
    module's structure, which jit hashes: two that compare equal share a compiled program. An exception
    that it raises gets a note with the leaf's path.
    """

    @abc.abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: Any, device: Any) -> jax.ShapeDtypeStruct:
        """Describe the buffer that the collective fills.

        XLA owns the memory, so what PyTorch allocates is only described here.

        Args:
            size: shape of the result.
            dtype: dtype of the result.
            device: None under tracing.

        Returns:
            A `jax.ShapeDtypeStruct`. jfsdp checks the collective's result against it.
        """
        return jax.ShapeDtypeStruct(tuple(size), dtype)

    def wire(
        self, size: Sequence[int], *, dtype: Any, group: Mapping[str, int]
    ) -> Sequence[Message] | None:
        """State what one call communicates, so that `jfsdp.inspect` can hold the program to it.

        Args:
            size: shape of the result, as `allocate` gets it.
            dtype: dtype of the result.
            group: the mesh axes of the call and their sizes, the first varying slowest.

        Returns:
            One `Message` for each collective. None, the default: nothing is stated. `Report.check` then
            lets pass whatever the collective does with its leaves.
        """
        return None


class AllGather(Comm):
    """Gathers one leaf: every device's shard in, the whole weight out."""

    @abc.abstractmethod
    def __call__(
        self,
        output_tensor: jax.ShapeDtypeStruct,
        input_tensor: jax.Array,
        group: Group,
        async_op: bool = False,
    ) -> jax.Array:
        """Gather `input_tensor` over the mesh axes of `group`.

        Args:
            output_tensor: what `allocate` returned for the result, shape (F * n, ...), dtype of
                the shard.
            input_tensor: this device's shard in `param_dtype`, the sharded dimension first: (n, ...).
            group: names of the mesh axes to gather over, the first varying slowest; F is the
                product of their sizes.
            async_op: always False; XLA schedules collectives, so True is an error.

        Returns:
            The whole weight, shape and dtype of `output_tensor`: the shards of all devices of the
            group concatenated on dimension 0 in the group's order.
        """


class ReduceScatter(Comm):
    """Reduces one leaf's gradient: every device's whole gradient in, this device's shard of it out."""

    @abc.abstractmethod
    def __call__(
        self,
        output_tensor: jax.ShapeDtypeStruct,
        input_tensor: jax.Array,
        group: Group,
        op: str,
        async_op: bool = False,
    ) -> jax.Array:
        """Reduce `input_tensor` over the mesh axes of `group` and keep this device's part.

        Args:
            output_tensor: what `allocate` returned for the result, shape (n, ...).
            input_tensor: this device's whole gradient in `reduce_dtype`, the sharded dimension
                first: (F * n, ...).
            group: names of the mesh axes to reduce over, the first varying slowest.
            op: "sum" or "avg". jfsdp asks for "sum": the gradients are the exact ones of the
                user's global loss.
            async_op: always False; XLA schedules collectives, so True is an error.

        Returns:
            This device's shard of the reduced gradient, shape and dtype of `output_tensor`.
        """


class DefaultAllGather(AllGather):
    """`jax.lax.all_gather`: XLA's own all-gather, F - 1 of F parts of the weight received."""

    def allocate(self, size: Sequence[int], *, dtype: Any, device: Any) -> jax.ShapeDtypeStruct:
        """Describe the gathered weight."""
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: jax.ShapeDtypeStruct,
        input_tensor: jax.Array,
        group: Group,
        async_op: bool = False,
    ) -> jax.Array:
        """Gather on dimension 0. Raises ValueError for `async_op=True`."""
        refuse_async(self, async_op)
        return jax.lax.all_gather(input_tensor, group, axis=0, tiled=True)


class DefaultReduceScatter(ReduceScatter):
    """`jax.lax.psum_scatter`: XLA's own reduce-scatter, F - 1 of F parts of the gradient received."""

    def allocate(self, size: Sequence[int], *, dtype: Any, device: Any) -> jax.ShapeDtypeStruct:
        """Describe the scattered gradient."""
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: jax.ShapeDtypeStruct,
        input_tensor: jax.Array,
        group: Group,
        op: str,
        async_op: bool = False,
    ) -> jax.Array:
        """Reduce and scatter on dimension 0. Raises ValueError for another `op` or `async_op=True`."""
        refuse_async(self, async_op)
        refuse_op(self, op)
        scattered = jax.lax.psum_scatter(input_tensor, group, scatter_dimension=0, tiled=True)
        return scattered / jax.lax.axis_size(group) if op == "avg" else scattered


def refuse_async(comm: Comm, async_op: bool) -> None:
    """Raise ValueError for `async_op=True`."""
    if async_op:
        raise ValueError(
            f"{type(comm).__name__}: async_op=True has no meaning in a compiled program; XLA "
            "schedules the collective. Leave it False."
        )


def refuse_op(comm: Comm, op: str) -> None:
    """Raise ValueError for another reduction than "sum" and "avg"."""
    if op not in ("sum", "avg"):
        raise ValueError(f"{type(comm).__name__}: op must be 'sum' or 'avg', got {op!r}.")
