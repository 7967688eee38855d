"""The reference's own forward and backward, with every collective at its place in the schedule.

One unit ahead: the next block's weights are gathered beside a block's matmuls, and a block's gradients are
reduced beside those of the block whose turn comes next. XLA keeps to that where everything in flight passes
one `optimization_barrier` between blocks, gathered weights and unreduced gradients too; leaving out any of
them merges the collectives of several blocks or lets nothing run beside them (8 x H100, jax 0.12.0.1). In the
backward another one puts the gather before the reduction: else casts to float32 are all that runs beside it.
A loop carries the same things.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from gpt_shape import Tree

barrier = jax.lax.optimization_barrier


@dataclasses.dataclass(frozen=True)
class Parts:
    """What the schedules are made of.

    Attributes:
        gather: shards of a unit to its whole weights.
        scatter: whole gradients of a unit, of this device, to shards of the reduced ones.
        embed: `embed(root)`, the first activations.
        block: `block(weights, x)`.
        head: `head(root, x)`, this device's part of the loss.
        remat: whether a block keeps its input alone.
    """

    gather: Callable[[Tree], Tree]
    scatter: Callable[[Tree], Tree]
    embed: Callable[[Tree], jax.Array]
    block: Callable[[Tree, jax.Array], jax.Array]
    head: Callable[[Tree, jax.Array], jax.Array]
    remat: bool

    def forward(self, weights: Tree, x: jax.Array) -> tuple[jax.Array, Any]:
        """The block's output, and what it keeps: nothing that is made of weights alone."""
        if self.remat:
            return self.block(weights, x), [x]
        y, pullback = jax.vjp(self.block, weights, x)
        leaves = jax.tree.leaves(pullback)
        needs = _needs_input(self.block, weights, x)
        return y, [leaf for leaf, kept in zip(leaves, needs, strict=True) if kept]

    def backward(
        self, weights: Tree, saved: list[jax.Array], g: jax.Array
    ) -> tuple[Tree, jax.Array]:
        """Gradients of the weights and of the input."""
        if self.remat:
            return jax.vjp(self.block, weights, *saved)[1](g)
        x = jnp.zeros_like(g)
        leaves, treedef = jax.tree.flatten(jax.vjp(self.block, weights, x)[1])
        rest = iter(saved)
        needs = _needs_input(self.block, weights, x)
        mixed = [next(rest) if kept else leaf for leaf, kept in zip(leaves, needs, strict=True)]
        return jax.tree.unflatten(treedef, mixed)(g)


def _needs_input(block: Callable[..., Any], weights: Tree, x: jax.Array) -> list[bool]:
    """Which residuals of a block depend on its input."""
    jaxpr = jax.make_jaxpr(lambda w, x: jax.tree.leaves(jax.vjp(block, w, x)[1]))(weights, x).jaxpr
    dependent = {id(v) for v in jaxpr.invars[len(jax.tree.leaves(weights)) :]}
    for equation in jaxpr.eqns:
        if any(id(v) in dependent for v in equation.invars):
            dependent.update(map(id, equation.outvars))
    return [id(v) in dependent for v in jaxpr.outvars]


