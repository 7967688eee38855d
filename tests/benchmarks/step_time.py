"""Step time of jfsdp against a hand-written shard_map step of the same model, run side by side.

    python tests/benchmarks/step_time.py [--pairs 40]

Both train 8 MLP blocks with Adam on 8 simulated CPU devices: bfloat16 compute, float32 reduction, weights
gathered again in the backward. The runs are interleaved, and the median of each pair's ratio is printed
beside the ratio of the hand-written step to itself, which is the noise.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from functools import partial

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jfsdp

WIDTH, HIDDEN, DEPTH, BATCH = 256, 1024, 8, 256
P = PartitionSpec
tx = optax.adam(1e-3)


class Block(nnx.Module):
    """x + down(gelu(up(x)))."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class Model(nnx.Module):
    """A stack of blocks."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(DEPTH)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


# --------------------------------------------------------------------------------------------------
# The hand-written step: parameters as a list of (up, down), sharded on their larger dimension.


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather(shard, dim):
    """bfloat16 all-gather whose transpose is a float32 reduce-scatter."""
    return jax.lax.all_gather(shard.astype(jnp.bfloat16), "fsdp", axis=dim, tiled=True)


def _scatter(dim, _, gradient):
    return (
        jax.lax.psum_scatter(
            gradient.astype(jnp.float32), "fsdp", scatter_dimension=dim, tiled=True
        ),
    )


gather.defvjp(
    lambda shard, dim: (
        jax.lax.all_gather(shard.astype(jnp.bfloat16), "fsdp", axis=dim, tiled=True),
        None,
    ),
    _scatter,
)


def _save_activations(primitive, *avals, **_):
    shards = {(WIDTH, HIDDEN // 8), (HIDDEN // 8, WIDTH)}
    return primitive.name != "all_gather" and not (
        primitive.name == "convert_element_type" and avals[0].shape in shards
    )


@partial(jax.checkpoint, policy=_save_activations)
def block_by_hand(shards, x):
    """One block, gathered in the forward and again in the backward."""
    up, down = gather(shards[0], 1), gather(shards[1], 0)
    return x + jnp.dot(jax.nn.gelu(jnp.dot(x, up)), down)


def make_hand_written(mesh):
    """Returns (jitted step, its state)."""
    specs = [(P(None, "fsdp"), P("fsdp", None))] * DEPTH

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(specs, P("fsdp")),
        out_specs=(P(), specs),
        check_vma=False,
    )
    def loss_and_grads(params, x):
        def local_loss(params):
            h = x.astype(jnp.bfloat16)
            for shards in params:
                h = block_by_hand(shards, h)
            return jnp.sum(h.astype(jnp.float32) ** 2) / (BATCH * WIDTH)

        loss, grads = jax.value_and_grad(local_loss)(params)
        return jax.lax.psum(loss, "fsdp"), grads

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, x):
        loss, grads = loss_and_grads(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    model = Model(nnx.Rngs(0))
    whole = [(b.up.kernel[...], b.down.kernel[...]) for b in model.blocks]
    put = [
        tuple(jax.device_put(w, NamedSharding(mesh, s)) for w, s in zip(pair, spec, strict=True))
        for pair, spec in zip(whole, specs, strict=True)
    ]
    state = jax.jit(tx.init, out_shardings=None)(put)
    return step, (put, state)


def make_jfsdp(mesh):
    """Returns (jitted step, its state): jax.jit on the split module, the loss in the global view."""
    policy = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)
    model = jfsdp.shard(Model(nnx.Rngs(0)), mesh, units=Block, mp_policy=policy)
    graphdef, params = nnx.split(model)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, x):
        def loss_fn(params):
            return jnp.mean(nnx.merge(graphdef, params)(x).astype(jnp.float32) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step, (params, tx.init(params))


def timed(step, carry, x):
    """One step; returns (seconds, new state, loss)."""
    start = time.perf_counter()
    *carry, loss = step(*carry, x)
    jax.block_until_ready((carry, loss))
    return time.perf_counter() - start, tuple(carry), float(loss)


def main() -> None:
    """Prints the configuration, the ratio, the noise."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=40)
    pairs = parser.parse_args().pairs
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    batch = np.random.default_rng(0).normal(size=(BATCH, WIDTH)).astype(np.float32)
    x = jax.device_put(batch, NamedSharding(mesh, P("fsdp")))

    programs = {
        "hand": make_hand_written(mesh),
        "jfsdp": make_jfsdp(mesh),
        "again": make_hand_written(mesh),
    }
    losses: dict[str, float] = {}
    for name, (step, carry) in programs.items():
        for _ in range(3):
            _, carry, losses[name] = timed(step, carry, x)
        programs[name] = (step, carry)
    np.testing.assert_allclose(losses["jfsdp"], losses["hand"], rtol=1e-2)

    times: dict[str, list[float]] = {name: [] for name in programs}
    for index in range(pairs):
        names = list(programs)
        for name in names[index % 3 :] + names[: index % 3]:
            step, carry = programs[name]
            seconds, carry, _ = timed(step, carry, x)
            programs[name] = (step, carry)
            times[name].append(seconds)
    ratio = {
        name: statistics.median(b / a for a, b in zip(times["hand"], times[name], strict=True))
        for name in ("jfsdp", "again")
    }
    print(
        f"jax {jax.__version__}, flax {flax.__version__}, Python {platform.python_version()}, "
        f"8 simulated CPU devices on {os.cpu_count()} cores"
    )
    print(
        f"{DEPTH} blocks of {WIDTH}x{HIDDEN}, batch {BATCH}, bfloat16 compute, float32 reduce, adam, donated"
    )
    print(
        f"hand-written shard_map step: {statistics.median(times['hand']) * 1e3:.1f} ms (median of {pairs})"
    )
    print(f"jfsdp / hand-written:        {ratio['jfsdp']:.3f} (target <= 1.05)")
    print(f"hand-written / itself:       {ratio['again']:.3f}")


if __name__ == "__main__":
    main()
