"""The plan: one row for each parameter, what it costs, what is replicated and why, and its table."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import jfsdp
from jfsdp.inspect.table import human_bytes

P = PartitionSpec


class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(x)))


class Model(nnx.Module):
    """Blocks between two layers, and two parameters that cannot be sharded."""

    def __init__(self, width: int = 8, depth: int = 3, *, rngs: nnx.Rngs):
        self.embed = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(depth)])
        self.scale = nnx.Param(jnp.ones(()))
        self.shift = nnx.Param(jnp.ones(3))

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.embed(x) * self.scale[...] + self.shift[...].sum()


def mesh(**sizes: int) -> jax.sharding.Mesh:
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def abstract_model() -> Model:
    return nnx.eval_shape(lambda: Model(rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def plan():
    policy = jfsdp.MixedPrecisionPolicy("bfloat16", "float32")
    model = jfsdp.shard(abstract_model(), mesh(replica=2, fsdp=4), units=Block, mp_policy=policy)
    return jfsdp.plan(model)


def row(plan, path: str):
    (found,) = [row for row in plan.rows if row.path == path]
    return found


def test_every_parameter_has_one_row(plan):
    paths = [row.path for row in plan.rows]
    inside = [f"{layer}.{leaf}" for layer in ("down", "up") for leaf in ("bias", "kernel")]
    blocks = [f"blocks.{i}.{leaf}" for i in range(3) for leaf in inside]
    assert sorted(paths) == sorted(["embed.kernel", "scale", "shift", *blocks])


def test_row_says_where_its_parameter_lies(plan):
    found = row(plan, "blocks.1.up.kernel")
    assert (found.unit, found.shape, found.dtype, found.spec, found.reason) == (
        "blocks.1",
        (8, 32),
        jnp.float32,
        P(None, "fsdp"),
        "",
    )


def test_parameters_of_the_outermost_unit_are_the_root_s(plan):
    roots = [row.path for row in plan.rows if row.unit == "(root)"]
    assert sorted(roots) == ["embed.kernel", "scale", "shift"]


def test_bytes_are_in_storage_dtype_and_per_device_over_the_shard_axes(plan):
    found = row(plan, "blocks.0.up.kernel")
    assert (found.bytes, found.bytes_per_device) == (8 * 32 * 4, 8 * 32 * 4 // 4)


def test_replicated_parameters_are_listed_with_their_reasons(plan):
    assert {row.path: row.reason for row in plan.replicated} == {
        "scale": "a scalar",
        "shift": "no free dimension (3) divides by 4",
    }


def test_replicated_parameter_is_whole_on_each_device(plan):
    found = row(plan, "shift")
    assert (found.bytes, found.bytes_per_device, found.spec) == (12, 12, P())


def test_totals_are_the_sums_of_the_rows(plan):
    each = 8 * 32 + 32 + 32 * 8 + 8
    assert plan.parameters == 3 * each + 64 + 1 + 3
    assert plan.bytes == 4 * plan.parameters
    assert plan.bytes_per_device == 4 * ((3 * each + 64) // 4 + 1 + 3)


def test_units_of_like_size_warn_of_nothing(plan):
    assert plan.warnings == ()


def test_one_unit_for_the_whole_model_is_warned_of():
    plan = jfsdp.plan(jfsdp.shard(abstract_model(), mesh(fsdp=8)))
    assert plan.warnings == (
        "the unit (root) holds 100% of the model (6.7 KiB), which is gathered at once. Make the "
        "repeated blocks units of their own: jfsdp.shard(model, units=Block).",
    )


TABLE = """\
parameters on replica=2, fsdp=4; compute in bfloat16, reduce in float32
unit        parameter     shape   dtype    spec             per device
----------------------------------------------------------------------
(root)      embed.kernel  8x8     float32  P('fsdp')        64 B
(root)      scale         scalar  float32  P()              4 B
(root)      shift         3       float32  P()              12 B
blocks.0-2  down.bias     8       float32  P('fsdp')        8 B x3
blocks.0-2  down.kernel   32x8    float32  P('fsdp')        256 B x3
blocks.0-2  up.bias       32      float32  P('fsdp')        32 B x3
blocks.0-2  up.kernel     8x32    float32  P(None, 'fsdp')  256 B x3
----------------------------------------------------------------------
total: 1,724 parameters, 6.7 KiB; 1.7 KiB per device (25.2%)
replicated, a scalar: scale
replicated, no free dimension (3) divides by 4: shift"""


def test_table_has_repeated_blocks_on_one_line(plan):
    assert str(plan) == TABLE


def test_table_ends_in_its_warnings():
    plan = jfsdp.plan(jfsdp.shard(abstract_model(), mesh(fsdp=8)))
    assert str(plan).splitlines()[-1] == f"warning: {plan.warnings[0]}"


def test_table_without_policy_names_the_mesh_alone():
    plan = jfsdp.plan(jfsdp.shard(abstract_model(), mesh(fsdp=8)))
    assert str(plan).splitlines()[0] == "parameters on fsdp=8"


def test_layers_of_other_shapes_are_lines_of_their_own():
    class Pyramid(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)])

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.layers[1](self.layers[0](x))

    model = jfsdp.shard(
        nnx.eval_shape(lambda: Pyramid(nnx.Rngs(0))), mesh(fsdp=8), units="layers.*"
    )
    lines = str(jfsdp.plan(model)).splitlines()
    assert [line.split()[:3] for line in lines if "kernel" in line] == [
        ["layers.0", "kernel", "8x8"],
        ["layers.1", "kernel", "8x4"],
    ]


@pytest.mark.parametrize("units", [(), "embed"], ids=["in one unit", "in two units"])
def test_tied_parameter_has_one_row(units):
    class Tied(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.embed = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
            self.head = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
            self.head.kernel = self.embed.kernel

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.head(self.embed(x))

    model = jfsdp.shard(nnx.eval_shape(lambda: Tied(nnx.Rngs(0))), mesh(fsdp=8), units=units)
    assert [row.bytes for row in jfsdp.plan(model).rows] == [8 * 8 * 4]


def test_plan_is_the_same_for_an_abstract_and_a_concrete_model():
    concrete = jfsdp.shard(Model(rngs=nnx.Rngs(0)), mesh(fsdp=8), units=Block)
    abstract = jfsdp.shard(abstract_model(), mesh(fsdp=8), units=Block)
    assert str(jfsdp.plan(concrete)) == str(jfsdp.plan(abstract))


def test_plan_of_a_part_is_that_part_s():
    model = jfsdp.shard(abstract_model(), mesh(fsdp=8), units=Block)
    plan = jfsdp.plan(model.blocks[1])
    assert {row.unit for row in plan.rows} == {"(root)"}
    assert "up.kernel" in [row.path for row in plan.rows]


def test_units_without_a_root_keep_their_paths():
    model = nnx.eval_shape(
        lambda: nnx.Dict(block=Block(8, nnx.Rngs(0)), block2=Block(8, nnx.Rngs(1)))
    )
    for block in (model.block, model.block2):
        jfsdp.shard(block, mesh(fsdp=8))
    assert {row.unit for row in jfsdp.plan(model).rows} == {"block", "block2"}


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 * 2**20, "5.0 MiB"),
        (3 * 2**30, "3.0 GiB"),
        (2**42, "4.0 TiB"),
    ],
)
def test_bytes_are_written_for_people(size, text):
    assert human_bytes(size) == text
