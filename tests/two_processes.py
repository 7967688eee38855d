"""One of two processes of 4 devices: `python two_processes.py PORT INDEX`, run by test_batch.py."""

import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jfsdp.batch import shard_batch
from jfsdp.mesh import DataParallelMeshDims

PORT, INDEX = sys.argv[1], int(sys.argv[2])


def whole(x: jax.Array) -> np.ndarray:
    """The global array, gathered into every process."""
    replicated = jax.jit(
        lambda x: x, out_shardings=jax.sharding.NamedSharding(x.sharding.mesh, P())
    )
    return np.asarray(replicated(x).addressable_data(0))


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{PORT}", 2, INDEX)
    assert (jax.device_count(), jax.local_device_count()) == (8, 4)
    mesh = jax.make_mesh((2, 4), ("R", "S"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    everything = np.arange(64, dtype=np.int64).reshape(16, 4)
    own = everything[8 * INDEX : 8 * (INDEX + 1)]

    batch = shard_batch({"x": own, "n": 3}, mesh, global_size=16)
    assert batch["x"].shape == (16, 4)
    assert [shard.data.shape for shard in batch["x"].addressable_shards] == [(2, 4)] * 4
    assert batch["x"].sharding.spec == P(("R", "S"))
    np.testing.assert_array_equal(whole(batch["x"]), everything)
    assert batch["n"].shape == ()
    assert shard_batch(batch, mesh)["x"] is batch["x"]

    with pytest.raises(ValueError, match=r"32 rows, of 2 process.* 16 each, not global_size=16"):
        shard_batch(everything, mesh, global_size=16)
    with pytest.raises(
        ValueError, match=r"6 rows of this process do not divide by 4 .* 4 or 8 rows"
    ):
        shard_batch(own[:6], mesh)

    padded, mask = shard_batch(own[:6], mesh, remainder="pad")
    np.testing.assert_array_equal(whole(mask), [1] * 6 + [0] * 2 + [1] * 6 + [0] * 2)
    assert padded.shape == (16, 4)
    assert shard_batch(own[:6], mesh, remainder="drop").shape == (8, 4)

    # A tensor axis across the processes: both hold all rows.
    devices = np.asarray(jax.devices()).reshape(2, 4).T
    crossed = Mesh(devices, ("S", "T"))
    batch = shard_batch(everything, crossed, dp_mesh_dims=DataParallelMeshDims(shard="S"))
    assert batch.shape == (16, 4)
    np.testing.assert_array_equal(whole(batch), everything)

    # A mesh of this process alone: its rows are the global ones.
    alone = Mesh(np.asarray(jax.local_devices()), ("S",))
    assert shard_batch(own, alone).shape == (8, 4)
    other = Mesh(np.asarray([d for d in jax.devices() if d.process_index != INDEX]), ("S",))
    with pytest.raises(ValueError, match=f"process {INDEX} has no device of the mesh S=4"):
        shard_batch(own, other)


if __name__ == "__main__":
    main()
