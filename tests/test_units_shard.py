"""A sharded parameter inside a region refuses to be computed with, and says what to do instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import jfsdp
from jfsdp.hidden import Shard
from jfsdp.mesh import DataParallelMesh
from jfsdp.placement import place


@pytest.fixture
def shard() -> Shard:
    mesh = AbstractMesh((4,), ("s",), axis_types=(AxisType.Auto,))
    dp = DataParallelMesh(mesh, jfsdp.DataParallelMeshDims("s"))
    whole = jax.ShapeDtypeStruct((8, 3), jnp.float32)
    return Shard(jnp.ones((2, 3)), place("blocks.0.kernel", whole, dp))


def assert_refuses(use, shard: Shard) -> None:
    with pytest.raises(TypeError) as error:
        use(shard)
    assert str(error.value) == (
        "blocks.0.kernel (shape (8, 3)) is used while it is sharded: it belongs to a unit that is not "
        "being called. Either\n"
        "  1. call that module's forward instead of reading its parameter, or\n"
        "  2. if another of its methods uses it, jfsdp.register_forward_method(module, name), or\n"
        "  3. leave the module out of `units`, so that the caller's unit gathers it."
    )


USES = {
    "x + w": lambda w: jnp.ones((8, 3)) + w,
    "w + x": lambda w: w + jnp.ones((8, 3)),
    "x - w": lambda w: 1.0 - w,
    "w - x": lambda w: w - 1.0,
    "x * w": lambda w: 2.0 * w,
    "w * x": lambda w: w * 2.0,
    "x / w": lambda w: 2.0 / w,
    "w / x": lambda w: w / 2.0,
    "x @ w": lambda w: jnp.ones((3, 8)) @ w,
    "w @ x": lambda w: w @ jnp.ones((3, 3)),
    "-w": lambda w: -w,
    "w[0]": lambda w: w[0],
    "w[...]": lambda w: w[...],
    "for row in w": lambda w: list(w),
    "w.T": lambda w: w.T,
    "w.sum()": lambda w: w.sum(),
    "w.astype": lambda w: w.astype(jnp.bfloat16),
    "w.at": lambda w: w.at[0].set(0),
    "jnp.asarray": lambda w: jnp.asarray(w),
    "jnp.sum": lambda w: jnp.sum(w),
    "jnp.matmul": lambda w: jnp.matmul(jnp.ones((3, 8)), w),
    "jnp.einsum": lambda w: jnp.einsum("ij->", w),
    "jax.nn.relu": lambda w: jax.nn.relu(w),
    "jnp.linalg.norm": lambda w: jnp.linalg.norm(w),
    "w ** 2": lambda w: w**2,
    "2 ** w": lambda w: 2**w,
    "w // 2": lambda w: w // 2,
    "w % 2": lambda w: w % 2,
    "abs(w)": lambda w: abs(w),
    "+w": lambda w: +w,
    "w < 0": lambda w: w < 0,
    "w >= 0": lambda w: w >= 0,
    "w == 0": lambda w: w == 0,
    "w != 0": lambda w: w != 0,
    "float(w)": lambda w: float(w),
    "bool(w)": lambda w: bool(w),
    "len(w)": lambda w: len(w),
    "numpy x @ w": lambda w: np.ones((3, 8)) @ w,
    "np.asarray": lambda w: np.asarray(w),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_computing_with_a_shard_says_what_to_do(use, shard):
    assert_refuses(use, shard)


def test_shape_rank_and_dtype_are_those_of_the_whole(shard):
    assert (shard.shape, shard.ndim, shard.dtype) == ((8, 3), 2, jnp.float32)


def test_shard_passes_through_transformations(shard):
    passed = jax.jit(lambda shard: shard)(shard)
    assert passed.placement == shard.placement
    np.testing.assert_array_equal(passed.array, shard.array)
