"""The collectives in the program as written are exactly the stated ones: kinds, axes, dtypes, counts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from models import Block, Scanned, Stack

import jfsdp

POLICY = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)
BATCH = np.ones((16, 64), np.float32)


def mesh_of(hsdp: bool, axis_type: AxisType = AxisType.Auto):
    """S8, or R2xS4."""
    shape, names = ((2, 4), ("replica", "fsdp")) if hsdp else ((8,), ("fsdp",))
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(shape))


def sharded(hsdp=False, remat=False, axis_type=AxisType.Auto, **settings):
    """6 blocks of Linear(64, 64), each a unit."""
    settings = {"mp_policy": POLICY, "units": Block, **settings}
    model = Stack(6, 64, nnx.Rngs(0), remat)
    return jfsdp.shard(model, mesh_of(hsdp, axis_type), **settings)


def gradient_step(*argnums: int):
    """Gradient of the parameters, with (0, 1) of the input too."""

    @nnx.jit
    def step(model, batch):
        def loss(model, batch):
            return jnp.mean(model(batch).astype(jnp.float32) ** 2)

        return nnx.value_and_grad(loss, argnums=argnums)(model, batch)

    return step


def report(model, *argnums: int) -> jfsdp.inspect:
    """What the gradient step communicates."""
    return jfsdp.inspect(gradient_step(*argnums), model, BATCH)


def dots(step, *args) -> int:
    """Matrix products in the program as written, those of a function once for each call."""

    def count(block_owner, functions) -> int:
        total = 0
        for region in block_owner.regions:
            for op in (op for block in region.blocks for op in block.operations):
                name = op.operation.name
                total += name == "stablehlo.dot_general"
                if name == "func.call":
                    total += count(functions[str(op.operation.attributes["callee"])[1:]], functions)
                total += count(op.operation, functions)
        return total

    lowered = step.lower(*args)
    module = getattr(lowered, "lowered", lowered).compiler_ir("stablehlo")
    functions = {str(f.attributes["sym_name"]).strip('"'): f for f in module.body.operations}
    return count(functions["main"], functions)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("remat", [False, True], ids=["plain", "users_remat"])
@pytest.mark.parametrize("hsdp", [False, True], ids=["S8", "R2xS4"])
def test_resharded_weights_are_gathered_twice(hsdp, remat, axis_type):
    found = report(sharded(hsdp, remat, axis_type), 0, 1)
    assert found.count("all-gather") == found.count("all-gather", "fsdp", "bfloat16") == 12


@pytest.mark.parametrize("reshard", [None, True])
def test_first_units_second_gather_is_gone_when_nothing_needs_it(reshard):
    found = report(sharded(reshard_after_forward=reshard), 0)
    assert found.count("all-gather") == 11


@pytest.mark.parametrize("hsdp", [False, True], ids=["S8", "R2xS4"])
def test_kept_weights_are_gathered_once(hsdp):
    found = report(sharded(hsdp, reshard_after_forward=False), 0, 1)
    assert found.count("all-gather") == found.count("all-gather", "fsdp", "bfloat16") == 6


@pytest.mark.parametrize("reshard", [True, False])
def test_gradients_are_reduce_scattered_once_in_reduce_dtype(reshard):
    found = report(sharded(reshard_after_forward=reshard), 0, 1)
    assert found.count("reduce-scatter") == found.count("reduce-scatter", "fsdp", "float32") == 6
    assert found.count("all-reduce") == 0


def test_hsdp_all_reduces_the_scattered_gradient_over_the_replicas_alone():
    found = report(sharded(hsdp=True), 0, 1)
    assert found.count("reduce-scatter", "fsdp", "float32") == 6
    assert found.count("all-reduce") == found.count("all-reduce", "replica", "float32") == 6
    shapes = {c.shape for c in found.collectives if c.kind == "all-reduce"}
    assert shapes == {(16, 64)}


def test_replicate_only_gathers_nothing_and_all_reduces_every_gradient():
    dims = jfsdp.DataParallelMeshDims(replicate="fsdp")
    found = report(sharded(dp_mesh_dims=dims), 0, 1)
    assert found.count("all-reduce") == found.count("all-reduce", "fsdp", "float32") == 6
    assert len(found.collectives) == 6


def test_one_device_casts_and_communicates_nothing():
    mesh = jax.make_mesh((1,), ("fsdp",), devices=jax.devices()[:1])
    model = jfsdp.shard(Stack(2, 64, nnx.Rngs(0)), mesh, units=Block, mp_policy=POLICY)
    assert not jfsdp.inspect(gradient_step(0), model, BATCH).collectives
    assert model(BATCH).dtype == jnp.bfloat16


def test_several_shard_axes_are_one_collective():
    mesh = jax.make_mesh((2, 4), ("outer", "inner"), axis_types=(AxisType.Auto,) * 2)
    dims = jfsdp.DataParallelMeshDims(shard=("outer", "inner"))
    model = jfsdp.shard(Stack(6, 64, nnx.Rngs(0)), mesh, dp_mesh_dims=dims, units=Block)
    found = report(model, 0, 1)
    assert found.count("all-gather", ("outer", "inner")) == found.count("all-gather") == 12
    assert found.count("reduce-scatter", ("outer", "inner")) == 6


def test_resharding_recomputes_no_activation():
    again, kept = (sharded(reshard_after_forward=reshard) for reshard in (True, False))
    count = dots(gradient_step(0, 1), again, BATCH)
    assert count == dots(gradient_step(0, 1), kept, BATCH) == 18  # 6 forward, 6 and 6 backward


def test_the_users_remat_still_recomputes():
    model = sharded(remat=True)
    assert dots(gradient_step(0, 1), model, BATCH) == 24


class RematInside(nnx.Module):
    """A unit whose forward holds the user's remat."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(64, 64, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(64, 64, use_bias=False, rngs=rngs)

    def __call__(self, x):
        def hidden(up, x):
            return jnp.sin(up(jnp.sin(up(x))))

        return self.down(nnx.remat(hidden)(self.up, x))


