"""What a unit computes in, reduces in, and where it keeps its shards: the three policies of FSDP2."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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
    """Keep a unit's shards, gradients and optimizer state in host memory.

    Args:
        pin_memory: use page-locked host memory (`pinned_host`), which copies faster and cannot be
            swapped out; otherwise `unpinned_host`.

    Reference: PyTorch FSDP2, `CPUOffloadPolicy`. In this version `jfsdp.shard` raises
    NotImplementedError for it rather than leave the shards on the device.
    """

    pin_memory: bool = True
