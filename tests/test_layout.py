"""PartitionSpecs and shardings in the forms that jax compares equal, and arrays laid by them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jfsdp.layout import lay, named_sharding, spec_of, to_spec

P = PartitionSpec


def two_devices(kind: AxisType = AxisType.Auto) -> AbstractMesh:
    return AbstractMesh((2,), ("x",), axis_types=(kind,))


@pytest.mark.parametrize(
    ("entries", "spec"),
    [
        ((), ()),
        (((), ()), ()),
        ((("x",), ()), ("x",)),
        (((), ("x", "y")), (None, ("x", "y"))),
    ],
)
def test_spec_has_no_trailing_none_and_no_tuple_of_one(entries, spec):
    assert tuple(to_spec(entries)) == spec


@pytest.mark.parametrize(
    ("kind", "spec"), [(AxisType.Auto, ("x",)), (AxisType.Explicit, ("x", None, None))]
)
def test_sharding_is_spelled_as_a_compiled_step_returns_it(kind, spec):
    assert tuple(named_sharding(two_devices(kind), P("x"), 3).spec) == spec


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_step_returns_the_sharding_that_it_took(kind):
    """Another spelling would compile the second step again."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    sharding = named_sharding(mesh, P("x"), 2)
    array = lay(jnp.ones((8, 3)), sharding)
    step = jax.jit(lambda x: x + 1)
    assert step(array).sharding == sharding


def test_lay_gives_an_abstract_array_its_sharding():
    sharding = NamedSharding(two_devices(), P("x"))
    laid = lay(jax.ShapeDtypeStruct((4,), jnp.float32), sharding)
    assert (laid.shape, laid.dtype, laid.sharding) == ((4,), jnp.float32, sharding)


def test_lay_puts_an_array_on_the_mesh():
    sharding = NamedSharding(jax.make_mesh((8,), ("x",)), P("x"))
    assert lay(jnp.ones(8), sharding).sharding == sharding


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_lay_pins_a_traced_array(kind):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    sharding = NamedSharding(mesh, P("x"))
    with jax.set_mesh(mesh):
        laid = jax.jit(lambda: lay(jnp.ones(8), sharding))()
    assert laid.sharding.is_equivalent_to(sharding, 1)


def test_lay_passes_what_is_no_array():
    assert lay("text", NamedSharding(two_devices(), P())) == "text"


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_spec_of_a_laid_array_is_its_spec(kind):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    assert spec_of(jax.device_put(jnp.ones(8), NamedSharding(mesh, P("x")))) == P("x")


def test_spec_of_an_abstract_array_is_its_spec():
    sharding = NamedSharding(two_devices(), P("x"))
    assert spec_of(jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding)) == P("x")


def test_spec_of_a_traced_array_is_that_of_its_type():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    seen = []
    array = jax.device_put(jnp.ones(8), NamedSharding(mesh, P("x")))
    jax.eval_shape(lambda x: seen.append(spec_of(x)) or x, array)
    assert seen == [P("x")]


@pytest.mark.parametrize("array", [jnp.ones(8), jax.ShapeDtypeStruct((8,), jnp.float32), 1.0])
def test_spec_of_what_lies_on_no_mesh_is_none(array):
    assert spec_of(array) is None


def test_spec_of_a_replicated_array_is_none():
    mesh = jax.make_mesh((8,), ("x",))
    assert spec_of(jax.device_put(jnp.ones(8), NamedSharding(mesh, P(None)))) is None
