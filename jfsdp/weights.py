"""The weights of a call that is scheduled, in which order they are gathered, and what holds that order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jfsdp.offload import copied_at, to_host
from jfsdp.remat import KEPT
from jfsdp.unshard import Gathering, gather, reduce, to_reduce
from jfsdp.varying import varying_axes, varying_over

__all__ = ["Ahead", "Weight", "fence", "index_for"]


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter among the leaves of a call.

    Attributes:
        index: of its shard.
        how: it is gathered and its gradient reduced.
        group: the number of its unit.
        again: whether it is dropped after the forward and gathered again.
        whole_gradient: the index of the leaf that takes its gradient unreduced; None if there is none.
        gradient_dtype: dtype of that leaf.
    """

    index: int
    how: Gathering
    group: int
    again: bool
    whole_gradient: int | None = None
    gradient_dtype: Any = None

    @property
    def waits(self) -> bool:
        """Whether its gradient waits for the next unit's to begin before it is reduced.

        On TPUs it is reduced at once. No reduction overlaps there, and one that waits is an array more
        (v5e:2x4, 6 layers of 4096x4096, jax 0.12.0.1: 100 MiB of temporaries for 68).
        """
        return self.whole_gradient is None and not self.how.staged

    @property
    def late(self) -> bool:
        """Whether its shard comes from the host by an index that has passed a fence, instead of itself.

        XLA for TPUs copies what a barrier takes from the host before that barrier: all shards at the start.
        """
        return self.how.on_host and self.how.staged and not self.how.once

    def ticket(self, shard: jax.Array) -> jax.Array:
        """What has to pass a fence for this shard: itself, or the index that it is copied by."""
        if not self.late:
            return shard
        return index_for(shard)

    def admitted(self, shard: Any, ticket: jax.Array) -> jax.Array:
        """The shard, which is copied to the device, if at all, once its ticket has passed."""
        return copied_at(shard, ticket) if self.late else ticket

    def taken(self, shard: jax.Array) -> jax.Array:
        """What the gathers of both passes take: the shard, or what stays of the weight between them."""
        if not self.how.once:
            return shard
        return checkpoint_name(gather(shard, self.how.first), KEPT)

    def gathered(self, shard: jax.Array, stacked: bool = False) -> jax.Array:
        """The whole weight; of one that is stacked along its first dimension the layer of this shard."""
        return gather(shard, self._of(stacked))

    def whole_type(self, shard: jax.Array, stacked: bool = False) -> Any:
        """The type of what `gathered` gives of `shard`; a collective of the user's is not called for it."""
        how = dataclasses.replace(self._of(stacked), all_gather=None, once=())
        return jax.eval_shape(lambda x: gather(x, how), shard)

    def reduced(self, gradient: jax.Array, stacked: bool = False) -> jax.Array:
        """A whole local gradient, reduced; likewise. A layer's is on the device still, see `landed`."""
        how = self._of(stacked)
        how = dataclasses.replace(how, on_host=how.on_host and not stacked)
        if self.whole_gradient is None:
            return reduce(gradient, how)
        return to_reduce(gradient, dataclasses.replace(how, reduce_dtype=self.gradient_dtype))

    def landed(self, gradient: jax.Array) -> jax.Array:
        """A reduced gradient in the memory in which its leaf lies.

        A layer's goes to the host behind the barrier that ends its reduction: XLA for TPUs crashes where it
        has to put what passed a barrier in host memory into a stack there (v5e, jax 0.12.0.1).
        """
        return to_host(gradient) if self.how.on_host and self.whole_gradient is None else gradient

    def _of(self, stacked: bool) -> Gathering:
        if not stacked:
            return self.how
        dims = tuple((dim - 1, axes) for dim, axes in self.how.dims)
        others = tuple((dim - 1, axes) for dim, axes in self.how.others)
        return dataclasses.replace(self.how, dims=dims, others=others)


class Ahead:
    """Which weights to gather when: those of the unit that is so many ahead of the one that runs."""

    def __init__(self, needs: Sequence[tuple[int, Sequence[Any]]], prefetch: int):
        self._places = {number: place for place, (number, _) in enumerate(needs)}
        self._weights = [weights for _, weights in needs]
        self._prefetch = prefetch

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def start(self) -> list[Any]:
        """Before everything."""
        return [v for weights in self._weights[: self._prefetch] for v in weights]

    def after(self, number: int) -> Sequence[Any]:
        """When this piece may start."""
        place = self._places[number] + self._prefetch
        return self._weights[place] if place < len(self._weights) else ()


def index_for(array: jax.Array) -> jax.Array:
    """An int32 zero to pass a fence in place of an array from the host, which is then copied at it."""
    return varying_over(jnp.zeros((), jnp.int32), varying_axes(jax.typeof(array)))


def fence(*groups: Any) -> tuple[Any, ...]:
    """Lists and dictionaries of arrays: what reads one of them starts when all of them are there."""
    arrays = [x for g in groups for x in (g.values() if isinstance(g, dict) else g)]
    # Where jax tracks over which axes arrays differ (check_vma=True) a barrier of jax 0.10.2 gives all one
    # type: what differs over fewer axes, such as a gradient summed over the replicas, stays outside.
    varying = [varying_axes(jax.typeof(x)) for x in arrays]
    held = [i for i, axes in enumerate(varying) if axes == frozenset().union(*varying)]
    if len(held) > 1:
        through = jax.lax.optimization_barrier([arrays[i] for i in held])
        for i, x in zip(held, through, strict=True):
            arrays[i] = x
    tied = iter(arrays)
    return tuple(
        {key: next(tied) for key in g} if isinstance(g, dict) else [next(tied) for _ in g]
        for g in groups
    )
