"""A training job from its file: mesh, sharded model, optimizer, batch and step, without one array.

The file is TOML:

    target = "v5p:4x4x4"                 # a machine, see jfsdp.topology; left out: the devices that are here

    [model]
    source = "models/llama3.py"          # a Python file, relative to this one, or the name of a module
    build = "llama3_8b"                  # called with rngs=nnx.Rngs(0) and the arguments
    arguments = {}

    [batch.tokens]                       # one table for each argument of the loss after the model
    shape = [64, 8193]                   # global; dimension 0 is the batch
    dtype = "int32"

    [step]
    loss = "next_token_loss"             # in the same source: loss(model, tokens=...) returns a scalar
    optimizer = "adamw"                  # a factory in optax
    arguments = { learning_rate = 3e-4 }
    tokens = 524288                      # in one global batch; only for the roofline
    microbatches = 4                     # see jfsdp.value_and_grad; the loss is a mean of equal rows
    update_on = "host"                   # or "device": where the update of what is offloaded is computed

    [mesh]                               # axes in order, and their sizes; of several TPU slices the
    fsdp = 64                            # first axis of their number goes over them

    [shard]
    shard = "fsdp"                       # an axis or a list of them; replicate likewise
    units = ["blocks.*"]                 # modules that become units of their own
    stacked = ["layers"]                 # scanned stacks of layers: units with stacked_axis=0
    param_dtype = "bfloat16"
    reduce_dtype = "float32"
    reshard_after_forward = true         # or false, the names of shard axes, the size of the last ones
    offload = "all"                      # what lies in host memory: none, all, parameters, optimizer
    offload_activations = ["block"]      # names by jax.ad_checkpoint.checkpoint_name: wait there too
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.experimental.mesh_utils import create_hybrid_device_mesh
from jax.sharding import AxisType, Mesh, NamedSharding

from jfsdp import api, reports, states
from jfsdp.cli.config import ConfigError, JobConfig, ShardConfig, check_sizes, did_you_mean
from jfsdp.cli.source import check_call, function, load, one_line
from jfsdp.gradients import value_and_grad
from jfsdp.inspect import Report
from jfsdp.inspect.topology import topology
from jfsdp.mesh import DataParallelMeshDims, resolve_mesh
from jfsdp.nnx_tree import walk
from jfsdp.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = ["Job", "build_job"]


@dataclasses.dataclass(frozen=True)
class Job:
    """What a file describes, abstract: descriptions of arrays in place of arrays.

    Attributes:
        config: the file, with the mesh and target that are used.
        mesh: the mesh, of devices that are here or not.
        model: the sharded model.
        optimizer: its optimizer.
        batch: the loss's arguments after the model, split over the data-parallel axes.
        step: the jitted training step, `step(model, optimizer, batch)`; model and optimizer are donated.
        notes: what is not as the file says, to be told.
    """

    config: JobConfig
    mesh: Mesh
    model: nnx.Module
    optimizer: nnx.Optimizer
    batch: dict[str, jax.ShapeDtypeStruct]
    step: Callable[..., Any]
    notes: tuple[str, ...] = ()

    def inspect(self, *, compile: bool) -> Report:
        """The report of the step, as `jfsdp.inspect`."""
        return reports.inspect(self.step, self.model, self.optimizer, self.batch, compile=compile)


def build_job(config: JobConfig, target: str | None = None) -> Job:
    """Build the job that a file describes.

    Args:
        config: the file.
        target: a machine in place of the file's own. If it has another number of devices than the mesh,
            a mesh of one axis is scaled to it.

    Returns:
        The job.

    Raises:
        ConfigError: a function is not there or does not take the arguments; the machine is unknown, its
            compiler is not installed, or it has another number of devices than the mesh; `jfsdp.shard`
            refuses the policy.

    Cost: the model is traced, not made. No memory on any device.
    """
    devices = _devices(config, target)
    config, notes = _scaled(config, target, len(devices))
    module = load(config)
    mesh = _mesh(config, devices)
    dims = DataParallelMeshDims(
        shard=config.shard.shard or None, replicate=config.shard.replicate or None
    )
    model = _sharded(config, _model(config, module), mesh, dims)
    sharding = NamedSharding(mesh, resolve_mesh(mesh, dims).batch_spec)
    batch = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        for name, array in config.batch.items()
    }
    loss = function(config, "[step] loss", module, config.step.loss)
    check_call(config, "[batch]", loss, config.batch, 1)
    tx, update_on = _optimizer(config), config.step.update_on
    optimizer = states.init_optimizer(tx, model, wrt=nnx.Param, update_on=update_on)
    step = train_step(loss, config.step.microbatches)
    return Job(config, mesh, model, optimizer, batch, step, notes)


def train_step(loss: Callable[..., jax.Array], microbatches: int = 1) -> Callable[..., Any]:
    """The step that every job takes: the loss, its gradients, the optimizer's update."""

    def step(model: nnx.Module, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> jax.Array:
        def of_model(model: nnx.Module) -> jax.Array:
            return loss(model, **batch)

        if microbatches > 1:
            value, gradients = value_and_grad(loss, microbatches=microbatches)(model, **batch)
        else:
            value, gradients = nnx.value_and_grad(of_model)(model)
        optimizer.update(model, gradients)
        return value

    return nnx.jit(step, donate_argnums=(0, 1))


# --------------------------------------------------------------------------------------------------
# The machine


def _devices(config: JobConfig, target: str | None) -> tuple[Any, ...]:
    name = target or config.target
    if name is None:
        return tuple(jax.devices())
    try:
        return topology(name)
    except (ImportError, RuntimeError, ValueError) as error:
        where = "--target" if target else f"{config.path.name}: target"
        raise ConfigError(f"{where}: {one_line(error)}") from error


def _scaled(
    config: JobConfig, target: str | None, devices: int
) -> tuple[JobConfig, tuple[str, ...]]:
    """The config for this many devices, and what is to be told about it."""
    mesh, size = config.mesh, math.prod(config.mesh.values())
    machine = target or config.target
    config = dataclasses.replace(config, target=machine)
    if size == devices:
        return config, ()
    axes = " x ".join(f"{axis}={size}" for axis, size in mesh.items())
    if machine is None:
        raise config.error(
            "[mesh]",
            f"{axes} is {size} devices, but {devices} are here. Name a machine of {size} with target or "
            f"--target, or simulate them: XLA_FLAGS=--xla_force_host_platform_device_count={size} "
            "JAX_PLATFORMS=cpu",
        )
    if target is None or len(mesh) > 1:
        which = "" if target is None else "; which axis to scale is not clear: change [mesh]"
        raise config.error(
            "[mesh]", f"{axes} is {size} devices, but {machine} has {devices}{which}"
        )
    (axis,) = mesh
    config = dataclasses.replace(config, mesh={axis: devices})
    check_sizes(config)
    return config, (f"{machine} has {devices} devices: {axis}={devices} in place of {axis}={size}",)


def _mesh(config: JobConfig, devices: tuple[Any, ...]) -> Mesh:
    sizes, axes = tuple(config.mesh.values()), tuple(config.mesh)
    types = (AxisType.Auto,) * len(axes)
    slices = len({getattr(device, "slice_index", None) for device in devices})
    try:
        if slices > 1 and devices[0].platform == "tpu":
            return Mesh(_over_slices(config, devices, slices), axes, axis_types=types)
        return jax.make_mesh(sizes, axes, axis_types=types, devices=list(devices))
    except (NotImplementedError, ValueError) as error:
        raise config.error("[mesh]", one_line(error)) from error


def _over_slices(config: JobConfig, devices: tuple[Any, ...], slices: int) -> np.ndarray:
    """The devices with one axis over the TPU slices: the first of that size, else the first that divides."""
    sizes = tuple(config.mesh.values())
    fitting = [at for at, size in enumerate(sizes) if size == slices]
    fitting += [at for at, size in enumerate(sizes) if size % slices == 0]
    if not fitting:
        raise ValueError(f"no axis can be split over {slices} slices: {slices} divides none")
    outer = tuple(slices if at == fitting[0] else 1 for at in range(len(sizes)))
    inner = tuple(size // over for size, over in zip(sizes, outer, strict=True))
    return create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)


# --------------------------------------------------------------------------------------------------
# The model and its step


def _model(config: JobConfig, module: types.ModuleType) -> nnx.Module:
    build = function(config, "[model] build", module, config.model.build)
    arguments = config.model.arguments
    check_call(config, "[model] arguments", build, ["rngs", *arguments], 0)
    model = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0), **arguments))
    if not isinstance(model, nnx.Module):
        raise config.error("[model] build", f"{config.model.build}() made no flax.nnx.Module")
    return model


