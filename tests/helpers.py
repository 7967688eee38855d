"""What several test files share: meshes, models, unsharded references, and two ways of counting."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jfsdp

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def _name(value: Any) -> str:
    return value.__name__


# --------------------------------------------------------------------------------------------------
# Meshes


def make_mesh(axis_type: AxisType = AUTO, /, **sizes: int) -> Mesh:
    """A mesh over the first devices: `make_mesh(R=2, S=4)`."""
    shape = tuple(sizes.values())
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, tuple(sizes), axis_types=(axis_type,) * len(shape))


MeshOf = Callable[..., contextlib.AbstractContextManager[Mesh]]


@contextlib.contextmanager
def auto(**sizes: int) -> Iterator[Mesh]:
    """Auto axes: JAX's arrays have no spec in their type."""
    yield make_mesh(AUTO, **sizes)


@contextlib.contextmanager
def explicit(**sizes: int) -> Iterator[Mesh]:
    """Explicit axes, as `jax.make_mesh` makes them, given to jfsdp but not set."""
    yield make_mesh(EXPLICIT, **sizes)


@contextlib.contextmanager
def explicit_set(**sizes: int) -> Iterator[Mesh]:
    """Explicit axes under `jax.set_mesh`: arrays inside the block are typed with their spec."""
    mesh = make_mesh(EXPLICIT, **sizes)
    with jax.set_mesh(mesh):
        yield mesh


both_axis_types = pytest.mark.parametrize("mesh_of", [auto, explicit_set], ids=_name)
every_axis_type = pytest.mark.parametrize("mesh_of", [auto, explicit, explicit_set], ids=_name)
both_axis_types_and_partitionings = pytest.mark.parametrize(
    "mesh_of, partitioning",
    [
        (auto, "manual"),
        (auto, "auto"),
        (explicit_set, "manual"),
        pytest.param(explicit_set, "auto", marks=pytest.mark.slow),
    ],
)
both_partitionings = pytest.mark.parametrize("partitioning", ["manual", "auto"])


def spec_entries(spec: P, ndim: int) -> tuple[Any, ...]:
    """The spec with an entry for every dimension: P("S") and P("S", None) say the same."""
    return (*spec, *(None,) * (ndim - len(spec)))


def assert_spec(array: Any, *entries: Any) -> None:
    assert spec_entries(array.sharding.spec, array.ndim) == spec_entries(P(*entries), array.ndim)


def local_shape(array: jax.Array) -> tuple[int, ...]:
    (shape,) = {shard.data.shape for shard in array.addressable_shards}
    return shape


def local_bytes(array: jax.Array) -> int:
    """Bytes of the array on all devices together."""
    return sum(shard.data.nbytes for shard in array.addressable_shards)


def batch_on(mesh: Mesh, x: Any) -> jax.Array:
    """`x` with dimension 0 split over all axes of the mesh."""
    return jax.device_put(x, NamedSharding(mesh, P(mesh.axis_names)))


# --------------------------------------------------------------------------------------------------
# Models and references


def linears(
    count: int, width: int, *, use_bias: bool = False, param_dtype: Any = jnp.float32
) -> nnx.Sequential:
    """A stack of `count` Linear(width, width)."""
    rngs = nnx.Rngs(0)
    return nnx.Sequential(
        *(
            nnx.Linear(width, width, use_bias=use_bias, param_dtype=param_dtype, rngs=rngs)
            for _ in range(count)
        )
    )


def mlp(*widths: int, seed: int = 0) -> nnx.Sequential:
    """Linear layers of these widths with tanh between them."""
    rngs = nnx.Rngs(seed)
    layers: list[Any] = []
    for inner, outer in itertools.pairwise(widths):
        layers += [nnx.Linear(inner, outer, rngs=rngs), jnp.tanh]
    return nnx.Sequential(*layers[:-1])


def rows(count: int, width: int, seed: int = 1) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (count, width))


