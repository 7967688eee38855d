"""The gradients of whole weights that are on their way to their shards, in a schedule's backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jfsdp.weights import Weight, fence

__all__ = ["Reductions"]

Key = tuple[Any, int | None]
"""A weight's variable, and the layer if it is stacked."""


class Reductions:
    """One unit's gradients are reduced while the next unit's are computed, and are there when those are.

    Whole gradients wait in the dtype that they were computed in: a barrier round what is cast already would
    leave the cast out of what overlaps (H100, jax 0.12.0.1: one matmul beside the reduce-scatter, not six).
    """

    def __init__(self, weights: Mapping[Any, Weight]):
        self._weights = weights
        self._done: dict[Any, Any] = {}
        self._whole: dict[Key, Any] = {}
        self._running: dict[Key, Any] = {}

    def add(self, v: Any, gradient: Any, layer: int | None = None) -> None:
        """A gradient that is complete on this device; of stacked weights that of a layer."""
        if self._weights[v].waits:
            self._whole[v, layer] = gradient
        else:
            self._running[v, layer] = self._weights[v].reduced(gradient, layer is not None)

    def track(self, v: Any, gradient: Any, layer: int) -> None:
        """One that is being reduced already."""
        self._running[v, layer] = gradient

    def stack(self, v: Any, gradients: Any) -> None:
        """The gradients of all layers but of those that were added."""
        self._done[v] = gradients

    def fence(self, *trees: Any) -> tuple[Any, ...]:
        """`trees`, once all that runs is done. What is complete is reduced after the next `begin`."""
        *tied, self._whole, self._running = fence(*trees, self._whole, self._running)
        self._land()
        return tuple(tied)

    def begin(self, coming: Any) -> Any:
        """Start to reduce what is complete once these weights are gathered; the weights.

        Gathers and reductions take turns. Else casts to the dtype of the reduction would be all that runs
        beside the gathers (H100: 0.54 of them beside matmuls, not 0.90).
        """
        coming, self._whole = fence(coming, self._whole)
        self._start()
        return coming

    def settle(self, tree: Any) -> Any:
        """`tree`, once all is done."""
        self._start()
        tree, self._running = fence(tree, self._running)
        self._land()
        return tree

    def finish(self) -> dict[Any, Any]:
        """All of them, reduced, by the variables of their weights; the last one's after those before."""
        self._whole, self._running = fence(self._whole, self._running)
        self._land()
        self._start()
        self._land()
        return self._done

    def _start(self) -> None:
        for (v, layer), gradient in self._whole.items():
            self._running[v, layer] = self._weights[v].reduced(gradient, layer is not None)
        self._whole = {}

    def _land(self) -> None:
        for (v, layer), gradient in self._running.items():
            gradient = self._weights[v].landed(gradient)
            if layer is not None:
                stack = self._done[v]
                gradient = jax.lax.dynamic_update_index_in_dim(stack, gradient, layer, 0)
            self._done[v] = gradient
        self._running = {}
