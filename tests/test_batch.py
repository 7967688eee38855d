"""Batches on the mesh: rows in order over all data-parallel devices, remainders, what is refused."""

from __future__ import annotations

import math
import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import EXPLICIT, assert_spec, local_shape, make_mesh
from hypothesis import strategies
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jfsdp.batch import shard_batch
from jfsdp.mesh import DataParallelMeshDims


def rows(count: int, *shape: int) -> np.ndarray:
    return np.arange(count * math.prod(shape), dtype=np.float32).reshape(count, *shape)


# --------------------------------------------------------------------------------------------------
# Where rows go


def test_the_batch_is_split_over_both_data_parallel_axes():
    """B21: batch (16,4) on R2xS4: local (2,4), spec over both axes."""
    batch = shard_batch(rows(16, 4), make_mesh(R=2, S=4))
    assert local_shape(batch) == (2, 4)
    assert batch.sharding.spec == P(("R", "S"))


def test_rows_lie_on_the_devices_in_order():
    """B45: (16,4) on S8: 8 devices, local (2,4) each, values in order; not all on the first."""
    batch = shard_batch(rows(16, 4), make_mesh(S=8))
    shards = sorted(batch.addressable_shards, key=lambda shard: shard.device.id)
    assert [shard.device for shard in shards] == jax.devices()
    np.testing.assert_array_equal(np.stack([s.data for s in shards]), rows(16, 4).reshape(8, 2, 4))


def test_a_wrong_global_size_is_refused():
    """B45: (16,4) given as the global batch of 32 rows."""
    with pytest.raises(ValueError, match=r"global batch has 16 rows.* not global_size=32"):
        shard_batch(rows(16, 4), make_mesh(S=8), global_size=32)


def test_the_right_global_size_passes():
    assert shard_batch(rows(16, 4), make_mesh(S=8), global_size=16).shape == (16, 4)


def test_other_axes_hold_copies():
    mesh = make_mesh(S=4, T=2)
    batch = shard_batch(rows(8, 4), mesh, dp_mesh_dims=DataParallelMeshDims(shard="S"))
    assert local_shape(batch) == (2, 4)
    assert_spec(batch, "S")


@pytest.mark.parametrize("setting", ["none", "context"])
def test_without_a_mesh_it_is_the_one_in_context_or_all_devices(setting: str):
    if setting == "context":
        with jax.set_mesh(make_mesh(R=2, S=4)):
            assert_spec(shard_batch(rows(16, 4)), ("R", "S"))
    else:
        assert_spec(shard_batch(rows(16, 4)), "fsdp")


def test_an_explicit_mesh_that_is_not_set_is_taken_for_its_auto_twin():
    """As jfsdp.shard takes it: else batch and parameters would lie on two meshes."""
    assert shard_batch(rows(8), make_mesh(EXPLICIT, S=8)).sharding.mesh == make_mesh(S=8)


@hypothesis.given(
    sizes=strategies.lists(strategies.sampled_from([1, 2, 4, 8]), min_size=1, max_size=3).filter(
        lambda sizes: math.prod(sizes) <= 8
    ),
    data=strategies.data(),
    per_device=strategies.integers(1, 3),
    shape=strategies.lists(strategies.integers(0, 3), max_size=2),
)
def test_any_batch_that_divides_keeps_its_values_and_is_split_evenly(
    sizes: list[int], data: Any, per_device: int, shape: list[int]
):
    names = "abc"[: len(sizes)]
    mesh = make_mesh(**dict(zip(names, sizes, strict=True)))
    shard = data.draw(strategies.sampled_from(names))
    others = [name for name in names if name != shard]
    replicate = data.draw(strategies.sampled_from([None, *others]))
    devices = math.prod(mesh.shape[name] for name in (shard, replicate) if name)
    batch = {"x": rows(devices * per_device, *shape), "n": 3}
    dims = DataParallelMeshDims(shard=shard, replicate=replicate)
    laid = shard_batch(batch, mesh, dp_mesh_dims=dims)
    np.testing.assert_array_equal(laid["x"], batch["x"])
    assert local_shape(laid["x"]) == (per_device, *shape)
    assert laid["n"].sharding.is_fully_replicated


# --------------------------------------------------------------------------------------------------
# Leaves


@pytest.mark.parametrize("number", [3, 0.5, True, np.float32(1), np.array(2), jnp.ones(())])
def test_numbers_are_copied_to_every_device(number: Any):
    mesh = make_mesh(S=8)
    (laid,) = jax.tree.leaves(shard_batch({"n": number}, mesh))
    assert laid.sharding == NamedSharding(mesh, P())
    assert laid == number


@pytest.mark.parametrize("dtype", ["int32", "bool", "bfloat16", "uint8", "complex64"])
def test_every_dtype_of_numbers_is_kept(dtype: str):
    batch = np.ones((8, 2), jnp.dtype(dtype))
    assert shard_batch(batch, make_mesh(S=8)).dtype == dtype


def test_keys_are_split_like_rows():
    keys = jax.random.split(jax.random.key(0), 16)
    assert local_shape(shard_batch(keys, make_mesh(S=8))) == (2,)


