"""Groups of devices: the ways in which XLA writes them, and the mesh axes that they run over."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jfsdp.inspect.compiled import compiled_collectives
from jfsdp.inspect.groups import (
    Groups,
    along_axes,
    axes_of_groups,
    axes_of_pairs,
    groups_of_text,
)

Sizes = dict[str, int]


def as_sets(groups: Groups) -> set[frozenset[int]]:
    return {frozenset(group) for group in groups}


# --------------------------------------------------------------------------------------------------
# How they are written


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{{0,4,1},{2,3,5}}", ((0, 4, 1), (2, 3, 5))),
        ("{{0}}", ((0,),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[8,1]<=[8]", tuple((n,) for n in range(8))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['fsdp'=4] {'fsdp'}", ((0, 1, 2, 3),)),
        ("@mesh['r'=2,'f'=2]{'f'}", ((0, 1), (2, 3))),
        ("mesh['r'=2,'f'=2] {'r'}", ((0, 2), (1, 3))),
        ("mesh['r'=2,'f'=2,'t'=2] {'r','t'}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['r'=2,'f'=1] {'f'}", ((0,), (1,))),
        ("mesh['r'=2,'f'=2] {}", ((0,), (1,), (2,), (3,))),
        ("mesh[r=2,f_1=2] {f_1}", ((0, 1), (2, 3))),
    ],
)
def test_each_spelling_of_groups_is_read(text: str, groups: Groups) -> None:
    assert groups_of_text(text) == groups


@pytest.mark.parametrize("text", ["{}", "{{}}"])
def test_no_groups_are_written_by_empty_braces(text: str) -> None:
    assert groups_of_text(text) == ()


def test_axes_of_a_mesh_written_in_another_order_are_the_same_groups() -> None:
    one, other = (f"mesh['r'=2,'f'=4,'t'=2] {{{axes}}}" for axes in ("'r','t'", "'t','r'"))
    assert as_sets(groups_of_text(one)) == as_sets(groups_of_text(other))


@pytest.mark.parametrize(
    ("order", "groups"),
    [
        ("[2,4]T(1,0)", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[2,2,2]T(2,1,0)", ((0, 2, 1, 3), (4, 6, 5, 7))),
        ("[8]", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("3,1,7,0,2,6,4,5", ((3, 7, 2, 4), (1, 0, 6, 5))),
    ],
)
def test_a_mesh_may_have_its_devices_in_another_order(order: str, groups: Groups) -> None:
    text = f"mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=({order}) {{'axis_0'}}"
    assert groups_of_text(text) == groups


# Shardy, docs/sharding_representation.md: "x":(m)k of an axis of size n is the second dimension of
# n reshaped to [m, k, n / (m * k)].
@pytest.mark.parametrize(
    ("size", "before", "width", "groups"),
    [
        (8, 1, 2, ((0, 4), (1, 5), (2, 6), (3, 7))),
        (8, 1, 4, ((0, 2, 4, 6), (1, 3, 5, 7))),
        (8, 2, 2, ((0, 2), (1, 3), (4, 6), (5, 7))),
        (8, 2, 4, ((0, 1, 2, 3), (4, 5, 6, 7))),
        (8, 4, 2, ((0, 1), (2, 3), (4, 5), (6, 7))),
        (6, 2, 3, ((0, 1, 2), (3, 4, 5))),
    ],
)
def test_part_of_an_axis_is_that_with_so_many_before(
    size: int, before: int, width: int, groups: Groups
) -> None:
    ids = np.arange(size).reshape(before, width, -1)
    assert as_sets(groups) == as_sets(tuple(map(tuple, np.moveaxis(ids, 1, 2).reshape(-1, width))))
    assert groups_of_text(f"mesh['x'={size}] {{'x':({before}){width}}}") == groups


def test_parts_of_an_axis_stand_beside_other_axes() -> None:
    parts = groups_of_text("mesh['x'=2,'y'=8,'z'=2] {'z','y':(2)2}")
    whole = groups_of_text("mesh['x'=2,'y0'=2,'y1'=2,'y2'=2,'z'=2] {'z','y1'}")
    assert as_sets(parts) == as_sets(whole)
    assert len(parts) == 8


cut_axes = st.lists(st.lists(st.integers(2, 3), min_size=1, max_size=3), min_size=1, max_size=2)


@hypothesis.given(cut_axes, st.data())
def test_parts_of_axes_are_the_axes_of_a_mesh_that_is_cut_there(
    axes: list[list[int]], data: st.DataObject
) -> None:
    whole = ",".join(f"'{'ab'[n]}'={math.prod(parts)}" for n, parts in enumerate(axes))
    cut = [
        (f"'{'ab'[n]}{k}'", size, f"'{'ab'[n]}':({math.prod(parts[:k])}){size}")
        for n, parts in enumerate(axes)
        for k, size in enumerate(parts)
    ]
    chosen = data.draw(st.lists(st.sampled_from(cut), unique=True))
    of_parts = f"mesh[{whole}] {{{','.join(part for _, _, part in chosen)}}}"
    of_cut = ",".join(f"{name}={size}" for name, size, _ in cut)
    of_axes = f"mesh[{of_cut}] {{{','.join(name for name, _, _ in chosen)}}}"
    assert as_sets(groups_of_text(of_parts)) == as_sets(groups_of_text(of_axes))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0,1",
        "{0,1}",
        "[[0, 1], [2, 3]]",
        "[2,4]<=",
        "[2,2,2]<=[8]",
        "mesh['r'=2,'f'=2]",
        "mesh['r'=2] {'f'}",
        "mesh['r'=4] {'r':2}",
        "mesh['r'=4] {'r':}",
        "mesh['r'=4] {'r':(1)2:(2)2}",
        "maximal_mesh[device_id=3] {}",
    ],
)
def test_an_unknown_spelling_of_groups_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(ValueError) as error:
        groups_of_text(text)
    assert str(error.value) == f"jfsdp.inspect: device groups written in an unknown way: {text}"


# --------------------------------------------------------------------------------------------------
# Which axes they run over


def listed(sizes: Sizes, axes: Sequence[str]) -> Groups:
    """The groups along some axes, device by device."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for position, coordinates in enumerate(itertools.product(*map(range, sizes.values()))):
        fixed = tuple(n for axis, n in zip(sizes, coordinates, strict=True) if axis not in axes)
        groups.setdefault(fixed, []).append(position)
    return tuple(map(tuple, groups.values()))


