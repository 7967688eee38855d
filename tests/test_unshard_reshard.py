"""Reshard after forward: no whole weight is kept for the backward, in whatever form it is used."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import equations
from jax.sharding import AxisType, PartitionSpec

import jfsdp
from jfsdp.comm import DefaultAllGather
from jfsdp.remat import refuse_gathered
from jfsdp.unshard import Gathering, unshard

P = PartitionSpec
BF16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
SHAPE = (64, 4, 16)
WHOLE = math.prod(SHAPE)
BATCH = 4  # of each device: an activation is a sixteenth of a whole weight


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("s",), axis_types=(AxisType.Auto,))


USES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "reshape": lambda w, x: x @ w.reshape(64, 64),
    "reshape twice": lambda w, x: x @ w.reshape(-1).reshape(64, 64),
    "transpose": lambda w, x: x @ w.reshape(64, 64).T,
    "swapaxes": lambda w, x: x @ jnp.swapaxes(w, 0, 2).reshape(64, 64),
    "einsum": lambda w, x: jnp.einsum("bd,dhk->bhk", x, w).reshape(x.shape),
    "einsum with transpose": lambda w, x: jnp.einsum("bd,khd->bhk", x, w.T).reshape(x.shape),
    "own cast": lambda w, x: x @ w.astype(BF16).reshape(64, 64),
    "cast there and back": lambda w, x: x @ w.astype(BF16).astype(F32).reshape(64, 64),
    "transpose, then cast": lambda w, x: x @ w.transpose(0, 2, 1).astype(BF16).reshape(64, 64),
    "leading axis": lambda w, x: jnp.matmul(x[None], w.reshape(64, 64)[None])[0],
    "slices": lambda w, x: sum((x @ w[:, i] for i in range(4)), jnp.zeros((1, 16), x.dtype)),
    "split": lambda w, x: sum(x @ p.squeeze(1) for p in jnp.split(w, 4, axis=1)),
    "under jit": lambda w, x: jax.jit(lambda w, x: x @ w.reshape(64, 64))(w, x),
    "in a scan": lambda w, x: jax.lax.scan(
        lambda h, _: (jnp.tanh(h @ w.reshape(64, 64)), None), x, length=3
    )[0],
    "a bf16 gather": lambda w, x: x.astype(BF16) @ w.reshape(64, 64),
    "stop_gradient on x": lambda w, x: jax.lax.stop_gradient(x) @ w.reshape(64, 64),
}  # fmt: skip


def gathering(**other: Any) -> Gathering:
    settings = {"param_dtype": F32, "all_gather": None} | other
    return Gathering("w", F32, ((0, ("s",)),), (), reduce_dtype=F32, **settings)


def kept_sizes(use: Any, how: Gathering, reshard: bool) -> list[int]:
    """Elements of each array that one device keeps from the forward for the backward."""
    shards = [jax.ShapeDtypeStruct((SHAPE[0] // 8, *SHAPE[1:]), F32)]
    wholes = [jax.ShapeDtypeStruct(SHAPE, how.param_dtype)]
    sizes: list[int] = []

    def local(shard: jax.Array, x: jax.Array) -> jax.Array:
        def forward(shard: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.sin(use(unshard(shard, how), x)).sum()

        if reshard:
            forward = jax.checkpoint(forward, policy=refuse_gathered(shards, wholes))
        _, pullback = jax.vjp(forward, shard, x)
        sizes.extend(residual.size for residual in jax.tree.leaves(pullback))
        return pullback(jnp.ones(()))

    spec = (P("s"), P("s"))
    mapped = jax.shard_map(local, mesh=mesh(), in_specs=spec, out_specs=spec, check_vma=False)
    jax.eval_shape(
        mapped, jax.ShapeDtypeStruct(SHAPE, F32), jax.ShapeDtypeStruct((8 * BATCH, 64), F32)
    )
    return sizes


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_no_part_of_a_whole_weight_is_kept(use):
    """Slices are an eighth or a quarter of it; shards and activations are smaller than both."""
    sizes = kept_sizes(use, gathering(), reshard=True)
    assert max(sizes) < WHOLE // 4, sizes


@pytest.mark.parametrize("use", ["reshape", "einsum", "own cast"])
def test_without_the_policy_the_whole_weight_is_kept(use):
    """What the test above looks for is there to be seen."""
    assert max(kept_sizes(USES[use], gathering(), reshard=False)) == WHOLE


@pytest.mark.parametrize("use", ["reshape", "einsum", "transpose, then cast"])
def test_no_weight_gathered_in_half_width_is_kept(use):
    assert max(kept_sizes(USES[use], gathering(param_dtype=BF16), reshard=True)) < WHOLE // 4


class Halves(DefaultAllGather):
    """Two gathers and a concatenation in place of one gather."""

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        parts = [jax.lax.all_gather(x, group) for x in jnp.split(input_tensor, 2)]
        return jnp.concatenate(parts, axis=1).reshape(output_tensor.shape)


@pytest.mark.parametrize("use", ["reshape", "einsum"])
def test_nothing_of_the_user_s_own_gather_is_kept(use):
    sizes = kept_sizes(USES[use], gathering(all_gather=Halves()), reshard=True)
    assert max(sizes) < WHOLE // 4, sizes


# --------------------------------------------------------------------------------------------------
# The same through a module


class Attention(nnx.Module):
    """Kernels of three dimensions, used through einsum, reshape and the user's own cast."""

    def __init__(self, rngs: nnx.Rngs):
        make = nnx.initializers.lecun_normal()
        self.query = nnx.Param(make(rngs.params(), SHAPE))
        self.out = nnx.Param(make(rngs.params(), SHAPE))

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = jnp.einsum("bd,dhk->bhk", x, self.query[...]).reshape(x.shape)
        return x + jnp.tanh(heads) @ self.out[...].reshape(64, 64).T.astype(x.dtype)


