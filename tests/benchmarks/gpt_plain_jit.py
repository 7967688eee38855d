"""(b) What JAX's documentation teaches: `jax.jit`, NamedShardings on the arrays, and constraints.

Parameters lie as those of the hand-written step. Within the step each weight is cast to bfloat16 and
constrained to be whole, and the activations are constrained to the batch at every block: without the latter
XLA drops the batch sharding inside scanned stacks. XLA places the collectives, and decides on their dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from gpt_by_hand import specs_of
from gpt_program import Program, init_state, make_arrays, make_tokens
from gpt_shape import TX, Shape, Tree, embed, logits_of, run_block, token_losses, tree_shapes
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def loss_of(
    shape: Shape,
    mesh: Mesh,
    scan: bool = False,
    remat: bool = True,
    compute: Any = jnp.bfloat16,
) -> Callable[..., Any]:
    """`f(params, tokens)`: the mean loss."""
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(mesh.axis_names))
    constrain = jax.lax.with_sharding_constraint

    def weights(shards: Tree) -> Tree:
        return jax.tree.map(lambda shard: constrain(shard.astype(compute), whole), shards)

    def block(x: jax.Array, shards: Tree) -> tuple[jax.Array, None]:
        x = run_block(weights(shards), constrain(x, split), shape.heads)
        return constrain(x, split), None

    if remat:
        block = jax.checkpoint(block, prevent_cse=not scan)

    def loss(params: Tree, tokens: jax.Array) -> jax.Array:
        root = weights({name: params[name] for name in params if name != "blocks"})
        x = constrain(embed(root, tokens[:, :-1]), split)
        if scan:
            x, _ = jax.lax.scan(block, x, params["blocks"])
        else:
            for shards in params["blocks"]:
                x, _ = block(x, shards)
        return token_losses(constrain(logits_of(root, x), split), tokens).mean()

    return loss


def build(shape: Shape, mesh: Mesh, scan: bool = False, remat: bool = True) -> Program:
    """The step and its state."""
    loss_fn = loss_of(shape, mesh, scan, remat)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs_of(shape, scan))
    params = make_arrays(tree_shapes(shape, scan), shardings, mesh)
    moments = init_state(TX, params, mesh)
    places = jax.tree.map(lambda array: array.sharding, (params, moments))

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(places, None))
    def step(state: Any, tokens: jax.Array) -> Any:
        params, moments = state
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, moments = TX.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    return Program(step, (params, moments), make_tokens(shape, mesh), mesh)
