"""Modules that cannot be sharded, and what else is refused before a model is called."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import shard_refused
from jax.sharding import AxisType

import jfsdp


def make_mesh(**sizes: int) -> jax.sharding.Mesh:
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)])
        self.head = nnx.Linear(8, 8, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.head(x)


class Container(nnx.Module):
    """No forward of its own."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(8, 8, rngs=rngs)


def make_model() -> Model:
    return Model(nnx.Rngs(0))


@pytest.mark.parametrize(
    "value",
    [{"w": 1.0}, None, jnp.ones(3), lambda x: x],
    ids=["dict", "None", "array", "function"],
)
def test_what_is_no_module_is_refused(value):
    with pytest.raises(TypeError) as error:
        jfsdp.shard(value)
    assert str(error.value) == (
        "jfsdp.shard takes a module of Flax: a flax.nnx.Module, a flax.linen.Module or a class of such. "
        f"Got {type(value).__name__}."
    )


def test_a_class_of_nnx_is_refused():
    with pytest.raises(TypeError, match="Got the class Linear: make an instance"):
        jfsdp.shard(nnx.Linear)  # pyright: ignore


def test_container_is_refused():
    assert shard_refused(ValueError, Container(nnx.Rngs(0))) == (
        "the module (Container) is a container without a forward (__call__), so there is nothing to "
        "gather its parameters for. Shard the modules in it, or the module that calls them."
    )


def test_list_of_modules_is_refused():
    assert "the module (List) is a container" in shard_refused(ValueError, make_model().blocks)


def test_second_call_on_a_module_is_refused():
    once = jfsdp.shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), make_mesh(fsdp=8))
    assert shard_refused(ValueError, once) == (
        "the module (Linear) is a unit already: jfsdp.shard was applied to it before. Apply it once "
        "to each module, the inner ones first."
    )


def test_units_that_were_sharded_before_are_named():
    mixed = make_model()
    jfsdp.shard(mixed.blocks[1], make_mesh(fsdp=8))
    text = shard_refused(ValueError, mixed, units=nnx.Linear)
    assert text.startswith("blocks.1 (Linear) is a unit already")


def test_annotation_of_an_unknown_kind_is_refused():
    annotated = make_model()
    annotated.head.kernel.set_metadata("partition_names", ("model", None))
    assert shard_refused(ValueError, annotated) == (
        "head.kernel: its metadata ['partition_names'] looks like a sharding annotation that this "
        "version of jfsdp does not know. Use out_sharding=."
    )


def test_annotation_over_an_axis_that_the_mesh_lacks_is_refused():
    annotated = make_model()
    annotated.head.kernel.set_metadata("out_sharding", ("model", None))
    text = shard_refused(ValueError, annotated)
    assert text.startswith("head.kernel: its PartitionSpec P('model', None) names the axis 'model'")
    assert text.endswith("which the mesh does not have. Its axes: fsdp=8.")


@pytest.mark.parametrize("value", [{"w": jnp.ones((8, 8))}, None], ids=["a dict", "None"])
def test_parameter_that_is_no_array_is_refused_by_its_path(value):
    odd = make_model()
    odd.extra = nnx.Param(value)
    with pytest.raises((TypeError, ValueError), match="extra"):
        jfsdp.shard(odd, make_mesh(fsdp=8))


# --------------------------------------------------------------------------------------------------
# Units that do not go together


def gradient(model: Model, x: jax.Array) -> list[jax.Array]:
    return jax.tree.leaves(nnx.grad(lambda model: (model(x) ** 2).mean())(model))


