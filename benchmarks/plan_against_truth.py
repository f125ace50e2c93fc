"""Plans of small transformers beside what two gloo ranks really do.

    python -m benchmarks.plan_against_truth [--json FILE] [--only latency]

For each workload the plan is made on shapes alone and the same step is run on two processes: the
order of all steps and the bytes of every collective must be equal, and the peak of live bytes
within 5 %. Exit status 1 where they are not.

Live bytes are counted from the allocator's own records. Gloo has no reduce-scatter, so the runtime
makes one of an all-to-all, whose receiving buffer no plan for a real cluster has. Here the plan is
given one, as large as the packed gradients that are being reduced. The step starts without
gradients (`zero_grad`): their memory, which plans count as always there, is counted as it comes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from compile_fsdp.passes.costs import cost_model
from compile_fsdp.passes.memory import filled
from compile_fsdp.passes.policy import Policy
from compile_fsdp.passes.steps import ReduceInner, Schedule, format_bytes
from compile_fsdp.planning.capture import capture_step
from compile_fsdp.planning.communication import traffic
from compile_fsdp.planning.predict import Prediction, predict
from compile_fsdp.planning.sharding import Sharding, shard
from compile_fsdp.planning.sizes import GroupSizes
from compile_fsdp.planning.world import parse_mesh
from compile_fsdp.runtime import collectives
from compile_fsdp.runtime.ops import recorded_steps

from .ranks import free_port
from .results import Part, Settings, progress
from .workloads import SHAPES, Shape, shape_of, workload

RANKS = 2
TOLERANCE = 0.05

Order = list[tuple[str, tuple[str, ...]]]


@dataclass(frozen=True)
class Outcome:
    """One step, planned or run.

    Attributes:
        order: every step with its groups.
        bytes: of the full buffers of all collectives, by kind.
        peak: most live bytes beyond weights.
    """

    order: Order
    bytes: dict[str, int]
    peak: int


def planned(name: str, shape: Shape) -> tuple[Outcome, Prediction]:
    """What a plan says."""
    how = Sharding("zero3")
    captured = capture_step(workload(name, shape), parse_mesh(str(RANKS)), how, decompose=False)
    prediction = predict(captured, Policy(costs=cost_model("cpu")))
    order = [
        (step.op, tuple(map(below_root, step.names)))
        for schedule in prediction.schedules
        for step in schedule.steps
    ]
    totals: dict[str, int] = {}
    for each in traffic(prediction):
        totals[each.kind] = totals.get(each.kind, 0) + each.bytes
    peak = max(peak_on_gloo(each, captured.sizes) for each in prediction.schedules)
    return Outcome(order, totals, peak), prediction


def peak_on_gloo(schedule: Schedule, sizes: Mapping[str, GroupSizes]) -> int:
    """The peak of a graph that starts without gradients: those of a group come with its reduction,
    which has a receiving buffer until the next one starts."""
    reductions = [step for step in schedule.steps if isinstance(step, ReduceInner)]
    size = len(schedule.facts.names)
    ends = [*(step.anchor for step in reductions[1:]), size]
    more = [
        (step.anchor, end, schedule.groups[step.group].reduce_bytes)
        for step, end in zip(reductions, ends, strict=False)
    ]
    more += [(step.anchor, size, sizes[step.group].gradients) for step in reductions]
    rows = zip(schedule.memory.live, filled(size, more), strict=True)
    return max(sum(row) for row in rows)


def truth(name: str, shape: Shape) -> Outcome:
    """What this rank does, one of `RANKS` of a gloo process group."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_inner",))
    built = workload(name, shape).build(mesh)
    shard(built, mesh, Sharding("zero3"))
    compiled: Any = torch.compile(
        built.model, backend="compile_fsdp", options={"inner": "aot_eager"}
    )
    compiled(*built.args).backward()
    with recorded_steps() as steps, collectives.recorded() as records:
        compiled(*built.args).backward()
    built.model.zero_grad()
    peak = live_bytes(lambda: compiled(*built.args).backward())
    totals: dict[str, int] = {}
    for record in records:
        totals[record.kind] = totals.get(record.kind, 0) + record.bytes
    order = [(step.op, tuple(map(below_root, _names(step.group)))) for step in steps]
    return Outcome(order, totals, peak)