def test_a_batch_that_lies_in_place_is_returned_as_it_is():
    mesh = make_mesh(R=2, S=4)
    batch = shard_batch({"x": rows(16, 4), "n": 1}, mesh)
    again = shard_batch(batch, mesh)
    assert again["x"] is batch["x"]
    assert again["n"] is batch["n"]


@pytest.mark.parametrize("spec", [P(), P("S"), P(None, "S")], ids=str)
def test_an_array_that_lies_otherwise_is_moved(spec: P):
    mesh = make_mesh(R=2, S=4)
    batch = jax.device_put(rows(16, 4), NamedSharding(mesh, spec))
    laid = shard_batch(batch, mesh)
    assert laid.sharding.spec == P(("R", "S"))
    np.testing.assert_array_equal(laid, rows(16, 4))


def test_an_array_of_one_device_is_split():
    assert local_shape(shard_batch(jnp.ones((16, 4)), make_mesh(S=8))) == (2, 4)


@pytest.mark.parametrize("leaf", ["text", np.array(["a", "b"]), object()], ids=["str", "U", "O"])
def test_what_holds_no_numbers_is_refused_by_its_path(leaf: Any):
    with pytest.raises(TypeError, match=r"batch\['id'\] is of type .*Take it out"):
        shard_batch({"x": rows(8), "id": leaf}, make_mesh(S=8))


def test_a_traced_batch_is_refused_with_the_remedy():
    with pytest.raises(TypeError, match=r"batch\['x'\] is traced.*with_sharding_constraint"):
        jax.jit(lambda x: shard_batch({"x": x}, make_mesh(S=8)))(rows(8))


def test_leaves_with_different_numbers_of_rows_are_listed():
    batch = {"x": rows(16, 4), "y": rows(8), "n": 1}
    with pytest.raises(ValueError, match=r"(?s)batch\['x'\] \(16, 4\)\n  batch\['y'\] \(8,\)$"):
        shard_batch(batch, make_mesh(S=8))


def test_a_mesh_whose_devices_are_not_here_is_refused():
    with pytest.raises(ValueError, match=r"S=8 has no devices here.*jax\.ShapeDtypeStruct"):
        shard_batch(rows(8), AbstractMesh((8,), ("S",)))


# --------------------------------------------------------------------------------------------------
# Remainders


def test_rows_that_do_not_divide_are_refused_with_the_next_sizes():
    with pytest.raises(ValueError, match=r"13 rows do not divide by 8 .*R=2, S=4.* 8 or 16 rows"):
        shard_batch(rows(13), make_mesh(R=2, S=4))


def test_a_training_batch_of_one_is_refused():
    """B44: batch 1 on S8."""
    with pytest.raises(ValueError, match=r"1 rows do not divide by 8 .*\. 8 rows divide"):
        shard_batch(rows(1, 16), make_mesh(S=8))


@pytest.mark.parametrize("count, left", [(13, 8), (16, 16), (23, 16)])
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_drop_leaves_the_last_rows_out(count: int, left: int, kind: Any):
    batch = shard_batch(kind(rows(count, 2)), make_mesh(S=8), remainder="drop")
    np.testing.assert_array_equal(batch, rows(count, 2)[:left])


def test_drop_that_would_leave_nothing_is_refused():
    with pytest.raises(ValueError, match=r"7 rows do not divide by 8 .*remainder='pad'"):
        shard_batch(rows(7), make_mesh(S=8), remainder="drop")


@pytest.mark.parametrize("count, padded", [(1, 8), (13, 16), (16, 16)])
def test_pad_adds_rows_of_zeros_and_returns_a_mask(count: int, padded: int):
    mesh = make_mesh(R=2, S=4)
    batch, mask = shard_batch({"x": rows(count, 2), "n": 1}, mesh, remainder="pad")
    np.testing.assert_array_equal(batch["x"][:count], rows(count, 2))
    np.testing.assert_array_equal(batch["x"][count:], np.zeros((padded - count, 2)))
    np.testing.assert_array_equal(mask, np.arange(padded) < count)
    assert mask.dtype == jnp.float32
    assert mask.sharding == batch["x"].sharding


@pytest.mark.parametrize(
    "batch, settings, text",
    [
        (rows(8), {"remainder": "truncate"}, r"one of \('error', 'drop', 'pad'\), got 'truncate'"),
        ({"n": 1}, {"remainder": "pad"}, "needs an array with rows"),
        ({"x": rows(0, 4)}, {}, r"batch\['x'\] \(0, 4\) has no rows"),
    ],
    ids=["remainder", "nothing to pad", "no rows"],
)
def test_other_mistakes_are_refused(batch: Any, settings: Any, text: str):
    with pytest.raises(ValueError, match=text):
        shard_batch(batch, make_mesh(S=8), **settings)


# --------------------------------------------------------------------------------------------------
# Several processes


@pytest.mark.slow
def test_two_processes_give_their_own_rows():
    """B45: two processes of 4 devices: a global (16,4) of two (8,4); see tests/two_processes.py."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    program = str(pathlib.Path(__file__).with_name("two_processes.py"))
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", program, str(port), str(index)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    try:
        texts = [process.communicate(timeout=180)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(texts)
