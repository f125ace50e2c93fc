"""Seconds until the first step of a compiled model is done, cold and with filled caches.

One process for each measurement, one rank under a fake process group: no other rank competes for a
core, and collectives take no time. A trivial function is compiled first: what a machine does once
(imports, precompiled headers, looking for vector instructions) is not counted. Cache folders are
temporary.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from compile_fsdp.passes.pipeline import PassOptions

from .contenders import CONTENDERS
from .ranks import Ranks, RanksFailed, World
from .results import Bars, Missing, Part, Settings, progress, ratio, table
from .workloads import Shape, batch_of, seeded_model, shape_of

PLAIN = "unsharded"
OURS = "compile_fsdp"
PEER = "FSDP2 + compile, by block"
WORKLOAD = "comm"
ROUNDS = 3


@dataclass(frozen=True)
class Compiled:
    """Seconds of a first step, and those of them that were spent in the passes."""

    total: float
    passes: float


class FirstStep:
    """What a process does: one step of a contender that was never compiled in it."""

    def __init__(self, name: str, shape: Shape) -> None:
        trivial = torch.compile(lambda x: x.sin().sum())
        trivial(torch.ones(8, requires_grad=True)).backward()
        self._batch = batch_of(shape, dist.get_rank())
        self._training = CONTENDERS[name](seeded_model(shape))

    def first(self) -> Compiled:
        """Forward and backward."""
        with passes_timed() as spent:
            start = time.perf_counter()
            self._training.call(*self._batch).backward()
            return Compiled(time.perf_counter() - start, sum(spent))


@contextmanager
def passes_timed(clock: Callable[[], float] = time.perf_counter) -> Iterator[list[float]]:
    """Collect the seconds, by ``clock``, of every call of the passes while the context is open."""
    spent: list[float] = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            start = clock()
            try:
                return function(*args)
            finally:
                spent.append(clock() - start)

        return call

    own_key: Any = vars(PassOptions)["cache_key"]
    key = functools.cached_property(timed(own_key.func))
    key.__set_name__(PassOptions, "cache_key")
    with ExitStack() as stack:
        for name in ("prepare", "rewrite"):
            replacement = timed(getattr(PassOptions, name))
            stack.enter_context(patch.object(PassOptions, name, replacement))
        stack.enter_context(patch.object(PassOptions, "cache_key", key))
        yield spent


def first_step(name: str, shape: Shape, caches: Path) -> Compiled:
    """In a process of its own, with this folder of caches."""
    caches.mkdir(parents=True, exist_ok=True)
    world = World(2, "fake", {"TORCHINDUCTOR_CACHE_DIR": str(caches)})
    with Ranks(world, f"{__name__}:FirstStep", name, shape) as ranks:
        found: Compiled = ranks.ask("first")[0]
        return found


@dataclass
class Found:
    """All measurements of one contender, by round."""

    cold: list[Compiled]
    warm: list[Compiled]


def run(settings: Settings) -> Part:
    """Measure cold and warm starts of each in turn."""
    shape = shape_of(WORKLOAD, settings)
    names = (PLAIN, OURS, PEER)
    found = {name: Found([], []) for name in names}
    part = Part()
    for number in range(1 if settings.quick else ROUNDS):
        for name in names:
            progress(f"compile time, round {number + 1}, {name}")
            with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
                try:
                    cold = first_step(name, shape, Path(folder))
                    warm = first_step(name, shape, Path(folder))
                except RanksFailed as error:
                    part.problems.append(f"compile, {name}: {error}")
                    continue
            found[name].cold.append(cold)
            found[name].warm.append(warm)
            progress(f"  cold {cold.total:.1f} s, warm {warm.total:.1f} s")
    _judge(part, found)
    return part


def _judge(part: Part, found: dict[str, Found]) -> None:
    ours, plain = found[OURS], found[PLAIN]
    complete = bool(ours.cold) and len(ours.cold) == len(plain.cold)
    missing = Missing("; ".join(part.problems) or "nothing was measured")
    cold, warm = totals(ours.cold), totals(ours.warm)
    part.measured = {
        "cold": ratio(cold, totals(plain.cold)) if complete else missing,
        "warm": ratio(warm, cold) if ours.cold else missing,
        "passes share": (
            median(each.passes / each.total for each in ours.cold) if ours.cold else missing
        ),
    }
    rows = []
    for name, each in found.items():
        if each.cold:
            cold, warm = totals(each.cold), totals(each.warm)
            against = ratio(cold, totals(plain.cold)) if len(cold) == len(plain.cold) else None
            share = median(one.passes / one.total for one in each.cold)
            rows.append(
                [
                    name,
                    f"{median(cold):.1f}",
                    f"{median(warm):.1f}",
                    "-" if against is None else f"{against:.3f}",
                    f"{ratio(warm, cold):.3f}",
                    f"{share:.1%}" if share else "-",
                ]
            )
            part.data[name] = {
                "cold seconds": cold,
                "warm seconds": warm,
                "passes seconds, cold": [one.passes for one in each.cold],
                "passes seconds, warm": [one.passes for one in each.warm],
            }
    header = ["first step", "cold s", "warm s", "cold / unsharded", "warm / cold", "passes"]
    part.text.append(table(header, rows))
    heights: dict[str, list[float | None]] = {
        name: [median(totals(each.cold)), median(totals(each.warm))]
        for name, each in found.items()
        if each.cold
    }
    part.charts["compile-time"] = Bars(
        f"First step, {WORKLOAD}", "median s", ("cold", "warm"), heights
    )


def totals(compiled: Sequence[Compiled]) -> list[float]:
    """Seconds of the whole first steps."""
    return [each.total for each in compiled]
