"""The replaceable collectives: the seed's abstract interface, and the defaults behind it."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import shard_refused
from jax.sharding import AxisType, PartitionSpec

import jfsdp
from jfsdp.comm import DefaultAllGather, DefaultReduceScatter

P = PartitionSpec


class Allocates(jfsdp.Comm):
    """The least concrete Comm: it takes the base class's body."""

    def allocate(self, size, *, dtype, device):
        return super().allocate(size, dtype=dtype, device=device)


def parameters(function) -> list[tuple[str, bool, object]]:
    """Name, whether keyword-only, default of each parameter after self."""
    found = list(inspect.signature(function).parameters.values())[1:]
    return [(p.name, p.kind is p.KEYWORD_ONLY, p.default) for p in found]


NO_DEFAULT = inspect.Parameter.empty


@pytest.mark.parametrize(
    ("kind", "methods"),
    [
        (jfsdp.Comm, {"allocate"}),
        (jfsdp.AllGather, {"allocate", "__call__"}),
        (jfsdp.ReduceScatter, {"allocate", "__call__"}),
    ],
)
def test_interface_is_abstract(kind, methods):
    assert kind.__abstractmethods__ == methods
    with pytest.raises(TypeError, match="abstract"):
        kind()


@pytest.mark.parametrize("kind", [jfsdp.AllGather, jfsdp.ReduceScatter])
def test_collectives_are_comms(kind):
    assert issubclass(kind, jfsdp.Comm)


def test_allocate_has_the_seed_s_signature():
    assert parameters(jfsdp.Comm.allocate) == [
        ("size", False, NO_DEFAULT),
        ("dtype", True, NO_DEFAULT),
        ("device", True, NO_DEFAULT),
    ]


def test_wire_takes_what_allocate_does_and_the_group():
    assert parameters(jfsdp.Comm.wire) == [
        ("size", False, NO_DEFAULT),
        ("dtype", True, NO_DEFAULT),
        ("group", True, NO_DEFAULT),
    ]


def test_all_gather_has_the_seed_s_signature():
    assert parameters(jfsdp.AllGather.__call__) == [
        ("output_tensor", False, NO_DEFAULT),
        ("input_tensor", False, NO_DEFAULT),
        ("group", False, NO_DEFAULT),
        ("async_op", False, False),
    ]


def test_reduce_scatter_has_the_seed_s_signature():
    assert parameters(jfsdp.ReduceScatter.__call__) == [
        ("output_tensor", False, NO_DEFAULT),
        ("input_tensor", False, NO_DEFAULT),
        ("group", False, NO_DEFAULT),
        ("op", False, NO_DEFAULT),
        ("async_op", False, False),
    ]


def test_base_body_describes_the_buffer():
    buffer = Allocates().allocate([4, 3], dtype=jnp.bfloat16, device=None)
    assert buffer == jax.ShapeDtypeStruct((4, 3), jnp.bfloat16)


def test_wire_states_nothing_unless_it_is_overridden():
    assert Allocates().wire((4, 3), dtype=jnp.float32, group={"fsdp": 8}) is None


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize(
    "value", ["int8", DefaultAllGather, object()], ids=["text", "class", "other"]
)
def test_what_is_no_collective_is_refused_by_shard(name, value):
    kind = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter"}[name]
    text = shard_refused(TypeError, nnx.Linear(8, 8, rngs=nnx.Rngs(0)), **{name: value})
    assert text == f"{name} must be a jfsdp.{kind}, got {value!r}."


@dataclasses.dataclass
class Unhashable(DefaultAllGather, DefaultReduceScatter):
    """A dataclass that is not frozen: Python takes its hash away."""

    block: int = 3


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
def test_a_collective_that_jit_cannot_hash_is_refused_by_shard(name):
    text = shard_refused(TypeError, nnx.Linear(8, 8, rngs=nnx.Rngs(0)), **{name: Unhashable()})
    assert text.startswith(f"{name} must be hashable, for it is part of the module's structure")
    assert "but Unhashable is not" in text
    assert text.endswith("Make it a frozen dataclass of hashable fields, or leave __eq__ alone.")


@pytest.mark.parametrize("kind", [DefaultAllGather, DefaultReduceScatter])
def test_defaults_allocate_as_the_base_does(kind):
    buffer = kind().allocate((4, 3), dtype=jnp.float32, device=None)
    assert buffer == jax.ShapeDtypeStruct((4, 3), jnp.float32)


def per_device(function, x, in_spec, out_spec):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=in_spec, out_specs=out_spec, check_vma=False)
    )(x)


def described(shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize("group", [("a", "b"), ("b", "a")])
def test_default_all_gather_concatenates_in_the_group_s_order(group):
    """The first axis of the group varies slowest."""
    x = jnp.arange(16.0).reshape(8, 2)
    gather = DefaultAllGather()
    whole = per_device(lambda s: gather(described((8, 2)), s, group), x, P(group), P())
    np.testing.assert_array_equal(whole, x)


@pytest.mark.parametrize("group", [("a", "b"), ("b", "a")])
@pytest.mark.parametrize(("op", "factor"), [("sum", 8), ("avg", 1)])
def test_default_reduce_scatter_reduces_and_splits_in_the_group_s_order(group, op, factor):
    x = jnp.arange(16.0).reshape(8, 2)
    scatter = DefaultReduceScatter()
    parts = per_device(lambda g: scatter(described((1, 2)), g, group, op), x, P(), P(group))
    np.testing.assert_array_equal(parts, factor * x)


def test_default_reduce_scatter_sums_different_gradients():
    x = jnp.arange(64.0).reshape(8, 8)
    scatter = DefaultReduceScatter()
    parts = per_device(
        lambda g: scatter(described((1,)), g[0], ("a", "b"), "sum"), x, P(("a", "b")), P(("a", "b"))
    )
    np.testing.assert_array_equal(parts, x.sum(axis=0))


def test_unknown_op_is_refused():
    with pytest.raises(ValueError, match="op must be 'sum' or 'avg', got 'max'"):
        DefaultReduceScatter()(described((1,)), jnp.ones(8), ("a",), "max")


def test_async_all_gather_is_refused():
    with pytest.raises(ValueError, match=r"DefaultAllGather: async_op=True .* Leave it False"):
        DefaultAllGather()(described((8,)), jnp.ones(1), ("a",), True)


def test_async_reduce_scatter_is_refused():
    with pytest.raises(ValueError, match=r"DefaultReduceScatter: async_op=True .* Leave it False"):
        DefaultReduceScatter()(described((1,)), jnp.ones(8), ("a",), "sum", async_op=True)
