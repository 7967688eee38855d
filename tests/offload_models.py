"""Models whose blocks name what they keep: NNX and Linen, unrolled and scanned."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jfsdp

NAMES = ("block_in", "hidden")

TO_HOST = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=list(NAMES),
    offload_src="device",
    offload_dst="pinned_host",
)

POLICIES = {"none": None, "plain": {}, "own": {"policy": TO_HOST}}
"""What the user puts round a block: nothing, a remat, or a remat that offloads by itself."""


def forward(x: Any, up: Any, down: Any) -> Any:
    """A residual block; what it names are the inputs of matmuls."""
    x = checkpoint_name(x, "block_in")
    return x + jnp.tanh(down(checkpoint_name(jnp.sin(up(x)), "hidden")))


class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, width, rngs=rngs)
        self.down = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return forward(x, self.up, self.down)


class Model(nnx.Module):
    blocks: Any

    def __init__(self, width: int, depth: int, scan: bool, remat: str, rngs: nnx.Rngs):
        self.scan, self.remat = scan, remat
        if scan:
            make = nnx.vmap(lambda r: Block(width, r))
            self.blocks = nnx.split_rngs(splits=depth)(make)(rngs)
        else:
            self.blocks = nnx.List([Block(width, rngs) for _ in range(depth)])
        self.head = nnx.Linear(width, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        def run(block: Any, x: Any) -> Any:
            return block(x)

        settings = POLICIES[self.remat]

        def block(x: Any, block: Any) -> Any:
            call = run if settings is None else nnx.remat(run, **settings)
            return call(block, x)

        if self.scan:
            axes: Any = {"in_axes": (nnx.Carry, 0), "out_axes": nnx.Carry}
            x = nnx.scan(block, **axes)(x, self.blocks)
        else:
            for one in self.blocks:
                x = block(x, one)
        return self.head(x)


class LinenBlock(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return forward(x, nn.Dense(self.width, name="up"), nn.Dense(self.width, name="down"))


class LinenLayer(nn.Module):
    width: int
    remat: str

    @nn.compact
    def __call__(self, x: Any, _: None) -> Any:
        return _rematted(self.remat)(self.width, name="block")(x), None


class LinenModel(nn.Module):
    width: int
    depth: int
    scan: bool
    remat: str

    @nn.compact
    def __call__(self, x: Any) -> Any:
        if self.scan:
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            stack: Any = nn.scan(LinenLayer, length=self.depth, **axes)
            x, _ = stack(self.width, self.remat, name="layers")(x, None)
        else:
            for index in range(self.depth):
                x = _rematted(self.remat)(self.width, name=f"block{index}")(x)
        return nn.Dense(8, name="head")(x)


def _rematted(remat: str) -> Any:
    settings: Any = POLICIES[remat]
    return LinenBlock if settings is None else nn.remat(LinenBlock, **settings)


def offloading(*names: str) -> jfsdp.CPUOffloadPolicy:
    """A policy that keeps nothing on the host but what has these names."""
    return jfsdp.CPUOffloadPolicy(parameters=False, optimizer_state=False, activations=names)


def loss_of(
    front: str, mesh: Any, policy: Any, *, scan: bool, remat: str, width: int = 16, depth: int = 3
) -> tuple[Any, Any]:
    """A loss as a function of parameters and a batch, and the parameters; abstract if the devices are."""
    abstract = mesh.devices.flat[0] not in jax.devices()
    if front == "linen":
        plain = LinenModel(width, depth, scan, remat)
        model = jfsdp.shard(plain, mesh, units=LinenBlock, offload_policy=policy)
        init = functools.partial(model.init, jax.random.key(0), jnp.ones((8, width)))
        params: Any = jfsdp.init(init, abstract=abstract)
        apply: Any = model.apply
        return lambda params, x: jnp.mean(apply(params, x) ** 2), params

    def make() -> Any:
        model = Model(width, depth, scan, remat, nnx.Rngs(0))
        for block in [model.blocks] if scan else model.blocks:
            axis = 0 if scan else None
            jfsdp.shard(block, mesh, stacked_axis=axis, offload_policy=policy)  # pyright: ignore
        return jfsdp.shard(model, mesh)

    model = jfsdp.init(make, abstract=abstract)
    graphdef, state = nnx.split(model)
    return lambda state, x: jnp.mean(nnx.merge(graphdef, state)(x) ** 2), state


def batch(mesh: Any, rows: int, width: int) -> jax.ShapeDtypeStruct:
    """A batch that is only described."""
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    return jax.ShapeDtypeStruct((rows, width), jnp.float32, sharding=sharding)
