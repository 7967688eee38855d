"""`ignored_params`: the parameters that jfsdp leaves alone, and what that means for a step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    Op,
    assert_close,
    assert_spec,
    batch_on,
    both_axis_types_and_partitionings,
    both_partitionings,
    compilations,
    gradients,
    leaves,
    linears,
    local_shape,
    make_mesh,
    mean_square,
    mlp,
    rows,
    stablehlo_ops,
    train,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models import Block, LoRA, Scanned

import jfsdp
import jfsdp.testing

X = rows(16, 16)
BF16 = jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)


def make() -> Any:
    """Three linear layers: of A and C jfsdp is to keep its hands off."""
    return mlp(16, 16, 32, 16)


A_AND_C = ["layers.0.*", "layers.4.*"]


@both_axis_types_and_partitionings
def test_ddp_a_fsdp_b_ddp_c(mesh_of, partitioning):
    """FSDP2's ignore_params: A and C as in DDP, B sharded; trained as if it were one model."""
    with mesh_of(R=2, S=4) as mesh:
        model = jfsdp.shard(
            make(), mesh, units=nnx.Linear, ignored_params=A_AND_C, partitioning=partitioning
        )
        for index in (0, 4):
            assert_spec(model.layers[index].kernel.get_raw_value())
        assert_spec(model.layers[2].kernel.get_raw_value(), None, "S")
        x = batch_on(mesh, X)
        assert_close(gradients(model, x), gradients(make(), X))
        losses = train(model, x)
    np.testing.assert_allclose(losses, train(make(), X), rtol=1e-6)


def laid(model: Any, mesh: Any, spec: P) -> Any:
    """With the first kernel on the mesh as its user likes it."""
    kernel = model.layers[0].kernel
    kernel.set_raw_value(jax.device_put(kernel.get_raw_value(), NamedSharding(mesh, spec)))
    return model


OWN = {"shard axis": P(None, "S"), "all axes": P(("R", "S")), "two dimensions": P("S", "R")}


@both_partitionings
@pytest.mark.parametrize("spec", OWN.values(), ids=OWN)
def test_own_spec_over_data_parallel_axes_is_kept_by_a_step(spec, partitioning):
    mesh = make_mesh(R=2, S=4)
    settings: Any = {"ignored_params": "layers.0.kernel", "partitioning": partitioning}
    model = jfsdp.shard(laid(make(), mesh, spec), mesh, **settings)
    x = batch_on(mesh, X)
    _, grads = gradients(model, x)
    assert_spec(grads["layers"][0]["kernel"].get_raw_value(), *spec)
    assert_close(grads, gradients(make(), X)[1])
    with compilations() as counts:
        train(model, x, tx=optax.adam(1e-2))
    assert counts["step"] == 1
    assert_spec(model.layers[0].kernel.get_raw_value(), *spec)


def test_moments_lie_as_their_parameter():
    mesh = make_mesh(R=2, S=4)
    model = jfsdp.shard(laid(make(), mesh, P(None, ("R", "S"))), mesh, ignored_params=A_AND_C)
    moments = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param).opt_state[0].mu
    assert local_shape(moments["layers"][0]["kernel"].get_raw_value()) == (16, 2)
    assert local_shape(moments["layers"][4]["kernel"].get_raw_value()) == (32, 16)


def test_own_spec_over_a_tensor_axis_is_kept():
    mesh = make_mesh(S=4, T=2)
    dims = jfsdp.DataParallelMeshDims(shard="S")
    model = laid(make(), mesh, P("T", "S"))
    jfsdp.shard(model, mesh, dp_mesh_dims=dims, ignored_params="layers.0.kernel")
    assert_spec(model.layers[0].kernel.get_raw_value(), "T", "S")
    x = jax.device_put(X, NamedSharding(mesh, P("S")))
    assert_close(gradients(model, x), gradients(make(), X))


def test_it_is_neither_cast_nor_gathered_and_summed_in_its_own_dtype():
    mesh = make_mesh(S=8)
    policy = jfsdp.MixedPrecisionPolicy(param_dtype="bfloat16", reduce_dtype="bfloat16")
    seen: list[Any] = []

    class Watched(Block):
        def __call__(self, x):
            seen.append(self.linear.kernel.dtype)
            return super().__call__(x)

    block = Watched(16, nnx.Rngs(0))
    model = jfsdp.shard(block, mesh, mp_policy=policy, ignored_params="linear.kernel")
    ops = stablehlo_ops(nnx.jit(nnx.grad(mean_square)).lower(model, batch_on(mesh, X)))
    assert ops == {Op("all_reduce", "f32", (16, 16)): 1}
    assert set(seen) == {jnp.dtype("float32")}


