"""What a unit computes in, reduces in, and where it keeps its shards: the three policies of FSDP2."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

__all__ = ["CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy", "headroom"]


@dataclasses.dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of one unit's weights, gradients, inputs and outputs.

    Only real floating leaves are ever cast. Integers, booleans, complex numbers, PRNG keys and all
    state that is not a parameter pass as they are. So do parameters of 8 bits and fewer (`float8_e4m3fn`,
    `float8_e5m2`): these are formats of storage, gathered as they are.

    Args:
        param_dtype: dtype of the gathered weight, hence of the all-gather on the wire and of the
            computation. The shard is cast before the gather. None: the parameter's own dtype.
        reduce_dtype: dtype of the reduce-scatter and of the all-reduce over the replicate axes; the
            local gradient is cast before, and nothing is cast between the two. None: the
            parameter's own dtype whatever `param_dtype` is (FSDP2's rule since torch 2.15); parameters of
            8-bit floats need it to be differentiated. Sums over N devices in float16 overflow late and lose
            little: gradients are multiplied by N/p before and divided by it after, with FSDP2's p, a power of
            two about sqrt(N). That is for the gradient of a mean over N devices, as it comes out of a loss
            over the global batch. What is computed in float16 needs loss scaling all the same.
        output_dtype: dtype that floating outputs of the unit are cast to. None: left as they are.
        cast_forward_inputs: cast floating inputs of the unit, positional and keyword, to
            `param_dtype` (no effect where that is None). Turn it off for units that take float32
            tables such as rotary embeddings, or keep the table in the module as state that is no parameter.
        param_dtype_override_fn: `f(path, param)`, asked once for each real floating parameter when it is
            sharded (Linen: when the module is first initialized or applied), returns the dtype that takes the
            place of `param_dtype` for this one, or None. For norms and routers in float32. `path` is dotted;
            `param` has the whole shape and the storage dtype. Inputs are cast to `param_dtype` all the same,
            and what a layer makes of an input and parameters of two dtypes is the layer's own affair.

    Each field takes anything that names a dtype (`"bfloat16"`, `jnp.bfloat16`, `np.dtype`) and holds
    a `numpy.dtype` afterwards, so that equal policies compare and hash equal.

    Raises:
        TypeError: a field is no dtype, `cast_forward_inputs` is no bool, or `param_dtype_override_fn` no
            function.
        ValueError: a dtype is not a real floating dtype.

        What the function returns is checked when the parameter is sharded, with the same two errors.

    Cost: `param_dtype` of half the width halves the bytes of every all-gather and the memory of the
    gathered weights; `reduce_dtype` does the same to the bytes of the reductions.

    Reference: PyTorch FSDP2, `MixedPrecisionPolicy`.

    Example:
        >>> policy = MixedPrecisionPolicy(param_dtype="bfloat16", reduce_dtype=jnp.float32)
        >>> policy.param_dtype
        dtype(bfloat16)
    """

    param_dtype: Any = None
    reduce_dtype: Any = None
    output_dtype: Any = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[str, Any], Any] | None = dataclasses.field(
        default=None, kw_only=True
    )

    def __post_init__(self) -> None:
        for field in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = _floating_dtype(f"MixedPrecisionPolicy.{field}", "name", getattr(self, field))
            object.__setattr__(self, field, dtype)
        if not isinstance(self.cast_forward_inputs, bool):
            raise TypeError(
                "MixedPrecisionPolicy.cast_forward_inputs must be True or False, got "
                f"{self.cast_forward_inputs!r}."
            )
        fn = self.param_dtype_override_fn
        if fn is not None and not callable(fn):
            raise TypeError(
                "MixedPrecisionPolicy.param_dtype_override_fn must be a function f(path, param) or None, got "
                f"{fn!r}."
            )

    def override(self, path: str, param: Any) -> np.dtype | None:
        """What `param_dtype_override_fn` says of one parameter; None where `param_dtype` holds.

        Args:
            path: its dotted path.
            param: what has its shape and dtype. If that is not real floating, the function is not asked.

        Raises:
            TypeError: it returns no dtype.
            ValueError: it returns one that is not real floating.
        """
        if self.param_dtype_override_fn is None or not jnp.issubdtype(param.dtype, jnp.floating):
            return None
        asked = self.param_dtype_override_fn(path, param)
        return _floating_dtype(f"{path}: param_dtype_override_fn", "return None or", asked)


