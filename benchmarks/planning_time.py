"""The passes over graphs of 40 blocks and of 80: twice the work, or more?

``aot_eager``, one rank under a fake process group, a process for each measurement, in turns.
"""

from __future__ import annotations

import time
from statistics import median

import torch.distributed as dist

from .compile_time import Compiled, passes_timed
from .contenders import compile_fsdp
from .ranks import Ranks, World
from .results import Part, Settings, progress, ratio, table
from .workloads import Shape, batch_of, seeded_model

BLOCKS = (40, 80)
ROUNDS = 3


class FirstStep:
    """What a process does."""

    def __init__(self, blocks: int) -> None:
        shape = Shape(width=32, blocks=blocks, batch=1, length=8)
        self._batch = batch_of(shape, dist.get_rank())
        self._training = compile_fsdp(seeded_model(shape), {"inner": "aot_eager"})

    def first(self) -> Compiled:
        """Forward and backward; the passes in seconds of the processor."""
        with passes_timed(time.thread_time) as spent:
            start = time.perf_counter()
            self._training.call(*self._batch).backward()
            return Compiled(time.perf_counter() - start, sum(spent))


def run(settings: Settings) -> Part:
    """Measure both sizes in turn."""
    sizes = tuple(size // 10 for size in BLOCKS) if settings.quick else BLOCKS
    found: dict[int, list[Compiled]] = {size: [] for size in sizes}
    for number in range(1 if settings.quick else ROUNDS):
        for size in sizes:
            progress(f"planning time, round {number + 1}, {size} blocks")
            with Ranks(World(2, "fake"), f"{__name__}:FirstStep", size) as ranks:
                found[size] += ranks.ask("first")
    small, large = ([each.passes for each in found[size]] for size in sizes)
    part = Part({"passes scale": ratio(large, small)})
    rows = []
    for size, each in found.items():
        totals, passes = [one.total for one in each], [one.passes for one in each]
        rows.append([f"{size} blocks", f"{median(passes):.2f}", f"{median(totals):.1f}"])
        part.data[f"{size} blocks"] = {"passes seconds": passes, "first step seconds": totals}
    part.text.append(table(["passes", "passes s", "first step s"], rows))
    return part
