"""What runs is what was planned, in that order, and every kind of gather is counted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from compile_fsdp.backend import groups_in
from compile_fsdp.passes import pipeline
from compile_fsdp.passes.schedule import Policy
from compile_fsdp.passes.steps import GroupStep, Schedule, WaitReductions
from compile_fsdp.runtime import collectives
from compile_fsdp.runtime.ops import ExecutedStep, recorded_steps
from tests.distributed import distributed, run
from tests.models import LanguageModel, language_batches
from tests.training import drive, local_batch, shard_blocks


def planned(schedule: Schedule) -> list[ExecutedStep]:
    steps = []
    for step in schedule.steps:
        if isinstance(step, GroupStep):
            steps.append(ExecutedStep(step.op, step.group))
        elif isinstance(step, WaitReductions):
            steps.append(ExecutedStep(step.op, list(step.groups)))
    return steps


@pytest.mark.compat
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@distributed(2)
def test_executed_order_is_planned_order(inner: str) -> None:
    """Inductor moves nodes that only happen to be in order: arguments must hold them."""
    schedules: list[Schedule] = []

    def observe(kind: Any, before: str, schedule: Schedule, after: Any) -> None:
        schedules.append(schedule)

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        compilers = {
            "inductor": pipeline.compile_with_inductor,
            "aot_eager": pipeline.compile_with_aot_eager,
        }
        return compilers[inner](
            gm, inputs, groups=groups_in(gm), policy=Policy(), verify=True, observer=observe
        )

    sharded = shard_blocks(LanguageModel(blocks=3))
    call = torch.compile(sharded, backend=backend)
    (batch,) = language_batches(1, 2)
    # A cache hit plans nothing: this test wants to see the plan.
    with torch._inductor.config.patch(force_disable_caches=True):
        call(*local_batch(batch)).backward()
    forward, backward = schedules
    with recorded_steps() as executed:
        loss = call(*local_batch(batch))
        boundary = len(executed)
        loss.backward()
    assert executed[:boundary] == planned(forward)
    assert executed[boundary:] == planned(backward)


def collectives_of_a_step(driver: str) -> list[tuple[str, str]]:
    sharded = shard_blocks(LanguageModel(blocks=3))
    call = drive(sharded, driver)
    (batch,) = language_batches(1, 2)
    call(*local_batch(batch)).backward()
    with collectives.recorded() as records:
        call(*local_batch(batch)).backward()
    return [(record.kind, record.label) for record in records]


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
def test_zero3_gathers_twice_and_reduces_once(driver: str) -> None:
    """Compiled, what would be released and gathered again at once stays: the head and the last
    block."""
    kept = ("root", "blocks.2") if driver == "aot_eager" else ()
    for rank_records in run(2, collectives_of_a_step, driver):
        for label in ("root", "blocks.0", "blocks.1", "blocks.2"):
            gathers = rank_records.count(("all_gather", label))
            assert gathers == (1 if label in kept else 2), (label, rank_records)
            assert rank_records.count(("reduce_scatter", label)) == 1, (label, rank_records)


def test_every_rank_issues_the_same_collectives_in_the_same_order() -> None:
    first, second = run(2, collectives_of_a_step, "eager")
    assert first == second


def prefetch_order(driver: str) -> list[tuple[str, str]]:
    return [record for record in collectives_of_a_step(driver) if record[0] == "all_gather"]


def test_eager_and_compiled_gather_in_the_order_of_use() -> None:
    """Forward in order, backward in reverse; the root, which the head belongs to, comes first."""
    forward = ["root", "blocks.0", "blocks.1", "blocks.2"]
    backward = ["root", "blocks.2", "blocks.1", "blocks.0"]
    labels = [label for _, label in run(2, prefetch_order, "eager")[0]]
    assert labels == forward + backward
    labels = [label for _, label in run(2, prefetch_order, "aot_eager")[0]]
    assert labels == forward + backward[2:], "the first two were kept"


def labels_and_copies() -> list[str]:
    model = LanguageModel(blocks=1)
    other = copy.deepcopy(model)
    shard_blocks(model)
    shard_blocks(other)
    names = [group.name for each in (model, other) for group in each._fsdp_unit.context.groups()]
    return names


def test_group_names_are_unique_and_equal_on_every_rank() -> None:
    """Equal up to the roots' numbers, which count what a process has sharded: the ranks of this
    test's pool have not all run the same tests before."""
    first, second = run(2, labels_and_copies)
    assert [name.partition("/")[2] for name in first] == [name.partition("/")[2] for name in second]
    assert len(set(first)) == len(first)
