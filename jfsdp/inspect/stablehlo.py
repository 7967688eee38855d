"""The collectives of a program as it was written, before any compiler pass."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax
import numpy as np
from jax.extend.mlir import ir

from . import scopes
from .collective import KINDS, Collective, dtype_name, nbytes, ring_bytes
from .groups import Groups, along_axes, axes_of_groups, axes_of_pairs
from .loops import Frame, called_function, trip_count

_KIND_OF_OPERATION: Final = {
    "stablehlo.all_gather": "all-gather",
    "stablehlo.reduce_scatter": "reduce-scatter",
    "stablehlo.all_reduce": "all-reduce",
    "stablehlo.all_to_all": "all-to-all",
    "stablehlo.collective_permute": "collective-permute",
    "stablehlo.collective_broadcast": "collective-broadcast",
}


def collectives(
    lowered: jax.stages.Lowered, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
) -> list[Collective]:
    """Reads the collectives that a step executes, from its StableHLO.

    The walk starts at the program's entry and goes into every function as often as it is called, so
    functions that nobody calls do not count. The body of a loop counts as often as it runs, its
    condition once more, if counter and bound are constants (`jax.lax.scan`, `map` and `fori_loop`
    with static bounds, nested or not); else once, and the records say so. Of a conditional every
    branch counts once, though only one of them runs.

    Two kinds of communication are not in this text, and so not in the result: what the compiler
    adds to honor sharding annotations, and what custom calls to other libraries do.

    Args:
        lowered: what `jax.jit(step).lower(*args)` returns.
        mesh: the mesh that the step runs on, of which only axis names and sizes are used. A
            collective over another mesh of the same program has no `axes` unless its groups are
            those of some axes of this one.

    Returns:
        One record per result of a collective operation and call, in program order.

    Raises:
        ValueError: the program runs on other meshes than `mesh`, has a collective of an array of
            unknown shape or dtype, or names devices in a way that is not known here.
    """
    module = lowered.compiler_ir("stablehlo")
    assert isinstance(module, ir.Module), type(module)
    reader = _Reader.of(module, mesh)
    return list(reader.read(reader.functions["main"], _Place(Frame(reader.functions))))


def constant_bytes(lowered: jax.stages.Lowered) -> int:
    """Bytes of the arrays that are written into a program, such as parameters that it closes over.

    Args:
        lowered: what `jax.jit(step).lower(*args)` returns.

    Returns:
        The bytes, without arrays of one repeated value, which cost nothing.
    """
    module = lowered.compiler_ir("stablehlo")
    assert isinstance(module, ir.Module), type(module)
    return sum(_constants(op.operation) for op in module.body.operations)


def _constants(op: ir.Operation) -> int:
    if op.name == "stablehlo.constant":
        value = op.attributes["value"]
        if isinstance(value, ir.DenseElementsAttr) and value.is_splat:
            return 0
        dtype, shape = _array(op.results[0])
        return round(nbytes(shape, dtype))
    return sum(
        _constants(inner.operation)
        for region in op.regions
        for block in region.blocks
        for inner in block.operations
    )


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where the walk is: in which call, and inside which loops."""

    frame: Frame
    executions: int = 1
    in_loop: bool = False
    unknown_trips: bool = False
    op_name: str = ""

    def inside(self, op: ir.Operation) -> _Place:
        return dataclasses.replace(self, op_name=_op_name(op) or self.op_name)

    def in_loop_of(self, trips: int | None) -> _Place:
        return dataclasses.replace(
            self,
            executions=self.executions * (1 if trips is None else trips),
            in_loop=True,
            unknown_trips=self.unknown_trips or trips is None,
        )


