"""Every public optimizer, transformation and wrapper of optax, ready to run on parameters w and b."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

LR = 0.01
WEIGHT_ONLY = {"w": True, "b": False}
BIAS_ONLY = {"w": False, "b": True}


def adam() -> optax.GradientTransformation:
    return optax.adam(LR)


def sum_of_squares(params: Any, *_: Any) -> jax.Array:
    return sum((jnp.sum(x**2) for x in jax.tree.leaves(params)), jnp.zeros(()))


def two() -> dict[str, optax.GradientTransformation]:
    return {"train": adam(), "freeze": optax.set_to_zero()}


LABELS = {"w": "train", "b": "freeze"}


def _key() -> jax.Array:
    return jax.random.key(0)


def _matrices(tree: Any) -> Any:
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), tree)


# What takes other arguments than a learning rate. The rest is called with LR, or with nothing.
MADE: dict[str, Callable[[], Any]] = {
    "MultiSteps": lambda: optax.MultiSteps(adam(), every_k_schedule=2),
    "adafactor": lambda: optax.adafactor(LR, min_dim_size_to_factor=4),
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
    "add_noise": lambda: optax.add_noise(0.1, 0.5, _key()),
    "apply_if_finite": lambda: optax.apply_if_finite(adam(), 2),
    "chain": lambda: optax.chain(optax.clip(0.1), adam()),
    "clip": lambda: optax.clip(0.1),
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(0.1),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(0.1),
    "conditionally_mask": lambda: optax.conditionally_mask(adam(), lambda step: step < 2),
    "conditionally_transform": lambda: optax.conditionally_transform(adam(), lambda step: step < 2),
    "ema": lambda: optax.ema(0.9),
    "flatten": lambda: optax.flatten(adam()),
    "freeze": lambda: optax.freeze(BIAS_ONLY),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=LR),
    "lookahead": lambda: optax.lookahead(adam(), 2, 0.5),
    "masked": lambda: optax.masked(adam(), WEIGHT_ONLY),
    "measure_with_ema": lambda: optax.monitor(
        {"norm": optax.measure_with_ema(optax.tree.norm, 0.9)}
    ),
    "monitor": lambda: optax.monitor({"norm": optax.tree.norm}),
    "multi_transform": lambda: optax.multi_transform(two(), LABELS),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(0.1)), ("adam", adam())),
    "noisy_sgd": lambda: optax.noisy_sgd(LR, key=_key()),
    "partition": lambda: optax.partition(two(), LABELS),
    "scale": lambda: optax.scale(0.1),
    "scale_by_backtracking_linesearch": lambda: optax.scale_by_backtracking_linesearch(4),
    "scale_by_factored_rms": lambda: optax.scale_by_factored_rms(min_dim_size_to_factor=4),
    "scale_by_schedule": lambda: optax.scale_by_schedule(optax.linear_schedule(1.0, 0.1, 4)),
    "scale_by_zoom_linesearch": lambda: optax.scale_by_zoom_linesearch(4),
    "selective_transform": lambda: optax.selective_transform(adam(), freeze_mask=BIAS_ONLY),
    "sgd": lambda: optax.sgd(LR, momentum=0.9),
    "snapshot": lambda: optax.snapshot("norm", optax.tree.norm),
    "stateless": lambda: optax.stateless(lambda updates, params: updates),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda g, p: g),
    "trace": lambda: optax.trace(0.9),
    "with_extra_args_support": lambda: optax.with_extra_args_support(adam()),
    "contrib.differentially_private_aggregate": lambda: (
        optax.contrib.differentially_private_aggregate(1.0, 0.1, key=_key())
    ),
    "contrib.galore": lambda: optax.contrib.galore(LR, rank=4),
    "contrib.mechanize": lambda: optax.contrib.mechanize(adam()),
    "contrib.sam": lambda: optax.contrib.sam(optax.sgd(LR), optax.sgd(LR)),
    "contrib.scale_by_galore": lambda: optax.contrib.scale_by_galore(rank=4),
    "contrib.scale_by_muon": lambda: optax.masked(
        optax.contrib.scale_by_muon(weight_dimension_numbers=_matrices), WEIGHT_ONLY
    ),
    "contrib.schedule_free": lambda: optax.contrib.schedule_free(adam(), LR),
    "contrib.split_real_and_imaginary": lambda: optax.contrib.split_real_and_imaginary(adam()),
}

# What `update` needs beside gradients, state and parameters.
SEARCH = ("value", "grad", "value_fn")
EXTRA: dict[str, tuple[str, ...]] = {
    "lbfgs": SEARCH,
    "scale_by_backtracking_linesearch": SEARCH,
    "scale_by_zoom_linesearch": SEARCH,
    "polyak_sgd": ("value",),
    "scale_by_polyak": ("value",),
    "contrib.momo": ("value",),
    "contrib.momo_adam": ("value",),
    "contrib.reduce_on_plateau": ("value",),
    "contrib.hutchinson_estimator_diag_hessian": ("obj_fn",),
    "contrib.sophia": ("obj_fn",),
}

WEAKLY_TYPED = ("lbfgs", "scale_by_backtracking_linesearch", "scale_by_zoom_linesearch")
"""Their state is weakly typed until the first update, so that every step of theirs compiles twice."""

GROWING = ("measure_with_ema", "monitor")
"""Their state gets its measurements in the first update: no out_shardings can name them before."""

NO_OPTIMIZER = "no transformation, and its return is not annotated"
EXCLUDED: dict[str, str] = {
    "inject_stateful_hyperparams": "deprecated: warns; inject_hyperparams is the same",
    "optimistic_adam": "deprecated: warns; optimistic_adam_v2 is the same",
    "contrib.dpsgd": "always warns of its seed; differentially_private_aggregate holds its state",
    "matrix_inverse_pth_root": NO_OPTIMIZER,
    "sigmoid_binary_cross_entropy": NO_OPTIMIZER,
    "update_infinity_moment": NO_OPTIMIZER,
    "update_moment": NO_OPTIMIZER,
    "update_moment_per_elem_norm": NO_OPTIMIZER,
    "contrib.schedule_free_eval_params": NO_OPTIMIZER,
}


def _public(module: types.ModuleType, prefix: str) -> dict[str, Callable[..., Any]]:
    """The functions that return a transformation, or do not say what they return."""
    found = {}
    for name, function in vars(module).items():
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        returns = inspect.signature(function).return_annotation
        if returns is inspect.Signature.empty or "GradientTransformation" in str(returns):
            found[prefix + name] = function
    return found


FUNCTIONS = {**_public(optax, ""), **_public(optax.contrib, "contrib.")}
NAMES = ["MultiSteps", *sorted(set(FUNCTIONS) - set(EXCLUDED))]


def make(name: str) -> optax.GradientTransformationExtraArgs:
    """The transformation of that name, with arguments that make sense for w (16,8) and b (8,)."""
    if name in MADE:
        tx = MADE[name]()
    else:
        parameters = inspect.signature(FUNCTIONS[name]).parameters
        tx = FUNCTIONS[name](LR) if "learning_rate" in parameters else FUNCTIONS[name]()
    return optax.with_extra_args_support(tx)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Parameters and gradients for one optimizer, and its update."""

    name: str

    def tree(self, w: Any, b: Any) -> Any:
        """w and b in the form in which the optimizer takes its parameters."""
        params = {"w": w, "b": b}
        return optax.LookaheadParams(params, params) if self.name == "lookahead" else params

    def unique_step(self, params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        if self.name == "contrib.differentially_private_aggregate":
            grads = jax.tree.map(lambda g: jnp.stack([g, 2 * g]), grads)
        given = {
            "value": jnp.ones(()),
            "grad": grads,
            "value_fn": sum_of_squares,
            "obj_fn": sum_of_squares,
        }
        extra = {key: given[key] for key in EXTRA.get(self.name, ())}
        updates, state = make(self.name).update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state
