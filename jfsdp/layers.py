"""One layer of a scan, differentiated at trace time, and the arrays of all layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from jfsdp.activations import Value
from jfsdp.offload import is_on_host, to_device, to_host
from jfsdp.pullback import differentiable, is_floating, is_variable

__all__ = [
    "Derivative",
    "HostStack",
    "at",
    "chosen",
    "filled",
    "join",
    "put",
    "shards_at",
    "values_of",
]


@dataclasses.dataclass(frozen=True)
class HostStack:
    """What each layer of a loop leaves in host memory: of the last layer, which stands outside of it, apart.

    To put that one into the stack XLA for TPUs would make a copy of the stack, and of both a larger one.

    Attributes:
        length: the number of layers.
        stack: of all layers but the last; None if there are no others.
        last: of the last layer.
    """

    length: int
    stack: Any
    last: Any

    def at(self, number: Any) -> Any:
        """One layer; the last one by a number that is not traced."""
        if isinstance(number, int) and number == self.length - 1:
            return self.last
        return jax.lax.dynamic_index_in_dim(self.stack, number, keepdims=False)


class Derivative:
    """One layer, differentiated at trace time.

    Attributes:
        weights: the types of its whole weights.
        active: of its constants, carry, weights and other operands, whether they are differentiated.
        outputs: of the carry and of what is stacked, whether they have cotangents.
        needed: of its weights, whether the backward pass takes them whole.
        names: those of what is kept, by which it may wait on the host.
    """

    def __init__(
        self,
        layer: Callable[..., Any],
        given: Sequence[Sequence[Any]],
        active: Sequence[Sequence[bool]],
        dropped: Sequence[bool],
        named: Sequence[Sequence[Value]] | None,
    ):
        """Trace and differentiate a layer.

        Args:
            layer: takes constants, carry, whole weights and other operands; returns the carry and what is
                stacked.
            given: arrays or types of those four.
            active: for each whether it is differentiated.
            dropped: for each weight whether the backward pass gathers it again.
            named: for each the value that it is, if any waits on the host.
        """
        consts, carry, self.weights, xs = self._types = given
        self.active = active
        self.outputs = [[is_floating(x) for x in kind] for kind in jax.eval_shape(layer, *given)]

        def function(arguments: list[Any], rest: list[Any]) -> tuple[list[Any], list[Any]]:
            return _split(layer(*join(arguments, rest, active)), self.outputs)

        nothing = [[False] * len(x) for x in (consts, carry, self.weights)]
        again = [[True] * len(consts), nothing[1], dropped, [False] * len(xs)]
        present = [*nothing, [True] * len(xs)]
        arguments, rest = _split(given, active)
        self._pullback = differentiable(
            function,
            arguments,
            rest,
            [x for part in _split(again, active) for x in part],
            [x for part in _split(present, active) for x in part],
            None if named is None else [x for part in _split(named, active) for x in part],
        )
        self.names = self._pullback.names
        flags, count = self._pullback.needed, len(arguments)
        self.needed = join(flags[:count], flags[count:], active)[2]

    def forward(
        self, consts: list[Any], carry: list[Any], wholes: list[Any], xs: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """One layer: the carry; what is stacked, and after it what is kept."""
        split = _split((consts, carry, wholes, xs), self.active)
        results, others, kept = self._pullback.forward(*split)
        both = zip(kept, self._pullback.on_host, strict=True)
        kept = [x if value is None else to_host(x) for x, value in both]
        carry, stacked = join(results, others, self.outputs)
        return carry, [*stacked, *kept]

    def backward(
        self, kept: Sequence[Any], given: Sequence[Sequence[Any]], cotangents: list[Any]
    ) -> list[list[Any]]:
        """The gradients of the active constants, carry, weights and other operands."""
        flat = [x for part in _split(given, self.active) for x in part]
        needed = [x for x, is_one in zip(flat, self._pullback.needed, strict=True) if is_one]
        flat = self._pullback.backward(kept, needed, cotangents)
        types = chosen(
            [x for kind in self._types for x in kind], [x for k in self.active for x in k]
        )
        gradients = iter(zip(flat, types, strict=True))
        return [[_or_zeros(*next(gradients)) for is_one in kind if is_one] for kind in self.active]


def _or_zeros(gradient: Any, kind: Any) -> Any:
    return jnp.zeros(kind.shape, kind.dtype) if gradient is None else gradient


def _split(kinds: Sequence[Any], flags: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    flat = [x for kind in kinds for x in kind]
    first = [x for kind in flags for x in kind]
    return chosen(flat, first), chosen(flat, [not x for x in first])


def join(first: Sequence[Any], second: Sequence[Any], flags: Sequence[Any]) -> list[list[Any]]:
    """Lists of what is flagged, from the first, and of what is not, from the second."""
    ones, others = iter(first), iter(second)
    return [[next(ones) if x else next(others) for x in kind] for kind in flags]


def chosen(values: Any, flags: Any) -> list[Any]:
    """The values that are flagged."""
    return [x for x, is_one in zip(values, flags, strict=True) if is_one]


def values_of(env: Mapping[Any, Any], atoms: Sequence[Any]) -> list[Any]:
    """The arrays of some operands."""
    return [env[x] if is_variable(x) else jnp.asarray(x.val, x.aval.dtype) for x in atoms]


def at(stacks: Sequence[Any], number: Any) -> list[Any]:
    """One layer of each."""
    return [
        x.at(number)
        if isinstance(x, HostStack)
        else jax.lax.dynamic_index_in_dim(x, number, keepdims=False)
        for x in stacks
    ]


def shards_at(stacks: Sequence[Any], number: Any) -> list[Any]:
    """One layer of each stack of shards, laid out as a gather of its last dimension would not have it.

    XLA for GPUs would transpose the whole stack before the loop, and that of the gradients after it (H100, 8
    blocks of width 512, jax 0.12.0.1: 4 MB more).
    """
    return [
        to_device(x) if is_on_host(x) else with_layout_constraint(x, Layout(tuple(range(x.ndim))))
        for x in at(stacks, number)
    ]


def filled(kept: Sequence[Any], place: Callable[[Any], Any]) -> list[Any]:
    """Stacks with something else in place of each array of theirs."""
    return [
        dataclasses.replace(
            x, stack=None if x.stack is None else place(x.stack), last=place(x.last)
        )
        if isinstance(x, HostStack)
        else place(x)
        for x in kept
    ]


def put(stacks: Sequence[Any], values: Sequence[Any], number: Any) -> list[Any]:
    """Each stack with one layer in its place."""
    return [
        jax.lax.dynamic_update_index_in_dim(x, value, number, 0)
        for x, value in zip(stacks, values, strict=True)
    ]
