"""`jit`: `nnx.jit` that walks the objects once, not in every call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from jfsdp.donated import abstract_put, apart, place, settled, shardings
from jfsdp.nnx_objects import Structure, Walk, check_result, differences, holds_objects

__all__ = ["Jitted", "jit"]


def jit(
    fun: Callable[..., Any] | None = None,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    donate: bool = True,
    compiler_options: Mapping[str, Any] | None = None,
) -> Any:
    """Compile a step over NNX objects, so that calling it costs the host what `jax.jit` of flat arrays costs.

    Written and called as with `nnx.jit`: `step(model, optimizer, batch)` updates the objects, and they are
    up to date after every call: there is nothing to write back before a checkpoint or after the loop.
    `nnx.jit` walks all objects in every call, in Python. Here the first call walks them, and remembers their
    Variables and what else they hold. The next call with the same objects compares what they hold by
    identity, hands the arrays of the Variables to `jax.jit`, and puts the results back into them. If an
    attribute was set in between (`model.eval()`, a new layer), or an array lies elsewhere, it walks them
    again, as it does for other objects.

    Args:
        fun: the step, `fun(*args, **kwargs)`. Arguments with Variables in them (modules, optimizers, metrics,
            `nnx.Rngs`, State) are state, wherever they stand; the others go to `jax.jit` as they are. Pass
            modules as arguments of their own: a list that is made anew for each call is walked each time.
        static_argnums: arguments that the program is compiled for, by position. They have to be hashable.
        static_argnames: the same by name.
        donate: whether the program writes the new arrays of the state in place of the old. Whoever kept
            one of the old arrays, rather than its Variable, finds it deleted ("Array has been deleted").
            False keeps them, as `nnx.jit` does, and leaves alone what `fun` does not change: for functions
            that only read.
        compiler_options: as in `jax.jit`.

    Returns:
        A function like `fun`. It has `lower`, with which `jfsdp.inspect(step, model, optimizer, batch)`
        reads it. Without `fun`, a decorator.

    Raises:
        TypeError: `fun` is no function, or returns a module or one of the arguments' Variables; no argument
            holds Variables; what is static is not hashable.
        ValueError: `fun` changes more of the objects than the arrays of their Variables (it sets an
            attribute, or leaves a new Variable in them); a Variable is a reference (`ref=True`,
            `hijax=True`); a static argument is none of the function's.

    The state comes back in the shardings and kinds of memory that it came in, so that the next call finds
    the same program. An array that is at home nowhere (an optimizer's count, a model that was not sharded)
    is put on every device of the mesh that the others lie on, if it is to be donated.

    Memory: all of the state is updated in place, with `donate`. An array that two Variables hold is copied
    first. The objects are not kept alive.

    Communication: that of `fun`.

    Host time per call: `tests/benchmarks/host_time.py`.

    Reference: Flax's guide "Performance considerations", of which this is the functional training loop.

    Example:
        >>> import jax.numpy as jnp, jfsdp, optax
        >>> from flax import nnx
        >>> model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.Param)
        >>> @jfsdp.jit
        ... def step(model, optimizer, x):
        ...     loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        ...     optimizer.update(model, grads)
        ...     return loss
        >>> losses = [float(step(model, optimizer, jnp.ones((8, 4)))) for _ in range(3)]
        >>> losses[0] > losses[1] > losses[2], int(optimizer.step[...])
        (True, 3)
    """
    if fun is None:
        return functools.partial(
            jit,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate=donate,
            compiler_options=compiler_options,
        )
    if not callable(fun):
        raise TypeError(f"jfsdp.jit takes a function, got {type(fun).__name__}.")
    numbers = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    return Jitted(fun, numbers, names, donate, compiler_options)


class Jitted:
    """What `jit` returns: a step that keeps the walks over the objects it was called with."""

    def __init__(
        self,
        fun: Callable[..., Any],
        static_argnums: Sequence[int],
        static_argnames: Sequence[str],
        donate: bool,
        compiler_options: Mapping[str, Any] | None,
    ):
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._names = _parameters(fun)[0]
        self._static = _static_keys(fun, static_argnums, static_argnames)
        self._donate = donate
        self._options = None if compiler_options is None else dict(compiler_options)
        self._known: list[_Known] = []
        self._programs: dict[Any, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step and update the objects among its arguments."""
        items = _items(args, kwargs)
        known = next((known for known in self._known if known.is_of(items)), None)
        values = None if known is None else known.walk.values()
        if known is None or values is None or not known.holds(values):
            known, values = self._meet(items, len(args), known)
        walk, rest = known.walk, {key: items[key] for key in known.rest}
        try:
            out, new = known.program(values, walk.arrays, rest)
        except _NotWalkedError:
            self._forget(walk)
            return self(*args, **kwargs)
        except jax.errors.JaxRuntimeError:
            each_once = apart(values)
            if each_once is values:
                raise
            # Two Variables were set to one array since the last call; nothing has run yet.
            out, new = known.program(each_once, walk.arrays, rest)
        walk.put_back(new, whole=self._donate)
        return out

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The program of a call, lowered: `trace(...).lower()`."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """The program of a call, as `jax.jit(fun).trace` gives it; the objects stay as they are.

        Args:
            *args: as in the call; objects and arrays may be abstract (`jax.ShapeDtypeStruct`).
            **kwargs: likewise.
        """
        items = _items(args, kwargs)
        known, values = self._walked(items, len(args), abstract_put)
        rest = {key: items[key] for key in known.rest}
        return known.program.trace(values, known.walk.arrays, rest)

    def _meet(
        self, items: dict[str, Any], positional: int, before: _Known | None
    ) -> tuple[_Known, list[Any]]:
        """Walk a call's objects and remember it, in place of what was known of them."""
        if before is not None:
            self._forget(before.walk)
        known, values = self._walked(items, positional, jax.device_put)
        self._known.insert(0, known)
        return known, apart(values) if self._donate else values

    def _forget(self, walk: Walk) -> None:
        self._known = [known for known in self._known if known.walk is not walk]

    def _walked(
        self, items: dict[str, Any], positional: int, put: Callable[[Any, NamedSharding], Any]
    ) -> tuple[_Known, list[Any]]:
        """A call's objects walked, and what their Variables hold, where it will stay."""
        static = {key: items[key] for key in sorted(self._static & items.keys())}
        others = {key: item for key, item in items.items() if key not in static}
        objects = {key: item for key, item in others.items() if holds_objects(item)}
        if not objects:
            raise TypeError(
                "jfsdp.jit: no argument holds modules or Variables of NNX: there is nothing to update. A "
                "step over arrays or a TrainState of Linen is for jax.jit(step, donate_argnums=...)."
            )
        rest = {key: item for key, item in others.items() if key not in objects}
        walk = Walk(objects, self._forget)
        values = settled(walk.values(), rest, put) if self._donate else walk.values()
        program = self._program(walk.structure, static, positional, jax.tree.map(place, values))
        known = _Known(walk, program, frozenset(items), static, tuple(rest), shardings(values))
        return known, values

    def _program(
        self, structure: Structure, static: dict[str, Any], positional: int, places: list[Any]
    ) -> Any:
        leaves = jax.tree.leaves(places, is_leaf=lambda where: where is None)
        key = (structure, positional, tuple(static.items()), tuple(leaves))
        try:
            program = self._programs.get(key)
        except TypeError as error:
            raise TypeError(
                "jfsdp.jit: static arguments, and what modules hold beside arrays, have to be hashable, and "
                f"something is not: {error}."
            ) from error
        if program is None:
            program = self._programs[key] = jax.jit(
                self._pure(structure, static, positional),
                donate_argnums=(0,) if self._donate else (),
                out_shardings=(None, places),
                compiler_options=self._options,
            )
        return program

    def _pure(
        self, structure: Structure, static: Mapping[str, Any], positional: int
    ) -> Callable[..., Any]:
        """The step over arrays. It must not hold a walk: programs outlive the objects."""

        def named(objects: Mapping[str, Any]) -> dict[str, Any]:
            names = dict(zip(map(str, count()), self._names, strict=False))
            return {names.get(key, key): item for key, item in objects.items()}

        def pure(values: list[Any], arrays: list[Any], rest: dict[str, Any]) -> Any:
            if holds_objects(rest):
                raise _NotWalkedError
            objects = structure.objects(values, arrays)
            items = {**objects, **rest, **static}
            args = [items.pop(str(number)) for number in range(positional)]
            out = self._fun(*args, **items)
            after, variables, arrays_after = Structure.of(objects)
            changed = [x for x, y in zip(arrays, arrays_after, strict=False) if x is not y]
            if after != structure or changed:
                found = differences(named(structure.objects(values, arrays)), named(objects))
                raise ValueError(_CHANGED.format(pure.__name__, "\n  ".join(found[:8])))
            check_result(out, objects)
            new = [variable.get_raw_value() for variable in variables]
            if not self._donate:
                new = [
                    None if x is y and isinstance(x, jax.Array) else y
                    for x, y in zip(values, new, strict=True)
                ]
            return out, new

        pure.__name__ = pure.__qualname__ = getattr(self._fun, "__name__", "step")
        return pure


