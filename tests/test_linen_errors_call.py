"""What a call of a sharded Linen module refuses: the text says what to change."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from helpers import make_mesh
from jax.sharding import PartitionSpec as P
from linen_models import MLP, Block, abstract, assert_same, fast_compiler, filled
from test_linen_errors import X, refused

import jfsdp


@pytest.fixture(scope="module", autouse=True)
def compiler():
    with fast_compiler():
        yield


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(S=8)


def variables_of(plain: nn.Module, x: Any = X) -> Any:
    return filled(abstract(plain, x))


class Masked(nn.Module):
    """A batch and a mask."""

    @nn.compact
    def __call__(self, x, mask, extra=None):
        return nn.Dense(8)(x) * mask.sum()


def test_batch_that_does_not_divide_is_refused(mesh):
    text = refused(ValueError, jfsdp.shard(MLP(), mesh).apply, variables_of(MLP()), X[:12])
    assert text.startswith(
        "MLP.__call__: the batch is 12, which does not divide over 8 data-parallel devices (S=8):\n"
        "  x: shape (12, 16)\nUse a batch of 16"
    )


def test_arguments_that_differ_on_the_batch_are_listed(mesh):
    model: Any = jfsdp.shard(Masked(), mesh)
    variables = {"params": {"Dense_0": {"kernel": jnp.ones((16, 8)), "bias": jnp.ones(8)}}}
    text = refused(ValueError, model.apply, variables, X, jnp.ones((5, 5)))
    assert text.startswith("Masked.__call__: its arguments do not agree on the batch")
    assert "\n  x: shape (16, 16)\n  mask: shape (5, 5)\n" in text
    assert "in_specs={'mask': PartitionSpec()}" in text


def test_argument_that_in_specs_name_is_no_batch(mesh):
    model: Any = jfsdp.shard(Masked(), mesh, in_specs={"mask": P()})
    variables = {"params": {"Dense_0": {"kernel": jnp.ones((16, 8)), "bias": jnp.ones(8)}}}
    y = model.apply(variables, X, jnp.ones((5, 5)))
    assert_same(y, Masked().apply(variables, X, jnp.ones((5, 5))))


def test_in_specs_that_name_no_argument_are_refused(mesh):
    model: Any = jfsdp.shard(Masked(), mesh, in_specs={"masks": P()})
    variables = {"params": {"Dense_0": {"kernel": jnp.ones((16, 8)), "bias": jnp.ones(8)}}}
    assert refused(ValueError, model.apply, variables, X, jnp.ones((16, 5))) == (
        "Masked.__call__: in_specs['masks'] = P() names no argument. Its arguments: extra, mask, x."
    )


def test_result_that_is_neither_batch_nor_scalar_is_refused(mesh):
    class Total(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(x).sum(0)

    model, variables = jfsdp.shard(Total(), mesh), variables_of(Total())
    text = refused(ValueError, model.apply, variables, X)
    assert text.startswith(
        "Total.__call__: its result has shape (8,) and dtype float32 on each of 8"
    )
    asked: Any = jfsdp.shard(Total(), mesh, out_specs=P())
    whole: Any = Total().apply(variables, X)
    assert_same(asked.apply(variables, X), whole / 8)


def test_out_specs_that_are_no_prefix_are_refused(mesh):
    model: Any = jfsdp.shard(MLP(), mesh, out_specs={"loss": P()})
    text = refused(ValueError, model.apply, variables_of(MLP()), X)
    assert text.startswith("MLP.__call__: out_specs={'loss': P()} is no prefix of the result")


def test_missing_parameters_are_said_by_flax(mesh):
    """As of the unsharded module."""
    variables = variables_of(MLP())
    del variables["params"]["fc2"]["bias"]
    text = refused(Exception, jfsdp.shard(MLP(), mesh).apply, variables, X)
    assert 'Could not find parameter named "bias" in scope "/fc2"' in text


def test_call_without_variables_is_said_by_flax(mesh):
    text = refused(Exception, jfsdp.shard(MLP(), mesh).apply, {}, X)
    assert "fc1" in text


def test_parameters_of_another_configuration_are_refused_by_path_and_shape(mesh):
    model: Any = jfsdp.shard(MLP(), mesh)
    variables = variables_of(MLP())
    variables["params"]["fc1"]["kernel"] = jnp.ones((16, 8))
    text = refused(ValueError, model.apply, variables, X)
    assert text.startswith(
        "MLP.__call__ is called with parameters that are not those it makes itself:\n"
    )
    assert "  fc1.kernel: shape (16, 8), expected (16, 32)" in text


def test_whole_parameters_in_the_per_device_view_are_refused(mesh):
    model: Any = jfsdp.shard(MLP(), mesh)
    variables = variables_of(MLP())
    settings = {"in_specs": (P(), P("S")), "out_specs": P("S"), "check_vma": False}
    mapped = jax.shard_map(model.apply, mesh=mesh, **settings)
    text = refused(ValueError, jax.eval_shape, mapped, variables, X)
    assert text.startswith(
        "MLP.__call__ is called per device, in a shard_map or pmap of your own, with"
    )
    assert "  fc1.kernel: shape (16, 32), expected (16, 4), the shard of (16, 32)" in text


def test_reading_a_unit_s_parameter_from_outside_is_refused_or_exact(mesh):
    class Peeking(nn.Module):
        def setup(self):
            self.layer = nn.Dense(16)

        def __call__(self, x):
            y = self.layer(x)
            if self.is_initializing():
                return y
            return y * jnp.sum(self.layer.variables["params"]["kernel"])

    model, variables = jfsdp.shard(Peeking(), mesh, units=nn.Dense), variables_of(Peeking())
    try:
        y = model.apply(variables, X)
    except (TypeError, ValueError) as error:
        assert "layer" in str(error)
        return
    assert_same(y, Peeking().apply(variables, X))


def test_second_derivative_of_a_region_is_refused(mesh):
    model: Any = jfsdp.shard(Block(16), mesh)
    variables = variables_of(Block(16))

    def loss(variables: Any) -> Any:
        return jnp.mean(model.apply(variables, X) ** 2)

    text = refused(NotImplementedError, jax.hessian(loss), variables)
    assert 'partitioning="auto"' in text


def test_forward_mode_of_a_region_is_refused(mesh):
    model, variables = jfsdp.shard(Block(16), mesh), variables_of(Block(16))
    text = refused(TypeError, jax.jvp, lambda v: model.apply(v, X), (variables,), (variables,))
    assert 'partitioning="auto"' in text
