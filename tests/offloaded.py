"""What the tests of the optimizer's step share: optimizers, and parameters in either memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

SHAPES = {
    "embed": (64, 16),
    "up": {"w": (16, 32), "b": (32,)},
    "down": {"w": (32, 16), "b": (16,)},
    "head": (16, 64),
}


def values(seed: int, shapes: Any = SHAPES) -> Any:
    """Arrays in these shapes, without a place."""
    rng = np.random.default_rng(seed)

    def make(shape: tuple[int, ...]) -> np.ndarray:
        return rng.normal(size=shape).astype("float32")

    return jax.tree.map(make, shapes, is_leaf=lambda node: isinstance(node, tuple))


def _labels(params: Any) -> Any:
    return {name: "frozen" if name == "embed" else "trained" for name in params}


def clipped() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=0.1))


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(1e-2),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "clipped": clipped,
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=16),
    "lion": lambda: optax.lion(1e-3),
    "frozen": lambda: optax.multi_transform(
        {"trained": optax.adam(1e-2), "frozen": optax.set_to_zero()}, _labels
    ),
    "masked": lambda: optax.masked(
        optax.adam(1e-2), lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
    ),
    "MultiSteps": lambda: optax.MultiSteps(clipped(), 2),
    "schedule": lambda: optax.adam(optax.cosine_decay_schedule(1e-2, 20)),
    "bf16": lambda: optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(1e-2)),
    "lamb": lambda: optax.lamb(1e-2),
    "flatten": lambda: optax.flatten(optax.adam(1e-2)),
}
"""Optimizers whose step offloaded is that of optax to the bit."""
