"""Boxes round parameters while a Linen module is initialized abstractly: along what they are stacked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax.core import meta

from jfsdp.linen_plan import unboxed

__all__ = ["Track", "axes_of", "tracked"]


# Flax tells boxes, and nobody else, which axis nn.scan and nn.vmap stack a parameter along.
@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class Track(meta.AxisMetadata[Any]):
    """Round a parameter, and round the user's own box, while a module is initialized abstractly."""

    value: Any
    axes: tuple[int, ...] = ()
    """The axes along which it was stacked so far, first the innermost."""

    def unbox(self) -> Any:
        """The parameter."""
        return self.value

    def replace_boxed(self, val: Any) -> Track:
        """A box like this one round another array."""
        return dataclasses.replace(self, value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> Track:
        """A box that was stacked once more."""
        return Track(meta.add_axis(self.value, index, params), (*self.axes, index))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> Track:
        """A box of one layer."""
        return Track(meta.remove_axis(self.value, index, params), self.axes[:-1])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(unboxed(self), name)

    def __jax_array__(self) -> Any:
        return unboxed(self)

    def tree_flatten_with_keys(self) -> Any:
        """For jax.tree."""
        return ((jax.tree_util.GetAttrKey("value"), self.value),), self.axes

    @classmethod
    def tree_unflatten(cls, axes: Any, children: Any) -> Track:
        """For jax.tree."""
        return cls(children[0], axes)


def _as_the_array(name: str) -> Callable[..., Any]:
    def method(self: Track, *args: Any) -> Any:
        return getattr(unboxed(self), name)(*args)

    return method


# Modules may read parameters of others as arrays while this is round them.
for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "matmul", "rmatmul", "truediv", "rtruediv"),
    *("pow", "rpow", "neg", "pos", "abs", "getitem", "len", "iter", "lt", "le", "gt", "ge"),
):
    setattr(Track, f"__{_name}__", _as_the_array(f"__{_name}__"))


def tracked(value: Any) -> Any:
    """A parameter, or each of those in dicts, in a box."""
    if isinstance(value, Mapping):
        return {name: tracked(inner) for name, inner in value.items()}
    return value if isinstance(value, Track) else Track(value)


def axes_of(leaf: Any) -> tuple[int, ...]:
    """The axes along which a parameter was stacked, first the innermost."""
    return leaf.axes if isinstance(leaf, Track) else ()
