"""The rows of the suite: which program, for which devices; and how each is measured."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import pathlib
from typing import Any

SYSTEMS = ("jfsdp", "auto", "by-hand", "plain-jit")
MODELS = ("nnx-unrolled", "nnx-scan", "linen-unrolled", "linen-scan")
TARGETS = ("v5e:2x4", "h100:8", "cpu")
MESHES = ("S8", "R2xS4")
JOBS = {**dict.fromkeys((1, 2, 3, 4, 5, 6, 7, 8, 12), "compile"), 10: "time", 11: "host"}
"""Which job gives a measure. 9, offload, is gated by tests/test_offload_compiled.py."""

HERE = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Row:
    """One job.

    Attributes:
        job: "compile", "time" (steps of all systems, interleaved) or "host" (what a call costs).
        system: one of `SYSTEMS`; "" for a job that runs several.
        model: one of `MODELS`; the form alone, "unrolled" or "scan", for systems without Flax; "" for a job
            that has models of its own.
        target: one of `TARGETS`, or another that `jfsdp.topology` knows.
        mesh: one of `MESHES`.
        blocks: depth of the model.
        remat: whether each block is rematerialized.
        options: further settings, as (name, value): those of `jfsdp.shard`, or `order` of the reference.
    """

    job: str
    system: str
    model: str
    target: str
    mesh: str
    blocks: int = 8
    remat: bool = True
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def scan(self) -> bool:
        return self.model.endswith("scan")

    @property
    def key(self) -> str:
        """Its name in the JSON file."""
        parts = [self.job, self.system, self.model, self.target, self.mesh, str(self.blocks)]
        parts += ["remat" if self.remat else "no-remat", *(f"{k}={v}" for k, v in self.options)]
        return " ".join(filter(None, parts))

    def beside(self, system: str) -> Row:
        """The row of another system that this one is held against."""
        model = self.model if system in ("jfsdp", "auto") else self.model.split("-")[-1]
        return dataclasses.replace(self, system=system, model=model, options=())


def run(row: Row, pairs: int = 40) -> dict[str, Any]:
    """Measures a row in this process.

    Args:
        row: which one.
        pairs: how often each program runs in a "time" row.
    """
    if row.job == "time":
        import step_times

        programs = {system: build(row.beside(system)) for system in SYSTEMS}
        return step_times.compare({**programs, "again": build(row.beside("by-hand"))}, pairs)
    if row.job == "host":
        return _host()
    from measures import measure

    return measure(build(row))


def build(row: Row) -> Any:
    """The program of a row."""
    from gpt_program import make_mesh

    mesh, settings = make_mesh(row.mesh, row.target), dict(row.options)
    if row.system == "auto":
        settings = {**_auto(), **settings}
    if row.system == "by-hand":
        settings = {"order": best_order(row.target), **settings}
    name = {"by-hand": "gpt_by_hand", "plain-jit": "gpt_plain_jit"}.get(row.system)
    module = importlib.import_module(name or f"gpt_{row.model.split('-')[0]}")
    return module.build(shape_of(row), mesh, row.scan, row.remat, **settings)


def best_order(target: str) -> str:
    """The reference's order that does best on a target.

    XLA for TPUs overlaps gathers by itself, and no reduction in any order: with 4 blocks on v5e:2x4 "free"
    needs 64 MB at the peak, "ahead" 71 and 10 % more cycles. For 8 H100 "free" is what grows with depth
    (jax 0.12.0.1).
    """
    return "free" if target.startswith(("v", "cpu")) else "ahead"


def shape_of(row: Row) -> Any:
    """Sizes of the row's model: small where steps run on simulated devices."""
    from gpt_shape import CPU, Shape

    return dataclasses.replace(CPU if row.target == "cpu" else Shape(), blocks=row.blocks)


def _auto() -> dict[str, Any]:
    import jfsdp

    # An explicit reduce_dtype is refused there: XLA decides.
    return {
        "partitioning": "auto",
        "mp_policy": jfsdp.MixedPrecisionPolicy(param_dtype="bfloat16"),
    }


def _host() -> dict[str, Any]:
    import host_time

    found = {leaves: host_time.measure(leaves) for leaves in (48, 192)}
    return {
        "ratio": {
            f"{way}, {leaves} arrays": ways[way]["ratio"]
            for leaves, ways in found.items()
            for way in host_time.GATED
        }
    }


@functools.cache
def fingerprint(system: str) -> str:
    """Of the code that a row of this system depends on: one that has changed is measured again."""
    names = ("measures.py", "step_times.py", "host_time.py")
    files = [*HERE.glob("gpt_*.py"), *(HERE / name for name in names)]
    if system not in ("by-hand", "plain-jit"):
        files += (HERE.parents[1] / "jfsdp").glob("*.py")
    texts = b"".join(path.read_bytes() for path in sorted(files))
    return hashlib.sha256(texts).hexdigest()[:12]
