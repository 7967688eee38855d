"""`report.check()` on whole programs: it finds what departs from the policies, and names it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models import Block, Scanned, Stack
from test_gates import POLICY, Setup, gpt2, train_step

import jfsdp
from jfsdp.inspect import Departure, Report

# --------------------------------------------------------------------------------------------------
# Programs on 8 CPU devices, as they are written

BATCH = np.ones((16, 64), np.float32)
S8 = functools.partial(jax.make_mesh, (8,), ("fsdp",), (jax.sharding.AxisType.Auto,))


def sharded(**settings: Any) -> Stack:
    """6 blocks of Linear(64, 64), each a unit."""
    model = Stack(6, 64, nnx.Rngs(0))
    return jfsdp.shard(model, S8(), units=Block, **{"mp_policy": POLICY, **settings})


@nnx.jit
def gradient(model: nnx.Module, x: Any) -> Any:
    return nnx.grad(lambda model: jnp.sum(model(x).astype(jnp.float32) ** 2))(model)


def one(report: Report, **settings: Any) -> Departure:
    (departure,) = report.departures(**settings)
    return departure


def test_a_sharded_step_is_what_its_policies_state():
    """B23 by the inspector: every gather in bfloat16."""
    jfsdp.inspect(gradient, sharded(), BATCH).check()


def test_gathers_in_another_dtype_are_found_by_their_leaf():
    """B23: float32 gathers where bfloat16 is stated."""
    program = sharded(mp_policy=jfsdp.MixedPrecisionPolicy(reduce_dtype=jnp.float32))
    found = jfsdp.inspect(gradient, program, BATCH, model=sharded()).departures()
    dtypes = [d for d in found if d.rule == "dtype of the all-gather"]
    assert {d.expected for d in dtypes} == {"bfloat16"}
    assert all(
        "float32[64,64]" in d.found and "blocks.0.linear.kernel" in str(dtypes) for d in dtypes
    )
    (total,) = [d for d in found if d.rule.startswith("bytes of the all-gathers")]
    assert "2.0" not in total.leaf and "(1.833x" in total.found  # 11 of 12 gathers, twice as wide


def test_reductions_in_another_dtype_are_found_although_they_are_fewer_bytes():
    policy = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.bfloat16)
    found = jfsdp.inspect(gradient, sharded(mp_policy=policy), BATCH, model=sharded()).departures()
    assert {(d.rule, d.expected) for d in found} == {("dtype of the reduce-scatter", "float32")}


def test_weights_kept_for_the_backward_are_found():
    """B16: 6 gathers where 12 are stated."""
    kept = sharded(reshard_after_forward=False)
    departure = one(jfsdp.inspect(gradient, kept, BATCH, model=sharded()))
    assert "gathered again for the backward" in departure.rule
    assert departure.found == "0 B: the whole weights are kept"


def test_weights_gathered_again_where_they_should_be_kept_are_found():
    report = jfsdp.inspect(gradient, sharded(), BATCH, model=sharded(reshard_after_forward=False))
    departure = one(report)
    assert departure.rule == "bytes of the all-gathers, per device and step"
    assert departure.found == "77.0 KiB (1.833x, 1.833x the elements)"


def test_a_model_that_is_closed_over_is_found():
    """B10: its parameters would be constants of the program."""
    model = nnx.Sequential(*(nnx.Linear(512, 512, rngs=nnx.Rngs(i)) for i in range(2)))
    jfsdp.shard(model, S8(), units=nnx.Linear)
    graph, state = nnx.split(model)
    whole = jax.tree.map(np.asarray, state)
    step = jax.jit(lambda x: nnx.merge(graph, whole)(x))
    with jax.sharding.use_abstract_mesh(S8().abstract_mesh):
        departure = one(jfsdp.inspect(step, np.ones((8, 512), np.float32), model=model))
    assert departure.rule == "arrays are arguments of the step"
    assert departure.found.startswith("2.0 MiB of constants: pass the model as an argument")


def test_a_model_that_is_passed_is_no_constant():
    """B10."""
    model = jfsdp.shard(nnx.Linear(512, 512, rngs=nnx.Rngs(0)), S8())
    assert jfsdp.inspect(gradient, model, np.ones((8, 512), np.float32)).constants < 100


def test_a_stack_gathered_outside_of_its_loop_is_found():
    """B15: all layers at once, in another dtype than stated and once instead of twice."""
    model = Scanned(nnx.Rngs(0))
    jfsdp.shard(model.layers, S8(), stacked_axis=0, mp_policy=POLICY)
    jfsdp.shard(model, S8(), mp_policy=POLICY)
    graph, state = nnx.split(Scanned(nnx.Rngs(0)))
    mesh = S8()

    def gather(leaf: Any) -> Any:
        split = P(*(None,) * (leaf.ndim - 1), "fsdp")
        whole = jax.shard_map(
            lambda x: jax.lax.all_gather(x, "fsdp", axis=leaf.ndim - 1, tiled=True),
            mesh=mesh,
            in_specs=split,
            out_specs=P(),
            check_vma=False,
        )
        return whole(leaf)

    @jax.jit
    def step(state: Any, x: Any) -> Any:
        return nnx.merge(graph, jax.tree.map(gather, state))(x)

    found = jfsdp.inspect(step, state, np.ones((16, 16), np.float32), model=model).departures()
    texts = [str(d) for d in found]
    assert any("layers.up.kernel" in t and "float32[8,16,32]" in t for t in texts), texts


def test_a_model_called_twice_is_allowed_what_it_is_said_to_do():
    @nnx.jit
    def twice(model: Any, x: Any) -> Any:
        return nnx.grad(lambda m: jnp.sum(m(x) ** 2) + jnp.sum(m(2 * x) ** 2))(model)

    report = jfsdp.inspect(twice, sharded(), BATCH)
    assert {d.rule.split(",")[0] for d in report.departures()} == {
        "bytes of the all-gathers",
        "bytes of the reductions",
    }
    report.check(calls=2)


def test_check_raises_with_every_departure_numbered():
    kept = jfsdp.inspect(gradient, sharded(reshard_after_forward=False), BATCH, model=sharded())
    with pytest.raises(jfsdp.PolicyViolation) as error:
        kept.check()
    lines = str(error.value).splitlines()
    assert lines[0].startswith("jax ") and lines[1].endswith("in 1 point:")
    assert lines[2].startswith("  1. the step: weights are dropped after the forward")
    assert error.value.departures == tuple(kept.departures())


def test_a_program_without_policies_cannot_be_checked():
    report = Report(collectives=())
    with pytest.raises(ValueError, match="Pass one, or `model=`"):
        report.check()


def test_memory_of_a_program_that_is_not_compiled_cannot_be_checked():
    with pytest.raises(ValueError, match="compile=True"):
        jfsdp.inspect(gradient, sharded(), BATCH).check(memory="16 GiB")


def test_compiled_for_cpu_dtypes_are_read_before_the_compiler_widens_them():
    report = jfsdp.inspect(gradient, sharded(), BATCH, compile=True)
    assert report.count("all-gather", dtype="bfloat16") == 0
    report.check(memory="1 MiB")


def test_a_step_that_does_not_fit_is_found():
    report = jfsdp.inspect(gradient, sharded(), BATCH, compile=True)
    departure = one(report, memory="10 KiB")
    assert (departure.rule, departure.expected) == ("memory, per device", "at most 10.0 KiB")


def test_the_difference_of_two_reports_names_what_changed():
    before = jfsdp.inspect(gradient, sharded(), BATCH)
    after = jfsdp.inspect(gradient, sharded(reshard_after_forward=False), BATCH)
    (change,) = before.difference(after).changes
    assert change.what == "all-gather over fsdp in bfloat16, backward"
    assert (change.count_before, change.count_after) == (5, 0)
    assert not before.difference(before)


# --------------------------------------------------------------------------------------------------
# The same GPT written as plain jit with sharding constraints, compiled for TPUs and GPUs that are not here


def plain_report(setup: Setup, *, gathers: bool) -> Report:
    """Weights cast to bfloat16 and, if `gathers`, constrained to be whole, as JAX's documents teach.

    Held against the policies of the model that jfsdp shards.
    """
    mesh = setup.mesh()
    model = setup.model(mesh)
    graph, _ = nnx.split(nnx.eval_shape(lambda: gpt2.GPT2(setup.config, rngs=nnx.Rngs(0))))
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), nnx.state(model)
    )
    tx = optax.adamw(1e-3)
    specs = {leaf.shape: leaf.sharding for leaf in jax.tree.leaves(params)}
    replicated = NamedSharding(mesh, P())
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=specs.get(x.shape, replicated)),
        jax.eval_shape(tx.init, params),
    )

    def loss(params: Any, tokens: Any) -> Any:
        def whole(leaf: Any) -> Any:
            leaf = leaf.astype(jnp.bfloat16)
            return jax.lax.with_sharding_constraint(leaf, replicated) if gathers else leaf

        return gpt2.next_token_loss(nnx.merge(graph, jax.tree.map(whole, params)), tokens)

    def step(params: Any, state: Any, tokens: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    shardings = (jfsdp.shardings(params), jfsdp.shardings(state), None)
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings)
    return jfsdp.inspect(jitted, params, state, setup.tokens(mesh), model=model, compile=True)


def found_by(report: Report, rule: str) -> list[Departure]:
    return [departure for departure in report.departures() if departure.rule.startswith(rule)]


@pytest.mark.slow
def test_on_h100_plain_jit_gathers_in_f32_and_reduces_in_bf16():
    report = plain_report(Setup("h100:8", hsdp=False, scan=False), gathers=True)
    gathers = found_by(report, "dtype of the all-gather")
    assert any(
        "attention.qkv.kernel" in d.leaf and "of float32[768,2304]" in d.found for d in gathers
    )
    assert {d.expected for d in gathers} == {"bfloat16"}
    reductions = found_by(report, "dtype of the reduce-scatter")
    assert any("mlp.up.kernel" in d.leaf and "of bfloat16[3072,768]" in d.found for d in reductions)
    with pytest.raises(
        jfsdp.PolicyViolation, match="expected bfloat16, found all-gather of float32"
    ):
        report.check()


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e:2x4", "h100:8"])
def test_on_hsdp_plain_jit_reduces_nearly_twice_the_elements(target):
    report = plain_report(Setup(target, hsdp=True, scan=True), gathers=True)
    (total,) = found_by(report, "bytes of the reductions")
    elements = float(total.found.split(", ")[1].split("x")[0])
    assert 1.7 < elements < 1.9
    assert any("over replica and fsdp" in d.found for d in report.departures())


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e:2x4", "h100:8"])
def test_plain_jit_that_loses_the_batch_in_a_scanned_loop_is_found(target):
    report = plain_report(Setup(target, hsdp=False, scan=True), gathers=False)
    lost = found_by(report, "all-gathers of no parameter") + found_by(report, "all-reduces of no")
    assert any("in a loop" in d.found and "stay split on the batch" in d.expected for d in lost)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
def test_on_h100_auto_partitioning_departs_from_the_policies_and_is_found(scan):
    """jfsdp's own: XLA places the collectives, and reduces in the compute dtype."""
    setup = Setup("h100:8", hsdp=False, scan=scan)
    mesh = setup.mesh()
    policy = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    model = setup.model(mesh, mp_policy=policy, partitioning="auto")
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    report = jfsdp.inspect(train_step, model, optimizer, setup.tokens(mesh), compile=True)
    reductions = found_by(report, "dtype of the reduce-scatter")
    assert any("mlp.up.kernel" in d.leaf and "bfloat16[3072,768]" in d.found for d in reductions)
    assert {d.expected for d in reductions} == {"float32"}
    assert found_by(report, "bytes of the reductions")
