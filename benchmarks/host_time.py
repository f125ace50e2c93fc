"""Host time of a step: 32 tiny blocks under a fake process group, whose collectives do nothing.

What a system adds is its step's time less that of the unsharded compiled model in the same round.
"""

from __future__ import annotations

from contextlib import ExitStack
from statistics import median

from .contenders import CONTENDERS, FSDP2
from .ranks import World
from .results import Bars, Missing, Part, Settings, progress, table
from .step_time import STEPPING, Field, Times, best_of
from .workloads import Shape

TINY = Shape(width=32, blocks=32, batch=1, length=8)
RANKS = 8
PLAIN = "unsharded"
OURS = "compile_fsdp"
LEFT_OUT = ("DDP + compile",)


def run(settings: Settings) -> Part:
    """Measure."""
    shape = Shape(TINY.width, 2, TINY.batch, TINY.length) if settings.quick else TINY
    progress(f"host time: {shape}, {RANKS} ranks that are not there")
    world = World(RANKS, "fake")
    names = [name for name in CONTENDERS if name not in LEFT_OUT]
    makers = {name: (world, f"{STEPPING}:TrainingSteps", (name, shape)) for name in names}
    with ExitStack() as stack:
        contenders = Field({**makers}, stack)
        times = contenders.measure(settings.steps)
    part = Part(problems=[f"host, {name}: {why}" for name, why in contenders.failed.items()])
    best = best_of(times, FSDP2)
    if PLAIN not in times or OURS not in times or best is None:
        why = "; ".join(f"{name}: {each}" for name, each in contenders.failed.items())
        part.measured["host"] = Missing(why)
        return part
    part.measured["host"] = added(times, OURS, best, passes=False)
    _show(part, times, best)
    return part


def added(times: dict[str, Times], name: str, peer: str, *, passes: bool) -> float:
    """The median of what ``name`` adds, divided by what ``peer`` adds."""

    def seconds(of: str) -> list[float]:
        return times[of].passes if passes else times[of].step

    rounds = zip(seconds(name), seconds(peer), seconds(PLAIN), strict=True)
    return median((ours - plain) / (theirs - plain) for ours, theirs, plain in rounds)


def _show(part: Part, times: dict[str, Times], best: str) -> None:
    rows = []
    for name, found in times.items():
        step, passes = (median(each) * 1e3 for each in (found.step, found.passes))
        ratios = [added(times, name, best, passes=each) for each in (False, True)]
        rows.append([name, f"{step:.2f}", f"{passes:.2f}", *(f"{each:.3f}" for each in ratios)])
        part.data[name] = {
            "step seconds": found.step,
            "forward and backward seconds": found.passes,
            "added by a step, ratio": ratios[0],
            "added by forward and backward, ratio": ratios[1],
        }
    header = ["host time", "step ms", "fwd+bwd ms", "added / FSDP2", "fwd+bwd added / FSDP2"]
    part.text.append(table(header, rows) + f"\nFSDP2 is {best}, the fastest of its variants here")
    medians: dict[str, list[float | None]] = {
        name: [median(found.step) * 1e3, median(found.passes) * 1e3]
        for name, found in times.items()
    }
    categories = ("step", "forward and backward")
    part.charts["host-time"] = Bars("Host time, 32 tiny blocks", "median ms", categories, medians)
