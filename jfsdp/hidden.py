"""What stands for a sharded parameter in a region while its unit is not being called."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jfsdp.pieces import OUTERMOST, used_name
from jfsdp.placement import Placement
from jfsdp.units import Unit
from jfsdp.unshard import unshard
from jfsdp.weights import Weight

__all__ = ["Absent", "Shard", "gathered_types"]


class _Sharded:
    """A parameter whose unit is not being called.

    Computing with it would silently use 1/F of the weight, so it is no array and says what to do.
    """

    placement: Placement

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter, as its own unit sees it."""
        return self.placement.whole_shape

    @property
    def ndim(self) -> int:
        """Number of dimensions of the whole parameter."""
        return len(self.placement.shape)

    @property
    def dtype(self) -> Any:
        """Storage dtype."""
        return self.placement.dtype

    def __jax_array__(self) -> jax.Array:
        raise TypeError(self._text())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TypeError(self._text())

    def _text(self) -> str:
        return (
            f"{self.placement.path} (shape {self.placement.shape}) is used while it is sharded: it "
            "belongs to a unit that is not being called. Either\n"
            "  1. call that module's forward instead of reading its parameter, or\n"
            "  2. if another of its methods uses it, jfsdp.register_forward_method(module, name), or\n"
            "  3. leave the module out of `units`, so that the caller's unit gathers it."
        )

    def __repr__(self) -> str:
        return self._text()  # jax shows it where it refuses to make an array of it

    def _refuse(self, *_: Any) -> Any:
        raise TypeError(self._text())

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __matmul__ = __rmatmul__ = __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _refuse
    __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse
    __getitem__ = __len__ = __iter__ = __bool__ = __int__ = __float__ = __array__ = _refuse
    __array_ufunc__ = None  # numpy leaves `x @ shard` to __rmatmul__
    __hash__ = object.__hash__


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Shard(_Sharded):
    """What a sharded parameter holds inside a region while its unit is not being called.

    Attributes:
        array: this device's shard.
        placement: where the whole parameter lies.
        whole_gradient: where the gradient of the whole weight goes, unreduced: an array of the weight's shape
            whose values nobody reads. None: it is reduced and goes to `array`.
        partial: whether that reduction stops at the scatter. Then `array` is of the dtype to accumulate in.
        group: None, or the number of its unit in the schedule of the outermost call, which has gathered it:
            `array` is the whole weight.
    """

    array: jax.Array
    placement: Placement = dataclasses.field(metadata={"static": True})
    whole_gradient: jax.Array | None = None
    partial: bool = dataclasses.field(default=False, metadata={"static": True})
    group: int | None = dataclasses.field(default=None, metadata={"static": True})

    def unsharded(self, unit: Unit) -> jax.Array:
        """The whole weight, in the call of its unit."""
        if self.group == OUTERMOST:
            return self.array
        if self.group is not None:
            return checkpoint_name(self.array, used_name(self.group))
        how = unit.gathering(self.placement, self.array, partial=self.partial)
        return unshard(self.array, how, self.whole_gradient)

    def weight(self, unit: Unit, is_root: bool, group: int, places: Shard) -> Weight | None:
        """What a schedule has to know of it; None if there is nothing to gather.

        Args:
            unit: the unit that owns it.
            is_root: whether that is the outermost one.
            group: its number.
            places: a shard with the places of its arrays among the leaves of the call instead of them.
        """
        how = unit.gathering(self.placement, self.array, partial=self.partial)
        if not how.dims:
            return None
        target = self.whole_gradient
        return Weight(
            index=places.array,  # pyright: ignore[reportArgumentType]
            how=how,
            group=group,
            again=unit.reshards(is_root),
            whole_gradient=places.whole_gradient,  # pyright: ignore[reportArgumentType]
            gradient_dtype=None if target is None else target.dtype,
        )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Absent(_Sharded):
    """What stands for a `Shard` where not even the array of its part may be seen."""

    placement: Placement


def gathered_types(shards: Iterable[Shard], unit: Unit) -> tuple[list[Any], list[Any]]:
    """Types of what a unit's gathers of these shards take, and of the whole weights that come out."""
    gathered, wholes = [], []
    for shard in shards:
        how = unit.gathering(shard.placement, shard.array, partial=shard.partial)
        if how.dims and shard.group is None:
            *taken, whole = unit.gathered_types(how, shard.array)
            gathered += taken
            wholes.append(whole)
    return gathered, wholes
