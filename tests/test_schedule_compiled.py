"""The schedule of a step, compiled for GPUs and TPUs that are not here: bounded liveness, and overlap."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jfsdp
import jfsdp.testing
from jfsdp.inspect import Report

pytestmark = pytest.mark.slow
POLICY = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)
WIDTH, HIDDEN, HEAD, ROWS, TOKENS, DEVICES = 512, 2048, 256, 64, 128, 8


class Block(nnx.Module):
    """2.1 million parameters."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(x)))


class Stack(nnx.Module):
    """Blocks one by one, and a head."""

    def __init__(self, depth: int, remat: bool):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(rngs) for _ in range(depth)])
        self.head = nnx.Linear(WIDTH, HEAD, rngs=rngs)
        self.remat = remat

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x) if self.remat else block(x)
        return self.head(x)


class Scanned(nnx.Module):
    """Blocks under remat, stacked, and a head."""

    def __init__(self, depth: int):
        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(rngs)

        self.blocks = stack(nnx.Rngs(0))
        self.head = nnx.Linear(WIDTH, HEAD, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def run(block: Block, x: jax.Array) -> jax.Array:
            return block(x)

        return self.head(run(self.blocks, x))


class LinenBlock(nn.Module):
    """2.1 million parameters."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(WIDTH, name="down")(nn.gelu(nn.Dense(HIDDEN, name="up")(x)))


class LinenLayer(nn.Module):
    """What nn.scan runs over."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return nn.remat(LinenBlock)(name="block")(x), None


class LinenStack(nn.Module):
    """Blocks under nn.remat, one by one or stacked by nn.scan, and a head."""

    depth: int
    scan: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.scan:
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            x, _ = nn.scan(LinenLayer, length=self.depth, **axes)(name="layers")(x, None)  # pyright: ignore
        else:
            for _ in range(self.depth):
                x = nn.remat(LinenBlock)()(x)
        return nn.Dense(HEAD, name="head")(x)


def mesh_of(target: str, sizes: tuple[int, int]) -> jax.sharding.Mesh:
    devices = jfsdp.testing.topology_or_skip(target)
    return jax.make_mesh(sizes, ("replica", "fsdp"), (AxisType.Auto,) * 2, devices=devices)


@functools.cache
def report_of(
    kind: str,
    depth: int,
    *,
    prefetch: int = 1,
    sizes: tuple[int, int] = (1, 8),
    target: str = "h100:8",
) -> Report:
    """A compiled training step of that many blocks."""
    mesh = mesh_of(target, sizes)
    spec = NamedSharding(mesh, P(("replica", "fsdp")))
    batch = jax.ShapeDtypeStruct((ROWS, TOKENS, WIDTH), jnp.bfloat16, sharding=spec)
    build = linen_step if kind.startswith("linen") else nnx_step
    step, *state = build(kind, depth, mesh, prefetch)
    return jfsdp.inspect(step, *state, batch, compile=True)


def mean_square(y: jax.Array) -> jax.Array:
    return jnp.mean(y.astype(jnp.float32) ** 2)


def nnx_step(kind: str, depth: int, mesh: Any, prefetch: int) -> Sequence[Any]:
    def create() -> nnx.Module:
        settings = {"mp_policy": POLICY, "prefetch": prefetch}
        if kind == "scan":
            model = Scanned(depth)
            jfsdp.shard(model.blocks, mesh, stacked_axis=0, **settings)
            return jfsdp.shard(model, mesh, **settings)
        return jfsdp.shard(Stack(depth, kind == "remat"), mesh, units=Block, **settings)

    model = jfsdp.init(create)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit(donate_argnums=(0, 1))
    def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda model, x: mean_square(model(x)))(model, x)
        optimizer.update(model, grads)
        return loss

    return step, model, optimizer


