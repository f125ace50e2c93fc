"""Time of a training step on two gloo ranks: every contender, in turns, in one run.

A turn is two steps, of which the second counts: the first brings a contender's data back into the
processor's caches. A step's time is that of its slower rank.

bound = compute + comm + the optimizer on a rank's share, each measured in the same rounds. The
unsharded model runs on both ranks at once, as the sharded one does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from .contenders import CONTENDERS, FSDP2
from .ranks import Ranks, RanksFailed, World
from .results import Bars, Missing, Part, Settings, progress, ratio, table
from .stepping import StepTime
from .workloads import Shape, shape_of

STEPPING = "benchmarks.stepping"
COMM = "bare collectives"
OWN_COMM = "bare collectives, ours"
SHARE = "AdamW on a share"
UNCOUNTED_ROUNDS = 2


@dataclass
class Times:
    """Seconds of the counted steps of one contender, the slower rank's.

    Attributes:
        step: forward, backward and optimizer.
        passes: forward and backward alone.
    """

    step: list[float] = field(default_factory=list)
    passes: list[float] = field(default_factory=list)

    def add(self, ranks: Sequence[StepTime]) -> None:
        """One more step."""
        self.passes.append(max(each.passes for each in ranks))
        self.step.append(max(each.passes + each.optimizer for each in ranks))


class Field:
    """Contenders that are ready, and why others are not.

    Args:
        makers: for each its world, ``"module:function"`` and arguments.
        stack: closes the processes.
    """

    def __init__(
        self, makers: Mapping[str, tuple[World, str, tuple[Any, ...]]], stack: ExitStack
    ) -> None:
        self.ready: dict[str, Ranks] = {}
        self.failed: dict[str, str] = {}
        self.first_losses: dict[str, list[float]] = {}
        for name, (world, maker, arguments) in makers.items():
            progress(f"  {name}: set up and compile")
            try:
                ranks = stack.enter_context(Ranks(world, maker, *arguments))
                turns = ranks.ask("turn", 3)
            except RanksFailed as error:
                self._fail(name, str(error))
                continue
            self.ready[name] = ranks
            self.first_losses[name] = [turn[0].loss for turn in turns]

    def compare_losses(self, reference: str) -> None:
        """Whoever computes something else is not measured."""
        expected = self.first_losses.get(reference)
        for name in list(self.ready):
            found = self.first_losses[name]
            if expected is None or any(map(math.isnan, found)):
                continue
            if not all(map(_close, found, expected)):
                self._fail(name, f"its losses are {found}, those of {reference} {expected}")

    def measure(self, rounds: int) -> dict[str, Times]:
        """Seconds of ``rounds`` steps of each, A B C A B C ..."""
        times = {name: Times() for name in self.ready}
        progress(f"  {rounds} rounds of {len(self.ready)}")
        for number in range(UNCOUNTED_ROUNDS + rounds):
            for name, ranks in list(self.ready.items()):
                try:
                    turns = ranks.ask("turn", 2)
                except RanksFailed as error:
                    self._fail(name, str(error))
                    continue
                if number >= UNCOUNTED_ROUNDS:
                    times[name].add([turn[-1] for turn in turns])
        return {name: times[name] for name in self.ready}

    def _fail(self, name: str, why: str) -> None:
        self.ready.pop(name, None)
        self.failed[name] = why
        progress(f"  {name} could not run: {why}")


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-4)


def run(settings: Settings) -> Part:
    """Measure every workload."""
    part = Part()
    medians: dict[str, dict[str, float]] = {}
    for name in settings.workloads:
        shape = shape_of(name, settings)
        progress(f"step time, {name}: {shape}")
        with ExitStack() as stack:
            contenders = Field(_makers(shape), stack)
            contenders.compare_losses("FSDP2 eager")
            times = contenders.measure(settings.steps)
        _judge(part, name, times, contenders.failed)
        medians[name] = {each: median(found.step) * 1e3 for each, found in times.items()}
    part.charts["step-time"] = _chart(medians)
    return part


def _makers(shape: Shape) -> dict[str, tuple[World, str, tuple[Any, ...]]]:
    gloo = World()
    return {
        **{name: (gloo, f"{STEPPING}:TrainingSteps", (name, shape)) for name in CONTENDERS},
        COMM: (gloo, f"{STEPPING}:BareCollectives", (shape, False)),
        OWN_COMM: (gloo, f"{STEPPING}:BareCollectives", (shape, True)),
        SHARE: (gloo, f"{STEPPING}:ShareOfOptimizer", (shape,)),
    }


def bound(times: Mapping[str, Times], comm: str = COMM) -> Times | None:
    """What a step costs that overlaps nothing and wastes nothing; None where a part is missing."""
    if not {"unsharded", comm, SHARE} <= times.keys():
        return None
    passes = [a + b for a, b in zip(times["unsharded"].passes, times[comm].passes, strict=True)]
    step = [a + b for a, b in zip(passes, times[SHARE].step, strict=True)]
    return Times(step, passes)


def best_of(times: Mapping[str, Times], names: Sequence[str]) -> str | None:
    """The contender with the smallest median step."""
    there = [name for name in names if name in times]
    return min(there, key=lambda name: median(times[name].step), default=None)


def _judge(part: Part, workload: str, times: dict[str, Times], failed: Mapping[str, str]) -> None:
    best = best_of(times, FSDP2)
    limits = {"bound": bound(times), "bound with our collectives": bound(times, OWN_COMM)}
    compared = {} if best is None else {"FSDP2": times[best]}
    compared |= {name: found for name, found in limits.items() if found is not None}
    rows = []
    data: dict[str, Any] = {"best of FSDP2": best, "failed": dict(failed), "contenders": {}}
    for name, found in {**times, **{k: v for k, v in compared.items() if k != "FSDP2"}}.items():
        ratios = {
            against: (ratio(found.step, other.step), ratio(found.passes, other.passes))
            for against, other in compared.items()
            if median(found.passes) > 0
        }
        rows.append(_row(name, found, ratios, compared))
        data["contenders"][name] = {
            "step seconds": found.step,
            "forward and backward seconds": found.passes,
            "step ratios": {against: each[0] for against, each in ratios.items()},
            "forward and backward ratios": {against: each[1] for against, each in ratios.items()},
        }
    columns = [f"{what} / {against}" for against in compared for what in ("step", "fwd+bwd")]
    header = [workload, "step ms", "fwd+bwd ms", *columns]
    part.text.append(table(header, rows) + f"\nFSDP2 is {best}, the fastest of its variants here")
    part.data[workload] = data
    part.problems += [f"{workload}, {name}: {why}" for name, why in failed.items()]
    for option, name in (("default", "compile_fsdp"), ("unlimited", "compile_fsdp, unlimited")):
        for against in ("FSDP2", "bound"):
            key = f"step {workload} {option} {against}"
            why = failed.get(name) or f"no {against}: {'; '.join(failed.values())}"
            missing = name not in times or against not in compared
            part.measured[key] = (
                Missing(why) if missing else ratio(times[name].step, compared[against].step)
            )


def _row(
    name: str,
    found: Times,
    ratios: Mapping[str, tuple[float, float]],
    compared: Mapping[str, Times],
) -> list[str]:
    cells = [f"{value:.3f}" for each in ratios.values() for value in each]
    milliseconds = [f"{median(each) * 1e3:.1f}" for each in (found.step, found.passes)]
    return [name, *milliseconds, *(cells or ["-"] * 2 * len(compared))]


def _chart(medians: Mapping[str, Mapping[str, float]]) -> Bars:
    names = list(dict.fromkeys(name for each in medians.values() for name in each))
    return Bars(
        "One training step, two gloo ranks",
        "median ms",
        tuple(medians),
        {
            name: [each.get(name) for each in medians.values()]
            for name in names
            if name in CONTENDERS
        },
    )