def unrolled(parts: Parts, blocks: list[Tree], root: Tree) -> tuple[jax.Array, list[Tree], Tree]:
    """The loss, and the reduced gradients of the blocks and of the root unit."""
    last = len(blocks) - 1
    whole = parts.gather(root)
    weights = parts.gather(blocks[0])
    x, pull_embedding = jax.vjp(parts.embed, whole)
    kept: list[Any] = []
    for k in range(last + 1):
        x, weights, following = barrier((x, weights, blocks[k + 1] if k < last else ()))
        ahead = parts.gather(following) if k < last else {}
        x, saved = parts.forward(weights, x)
        kept.append(saved)
        weights = ahead
    x, following = barrier((x, blocks[last]))
    weights = parts.gather(following)
    loss, whole_gradient, g, weights = _head(parts, whole, x, weights)
    reduced: dict[int, Tree] = {}
    unreduced: Tree = {}
    for k in range(last, -1, -1):
        saved = kept.pop() if parts.remat else ()
        flying = (g, weights, saved, blocks[k - 1] if k else (), unreduced, reduced.get(k + 2, ()))
        g, weights, saved, following, unreduced, done = barrier(flying)
        ahead, unreduced = barrier((parts.gather(following) if k else {}, unreduced))
        if k < last:
            reduced[k + 1] = parts.scatter(unreduced)
        if k + 1 < last:
            reduced[k + 2] = done
        unreduced, g = parts.backward(weights, saved if parts.remat else kept.pop(), g)
        weights = ahead
    g, unreduced, done = barrier((g, unreduced, reduced.get(1, ())))
    if last:
        reduced[1] = done
    (more,) = pull_embedding(g)
    reduced[0] = parts.scatter(unreduced)
    root_gradient = parts.scatter(jax.tree.map(jnp.add, whole_gradient, more))
    return loss, [reduced[k] for k in range(last + 1)], root_gradient


def scanned(parts: Parts, blocks: Tree, root: Tree) -> tuple[jax.Array, Tree, Tree]:
    """The same with stacked blocks, two or more, in loops; the first and last block are outside of them."""
    last = jax.tree.leaves(blocks)[0].shape[0] - 1
    whole = parts.gather(root)

    def layer(k: Any) -> Tree:
        return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, k, 0, False), blocks)

    def put(stack: Tree, gradient: Tree, k: Any) -> Tree:
        def update(leaf: jax.Array, part: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(leaf, part, k, 0)

        return jax.tree.map(update, stack, gradient)

    def run(carry: Any, k: Any) -> tuple[Any, Any]:
        x, weights = carry
        ahead = parts.gather(layer(k + 1))
        x, saved = parts.forward(weights, x)
        return (x, ahead), saved

    x, pull_embedding = jax.vjp(parts.embed, whole)
    (x, weights), kept = jax.lax.scan(run, (x, parts.gather(layer(0))), jnp.arange(last))
    x, saved = parts.forward(weights, x)
    x, following = barrier((x, layer(last)))
    weights = parts.gather(following)
    loss, whole_gradient, g, weights = _head(parts, whole, x, weights)

    def run_back(carry: Any, kept_and_k: Any) -> tuple[Any, None]:
        g, weights, unreduced, reduced = carry
        saved, k = kept_and_k
        ahead = parts.gather(layer(k - 1))
        reduced = put(reduced, parts.scatter(unreduced), k + 1)
        unreduced, g = parts.backward(weights, saved, g)
        return (g, ahead, unreduced, reduced), None

    ahead = parts.gather(layer(last - 1))
    unreduced, g = parts.backward(weights, saved, g)
    carry = (g, ahead, unreduced, jax.tree.map(jnp.zeros_like, blocks))
    loop = (jax.tree.map(lambda leaf: leaf[1:], kept), jnp.arange(1, last))
    (g, weights, unreduced, reduced), _ = jax.lax.scan(run_back, carry, loop, reverse=True)
    second = parts.scatter(unreduced)
    first = jax.tree.map(lambda leaf: leaf[0], kept)
    unreduced, g = parts.backward(weights, first, g)
    g, unreduced, second = barrier((g, unreduced, second))
    (more,) = pull_embedding(g)
    reduced = put(put(reduced, second, 1), parts.scatter(unreduced), 0)
    return loss, reduced, parts.scatter(jax.tree.map(jnp.add, whole_gradient, more))


def _head(parts: Parts, root: Tree, x: jax.Array, weights: Tree) -> tuple[Any, ...]:
    """The loss, the gradients of the root unit and of `x`, and `weights`, which are there by the backward."""
    loss, pullback = jax.vjp(parts.head, root, x)
    pullback, weights = barrier((pullback, weights))
    return loss, *pullback(jnp.ones_like(loss)), weights
