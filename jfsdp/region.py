"""The `shard_map` that a root call opens in the global view, and the differentiation it owns.

Differentiating *through* a `shard_map(check_vma=False)` adds a psum over every axis that an input's
spec does not mention, so an HSDP gradient comes out R times too large; `check_vma=True` rejects
ordinary user code. So nothing differentiates through: one `custom_vjp` runs `jax.vjp` inside its
forward region, hands the residuals over as arrays, and calls it in its backward region.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from jfsdp.borders import Row
from jfsdp.explicit import enter, mesh_at_hand
from jfsdp.layout import axes_of_entry
from jfsdp.mesh import DataParallelMesh
from jfsdp.tape import Body, Rows, Tape, differentiated_inside

__all__ = ["Region", "call", "in_per_device_view"]


@dataclasses.dataclass(frozen=True)
class Region:
    """The data-parallel axes that become manual, and what crosses the border how.

    Attributes:
        dp: the mesh and its data-parallel axes.
        in_specs: for each leaf, the data-parallel part of its spec.
        reduced: for each leaf, whether the body itself reduces its gradient over the axes that its
            spec leaves out (parameters); otherwise the region sums it.
        rows: the kinds of results, in the order in which the body lists them.
    """

    dp: DataParallelMesh
    in_specs: tuple[PartitionSpec, ...]
    reduced: tuple[bool, ...]
    rows: tuple[Row, ...]

    @property
    def out_specs(self) -> tuple[PartitionSpec, ...]:
        """The spec of each row."""
        return tuple(row.spec for row in self.rows)

    def map(self, function: Callable[[Any], Any], in_specs: Any, out_specs: Any) -> Callable:
        """`function` in the per-device view."""
        mapped = jax.shard_map(
            function,
            mesh=mesh_at_hand(self.dp),
            in_specs=(in_specs,),
            out_specs=out_specs,
            axis_names=set(self.dp.axes),
            check_vma=False,
        )
        return _first_order(jax.jit(mapped, inline=True))  # outside of jit, still one program

    def copies(self, spec: PartitionSpec) -> tuple[str, ...]:
        """The data-parallel axes larger than 1 over which `spec` holds copies."""
        named = {axis for entry in spec for axis in axes_of_entry(entry)}
        return tuple(a for a in self.dp.larger_than_one(self.dp.axes) if a not in named)


def _first_order(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`function`, which refuses to be differentiated.

    It is the inside of a forward or backward pass already. A second derivative would differentiate
    through its shard_map and come out wrong without a word.
    """
    refusing = jax.custom_jvp(function)

    @refusing.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            "a module sharded with manual partitioning is differentiated twice (grad of grad, hessian). "
            'Use partitioning="auto" for that.'
        )

    return refusing


def in_per_device_view(dp: DataParallelMesh, caller: str) -> bool:
    """Whether the code that is being traced already runs per device over all data-parallel axes.

    Raises:
        ValueError: it does over some of them only, or the mesh in context has Explicit axes that were
            Auto when the module was sharded.
    """
    context = jax.sharding.get_abstract_mesh()
    manual = set(context.manual_axes)
    axes = dp.larger_than_one(dp.axes)
    if AxisType.Explicit in context.axis_types and not dp.explicit and not manual:
        raise ValueError(
            f"{caller} is called under jax.set_mesh with Explicit axes, but was sharded outside of "
            "it, where jfsdp takes the axes as Auto. Put jfsdp.shard and the training step under the same "
            "jax.set_mesh, or neither."
        )
    inside = [axis for axis in axes if axis in manual]
    if inside and len(inside) < len(axes):
        raise ValueError(
            f"{caller} is called inside a shard_map over {inside}, but its data-parallel axes are "
            f"{list(axes)}: map over all of them or over none."
        )
    return len(inside) == len(axes)


def call(body: Body, leaves: Sequence[jax.Array], region: Region) -> Rows:
    """Call `body` in the per-device view, its differentiation inside.

    Args:
        body: takes the local leaves and returns one list of local results for each row. A result
            whose spec leaves out data-parallel axes and is not averaged must be the same on all
            their devices.
        leaves: global arrays of any dtype, one for each in_spec.
        region: the axes and specs.

    Returns:
        The results as global arrays.

    Cost: none of its own; residuals stay on the device that made them. Reverse mode only.
    """

    # The mean is taken outside of what is differentiated: the transpose of a pmean with check_vma=False
    # is not the pmean of the cotangents' shares but their sum.
    def averaged(rows: Rows) -> Rows:
        return tuple(
            [jax.lax.pmean(x, region.copies(kind.spec)) for x in row] if kind.mean else row
            for kind, row in zip(region.rows, rows, strict=True)
        )

    def run(values: Sequence[jax.Array]) -> Rows:
        def local(values: Sequence[jax.Array]) -> Rows:
            return averaged(body(values))

        return region.map(local, list(region.in_specs), region.out_specs)(list(values))

    def record(values: Sequence[jax.Array], tape: Tape) -> tuple[Rows, list[jax.Array]]:
        def local(values: Sequence[jax.Array]) -> tuple[Rows, list[jax.Array]]:
            rows, residuals = tape.record(body, values)
            places = {id(x): index for index, x in enumerate(values)}
            tape.entered = [places.get(id(r)) for r in residuals]
            own = zip(residuals, tape.entered, strict=True)
            return averaged(rows), [r[None] for r, index in own if index is None]

        out_specs = (region.out_specs, region.dp.batch_spec)
        rows, made = region.map(local, list(region.in_specs), out_specs)(list(values))
        others = iter(made)
        return rows, [next(others) if i is None else values[i] for i in tape.entered]

    def replay(residuals: list[jax.Array], rows: Rows, tape: Tape) -> list[jax.Array]:
        def local(kept: tuple[list[jax.Array], Rows]) -> list[jax.Array]:
            shares = tuple(
                [share(c, spec) for c in row]
                for spec, row in zip(region.out_specs, kept[1], strict=True)
            )
            both = zip(kept[0], tape.entered, strict=True)
            gradients = tape.replay([r[0] if i is None else r for r, i in both], shares)
            return [summed(i, g) for i, g in zip(tape.wanted, gradients, strict=True)]

        def share(cotangent: jax.Array, spec: PartitionSpec) -> jax.Array:
            copies = region.dp.size_of(region.copies(spec))
            return cotangent / copies if copies > 1 else cotangent

        def summed(index: int, gradient: jax.Array) -> jax.Array:
            axes = () if region.reduced[index] else region.copies(region.in_specs[index])
            return jax.lax.psum(gradient, axes) if axes else gradient

        batch = region.dp.batch_spec
        residual_specs = [batch if i is None else region.in_specs[i] for i in tape.entered]
        in_specs = (residual_specs, region.out_specs)
        out_specs = [region.in_specs[index] for index in tape.wanted]
        return region.map(local, in_specs, out_specs)((residuals, rows))

    entering = [enter(x, spec, region.dp) for x, spec in zip(leaves, region.in_specs, strict=True)]
    return differentiated_inside(run, record, replay, entering)