@pytest.mark.parametrize("reshard", [True, False])
def test_a_remat_inside_a_unit_is_not_overruled(reshard):
    model = RematInside(nnx.Rngs(0))
    jfsdp.shard(model, mesh_of(False), mp_policy=POLICY, reshard_after_forward=reshard)
    plain = dots(gradient_step(0, 1), RematInside(nnx.Rngs(0)), BATCH)
    assert dots(gradient_step(0, 1), model, BATCH) == plain == 11


def test_the_root_can_be_resharded_without_overruling_remat_round_its_blocks():
    model = sharded(remat=True, reshard_after_forward=True)
    assert report(model, 0, 1).count("all-gather") == 12
    assert dots(gradient_step(0, 1), model, BATCH) == 24


def test_frozen_units_are_not_reduced():
    @nnx.jit
    def step(model, batch):
        def loss(model):
            return jnp.mean(model(batch).astype(jnp.float32) ** 2)

        last = nnx.DiffState(0, lambda path, _: "blocks" in path and 5 in path)
        return nnx.grad(loss, argnums=last)(model)

    assert jfsdp.inspect(step, sharded(), BATCH).count("reduce-scatter") == 1


def test_a_forward_alone_gathers_once_and_reduces_nothing():
    found = jfsdp.inspect(nnx.jit(lambda model, x: model(x)), sharded(), BATCH)
    assert found.count("all-gather") == len(found.collectives) == 6


def test_scanned_layers_are_gathered_inside_the_loop():
    model = Scanned(nnx.Rngs(0))
    mesh = mesh_of(False)
    jfsdp.shard(model.layers, mesh, stacked_axis=0, mp_policy=POLICY)
    jfsdp.shard(model, mesh, mp_policy=POLICY)
    found = jfsdp.inspect(gradient_step(0), model, np.ones((16, 16), np.float32))
    inside = [c for c in found.collectives if c.kind == "all-gather" and c.in_loop]
    # In each of 8 layers: 4 leaves forward, the 2 kernels backward, where biases are not needed. The loops
    # gather the next layer's: the first one's weights, and the last two's again, are gathered outside.
    assert sum(c.executions for c in inside) == 7 * 4 + 6 * 2
    gathered = [c for c in found.collectives if c.kind == "all-gather" and "layers" in str(c)]
    assert sum(c.executions for c in gathered) == 8 * (4 + 2)
    assert all(c.result_shape[0] != 8 or len(c.result_shape) < 3 for c in inside)
    assert found.count("reduce-scatter") == 4 * 8 + 2


def test_custom_collectives_serve_every_sharded_leaf():
    calls = []

    class Gather(jfsdp.AllGather):
        def allocate(self, size, *, dtype, device):
            return super().allocate(size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, async_op=False):
            calls.append((output_tensor.shape, input_tensor.shape, group))
            halves = jnp.split(input_tensor, 2, axis=-1)
            gathered = [jax.lax.all_gather(x, group, axis=0, tiled=True) for x in halves]
            return jnp.concatenate(gathered, axis=-1)

    found = report(sharded(all_gather=Gather()), 0, 1)
    assert set(calls) == {((64, 64), (8, 64), ("fsdp",))}
    assert found.count("all-gather") == 24
