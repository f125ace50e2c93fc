"""A plan in words and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from compile_fsdp.passes.steps import format_bytes, format_seconds

from ..planning.advice import Change
from ..planning.communication import traffic
from ..planning.predict import Prediction, memory_budget_option
from ..planning.search import Found
from ..planning.sizes import GroupSizes
from .show import Section

MOST_CHANGES = 6


@dataclass(frozen=True)
class Report:
    """Everything that a plan prints.

    Attributes:
        prediction: the plan.
        changes: what would make it faster, the best first.
        found: the plans of a search, the best first.
        limit: bytes that a rank may hold, None where nobody knows.
    """

    prediction: Prediction
    changes: Sequence[Change]
    found: Sequence[Found]
    limit: int | None


def sections(report: Report) -> list[Section]:
    """The parts of a report, in order."""
    prediction = report.prediction
    parts = [_title(prediction), _groups(prediction), _memory(report), _communication(prediction)]
    parts += [_time(prediction), _changes(report)]
    if report.found:
        parts.append(_search(report))
    return parts


def _title(prediction: Prediction) -> Section:
    captured = prediction.captured
    shape, costs = captured.shape, prediction.policy.costs
    nodes = shape.ranks // shape.ranks_per_node
    title = (
        f"{captured.name}: {captured.sharding.mode} on {shape.ranks} ranks "
        f"({nodes} nodes of {shape.ranks_per_node}), {costs.name}"
    )
    recomputed = ", blocks recomputed in backward" if captured.sharding.checkpoints else ""
    modelled = (
        f"modelled: {costs.compute_share:.0%} of the peak rate for matrix products, "
        f"{costs.memory_share:.0%} of memory bandwidth, {costs.link_share:.0%} of the links; "
        "operators are not fused"
    )
    work = f"{captured.samples:,} {captured.unit} a rank and step{recomputed}"
    return Section(title, (work, modelled))


def _groups(prediction: Prediction) -> Section:
    sizes = prediction.captured.sizes
    every = list(sizes.values())
    parameters = sum(each.parameters for each in every)
    padded = sum(each.padded for each in every)
    total = (
        f"{parameters:,} parameters ({sum(each.trainable for each in every):,} trained), "
        f"{format_bytes(sum(each.parameter_bytes for each in every))}; padding "
        f"{format_bytes(sum(each.padding_bytes for each in every))} "
        f"({(padded - parameters) / padded if padded else 0:.2%})"
    )
    header = ("groups", "each: parameters", "gathered", "padding", "a rank holds")
    rows = [
        (
            label,
            f"{size.parameters:,}",
            format_bytes(size.padded * size.parameter_bytes // max(size.parameters, 1)),
            f"{(size.padded - size.parameters) / max(size.padded, 1):.2%}",
            format_bytes(size.weights + size.gradients),
        )
        for label, size in alike(every)
    ]
    return Section("parameters", (total,), (header, *rows), (1, 2, 3, 4))


def alike(sizes: Sequence[GroupSizes]) -> Iterator[tuple[str, GroupSizes]]:
    """Runs of groups of equal size: "layers.0 ... layers.79 (80)"."""
    runs: list[list[GroupSizes]] = []
    for size in sizes:
        key = (size.parameters, size.trainable, size.weights, size.gradients)
        last = runs[-1][-1] if runs else None
        if last and key == (last.parameters, last.trainable, last.weights, last.gradients):
            runs[-1].append(size)
        else:
            runs.append([size])
    for run in runs:
        label = run[0].label
        if len(run) > 1:
            label = f"{label} ... {run[-1].label} ({len(run)})"
        yield label, run[0]


def _memory(report: Report) -> Section:
    memory = report.prediction.memory
    rows = [
        ("weights", format_bytes(memory.weights)),
        ("gradients", format_bytes(memory.gradients)),
        (f"optimizer ({report.prediction.optimizer})", format_bytes(memory.optimizer)),
        ("activations", format_bytes(memory.activations)),
        ("gathered parameters", format_bytes(memory.gathered)),
        ("packed gradients", format_bytes(memory.packed)),
        ("together", format_bytes(memory.total)),
    ]
    lines = []
    if report.limit is not None and memory.total > report.limit:
        lines.append(
            f"DOES NOT FIT: {format_bytes(memory.total - report.limit)} more than the "
            f"{format_bytes(report.limit)} of a rank"
        )
    elif report.limit is not None:
        left = format_bytes(report.limit - memory.total)
        lines.append(f"fits into {format_bytes(report.limit)} with {left} to spare")
    budget = report.prediction.policy.budget_bytes
    if budget is not None:
        option = memory_budget_option(report.prediction, budget)
        lines.append(
            f'this budget as an option: {{"memory_budget": {option}}} (the option counts neither '
            "main weights nor optimizer state)"
        )
    arena = report.prediction.arena
    if arena is not None:
        lines.append(
            f'gathered parameters with {{"arena": true}}: one arena of {format_bytes(arena.size)}, '
            f"of which {format_bytes(arena.bound)} are live at once"
        )
    kept = report.prediction.kept
    if kept:
        lines.append(f"kept between forward and backward: {_few(kept)}")
    header = ("peak of a rank", "bytes")
    return Section("memory", tuple(lines), (header, *rows), (1,))


def _few(labels: Sequence[str], most: int = 4) -> str:
    more = f" and {len(labels) - most} more" if len(labels) > most else ""
    return ", ".join(labels[:most]) + more


def _communication(prediction: Prediction) -> Section:
    header = ("axis", "collective", "when", "count", "bytes")
    rows = [
        (each.axis, each.kind, each.when, str(each.count), format_bytes(each.bytes))
        for each in traffic(prediction)
    ]
    lines = () if rows else ("none",)
    return Section("communication of a step", lines, (header, *rows) if rows else (), (3, 4))


def _time(prediction: Prediction) -> Section:
    seconds = prediction.seconds
    step = seconds.total
    unit = prediction.captured.unit
    lines = (
        f"step {format_seconds(step)}: forward {format_seconds(seconds.forward)}, backward "
        f"{format_seconds(seconds.backward)}, optimizer {format_seconds(seconds.optimizer)}",
        f"exposed communication {format_seconds(seconds.exposed)} "
        f"({seconds.exposed / step if step else 0:.1%} of the step) of "
        f"{format_seconds(seconds.communication)}",
        f"{prediction.rate:,.0f} {unit}/s/GPU, MFU {prediction.mfu:.1%}",
    )
    return Section("modelled time", lines)


def _changes(report: Report) -> Section:
    title = "what would help most (planned again with the option changed)"
    if not report.changes:
        return Section(title, ("no other option makes the step faster",))
    header = ("step", "memory", "", "change", "option")
    rows = [
        (
            f"{change.step:+.1%}",
            signed_bytes(change.memory),
            "" if change.fits else "does not fit",
            change.text,
            shortened(change.option),
        )
        for change in report.changes[:MOST_CHANGES]
    ]
    return Section(title, (), (header, *rows), (0, 1))


def shortened(option: str, most: int = 60) -> str:
    """An option that fits into a line."""
    return option if len(option) <= most else option[: most - 4] + " ..."


def signed_bytes(size: int) -> str:
    """``+1.4 GiB``."""
    return f"{'-' if size < 0 else '+'}{format_bytes(abs(size))}"


def _search(report: Report) -> Section:
    header = ("", "mode", "mesh", "options", "step", "exposed", "peak", "per s and GPU", "MFU")
    rows = []
    for number, each in enumerate(report.found, start=1):
        seconds = each.plan.seconds
        rows.append(
            (
                str(number),
                each.mode,
                each.mesh,
                each.options,
                format_seconds(seconds.total),
                f"{seconds.exposed / seconds.total:.1%}",
                format_bytes(each.plan.memory.total) + ("" if each.fits else ", does not fit"),
                f"{each.plan.rate:,.0f}",
                f"{each.plan.mfu:.1%}",
            )
        )
    return Section("search", (), (header, *rows), (0, 4, 5, 7, 8))
