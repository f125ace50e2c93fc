"""No stream races, in any mode; and whatever is taken away from the ordering shows.

What streams were asked to do is recorded while real trainings run (`tests.recorded_scenarios`).
Then the records are damaged, one line of the runtime at a time (`tests.log_mutations`), and the
checker must notice. Every line of the runtime that asks something of a lane must be among them.
"""

from __future__ import annotations

import ast
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import nn
from torch.distributed.tensor import Shard

import compile_fsdp.runtime
from compile_fsdp.runtime.happens_before import Access, Record, races, stream_of
from compile_fsdp.runtime.recorded_memory import HELPERS
from compile_fsdp.runtime.recording import recorded_step
from tests.distributed import run
from tests.log_mutations import Mutation, mutate, mutations
from tests.models import LanguageModel, language_batches
from tests.modes import ONE_AXIS, mesh_of, shard_model
from tests.recorded_scenarios import SCENARIOS, log_of, log_without_driver
from tests.training import local_batch

Summary = Callable[[str, str], None]

METHODS = {
    "wait_current",
    "wait_event",
    "synchronize",
    "allocating",
    "then",
    "collective",
    "record_event",
    "wait",
}

NOT_RECORDED = {
    "collectives.py reduce_scatter: lane.collective": (
        "NCCL's own reduce-scatter; gloo's, which is recorded, declares the same"
    ),
    "merging.py reduce_together: lane.then": "gives memory back, which a stream has no part in",
    "main_gradient.py reduce_to: lane.then": "gives memory back, which a stream has no part in",
    "context.py fork_lanes: lane.wait_current": "only while a CUDA graph is captured",
    "context.py renew_lanes: self.lanes.gather.synchronize": "before and after the recording",
}
"""Calls of lanes that no recording has, each with its reason."""


@functools.cache
def recorded(name: str) -> list[list[Record]]:
    """Every rank's log of a scenario."""
    if name == WITHOUT_DRIVER:
        return run(2, log_without_driver)
    return run(math.prod(SCENARIOS[name].shape), log_of, name)


WITHOUT_DRIVER = "groups and buffers by themselves"
NAMES = [*SCENARIOS, WITHOUT_DRIVER]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_races(name: str, summary: Summary) -> None:
    check(name, recorded(name), summary)


def check(name: str, logs: list[list[Record]], summary: Summary) -> None:
    """No rank's log has a race."""
    for rank, log in enumerate(logs):
        found = races(log)
        assert not found, "\n".join([f"rank {rank}: {len(found)} races", *map(str, found)])
    names = [stream_of(each.entries) for each in logs[0] if isinstance(each, Access)]
    streams = sorted({name.split(" ")[0] for name in names})
    line = f"{name:<58} {len(logs[0]):>6} records  no race  ({', '.join(streams)})"
    summary("stream races", line)


@functools.cache
def caught_and_missed() -> tuple[dict[Mutation, str], set[Mutation], int]:
    """Mutations, the caught ones with where they were; and how many damaged logs were checked."""
    caught: dict[Mutation, str] = {}
    tried: set[Mutation] = set()
    checks = 0
    for name, log in ((each, log) for each in NAMES for log in recorded(each)[:2]):
        for mutation in sorted(mutations(log) - caught.keys()):
            tried.add(mutation)
            checks += 1
            if races(mutate(log, mutation)):
                caught[mutation] = name
    return caught, tried - caught.keys(), checks


def test_every_mutation_is_caught(summary: Summary) -> None:
    caught, missed, checks = caught_and_missed()
    found = Counter(f"{each.what} {each.kind}" for each in caught)
    tried = found + Counter(f"{each.what} {each.kind}" for each in missed)
    summary("stream races", f"mutations: {len(caught)} of {tried.total()} caught, {checks} logs")
    for what, count in sorted(tried.items()):
        summary("stream races", f"    {found[what]:>3} of {count:>3}  {what}")
    assert not missed, "nothing notices:\n" + "\n".join(map(str, sorted(missed)))
    assert len(tried) == 11 and tried.total() > 70, tried


def test_every_line_that_asks_something_of_a_lane_is_recorded() -> None:
    """Otherwise nobody knows whether it is right, or needed."""
    caught, _, _ = caught_and_missed()
    exercised = {each.site.split(" ")[0] for each in caught}
    missing = {}
    for path, function, call in lane_calls():
        lines = range(call.lineno, (call.end_lineno or call.lineno) + 1)
        if not any(f"runtime/{path.name}:{line}" in exercised for line in lines):
            missing[f"{path.name} {function}: {ast.unparse(call.func)}"] = call.lineno
    assert missing.keys() == NOT_RECORDED.keys(), missing


def lane_calls() -> Iterator[tuple[Path, str, ast.Call]]:
    """Calls in the runtime of methods of lanes and events, with file and function."""
    folder = Path(next(iter(compile_fsdp.runtime.__path__)))
    for path in sorted(folder.glob("*.py")):
        if path.name in HELPERS | {"streams.py", "recording.py"}:
            continue
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.Call) and _is_of_a_lane(node.func):
                        yield path, function.name, node


def _is_of_a_lane(function: ast.expr) -> bool:
    if not isinstance(function, ast.Attribute) or function.attr not in METHODS:
        return False
    receiver = ast.unparse(function.value).split(".")[-1]
    if function.attr == "wait":
        return receiver in ("event", "ready")
    # A pool of symmetric memory has a method of the same name.
    return "lane" in receiver or receiver in ("gather", "reduce_inner", "reduce_outer")


def record_a_first_clipping() -> None:
    model, mesh = LanguageModel(), mesh_of((2,))
    (mode,) = (each for each in ONE_AXIS if each.name == "ZeRO-3")
    shard_model(model, mode.on(mesh, Shard(0)), mesh)
    batch = local_batch(language_batches(1, 4)[0])
    model(*batch).backward()
    with recorded_step(model) as recorder:
        model(*batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    recorder.check()


def test_dtensor_may_ask_for_shapes_while_it_is_recorded() -> None:
    """What an operator returns it works out with tensors that have no values, at its first use."""
    run(2, record_a_first_clipping)
