"""The inspector's report: rows, minima, text, and the way from a step to it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from programs import (
    loop_to,
    lower,
    make_mesh,
)

from jfsdp.inspect import Collective, Minimum, Report, Row
from jfsdp.inspect.read import inspect
from jfsdp.inspect.table import human_bytes

# Reports.


def record(kind: str, axis: str, dtype: str, times: int, received: float) -> Collective:
    return Collective(kind, (axis,), dtype, (), (), 2, times, received)


def example() -> Report:
    return Report(
        collectives=(
            record("all-reduce", "fsdp", "float32", 1, 7),
            record("all-gather", "fsdp", "bfloat16", 3, 1024**2),
            record("all-gather", "fsdp", "bfloat16", 1, 1024**2),
            record("all-reduce", "replica", "float32", 2, 1536),
        ),
        minima=(
            Minimum("all-gather", 4 * 1024**2, "parameters in bfloat16"),
            Minimum("all-reduce", 3072),
            Minimum("reduce-scatter", 100),
        ),
        mesh_axes=(("replica", 2), ("fsdp", 4)),
        jax_version="1.2.3",
    )


def test_rows_add_up_what_has_kind_axes_and_dtype_in_common() -> None:
    assert example().rows == (
        Row("all-gather", ("fsdp",), "bfloat16", 4, 4 * 1024**2, 4 * 1024**2),
        Row("reduce-scatter", (), "", 0, 0, 100),
        Row("all-reduce", ("replica",), "float32", 2, 3072),
        Row("all-reduce", ("fsdp",), "float32", 1, 7),
    )


def test_groups_without_axes_have_rows_of_their_own() -> None:
    one, two = (
        dataclasses.replace(record("all-reduce", "a", "float32", 1, 7), axes=(), groups=groups)
        for groups in ("[[0, 1], [2, 3]]", "[[0, 3], [1, 2]]")
    )
    assert [row.groups for row in Report((one, two, one)).rows] == [one.groups, two.groups]


def test_totals_hold_each_kind_against_its_minimum() -> None:
    ratios = {total.kind: total.ratio for total in example().totals}
    assert ratios == {"all-gather": 1.0, "reduce-scatter": 0.0, "all-reduce": 3079 / 3072}


def test_minima_of_one_kind_add_up() -> None:
    report = Report((), minima=(Minimum("all-gather", 3), Minimum("all-gather", 4)))
    assert [total.minimum for total in report.totals] == [7]


def test_a_minimum_of_zero_has_no_ratio() -> None:
    report = Report((record("all-reduce", "a", "float32", 1, 7),), (Minimum("all-reduce", 0),))
    assert [row.ratio for row in report.rows] == [None]


def test_count_and_bytes_select_by_kind_axes_and_dtype() -> None:
    report = example()
    assert (report.count(), report.total_bytes) == (7, 4 * 1024**2 + 3072 + 7)
    assert (report.count("all-reduce"), report.bytes("all-reduce", axes="fsdp")) == (3, 7)
    assert (report.count(axes=("fsdp",)), report.count(dtype=jnp.bfloat16)) == (5, 4)


@pytest.mark.parametrize(
    ("selection", "error", "message"),
    [
        ({"kind": "all_gather"}, ValueError, "no kind of collective 'all_gather'; there are"),
        ({"axes": "fdsp"}, ValueError, r"no axes \['fdsp'\] in this mesh, which has"),
        ({"dtype": "bf16"}, TypeError, "bf16"),
    ],
)
def test_a_misspelled_selection_is_an_error(
    selection: dict[str, str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        example().count(**selection)


def test_a_minimum_of_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(ValueError, match="no kind of collective 'gather'"):
        Minimum("gather", 1)


def test_a_negative_minimum_is_an_error() -> None:
    with pytest.raises(ValueError, match="is -1 bytes; give a number of bytes from 0 up"):
        Minimum("all-gather", -1)


def test_reports_are_equal_by_value() -> None:
    assert example() == example()


def test_json_has_exact_bytes_and_ratios() -> None:
    content = json.loads(example().to_json())
    assert content["mesh"] == {"replica": 2, "fsdp": 4}
    assert content["total_bytes"] == 4 * 1024**2 + 3072 + 7
    assert content["totals"][2]["ratio"] == 3079 / 3072
    assert [record["executions"] for record in content["collectives"]] == [1, 3, 1, 2]


def test_the_table_is_aligned_and_complete() -> None:
    assert (
        str(example())
        == """\
jax 1.2.3, mesh replica=2 x fsdp=4: as lowered, before compiler passes; \
bytes received per device and step

kind            axes     dtype     count    bytes  minimum  ratio
-----------------------------------------------------------------
all-gather      fsdp     bfloat16      4  4.0 MiB  4.0 MiB  1.000
reduce-scatter  -        -             0      0 B    100 B  0.000
all-reduce      replica  float32       2  3.0 KiB
                fsdp     float32       1      7 B
                total                  3  3.0 KiB  3.0 KiB  1.002
-----------------------------------------------------------------
7 collectives, 4.0 MiB
minimum of all-gather: parameters in bfloat16"""
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1023.6, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (5 * 1024**3, "5.0 GiB"),
        (2048 * 1024**3, "2.0 TiB"),
    ],
)
def test_bytes_are_written_in_the_largest_unit_that_fits(count: float, text: str) -> None:
    assert human_bytes(count) == text


def test_the_table_says_when_counts_are_a_lower_bound() -> None:
    report = inspect(
        lower(lambda x: loop_to(x[0].astype(int), x), make_mesh(8), (8,)), mesh=make_mesh(8)
    )
    assert "all-reduce  a     float32     1+   56 B" in str(report)
    assert str(report).endswith(
        "+ inside a loop whose length the program does not say: counted once"
    )


def test_the_table_of_an_empty_program_says_so() -> None:
    assert str(inspect(jnp.sin, jnp.ones(3), mesh=make_mesh(8))).endswith("\n\nno collectives")


# From a step to its report.


@pytest.mark.parametrize("wrap", [jax.jit, nnx.jit, lambda step: step], ids=["jit", "nnx", "plain"])
def test_a_step_is_lowered_with_its_arguments(wrap: Callable[..., Any]) -> None:
    mesh = make_mesh(2, 4)
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    region = jax.shard_map(
        lambda x: lax.psum(x, "b"), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    step = (lambda model, x: region(model(x))) if wrap is not jax.jit else lambda _, x: region(x)
    argument = 0 if wrap is jax.jit else model
    report = inspect(wrap(step), argument, x=jnp.ones((2, 4)), mesh=mesh)
    assert (report.count("all-reduce", axes="b"), report.jax_version) == (1, jax.__version__)


@pytest.mark.parametrize("jit", [jax.jit, nnx.jit])
def test_a_lowered_program_is_read_as_it_is(jit: Callable[..., Any]) -> None:
    assert inspect(jit(jnp.sin).lower(jnp.ones(3)), mesh=make_mesh(8)).count() == 0


def test_arguments_of_a_lowered_program_are_an_error() -> None:
    with pytest.raises(TypeError, match="the program is lowered already"):
        inspect(jax.jit(jnp.sin).lower(1.0), 1.0, mesh=make_mesh(8))


def test_what_cannot_be_lowered_is_an_error() -> None:
    with pytest.raises(TypeError, match="expected a function or a lowered program, got str"):
        inspect("step", mesh=make_mesh(8))
