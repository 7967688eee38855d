"""The Flax Linen front end: `shard` returns a module that is used as the one it was given."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from flax import linen as nn

from jfsdp.ignored import Ignored
from jfsdp.linen_call import call_module
from jfsdp.linen_init import describe_state, initialize
from jfsdp.linen_plan import FSDPModule, Settings, attributes
from jfsdp.selectors import matcher

__all__ = ["describe_state", "shard_module", "unsharded_module"]


def shard_module(module: Any, settings: Settings) -> Any:
    """A module, or a class of modules, that is called as units.

    Raises: see `jfsdp.shard`.
    """
    matcher(settings.units)  # refuses what selects nothing it could
    Ignored(settings.ignored_params)  # likewise
    if isinstance(module, type):
        _refuse_twice(module, module.__name__)
        return _unit_class(module, settings)
    name = type(module).__name__
    _refuse_twice(type(module), name)
    if module.parent is not None or module.scope is not None:
        raise ValueError(
            f"jfsdp.shard: this {name} belongs to another module already. Shard the class and make the "
            f"instance of that:\n  jfsdp.shard({name}, ...)(...)\nor shard the outermost module, with "
            f"units={name}."
        )
    return _unit_class(type(module), settings)(**attributes(module))


def _refuse_twice(kind: type, name: str) -> None:
    if issubclass(kind, FSDPModule):
        raise ValueError(
            f"{name} is sharded already: jfsdp.shard was applied to it before. Apply it once."
        )


# --------------------------------------------------------------------------------------------------
# Classes


@functools.cache
def _unit_class(original: type[nn.Module], settings: Settings) -> Any:
    """A subclass under the same name, which Flax names parameters by, whose methods are called as units'."""
    # No argument of its `__init__`: nn.remat and its like hand all of these to the class that they wrap.
    field = dataclasses.field(default=settings, repr=False, init=False)
    body: dict[str, Any] = {
        name: _unit_method(getattr(original, name)) for name in _methods(original)
    }
    body |= {
        "__annotations__": {"jfsdp": Any},
        "__doc__": original.__doc__,
        "__module__": _own_module(original),
        "__qualname__": original.__qualname__,
        "jfsdp": field,
    }
    kind: Any = type(original)
    return kind(original.__name__, (_Initialized, original, FSDPModule), body)


def _own_module(kind: type) -> str:
    # Of a class that nn.remat or another transform made the module is that of Flax, by which they are told.
    return next(k.__module__ for k in kind.__mro__ if k.__module__ != nn.transforms.__name__)


def _methods(original: type[nn.Module]) -> Iterator[str]:
    for name, value in inspect.getmembers(original, inspect.isfunction):
        static = isinstance(inspect.getattr_static(original, name), staticmethod)
        private = name.startswith("_") and name != "__call__"
        of_flax = name == "setup" or getattr(nn.Module, name, None) is value
        if not (static or private or of_flax):
            yield name


def _unit_method(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)  # Flax's own mark with it: the method inside is what Flax shall see
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call_module(self, method, args, kwargs)

    setattr(called, _WRAPPED, method)
    return called


_WRAPPED = "jfsdp_method"
_ORIGINAL = 2
"""Where the user's class stands in the method resolution order of ours."""


def _method_argument(module: nn.Module, method: Any) -> Any:
    """What `init` and `apply` are given as `method=`, so that it is called as a unit's."""
    if isinstance(method, str) and isinstance(getattr(module, method), nn.Module):
        name = method
        return _unit_method(lambda self, *args, **kwargs: getattr(self, name)(*args, **kwargs))
    if method is None or isinstance(method, str):
        return method
    function = getattr(method, "__func__", method)
    return method if hasattr(function, _WRAPPED) else _unit_method(function)


def _initialize(
    module: Any, flax_init: Callable[..., Any], rngs: Any, args: tuple, given: dict
) -> Any:
    """`init_with_output` of a sharded module, by Flax's own or by a part of it."""
    settings = {"method": _method_argument(module, given.pop("method", None))}
    settings |= {name: given.pop(name) for name in _OF_FLAX if name in given}
    return initialize(module, functools.partial(flax_init, **settings), rngs, args, given)


_OF_FLAX = ("mutable", "capture_intermediates")


class _Initialized:
    """How a sharded module differs where Flax calls it from outside."""

    jfsdp: Settings

    def apply(self: Any, variables: Any, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        method = _method_argument(self, method)
        return super().apply(variables, *args, method=method, **kwargs)  # pyright: ignore

    def init_with_output(self: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        return _initialize(self, super().init_with_output, rngs, args, kwargs)  # pyright: ignore

    def init(self: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        with_output = super().init_with_output  # pyright: ignore

        def without_output(*args: Any, **kwargs: Any) -> Any:  # so that it is not computed
            return None, with_output(*args, **kwargs)[1]

        return _initialize(self, without_output, rngs, args, kwargs)[1]

    def __reduce__(self: Any) -> Any:  # the class was made here, and can be found nowhere
        return shard_module, (unsharded_module(self), self.jfsdp)


def unsharded_module(module: Any) -> nn.Module:
    """A module as it was before `shard`."""
    original: Any = type(module).__mro__[_ORIGINAL]
    return original(**attributes(module))
