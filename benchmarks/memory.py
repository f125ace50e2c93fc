"""Peak of live bytes in a training step on two gloo ranks, beyond what lives between steps.

Counted from the allocator's own records, from gradients on, whose memory a system may keep beyond
``zero_grad``: it counts then as well. Not counted are weights and optimizer state. FSDP2 is its
variant with the lowest peak.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from compile_fsdp.passes.steps import format_bytes

from .contenders import CONTENDERS, FSDP2
from .plan_against_truth import live_bytes
from .ranks import Ranks, RanksFailed, World
from .results import Bars, Missing, Part, Settings, progress, table
from .workloads import Shape, batch_of, seeded_model, shape_of

OURS = "compile_fsdp"


class Peaks:
    """What the processes do: train a contender and count its bytes."""

    def __init__(self, name: str, shape: Shape) -> None:
        self._batch = batch_of(shape, dist.get_rank())
        self._training = CONTENDERS[name](seeded_model(shape))

    def peaks(self) -> tuple[int, int]:
        """Of forward and backward, and of a whole step, in bytes."""
        for _ in range(2):
            self._step()

        def two_steps() -> None:
            self._step()
            self._step()

        def step_and_passes() -> None:
            self._step()
            self._passes()

        # What a step leaves behind counts until the next one frees it, so both are watched: of
        # memory that was allocated before, nobody would see the end.
        return live_bytes(step_and_passes), live_bytes(two_steps)

    def _passes(self) -> None:
        self._training.call(*self._batch).backward()

    def _step(self) -> None:
        self._passes()
        self._training.optimizer.step()
        self._training.optimizer.zero_grad()


def run(settings: Settings) -> Part:
    """Count for every workload."""
    part = Part()
    heights: dict[str, list[float | None]] = {name: [] for name in CONTENDERS}
    for workload in settings.workloads:
        shape = shape_of(workload, settings)
        progress(f"memory, {workload}: {shape}")
        found: dict[str, tuple[int, int]] = {}
        for name in CONTENDERS:
            progress(f"  {name}")
            try:
                with Ranks(World(), f"{__name__}:Peaks", name, shape) as ranks:
                    by_rank = ranks.ask("peaks")
            except RanksFailed as error:
                part.problems.append(f"memory, {workload}, {name}: {error}")
                continue
            found[name] = max(each[0] for each in by_rank), max(each[1] for each in by_rank)
        for name in CONTENDERS:
            heights[name].append(found[name][1] / 2**20 if name in found else None)
        _judge(part, workload, found)
    part.charts["memory"] = Bars(
        "Peak live bytes in a step, two gloo ranks", "MiB", settings.workloads, heights
    )
    return part


def _judge(part: Part, workload: str, found: dict[str, tuple[int, int]]) -> None:
    peers = [name for name in FSDP2 if name in found]
    best = min(peers, key=lambda name: found[name][1], default=None)
    rows = []
    for name, (passes, step) in found.items():
        cells = ["-", "-"]
        if best is not None:
            cells = [f"{step / found[best][1]:.3f}", f"{passes / found[best][0]:.3f}"]
        rows.append([name, format_bytes(step), format_bytes(passes), *cells])
    header = [workload, "step", "fwd+bwd", "step / FSDP2", "fwd+bwd / FSDP2"]
    part.text.append(table(header, rows) + f"\nFSDP2 is {best}, the lowest of its variants here")
    data: dict[str, Any] = {"best of FSDP2": best}
    data["bytes"] = {name: {"step": b, "forward and backward": a} for name, (a, b) in found.items()}
    part.data[workload] = data
    if best is None or OURS not in found:
        part.measured[f"memory {workload}"] = Missing(f"{OURS} or FSDP2 failed")
    else:
        part.measured[f"memory {workload}"] = found[OURS][1] / found[best][1]
