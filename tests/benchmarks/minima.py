"""The least that a step of the suite's GPT can communicate and keep, by arithmetic alone.

Nothing here reads a program or asks jfsdp. A mesh has R replicas of F shards.
"""

from __future__ import annotations

import dataclasses
import math

import jax
from gpt_shape import Shape, is_shape

COMPUTE, REDUCE, STORED, MOMENTS = 2, 4, 4, 8
"""Bytes per parameter: gathered, reduced, kept, and of the two moments of Adam."""

# Of a block's 12 leaves, those whose values the backward needs. With remat the block runs again, all but its
# last sum; without, biases are not needed: their gradients are sums of the output's.
NEEDED_AGAIN = {True: 11, False: 6}


@dataclasses.dataclass(frozen=True)
class Minima:
    """The least of one device and step.

    Attributes:
        parameters: of the model.
        gathered: bytes of all-gathers: blocks twice, the root unit once.
        scattered: bytes of reduce-scatters.
        summed: bytes of all-reduces over the replicas.
        gathers: how many all-gathers, of one leaf each.
        scatters: how many reduce-scatters, of one leaf each.
        persistent: bytes of parameters and optimizer state.
        growth: bytes of temporaries that one more block needs with remat: the shards of its gradients, and
            its input.
    """

    parameters: int
    gathered: float
    scattered: float
    summed: float
    gathers: int
    scatters: int
    persistent: float
    growth: float


def minima(shape: Shape, replicas: int, shards: int, remat: bool = True) -> Minima:
    """The formulas for one shape, on `replicas` times `shards` devices."""
    block, root = _sizes(shape.block_shapes), _sizes(shape.root_shapes)
    of_blocks, of_root = shape.blocks * sum(block), sum(root)
    total = of_blocks + of_root
    others = (shards - 1) / shards
    rows = shape.rows / (replicas * shards)
    return Minima(
        parameters=total,
        gathered=(2 * of_blocks + of_root) * COMPUTE * others,
        scattered=total * REDUCE * others,
        summed=2 * (replicas - 1) / replicas * total / shards * REDUCE,
        gathers=len(root) + shape.blocks * (len(block) + NEEDED_AGAIN[remat]),
        scatters=len(root) + shape.blocks * len(block),
        persistent=total * (STORED + MOMENTS) / shards,
        growth=sum(block) * STORED / shards + rows * shape.context * shape.width * COMPUTE,
    )


def _sizes(shapes: object) -> list[int]:
    return [math.prod(size) for size in jax.tree.leaves(shapes, is_leaf=is_shape)]
