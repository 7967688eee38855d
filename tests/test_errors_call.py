"""What a call of a sharded model refuses: the text names argument or path, shape and remedy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import jfsdp

P = PartitionSpec
X = jnp.ones((16, 8))


def make_mesh(**sizes: int) -> jax.sharding.Mesh:
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


class Counter(nnx.Variable):
    """State of a kind that jfsdp does not know."""


class Model(nnx.Module):
    """Its forward is what the test makes of it."""

    def __init__(self, forward: Callable[..., Any]):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.second = nnx.Linear(16, 8, rngs=rngs)
        self.seen = Counter(jnp.zeros(3))
        self.calls = 0
        self.forward = nnx.static(forward)

    def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> Any:
        return self.forward(self, x, *args, **kwargs)

    def layers(self, x: jax.Array) -> jax.Array:
        return self.second(jnp.tanh(self.first(x)))


def plain(model: Model, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
    return model.layers(x)


def sharded(forward: Callable[..., Any] = plain, mesh: Any = None, **settings: Any) -> Model:
    return jfsdp.shard(Model(forward), mesh or make_mesh(fsdp=8), **settings)


def refused(kind: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


# --------------------------------------------------------------------------------------------------
# Arguments


def test_batch_that_does_not_divide_is_named_by_its_argument():
    text = refused(ValueError, lambda: sharded()(jnp.ones((12, 8))))
    assert text.startswith("Model.__call__: the batch is 12, which does not divide over 8")
    assert "\n  x: shape (12, 8)\nUse a batch of 16" in text


def test_keyword_arguments_are_named_by_their_paths():
    kwargs = {"extra": {"mask": jnp.ones((5, 5)), "ids": [jnp.ones(16)]}}
    text = refused(ValueError, lambda: sharded()(X, **kwargs))
    assert "\n  x: shape (16, 8)\n" in text
    assert "\n  extra.ids.0: shape (16,)\n" in text
    assert "\n  extra.mask: shape (5, 5)\n" in text


def test_starred_arguments_are_named_by_their_place():
    text = refused(ValueError, lambda: sharded()(X, jnp.ones((5, 5))))
    assert "\n  args[1]: shape (5, 5)\n" in text


def test_in_specs_that_do_not_fit_are_named():
    model = sharded(in_specs={"mask": P("fsdp")})
    text = refused(ValueError, lambda: model(X, mask=jnp.ones((5, 5))))
    assert text.startswith("Model.__call__: in_specs['mask'] = P('fsdp',): dimension 0 of mask")
    assert text.endswith("(shape (5, 5)) does not divide by 8.")


def test_in_specs_of_an_argument_that_is_not_there_are_refused():
    class OneArgument(nnx.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            return x

    model = jfsdp.shard(OneArgument(), make_mesh(fsdp=8), in_specs={"y": P()})
    assert "in_specs['y']" in refused((TypeError, ValueError), lambda: model(X))


# --------------------------------------------------------------------------------------------------
# Results


def test_result_that_is_no_batch_is_named_by_its_place():
    model = sharded(lambda model, x: {"loss": x.mean(), "logits": [jnp.ones((3, 4))]})
    text = refused(ValueError, lambda: model(X))
    assert text.startswith(
        "Model.__call__: its result['logits'][0] has shape (3, 4) and dtype float32"
    )
    assert (
        "jfsdp.shard(..., out_specs=...): PartitionSpec('fsdp') where dimension 0 is split" in text
    )


def test_out_specs_that_are_no_prefix_are_refused():
    model = sharded(lambda model, x: (x, x), out_specs={"a": P()})
    text = refused(ValueError, lambda: model(X))
    assert text.startswith("Model.__call__: out_specs={'a': P()} is no prefix of the result")
    assert "PyTreeDef((*, *))" in text


def test_out_specs_longer_than_their_result_are_refused_by_its_place():
    model = sharded(lambda model, x: {"count": x.sum()}, out_specs={"count": P("fsdp")})
    text = refused(ValueError, lambda: model(X))
    assert text.startswith("Model.__call__: ")
    assert "['count']" in text


# --------------------------------------------------------------------------------------------------
# State


def counting(model: Model, x: jax.Array) -> jax.Array:
    model.seen[...] += 1
    return model.layers(x)


def test_changed_state_of_an_unknown_kind_is_refused():
    assert refused(ValueError, lambda: sharded(counting)(X)) == (
        "Model.__call__ changes state of the type Counter (shape (3,)), and jfsdp cannot know how it "
        "lies on the data-parallel devices. Say so with jfsdp.shard(..., state_specs={Counter: "
        "PartitionSpec(...)}): the data-parallel axes where dimension 0 is the batch, PartitionSpec() "
        "where every device computes the same value."
    )


def test_state_specs_are_the_remedy():
    model = sharded(counting, state_specs={Counter: P()})
    model(X)
    np.testing.assert_array_equal(model.seen[...], np.ones(3))


def creating(model: Model, x: jax.Array) -> jax.Array:
    model.first.hidden = nnx.Intermediate(x)
    return model.layers(x)


def removing(model: Model, x: jax.Array) -> jax.Array:
    del model.seen
    return model.layers(x)


def setting(model: Model, x: jax.Array) -> jax.Array:
    model.calls += 1
    return model.layers(x)


CHANGES = {
    "creates": (creating, "creates Variables:\n", "first.hidden: Intermediate\n"),
    "removes": (removing, "removes Variables:\n", "seen: Counter\n"),
    "changes": (setting, "changes a plain attribute of a module (a counter, a flag).", ""),
}


@pytest.mark.parametrize(("forward", "what", "which"), CHANGES.values(), ids=CHANGES)
def test_changed_structure_is_refused(forward, what, which):
    text = refused(ValueError, lambda: sharded(forward)(X))
    assert text.startswith(f"Model.__call__ is called through a region of jfsdp and {what}")
    assert which in text
    assert text.endswith(
        "State that a forward changes must exist before the call, as an nnx.Variable whose value it "
        "replaces: create it in __init__, or return it (for sown values: out_specs)."
    )


@pytest.mark.parametrize("case", ["creates", "removes"])
def test_changed_structure_is_named_by_its_path_in_the_model(case):
    forward, what, which = CHANGES[case]
    assert f"{what}  {which}" in refused(ValueError, lambda: sharded(forward)(X))


def test_decode_cache_is_refused_with_its_spec():
    model = Model(plain)
    model.first.cache = nnx.Cache(jnp.zeros((16, 4)))
    text = refused(ValueError, lambda: jfsdp.shard(model, make_mesh(fsdp=8))(X))
    assert text.startswith("Model.__call__: first.cache (shape (16, 4)) is a decode cache")
    assert "jfsdp.shard(..., state_specs={nnx.Cache: PartitionSpec('fsdp')})" in text
    assert 'partitioning="auto"' in text


def test_parameters_added_after_shard_are_all_listed():
    model = sharded()
    model.scale = nnx.Param(jnp.ones(3))
    model.second = nnx.Linear(16, 8, rngs=nnx.Rngs(1))
    assert refused(ValueError, lambda: model(X)) == (
        "Model.__call__: these parameters were added after jfsdp.shard and are not sharded:\n"
        "  scale: shape (3,), dtype float32\n"
        "  second.bias: shape (8,), dtype float32\n"
        "  second.kernel: shape (16, 8), dtype float32\n"
        "Add them first and shard the model afterwards."
    )


# --------------------------------------------------------------------------------------------------
# Parameters of other units


def test_parameter_of_another_unit_says_what_to_do():
    model = sharded(lambda model, x: model.layers(x) * model.first.kernel.mean(), units="first")
    text = refused(TypeError, lambda: model(X))
    assert text.startswith("first.kernel (shape (8, 16)) is used while it is sharded")
    assert "jfsdp.register_forward_method(module, name)" in text


def test_power_of_a_parameter_of_another_unit_says_what_to_do():
    model = sharded(lambda model, x: (model.first.kernel**2).sum(), units="first")
    assert "used while it is sharded" in refused(TypeError, lambda: model(X))


@pytest.mark.parametrize("function", [jnp.sum, jnp.square, lambda w: jnp.matmul(X, w)])
def test_parameter_of_another_unit_in_a_function_says_what_to_do(function):
    model = sharded(lambda model, x: function(model.first.kernel).sum(), units="first")
    assert "used while it is sharded" in refused(TypeError, lambda: model(X))


# --------------------------------------------------------------------------------------------------
# Transformations


def test_forward_mode_is_refused():
    assert refused(TypeError, lambda: jax.jvp(sharded(), (X,), (X,))) == (
        "a module sharded with manual partitioning is differentiated in forward mode (jax.jvp, "
        'jacfwd, linearize). Use reverse mode, or partitioning="auto".'
    )


def test_second_derivative_is_refused():
    loss = sharded(lambda model, x: (model.layers(x) ** 2).mean())
    text = refused(NotImplementedError, lambda: jax.grad(lambda x: jax.grad(loss)(x).sum())(X))
    assert text == (
        "a module sharded with manual partitioning is differentiated twice (grad of grad, hessian). "
        'Use partitioning="auto" for that.'
    )


@pytest.mark.parametrize("anew", [True, False])
def test_one_remat_for_units_that_are_differentiated_by_other_inputs_is_refused(anew: bool):
    """The first one's input is data. Made in the loop, it is none of jfsdp's business.

    Called twice, each unit gathers its own weights: those of units that are called once are gathered outside
    of the remat.
    """

    def forward(model: Model, x: jax.Array) -> jax.Array:
        call = nnx.remat(lambda layer, x: layer(x))
        for layer in (model.same, model.again, model.same, model.again):
            x = nnx.remat(lambda layer, x: layer(x))(layer, x) if anew else call(layer, x)
        return x

    model = Model(forward)
    for name, seed in (("same", 1), ("again", 2)):
        setattr(model, name, nnx.Linear(8, 8, rngs=nnx.Rngs(seed)))
    jfsdp.shard(model, make_mesh(fsdp=8), units=["same", "again"])
    grad = nnx.jit(nnx.grad(lambda model, x: jnp.mean(model(x) ** 2)))
    if anew:
        grad(model, X)
        return
    with pytest.raises(NotImplementedError, match=r"Make it anew for each, in the loop: nnx.remat"):
        grad(model, X)


def test_shard_map_over_some_of_the_axes_is_refused():
    mesh = make_mesh(replica=2, fsdp=4)
    model = sharded(mesh=mesh)
    spec = P("replica")
    call = jax.shard_map(
        model, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"replica"}, check_vma=False
    )
    assert refused(ValueError, lambda: jax.eval_shape(call, X)) == (
        "Model.__call__ is called inside a shard_map over ['replica'], but its data-parallel axes "
        "are ['replica', 'fsdp']: map over all of them or over none."
    )


def test_call_under_an_explicit_mesh_of_a_model_sharded_outside_is_refused():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Explicit,))
    model = sharded(mesh=mesh)
    with jax.set_mesh(mesh):
        text = refused(ValueError, lambda: model(X))
    assert "under jax.set_mesh with Explicit axes" in text
    assert "Put jfsdp.shard and the training step under the same jax.set_mesh, or neither." in text


class Identity(jfsdp.AllGather):
    """Forgets to gather."""

    def allocate(self, size, *, dtype, device):
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return input_tensor


def test_wrong_gather_is_named_by_the_parameter_s_path():
    text = refused(ValueError, lambda: sharded(all_gather=Identity())(X))
    assert text.startswith("first.kernel: Identity must return an array of shape (16, 8)")


def test_model_works_after_a_call_that_was_refused():
    model = sharded()
    refused(ValueError, lambda: model(jnp.ones((12, 8))))
    refused(TypeError, lambda: model(jnp.ones((16, 7))))
    np.testing.assert_allclose(model(X), Model(plain)(X), rtol=1e-5, atol=1e-6)
