"""What lies in host memory and is moved there, read from programs compiled for TPU v5e and H100."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from offload_steps import PRECISION, model_on, momentum_of, report_of, step_with

import jfsdp
from jfsdp.inspect import Report
from jfsdp.inspect.read import inspect
from jfsdp.offload import on_host, to_device, to_host
from jfsdp.testing import topology_or_skip

pytestmark = pytest.mark.slow

TARGETS = ["v5e:2x4", "h100:8"]
WIDTH, LAYERS = 256, 4


def mesh_on(target: str) -> jax.sharding.Mesh:
    devices = list(topology_or_skip(target))
    return jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)


@functools.cache
def trained(target: str) -> Report:
    """A step of momentum on a model that lies in host memory with its state."""
    mesh = mesh_on(target)
    model = model_on(mesh, parameters=True)
    return report_of(mesh, model, momentum_of(model), step_with(), compile=True)


@pytest.mark.parametrize("target", TARGETS)
def test_offloaded_state_takes_no_byte_of_the_device(target: str) -> None:
    memory = trained(target).memory
    assert memory is not None
    assert (memory.parameters, memory.optimizer) == (0, 0)
    assert memory.host_parameters == memory.host_parameters_minimum
    assert memory.host_optimizer == memory.host_optimizer_minimum
    assert memory.host_told


@pytest.mark.parametrize("target", TARGETS)
def test_the_compiled_program_moves_what_was_written(target: str) -> None:
    report = trained(target)
    assert report.traffic is not None
    assert report.lowered is not None
    assert report.lowered.traffic is not None
    for phase in ("forward", "backward", "update"):
        for side in ("device", "host"):
            moved = [r.traffic.bytes(side, phase) for r in (report, report.lowered) if r.traffic]  # pyright: ignore[reportArgumentType]
            assert sum(moved[:1]) <= sum(moved[1:]) * 1.01, (phase, side)


@pytest.mark.parametrize("target", TARGETS)
def test_it_moves_no_more_than_the_policies_state(target: str) -> None:
    traffic = trained(target).traffic
    assert traffic is not None
    assert traffic.least is not None
    assert 0 < traffic.to_device <= traffic.least[0]
    assert 0 < traffic.to_host <= traffic.least[1]


@pytest.mark.parametrize("target", TARGETS)
def test_it_is_what_the_policies_state(target: str) -> None:
    trained(target).check()


@pytest.mark.parametrize("target", TARGETS)
def test_state_that_comes_back_on_the_device_is_told(target: str) -> None:
    mesh = mesh_on(target)
    model = model_on(mesh, parameters=True)
    step = step_with(to_host, lambda x: x)
    report = report_of(mesh, model, momentum_of(model), step, compile=True)
    assert "memory of what the step returns" in {d.rule for d in report.departures()}


# Programs of one's own


def host_array(mesh: jax.sharding.Mesh, *shape: int, dim: int = 0) -> jax.ShapeDtypeStruct:
    spec = P(*(None,) * dim, "fsdp")
    # GPUs that are not here list no memories: the abstract mesh keeps the kind.
    gpu = mesh.devices.flat[0].platform == "gpu"
    sharding = NamedSharding(mesh.abstract_mesh if gpu else mesh, spec, memory_kind="pinned_host")  # pyright: ignore[reportArgumentType]
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def compiled(mesh: jax.sharding.Mesh, function: Any, *args: Any) -> Report:
    count = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))

    def step(count: jax.Array, *args: jax.Array) -> Any:
        return count + 1, function(*args)

    return inspect(jax.jit(step), count, *args, mesh=mesh, compile=True)


@pytest.mark.parametrize("target", TARGETS)
def test_layers_of_a_stack_come_one_by_one(target: str) -> None:
    mesh = mesh_on(target)

    def loss(stack: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ to_device(w)), None

        return jnp.sum(jax.lax.scan(layer, x, stack)[0])

    def grads(stack: jax.Array, x: jax.Array) -> jax.Array:
        layers = P(None, "fsdp")
        local = jax.shard_map(
            jax.grad(loss), mesh=mesh, in_specs=(layers, P()), out_specs=layers, check_vma=False
        )
        return local(stack, x)

    stack = host_array(mesh, LAYERS, 8 * WIDTH, WIDTH, dim=1)
    x = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P()))
    traffic = compiled(mesh, grads, stack, x).traffic
    assert traffic is not None
    layer = WIDTH * WIDTH * 4
    assert (traffic.to_device % layer, traffic.to_host) == (0, LAYERS * layer)
    assert traffic.to_device >= LAYERS * layer
    assert all(t.shape[-2:] == (WIDTH, WIDTH) and not t.unknown_trips for t in traffic.transfers)


@pytest.mark.parametrize("target", TARGETS)
def test_what_the_host_is_asked_to_compute_is_not_moved(target: str) -> None:
    mesh = mesh_on(target)
    w = host_array(mesh, 8 * WIDTH, WIDTH)
    traffic = compiled(mesh, on_host(lambda w: w * 2), w).traffic
    assert traffic is not None
    assert (traffic.to_device, traffic.to_host) == (0, 0)
    assert {(work.where, work.asked) for work in traffic.work} == {("host", True)}


def test_on_gpus_a_kernel_on_host_memory_is_told() -> None:
    mesh = mesh_on("h100:8")
    w = host_array(mesh, 8 * WIDTH, WIDTH)
    traffic = compiled(mesh, lambda a, b: a + b, w, w).traffic
    assert traffic is not None
    (work,) = traffic.work
    assert (work.where, work.asked, work.bytes) == ("device", False, 3 * WIDTH * WIDTH * 4)


def test_on_tpus_what_xla_puts_on_the_host_is_told() -> None:
    mesh = mesh_on("v5e:2x4")
    w = host_array(mesh, 8 * WIDTH, WIDTH)
    traffic = compiled(mesh, lambda a, b: a + b, w, w).traffic
    assert traffic is not None
    assert {(work.where, work.asked) for work in traffic.work} == {("host", False)}


def test_on_tpus_a_backward_that_runs_on_the_host_is_told() -> None:
    """`jax.checkpoint` over an array in host memory: libtpu computes all behind its barrier on the host."""
    mesh = mesh_on("v5e:2x4")

    def loss(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        def block(w: jax.Array, x: jax.Array) -> jax.Array:
            whole = jax.lax.all_gather(to_device(w).astype(jnp.bfloat16), "fsdp", tiled=True)
            return jnp.tanh(x @ whole)

        for w in ws:
            x = jax.checkpoint(block)(w, x)
        return jnp.sum(x.astype(jnp.float32) ** 2)

    def grads(ws: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        specs = (P("fsdp"), P("fsdp"))
        local = jax.shard_map(
            jax.grad(loss), mesh=mesh, in_specs=specs, out_specs=P("fsdp"), check_vma=False
        )
        return local(ws, x)

    sharding = NamedSharding(mesh, P("fsdp"))
    x = jax.ShapeDtypeStruct((8 * WIDTH, WIDTH), jnp.bfloat16, sharding=sharding)
    traffic = compiled(mesh, grads, [host_array(mesh, WIDTH, WIDTH)] * 2, x).traffic
    assert traffic is not None
    unasked = [work for work in traffic.work if not work.asked]
    assert {work.where for work in unasked} == {"host"}
    assert any("checkpoint" in work.operation for work in unasked), traffic


# Activations


class Named(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.down = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(checkpoint_name(jnp.tanh(self.up(x)), "hidden"))


@pytest.mark.parametrize("target", ["cpu", *TARGETS])
def test_activations_in_host_memory_are_what_the_policy_states(target: str) -> None:
    mesh = (
        mesh_on(target)
        if target != "cpu"
        else jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    )
    policy = jfsdp.CPUOffloadPolicy(
        parameters=False, optimizer_state=False, activations=("hidden",)
    )

    def make() -> nnx.Sequential:
        rngs = nnx.Rngs(0)
        return nnx.Sequential(Named(rngs), Named(rngs))

    model = jfsdp.init(
        make, mesh, abstract=True, units=Named, offload_policy=policy, mp_policy=PRECISION
    )
    sharding = NamedSharding(mesh, P("fsdp"))
    x = jax.ShapeDtypeStruct((1024, WIDTH), jnp.bfloat16, sharding=sharding)
    step = nnx.jit(nnx.grad(lambda model, x: jnp.mean(model(x) ** 2)))
    report = jfsdp.inspect(step, model, x, compile=True)
    report.check()
    assert report.traffic is not None
    kept = 2 * 128 * WIDTH * 2
    assert (report.traffic.to_host, report.traffic.to_device) == (kept, kept)
    assert report.traffic.bytes("host", "forward") == kept