def headroom(reduce_dtype: Any, devices: int) -> float:
    """What a local gradient is multiplied by before it is reduced, and the reduced one divided by.

    Float16 overflows above 65504 and loses bits below 6e-5. FSDP2 sums the gradients of local means, N times
    ours, divided by a power of two about sqrt(N) before and by the rest after. This is what makes the same
    numbers of ours.

    Args:
        reduce_dtype: dtype of the reductions; 1 for any but float16.
        devices: N, the number of devices that are summed over.
    """
    if reduce_dtype != jnp.float16:
        return 1.0
    power = 1
    while devices % power == 0 and devices / power > power:
        power *= 2
    return devices / power


def _floating_dtype(what: str, does: str, value: Any) -> np.dtype | None:
    if value is None:
        return None
    try:
        dtype = jnp.dtype(value)
    except TypeError as error:
        raise TypeError(
            f"{what} must {does} a dtype such as 'bfloat16', jnp.bfloat16 or "
            f"np.dtype('float32'), got {value!r}."
        ) from error
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"{what} must {'be' if does == 'name' else does} a real floating dtype, got {dtype.name}: "
            "integer and complex parameters are never cast."
        )
    return dtype


@dataclasses.dataclass(frozen=True)
class OffloadPolicy:
    """Keep shards on the device: no offload. The base class of the offload policies."""


@dataclasses.dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep a unit's shards, their gradients and their optimizer state in host memory.

    A shard is copied to the device just before its gather, forward and backward, and its reduced gradient
    back. `jfsdp.update_optimizer`, and `nnx.Optimizer.update` for NNX, do the optimizer's step.

    Args:
        pin_memory: use page-locked host memory (`pinned_host`), which copies faster and cannot be swapped
            out; otherwise `unpinned_host`, on CPU only: compilers for TPUs refuse it. jax leaves that kind
            out of the types of traced arrays: a step has to name it by `out_shardings=jfsdp.shardings(...)`,
            or to be compiled by `jfsdp.jit`.
        parameters: the shards and their gradients.
        optimizer_state: moments and whatever else lies as the parameters. Without `parameters` these stay on
            the device, and only the state comes and goes.
        activations: names given by `jax.ad_checkpoint.checkpoint_name` in the forward of the unit. What has
            one of them waits for the backward in pinned host memory.

    Raises:
        TypeError: a field is of the wrong type.
        ValueError: nothing is to be kept on the host.

    Cost, for P parameters of s bytes, F shards and K bytes of state a parameter: the device keeps none of
    P * (s + K)/F. Each step moves P * s/F to the device for every gather, and P * s/F back; the optimizer's
    step P * (2 s + K)/F to the device, P * s/F more for a global norm, and P * (s + K)/F back, or nothing if
    it is done on the host. With `partitioning="auto"`, and of units whose weights no schedule gathers (tied
    ones, those that are called twice), the shards are on the device throughout the step.

    Reference: PyTorch FSDP2, `CPUOffloadPolicy`, which has `pin_memory` only.

    Example:
        >>> CPUOffloadPolicy().memory_kind, CPUOffloadPolicy(pin_memory=False).memory_kind
        ('pinned_host', 'unpinned_host')
    """

    pin_memory: bool = True
    parameters: bool = dataclasses.field(default=True, kw_only=True)
    optimizer_state: bool = dataclasses.field(default=True, kw_only=True)
    activations: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        for field in ("pin_memory", "parameters", "optimizer_state"):
            if not isinstance(getattr(self, field), bool):
                raise TypeError(
                    f"CPUOffloadPolicy.{field} must be True or False, got {getattr(self, field)!r}."
                )
        names = (self.activations,) if isinstance(self.activations, str) else self.activations
        if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
            raise TypeError(
                "CPUOffloadPolicy.activations takes names that jax.ad_checkpoint.checkpoint_name gives, got "
                f"{self.activations!r}."
            )
        object.__setattr__(self, "activations", tuple(names))
        if not (self.parameters or self.optimizer_state or self.activations):
            raise ValueError(
                "CPUOffloadPolicy(parameters=False, optimizer_state=False) without activations keeps nothing "
                "on the host. Pass OffloadPolicy()."
            )

    @property
    def memory_kind(self) -> str:
        """The kind of host memory, as jax calls it."""
        return "pinned_host" if self.pin_memory else "unpinned_host"