def as_list(sizes: Sizes, axes: Sequence[str]) -> str:
    groups = (",".join(map(str, group)) for group in listed(sizes, axes))
    return f"{{{','.join(f'{{{group}}}' for group in groups)}}}"


def as_iota(sizes: Sizes, axes: Sequence[str]) -> str:
    names, size = list(sizes), math.prod(sizes[axis] for axis in axes)
    order = [names.index(axis) for axis in (*(n for n in names if n not in axes), *axes)]
    shape = f"[{math.prod(sizes.values()) // size},{size}]"
    return f"{shape}<=[{','.join(map(str, sizes.values()))}]T({','.join(map(str, order))})"


def as_axes(sizes: Sizes, axes: Sequence[str]) -> str:
    mesh = ",".join(f"'{axis}'={size}" for axis, size in sizes.items())
    named = ",".join(f"'{axis}'" for axis in axes)
    return f"mesh[{mesh}] {{{named}}}"


@st.composite
def axes_of_meshes(draw: Any) -> tuple[Sizes, list[str]]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    mesh = dict(zip("abc", sizes, strict=False))
    return mesh, draw(st.lists(st.sampled_from(list(mesh)), unique=True))


@pytest.mark.parametrize("spelling", [as_list, as_iota, as_axes])
@hypothesis.given(axes_of_meshes())
def test_axes_are_found_again_in_every_spelling(spelling: Any, case: tuple[Sizes, Any]) -> None:
    sizes, axes = case
    groups = groups_of_text(spelling(sizes, axes))
    varying = tuple(axis for axis in sizes if axis in axes and sizes[axis] > 1)
    assert axes_of_groups(groups, sizes) == varying


