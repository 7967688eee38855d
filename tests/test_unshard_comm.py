"""The user's own collectives: when they are called, with what, and what they may not return."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jfsdp
from jfsdp.comm import DefaultAllGather, DefaultReduceScatter
from jfsdp.unshard import Gathering, unshard

P = PartitionSpec
BF16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float32")


class Recorder:
    """Mixed into a collective: what it was asked to allocate, and called with."""

    def __init__(self) -> None:
        self.allocated: list[tuple[Any, ...]] = []
        self.called: list[tuple[Any, ...]] = []

    def allocate(self, size, *, dtype, device):
        self.allocated.append((size, jnp.dtype(dtype), device))
        return super().allocate(size, dtype=dtype, device=device)


class Gather(Recorder, DefaultAllGather):
    def __call__(self, output_tensor, input_tensor, group, *rest, **named):
        self.called.append(
            (output_tensor, jax.typeof(input_tensor).str_short(), group, rest, named)
        )
        return super().__call__(output_tensor, input_tensor, group, *rest, **named)


class Scatter(Recorder, DefaultReduceScatter):
    def __call__(self, output_tensor, input_tensor, group, op, *rest, **named):
        self.called.append(
            (output_tensor, jax.typeof(input_tensor).str_short(), group, op, rest, named)
        )
        return super().__call__(output_tensor, input_tensor, group, op, *rest, **named)


def gathering(dims: Any, gather: Any = None, scatter: Any = None) -> Gathering:
    return Gathering("block.w", F32, dims, (), BF16, F32, gather, scatter)


def step(how: Gathering, shape: tuple[int, ...]) -> tuple[Any, jax.Array]:
    """A function of the weight, and one: (whole weight, gradient of half its squares)."""
    mesh = jax.make_mesh((2, 4), ("r", "s"), axis_types=(AxisType.Auto,) * 2)
    spec = P(*(dict(how.dims).get(dim) for dim in range(len(shape))))

    def local(shard: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(shard: jax.Array) -> tuple[jax.Array, jax.Array]:
            whole = unshard(shard, how)
            return (whole.astype(F32) ** 2).sum() / 2, whole

        gradient, whole = jax.grad(loss, has_aux=True)(shard)
        return whole, gradient

    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=(P(), spec), check_vma=False)
    return jax.jit(mapped), jnp.arange(float(np.prod(shape))).reshape(shape)


def trace(how: Gathering, shape: tuple[int, ...]) -> None:
    jax.eval_shape(*step(how, shape))


def run(how: Gathering, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    function, weight = step(how, shape)
    return function(weight)


def described(*shape: int, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def test_all_gather_is_called_once_with_the_sharded_dimension_first():
    gather = Gather()
    trace(gathering(((1, ("s",)),), gather), (3, 8))
    assert gather.called == [(described(8, 3, dtype=BF16), "bfloat16[2,3]", ("s",), (), {})]


def test_reduce_scatter_is_called_once_for_a_sum_with_the_sharded_dimension_first():
    scatter = Scatter()
    trace(gathering(((1, ("s",)),), None, scatter), (3, 8))
    assert scatter.called == [(described(2, 3, dtype=F32), "float32[8,3]", ("s",), "sum", (), {})]


def test_group_of_several_axes_is_one_call():
    gather, scatter = Gather(), Scatter()
    trace(gathering(((0, ("r", "s")),), gather, scatter), (16, 3))
    assert [called[2] for called in gather.called + scatter.called] == [("r", "s"), ("r", "s")]


def test_axes_on_two_dimensions_are_a_call_for_each():
    """The backward undoes the forward's last first."""
    gather, scatter = Gather(), Scatter()
    trace(gathering(((0, ("r",)), (1, ("s",))), gather, scatter), (6, 8))
    assert [called[2] for called in gather.called] == [("r",), ("s",)]
    assert [called[2] for called in scatter.called] == [("s",), ("r",)]


def test_allocate_is_asked_for_the_result_without_device():
    gather, scatter = Gather(), Scatter()
    trace(gathering(((1, ("s",)),), gather, scatter), (3, 8))
    assert gather.allocated == [((8, 3), BF16, None)]
    assert scatter.allocated == [((2, 3), F32, None)]


def test_replicated_leaf_calls_neither():
    gather, scatter = Gather(), Scatter()
    trace(gathering((), gather, scatter), (3, 5))
    assert gather.called + scatter.called == []


def test_own_collectives_give_what_xla_s_give():
    dims = ((1, ("s",)),)
    mine = run(gathering(dims, Gather(), Scatter()), (3, 8))
    theirs = run(gathering(dims), (3, 8))
    for ours, expected in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(ours, expected)


class Ring(jfsdp.AllGather):
    """Written with ppermute: a rotating shard, put down at its place."""

    def allocate(self, size, *, dtype, device):
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        (axis,) = group
        size, rows = jax.lax.axis_size(axis), input_tensor.shape[0]
        whole = jnp.zeros(output_tensor.shape, output_tensor.dtype)
        for turn in range(size):
            start = (jax.lax.axis_index(axis) - turn) % size * rows
            whole = jax.lax.dynamic_update_slice_in_dim(whole, input_tensor, start, 0)
            around = [(i, (i + 1) % size) for i in range(size)]
            input_tensor = jax.lax.ppermute(input_tensor, axis, around)
        return whole


