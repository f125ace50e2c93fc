"""What would help: plans with one option changed, compared with the plan at hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from compile_fsdp.passes.policy import Policy

from .errors import PlanError
from .predict import Prediction, predict

LEAST_GAIN = 0.0005
"""Relative change of the step time below which a change is not worth a line."""


@dataclass(frozen=True)
class Change:
    """A change of one option, and what re-planning with it gave.

    Attributes:
        text: what is changed, for people.
        option: as ``torch.compile(options=...)`` takes it.
        step: relative change of the step time; negative is faster.
        memory: change of the peak in bytes.
        fits: whether the new peak is below the limit.
        after: the new plan.
    """

    text: str
    option: str
    step: float
    memory: int
    fits: bool
    after: Prediction


def changes(prediction: Prediction, limit: int | None) -> list[Change]:
    """Changes that make the step faster, the fastest first; those that fit before those that do
    not.

    Args:
        prediction: the plan to improve.
        limit: bytes that a rank may hold; None where nobody knows.
    """
    found = []
    for text, option, policy in _candidates(prediction):
        try:
            after = predict(prediction.captured, policy, prediction.optimizer)
        except PlanError:
            continue
        found.append(_compared(prediction, after, text, option, limit))
    useful = [change for change in found if change.step < -LEAST_GAIN]
    return sorted(useful, key=lambda change: (not change.fits, change.step))


def _compared(
    before: Prediction, after: Prediction, text: str, option: str, limit: int | None
) -> Change:
    return Change(
        text=text,
        option=option,
        step=after.seconds.total / before.seconds.total - 1,
        memory=after.memory.total - before.memory.total,
        fits=limit is None or after.memory.total <= limit,
        after=after,
    )


def _candidates(prediction: Prediction) -> Iterator[tuple[str, str, Policy]]:
    policy = replace(prediction.policy, memory_budget="peak")
    yield from _keeping(prediction, policy)
    for ahead in (1, 2, 4):
        if ahead != policy.prefetch:
            plural = "" if ahead == 1 else "s"
            text = f"gather {ahead} group{plural} ahead"
            yield text, f'"prefetch": {ahead}', replace(policy, prefetch=ahead)
    if policy.merge_below == 0:
        yield (
            "gather small neighbouring groups together",
            '"merge_below": "auto"',
            replace(policy, merge_below=None),
        )


def _keeping(prediction: Prediction, policy: Policy) -> Iterator[tuple[str, str, Policy]]:
    """Keep the last few groups, a part of them, or all."""
    groups = prediction.captured.groups
    reasons = prediction.schedules[0].keeping.reasons if prediction.schedules else {}
    innermost = [groups[name].label for name in reasons]
    counts = {1, 2, 3, 4, 8, len(innermost) // 4, len(innermost) // 2}
    for count in sorted(each for each in counts if 0 < each < len(innermost)):
        kept = tuple((_pattern(label), False) for label in innermost[:count])
        plural = "" if count == 1 else "s"
        asked = dict([("*", True), *kept])
        yield (
            f"keep the last {count} group{plural} between forward and backward",
            f'"reshard_after_forward": {asked}',
            replace(policy, reshard_after_forward=(("*", True), *kept)),
        )
    if innermost:
        yield (
            "keep all groups between forward and backward",
            '"memory_budget": "unlimited"',
            replace(policy, memory_budget="unlimited"),
        )


def _pattern(label: str) -> str:
    """The module of a group, as `policy.matches` wants it."""
    return label.partition("[")[0]