class Stack(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, remat: bool = False):
        self.blocks = nnx.List([Attention(rngs) for _ in range(2)])
        self.remat = remat

    def __call__(self, x: jax.Array) -> jax.Array:
        def forward(block: nnx.Module, x: jax.Array) -> jax.Array:
            return block(x)

        for block in self.blocks:
            x = (nnx.remat(forward) if self.remat else forward)(block, x)
        return x


def training_program(reshard: bool, param_dtype: str = "float32", remat: bool = False) -> list[Any]:
    """The equations of loss and gradient."""
    model = jfsdp.shard(
        Stack(nnx.Rngs(0), remat),
        mesh(),
        units=Attention,
        reshard_after_forward=reshard,
        mp_policy=jfsdp.MixedPrecisionPolicy(param_dtype),
    )
    return trace(model)


def trace(model: nnx.Module) -> list[Any]:
    graphdef, state = nnx.split(model)

    def loss(state: Any, x: jax.Array) -> jax.Array:
        return (nnx.merge(graphdef, state)(x) ** 2).mean()

    return list(
        equations(jax.make_jaxpr(jax.value_and_grad(loss))(state, jnp.ones((64, 64))).jaxpr)
    )


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def programs(request):
    return {
        reshard: training_program(reshard, param_dtype=request.param) for reshard in (True, False)
    }


def handed_over(program: list[Any]) -> list[int]:
    """Elements per device of what the forward region hands to the backward one."""
    forward = next(e for e in program if e.primitive.name == "shard_map")
    return [math.prod(v.aval.shape) // 8 for v in forward.outvars]


def gathers(program: list[Any]) -> int:
    return Counter(e.primitive.name for e in program)["all_gather"]


def test_resharding_module_hands_no_whole_weight_to_its_backward(programs):
    assert max(handed_over(programs[True])) < WHOLE // 4


def test_keeping_module_hands_its_whole_weights_to_its_backward(programs):
    """All but the first query: nobody asks for the gradient of its input."""
    assert handed_over(programs[False]).count(WHOLE) == 3


def test_resharding_module_gathers_each_leaf_twice(programs):
    """All but the first query, likewise."""
    assert gathers(programs[True]) == 7


def test_keeping_module_gathers_each_leaf_once(programs):
    assert gathers(programs[False]) == 4


def test_resharding_under_the_user_s_remat_gathers_no_leaf_a_third_time():
    assert gathers(training_program(reshard=True, remat=True)) <= 8


def test_root_keeps_its_weights_each_time_it_is_called():
    model = jfsdp.shard(Stack(nnx.Rngs(0)), mesh())
    assert [gathers(trace(model)) for _ in range(2)] == [4, 4]


def test_resharding_computes_no_matmul_again(programs):
    kept, dropped = (
        Counter(e.primitive.name for e in programs[reshard])["dot_general"]
        for reshard in (False, True)
    )
    assert dropped == kept


def test_both_have_the_same_gradients():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), F32)
    gradients = []
    for reshard in (True, False):
        model = jfsdp.shard(Stack(nnx.Rngs(0)), mesh(), reshard_after_forward=reshard)
        step = nnx.jit(nnx.grad(lambda model, x: (model(x) ** 2).mean()))
        gradients.append(jax.tree.leaves(step(model, x)))
    for one, other in zip(*gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
