"""An optimizer's step that was split, run by groups of parameters, of which some lie in host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from jfsdp.offload import is_on_host, moved_like, on_host, to_device, to_host
from jfsdp.pullback import is_variable
from jfsdp.updates_split import Part, Split, makes_arrays
from jfsdp.varying import zeros
from jfsdp.weights import fence

__all__ = ["Run"]


@dataclasses.dataclass(frozen=True, eq=False)
class _Job:
    """What one group has to do.

    Attributes:
        part: its equations.
        far: those of its inputs that are on the host.
        near: the others.
        homes: for each output an array in whose memory it belongs; None: on the device.
    """

    part: Part
    far: tuple[Any, ...]
    near: tuple[Any, ...]
    homes: tuple[Any, ...]


class Run:
    """One step, as it is traced: what is known so far, and what the last group made."""

    def __init__(self, parts: Split, values: Sequence[Any], on: str) -> None:
        self.parts, self.on = parts, on
        self.given = dict(zip(parts.jaxpr.invars, values, strict=True))
        self.known = {v: to_device(x) for v, x in self.given.items() if v not in parts.group}
        self.last: tuple[Any, ...] = ()
        consts = zip(parts.jaxpr.constvars, parts.consts, strict=True)
        self.known.update((v, to_device(x)) for v, x in consts)

    def results(self, homes: Sequence[Any]) -> list[Any]:
        """What the program returns, each in the memory of the array of `homes`."""
        for index in range(len(self.parts.rounds)):
            part = self.parts.shared(index)
            self.work({v: None for v in part.inputs if v in self.parts.group})
            made = part.run([self.known[v] for v in part.inputs])
            self.known.update(zip(part.outputs, made, strict=True))
        outputs = self.parts.jaxpr.outvars
        both = [(v, at) for v, at in zip(outputs, homes, strict=True) if is_variable(v)]
        self.work({v: at for v, at in both if v not in self.given})
        found = {v: self.known.get(v, self.given.get(v)) for v, _ in both}
        return [
            moved_like(found[v] if is_variable(v) else v.val, at)
            for v, at in zip(outputs, homes, strict=True)
        ]

    def work(self, wanted: Mapping[Any, Any]) -> None:
        """Make variables, each in the memory of an array; None: on the device."""
        groups: dict[int, list[Any]] = {}
        for v in wanted:
            if v not in self.known:
                groups.setdefault(self.parts.group.get(v, 0), []).append(v)
        streamed = []
        for _, variables in sorted(groups.items()):
            part = self.parts.alone(variables)
            far = tuple(v for v in part.inputs if v in self.given and is_on_host(self.given[v]))
            far = tuple(v for v in far if v in self.parts.group)
            near = tuple(v for v in part.inputs if v not in far)
            job = _Job(part, far, near, tuple(wanted[v] for v in variables))
            if not far:
                self._done(job, part.run(self._values(part.inputs)))
            elif self.on == "host":
                self._done(job, self._on_host(part))
            else:
                streamed.append(job)
        self._stream(streamed)

    def _values(self, variables: Iterable[Any]) -> list[Any]:
        return [self.known[v] if v in self.known else self.given[v] for v in variables]

    def _done(self, job: _Job, results: Sequence[Any]) -> None:
        self.last = job.part.outputs
        homes = zip(self.last, results, job.homes, strict=True)
        self.known.update((v, moved_like(x, at)) for v, x, at in homes)

    def _on_host(self, part: Part) -> list[Any]:
        values = self._values(part.inputs)
        impls = [jax.random.key_impl(x) if _is_key(x) else None for x in values]

        # jax cannot draw with a key in host memory: it goes there as its numbers, and is a key inside.
        def compute(*arrays: Any) -> list[Any]:
            both = zip(arrays, impls, strict=True)
            given = [x if i is None else jax.random.wrap_key_data(x, impl=i) for x, i in both]
            return part.run_each(given, lambda x: x if _is_key(x) else to_host(x))

        for equation in part.equations:
            if makes_arrays(equation):
                raise ValueError(
                    "update_optimizer: the host cannot compute this update: "
                    f"{equation.primitive.name} makes arrays of its own inside, which jax takes for the "
                    'device\'s. Take on="device".'
                )
        return on_host(compute)(
            *(to_host(jax.random.key_data(x) if _is_key(x) else x) for x in values)
        )

    def _stream(self, jobs: Sequence[_Job]) -> None:
        """Do what groups have to do one after the other, and have the next one's arrays come meanwhile."""
        arrived = [to_device(x) for job in jobs[:1] for x in self._values(job.far)]
        for index, job in enumerate(jobs):
            coming = [x for after in jobs[index + 1 : index + 2] for x in self._values(after.far)]
            last = [self.known[v] for v in self.last]
            results, arrived, last = _stage(job, arrived, self._values(job.near), coming, last)
            self.known.update(zip(self.last, last, strict=True))
            self._done(job, results)


def _stage(
    job: _Job, arrived: list[Any], near: list[Any], coming: list[Any], last: list[Any]
) -> tuple[list[Any], list[Any], list[Any]]:
    """A group's results, the arrays of the next on the device, and the last results, now waited for."""

    def stage(arrived: list[Any], near: list[Any], coming: list[Any]) -> list[Any]:
        env = dict(zip((*job.far, *job.near), (*arrived, *near), strict=True))
        made = job.part.run([env[v] for v in job.part.inputs])
        results = [moved_like(x, at) for x, at in zip(made, job.homes, strict=True)]
        return [*results, *(to_device(x) for x in coming)]

    closed = jax.make_jaxpr(stage)(arrived, near, coming)
    run = jex.jaxpr_as_fun(closed)

    def anywhere(arrived: Any, near: Any, coming: Any, last: Any) -> Any:
        coming, last = _tied(coming, last)
        return run(*arrived, *near, *coming), last

    # Compilers for TPUs take barriers out before they schedule, and start all copies at once: measured on
    # v5e, and until the device's memory is full. What a branch does cannot start before that is taken.
    def on_tpu(arrived: Any, near: Any, coming: Any, last: Any) -> Any:
        def instead(*_: Any) -> list[Any]:
            homes = [*job.homes, *(None for _ in coming)]
            both = zip((v.aval for v in closed.jaxpr.outvars), homes, strict=True)
            return [at if _is_like(at, kind) else _zeros(kind) for kind, at in both]

        always = jax.lax.optimization_barrier(jnp.asarray(True))
        return jax.lax.cond(always, run, instead, *arrived, *near, *coming), last

    # Without any state XLA for TPUs crashes on the branch (v5e, jax 0.12.0.1: optax.sgd without momentum).
    stateless = 2 * len(job.homes) <= len(job.far)
    results, last = jax.lax.platform_dependent(
        arrived, near, coming, last, tpu=anywhere if stateless else on_tpu, default=anywhere
    )
    count = len(job.part.outputs)
    return results[:count], results[count:], last


def _tied(coming: list[Any], last: list[Any]) -> tuple[list[Any], list[Any]]:
    """Arrays that are not moved before the last results are there."""
    if not coming or not last:
        return coming, last
    return fence(coming, last)  # pyright: ignore[reportReturnType]


def _is_key(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _is_like(array: Any, kind: Any) -> bool:
    return array is not None and (array.shape, array.dtype) == (kind.shape, kind.dtype)


def _zeros(kind: Any) -> Any:
    made = zeros(kind)
    explicit = not kind.sharding.mesh.empty and kind.sharding.mesh.are_all_axes_explicit
    return jax.sharding.reshard(made, kind.sharding) if explicit else made
