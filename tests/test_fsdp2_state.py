"""States that are saved whole and loaded on other meshes, as in FSDP2's tests: see FSDP2_CONFORMANCE.md."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    assert_close,
    assert_spec,
    batch_on,
    gradients,
    make_mesh,
    mean_square,
    mlp,
    rows,
)
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jfsdp

S8: dict[str, int] = {"S": 8}
HSDP: dict[str, int] = {"R": 2, "S": 4}
WIDTHS = {"2": (2, 2), "3": (3, 5, 4), "4": (4, 4, 2), "5": (5, 5, 5), "16": (16, 16, 16)}


def arrays_of(state: Any) -> dict[str, np.ndarray]:
    """The state as a flat dict of whole numpy arrays, one at a time."""
    flat = nnx.to_flat_state(state)
    return {".".join(map(str, p)): np.asarray(jfsdp.unshard(v.get_raw_value())) for p, v in flat}


@pytest.mark.parametrize(
    "widths",
    [
        pytest.param(widths, id=name, marks=() if name in ("3", "16") else pytest.mark.slow)
        for name, widths in WIDTHS.items()
    ],
)
@pytest.mark.parametrize("to", [S8, HSDP, {"S": 4}], ids=["S8", "R2xS4", "S4"])
def test_a_state_dict_goes_to_another_mesh_and_training_goes_on(to: Any, widths: tuple[int, ...]):
    """Saved whole on S8 after two steps, loaded into shards elsewhere: the next step is the same."""
    x, tx = rows(16, widths[0]), optax.adam(1e-2)

    def built(sizes: Any) -> tuple[Any, nnx.Optimizer, Mesh]:
        mesh = make_mesh(**sizes)
        model = jfsdp.shard(mlp(*widths), mesh, units=nnx.Linear)
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param), mesh

    @nnx.jit
    def step(model: Any, optimizer: nnx.Optimizer, x: jax.Array) -> None:
        optimizer.update(model, nnx.grad(mean_square)(model, x))

    first = built(S8)
    for _ in range(2):
        step(*first[:2], batch_on(first[2], x))
    saved = arrays_of(nnx.state(first[:2]))
    assert saved.keys() == arrays_of(nnx.state(built(S8)[:2])).keys()
    other = built(to)
    for path, variable in nnx.to_flat_state(nnx.state(other[:2])):
        array = saved[".".join(map(str, path))]
        variable.set_raw_value(jax.device_put(array, variable.get_raw_value().sharding))
    for one in (first, other):
        step(*one[:2], batch_on(one[2], x))
    got, expected = arrays_of(nnx.state(other[:2])), arrays_of(nnx.state(first[:2]))
    for path, value in expected.items():
        np.testing.assert_allclose(got[path], value, rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.parametrize(
    "to", [S8, {"S": 4, "T": 2}, {"R": 2, "S": 2, "T": 2}], ids=["S8", "S4xT2", "3D"]
)
def test_a_state_dict_crosses_tensor_axes(to: Any):
    """Saved on S4xT2, columns of the kernel on T; elsewhere the same arrays, and their gradients."""

    def built(sizes: Any) -> tuple[Any, Mesh]:
        mesh, model = make_mesh(**sizes), mlp(16, 32, 8)
        if "T" in sizes:
            model.layers[0].kernel.set_metadata(out_sharding=(None, "T"))
        dims = jfsdp.DataParallelMeshDims("S", "R" if "R" in sizes else None)
        return jfsdp.shard(model, mesh, dp_mesh_dims=dims, units=nnx.Linear), mesh

    first, _ = built({"S": 4, "T": 2})
    assert_spec(first.layers[0].kernel, "S", "T")
    saved = {path: array + 1 for path, array in arrays_of(nnx.state(first)).items()}
    model, mesh = built(to)
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        place = variable.get_raw_value().sharding
        variable.set_raw_value(jax.device_put(saved[".".join(map(str, path))], place))
    loaded = arrays_of(nnx.state(model))
    for path, array in saved.items():
        np.testing.assert_array_equal(loaded[path], array, err_msg=path)
    plain = mlp(16, 32, 8)
    for path, variable in nnx.to_flat_state(nnx.state(plain)):
        variable.set_raw_value(jnp.asarray(saved[".".join(map(str, path))]))
    axes = tuple(axis for axis in mesh.axis_names if axis != "T")
    x = jax.device_put(rows(16, 16), NamedSharding(mesh, P(axes)))
    assert_close(gradients(model, x), gradients(plain, rows(16, 16)), rtol=1e-5, atol=1e-5)