def repeated(x: Any, count: int = 64) -> Any:
    """A batch of `count` rows made of those of `x`, no two alike."""
    copies = np.concatenate([x] * (count // len(x)))
    scale = np.linspace(0.5, 1.5, count, dtype=np.float32).reshape(-1, *[1] * (x.ndim - 1))
    return copies if x.dtype.kind == "i" else copies * scale


def uneven_weights(count: int = 64) -> jax.Array:
    """Weights of rows, of which whole microbatches of some devices are 0."""
    weights = np.random.default_rng(0).integers(0, 4, count).astype(np.float32)
    weights[:16] = 0
    return jnp.asarray(weights)


def mean_square(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x).astype(jnp.float32) ** 2)


def leaves(tree: Any) -> dict[str, Any]:
    """Every array of a module or pytree by its path."""
    flat, _ = jax.tree_util.tree_flatten_with_path(
        nnx.state(tree) if isinstance(tree, nnx.Module) else tree
    )
    return {jax.tree_util.keystr(path): leaf for path, leaf in flat}


def assert_close(got: Any, expected: Any, **tolerance: float) -> None:
    """The same leaves with the same dtypes and, within the tolerance (default 1e-6), values."""
    tolerance = tolerance or {"rtol": 1e-6, "atol": 1e-6}
    got, expected = leaves(got), leaves(expected)
    assert got.keys() == expected.keys()
    for path, value in expected.items():
        assert got[path].dtype == value.dtype, path
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            value, other = jax.random.key_data(value), jax.random.key_data(got[path])
        else:
            other = got[path]
        np.testing.assert_allclose(
            np.asarray(other, dtype=_wide(other.dtype)),
            np.asarray(value, dtype=_wide(value.dtype)),
            err_msg=path,
            **tolerance,
        )


def _wide(dtype: Any) -> Any:
    return np.float64 if jnp.issubdtype(dtype, jnp.floating) else dtype


def train(
    model: Any,
    x: jax.Array,
    *,
    steps: int = 3,
    loss: Callable[[Any, jax.Array], jax.Array] = mean_square,
    tx: optax.GradientTransformation | None = None,
) -> list[float]:
    """Train in place with nnx.jit; return the losses."""
    optimizer = nnx.Optimizer(model, tx or optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        value, grads = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        return value

    return [float(step(model, optimizer, x)) for _ in range(steps)]


def gradients(model: Any, x: jax.Array, loss: Callable[..., jax.Array] = mean_square) -> Any:
    """Loss and gradients of the parameters under nnx.jit."""
    return nnx.jit(nnx.value_and_grad(loss))(model, x)


def shard_refused(kind: type[Exception], module: Any, mesh: Any = None, **settings: Any) -> str:
    """The text that `shard` raises; the module has the classes, metadata and arrays that it had."""
    before, state = nnx.split(module, graph=True)
    arrays = jax.tree.leaves(state)
    with pytest.raises(kind) as error:
        jfsdp.shard(module, mesh or make_mesh(fsdp=8), **settings)
    after, state = nnx.split(module, graph=True)
    assert after == before
    assert all(x is y for x, y in zip(arrays, jax.tree.leaves(state), strict=True))
    return str(error.value)


# --------------------------------------------------------------------------------------------------
# Counting compilations


@contextlib.contextmanager
def compilations() -> Iterator[Counter[str]]:
    """Counts what XLA really compiles inside the block, by the name of the jitted function.

    A cache entry that finds the old executable again is none, and a function traced once but
    compiled for two shardings is two.
    """
    counts: Counter[str] = Counter()

    def listener(event: str, duration: float, **metadata: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            name = str(metadata.get("fun_name"))
            counts[name.removeprefix("jit(").removesuffix(")")] += 1

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield counts
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


# --------------------------------------------------------------------------------------------------
# Counting collectives, without jfsdp.inspect


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, in order, with those inside of it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


_FUNCTION = re.compile(r"func\.func (?:public |private )?@(\w+)")
_CALL = re.compile(r"(?:func\.)?call @(\w+)")
_COLLECTIVE = re.compile(r"stablehlo\.(all_gather|reduce_scatter|all_reduce|all_to_all)\b")
_RESULT = re.compile(r"-> \(?tensor<((?:\d+x)*)(\w+(?:<\w+>)?)>")


@dataclasses.dataclass(frozen=True)
class Op:
    """One collective of a StableHLO text: its kind, and what it results in."""

    kind: str
    dtype: str
    shape: tuple[int, ...]


def stablehlo_ops(lowered: Any) -> Counter[Op]:
    """The collectives of a lowered program; a function's count once for each call of it.

    Bodies of loops count once.
    """
    text = lowered if isinstance(lowered, str) else lowered.as_text()
    heads = list(_FUNCTION.finditer(text))
    bodies = {
        head[1]: text[head.end() : after.start() if after else len(text)]
        for head, after in zip(heads, [*heads[1:], None], strict=True)
    }

    def ops(name: str) -> Counter[Op]:
        counts = Counter(_read(bodies[name], at) for at in _COLLECTIVE.finditer(bodies[name]))
        for callee in _CALL.findall(bodies[name]):
            counts += ops(callee)
        return counts

    return ops("main")


def _read(body: str, at: re.Match[str]) -> Op:
    result = _RESULT.search(body, at.end())
    assert result is not None
    shape = tuple(int(size) for size in result[1].split("x") if size)
    return Op(at[1], result[2], shape)


def count_ops(lowered: Any, kind: str, dtype: str | None = None) -> int:
    return sum(
        number
        for op, number in stablehlo_ops(lowered).items()
        if op.kind == kind and dtype in (None, op.dtype)
    )


@dataclasses.dataclass(frozen=True)
class CompiledOp:
    """One collective of a compiled program."""

    kind: str
    shape: tuple[int, ...]
    in_loop: bool


_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_CALLED = re.compile(r"(?:body|condition|calls|to_apply)=%?([\w.\-]+)")
_HLO_COLLECTIVE = re.compile(
    r"= \(?\w+\[([\d,]*)\][^=]*? (all-gather|reduce-scatter|all-reduce)(?:-start)?\("
)


def compiled_ops(compiled: Any) -> list[CompiledOp]:
    """The collectives of a compiled program, and whether a while loop runs them."""
    bodies = dict(_COMPUTATION.findall(compiled.as_text()))
    pending = [name for body in bodies.values() for name in re.findall(r"body=%?([\w.\-]+)", body)]
    looped: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in looped:
            looped.add(name)
            pending += _CALLED.findall(bodies[name])
    return [
        CompiledOp(kind, tuple(int(n) for n in dims.split(",") if n), name in looped)
        for name, body in bodies.items()
        for dims, kind in _HLO_COLLECTIVE.findall(body)
    ]
