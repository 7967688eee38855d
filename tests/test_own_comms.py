"""check() and the minimum beside collectives of the user's own: what they state, and what they do not."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import models
import pytest
from flax import nnx
from helpers import make_mesh, mean_square
from jax.sharding import PartitionSpec as P

import jfsdp
from jfsdp.comm import DefaultAllGather, DefaultReduceScatter

X = jax.ShapeDtypeStruct((8, 512), jnp.float32)


class RingGather(DefaultAllGather):
    """By permutes; states nothing."""

    def __call__(
        self, output_tensor: Any, input_tensor: jax.Array, group: Any, *_: Any
    ) -> jax.Array:
        size = jax.lax.axis_size(group)
        around = [(i, (i + 1) % size) for i in range(size)]
        parts = [input_tensor]
        for _ in range(size - 1):
            parts.append(jax.lax.ppermute(parts[-1], group, around))
        turns = (jax.lax.axis_index(group) - jnp.arange(size)) % size
        return jnp.stack(parts)[jnp.argsort(turns)].reshape(output_tensor.shape)


class GatheringReduce(DefaultReduceScatter):
    """Gathers all gradients and adds them up in the devices' order; states nothing."""

    def __call__(
        self, output_tensor: Any, input_tensor: jax.Array, group: Any, op: str, *_: Any
    ) -> jax.Array:
        size, index = jax.lax.axis_size(group), jax.lax.axis_index(group)
        every = jax.lax.all_gather(input_tensor, group).reshape(size, size, *output_tensor.shape)
        return every[:, index].sum(axis=0)


OWN = {"gather": {"all_gather": RingGather()}, "reduce": {"reduce_scatter": GatheringReduce()}}
either = pytest.mark.parametrize("own", OWN.values(), ids=OWN)


def model_with(own: dict[str, Any], mesh: Any = None) -> nnx.Sequential:
    """Two layers of 2 MiB, the first of them with its own collectives."""
    rngs, mesh = nnx.Rngs(0), mesh or make_mesh(fsdp=8)
    first, second = nnx.Linear(512, 1024, rngs=rngs), nnx.Linear(1024, 512, rngs=rngs)
    jfsdp.shard(first, mesh, **own)
    jfsdp.shard(second, mesh)
    return jfsdp.shard(nnx.Sequential(first, second), mesh)


def rules(step: Any, model: Any) -> set[str]:
    return {departure.rule for departure in jfsdp.inspect(step, model, X).departures()}


@either
def test_what_states_nothing_may_do_anything_with_its_leaves(own: dict[str, Any]):
    assert rules(nnx.value_and_grad(mean_square), model_with(own)) == set()


@either
def test_beside_it_a_collective_of_no_parameter_is_still_found(own: dict[str, Any]):
    mesh = make_mesh(fsdp=8)

    def step(model: Any, x: jax.Array) -> Any:
        activations = jnp.broadcast_to(x, (256, *x.shape))
        whole = jax.shard_map(
            lambda a: jax.lax.all_gather(a, "fsdp", axis=0, tiled=True), mesh=mesh,
            in_specs=P("fsdp"), out_specs=P(), check_vma=False,
        )(activations)  # fmt: skip
        return nnx.value_and_grad(mean_square)(model, x + whole[0])

    assert "all-gathers of no parameter" in rules(step, model_with(own, mesh))


@either
def test_beside_it_the_other_unit_s_bytes_are_still_held_to_the_least(own: dict[str, Any]):
    """A second call of the model, of which `calls` does not know."""

    def step(model: Any, x: jax.Array) -> Any:
        return nnx.value_and_grad(lambda model: mean_square(model, x) + mean_square(model, -x))(
            model
        )

    found = rules(step, model_with(own))
    assert found == {
        f"bytes of the {name}, per device and step" for name in ("all-gathers", "reductions")
    }


def test_beside_it_a_gradient_in_another_dtype_is_still_found():
    report = jfsdp.inspect(nnx.grad(mean_square), model_with(OWN["gather"]), X)
    halved = [
        dataclasses.replace(c, dtype="bfloat16", bytes_per_device=c.bytes_per_device / 2)
        if c.kind == "reduce-scatter"
        else c
        for c in report.collectives
    ]
    found = dataclasses.replace(report, collectives=tuple(halved)).departures()
    assert {d.rule for d in found} == {"dtype of the reduce-scatter"}


