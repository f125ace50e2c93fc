"""A plan made of shapes alone says what two gloo ranks then do (benchmarks/plan_against_truth.py
does the same at the size of the benchmarks)."""

from __future__ import annotations

from benchmarks.plan_against_truth import differences, planned, truth
from benchmarks.workloads import Shape
from tests.distributed import run

SMALL = Shape(width=64, blocks=3, batch=2, length=32)


def test_a_step_is_what_the_plan_said() -> None:
    """Order and bytes of collectives exactly, live bytes within 5 %."""
    plan, _ = planned("small", SMALL)
    for outcome in run(2, truth, "small", SMALL):
        assert not differences(plan, outcome)