@pytest.mark.parametrize(
    "inner",
    [
        {"dp_mesh_dims": jfsdp.DataParallelMeshDims("fsdp")},
        {"dp_mesh_dims": jfsdp.DataParallelMeshDims("replica", "fsdp")},
        {"mesh": make_mesh(fsdp=8)},
    ],
    ids=["a shard axis only", "the other way round", "another mesh"],
)
def test_nested_unit_over_other_axes_than_its_root_is_refused_or_exact(inner):
    mesh, x = make_mesh(replica=2, fsdp=4), jnp.linspace(0, 1, 128).reshape(16, 8)
    model = make_model()
    jfsdp.shard(model.blocks[0], **({"mesh": mesh} | inner))
    try:
        got = gradient(jfsdp.shard(model, mesh), x)
    except ValueError as error:
        assert "blocks.0" in str(error)
        return
    for one, other in zip(got, gradient(make_model(), x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_inner_module_after_the_outer_one_is_refused():
    model = jfsdp.shard(make_model(), make_mesh(fsdp=8))
    text = shard_refused(ValueError, model.blocks[0])
    assert "the inner ones first" in text


def test_model_that_a_shard_map_closes_over_is_refused():
    """Its parameters are whole there: in the per-device view they have to be handed in as shards."""

    class Total(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(16))

        def __call__(self, x: jax.Array) -> jax.Array:
            return x * self.w[...].sum()

    mesh = make_mesh(fsdp=8)
    model, spec = jfsdp.shard(Total(), mesh), jax.P("fsdp")
    call = jax.shard_map(model, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    with pytest.raises(ValueError, match=r"w: .*\(2,\).*\(16,\)"):
        call(jnp.ones(16))


# --------------------------------------------------------------------------------------------------
# The other functions


def test_unknown_forward_method_is_refused():
    model = jfsdp.shard(make_model(), make_mesh(fsdp=8))
    with pytest.raises(ValueError) as error:
        jfsdp.register_forward_method(model, "encode")
    assert str(error.value) == "register_forward_method: Model has no method 'encode'."


def test_attribute_that_is_no_method_is_refused_as_a_forward():
    model = jfsdp.shard(make_model(), make_mesh(fsdp=8))
    with pytest.raises(ValueError, match=r"Model has no method 'head'"):
        jfsdp.register_forward_method(model, "head")


def test_forward_method_of_what_is_no_unit_is_left_alone():
    model = make_model()
    jfsdp.register_forward_method(model, "encode")
    assert type(model) is Model


def test_optimizer_that_was_built_before_is_refused_at_its_first_update():
    model = make_model()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    jfsdp.shard(model, make_mesh(fsdp=8))
    with pytest.raises(ValueError) as error:
        optimizer.update(model, nnx.state(model, nnx.Param))
    text = str(error.value)
    assert text.startswith("this Optimizer was built before jfsdp.shard(")
    assert text.endswith(
        "its state is whole on one device and would stay so. Build it after shard:\n"
        "  jfsdp.shard(model, ...)\n"
        "  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)"
    )


def test_optimizer_s_text_names_the_user_s_own_class():
    model = make_model()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    jfsdp.shard(model, make_mesh(fsdp=8))
    with pytest.raises(ValueError, match=r"before jfsdp\.shard\(Model\)"):
        optimizer.update(model, nnx.state(model, nnx.Param))


def test_optimizer_of_another_model_is_left_alone():
    jfsdp.shard(make_model(), make_mesh(fsdp=8))
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    optimizer.update(model, nnx.state(model, nnx.Param))
    assert not model.kernel.any()


def test_init_raises_what_shard_raises():
    with pytest.raises(ValueError, match=r"the module \(Container\) is a container"):
        jfsdp.init(lambda: Container(nnx.Rngs(0)), make_mesh(fsdp=8))


def test_init_of_what_is_no_module_is_refused():
    with pytest.raises(
        TypeError, match=r"makes ShapeDtypeStruct, which holds neither an nnx\.Module"
    ):
        jfsdp.init(lambda: jnp.ones(3), make_mesh(fsdp=8))


def test_init_of_an_unknown_setting_is_refused_by_its_name():
    with pytest.raises(TypeError, match="unit_class"):
        jfsdp.init(make_model, make_mesh(fsdp=8), unit_class=nnx.Linear)


def test_init_with_settings_of_a_module_that_shards_itself_is_refused():
    mesh = make_mesh(fsdp=8)
    with pytest.raises(ValueError, match=r"\(Model\) is a unit already"):
        jfsdp.init(lambda: jfsdp.shard(make_model(), mesh), mesh)


NOTHING = r"nothing here is sharded: apply jfsdp\.shard to the model first\."


def test_plan_of_a_model_that_is_not_sharded_is_refused():
    with pytest.raises(ValueError, match=NOTHING):
        jfsdp.plan(make_model())


def test_inspecting_a_step_of_a_model_that_is_not_sharded_is_refused():
    with pytest.raises(ValueError, match=NOTHING):
        jfsdp.inspect(lambda model: model(jnp.ones((8, 8))), make_model())


def test_shardings_of_an_array_without_one_are_refused_by_its_path():
    with pytest.raises((TypeError, ValueError), match="'w'"):
        jfsdp.shardings({"w": np.ones(3)})
