"""Programs for the inspector to read: regions over small meshes, and hand-written StableHLO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.mlir import ir
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jfsdp.inspect import Collective, collectives

AXES = ("a", "b", "c")
ARRAY = "tensor<8xf32>"
ALL_DEVICES = "dense<[[0, 1, 2, 3, 4, 5, 6, 7]]> : tensor<1x8xi64>"


def make_mesh(*sizes: int, axis_type: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh(sizes, AXES[: len(sizes)], axis_types=(axis_type,) * len(sizes))


def lower(
    per_device: Callable[..., Any],
    mesh: Mesh,
    *shapes: tuple[int, ...],
    dtype: Any = jnp.float32,
) -> jax.stages.Lowered:
    """A program in which each device runs `per_device` on arrays of just these shapes."""
    region = jax.shard_map(per_device, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(region).lower(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))


def read(
    per_device: Callable[..., Any],
    mesh: Mesh,
    *shapes: tuple[int, ...],
    dtype: Any = jnp.float32,
) -> list[Collective]:
    return collectives(lower(per_device, mesh, *(shapes or ((8,),)), dtype=dtype), mesh)


def executions(per_device: Callable[..., Any]) -> list[int]:
    return [record.executions for record in read(per_device, make_mesh(8))]


def psum(x: jax.Array) -> jax.Array:
    return lax.psum(x, "a")


def read_text(body: str, functions: str = "") -> list[Collective]:
    """Reads hand-written StableHLO, for what JAX does not write. `%x` and `%y` are in scope."""

    class Handwritten:
        def compiler_ir(self, dialect: str) -> ir.Module:
            # A context that has JAX's dialects loaded.
            other = jax.jit(jnp.sin).lower(1.0).compiler_ir(dialect)
            assert isinstance(other, ir.Module)
            with other.context:
                return ir.Module.parse(f"""module {{
                  func.func public @main(%x: {ARRAY}, %y: {ARRAY}) {{ {body} return }}
                  {functions}
                }}""")

    return collectives(Handwritten(), make_mesh(2, 4))  # pyright: ignore[reportArgumentType]


def all_reduce(groups: str = ALL_DEVICES, operands: str = "%x", types: str = ARRAY) -> str:
    results = 1 + operands.count(",")
    return f"""
      %r:{results} = "stablehlo.all_reduce"({operands}) <{{
        replica_groups = {groups}}}> ({{
        ^bb0(%left: tensor<f32>, %right: tensor<f32>):
          stablehlo.return %left : tensor<f32>
      }}) : ({types}) -> ({types})"""


def loop_to(bound: Any, x: jax.Array) -> jax.Array:
    return lax.fori_loop(jnp.int32(0), bound, lambda _, carry: psum(carry), x)