def linen_step(kind: str, depth: int, mesh: Any, prefetch: int) -> Sequence[Any]:
    model = LinenStack(depth, scan=kind == "linen-scan")
    model = jfsdp.shard(model, mesh, units=LinenBlock, mp_policy=POLICY, prefetch=prefetch)

    def create() -> TrainState:
        params = model.init(jax.random.key(0), jnp.ones((1, TOKENS, WIDTH)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            return mean_square(state.apply_fn({"params": params}, x))

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    return step, jfsdp.init(create)


# --------------------------------------------------------------------------------------------------
# Sizes, in bytes

UNIT = 2 * WIDTH * HIDDEN + HIDDEN + WIDTH
WHOLE = 2 * UNIT
"""A block's weights, or its gradients, whole in bfloat16."""
ROOT = 2 * (WIDTH * HEAD + HEAD)
SAVED = 2 * ROWS * TOKENS * WIDTH // DEVICES
"""The input of a block."""

S8, R2S4 = (1, 8), (2, 4)
UNROLLED = ["remat", "plain", "linen"]
SCANS = ["scan", "linen-scan"]
HSDP = pytest.mark.parametrize("sizes", [S8, R2S4], ids=["S8", "R2xS4"])


def all_but_one(depth: int) -> float:
    """The share of all weights that those of the outermost unit and of one block are not, to 0.5 %."""
    return (depth - 1) * WHOLE / (depth * WHOLE + ROOT) - 0.005


def share(report: Report, kind: str, phase: str | None = None) -> float:
    """Of a kind's bytes, those that travel beside a matrix multiplication."""
    found = report.overlap(kind, phase)
    assert found is not None
    return found


def unit_of(leaf: str) -> str:
    """ "blocks.3" of "blocks.3.up.kernel"; "" of what is the outermost unit's."""
    return leaf.rpartition(".")[0].rpartition(".")[0]


def instructions(report: Report, kind: str, phase: str) -> list[list[Any]]:
    """The records of each instruction that carries weights of blocks."""
    found: dict[str, list[Any]] = {}
    for record in report.collectives:
        if (record.kind, record.phase) == (kind, phase):
            found.setdefault(record.instruction, []).append(record)
    return [records for records in found.values() if any(unit_of(r.leaf) for r in records)]


# --------------------------------------------------------------------------------------------------
# One collective per unit and direction


@HSDP
@pytest.mark.parametrize("kind", [*UNROLLED, *SCANS])
@pytest.mark.parametrize(
    "what",
    [("all-gather", "forward"), ("all-gather", "backward"), ("reduce-scatter", "backward")],
    ids="-".join,
)
def test_a_gpu_has_one_combined_collective_per_unit(kind, sizes, what):
    """Neither one for each leaf, nor one for the leaves of two units."""
    found = instructions(report_of(kind, 4, sizes=sizes), *what)
    for records in found:
        leaves = [record.leaf for record in records if unit_of(record.leaf)]
        assert len({unit_of(leaf) for leaf in leaves}) == 1
        assert len(set(leaves)) == len(leaves)
    assert sum(records[0].executions for records in found) == 4


@pytest.mark.parametrize("kind", [*UNROLLED, *SCANS])
def test_a_gpu_sums_one_unit_over_the_replicas_at_a_time(kind):
    """The compiler packs a unit's leaves into one array without a name."""
    report = report_of(kind, 4, sizes=R2S4)
    sums = [r for r in report.collectives if r.axes == ("replica",) and r.bytes_per_device > 2**20]
    shard = UNIT // 4 * 4
    assert sum(record.executions for record in sums) == 4
    assert max(record.bytes_per_device for record in sums) <= 1.01 * (shard + ROOT // 2)


# --------------------------------------------------------------------------------------------------
# Memory


def growth(kind: str, sizes: tuple[int, int]) -> tuple[float, float]:
    """What 4 blocks more take of temporaries, and 5 % of all of them."""
    few, many = (report_of(kind, depth, sizes=sizes).memory for depth in (4, 8))
    assert few is not None and many is not None
    return many.temporaries - few.temporaries, 0.05 * many.temporaries


@HSDP
@pytest.mark.parametrize("kind", ["remat", "linen"])
def test_memory_grows_by_what_blocks_save(kind, sizes):
    """Or by the gradients' shards, which take the place of it in the backward pass; by no weights."""
    more, tolerance = growth(kind, sizes)
    shard = 4 * UNIT // sizes[1]
    assert more == pytest.approx(4 * max(SAVED, shard), abs=tolerance)


def test_memory_without_remat_grows_by_activations():
    """The input of a block and three arrays as wide as its hidden layer."""
    more, tolerance = growth("plain", S8)
    assert more == pytest.approx(4 * SAVED * (1 + 3 * HIDDEN // WIDTH), abs=tolerance)


@HSDP
@pytest.mark.parametrize("kind", SCANS)
def test_memory_of_a_scan_grows_by_what_layers_save_and_by_their_gradients_shards(kind, sizes):
    """Both are stacked, so that neither takes the other's place."""
    more, tolerance = growth(kind, sizes)
    assert more == pytest.approx(4 * (SAVED + 4 * UNIT // sizes[1]), abs=tolerance)


@pytest.mark.parametrize(("kind", "units"), [("remat", 5), ("linen", 5), ("scan", 5)])
def test_looking_ahead_takes_a_unit_of_weights_and_of_gradients(kind, units):
    """Gradients in float32, as they are reduced; a loop has those that it carries twice."""
    ahead, alone = (report_of(kind, 8, prefetch=n).memory for n in (1, 0))
    assert ahead is not None and alone is not None
    assert 0 < ahead.temporaries - alone.temporaries <= units * WHOLE


# --------------------------------------------------------------------------------------------------
# Overlap


@HSDP
@pytest.mark.parametrize("kind", [*UNROLLED, *SCANS])
def test_all_gathers_of_the_forward_but_the_first_overlap(kind, sizes):
    assert share(report_of(kind, 4, sizes=sizes), "all-gather", "forward") >= all_but_one(4)


@pytest.mark.parametrize("kind", [*UNROLLED, *SCANS])
def test_all_gathers_of_the_backward_overlap(kind):
    """The first of them beside the head."""
    assert share(report_of(kind, 4), "all-gather", "backward") == 1.0


@pytest.mark.parametrize("kind", [*UNROLLED, *SCANS])
def test_all_reductions_but_the_last_overlap(kind):
    assert share(report_of(kind, 4), "reduce-scatter", "backward") >= all_but_one(4)


@pytest.mark.parametrize("kind", ["remat", "linen"])
@pytest.mark.parametrize("collective", ["reduce-scatter", "all-reduce"])
def test_reductions_over_both_axes_overlap_but_for_the_last_two(kind, collective):
    """Each waits for its scatter and its sum, so that one more is left when the last block is through."""
    found = share(report_of(kind, 4, sizes=R2S4), collective, "backward")
    assert found >= 2 * WHOLE / (4 * WHOLE + ROOT) - 0.005


@pytest.mark.parametrize("kind", ["remat", "linen", "scan"])
def test_no_block_overlaps_without_prefetch(kind):
    report = report_of(kind, 8, prefetch=0)
    report.check()
    for what in ("all-gather", "reduce-scatter"):
        assert share(report, what) <= ROOT / (8 * WHOLE + ROOT) + 0.001


# --------------------------------------------------------------------------------------------------
# Bytes


@HSDP
@pytest.mark.parametrize("kind", [*UNROLLED, *SCANS])
def test_a_gpu_receives_the_least_bytes(kind, sizes):
    report_of(kind, 4, sizes=sizes).check()


def test_a_tpu_receives_the_least_bytes_and_gathers_beside_matmuls():
    report = report_of("remat", 4, target="v5e:2x4")
    report.check()
    assert share(report, "all-gather") >= 0.5
