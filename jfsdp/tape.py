"""Code that says itself what its forward and its backward pass are.

A region does (`region`), because differentiating through its shard_map would come out wrong; so does a
schedule. The same is done round each unit that gathers for itself again in the backward pass: a remat policy
of ours over code that holds the user's own remat would overrule the user's. Once the code has been
differentiated inside, it cannot.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core as jex

from jfsdp.activations import values_in
from jfsdp.offload import to_device, to_host
from jfsdp.pullback import is_floating, waiting
from jfsdp.remat import keep_recomputed_gathers
from jfsdp.varying import zeros

__all__ = ["Body", "Rows", "Tape", "call_here", "differentiated_inside"]

Rows = tuple[list[Any], ...]
"""Results by how they leave the region: one list for each of `Region.rows`."""

Body = Callable[[Sequence[jax.Array]], Rows]


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
