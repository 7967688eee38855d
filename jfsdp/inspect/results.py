"""The arrays that a program gives back, and in which memory."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
from jax.extend.mlir import ir

from .collective import dtype_name, nbytes
from .memory import Argument

__all__ = ["results_of"]


def results_of(
    lowered: jax.stages.Lowered, shares: Mapping[tuple[int, ...], tuple[int, ...]]
) -> tuple[Argument, ...]:
    """The arrays that a step returns.

    Args:
        lowered: the step.
        shares: by the global shape of an argument that of one device's part, which results are taken to have.

    Returns:
        One entry per array; its path is what jax calls the result.
    """
    module = lowered.compiler_ir("stablehlo")
    assert isinstance(module, ir.Module), type(module)
    main = next(op.operation for op in module.body.operations if _is_main(op.operation))
    kind = ir.TypeAttr(main.attributes["function_type"]).value
    results = ir.FunctionType(kind).results
    each = [{}] * len(results)
    if "res_attrs" in main.attributes:
        each = [_texts(note) for note in ir.ArrayAttr(main.attributes["res_attrs"])]
    return tuple(
        _result(array, note, shares)
        for array, note in zip(results, each, strict=True)
        if isinstance(array, ir.RankedTensorType) and array.has_static_shape
    )


def _result(
    array: ir.RankedTensorType,
    note: Mapping[str, str],
    shares: Mapping[tuple[int, ...], tuple[int, ...]],
) -> Argument:
    shape, dtype = tuple(array.shape), dtype_name(str(array.element_type))
    size = math.ceil(nbytes(shares.get(shape, shape), dtype))
    path = note.get("jax.result_info", "").removeprefix("result")
    return Argument(path, "rest", shape, dtype, size, note.get("mhlo.memory_kind"))


def _texts(note: ir.Attribute) -> dict[str, str]:
    named = ir.DictAttr(note)
    return {a.name: ir.StringAttr(a.attr).value for a in named if isinstance(a.attr, ir.StringAttr)}


def _is_main(op: ir.Operation) -> bool:
    return "sym_name" in op.attributes and str(op.attributes["sym_name"]).strip('"') == "main"
