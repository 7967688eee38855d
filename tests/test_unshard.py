"""The one primitive in hand-written shard_maps: values, gradients, the order of the casts."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jfsdp.comm import DefaultAllGather, DefaultReduceScatter
from jfsdp.unshard import Gathering, unshard

P = PartitionSpec
ALL = ("r", "s")


def mesh(r: int = 2, s: int = 4, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((r, s), ALL, axis_types=(kind,) * 2)


def how(dims: Any, summed: tuple[str, ...] = (), **other: Any) -> Gathering:
    """float32 throughout unless `other` says otherwise."""
    dtypes = dict.fromkeys(("dtype", "param_dtype", "reduce_dtype"), jnp.dtype("float32"))
    return Gathering(path="block.w", dims=dims, summed_axes=summed, **(dtypes | other))


def spec_of(dims: Any, ndim: int) -> P:
    return P(*(dict(dims).get(dim) for dim in range(ndim)))


def unsharded(gathering: Gathering, shape: tuple[int, ...], on: jax.sharding.Mesh | None = None):
    """(whole weight of every device, gradient at rest) as a function of (weight, cotangents)."""
    on = on or mesh()

    def local(shard: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        whole, pullback = jax.vjp(lambda shard: unshard(shard, gathering), shard)
        return whole[None], pullback(cotangent[0])[0]

    spec = spec_of(gathering.dims, len(shape))
    mapped = jax.shard_map(
        local, mesh=on, in_specs=(spec, P(ALL)), out_specs=(P(ALL), spec), check_vma=False
    )
    return jax.jit(mapped)


def weight_and_cotangents(shape: tuple[int, ...], dtype: Any = jnp.float32) -> tuple[Any, Any]:
    """Small whole numbers: every sum of them is exact in bfloat16 too."""
    size = math.prod(shape)
    weight = np.arange(size).reshape(shape) % 31
    cotangents = np.arange(8 * size).reshape(8, *shape) % 7
    return jnp.asarray(weight, dtype), jnp.asarray(cotangents, jnp.float32)


CASES = {
    "8 shards, first dimension": ((1, 8), (8, 3), ((0, ("s",)),), ()),
    "8 shards, second dimension": ((1, 8), (3, 16), ((1, ("s",)),), ()),
    "2 replicas of 4 shards": ((2, 4), (3, 8), ((1, ("s",)),), ("r",)),
    "two axes on one dimension": ((2, 4), (5, 16), ((1, ("r", "s")),), ()),
    "two axes on one dimension, turned": ((2, 4), (16, 5), ((0, ("s", "r")),), ()),
    "two axes on two dimensions": ((2, 4), (6, 8), ((0, ("r",)), (1, ("s",))), ()),
    "two axes on two dimensions, turned": ((2, 4), (8, 3, 6), ((0, ("s",)), (2, ("r",))), ()),
    "replicated": ((2, 4), (5,), (), ("r", "s")),
    "replicated scalar": ((2, 4), (), (), ("r", "s")),
}  # mesh, shape, dims, summed axes


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def case(request):
    """Weight, cotangents, and what every device has and what rests after one pass over them."""
    (r, s), shape, dims, summed = request.param
    weight, cotangents = weight_and_cotangents(shape)
    run = unsharded(how(dims, summed), shape, mesh(r, s))
    return weight, cotangents, *run(weight, cotangents)


def test_every_device_gets_the_whole_weight(case):
    weight, _, whole, _ = case
    np.testing.assert_array_equal(whole, np.broadcast_to(weight, whole.shape))


def test_gradient_is_the_sum_of_all_devices_gradients(case):
    _, cotangents, _, gradient = case
    np.testing.assert_array_equal(gradient, cotangents.sum(axis=0))


def test_whole_weight_is_the_weight_cast():
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
    gathering = how(((0, ("s",)),), ("r",), param_dtype=jnp.dtype("bfloat16"))
    spec = P("s")
    gather = jax.shard_map(
        lambda shard: unshard(shard, gathering)[None],
        mesh=mesh(),
        in_specs=spec,
        out_specs=P(ALL),
        check_vma=False,
    )
    whole = jax.jit(gather)(weight)
    np.testing.assert_array_equal(whole, np.broadcast_to(weight.astype(jnp.bfloat16), whole.shape))


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_gradient_has_the_storage_dtype(storage):
    weight, cotangents = weight_and_cotangents((8, 3), storage)
    gathering = how(((0, ("s",)),), ("r",), dtype=jnp.dtype(storage))
    _, gradient = unsharded(gathering, (8, 3))(weight, cotangents)
    assert gradient.dtype == storage


# --------------------------------------------------------------------------------------------------
# The order of casts and collectives


def equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


SEEN = ("convert_element_type", "all_gather", "reduce_scatter", "psum")


def program(gathering: Gathering) -> list[tuple[str, ...]]:
    """Casts and collectives of forward and backward, in order, with their dtypes."""
    weight, cotangents = weight_and_cotangents((8, 3), gathering.dtype)
    cotangents = cotangents.astype(gathering.param_dtype)
    run = unsharded(gathering, (8, 3))
    return [
        (e.primitive.name, e.invars[0].aval.dtype.name, e.outvars[0].aval.dtype.name)
        for e in equations(jax.make_jaxpr(run)(weight, cotangents).jaxpr)
        if e.primitive.name in SEEN
    ]


HSDP = {"dims": ((0, ("s",)),), "summed": ("r",)}
BF16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float32")


def test_half_width_gather_is_cast_before_and_full_width_reduction_not_between():
    assert program(how(**HSDP, param_dtype=BF16)) == [
        ("convert_element_type", "float32", "bfloat16"),
        ("all_gather", "bfloat16", "bfloat16"),
        ("convert_element_type", "bfloat16", "float32"),
        ("reduce_scatter", "float32", "float32"),
        ("psum", "float32", "float32"),
    ]


def test_half_width_reduction_is_cast_to_storage_only_after_both_reductions():
    assert program(how(**HSDP, reduce_dtype=BF16)) == [
        ("all_gather", "float32", "float32"),
        ("convert_element_type", "float32", "bfloat16"),
        ("reduce_scatter", "bfloat16", "bfloat16"),
        ("psum", "bfloat16", "bfloat16"),
        ("convert_element_type", "bfloat16", "float32"),
    ]


def test_half_width_storage_gathers_and_reduces_in_full_width():
    assert program(how(**HSDP, dtype=BF16)) == [
        ("convert_element_type", "bfloat16", "float32"),
        ("all_gather", "float32", "float32"),
        ("reduce_scatter", "float32", "float32"),
        ("psum", "float32", "float32"),
        ("convert_element_type", "float32", "bfloat16"),
    ]


def test_one_dtype_is_never_cast():
    names = [name for name, *_ in program(how(**HSDP))]
    assert names == ["all_gather", "reduce_scatter", "psum"]


def test_replicated_leaf_is_all_reduced_once_over_all_axes():
    found = program(how((), ("r", "s"), param_dtype=BF16))
    assert [name for name, *_ in found].count("psum") == 1
    assert ("psum", "float32", "float32") in found


def test_lowered_program_communicates_in_the_dtypes_of_the_policy():
    weight, cotangents = weight_and_cotangents((8, 3))
    run = unsharded(how(**HSDP, param_dtype=BF16), (8, 3))
    text = run.lower(weight, cotangents.astype(BF16)).as_text()
    lines = text.splitlines()
    (gather,) = [line for line in lines if "stablehlo.all_gather" in line]
    assert "(tensor<2x3xbf16>) -> tensor<8x3xbf16>" in gather
    start = next(i for i, line in enumerate(lines) if "stablehlo.reduce_scatter" in line)
    end = next(line for line in lines[start:] if "}) : (" in line)
    assert "(tensor<8x3xf32>) -> tensor<2x3xf32>" in end


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_leaf_that_is_not_floating_is_gathered_without_gradient(dtype):
    weight = (jnp.arange(24).reshape(8, 3) % 2).astype(dtype)
    gathering = how(((0, ("s",)),), ("r",), **dict.fromkeys(
        ("dtype", "param_dtype", "reduce_dtype"), jnp.dtype(dtype)
    ))  # fmt: skip

    def local(scale: jax.Array, shard: jax.Array) -> tuple[jax.Array, jax.Array]:
        def masked(scale: jax.Array, shard: jax.Array) -> tuple[jax.Array, jax.Array]:
            whole = unshard(shard, gathering)
            return (whole * scale).sum(), whole

        differentiate = jax.grad(masked, argnums=(0, 1), has_aux=True, allow_int=True)
        (gradient, none), whole = differentiate(scale, shard)
        assert none.dtype == jax.dtypes.float0
        return gradient, whole

    run = jax.shard_map(
        local, mesh=mesh(), in_specs=(P(), P("s")), out_specs=(P(), P()), check_vma=False
    )
    names = [e.primitive.name for e in equations(jax.make_jaxpr(run)(1.0, weight).jaxpr)]
    gradient, whole = jax.jit(run)(1.0, weight)
    assert not {"reduce_scatter", "psum"} & set(names)
    np.testing.assert_array_equal(whole, weight)
    assert gradient == weight.sum()


def test_complex_leaf_has_its_exact_gradient():
    weight = jnp.arange(8) * (1 + 2j)
    cotangents = (jnp.arange(64.0).reshape(8, 8) * (1 - 1j)).astype(jnp.complex64)
    dtypes = dict.fromkeys(("dtype", "param_dtype", "reduce_dtype"), jnp.dtype("complex64"))
    whole, gradient = unsharded(how(**HSDP, **dtypes), (8,))(weight, cotangents)
    np.testing.assert_array_equal(whole, np.broadcast_to(weight, (8, 8)))
    np.testing.assert_array_equal(gradient, cotangents.sum(axis=0))


def test_a_differentiated_leaf_costs_no_reduction_where_its_gradient_is_not_asked_for():
    gathering = how(**HSDP)

    def local(x: jax.Array, shard: jax.Array) -> jax.Array:
        return jax.grad(lambda x: (unshard(shard, gathering) * x).sum())(x)

    run = jax.shard_map(local, mesh=mesh(), in_specs=(P(), P("s")), out_specs=P(), check_vma=False)
    jaxpr = jax.make_jaxpr(run)(1.0, jnp.ones((8, 3)))
    assert "reduce_scatter" not in [e.primitive.name for e in equations(jaxpr.jaxpr)]


def test_gradient_is_exact_beside_an_explicit_axis_of_the_user():
    """Only the data-parallel axis is manual here, the other one is in the types."""
    on = mesh(kind=AxisType.Explicit)
    weight, cotangents = weight_and_cotangents((8, 3))
    put = [
        jax.device_put(weight, NamedSharding(on, P("s", None))),
        jax.device_put(cotangents[:4], NamedSharding(on, P("s", None, None))),
    ]

    def local(shard: jax.Array, cotangent: jax.Array) -> jax.Array:
        _, pullback = jax.vjp(lambda shard: unshard(shard, how(((0, ("s",)),))), shard)
        return pullback(cotangent[0])[0]

    run = jax.shard_map(
        local, mesh=on, in_specs=P("s"), out_specs=P("s"), axis_names={"s"}, check_vma=False
    )
    np.testing.assert_array_equal(jax.jit(run)(*put), cotangents[:4].sum(axis=0))


def test_handing_in_the_default_collectives_changes_nothing():
    mine = how(**HSDP, all_gather=DefaultAllGather(), reduce_scatter=DefaultReduceScatter())
    assert program(mine) == program(how(**HSDP))
