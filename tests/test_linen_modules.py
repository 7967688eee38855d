"""Every way to write a Linen module: sharded, it has the variables, loss and gradients that it had."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from helpers import make_mesh, rows
from linen_models import (
    KEY,
    Layer,
    Scanned,
    abstract,
    assert_as_unsharded,
    assert_same,
    fast_compiler,
    filled,
    scan,
)

import jfsdp

X = rows(8, 16)


@pytest.fixture(scope="module", autouse=True)
def compiler():
    with fast_compiler():
        yield


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(S=8)


class Compact(nn.Module):
    """Names by number."""

    features: int = 16

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.features)(nn.tanh(nn.Dense(8)(x)))


class Own(nn.Module):
    """Parameters of its own, made in setup."""

    def setup(self):
        self.w = self.param("w", nn.initializers.normal(), (16, 16))

    def __call__(self, x):
        return x @ self.w


class Sequence(nn.Module):
    """A parent of whatever it is given."""

    parts: tuple[nn.Module, ...]

    def __call__(self, x):
        for part in self.parts:
            x = part(x)
        return x


class Twice(nn.Module):
    """A module called twice, and one of its methods besides."""

    inner: Any

    @nn.compact
    def __call__(self, x):
        inner = self.inner()
        return inner(nn.tanh(inner(x)))


class Argument(nn.Module):
    """A module that is handed one."""

    @nn.compact
    def __call__(self, layer, x):
        return nn.Dense(16)(layer(x))


class Handing(nn.Module):
    """The parent that hands it over."""

    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(16, name="shared")
        return Argument(name="argument")(layer, x) + layer(x)


class Outer(nn.Module):
    """nn.share_scope: the parameters of `inner` lie in its own scope."""

    def setup(self):
        self.inner = Compact()
        nn.share_scope(self, self.inner)

    def __call__(self, x):
        return self.inner(x)


class Tree(nn.Module):
    """Modules in dictionaries and lists."""

    def setup(self):
        self.parts = {"a": nn.Dense(16), "b": [nn.Dense(8), nn.Dense(16)]}

    def __call__(self, x):
        return self.parts["b"][1](self.parts["b"][0](self.parts["a"](x)))


class Ensemble(nn.Module):
    """nn.vmap: 8 members with parameters of their own on the same batch; their mean."""

    members: int = 8

    @nn.compact
    def __call__(self, x):
        settings: Any = {
            "in_axes": None,
            "variable_axes": {"params": 0},
            "split_rngs": {"params": True},
        }
        vmapped: Any = nn.vmap(Compact, axis_size=self.members, **settings)
        return jnp.mean(vmapped(name="members")(x), axis=0)


class Elements(nn.Module):
    """nn.vmap over the batch, the parameters shared."""

    @nn.compact
    def __call__(self, x):
        shared: Any = nn.vmap(Compact, variable_axes={"params": None}, split_rngs={"params": False})
        return shared()(x)


class Remat(nn.Module):
    """nn.remat of a class."""

    @nn.compact
    def __call__(self, x):
        return nn.remat(Compact)(name="remat")(x)


class Jitted(nn.Module):
    """nn.jit of a class."""

    @nn.compact
    def __call__(self, x):
        return nn.jit(Compact)(name="jit")(x)


class Branches(nn.Module):
    """nn.cond and nn.switch on values that are traced."""

    def setup(self):
        self.layer, self.other = nn.Dense(16), nn.Dense(16)

    def __call__(self, x):
        large = jnp.sum(x) > -1e9
        x = nn.cond(large, lambda m, x: m.layer(x), lambda m, x: -m.layer(x), self, x)
        if self.is_initializing():  # Flax wants every branch to be initialized
            self.other(x)
        return nn.switch(large + 0, [lambda m, x: x, lambda m, x: m.other(x)], self, x)


class Recurrent(nn.Module):
    """nn.RNN: a scan over time whose parameters are broadcast."""

    @nn.compact
    def __call__(self, x):
        return nn.RNN(nn.LSTMCell(16))(x)


class ScanOfFunction(nn.Module):
    """nn.scan of a function of the module."""

    @nn.compact
    def __call__(self, x):
        def body(self, x, _):
            return nn.tanh(nn.Dense(16, name="layer")(x)), None

        settings = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 8}
        return nn.scan(body, **settings)(self, x, None)[0]


class ScanOfShared(nn.Module):
    """nn.scan with broadcast parameters: the same layer 4 times."""

    @nn.compact
    def __call__(self, x):
        settings = {"variable_broadcast": "params", "split_rngs": {"params": False}, "length": 4}
        return nn.scan(Layer, **settings)(name="layer")(x)[0]


class ScanInScan(nn.Module):
    """Two loops, one in the other: parameters (4, 2, ...)."""

    @nn.compact
    def __call__(self, x):
        return scan(Group, 4)(name="groups")(x)[0]


class Group(nn.Module):
    """The outer loop's body."""

    @nn.compact
    def __call__(self, x):
        return scan(Layer, 2)(name="layers")(x)


