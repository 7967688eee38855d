"""(a) The reference: the best step we can write by hand, `jax.shard_map` and `jax.lax` alone.

Every leaf is split on its first dimension. Weights are gathered in bfloat16 and gathered again in the
backward, gradients reduced in float32. When a collective runs is said by an `order`:

    ahead   the schedule of `gpt_scheduled.py`: the best known, one unit ahead; scanned and unrolled
    next    a fence at each block, for its input and the next block's shards, under `jax.grad`
    strict  a fence at each block, for its input and its own shards: one unit at a time
    free    nothing: XLA decides
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gpt_scheduled
import jax
import jax.numpy as jnp
import optax
from gpt_program import Program, init_state, make_arrays, make_tokens
from gpt_shape import (
    TX,
    Shape,
    Tree,
    embed,
    is_shape,
    logits_of,
    run_block,
    token_losses,
    tree_shapes,
)
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

ORDERS = ("ahead", "next", "strict", "free")

Collective = Callable[[jax.Array], jax.Array]


def collectives(mesh: Mesh, compute: Any) -> tuple[Collective, Collective]:
    """Of one leaf: the gather in `compute`, and the reduction in float32."""
    others = tuple(axis for axis in mesh.axis_names if axis != "fsdp")

    def gather(shard: jax.Array) -> jax.Array:
        return jax.lax.all_gather(shard.astype(compute), "fsdp", axis=0, tiled=True)

    def scatter(gradient: jax.Array) -> jax.Array:
        gradient = gradient.astype(jnp.float32)
        part = jax.lax.psum_scatter(gradient, "fsdp", scatter_dimension=0, tiled=True)
        return jax.lax.psum(part, others) if others else part

    return gather, scatter


@jax.custom_vjp
def fence(values: Any) -> Any:
    """The identity. Nothing behind it starts before all of `values` are there, nor in the backward."""
    return jax.lax.optimization_barrier(values)


fence.defvjp(
    lambda values: (jax.lax.optimization_barrier(values), None),
    lambda _, gradients: (jax.lax.optimization_barrier(gradients),),
)


def run_unrolled(block: Callable[..., Any], shards: list[Tree], x: jax.Array, order: str) -> Any:
    """All blocks in turn; `block(shards, x)` gathers and runs one."""
    shards = list(shards)
    for i in range(len(shards)):
        ahead = i + {"strict": 0, "next": 1, "free": len(shards)}[order]
        if ahead < len(shards):
            x, shards[ahead] = fence((x, shards[ahead]))
        x = block(shards[i], x)
    return x


def run_scanned(block: Callable[..., Any], shards: Tree, x: jax.Array) -> Any:
    """All blocks in a loop."""
    return jax.lax.scan(lambda x, layer: (block(layer, x), None), x, shards)[0]


def _reshard(remat: bool, scan: bool, shapes: Tree, parts: int) -> Callable[..., Any]:
    """What drops the gathered weights after the forward: remat of the block, or of its gathers alone."""
    if remat:
        return functools.partial(jax.checkpoint, prevent_cse=not scan)
    sizes = jax.tree.leaves(shapes, is_leaf=is_shape)
    shards = {(size[0] // parts, *size[1:]) for size in sizes}

    def saveable(primitive: Any, *operands: Any, **_: Any) -> bool:
        cast = primitive.name == "convert_element_type" and operands[0].shape in shards
        return primitive.name != "all_gather" and not cast

    return functools.partial(jax.checkpoint, policy=saveable, prevent_cse=not scan)


def _differentiated(parts: gpt_scheduled.Parts, reshard: Any, scan: bool, order: str) -> Any:
    """The loss and gradients as `jax.value_and_grad` takes them."""
    gather = jax.custom_vjp(parts.gather)
    gather.defvjp(lambda shards: (parts.gather(shards), None), lambda _, g: (parts.scatter(g),))

    @reshard
    def block(shards: Tree, x: jax.Array) -> jax.Array:
        return parts.block(gather(shards), x)

    def loss(blocks: Any, root: Tree) -> jax.Array:
        whole = gather(root)
        x = parts.embed(whole)
        x = run_scanned(block, blocks, x) if scan else run_unrolled(block, blocks, x, order)
        return parts.head(whole, x)

    def run(blocks: Any, root: Tree) -> Any:
        value, grads = jax.value_and_grad(loss, argnums=(0, 1))(blocks, root)
        return value, *grads

    return run


def loss_and_grads(
    shape: Shape,
    mesh: Mesh,
    scan: bool = False,
    remat: bool = True,
    order: str = "ahead",
    compute: Any = jnp.bfloat16,
) -> Callable[..., Any]:
    """`f(params, tokens)` in the global view: the mean loss, and gradients laid as the parameters."""
    gather, scatter = collectives(mesh, compute)
    reshard = _reshard(remat, scan, shape.block_shapes, mesh.shape["fsdp"])
    specs = specs_of(shape, scan)

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(specs, P(mesh.axis_names)),
        out_specs=(P(), specs),
        check_vma=False,
    )
    def run(params: Tree, tokens: jax.Array) -> tuple[jax.Array, Tree]:
        def head(root: Tree, x: jax.Array) -> jax.Array:
            losses = token_losses(logits_of(root, x), tokens)
            return losses.sum() / (shape.rows * shape.context)

        parts = gpt_scheduled.Parts(
            gather=functools.partial(jax.tree.map, gather),
            scatter=functools.partial(jax.tree.map, scatter),
            embed=lambda root: embed(root, tokens[:, :-1]),
            block=lambda weights, x: run_block(weights, x, shape.heads),
            head=head,
            remat=remat,
        )
        scheduled = gpt_scheduled.scanned if scan else gpt_scheduled.unrolled
        grads_of = functools.partial(scheduled, parts)
        if order != "ahead":
            grads_of = _differentiated(parts, reshard, scan, order)
        root = {name: leaf for name, leaf in params.items() if name != "blocks"}
        loss, blocks, rest = grads_of(params["blocks"], root)
        return jax.lax.psum(loss, mesh.axis_names), {**rest, "blocks": blocks}

    return run


def specs_of(shape: Shape, scan: bool) -> Tree:
    """Where each parameter lies: split on the first dimension, of a stack on the second."""
    shapes = tree_shapes(shape, scan)
    specs = jax.tree.map(lambda _: P("fsdp"), shapes, is_leaf=is_shape)
    if scan:
        specs["blocks"] = jax.tree.map(
            lambda _: P(None, "fsdp"), shapes["blocks"], is_leaf=is_shape
        )
    return specs


def build(
    shape: Shape, mesh: Mesh, scan: bool = False, remat: bool = True, order: str = "ahead"
) -> Program:
    """The step and its state."""
    run = loss_and_grads(shape, mesh, scan, remat, order)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs_of(shape, scan))
    params = make_arrays(tree_shapes(shape, scan), shardings, mesh)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, tokens: jax.Array) -> Any:
        params, moments = state
        loss, grads = run(params, tokens)
        updates, moments = TX.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    return Program(step, (params, init_state(TX, params, mesh)), make_tokens(shape, mesh), mesh)
