"""What the suite prints: a block of lines for each row as it comes, and the README's table from the JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from gates import Verdict, at_most, needed, scattered, share, verdicts, worked
from minima import Minima, minima
from suite_rows import Row, shape_of

Results = dict[str, Any]
MB = 1e6


def least_of(row: Row) -> Minima:
    """The formulas for a row."""
    replicas, shards = {"S8": (1, 8), "R2xS4": (2, 4)}[row.mesh]
    return minima(shape_of(row), replicas, shards, row.remat)


def verdicts_of(row: Row, results: Results) -> list[Verdict]:
    """The gates of a row that was measured."""
    record = results[row.key]
    if row.job == "time":
        noise = record["quartiles"]["again"][1]
        return [
            at_most(10, f"{system} / by-hand", ratio, max(1.05, noise))
            for system, ratio in record["ratio"].items()
        ]
    if row.job == "host":
        return [at_most(11, name, ratio, 1.5) for name, ratio in record.get("ratio", {}).items()]
    reference = results.get(row.beside("by-hand").key)
    found = verdicts(record, reference, least_of(row), row.target)
    if row.scan:  # Held to no growth in depth instead.
        found = [verdict for verdict in found if verdict.measure != 12]
    return found + list(_growth(row, results))


def _growth(row: Row, results: Results) -> Iterator[Verdict]:
    """Temporaries that each block adds since the next smaller depth, of the least and of the reference."""
    if (smaller := _smaller(row, results)) is None:
        return
    added = growth(row, smaller, results)
    if row.remat:
        yield at_most(7, f"growth since {smaller.blocks}", added / least_of(row).growth, 1.05)
    hand, hand_smaller = row.beside("by-hand"), smaller.beside("by-hand")
    if hand.key in results and hand_smaller.key in results:
        other = growth(hand, hand_smaller, results)
        if other > 0:
            yield at_most(7, "growth, of by-hand", added / other, 1.05)
    if row.scan:
        lines = (results[each.key]["hlo"]["lines"] for each in (row, smaller))
        yield at_most(12, f"lines since {smaller.blocks}", next(lines) / next(lines), 1)


def _smaller(row: Row, results: Results) -> Row | None:
    depths = (
        each["row"]["blocks"]
        for each in results.values()
        if each["row"] | {"blocks": 0, "options": ()}
        == dataclasses.asdict(row) | {"blocks": 0, "options": ()}
        and [tuple(option) for option in each["row"]["options"]] == list(row.options)
    )
    below = [depth for depth in depths if depth < row.blocks]
    return dataclasses.replace(row, blocks=max(below)) if below else None


def growth(row: Row, smaller: Row, results: Results) -> float:
    """Bytes of temporaries that a block adds."""
    large, small = (worked(results[each.key], row.target) for each in (row, smaller))
    return (large - small) / (row.blocks - smaller.blocks)


def lines_of(row: Row, results: Results, only: set[int]) -> Iterator[str]:
    """A row's figures, and of its measures what is in `only`, if that says anything."""
    record = results[row.key]
    yield f"{row.key}   ({record['jax']}, {record['date']})"
    if row.job == "compile":
        memory, hlo = record["memory"], record["hlo"]
        overlap = ", ".join(f"{k} {v:.2f}" for k, v in record["overlap"].items() if v is not None)
        yield (
            f"    temporaries {memory['temporaries'] / MB:.1f} MB, peak {memory['peak'] / MB:.1f} MB; "
            f"overlapped {overlap}; {hlo['lines']} lines written, {hlo['compiled'] / MB:.2f} MB compiled in "
            f"{record['seconds']['compile']:.0f} CPU s; {record['cycles'] / MB:.2f} M cycles"
        )
    if row.job == "time":
        yield "    ms: " + ", ".join(f"{k} {v:.0f}" for k, v in record["milliseconds"].items())
    for verdict in verdicts_of(row, results):
        if not only or verdict.measure in only:
            word = "met" if verdict.met else "MISSED"
            yield (
                f"    {verdict.measure:2}  {verdict.name:24} {verdict.value:8.3f}   gate {verdict.gate:.3f}"
                f"   {word}"
            )


# --------------------------------------------------------------------------------------------------
# The README's table


def readme(results: Results) -> str:
    """Markdown of at most 25 lines: ratios of jfsdp, the hand-written step and plain jit."""
    found = [row_of(each) for each in results.values()]
    compiled = [
        row
        for row in found
        if row.job == "compile"
        and row.system == "jfsdp"
        and row.target != "cpu"
        and row.blocks == 8
        and row.remat
        and not row.options
    ]
    if not compiled:
        return "nothing measured at 8 blocks yet"
    first = results[compiled[0].key]
    lines = [
        f"jax {first['jax']}, flax {first['flax']}, {first['date']}; GPT of 8 blocks, width 512, 8 heads, "
        "vocabulary 2048, context 256, 32 rows,",
        "AdamW, each block rematerialized. In each cell: jfsdp / hand-written `shard_map` / plain `jit`. "
        "Bytes: of the least;",
        "memory: MB of temporaries, on v5e of all at the peak; the last two: share of bytes beside a matmul.",
        "",
        "| target, mesh | model | gathered | reduced | in float32 | memory | gathers | reductions |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_line(row, results) for row in sorted(compiled, key=_order))])


def row_of(record: dict[str, Any]) -> Row:
    return Row(**record["row"] | {"options": tuple(map(tuple, record["row"]["options"]))})


def _order(row: Row) -> tuple[str, ...]:
    return row.target, str(row.mesh != "S8"), row.model


def _line(row: Row, results: Results) -> str:
    least, target = least_of(row), row.target
    records = [
        results.get(row.beside(system).key if system != "jfsdp" else row.key)
        for system in ("jfsdp", "by-hand", "plain-jit")
    ]

    def cell(figure: Any) -> str:
        return " / ".join("" if record is None else figure(record) for record in records)

    def reduced(record: Any) -> float:
        over_replicas = min(record["bytes"]["all-reduce"], least.summed)
        return (scattered(record, least) + over_replicas) / (least.scattered + least.summed)

    cells = [
        f"{target}, {row.mesh}",
        row.model.replace("-", ", "),
        cell(lambda r: f"{r['bytes']['all-gather'] / least.gathered:.2f}"),
        cell(lambda r: f"{reduced(r):.2f}"),
        cell(lambda r: f"{share(r, 'reduce-scatter', 'float32'):.0%}"),
        cell(lambda r: f"{needed(r, target) / MB:.0f}"),
        cell(lambda r: f"{r['overlap']['all-gather'] or 0:.2f}"),
        cell(lambda r: f"{r['overlap']['reduce-scatter'] or 0:.2f}"),
    ]
    return "| " + " | ".join(cells) + " |"
