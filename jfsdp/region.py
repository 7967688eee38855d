"""The `shard_map` that a root call opens in the global view, and the differentiation it owns.

Differentiating *through* a `shard_map(check_vma=False)` adds a psum over every axis that an input's
spec does not mention, so an HSDP gradient comes out R times too large; `check_vma=True` rejects
ordinary user code. So nothing differentiates through: one `custom_vjp` runs `jax.vjp` inside its
forward region, hands the residuals over as arrays, and calls it in its backward region.

The same is done, without a `shard_map`, round each unit that is gathered again in the backward pass:
a remat policy of ours over code that holds the user's own remat would overrule the user's. Once the
code has been differentiated inside, it cannot.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core as jex
from jax.sharding import AxisType, PartitionSpec

from jfsdp.activations import values_in
from jfsdp.borders import Row
from jfsdp.explicit import enter, mesh_at_hand
from jfsdp.layout import axes_of_entry
from jfsdp.mesh import DataParallelMesh
from jfsdp.offload import to_device, to_host
from jfsdp.pullback import is_floating, waiting
from jfsdp.remat import keep_recomputed_gathers
from jfsdp.varying import zeros

__all__ = [
    "Region",
    "Tape",
    "call",
    "call_here",
    "differentiated_inside",
    "in_per_device_view",
]

Rows = tuple[list[Any], ...]
"""Results by how they leave the region: one list for each of `Region.rows`."""

Body = Callable[[Sequence[jax.Array]], Rows]


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


def call_here(body: Body, leaves: Sequence[jax.Array], named: bool = False) -> Rows:
    """Call `body` where we are, its differentiation inside. See `call`.

    Args:
        body: takes the leaves and returns rows.
        leaves: arrays of any dtype.
        named: whether units in it keep what they name on the host.
    """

    def record(values: Sequence[jax.Array], tape: Tape) -> tuple[Rows, list[jax.Array]]:
        return tape.record_named(body, values) if named else tape.record(body, values)

    def replay(residuals: list[jax.Array], rows: Rows, tape: Tape) -> list[jax.Array]:
        return tape.replay_named(residuals, rows) if named else tape.replay(residuals, rows)

    return differentiated_inside(body, record, replay, leaves)


def differentiated_inside(
    run: Callable[..., Rows],
    record: Callable[..., tuple[Rows, list[jax.Array]]],
    replay: Callable[..., list[jax.Array]],
    leaves: Sequence[jax.Array],
) -> Rows:
    """Call a function that says itself what its forward and its backward pass are.

    Args:
        run: the function of `leaves`, when it is not differentiated.
        record: takes leaves and a `Tape`; returns the results and the arrays for the backward pass.
        replay: takes these arrays, the cotangents of `Tape.present` and the `Tape`; returns the gradients of
            `Tape.wanted`.
        leaves: arrays of any dtype.
    """
    patterns: set[tuple[int, ...]] = set()

    @jax.custom_vjp
    def function(*values: jax.Array) -> Rows:
        return run(values)

    def forward(*primals: Any) -> tuple[Rows, Any]:
        values = [primal.value for primal in primals]
        # Symbolic zeros tell which leaves are differentiated: a frozen one costs no reduction.
        wanted = [i for i, p in enumerate(primals) if p.perturbed and is_floating(p.value)]
        patterns.add(tuple(wanted))
        if len(patterns) > 1:
            _traced_once_for_several.set(True)
        tape = Tape(wanted)
        rows, residuals = record(values, tape)
        return rows, (tape, residuals)

    def backward(kept: tuple[Tape, list[jax.Array]], cotangents: Rows) -> tuple[Any, ...]:
        tape, residuals = kept
        tape.present = tuple([_is_cotangent(c) for c in row] for row in cotangents)
        present = tuple([c for c in row if _is_cotangent(c)] for row in cotangents)
        with _replaying():
            gradients = dict(zip(tape.wanted, replay(residuals, present, tape), strict=True))
        return tuple(gradients.get(index) for index in range(len(leaves)))

    function.defvjp(forward, backward, symbolic_zeros=True)
    try:
        return function(*leaves)
    except TypeError as error:
        if "forward-mode" in str(error):
            raise TypeError(
                "a module sharded with manual partitioning is differentiated in forward mode (jax.jvp, "
                'jacfwd, linearize). Use reverse mode, or partitioning="auto".'
            ) from error
        raise


_traced_once_for_several: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "traced_once_for_several", default=False
)
"""Whether one traced unit was differentiated by different leaves: asked only when jax fails."""


@jax.tree_util.register_static
class Tape:
    """What the forward pass knows at trace time and the backward pass needs."""

    def __init__(self, wanted: list[int]):
        self.wanted = wanted
        """Which leaves are differentiated."""
        self.present: tuple[list[bool], ...] = ()
        """Which results have a cotangent that is not known to be zero."""
        self.entered: list[int | None] = []
        """Which residuals are leaves themselves, that need no other place than they have; of a region."""
        self.program: Any = None
        """What else the forward pass leaves to the backward pass."""

    def record(self, body: Body, values: Sequence[jax.Array]) -> tuple[Rows, list[jax.Array]]:
        """Run the body forward; return its results and what the backward pass needs."""

        def function(wanted: list[jax.Array]) -> tuple[Rows, Rows]:
            merged = dict(zip(self.wanted, wanted, strict=True))
            rows = body([merged.get(index, value) for index, value in enumerate(values)])
            floating = tuple([x if is_floating(x) else None for x in row] for row in rows)
            return floating, tuple([None if is_floating(x) else x for x in row] for row in rows)

        wanted = [values[index] for index in self.wanted]
        floating, pullback, others = jax.vjp(function, wanted, has_aux=True)
        self._types = tuple([None if x is None else jax.typeof(x) for x in row] for row in floating)
        residuals, self._pullback = jax.tree.flatten(pullback)
        rows = tuple(
            [other if x is None else x for x, other in zip(*pair, strict=True)]
            for pair in zip(floating, others, strict=True)
        )
        return rows, residuals

    def record_named(self, body: Body, values: Sequence[jax.Array]) -> tuple[Rows, list[jax.Array]]:
        """As `record`; what a unit's policy names goes to the host."""
        treedefs: list[Any] = []

        def forward(values: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            rows, residuals = self.record(body, values)
            flat, treedef = jax.tree.flatten(rows)
            treedefs[:] = [treedef]
            return flat, residuals

        closed = jax.make_jaxpr(forward)(list(values))
        (treedef,) = treedefs
        residuals = closed.jaxpr.outvars[treedef.num_leaves :]
        self._places, self._on_host = waiting(residuals, values_in(closed.jaxpr))
        flat = jex.jaxpr_as_fun(closed)(*values)
        kept: dict[int, jax.Array] = {}
        for place, x in zip(self._places, flat[treedef.num_leaves :], strict=True):
            kept.setdefault(place, x if self._on_host[place] is None else to_host(x))
        return jax.tree.unflatten(treedef, flat[: treedef.num_leaves]), list(kept.values())

    def replay_named(self, kept: list[jax.Array], present: Rows) -> list[jax.Array]:
        """As `replay`, of what `record_named` keeps."""
        both = zip(kept, self._on_host, strict=True)
        kept = [x if value is None else to_device(x) for x, value in both]
        return self.replay([kept[place] for place in self._places], present)

    def replay(self, residuals: list[jax.Array], present: Rows) -> list[jax.Array]:
        """Run the backward pass; `present` has the cotangents that are not known to be zero."""
        cotangents = []
        for types, known, row in zip(self._types, self.present, present, strict=True):
            values = iter(row)
            cotangents.append([
                None if t is None else next(values) if is_known else zeros(t)
                for t, is_known in zip(types, known, strict=True)
            ])  # fmt: skip
        (gradients,) = jax.tree.unflatten(self._pullback, residuals)(tuple(cotangents))
        return gradients


@contextlib.contextmanager
def _replaying() -> Iterator[None]:
    """While a backward pass is traced."""
    try:
        with keep_recomputed_gathers():
            yield
    except AssertionError as error:  # a bare one of jax's
        if error.args or not _traced_once_for_several.get():
            raise
        raise NotImplementedError(
            "a remat (nnx.remat, nn.remat, jax.checkpoint) that was made once is called for several "
            "units, which differ in which of their inputs are differentiated; the first one's is data, "
            "say. JAX traces it once, and takes the residuals of all to be those of one. Make it anew "
            "for each, in the loop: nnx.remat(forward)(block, x)."
        ) from error


def _is_cotangent(value: Any) -> bool:
    return not isinstance(value, SymbolicZero) and value.dtype != jax.dtypes.float0
