"""The one primitive: a shard in storage dtype becomes the whole weight in compute dtype.

Its transpose turns the whole local gradient into this device's shard of the reduced one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType

from jfsdp.comm import AllGather, ReduceScatter
from jfsdp.hooks import all_gather_by, reduce_scatter_by
from jfsdp.layout import TILE, Dims, to_spec
from jfsdp.offload import to_device, to_host
from jfsdp.remat import KEPT
from jfsdp.varying import is_tracked, varying_over

GATHER, REDUCE = "jfsdp_gather", "jfsdp_reduce"
"""Scopes round a leaf's collectives, so that compiled programs can be read: "jfsdp_gather[up.kernel]"."""

__all__ = ["Gathering", "check_reducible", "gather", "reduce", "to_reduce", "unshard"]


_LARGE = 2**17


@dataclasses.dataclass(frozen=True)
class Gathering:
    """How one leaf is gathered and its gradient reduced.

    Attributes:
        path: for messages.
        dtype: storage dtype.
        dims: the sharded dimensions of the array at hand and their mesh axes.
        others: the dimensions that lie on axes which are not data-parallel, and those axes.
        summed_axes: further axes that the gradient is summed over: the replicate axes, and for a
            replicated leaf all data-parallel axes.
        param_dtype: dtype of the gather and of the whole weight.
        reduce_dtype: dtype of the reductions.
        all_gather: the user's collective, or None for XLA's.
        reduce_scatter: the user's collective, or None for XLA's.
        staged: whether XLA's collectives over several axes go over one after the other.
        once: axes that only the forward gathers over. What that gives is kept for the backward, which gathers
            over the other axes again. Empty: the whole weight is kept, or nothing is.
        headroom: what the local gradient is multiplied by before it is cast, and the reduced one divided by.
        reducible: whether the policy says in which dtype to reduce. Of 8-bit floats it has to.
        partial: whether the reduction stops before the sum over `summed_axes`, which is done later.
        on_host: whether the shard lies in host memory, where the reduced gradient then goes.
    """

    path: str
    dtype: Any
    dims: Dims
    summed_axes: tuple[str, ...]
    param_dtype: Any
    reduce_dtype: Any
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    others: Dims = ()
    staged: bool = False
    once: tuple[str, ...] = ()
    headroom: float = 1.0
    reducible: bool = True
    partial: bool = False
    on_host: bool = False

    def stages(self, axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """The axes of each scatter, in order; the gathers run the other way."""
        return tuple((axis,) for axis in axes) if self.staged else (axes,)

    @property
    def first(self) -> Gathering:
        """The gather over the axes of `once` alone."""
        dims = ((dim, tuple(a for a in axes if a in self.once)) for dim, axes in self.dims)
        return dataclasses.replace(self, dims=tuple((d, a) for d, a in dims if a), once=())


def unshard(shard: jax.Array, how: Gathering, whole_gradient: jax.Array | None = None) -> jax.Array:
    """Cast `shard` to the compute dtype and gather the whole weight.

    The gradient is cast to `reduce_dtype`, reduce-scattered, summed over `summed_axes`, and cast to
    the storage dtype, in this order. Call it in the per-device view over the axes of `how`.

    Args:
        shard: this device's shard in storage dtype. What is not floating has no gradient.
        how: the leaf's dimensions, axes, dtypes and collectives.
        whole_gradient: an array of the whole weight's shape that takes the gradient in place of `shard`: this
            device's own, unreduced, cast to the array's dtype. Its values are not read.

    Returns:
        The whole weight in `how.param_dtype`.

    Cost: receives (F - 1)/F of the weight in `param_dtype`; the transpose (F - 1)/F of the gradient
    in `reduce_dtype`, and 2 (R - 1)/R of the gradient's shard over R replicas.
    """
    kept = None
    if how.once:
        # Outside of what is differentiated, where a remat policy sees it for frozen leaves as well.
        kept = checkpoint_name(_opaque_gather(how.first, jax.lax.stop_gradient(shard)), KEPT)
    if not jnp.issubdtype(shard.dtype, jnp.inexact):
        return _opaque_gather(how, shard if kept is None else kept)
    if whole_gradient is not None:
        how = dataclasses.replace(how, reduce_dtype=whole_gradient.dtype)
        return _unshard_unreduced(how, shard, kept, whole_gradient)
    return _unshard(how, shard, kept)


def gather(shard: jax.Array, how: Gathering) -> jax.Array:
    """Gather the whole weight, as `unshard` does, where no derivative is taken of it."""
    return _opaque_gather(how, shard)


def reduce(gradient: jax.Array, how: Gathering) -> jax.Array:
    """Reduce a whole local gradient to this device's shard of it, as the transpose of `unshard` does."""
    return _beside_other_axes(how, _reduce, gradient)


def check_reducible(how: Gathering) -> None:
    """Refuse to differentiate a leaf of 8-bit floats if nothing says in which dtype to reduce its gradient.

    Raises:
        ValueError: so it is.
    """
    if not how.reducible:
        raise ValueError(
            f"{how.path} is differentiated and stored in {jnp.dtype(how.dtype).name}, in which gradients "
            "cannot be summed. Say in which dtype they are: "
            'MixedPrecisionPolicy(reduce_dtype="float32"); or freeze the parameter: differentiate with '
            "respect to the others only."
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unshard(how: Gathering, shard: jax.Array, kept: jax.Array | None) -> jax.Array:
    return _gather(how, shard if kept is None else kept)


def _unshard_forward(
    how: Gathering, shard: jax.Array, kept: jax.Array | None
) -> tuple[jax.Array, None]:
    check_reducible(how)
    return _opaque_gather(how, shard if kept is None else kept), None


def _unshard_backward(how: Gathering, _: None, gradient: jax.Array) -> tuple[jax.Array, None]:
    return reduce(gradient, how), None


def to_reduce(gradient: jax.Array, how: Gathering) -> jax.Array:
    """A whole local gradient as it goes into the reduction."""
    if how.headroom != 1:
        gradient = gradient * how.headroom
    return gradient.astype(how.reduce_dtype)


def _reduce(how: Gathering, gradient: jax.Array) -> jax.Array:
    with jax.named_scope(f"{REDUCE}[{how.path}]"):
        gradient = to_reduce(gradient, how)
        for dim, axes in reversed(how.dims):
            if how.reduce_scatter is None:
                for stage in how.stages(axes):
                    scatter = _scatter_between_tiles if how.staged else _psum_scatter
                    gradient = scatter(gradient, dim, stage)
            else:
                gradient = reduce_scatter_by(how.reduce_scatter, gradient, dim, axes, how.path)
        if how.summed_axes and not how.partial:
            gradient = jax.lax.psum(gradient, how.summed_axes)
        if how.headroom != 1:
            gradient = gradient / how.headroom
        gradient = gradient.astype(how.dtype)
        return to_host(gradient) if how.on_host else gradient


_unshard.defvjp(_unshard_forward, _unshard_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unshard_unreduced(
    how: Gathering, shard: jax.Array, kept: jax.Array | None, whole_gradient: jax.Array
) -> jax.Array:
    return _gather(how, shard if kept is None else kept)


_unshard_unreduced.defvjp(
    lambda how, shard, kept, _: _unshard_forward(how, shard, kept),
    lambda how, _, gradient: (None, None, to_reduce(gradient, how)),
)


def _psum_scatter(gradient: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    def scatter(x: jax.Array) -> jax.Array:
        return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)

    mesh = jax.sharding.get_abstract_mesh()
    explicit = tuple(
        a for a, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Explicit
    )
    if not explicit:
        return scatter(gradient)
    # jax 0.10.2 to 0.12.0.1 cannot lower a psum_scatter while other axes of the mesh are Explicit.
    spec = jax.typeof(gradient).sharding.spec
    automatic: Callable = jax.sharding.auto_axes(scatter, axes=explicit, out_sharding=spec)
    return automatic(gradient)


def _scatter_between_tiles(gradient: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    """A reduce-scatter for TPUs, whose arrays lie in tiles `TILE` wide.

    XLA all-reduces what would be cut inside tiles (the embedding of GPT-2, float32[50257,768], over 4 chips
    of v5e, jax 0.12.0.1). A new leading dimension is in no tile. The barrier keeps XLA from undoing it.
    """
    count = jax.lax.axis_size(axes)
    last = dim == gradient.ndim - 1 > 0
    if not last or gradient.shape[dim] // count % TILE == 0 or gradient.size < _LARGE:
        return _psum_scatter(gradient, dim, axes)
    parts = gradient.reshape(*gradient.shape[:-1], count, -1)
    parts = jax.lax.optimization_barrier(jnp.moveaxis(parts, -2, 0))
    return jax.lax.psum_scatter(parts, axes, scatter_dimension=0, tiled=False)


# Never differentiated: it makes cast and gather, the user's own gather included, one equation of one
# operand that a remat policy sees and can refuse as a whole.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _opaque_gather(how: Gathering, shard: jax.Array) -> jax.Array:
    return _gather(how, shard)


def _no_gradient(*_: Any) -> Any:
    raise AssertionError("the gradient of a gather is taken by _unshard alone")


_opaque_gather.defvjp(_no_gradient, _no_gradient)


def _gather(how: Gathering, shard: jax.Array) -> jax.Array:
    whole = _beside_other_axes(how, _gather_here, shard)
    # In a shard_map of the user's with check_vma=True, its default, jax sums the gradient of what is typed
    # as the same on all devices. The sum in `_reduce` would be the second one.
    return varying_over(whole, filter(is_tracked, how.summed_axes))


def _gather_here(how: Gathering, shard: jax.Array) -> jax.Array:
    with jax.named_scope(f"{GATHER}[{how.path}]"):
        shard = to_device(shard)
        whole = shard.astype(how.param_dtype) if shard.dtype != how.param_dtype else shard
        for dim, axes in how.dims:
            whole = _gather_dim(how, whole, dim, axes)
        return whole


def _gather_dim(how: Gathering, part: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    """Gather one dimension over its axes, those of `once` excepted: over them `part` is whole already.

    Those vary in between, so that the dimension is split where they do, and each run of the other axes
    gathered at its place.
    """
    runs = [(done, tuple(run)) for done, run in itertools.groupby(axes, how.once.__contains__)]
    sizes = [jax.lax.axis_size(run) for done, run in runs if done]
    before, after = part.shape[:dim], part.shape[dim + 1 :]
    part = part.reshape(*before, *sizes, -1, *after)
    dim += len(sizes)
    for done, run in reversed(runs):
        if done:
            dim -= 1
        elif how.all_gather is None:
            for stage in reversed(how.stages(run)):
                part = jax.lax.all_gather(part, stage, axis=dim, tiled=True)
        else:
            part = all_gather_by(how.all_gather, part, dim, run, how.path)
    return part.reshape(*before, -1, *after)


def _beside_other_axes(
    how: Gathering, function: Callable[[Gathering, jax.Array], jax.Array], array: jax.Array
) -> jax.Array:
    """Run `function` on each device's part over the other axes that the parameter lies on.

    XLA keeps no array that a named collective takes or gives split over an axis that is not manual: it would
    gather the weight over the tensor axes first (T times the bytes, jax 0.10.2 and 0.12.0.1, TPU and GPU).
    """
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    found = {
        dim: tuple(
            a
            for a in axes
            if types.get(a, AxisType.Manual) != AxisType.Manual and mesh.shape[a] > 1
        )
        for dim, axes in how.others
    }
    names = {axis for axes in found.values() for axis in axes}
    # On one dimension the two would have to be interleaved.
    if not names or any(found.get(dim) for dim, _ in how.dims):
        return function(how, array)
    spec = to_spec([found.get(dim, ()) for dim in range(array.ndim)])
    mapped = jax.shard_map(
        functools.partial(function, how),
        mesh=mesh,
        in_specs=(spec,),
        out_specs=spec,
        axis_names=names,
        check_vma=False,
    )
    return mapped(array)
