"""What a unit computes in, reduces in, and where it keeps its shards: the three policies of FSDP2."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

__all__ = ["CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy"]


@dataclasses.dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of one unit's weights, gradients, inputs and outputs.

    Only real floating leaves are ever cast. Integers, booleans, complex numbers, PRNG keys and all
    state that is not a parameter pass as they are.

    Args:
        param_dtype: dtype of the gathered weight, hence of the all-gather on the wire and of the
            computation. The shard is cast before the gather. None: the parameter's own dtype.
        reduce_dtype: dtype of the reduce-scatter and of the all-reduce over the replicate axes; the
            local gradient is cast before, and nothing is cast between the two. None: the
            parameter's own dtype whatever `param_dtype` is (FSDP2's rule since torch 2.15).
        output_dtype: dtype that floating outputs of the unit are cast to. None: left as they are.
        cast_forward_inputs: cast floating inputs of the unit, positional and keyword, to
            `param_dtype` (no effect where that is None). Turn it off for units that take float32
            tables such as rotary embeddings.

    Each field takes anything that names a dtype (`"bfloat16"`, `jnp.bfloat16`, `np.dtype`) and holds
    a `numpy.dtype` afterwards, so that equal policies compare and hash equal.

    Raises:
        TypeError: a field is no dtype, or `cast_forward_inputs` is no bool.
        ValueError: a dtype is not a real floating dtype.

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

    def __post_init__(self) -> None:
        for field in ("param_dtype", "reduce_dtype", "output_dtype"):
            object.__setattr__(self, field, _floating_dtype(field, getattr(self, field)))
        if not isinstance(self.cast_forward_inputs, bool):
            raise TypeError(
                "MixedPrecisionPolicy.cast_forward_inputs must be True or False, got "
                f"{self.cast_forward_inputs!r}."
            )


def _floating_dtype(field: str, value: Any) -> np.dtype | None:
    if value is None:
        return None
    try:
        dtype = jnp.dtype(value)
    except TypeError as error:
        raise TypeError(
            f"MixedPrecisionPolicy.{field} must name a dtype such as 'bfloat16', jnp.bfloat16 or "
            f"np.dtype('float32'), got {value!r}."
        ) from error
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"MixedPrecisionPolicy.{field} must be a real floating dtype, got {dtype.name}: "
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