def test_gather_of_other_primitives_is_differentiated_by_the_reduce_scatter():
    """Its own transpose is never taken."""
    dims = ((1, ("s",)),)
    mine, theirs = run(gathering(dims, Ring()), (3, 8)), run(gathering(dims), (3, 8))
    np.testing.assert_array_equal(mine[0], theirs[0])
    np.testing.assert_array_equal(mine[1], theirs[1])


# --------------------------------------------------------------------------------------------------
# What they may not return


class Returns:
    """Mixed into a collective: the result is what `change` makes of the right one."""

    def __init__(self, change: Any) -> None:
        self.change = change

    def __call__(self, *args, **kwargs):
        return self.change(super().__call__(*args, **kwargs))


class BadGather(Returns, DefaultAllGather):
    pass


class BadScatter(Returns, DefaultReduceScatter):
    pass


CHANGES = {
    "shape": (lambda x: x[:-1], "(7, 3)", "(1, 3)"),
    "rank": (lambda x: x[None], "(1, 8, 3)", "(1, 2, 3)"),
    "dtype": (lambda x: x.astype("float16"), "float16", "float16"),
    "nothing": (lambda x: None, "got None", "got None"),
}


@pytest.mark.parametrize(("change", "got", "_"), CHANGES.values(), ids=CHANGES)
def test_wrong_gather_is_refused_by_the_leaf_s_path(change, got, _):
    with pytest.raises(ValueError) as error:
        trace(gathering(((1, ("s",)),), BadGather(change)), (3, 8))
    text = str(error.value)
    assert text.startswith("block.w: BadGather must return an array of shape (8, 3)")
    assert "dtype bfloat16" in text
    assert got in text


@pytest.mark.parametrize(("change", "_", "got"), CHANGES.values(), ids=CHANGES)
def test_wrong_reduction_is_refused_by_the_leaf_s_path(change, _, got):
    with pytest.raises(ValueError) as error:
        trace(gathering(((1, ("s",)),), None, BadScatter(change)), (3, 8))
    text = str(error.value)
    assert text.startswith("block.w: BadScatter must return an array of shape (2, 3)")
    assert "dtype float32" in text
    assert got in text


def test_forgotten_moveaxis_is_explained():
    with pytest.raises(ValueError, match="one leaf at a time, the sharded dimension first"):
        trace(gathering(((1, ("s",)),), BadGather(lambda x: x.T)), (3, 8))


ALLOCATIONS = {
    "nothing": lambda size, dtype: None,
    "a shape": lambda size, dtype: size,
    "another shape": lambda size, dtype: jax.ShapeDtypeStruct((*size, 1), dtype),
    "another dtype": lambda size, dtype: jax.ShapeDtypeStruct(size, "float16"),
    "an array": lambda size, dtype: jnp.zeros(size, dtype),
}


@pytest.mark.parametrize("kind", [DefaultAllGather, DefaultReduceScatter])
@pytest.mark.parametrize("allocation", ALLOCATIONS.values(), ids=ALLOCATIONS)
def test_wrong_allocation_is_refused_by_the_leaf_s_path(kind, allocation):
    class Wrong(kind):
        def allocate(self, size, *, dtype, device):
            return allocation(size, dtype)

    both = {DefaultAllGather: (Wrong(), None), DefaultReduceScatter: (None, Wrong())}[kind]
    with pytest.raises(ValueError, match=r"^block\.w: Wrong\.allocate\(\(\d, 3\), dtype=") as error:
        trace(gathering(((1, ("s",)),), *both), (3, 8))
    assert "must return a jax.ShapeDtypeStruct of that shape and dtype" in str(error.value)


# --------------------------------------------------------------------------------------------------
# What they raise


class Fails:
    """Mixed into a collective: raises."""

    def __call__(self, *args, **kwargs):
        raise KeyError("no such table")


class FailingGather(Fails, DefaultAllGather):
    pass


class FailingScatter(Fails, DefaultReduceScatter):
    pass


@pytest.mark.parametrize(
    ("hooks", "tensor"),
    [((FailingGather(), None), "bfloat16[2, 3]"), ((None, FailingScatter()), "float32[8, 3]")],
    ids=["all_gather", "reduce_scatter"],
)
def test_what_is_raised_inside_stays_what_it_is_and_gets_the_leaf_s_path(hooks, tensor):
    with pytest.raises(KeyError) as error:
        trace(gathering(((1, ("s",)),), *hooks), (3, 8))
    assert error.value.args == ("no such table",)
    note, *_ = error.value.__notes__  # jax adds one about its traceback
    name = type(hooks[0] or hooks[1]).__name__
    assert note.startswith(f"block.w: {name} raised this. It was called with {tensor}")
    assert note.endswith("over the mesh axes ['s'].")


def test_what_is_raised_inside_allocate_gets_the_leaf_s_path():
    class NoBuffer(DefaultAllGather):
        def allocate(self, size, *, dtype, device):
            raise RuntimeError("full")

    with pytest.raises(RuntimeError, match="full") as error:
        trace(gathering(((1, ("s",)),), NoBuffer()), (3, 8))
    assert error.value.__notes__[0].startswith("block.w: NoBuffer raised this.")


def test_an_error_of_jfsdp_s_own_names_the_path_once():
    with pytest.raises(ValueError) as error:
        trace(gathering(((1, ("s",)),), BadGather(lambda x: x[:-1])), (3, 8))
    assert not any("block.w" in note for note in getattr(error.value, "__notes__", []))