def _sharded(
    config: JobConfig, model: nnx.Module, mesh: Mesh, dims: DataParallelMeshDims
) -> nnx.Module:
    said = config.shard
    policy: dict[str, Any] = {
        "dp_mesh_dims": dims,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=said.param_dtype, reduce_dtype=said.reduce_dtype
        ),
        "reshard_after_forward": said.reshard_after_forward,
        "offload_policy": _offload(said),
    }
    modules = {path: node for path, node in walk(model) if isinstance(node, nnx.Module) and path}
    for path in said.stacked:
        if path not in modules:
            raise config.error(
                "[shard] stacked",
                f"the model has no module {path}{did_you_mean(path, modules)}",
            )
    try:
        for path in said.stacked:
            api.shard(modules[path], mesh, stacked_axis=0, **policy)
        return api.shard(model, mesh, units=said.units, **policy)
    except (TypeError, ValueError) as error:
        raise config.error("[shard]", one_line(error)) from error


def _offload(said: ShardConfig) -> OffloadPolicy:
    if said.offload == "none" and not said.offload_activations:
        return OffloadPolicy()
    return CPUOffloadPolicy(
        parameters=said.offload in ("all", "parameters"),
        optimizer_state=said.offload in ("all", "optimizer"),
        activations=said.offload_activations,
    )


def _optimizer(config: JobConfig) -> optax.GradientTransformation:
    name, arguments = config.step.optimizer, config.step.arguments
    factory = getattr(optax, name, None)
    if not callable(factory):
        raise config.error(
            "[step] optimizer", f"optax has no {name}{did_you_mean(name, dir(optax))}"
        )
    check_call(config, "[step] arguments", factory, arguments, 0)
    try:
        made = factory(**arguments)
    except (TypeError, ValueError) as error:
        raise config.error("[step] arguments", f"{name}(): {one_line(error)}") from error
    if not isinstance(made, optax.GradientTransformation):
        raise config.error("[step] optimizer", f"optax.{name} makes no optimizer")
    return made
