"""The benchmark suite: jfsdp beside a hand-written step, plain `jax.jit`, and its own auto partitioning.

    python tests/benchmarks/suite.py                                  # everything: hours
    python tests/benchmarks/suite.py --target h100:8 --mesh S8 --model nnx-unrolled
    python tests/benchmarks/suite.py --only 7 --depths 8,16,32,64     # flat in depth?
    python tests/benchmarks/suite.py --only 10 --target cpu           # step times, interleaved
    python tests/benchmarks/suite.py --table                          # the README's, from the JSON

A GPT (width 512, 8 heads, vocabulary 2048, context 256, 32 rows; AdamW in float32) gathers in bfloat16,
reduces in float32 and rematerializes each block. It is compiled for 8 TPU v5e and 8 H100, which need not be
there, and run, smaller, on 8 simulated CPU devices. Measures, per device and step, and their gates:

     1  bytes gathered, of the least                 7  peak memory, of the hand-written step's
     2  bytes reduce-scattered, of the least         8  bytes moved beside matmuls: no less than there
     3  bytes summed over replicas, of the least     9  offload: tests/test_offload_compiled.py
     4  share of bytes in the policy's dtype        10  time of a step, of the hand-written one's
     5  number of collectives as written            11  host time of a call, of raw jax.jit's
     6  bytes at rest, of the least                 12  size of the program, and time to compile

Each row runs in a process of its own and is written to the JSON file at once; a row that is there and whose
code has not changed is not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

from suite_rows import JOBS, MESHES, MODELS, SYSTEMS, TARGETS, Row, fingerprint, run
from suite_table import lines_of, readme

RESULTS = pathlib.Path(__file__).with_name("results.json")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", nargs="+", default=TARGETS)
    parser.add_argument("--mesh", nargs="+", default=MESHES, choices=MESHES)
    parser.add_argument("--model", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--system", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    parser.add_argument("--depths", default="8", help="numbers of blocks, such as 8,16,32,64")
    parser.add_argument("--only", default="", help="measures, such as 7,8")
    parser.add_argument("--no-remat", action="store_true")
    parser.add_argument(
        "--option", nargs="*", default=[], help="of jfsdp.shard, such as prefetch=2"
    )
    parser.add_argument("--pairs", type=int, default=40, help="rounds of measure 10")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="measure rows that are there too")
    parser.add_argument("--keep", action="store_true", help="keep rows of code that has changed")
    parser.add_argument(
        "--table", action="store_true", help="print the README's table, measure nothing"
    )
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.only = {int(number) for number in options.only.split(",") if number}
    if unknown := options.only - {*JOBS, 9}:
        parser.error(f"--only {sorted(unknown)}: measures are 1 to 12")
    options.depths = [int(depth) for depth in options.depths.split(",")]
    options.option = tuple(
        (k, json.loads(v)) for k, _, v in (o.partition("=") for o in options.option)
    )
    return options


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """What to measure: references first, each once for all models that are held against it."""
    jobs = {JOBS[measure] for measure in options.only if measure in JOBS} or {*JOBS.values()}
    seen: set[Row] = set()
    for target in options.target:
        for mesh in options.mesh:
            for model in options.model:
                for blocks in options.depths:
                    base = Row("", "jfsdp", model, target, mesh, blocks, not options.no_remat)
                    for row in _jobs(base, jobs, options):
                        if row not in seen:
                            seen.add(row)
                            yield row


def _jobs(base: Row, jobs: set[str], options: argparse.Namespace) -> Iterator[Row]:
    if "compile" in jobs:
        compiled = dataclasses.replace(base, job="compile")
        for system in ("by-hand", "jfsdp", "plain-jit", "auto"):
            if system in options.system:
                row = compiled.beside(system)
                yield dataclasses.replace(row, options=options.option if system == "jfsdp" else ())
    if "time" in jobs and base.target == "cpu":
        yield dataclasses.replace(base, job="time", system="")
    if "host" in jobs and base.target == "cpu":
        yield Row("host", "", "", "cpu", "S8")


def measure(row: Row, pairs: int) -> dict[str, Any]:
    """A row, measured in a process of its own."""
    command = [sys.executable, __file__, "--row", json.dumps(dataclasses.asdict(row))]
    start = time.time()
    done = subprocess.run([*command, "--pairs", str(pairs)], capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        last = [line for line in lines if line and not line.startswith(("-", "For simplicity"))]
        return {"error": last[-1] if last else f"exit code {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1]) | {"wall": round(time.time() - start, 1)}


def main(argv: list[str] | None = None) -> int:
    """Measures, prints a line for each row, and writes the JSON file."""
    options = parse(argv)
    if options.row:
        given = json.loads(options.row)
        row = Row(**given | {"options": tuple(map(tuple, given["options"]))})
        from measures import environment

        print(json.dumps(run(row, options.pairs) | environment()))
        return 0
    results = json.loads(options.json.read_text()) if options.json.exists() else {}
    if options.table:
        print(readme(results))
        return 0
    if 9 in options.only:
        print("9  offload: gated by tests/test_offload_compiled.py, on v5e:2x4 and h100:8")
    failed = 0
    for row in rows(options):
        there = results.get(row.key)
        fresh = there and (options.keep or there["code"] == fingerprint(row.system))
        if not fresh or options.again:
            record = measure(row, options.pairs)
            if "error" in record:
                print(f"{row.key}\n    {record['error']}", flush=True)
                failed += 1
                continue
            record["code"], record["row"] = fingerprint(row.system), dataclasses.asdict(row)
            results[row.key] = record
            _write(options.json, results)
        for line in lines_of(row, results, options.only):
            print(line, flush=True)
    return int(failed > 0)


def _write(path: pathlib.Path, results: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1, sort_keys=True))
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