# --------------------------------------------------------------------------------------------------
# What is stated


class Bf16Gather(jfsdp.AllGather):
    """Sends bfloat16 whatever it is given, and states `message` of each call."""

    def __init__(self, *message: Any) -> None:
        self.message, self.asked = message, []

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> jax.ShapeDtypeStruct:
        return super().allocate(size, dtype=dtype, device=device)

    def wire(self, size: Any, *, dtype: Any, group: Any) -> Any:
        self.asked.append((size, dtype, group))
        return [jfsdp.Message(*self.message)] if self.message else None

    def __call__(
        self, output_tensor: Any, input_tensor: jax.Array, group: Any, async_op: bool = False
    ) -> jax.Array:
        sent = jax.lax.all_gather(input_tensor.astype(jnp.bfloat16), group, axis=0, tiled=True)
        return sent.astype(output_tensor.dtype)


SENT = 512 * 2048 * 2 * 7 / 8


def inspected(gather: Any, **settings: Any) -> Any:
    model = nnx.Linear(512, 2048, use_bias=False, rngs=nnx.Rngs(0))
    jfsdp.shard(model, make_mesh(fsdp=8), all_gather=gather, **settings)
    return jfsdp.inspect(nnx.value_and_grad(mean_square), model, X)


def test_wire_is_asked_with_shape_and_dtype_of_the_result_and_the_sizes_of_the_axes():
    gather = Bf16Gather()
    inspected(gather)
    assert set(map(str, gather.asked)) == {"((2048, 512), dtype('float32'), {'fsdp': 8})"}


@pytest.mark.parametrize("reshard", [True, False])
def test_what_is_stated_is_the_minimum_of_all_gathers_of_a_step(reshard: bool):
    gather = Bf16Gather("all-gather", jnp.bfloat16, ("fsdp",), SENT)
    report = inspected(gather, reshard_after_forward=reshard)
    (total,) = (total for total in report.totals if total.kind == "all-gather")
    assert total.minimum == SENT * (1 + reshard)
    report.check()


MESSAGES = {
    "dtype": ("all-gather", "float32", ("fsdp",), SENT),
    "bytes": ("all-gather", "bfloat16", ("fsdp",), SENT / 2),
    "axes": ("all-gather", "bfloat16", ("other",), SENT),
    "kind": ("collective-permute", "bfloat16", ("fsdp",), SENT),
}


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_what_departs_from_the_stated_is_found(message: Any):
    departures = inspected(Bf16Gather(*message), reshard_after_forward=False).departures()
    assert departures[0].leaf == "kernel"
    assert departures[0].rule == "what its own collective sends to gather"
    kind, dtype, axes, _ = message
    assert departures[0].expected.startswith(f"{kind} of {dtype} over {axes[0]} (")


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="no kind of collective 'all_gather'"):
        inspected(Bf16Gather("all_gather", "bfloat16", ("fsdp",), SENT))


def test_inspect_calls_no_collective_to_ask_what_it_sends():
    """But for the tracing of the program itself."""
    calls: list[Any] = []

    class Counting(Bf16Gather):
        def __call__(self, *args: Any) -> jax.Array:
            calls.append(args)
            return super().__call__(*args)

    inspected(Counting("all-gather", "bfloat16", ("fsdp",), SENT), reshard_after_forward=False)
    assert len(calls) == 1


def test_a_stack_of_layers_states_what_all_its_layers_send():
    model, mesh = models.Scanned(nnx.Rngs(0)), make_mesh(fsdp=8)
    settings = {"all_gather": jfsdp.QuantizedAllGather(), "reshard_after_forward": False}
    jfsdp.shard(model.layers, mesh, stacked_axis=0, **settings)
    jfsdp.shard(model, mesh, **settings)
    report = jfsdp.inspect(nnx.value_and_grad(mean_square), model, jnp.ones((16, 16)))
    (total,) = (total for total in report.totals if total.kind == "all-gather")
    assert total.ratio == 1.0
