"""The public functions that make the state of a training run, and that make it whole again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from flax import nnx as flax_nnx

from jfsdp import linen, nnx, optimizer, updates
from jfsdp.api import described, shard
from jfsdp.born import born_sharded
from jfsdp.layout import whole
from jfsdp.linen_init import taking_care
from jfsdp.linen_plan import recording
from jfsdp.mesh import AnyMesh, mesh_known_to_traced_code
from jfsdp.nnx_init import init_module
from jfsdp.nnx_optimizer import init_module_optimizer
from jfsdp.nnx_tree import mesh_of
from jfsdp.policies import OffloadPolicy

__all__ = ["init", "init_optimizer", "unshard", "update_optimizer"]

S = TypeVar("S")


def init(
    fn: Callable[[], S], mesh: AnyMesh | None = None, *, abstract: bool = False, **settings: Any
) -> S:
    """Make a module, or a train state, whose arrays are born sharded, never whole on one device.

    Args:
        fn: makes the NNX module, without arguments; it may call `jfsdp.shard` itself, bottom-up, and then
            mesh and settings are left out. Or makes any pytree from parameters of Linen modules that
            `jfsdp.shard` returned, for example
            `lambda: TrainState.create(apply_fn=model.apply, params=model.init(key, x)["params"], tx=tx)`.
        mesh: as in `shard`. Its devices may be those of `jfsdp.topology`, which are not here, or none
            (an AbstractMesh).
        abstract: True makes `jax.ShapeDtypeStruct`s with their shardings in place of arrays, as a target to
            restore to or to lower a step with; nothing is allocated.
        **settings: the keyword arguments of `shard`.

    Returns:
        What `fn` returns. Parameters lie as `shard` puts them; in a train state of Linen also every array
        whose path ends with a parameter's path and that has its shape (moments). All else is on every
        device. On a mesh whose devices are not here it is abstract.

    Raises:
        TypeError: `fn` makes neither.
        ValueError: mesh or settings are given for a train state of Linen; or what `shard` raises.

    Memory: the initial values are computed by one jitted program in which each device computes its own
    part of every random array. The values are those of the unsharded initialization (to rounding).

    Example:
        >>> import jax, jfsdp
        >>> from flax import nnx
        >>> mesh = jax.make_mesh((1,), ("fsdp",))
        >>> model = jfsdp.init(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh)
        >>> model.kernel.shape
        (8, 8)
    """

    def apply(module: Any) -> Any:
        has_units = mesh_of(module) is not None
        return (
            module
            if has_units and mesh is None and not settings
            else shard(module, mesh, **settings)
        )

    with mesh_known_to_traced_code(), recording() as plans:
        made: Any = flax_nnx.eval_shape(fn)
    if not plans:
        if not isinstance(made, flax_nnx.Module):
            raise TypeError(
                f"jfsdp.init: the function makes {described(made)}, which holds neither an nnx.Module nor "
                "parameters of a Linen module that jfsdp.shard returned. Shard the Linen module first."
            )
        return init_module(fn, made, apply, abstract=abstract)
    if mesh is not None or settings:
        given = ", ".join(["mesh"] * (mesh is not None) + list(settings))
        raise ValueError(
            f"jfsdp.init: {given}: the Linen modules that the function initializes have their settings from "
            "jfsdp.shard already. Give them there."
        )
    state, on = linen.describe_state(made, plans)
    if abstract:
        return state
    with taking_care():
        return born_sharded(fn, state, on)


def init_optimizer(
    tx: Any,
    params: Any,
    *,
    wrt: Any = None,
    shard_over: str | Sequence[str] | None = None,
    offload_policy: OffloadPolicy | None = None,
    update_on: str | None = None,
) -> Any:
    """Make the state of an optax optimizer, each array born where it belongs.

    An array of the state whose path ends with a parameter's path and that has its shape lies as the
    parameter; so does a history of such arrays, stacked in front. All else is whole on every device:
    counts, keys, factored moments, and the one vector that `optax.flatten` makes of all parameters.

    Args:
        tx: an `optax.GradientTransformation`, or whatever else has an `init` like it.
        params: arrays on one mesh in any pytree: a dict of Linen, boxed or not, an `nnx.State`,
            `optax.LookaheadParams`. Of `jax.ShapeDtypeStruct`s with shardings the state is made of such
            too, and nothing is allocated. Or an `nnx.Module` that `jfsdp.shard` was applied to.
        wrt: of a module, which Variables are trained, as for `nnx.Optimizer`; None: `nnx.Param`.
        shard_over: mesh axes that the arrays which lie as a parameter are sharded over in addition:
            "replica" with HSDP for a state over all devices, the one axis of a mesh of copies for ZeRO-1.
            On the dimension that is sharded already if it divides, else on the largest other one that
            does; what cannot be stays as its parameter. None: nothing more.
        offload_policy: in which memory the arrays which lie as a parameter are: `CPUOffloadPolicy()` on the
            host, also where the parameters are on the device; `OffloadPolicy()` on the device, wherever the
            parameters are. None: of arrays in the parameter's own memory, of a module as its units' policies
            say. All else is on the device.
        update_on: of a module with anything on the host, where `update` computes: `on` of
            `jfsdp.update_optimizer`.

    Returns:
        What `tx.init(params)` returns; of a module `nnx.Optimizer(module, tx, wrt=wrt)`, whose `update`
        keeps parameters and state where they are, and returns None where anything is on the host: the
        updates are not kept. In your own step with optax give `jfsdp.shardings((params, state))` as
        `out_shardings` for that, and with arrays on the host take `jfsdp.update_optimizer`.

    Raises:
        ValueError: a parameter lies on no mesh, or two lie on different ones; `shard_over` names no
            axis, one that the mesh lacks or none larger than 1, or no array of the state can be sharded
            over them; nothing in the module is sharded; `wrt` or `update_on` is given without a module, or
            `update_on` is unknown; the call is inside jit, the parameters are no module and the mesh's axes
            are not all Explicit.
        TypeError: a parameter is no array, `shard_over` no names, or `offload_policy` no such policy.

    Memory: that of the state, a part of it on each device, and never a whole array on one of them.
    Communication: none here. In the step `shard_over` costs an all-gather of the updated parameters over
    these axes.

    Reference: Rajbhandari et al., ZeRO (2020), stage 1.

    Example:
        >>> import jax, jfsdp, optax
        >>> from jax.sharding import NamedSharding, PartitionSpec
        >>> sharding = NamedSharding(jax.make_mesh((1,), ("fsdp",)), PartitionSpec("fsdp"))
        >>> params = {"w": jax.device_put(jax.numpy.ones(8), sharding)}
        >>> state = jfsdp.init_optimizer(optax.adam(1e-3), params)
        >>> state[0].mu["w"].sharding.spec, state[0].count.sharding.spec
        (P('fsdp',), P())
    """
    if isinstance(params, flax_nnx.Module):
        wrt = flax_nnx.Param if wrt is None else wrt
        return init_module_optimizer(
            tx,
            params,
            wrt=wrt,
            shard_over=shard_over,
            offload_policy=offload_policy,
            update_on=update_on,
        )
    if wrt is not None:
        raise ValueError(
            "init_optimizer: wrt chooses Variables of an nnx.Module, but the parameters are of type "
            f"{type(params).__name__}. Give only those that are trained."
        )
    if update_on is not None:
        raise ValueError(
            "init_optimizer: update_on is for an nnx.Module, whose nnx.Optimizer remembers it, but the "
            f"parameters are of type {type(params).__name__}. Give it to the step: "
            f"jfsdp.update_optimizer(tx, grads, state, params, on={update_on!r})."
        )
    return optimizer.init_optimizer(
        tx, params, shard_over=shard_over, offload_policy=offload_policy
    )


def update_optimizer(
    tx: Any, grads: Any, state: Any, params: Any, *, on: str | None = None, **extra: Any
) -> tuple[Any, Any]:
    """Do an optimizer's step where parameters, gradients or state may lie in host memory.

    `tx.update` and `optax.apply_updates`, and every array of the result in the memory in which it came.
    Nothing is added where all arrays are on the device. Works in `jax.jit`, in a `shard_map` and outside of
    both. Wherever arrays lie, a global norm is that of all gradients (in a `shard_map`, as ever, of one
    device's parts).

    Args:
        tx: an `optax.GradientTransformation`.
        grads: in the structure of the parameters; in any memory, also in another than its parameter.
        state: what `jfsdp.init_optimizer(tx, params)` made.
        params: arrays in any pytree.
        on: "device": what lies on the host is copied to the device by groups of parameters, and the results
            back; the arrays of two groups are there at a time. A group is one parameter, or small ones
            together. "host": the host computes what belongs to a parameter that has anything there. None:
            "device", for the reasons in `jfsdp/updates.py`.
        **extra: what `tx.update` takes in addition.

    Returns:
        The new parameters and the new state.

    Raises:
        ValueError: `on` is neither; gradients and parameters differ in structure (their paths are listed), or
            the state is none of these parameters; `tx` returns a state of another structure, or has side
            effects, and arrays are on the host; on="host", and the update has a loop that makes arrays of its
            own.

    Memory: on="device": on the device twice the gradient, the parameter, and K bytes of state for each
    element of the largest parameter's shard, however many parameters there are. on="host": nothing on the
    device; on the host once more what is updated, because compilers copy what the host computed into place.

    Communication: none that optax would not do; between host and device P * (s + K)/F bytes each way for P
    parameters of s bytes over F shards, the gradients to the device, and once more for what needs them
    before, such as a global norm. on="host": nothing of what lies there; what a parameter has on the device
    goes there, and what is new of it comes back.

    Numerics: the equations are those of optax. What a norm of updates needs is computed twice, and of a
    `jax.lax.cond` over several parameters both branches are: compilers may round that otherwise.

    Reference: PyTorch FSDP2, where `CPUOffloadPolicy` leaves the step to an optimizer on the CPU.

    Example:
        >>> import jax, jax.numpy as jnp, jfsdp, optax
        >>> from jax.sharding import NamedSharding, PartitionSpec
        >>> mesh = jax.make_mesh((1,), ("fsdp",))
        >>> host = NamedSharding(mesh, PartitionSpec("fsdp"), memory_kind="pinned_host")
        >>> params = {"w": jax.device_put(jnp.ones(8), host)}
        >>> tx = optax.adam(1e-3)
        >>> state = jfsdp.init_optimizer(tx, params)
        >>> step = jax.jit(lambda params, state: jfsdp.update_optimizer(tx, params, state, params))
        >>> params, state = step(params, state)
        >>> params["w"].sharding.memory_kind, state[0].mu["w"].sharding.memory_kind
        ('pinned_host', 'pinned_host')
    """
    return updates.update_optimizer(tx, grads, state, params, on=on, **extra)


def unshard(tree: S) -> S:
    """Whole weights, for export or for inference on a small scale.

    Args:
        tree: parameters or any pytree of arrays; a module of NNX, whose units become plain modules again;
            a module of Linen that `shard` returned, which has no weights of its own.

    Returns:
        The same, with every array whole on every device of its mesh, in its own dtype. A module is a copy
        and of its own class; `tree` stays as it is.

    Raises:
        ValueError: it is called inside jit on what was computed there, so that nothing says on which mesh
            it lies.

    Memory: the whole of it on every device, or one array at a time:
    `jax.tree.map(lambda x: numpy.asarray(jfsdp.unshard(x)), params)` keeps it on the host.

    Communication: one all-gather in the storage dtype.

    Reference: PyTorch FSDP2, `FSDPModule.unshard`, which gathers in place for one forward.

    Example:
        >>> import jax, jfsdp
        >>> from flax import nnx
        >>> mesh = jax.make_mesh((1,), ("fsdp",))
        >>> model = jfsdp.shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh)
        >>> type(jfsdp.unshard(model)) is nnx.Linear
        True
    """
    if isinstance(tree, flax_nnx.Module):
        return nnx.unsharded_module(tree)  # pyright: ignore[reportReturnType]
    if isinstance(tree, linen.FSDPModule):
        return linen.unsharded_module(tree)  # pyright: ignore[reportReturnType]
    return whole(tree)