def test_one_of_bfloat16_is_summed_in_bfloat16():
    mesh = make_mesh(S=8)
    layer = nnx.Linear(16, 16, use_bias=False, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    policy = jfsdp.MixedPrecisionPolicy(reduce_dtype="float32")
    model = jfsdp.shard(layer, mesh, mp_policy=policy, ignored_params="kernel")
    ops = stablehlo_ops(nnx.jit(nnx.grad(mean_square)).lower(model, batch_on(mesh, X)))
    assert ops == {Op("all_reduce", "bf16", (16, 16)): 1}


def test_frozen_one_costs_nothing():
    mesh = make_mesh(S=8)
    model = jfsdp.shard(make(), mesh, ignored_params="**")
    ops = stablehlo_ops(nnx.jit(lambda m, x: m(x)).lower(model, batch_on(mesh, X)))
    assert not ops


def test_scanned_stack_is_summed_layer_by_layer():
    mesh, model = make_mesh(S=8), Scanned(nnx.Rngs(0))
    jfsdp.shard(model.layers, mesh, stacked_axis=0, ignored_params="up.*")
    jfsdp.shard(model, mesh)
    assert_spec(model.layers.up.kernel.get_raw_value())
    assert_close(gradients(model, batch_on(mesh, X)), gradients(Scanned(nnx.Rngs(0)), X))


def test_report_states_the_sum_and_the_gather_at_the_border():
    mesh = make_mesh(R=2, S=4)
    model = jfsdp.shard(laid(make(), mesh, P(None, "S")), mesh, ignored_params="layers.0.*")
    report = jfsdp.inspect(nnx.grad(mean_square), model, batch_on(mesh, X), compile=True)
    report.check()
    promises = {promise.leaf: promise for promise in report.promises}
    kernel, bias = promises["layers.0.kernel"], promises["layers.0.bias"]
    assert kernel.gather is not None and kernel.sum is not None
    assert (kernel.gather.axes, kernel.gather.bytes_per_device) == (("S",), 16 * 16 * 4 * 3 / 4)
    assert kernel.sum.axes == ("R", "S")
    assert bias.gather is None


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e:2x4", "h100:8"])
def test_compiled_step_is_what_is_stated(target):
    devices = np.array(jfsdp.testing.topology_or_skip(target)).reshape(2, 4)
    mesh = jax.sharding.Mesh(devices, ("R", "S"))

    def wide() -> Any:
        model: Any = linears(2, 1024, param_dtype=jnp.bfloat16)
        for name, value in (("out_sharding", (None, ("R", "S"))), ("eager_sharding", False)):
            model.layers[0].kernel.set_metadata(name, value)
        return model

    model = jfsdp.init(wide, mesh, units=nnx.Linear, ignored_params="layers.0.*", abstract=True)
    lies = NamedSharding(mesh, P(("R", "S")))
    x = jax.ShapeDtypeStruct((64, 1024), jnp.bfloat16, sharding=lies)
    jfsdp.inspect(nnx.grad(mean_square), model, x, compile=True).check()


def test_plan_lists_it_with_its_own_spec_and_bytes():
    mesh = make_mesh(R=2, S=4)
    model = jfsdp.shard(laid(make(), mesh, P(None, ("R", "S"))), mesh, ignored_params=A_AND_C)
    plan = jfsdp.plan(model)
    kernel = {row.path: row for row in plan.ignored}["layers.0.kernel"]
    assert (kernel.reason, kernel.spec) == ("ignored", P(None, ("R", "S")))
    assert kernel.bytes_per_device == kernel.bytes // 8
    assert len(plan.ignored) == 4
    assert not {row.path for row in plan.replicated} & {row.path for row in plan.ignored}
    assert str(plan).endswith(
        "ignored, lying as they did: layers.0,4.bias, layers.0.kernel, layers.4.kernel"
    )


SELECTORS = {
    "type": (nnx.LoRAParam, ["lora_a", "lora_b"]),
    "glob": ("layer.lora.*", ["lora_a", "lora_b"]),
    "any depth": ("**.lora_a", ["lora_a"]),
    "predicate": (lambda path, param: param.shape == (16,), ["bias"]),
    "several": ([nnx.LoRAParam, "**.bias"], ["bias", "lora_a", "lora_b"]),
    "none": (set(), []),
}


@pytest.mark.parametrize(("selector", "names"), SELECTORS.values(), ids=SELECTORS)
def test_selector_selects(selector, names):
    model = jfsdp.shard(LoRA(nnx.Rngs(0)), make_mesh(S=8), ignored_params=selector)
    assert sorted(row.path.split(".")[-1] for row in jfsdp.plan(model).ignored) == names


def test_shard_placement_fn_is_not_asked_for_it():
    asked: list[str] = []
    place = lambda path, param: asked.append(path)  # noqa: E731
    jfsdp.shard(make(), make_mesh(S=8), ignored_params=A_AND_C, shard_placement_fn=place)
    assert asked == ["layers.2.bias", "layers.2.kernel"]


def test_init_leaves_it_whole():
    mesh = make_mesh(S=8)
    model = jfsdp.init(make, mesh, ignored_params=A_AND_C)
    assert local_shape(model.layers[0].kernel.get_raw_value()) == (16, 16)
    assert_close(leaves(model), leaves(make()))


def test_per_device_view_takes_it_whole_and_sums_its_gradient():
    mesh = make_mesh(S=8)
    model = jfsdp.shard(make(), mesh, ignored_params=A_AND_C)
    kind, state = nnx.split(model)
    specs = jax.tree.map(lambda x: x.sharding.spec, state)

    def share(state: Any, x: jax.Array) -> Any:
        return jax.grad(lambda state: jnp.sum(nnx.merge(kind, state)(x) ** 2) / X.size)(state)

    settings: Any = {"mesh": mesh, "out_specs": specs, "check_vma": False}
    mapped = jax.shard_map(share, in_specs=(specs, P("S")), **settings)
    assert_close(jax.jit(mapped)(state, batch_on(mesh, X)), gradients(make(), X)[1])


def test_per_device_view_refuses_a_part_of_it():
    mesh = make_mesh(S=8)
    model = jfsdp.shard(laid(make(), mesh, P("S")), mesh, ignored_params="layers.0.kernel")
    kind, state = nnx.split(model)
    specs = jax.tree.map(lambda x: x.sharding.spec, state)
    call = lambda state, x: nnx.merge(kind, state)(x)  # noqa: E731
    settings: Any = {"mesh": mesh, "out_specs": P("S"), "check_vma": False}
    with pytest.raises(ValueError, match=r"layers.0.kernel: .* what is in ignored_params whole\."):
        jax.shard_map(call, in_specs=(specs, P("S")), **settings)(state, X)