_CHANGED = (
    "jfsdp.jit: {} changes more of its arguments than the arrays of their Variables:\n  {}\n"
    "Do that outside of the step (model.eval(), a new layer), undo it before the step returns (nnx.pop what "
    "Module.sow left), keep a number that changes in an nnx.Variable, or jit the step with nnx.jit."
)


class _NotWalkedError(Exception):
    """An argument holds objects that held none when the call was walked."""


class _Known(NamedTuple):
    """What is kept of a call, for the next one with the same objects."""

    walk: Walk
    program: Any
    keys: frozenset[str]
    static: Mapping[str, Any]
    rest: tuple[str, ...]
    lying: list[Any]

    def is_of(self, items: Mapping[str, Any]) -> bool:
        return (
            items.keys() == self.keys
            and self.walk.is_of(items)
            and all(items[key] == value for key, value in self.static.items())
        )

    def holds(self, values: list[Any]) -> bool:
        """Whether the objects hold what they held, and their arrays (`values`) lie where they lay."""
        return self.walk.holds() and self.lying == shardings(values)


def _items(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call, the positional ones under their number."""
    return {**dict(zip(map(str, count()), args, strict=False)), **kwargs}


def _parameters(fun: Callable[..., Any]) -> tuple[list[str], list[str], bool]:
    """Names of those that can be given by position, of all, and whether it takes others too."""
    try:
        found = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # A builtin.
        return [], [], True
    kind = inspect.Parameter
    numbered = [p.name for p in found if p.kind <= kind.POSITIONAL_OR_KEYWORD]
    takes_more = any(p.kind in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD) for p in found)
    return numbered, [p.name for p in found], takes_more


def _static_keys(
    fun: Callable[..., Any], numbers: Sequence[int], static_names: Sequence[str]
) -> frozenset[str]:
    """The keys of `_items` under which static arguments may come."""
    names, everything, takes_more = _parameters(fun)
    at = [number + len(names) if number < 0 else number for number in numbers]
    missing = [*(n for n in at if not 0 <= n < len(names)), *(set(static_names) - {*everything})]
    if missing and not takes_more:
        raise ValueError(
            f"jfsdp.jit: the static arguments {missing} are none of the function's, which are {everything}."
        )
    at += [names.index(name) for name in static_names if name in names]
    return frozenset([*map(str, at), *(names[n] for n in at if n < len(names)), *static_names])
