"""Exposed communication of Llama-3-8B on 64 GPUs, 8 a node, bf16: by the cost model, no GPU.

The step is traced on shapes alone and played on the lanes of the cost model (`passes/timeline.py`).
FSDP2's schedule is played on the same lanes, graph and collectives:

- each block's weights are gathered while the block before it computes, in forward and in backward
  (one block ahead), and gathered again in backward;
- the root's weights stay from forward to backward (`reshard_after_forward=None`, the default);
- a block's gradients are reduced when its backward is done.

Its copies out of gathered and into reduced buffers, which are compute's, are not counted in the
verdict; a line of the table has them.
"""

from __future__ import annotations

import time
from dataclasses import replace

from compile_fsdp.cli.target import Sizes, workload_of
from compile_fsdp.passes.costs import CostModel, cost_model
from compile_fsdp.passes.policy import Policy
from compile_fsdp.passes.steps import format_bytes
from compile_fsdp.planning.capture import Captured, capture_step, cost_model_on
from compile_fsdp.planning.predict import Prediction, predict
from compile_fsdp.planning.sharding import Sharding
from compile_fsdp.planning.workload import Workload
from compile_fsdp.planning.world import parse_mesh

from .results import Bars, Part, Settings, progress, table
from .workloads import Shape, workload

CONFIG = "examples/configs/llama3_8b.json"
MESH = "64"
RANKS_PER_NODE = 8
DEVICE = "h100"
LENGTH = 8192


def run(settings: Settings) -> Part:
    """Trace, and play both schedules."""
    shape = parse_mesh(MESH, RANKS_PER_NODE)
    costs = cost_model_on(cost_model(DEVICE), shape)
    started = time.perf_counter()
    progress("simulation: tracing on shapes")
    captured = capture_step(_model(settings), shape, Sharding("zero3"))
    traced = time.perf_counter()
    ours = predict(captured, Policy(costs=costs))
    planned = time.perf_counter()
    unlimited = predict(captured, Policy(costs=costs, memory_budget="unlimited"))
    theirs = predict(captured, fsdp2_policy(captured, costs))
    plans = {"compile_fsdp": ours, "compile_fsdp, unlimited": unlimited, "FSDP2": theirs}
    part = Part({"exposed": share(ours), "exposed FSDP2": _over(share(ours), share(theirs))})
    rows = []
    for name, each in plans.items():
        seconds, memory = each.seconds, each.memory.total
        part.data[name] = vars(seconds) | {"exposed share": share(each), "peak bytes": memory}
        rows.append(_row(name, seconds.total, seconds.exposed, share(each), memory))
    copies = copy_seconds(theirs, costs)
    total = theirs.seconds.total + copies
    exposed = theirs.seconds.exposed
    part.data["FSDP2, with its copies"] = {"copies": copies, "total": total, "exposed": exposed}
    rows.append(_row("FSDP2, with its copies", total, exposed, exposed / total, None))
    part.data["seconds"] = {"trace": traced - started, "plan": planned - traced}
    header = [f"{captured.name}, {costs.name}", "step ms", "exposed ms", "exposed", "peak"]
    part.text.append(
        table(header, rows)
        + f"\ntraced in {traced - started:.0f} s, planned in {planned - traced:.1f} s"
    )
    part.charts["simulation"] = Bars(
        f"Exposed communication, {captured.name}, {shape.ranks} GPUs, modelled",
        "% of a step",
        ("exposed",),
        {name: [100 * share(each)] for name, each in plans.items()},
    )
    return part


def share(prediction: Prediction) -> float:
    """Exposed communication as a part of the step."""
    return prediction.seconds.exposed / prediction.seconds.total


def fsdp2_policy(captured: Captured, costs: CostModel) -> Policy:
    """FSDP2's schedule in the words of a policy."""
    root = [group.label for group in captured.groups.values() if _is_root(group.label)]
    kept = tuple((label.partition("[")[0], False) for label in root)
    return Policy(costs=costs, prefetch=1, reshard_after_forward=(("*", True), *kept))


def _is_root(label: str) -> bool:
    return label.partition("[")[0] == "root"


def copy_seconds(prediction: Prediction, costs: CostModel) -> float:
    """What FSDP2 copies in a step: out of each gathered buffer, and gradients into each buffer that
    is reduced. Read and written once each."""
    groups = prediction.captured.groups.values()
    moved = 0
    for group in groups:
        gathers = 1 if _is_root(group.label) else 2
        moved += 2 * (gathers * group.gather_bytes + group.reduce_bytes)
    return costs.copy_seconds(moved)


def _model(settings: Settings) -> Workload:
    if settings.quick:
        return workload("a small transformer", Shape(1024, 4, 1, 512))
    found = workload_of(f"hf:{CONFIG}", Sizes(1, LENGTH, "bf16"))
    return replace(found, name="Llama-3-8B")


def _over(ours: float, theirs: float) -> float:
    if theirs:
        return ours / theirs
    return 1.0 if not ours else float("inf")


def _row(name: str, step: float, exposed: float, part: float, peak: int | None) -> list[str]:
    size = "-" if peak is None else format_bytes(peak)
    return [name, f"{step * 1e3:.1f}", f"{exposed * 1e3:.2f}", f"{part:.2%}", size]