@hypothesis.given(axes_of_meshes())
def test_groups_along_axes_are_the_devices_that_differ_in_them_only(
    case: tuple[Sizes, list[str]],
) -> None:
    assert as_sets(along_axes(*case)) == as_sets(listed(*case))


@hypothesis.given(axes_of_meshes(), st.randoms(use_true_random=False))
def test_the_order_of_groups_and_of_devices_in_them_does_not_matter(
    case: tuple[Sizes, list[str]], shuffling: random.Random
) -> None:
    sizes, axes = case
    groups = [list(group) for group in listed(sizes, axes)]
    for group in (groups, *groups):
        shuffling.shuffle(group)
    shuffled = tuple(map(tuple, groups))
    assert axes_of_groups(shuffled, sizes) == axes_of_groups(listed(sizes, axes), sizes)


@pytest.mark.parametrize(
    "text",
    [
        "{{0,2},{1,3},{4,6},{5,7}}",
        "{{0,1,2,3}}",
        "{{0,1,2,3},{4,5,6}}",
        "{{0,5},{1,4},{2,7},{3,6}}",
        "{{0,1,2,3},{4,5,6,8}}",
        "mesh['r'=2,'f'=4] {'f':(1)2}",
        "[4,2]<=[8]",
        "[1,16]<=[16]",
    ],
)
def test_groups_that_no_axes_explain_have_none(text: str) -> None:
    assert axes_of_groups(groups_of_text(text), {"r": 2, "f": 4}) is None


@pytest.mark.parametrize(
    ("pairs", "axes"),
    [
        ("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", ("f",)),
        ("{{0,4},{1,5}}", ("r",)),
        ("{{0,1},{0,4}}", ("r", "f")),
        ("{{0,5}}", ("r", "f")),
        ("{{0,0},{7,7}}", ()),
        ("{}", ()),
        ("{{0,8}}", None),
    ],
)
def test_pairs_run_over_the_axes_in_which_they_differ(
    pairs: str, axes: tuple[str, ...] | None
) -> None:
    assert axes_of_pairs(groups_of_text(pairs), {"r": 2, "f": 4}) == axes


# --------------------------------------------------------------------------------------------------
# What this XLA writes, of programs whose data says which devices have to speak to each other


def all_reduces(per_array: Any, sizes: Sizes, spec: P) -> list[Any]:
    """Of a program on 8 rows, one on each device or on each part of the mesh that `spec` names."""
    mesh = make_mesh(**sizes)
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=NamedSharding(mesh, spec))
    text = jax.jit(per_array).lower(x).compile().as_text()
    return [r for r in compiled_collectives(text, sizes) if r.kind == "all-reduce"]


@pytest.mark.parametrize(
    ("summed", "groups"),
    [
        (0, {frozenset((n, n + 4)) for n in range(4)}),
        (1, {frozenset(range(4)), frozenset(range(4, 8))}),
    ],
)
def test_parts_of_an_axis_are_read_as_this_xla_means_them(
    summed: int, groups: set[frozenset[int]]
) -> None:
    (record,) = all_reduces(lambda x: x.reshape(2, 4, 64).sum(summed), {"fsdp": 8}, P("fsdp"))
    assert (record.axes, record.group_size) == ((), len(next(iter(groups))))
    assert as_sets(groups_of_text(record.groups)) == groups


@pytest.mark.parametrize("axes", [("r",), ("f",), ("r", "f"), ("f", "r")])
def test_axes_that_the_partitioner_reduces_over_are_named(axes: tuple[str, ...]) -> None:
    (record,) = all_reduces(lambda x: x.sum(0), {"r": 2, "f": 4}, P(axes))
    assert (set(record.axes), record.groups) == (set(axes), "")