class Tied(nn.Module):
    """The head is the first layer, whose kernel is read from its variables."""

    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(16, name="layer")
        return layer(x) @ layer.variables["params"]["kernel"].T


class Static(nn.Module):
    """Arguments that are no arrays: a flag, a string, a function, None."""

    @nn.compact
    def __call__(self, x, train=True, mode="tanh", function=jnp.tanh, mask=None):
        assert (train, mode, mask) == (True, "tanh", None)
        return function(nn.Dense(16)(x))


MODULES = {
    "compact": (Compact(), nn.Dense),
    "one unit": (Compact(), ()),
    "parameters in setup": (Own(), ()),
    "attributes": (Sequence((nn.Dense(8), Compact())), nn.Dense),
    "called twice": (Twice(Compact), Compact),
    "argument": (Handing(), (nn.Dense, Argument)),
    "argument of one unit": (Handing(), Argument),
    "share_scope": (Outer(), ()),
    "share_scope, unit": (Outer(), Compact),
    "dictionaries": (Tree(), nn.Dense),
    "vmap": (Ensemble(), ()),
    "vmap of units": (Ensemble(), Compact),
    "vmap over the batch": (Elements(), ()),
    "vmap over the batch, units": (Elements(), nn.Dense),
    "remat": (Remat(), Compact),
    "jit": (Jitted(), Compact),
    "jit inside a unit": (Jitted(), ()),
    "cond and switch": (Branches(), ()),
    "cond and switch of units": (Branches(), nn.Dense),
    "scan of a function": (ScanOfFunction(), ()),
    "scan of a function, unit": (ScanOfFunction(), nn.Dense),
    "scan of a shared layer": (ScanOfShared(), ()),
    "scan of a shared layer, unit": (ScanOfShared(), Layer),
    "scan in scan": (ScanInScan(), Group),
    "scan and remat": (Scanned(2, remat=True), ()),
    "static arguments": (Static(), nn.Dense),
    "Sequential": (nn.Sequential([nn.Dense(8), nn.tanh, nn.Dense(16)]), nn.Dense),
    "units that make parameters in setup": (Sequence((Own(), Own())), Own),
    "WeightNorm": (Sequence((nn.WeightNorm(nn.Dense(16)),)), ()),
    "tied by reading variables": (Tied(), ()),
}


@pytest.mark.parametrize(
    "module, units",
    [pytest.param(*case, id=id) for id, case in MODULES.items()],
)
def test_module_is_as_unsharded(mesh, module, units):
    assert_as_unsharded(module, mesh, X, units=units)


def test_recurrent_network_is_as_unsharded(mesh):
    x = jax.random.normal(KEY(1), (8, 5, 16))
    assert_as_unsharded(Recurrent(), mesh, x, units=nn.LSTMCell)


def test_arguments_that_are_no_arrays_are_passed_by_position_and_by_name(mesh):
    plain = Static()
    model = jfsdp.shard(plain, mesh, units=nn.Dense)
    variables = filled(abstract(plain, X))
    y = model.apply(variables, X, True, "tanh", mask=None, function=jnp.sin)
    assert_same(y, plain.apply(variables, X, function=jnp.sin))