@dataclasses.dataclass(frozen=True)
class _Reader:
    """A module's symbols and the mesh to express its device groups in.

    Attributes:
        functions: first block of each function, by name.
        meshes: axis sizes of each mesh that the module declares, by name.
        axis_sizes: axis sizes of the user's mesh.
    """

    functions: Mapping[str, ir.Block]
    meshes: Mapping[str, Mapping[str, int]]
    axis_sizes: Mapping[str, int]

    @classmethod
    def of(cls, module: ir.Module, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> _Reader:
        symbols = [op.operation for op in module.body.operations]
        reader = cls(
            functions={
                _name(op): op.regions[0].blocks[0] for op in symbols if op.name == "func.func"
            },
            meshes={_name(op): _declared_sizes(op) for op in symbols if op.name == "sdy.mesh"},
            axis_sizes={str(axis): size for axis, size in mesh.shape.items()},
        )
        reader._check_mesh()
        return reader

    def _check_mesh(self) -> None:
        # Device positions read on a mesh of another shape would name axes, but the wrong ones.
        declared = [list(sizes.items()) for sizes in self.meshes.values() if sizes]
        if declared and list(self.axis_sizes.items()) not in declared:
            raise ValueError(
                f"jfsdp.inspect: the program does not run on the mesh {_mesh_text(self.axis_sizes)}"
                f", but on {' and '.join(sorted({_mesh_text(dict(sizes)) for sizes in declared}))};"
                " pass one of these as mesh"
            )

    def read(self, block: ir.Block, place: _Place) -> Iterator[Collective]:
        for view in block.operations:
            op = view.operation
            kind = _kind(op)
            if kind is not None:
                yield from self._records(op, kind, place)
            elif op.name == "stablehlo.while":
                yield from self._loop(op, place.inside(op))
            elif (callee := called_function(op)) is not None:
                call = dataclasses.replace(place.inside(op), frame=place.frame.enter(op))
                yield from self.read(self.functions[callee], call)
            elif op.regions:
                nested = place.inside(op)
                for region in op.regions:
                    for inner in region.blocks:
                        yield from self.read(inner, nested)

    def _loop(self, op: ir.Operation, place: _Place) -> Iterator[Collective]:
        trips = trip_count(op, place.frame)
        condition, body = (region.blocks[0] for region in op.regions)
        yield from self.read(condition, place.in_loop_of(None if trips is None else trips + 1))
        if trips != 0:
            yield from self.read(body, place.in_loop_of(trips))

    def _records(self, op: ir.Operation, kind: str, place: _Place) -> Iterator[Collective]:
        axes, group_size, unresolved = self._devices(op, kind)
        op_name = _op_name(op)
        leaves = scopes.leaves(op_name)
        for operand, result in zip(op.operands, op.results, strict=True):
            dtype, shape = _array(operand)
            _, result_shape = _array(result)
            received = ring_bytes(
                kind, nbytes(shape, dtype), nbytes(result_shape, dtype), group_size
            )
            yield Collective(
                kind=kind,
                axes=axes,
                dtype=dtype,
                shape=shape,
                result_shape=result_shape,
                group_size=group_size,
                executions=place.executions,
                bytes_per_device=received,
                in_loop=place.in_loop,
                unknown_trips=place.unknown_trips,
                groups=unresolved,
                phase=scopes.phase(op_name) or scopes.phase(place.op_name),
                leaf=leaves[0] if len(leaves) == 1 else "",
                role=scopes.role(op_name),
            )

    def _devices(self, op: ir.Operation, kind: str) -> tuple[tuple[str, ...], int, str]:
        """Axes, group size, and the groups' text if there are no axes to name."""
        if kind == "collective-permute":
            groups = self._groups(op, "source_target_pairs")
            axes = axes_of_pairs(groups, self.axis_sizes)
            # Without axes to go by, count the devices that take part.
            size = len({device for pair in groups if len(set(pair)) > 1 for device in pair}) or 1
        else:
            # No groups at all stand for one group of all devices.
            everyone = along_axes(self.axis_sizes, self.axis_sizes)
            groups = self._groups(op, "replica_groups") or everyone
            axes = axes_of_groups(groups, self.axis_sizes)
            size = max(len(group) for group in groups)
        if axes is None:
            return (), size, str([list(group) for group in groups])
        return axes, math.prod(self.axis_sizes[axis] for axis in axes), ""

    def _groups(self, op: ir.Operation, key: str) -> Groups:
        if op.name == "stablehlo.custom_call":
            config = _async_config(op)
            return tuple(map(tuple, config["permutation" if "permutation" in config else key]))
        attribute = op.attributes[key]
        if isinstance(attribute, ir.DenseIntElementsAttr):
            return _rows(attribute)
        # jax 0.12 names axes of a declared mesh, in an attribute without accessors (0.10 lists the
        # devices). List them here too: the declared mesh need not be the user's.
        match = re.fullmatch(
            r"#stablehlo\.replica_group_mesh_axes<mesh = @(\S+), axes = \[(.*)\]>", str(attribute)
        )
        axis = r'#stablehlo\.axis_ref<name = "([^"]*)">'
        if match is None or re.sub(axis, "", match[2]).strip(", "):
            raise ValueError(
                f"jfsdp.inspect: jax {jax.__version__} writes device groups in an unknown way: "
                f"{attribute}"
            )
        return along_axes(self.meshes[match[1]], re.findall(axis, match[2]))


def _kind(op: ir.Operation) -> str | None:
    if op.name != "stablehlo.custom_call":
        return _KIND_OF_OPERATION.get(op.name)
    # jax 0.12 writes the start of an asynchronous collective so (`jax.lax.psum_scatter_start`).
    target, start, _ = _text(op.attributes["call_target_name"]).partition("-start")
    return target if start and target in KINDS else None


def _async_config(op: ir.Operation) -> dict[str, Any]:
    attributes = op.attributes["mhlo.frontend_attributes"]
    assert isinstance(attributes, ir.DictAttr)
    return json.loads(_text(attributes["async_collective_config"]))


def _rows(elements: ir.Attribute) -> Groups:
    assert isinstance(elements, ir.DenseIntElementsAttr), elements
    # StableHLO fills groups of unequal size up with -1.
    return tuple(
        tuple(device for device in row if device >= 0) for row in np.asarray(elements).tolist()
    )


def _array(value: ir.Value) -> tuple[str, tuple[int, ...]]:
    array = value.type
    if not isinstance(array, ir.RankedTensorType) or not array.has_static_shape:
        raise ValueError(
            f"jfsdp.inspect: a collective of {array}: lower the step with arrays of known shape"
        )
    return dtype_name(str(array.element_type)), tuple(array.shape)


def _op_name(op: ir.Operation) -> str:
    """The name that JAX gave the operation: what is quoted first in its location."""
    match = re.match(r'loc\("([^"]*)"', str(op.location))
    return match[1] if match else ""


def _name(op: ir.Operation) -> str:
    return _text(op.attributes["sym_name"])


def _text(attribute: ir.Attribute) -> str:
    assert isinstance(attribute, ir.StringAttr), attribute
    return attribute.value


def _mesh_text(axis_sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in axis_sizes.items())


def _declared_sizes(op: ir.Operation) -> dict[str, int]:
    return {
        axis: int(size) for axis, size in re.findall(r'"([^"]*)"=(\d+)', str(op.attributes["mesh"]))
    }
