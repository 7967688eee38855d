"""What `shard` refuses of NNX modules, before it changes the first one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer
from jax.sharding import AbstractMesh

from jfsdp.ignored import Ignored
from jfsdp.inspect.target import first_device
from jfsdp.inspect.topology import is_absent
from jfsdp.mesh import DataParallelMesh, describe_mesh
from jfsdp.nnx_tree import FSDPModule, class_name, owned, placement_of, variables_of, walk

__all__ = [
    "Members",
    "check_devices",
    "check_module",
    "check_placed_before",
    "members_of",
    "names_of",
]

Members = dict[str, nnx.Module]
"""The modules of one `shard` call by path: one alone has the path "", those of a list their index."""


def members_of(module: nnx.Module | Sequence[nnx.Module]) -> Members:
    """The module, or those of a list, which have to be different ones, none in another."""
    if isinstance(module, nnx.Module):
        return {"": module}
    members = {str(index): member for index, member in enumerate(module)}
    if not members:
        raise ValueError(
            "jfsdp.shard was given an empty list: there is no module to make a unit of."
        )
    for index, member in members.items():
        if not isinstance(member, nnx.Module):
            kind = member.__name__ if isinstance(member, type) else type(member).__name__
            raise TypeError(
                f"jfsdp.shard takes a list of instances of flax.nnx.Module; modules[{index}] is of another "
                f"kind: {kind}."
            )
    for index, member in members.items():
        inside = {id(node): path for path, node in walk(member)}
        for other, found in members.items():
            if other == index or id(found) not in inside:
                continue
            path = inside[id(found)]
            how = f"lies in modules[{index}], as {path}" if path else f"is modules[{index}] again"
            raise ValueError(
                f"jfsdp.shard was given a list in which modules[{other}] ({class_name(found)}) {how}. Give "
                "each once, and of two that lie in each other the outer one."
            )
    return members


def names_of(members: Members) -> str:
    """The classes of the members, for messages."""
    names = [class_name(member) for member in members.values()]
    return names[0] if len(names) == 1 else f"[{', '.join(names)}]"


def check_module(path: str, module: Any, in_list: bool) -> None:
    """Check that a module can become a unit.

    Raises:
        ValueError: it is one already, has no forward, or lies in one.
    """
    where = f"modules[{path}]" if in_list and path.isdigit() else path or "the module"
    name = f"{where} ({class_name(module)})"
    if isinstance(module, FSDPModule):
        raise ValueError(
            f"{name} is a unit already: jfsdp.shard was applied to it before. Apply it once to each "
            "module, the inner ones first."
        )
    if not callable(module) or not isinstance(module, nnx.Module):
        raise ValueError(
            f"{name} is a container without a forward (__call__), so there is nothing to gather its "
            "parameters for. Shard the modules in it, or the module that calls them."
        )
    placed = [(p, placement_of(v)) for p, v in owned(module).items() if isinstance(v, nnx.Param)]
    if placed and all(p is not None and p.path.endswith(f".{path}") for path, p in placed):
        raise ValueError(
            f"{name} lies in a module that was made a unit before, which owns its parameters. Apply "
            "jfsdp.shard to the inner ones first, then to the outer one."
        )


def check_devices(module: nnx.Module, dp: DataParallelMesh) -> None:
    """Check that the devices of the mesh can hold the arrays of a module.

    Raises:
        ValueError: they are not here.
    """
    values = jax.tree.leaves(nnx.state(module))
    if all(isinstance(x, jax.ShapeDtypeStruct | Tracer) for x in values):
        return
    remedy = (
        "to get an abstract model write\n"
        f"  model = jfsdp.init(lambda: {class_name(module)}(...), mesh, ...)\n"
        f"or shard an abstract one: nnx.eval_shape(lambda: {class_name(module)}(...))."
    )
    if isinstance(dp.mesh, AbstractMesh):
        raise ValueError(
            "the mesh is an AbstractMesh, which has no devices to lay these arrays on. Make one with "
            f"jax.make_mesh; or {remedy}"
        )
    device = first_device(dp.mesh)
    if device is not None and is_absent(device):
        raise ValueError(
            f"the devices of the mesh ({describe_mesh(dp.mesh)}; {device.device_kind}) are not here: they "
            f"are to compile for, and the arrays of this {class_name(module)} cannot lie on them; {remedy}"
        )


def check_placed_before(module: Any, ignored: Ignored) -> None:
    """Check that nothing is to be left alone that an earlier call has sharded.

    Raises:
        ValueError: a parameter is.
    """
    for path, variable in variables_of(module):
        placement = placement_of(variable)
        if placement is None or not ignored.selects(path, variable) or placement.ignored:
            continue
        raise ValueError(
            f"{path} (shape {placement.shape}) is selected by ignored_params, but an earlier jfsdp.shard has "
            "sharded it. Give ignored_params to that call."
        )
