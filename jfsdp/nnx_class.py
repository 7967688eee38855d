"""Making an NNX module a unit by its class: a subclass of its own, whose forward is called as a unit's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from flax import nnx

from jfsdp.nnx_region import call_unit
from jfsdp.nnx_tree import UNIT, FSDPModule
from jfsdp.units import Unit

__all__ = ["make_unit", "swap_class", "unmake_unit"]


def make_unit(module: nnx.Module, unit: Unit) -> None:
    """Give a module its settings, and its class a forward that is called as a unit's."""
    setattr(module, UNIT, nnx.static(unit))
    swap_class(module, ("__call__",))


def swap_class(module: Any, methods: Iterable[str]) -> None:
    """Let these methods of a module, and no others, be called as a unit's."""
    own = type(module)
    original = own.__mro__[1] if issubclass(own, FSDPModule) else own
    object.__setattr__(module, "__class__", _unit_class(original, tuple(dict.fromkeys(methods))))


def unmake_unit(module: Any) -> None:
    """Give a unit its own class again, and take its settings away."""
    object.__setattr__(module, "__class__", type(module).__mro__[1])
    delattr(module, UNIT)


@functools.cache
def _unit_class(original: type, methods: tuple[str, ...]) -> type:
    body: dict[str, Any] = {name: _forward(getattr(original, name)) for name in methods}
    body |= {
        "_jfsdp_methods": methods,
        "__doc__": original.__doc__,
        "__module__": original.__module__,
    }
    return type(f"FSDP{original.__name__}", (original, FSDPModule), body)


def _forward(method: Callable) -> Callable:
    @functools.wraps(method)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call_unit(self, method, args, kwargs)

    return forward
