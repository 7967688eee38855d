"""Host time of one call of a training step, NNX and Linen, beside `jax.jit` of the flat arrays, in turns.

    python tests/benchmarks/host_time.py [--rounds 200] [--leaves 48 192] [--devices 8 1]

A step of parameters, momentum and two counts, as many arrays as asked for, vectors of 8 sharded over the
devices, all donated: next to nothing to compute, so that what a call costs is the host's work. Timed is the
call until it returns; then its result is waited for. The ways take turns within each round; printed is the
median of a way's times and the median of its ratio to `jax.jit` in the same round.

One device is the harder case: `jax.jit` itself is cheaper there, and what is added in Python weighs more.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import flax
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jfsdp

GATE = 1.5
GATED = ("jfsdp.jit", "jax.jit of a Linen TrainState")
tx = optax.sgd(optax.constant_schedule(1e-3), momentum=0.9)


class Layer(nnx.Module):
    """One vector."""

    def __init__(self):
        self.weight = nnx.Param(jnp.ones(8))


class Model(nnx.Module):
    """A list of layers."""

    def __init__(self, depth: int):
        self.layers = nnx.List([Layer() for _ in range(depth)])

    def __call__(self, x):
        return sum(layer.weight[...] * x for layer in self.layers)


def train_step(model, optimizer, x):
    """The user's step, as for nnx.jit."""
    loss, grads = nnx.value_and_grad(lambda model: jnp.sum(model(x)))(model)
    optimizer.update(model, grads)
    return loss


def linen_step(state, x):
    """The same for a TrainState."""
    loss, grads = jax.value_and_grad(lambda params: sum(jnp.sum(p * x) for p in params.values()))(
        state.params
    )
    return state.apply_gradients(grads=grads), loss


def ways_to_call(leaves: int, mesh: Any) -> dict[str, Callable[[], Any]]:
    """Every way to run the step, each on arrays of its own; a call runs one step and returns the loss."""
    sharded, everywhere = (
        NamedSharding(mesh, PartitionSpec("fsdp")),
        NamedSharding(mesh, PartitionSpec()),
    )
    x = jax.device_put(jnp.ones(8), sharded)

    def put(tree: Any) -> Any:
        def copy(a: Any) -> Any:
            a = jnp.asarray(a)
            return jax.device_put(a, sharded if a.ndim else everywhere, may_alias=False)

        return jax.tree.map(copy, tree)

    def objects() -> tuple[Model, nnx.Optimizer]:
        model = Model((leaves - 2) // 2)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        for node in (model, optimizer):
            nnx.update(node, put(nnx.state(node)))
        return model, optimizer

    def carried(step: Callable[..., Any], carry: Any) -> Callable[[], Any]:
        kept = [carry]

        def call() -> Any:
            kept[0], loss = step(kept[0], x)
            return loss

        return call

    graphdef, state = nnx.split(objects())
    flat, treedef = jax.tree.flatten(state)
    assert len(flat) == leaves

    @partial(jax.jit, donate_argnums=0)
    def raw(flat, x):
        model, optimizer = nnx.merge(graphdef, jax.tree.unflatten(treedef, flat))
        loss = train_step(model, optimizer, x)
        return jax.tree.leaves(nnx.split((model, optimizer))[1]), loss

    @partial(jax.jit, donate_argnums=0)
    def functional(pair, x):
        model, optimizer = nnx.merge(*pair)
        loss = train_step(model, optimizer, x)
        return nnx.split((model, optimizer)), loss

    params = {f"layer_{number}": jnp.ones(8) for number in range((leaves - 2) // 2)}
    train_state = put(TrainState.create(apply_fn=len, params=params, tx=tx))
    assert len(jax.tree.leaves(train_state)) == leaves
    jitted = nnx.jit(train_step, donate_argnums=(0, 1))
    ours, jit_partial = jfsdp.jit(train_step), partial(nnx.jit_partial, graph_updates=False)
    return {
        "jax.jit of flat arrays": carried(raw, flat),
        "jfsdp.jit": partial(ours, *objects(), x),
        "jax.jit of a Linen TrainState": carried(
            jax.jit(linen_step, donate_argnums=0), train_state
        ),
        "nnx.jit_partial": partial(jit_partial(train_step, *objects(), donate_argnums=0), x),
        "split and merge, State carried": carried(functional, nnx.split(objects())),
        "nnx.cached_partial": partial(nnx.cached_partial(jitted, *objects()), x),
        "nnx.jit": partial(jitted, *objects(), x),
    }


def measure(leaves: int = 48, devices: int = 8, rounds: int = 200) -> dict[str, dict[str, float]]:
    """Run every way in turn.

    Returns:
        For each way `us`, the median of a call's microseconds, and `ratio`, the median ratio to the first.
    """
    mesh = jax.make_mesh(
        (devices,), ("fsdp",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,)
    )
    ways = ways_to_call(leaves, mesh)
    names = list(ways)
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()  # One way's garbage is not to be collected on another's time.
    try:
        for number in range(rounds + 5):
            if number % 20 == 0:
                gc.collect()
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                start = time.perf_counter()
                loss = ways[name]()
                seconds = time.perf_counter() - start
                jax.block_until_ready(loss)
                if number >= 5:
                    times[name].append(seconds * 1e6)
    finally:
        gc.enable()
    first = times[names[0]]
    return {
        name: {
            "us": statistics.median(found),
            "ratio": statistics.median(b / a for a, b in zip(first, found, strict=True)),
        }
        for name, found in times.items()
    }


def main() -> None:
    """Prints the configuration and a table for each number of arrays and devices."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--leaves", type=int, nargs="+", default=[48, 192])
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 1])
    options = parser.parse_args()
    print(
        f"jax {jax.__version__}, flax {flax.__version__}, Python {platform.python_version()}, "
        f"simulated CPU devices on {os.cpu_count()} cores; vectors of 8, sgd with momentum, donated; "
        f"{options.rounds} rounds; gate <= {GATE} for {', '.join(GATED)}"
    )
    for devices in options.devices:
        for leaves in options.leaves:
            print(f"\n{leaves} arrays, {devices} device{'s' * (devices > 1)}")
            for name, found in measure(leaves, devices, options.rounds).items():
                verdict = ("ok" if found["ratio"] <= GATE else "MISSED") if name in GATED else ""
                print(
                    f"  {name:32}{found['us']:8.0f} us  {found['ratio']:6.2f}  {verdict}".rstrip()
                )


if __name__ == "__main__":
    main()