def _names(group: str | list[str]) -> list[str]:
    return [group] if isinstance(group, str) else group


def below_root(name: str) -> str:
    """A group's name without the number of its root, which counts what a process has sharded."""
    return name.partition("/")[2]


def live_bytes(step: Callable[[], object]) -> int:
    """The most bytes that ``step`` has allocated and not freed."""
    return max(accumulate(memory_changes(step)), default=0)


def memory_changes(step: Callable[[], object]) -> list[int]:
    """Bytes that ``step`` allocates (positive) and frees, in order.

    What was allocated while nobody watched is freed without a word.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=False
        ) as watched:
            step()
        watched.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted(
        (event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"
    )
    return [change for _, change in changes]


def differences(plan: Outcome, run: Outcome) -> list[str]:
    """What the plan got wrong."""
    found = []
    if plan.order != run.order:
        pairs = zip(plan.order, run.order, strict=False)
        first = next((n for n, (a, b) in enumerate(pairs) if a != b), "the shorter one's end")
        found.append(f"the order differs from step {first} on")
    if plan.bytes != run.bytes:
        found.append(f"collectives move {run.bytes}, planned {plan.bytes}")
    if abs(plan.peak / run.peak - 1) > TOLERANCE:
        found.append(
            f"live bytes: {format_bytes(run.peak)}, planned {format_bytes(plan.peak)} "
            f"({plan.peak / run.peak - 1:+.1%})"
        )
    return found


def _rank(rank: int, port: int, name: str, shape: Shape, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    outcome = truth(name, shape)
    Path(folder, f"{rank}.json").write_text(json.dumps(asdict(outcome)), encoding="utf-8")
    dist.destroy_process_group()


def _run(name: str, shape: Shape) -> Outcome:
    port = free_port()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [(number, port, name, shape, folder) for number in range(RANKS)]
        processes = [context.Process(target=_rank, args=each) for each in ranks]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        data = json.loads(Path(folder, "0.json").read_text(encoding="utf-8"))
    order = [(op, tuple(groups)) for op, groups in data.pop("order")]
    return Outcome(order=order, **data)


def compare(name: str, shape: Shape) -> tuple[Outcome, Outcome, str]:
    """What is planned, what two ranks do, and both in one line."""
    plan, _ = planned(name, shape)
    run = _run(name, shape)
    line = (
        f"{name}: {len(run.order)} steps, {format_bytes(sum(run.bytes.values()))} moved, peak "
        f"{format_bytes(run.peak)}, planned {format_bytes(plan.peak)} "
        f"({plan.peak / run.peak - 1:+.1%}): {'; '.join(differences(plan, run)) or 'as planned'}"
    )
    return plan, run, line


def run(settings: Settings) -> Part:
    """As a part of ``python -m benchmarks``."""
    part = Part()
    for name in settings.workloads:
        progress(f"plan against truth, {name}")
        plan, found, line = compare(name, shape_of(name, settings))
        part.measured[f"plan {name}"] = abs(plan.peak / found.peak - 1)
        part.text.append(line)
        part.data[name] = {"planned": asdict(plan), "run": asdict(found)}
    return part


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=tuple(SHAPES), action="append")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    rows = {}
    for name in given.only or SHAPES:
        plan, found, line = compare(name, SHAPES[name])
        print(line, flush=True)
        wrong = differences(plan, found)
        rows[name] = {"planned": asdict(plan), "run": asdict(found), "differences": wrong}
    if given.json:
        Path(given.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 1 if any(row["differences"] for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
