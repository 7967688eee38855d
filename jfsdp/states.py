"""The public functions that make the state of a training run, and that make it whole again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from flax import nnx as flax_nnx

from jfsdp import linen, nnx, optimizer
from jfsdp.api import described, shard
from jfsdp.born import born_sharded
from jfsdp.layout import whole
from jfsdp.linen_init import taking_care
from jfsdp.linen_plan import recording
from jfsdp.mesh import AnyMesh, mesh_known_to_traced_code
from jfsdp.nnx_init import init_module
from jfsdp.nnx_optimizer import init_module_optimizer
from jfsdp.nnx_tree import mesh_of

__all__ = ["init", "init_optimizer", "unshard"]

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
    tx: Any, params: Any, *, wrt: Any = None, shard_over: str | Sequence[str] | None = None
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

    Returns:
        What `tx.init(params)` returns; of a module `nnx.Optimizer(module, tx, wrt=wrt)`, whose `update`
        keeps parameters and state where they are. In your own step with optax give
        `jfsdp.shardings((params, state))` as `out_shardings` for that.

    Raises:
        ValueError: a parameter lies on no mesh, or two lie on different ones; `shard_over` names no
            axis, one that the mesh lacks or none larger than 1, or no array of the state can be sharded
            over them; nothing in the module is sharded; `wrt` is given without a module; the call is
            inside jit, the parameters are no module and the mesh's axes are not all Explicit.
        TypeError: a parameter is no array, or `shard_over` no names.

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
        return init_module_optimizer(tx, params, wrt=wrt, shard_over=shard_over)
    if wrt is not None:
        raise ValueError(
            "init_optimizer: wrt chooses Variables of an nnx.Module, but the parameters are of type "
            f"{type(params).__name__}. Give only those that are trained."
        )
    return optimizer.init_optimizer(tx, params, shard_over=shard_over)


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
