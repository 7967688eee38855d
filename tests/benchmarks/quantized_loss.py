"""What gathering and reducing in 8 bits costs a language model in loss: the same seed and data, step by step.

    python tests/benchmarks/quantized_loss.py [--steps 300] [--width 128] [--only "int8 gather"]

Trains the byte-level GPT of examples/ on the sources of Python's standard library, on 8 simulated CPU
devices, once with XLA's collectives in bfloat16 and float32 and once for each way of quantizing. Printed is
how far each loss curve is from the first one, beside how far a float32 gather is from it, which is the scale
to read the others on. Needs `pip install -e '.[examples]'`.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import platform
import sys
import time
from itertools import islice
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import text
from flax import nnx
from gpt import GPT, Block, GPTConfig
from jax.sharding import AxisType

import jfsdp

CONTEXT, LAYERS, HEADS, BATCH, WINDOW, SEED = 128, 4, 4, 8, 20, 0
TARGET = 0.02  # nats per byte, of the moving mean

int8 = jfsdp.QuantizedAllGather("int8", block=256)
RUNS: dict[str, dict[str, Any]] = {
    "bfloat16 gather, float32 reduce": {},
    "float32 gather, float32 reduce": {"param_dtype": jnp.float32},
    "int8 gather": {"all_gather": int8},
    "float8 gather": {"all_gather": jfsdp.QuantizedAllGather("float8_e4m3fn", block=256)},
    "int8 gather, int8 reduce": {
        "all_gather": int8,
        "reduce_scatter": jfsdp.QuantizedReduceScatter("int8", block=256),
    },
    "int8 gather, stochastic int8 reduce": {
        "all_gather": int8,
        "reduce_scatter": jfsdp.QuantizedReduceScatter("int8", block=256, stochastic=True),
    },
}


def loss_fn(model: GPT, windows: jax.Array) -> jax.Array:
    """Nats per byte."""
    logits = model(windows[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


@nnx.jit(donate_argnums=(0, 1))
def train_step(model: GPT, optimizer: nnx.Optimizer, windows: jax.Array) -> jax.Array:
    """One step of AdamW; the loss."""
    loss, grads = nnx.value_and_grad(loss_fn)(model, windows)
    optimizer.update(model, grads)
    return loss


def build(width: int, steps: int, param_dtype: Any = jnp.bfloat16, **comms: Any) -> tuple[Any, Any]:
    """The sharded model and its optimizer, those of configs/tiny.toml but for width and dropout."""
    mesh = jax.make_mesh((2, 4), ("replica", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    config = GPTConfig(width, LAYERS, HEADS, CONTEXT)
    policy = jfsdp.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=jnp.float32)
    model = jfsdp.init(
        lambda: GPT(config, rngs=nnx.Rngs(SEED)), mesh, units=Block, mp_policy=policy, **comms
    )
    rate = optax.warmup_cosine_decay_schedule(0.0, 2e-3, steps // 20, steps)
    adamw = optax.adamw(rate, b2=0.98, weight_decay=0.1)
    return model, nnx.Optimizer(
        model, optax.chain(optax.clip_by_global_norm(1.0), adamw), wrt=nnx.Param
    )


def train(
    width: int, steps: int, data: text.Text, **settings: Any
) -> tuple[np.ndarray, float, Any]:
    """The loss of every step, the mean loss on held-out text, and the report of a step."""
    model, optimizer = build(width, steps, **settings)
    batches = text.batches(data.train, CONTEXT, BATCH, SEED)
    held_out = list(islice(text.batches(data.validation, CONTEXT, BATCH, SEED), 16))
    report = jfsdp.inspect(train_step, model, optimizer, held_out[0])
    report.check()
    losses = [float(train_step(model, optimizer, next(batches))) for _ in range(steps)]
    validate = nnx.jit(loss_fn)
    return np.array(losses), float(np.mean([validate(model, x) for x in held_out])), report


def moving_mean(losses: np.ndarray) -> np.ndarray:
    """The mean of each WINDOW steps in a row."""
    return np.convolve(losses, np.ones(WINDOW) / WINDOW, mode="valid")


def main() -> int:
    """Prints the configuration, a line for each run, and whether all are within the target."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--only", help="this run alone, beside the first")
    options = parser.parse_args()
    data = text.load(text.DataConfig())
    versions = f"jax {jax.__version__}, flax {flax.__version__}, optax {optax.__version__}"
    print(
        f"{versions}, Python {platform.python_version()}, 8 simulated CPU devices, replica=2 fsdp=4"
    )
    print(
        f"GPT, {LAYERS} blocks of width {options.width}, {HEADS} heads, context {CONTEXT} bytes, batch "
        f"{BATCH}, {options.steps} steps of AdamW (2e-3, cosine), seed {SEED}, "
        f"{data.train.size / 1e6:.1f} MB of sources"
    )
    print(f"distance: of the mean of {WINDOW} steps, nats per byte; target <= {TARGET}")
    head = ("", "last 20", "held out", "distance at the end", "greatest", "MiB a step", "s")
    print("{:<36}{:>8}{:>10}{:>21}{:>10}{:>12}{:>7}".format(*head))
    base, worst = np.zeros(0), 0.0
    for name, settings in RUNS.items():
        if options.only and base.size and name != options.only:
            continue
        start = time.perf_counter()
        losses, held_out, report = train(options.width, options.steps, data, **settings)
        means = moving_mean(losses)
        base = base if base.size else means
        distance = means - base
        worst = max(worst, abs(distance[-1]))
        print(
            f"{name:<36}{means[-1]:8.4f}{held_out:10.4f}{distance[-1]:+21.4f}{np.abs(distance).max():10.4f}"
            f"{report.total_bytes / 2**20:12.2f}{time.perf_counter() - start:7.0f}",
            flush=True,
        )
    print(f"within the target at the end: {'yes' if worst <= TARGET else 'no'}")
    return int(worst > TARGET)


if __name__ == "__main__":
    sys.exit(main())
