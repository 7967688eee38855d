"""The plan of what lies in host memory."""

from __future__ import annotations

from typing import Any

from flax import nnx
from helpers import make_mesh, mlp

import jfsdp


def test_what_lies_in_host_memory_has_a_column_and_a_total() -> None:
    mesh = make_mesh(fsdp=8)
    model = nnx.eval_shape(lambda: mlp(64, 128, 64))
    first: Any = model.layers[0]
    jfsdp.shard(first, mesh, offload_policy=jfsdp.CPUOffloadPolicy())
    jfsdp.shard(model, mesh, offload_policy=jfsdp.CPUOffloadPolicy(parameters=False))
    plan = jfsdp.plan(model)
    own, rest = 64 * 128 * 4 // 8, 128 * 64 * 4 // 8
    assert plan.bytes_on_host > own
    assert plan.bytes_per_device - plan.bytes_on_host >= rest
    memories = {row.unit: row.memory for row in plan.rows}
    assert memories == {"(root)": "device, state pinned_host", "layers.0": "pinned_host"}
    lines = str(plan).splitlines()
    assert lines[1].split()[-3:] == ["memory", "per", "device"]
    (total,) = [line for line in lines if line.startswith("of it ")]
    assert total.endswith("the optimizer state of 4 of 4 parameters in host memory")


def test_without_offload_there_is_no_such_column() -> None:
    model = nnx.eval_shape(lambda: mlp(64, 128, 64))
    plan = jfsdp.plan(jfsdp.shard(model, make_mesh(fsdp=8)))
    assert (plan.offloads, plan.bytes_on_host) == (False, 0)
    assert "memory" not in str(plan)
