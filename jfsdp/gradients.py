"""The public `value_and_grad`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx as flax_nnx
from jax.sharding import PartitionSpec

from jfsdp import linen_accumulate, nnx_accumulate
from jfsdp.borders import freeze_out_specs, freeze_specs
from jfsdp.losses import Options

__all__ = ["value_and_grad"]


def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    microbatches: int = 1,
    sync: str = "every",
    has_aux: bool = False,
    wrt: Any = None,
    in_specs: Mapping[str, PartitionSpec] | None = None,
    out_specs: Any = None,
) -> Callable[..., Any]:
    """The loss and its gradients, accumulated over microbatches, reduced when you say.

    Like `nnx.value_and_grad` and `jax.value_and_grad` of the first argument, but that the region is opened at
    the loss: `loss_fn` runs on each device, on its rows of one microbatch, and the model in it gathers and
    reduces there. So a loss that is one number is taken for a mean over rows that weigh the same, and the
    result is the mean of those of all devices and microbatches. Where rows do not weigh the same (masked
    tokens, unequal lengths) return `(sum, weight)`: the result is the sum of the sums over the sum of the
    weights, exactly what one batch gives. Weights are not differentiated. What the model returns is this
    device's: scalars and what its `out_specs` average are not averaged before the loss sees them.

    Args:
        loss_fn: `loss_fn(model, *args, **kwargs)` of an NNX module that `jfsdp.shard` was applied to, or
            `loss_fn(params, *args, **kwargs)` that calls such Linen modules' `apply`. It returns `loss` or
            `(sum, weight)`, floating scalars; with `has_aux` a pair of that and any pytree.
        microbatches: into how many the batch is split. Each device splits its own rows, in order: nothing
            is moved. Activations are those of one microbatch.
        sync: "every": each microbatch's gradients are reduce-scattered; the shards are added up in
            `reduce_dtype` or the parameter's dtype, whichever is wider, and all-reduced over the replicate
            axes once, after the last. "last": each device adds up whole gradients of its own in
            `reduce_dtype`, and reduces them once, after the last microbatch.
        has_aux: whether `loss_fn` returns (loss, aux). Arrays of aux whose dimension 0 is the microbatch are
            joined to the batch, floating scalars averaged.
        wrt: which parameters are differentiated. NNX: any filter of NNX, default `nnx.Param`; the gradients
            are an `nnx.State` of these. Linen: a glob over dotted paths ("head.*"), a predicate `f(path,
            leaf)`, or several; the gradients are a tree like `params`, zeros elsewhere. What is not
            differentiated is gathered, but neither reduced nor accumulated.
        in_specs: data-parallel PartitionSpec by argument name, or dotted path into an argument, for
            arguments that are no batch: {"table": PartitionSpec()} for a copy on every device.
        out_specs: prefix of aux with PartitionSpec() for what is neither a batch nor a scalar: averaged over
            devices and microbatches if floating (BatchNorm statistics of Linen), else taken from the last.

    Returns:
        A function of `loss_fn`'s arguments that returns `(loss, gradients)`, or `((loss, aux), gradients)`.
        The loss is a float32 scalar, the gradients are of the parameters' dtypes and lie as they do. State
        of an NNX module (BatchNorm, RNG counts) goes from microbatch to microbatch and is updated. PRNG keys
        among the arguments are folded with the device's index and, of several microbatches, with the number.

    Raises:
        TypeError: an argument, or what `loss_fn` returns, is of the wrong type; a selected parameter is not
            floating.
        ValueError: there is no sharded module; its partitioning is auto; the batch does not divide by
            devices and microbatches; `wrt` selects nothing; an array of aux is of no known kind.
        NotImplementedError: the result is differentiated again.

    Memory, per device, for P parameters, F shards, s bytes of an element of the gradients that are added up:
    "every": P/F * s. "last": P * s, whole gradients, from the first microbatch to the last.

    Communication, per device and step, for M microbatches and R replicas: gathers as in M calls; "every":
    M * P * (F - 1)/F reduce-scattered, 2 * P/F * (R - 1)/R all-reduced, in `reduce_dtype`; "last": the former
    once as well.

    In your own shard_map or pmap over the data-parallel axes it does the same on local arrays; the loss is
    then the global one, on every device.

    References: PyTorch FSDP2, `set_requires_gradient_sync` ("last") and `set_requires_all_reduce` ("every").

    Example:
        >>> import jax, jfsdp
        >>> from flax import nnx
        >>> model = jfsdp.shard(nnx.Linear(4, 1, rngs=nnx.Rngs(0)), jax.make_mesh((1,), ("fsdp",)))
        >>> def loss_fn(model, x, mask):
        ...     return (model(x)[:, 0] ** 2 * mask).sum(), mask.sum()
        >>> x, mask = jax.numpy.ones((8, 4)), jax.numpy.arange(8) % 3
        >>> loss, grads = nnx.jit(jfsdp.value_and_grad(loss_fn, microbatches=4))(model, x, mask)
        >>> loss.shape, grads.kernel.shape
        ((), (4, 1))
    """
    options = _checked(loss_fn, microbatches, sync, has_aux, wrt, in_specs, out_specs)

    @functools.wraps(loss_fn)
    def differentiated(model: Any, *args: Any, **kwargs: Any) -> Any:
        front = nnx_accumulate if isinstance(model, flax_nnx.Module) else linen_accumulate
        loss, aux, gradients = front.value_and_grad(_named(loss_fn), options, model, args, kwargs)
        return ((loss, aux) if has_aux else loss), gradients

    return differentiated


def _checked(
    loss_fn: Any,
    microbatches: Any,
    sync: Any,
    has_aux: Any,
    wrt: Any,
    in_specs: Any,
    out_specs: Any,
) -> Options:
    if not callable(loss_fn):
        raise TypeError(f"value_and_grad takes a function, got {type(loss_fn).__name__}.")
    if isinstance(microbatches, bool) or not isinstance(microbatches, int):
        raise TypeError(f"microbatches must be an int, got {microbatches!r}.")
    if microbatches < 1:
        raise ValueError(f"microbatches must be 1 or more, got {microbatches}.")
    if sync not in ("every", "last"):
        raise ValueError(
            'sync must be "every" (reduce-scatter each microbatch) or "last" (reduce once, after the last), '
            f"got {sync!r}."
        )
    if not isinstance(has_aux, bool):
        raise TypeError(f"has_aux must be True or False, got {has_aux!r}.")
    return Options(
        microbatches=microbatches,
        sync=sync,
        has_aux=has_aux,
        wrt=wrt,
        in_specs=freeze_specs("in_specs", in_specs, str),
        out_specs=freeze_out_specs(out_specs),
    )


def _named(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """`loss_fn` with a name for messages, which `functools.partial` lacks."""
    if hasattr(loss_fn, "__name__"):
        return loss_fn

    @functools.wraps(loss_fn)
    def loss(*args: Any, **kwargs: Any) -> Any:
        return loss_fn(*args, **kwargs)

    inner = getattr(loss_fn, "func", None)
    loss.__name__ = getattr(inner, "__name__", type(loss_fn).__name__)
    return loss
