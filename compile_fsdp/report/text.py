"""An explanation as plain text, for a terminal, a log or a test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from compile_fsdp.explanation import (
    Explanation,
    GraphBreak,
    GraphExplanation,
    ParameterGroup,
    PlannedStep,
)
from compile_fsdp.passes.steps import format_bytes, format_seconds, table

STEP_COLUMNS = (
    *("#", "step", "group", "where", "bytes", "axis", "us", "exposed", "names", "overlaps"),
    "parameters",
)
RIGHT_ALIGNED = (0, 4, 6, 7)
GROUP_COLUMNS = ("group", "gathered", "shard", "dtype", "parameters")
GRAPHS = ("none", "communication", "whole")


def render(explanation: Explanation, *, graphs: str = "none") -> str:
    """See `Explanation.to_text`."""
    if graphs not in GRAPHS:
        raise ValueError(f"graphs must be one of {', '.join(GRAPHS)}, got {graphs!r}")
    sections = [[title(explanation)], *([note] for note in explanation.notes)]
    if explanation.groups:
        sections.append(table([GROUP_COLUMNS, *map(group_row, explanation.groups)], (1, 2)))
    if explanation.formats:
        sections.append(["compute weights", *indented(format_lines(explanation))])
    sections += [_graph(graph, graphs) for graph in explanation.graphs]
    if explanation.breaks:
        sections.append(["graph breaks", *indented(break_lines(explanation.breaks))])
    if explanation.recompiles:
        sections.append(["recompiles", *indented(recompile_lines(explanation))])
    return "\n\n".join("\n".join(lines) for lines in sections)


def title(explanation: Explanation) -> str:
    """One line about all of it."""
    parts = [
        _count(len(explanation.graphs), "graph"),
        _count(len(explanation.groups), "parameter group"),
        _count(explanation.world_size, "rank"),
    ]
    if explanation.breaks:
        parts.append(_count(len(explanation.breaks), "graph break"))
    if explanation.recompiles:
        parts.append(_count(len(explanation.recompiles), "recompile"))
    return f"compile_fsdp on torch {explanation.torch_version}: {', '.join(parts)}"


def _graph(graph: GraphExplanation, graphs: str) -> list[str]:
    lines = [heading(graph), *indented(summary(graph))]
    if graph.steps:
        lines += indented(table([STEP_COLUMNS, *map(step_row, graph.steps)], RIGHT_ALIGNED))
    lines += indented(reasons(graph))
    for name, listing in listings(graph, graphs):
        lines += ["", f"  {name}:", *indented(listing.splitlines(), 4)]
    return lines


def heading(graph: GraphExplanation) -> str:
    """Which graph it is and where it starts."""
    return f"{graph.name}  {graph.where}".rstrip()


def listings(graph: GraphExplanation, graphs: str) -> list[tuple[str, str]]:
    """The texts of a graph that `Explanation.to_text` asks for, by name."""
    if graphs == "communication":
        return [("communication", graph.communication)]
    if graphs == "whole":
        return [("before", graph.before), ("after", graph.after)]
    return []


def summary(graph: GraphExplanation) -> Iterator[str]:
    """Totals: what is moved, and what memory that takes."""
    for total in graph.collectives:
        over = f" over {total.axis}" if total.axis else ""
        kind = total.kind or total.lane
        yield f"{total.count} {kind}{over}, {format_bytes(total.bytes)} together"
    if not graph.collectives:
        yield "no communication"
    peak = graph.peak
    if peak is not None and peak.total:
        parts = (
            (peak.activations, "activations"),
            (peak.parameters, "gathered parameters"),
            (peak.gradients, "packed gradients"),
        )
        used = " + ".join(f"{format_bytes(size)} {what}" for size, what in parts if size)
        yield f"at most {format_bytes(peak.total)} at a time: {used}"
        budget = "" if graph.budget is None else f", budget {format_bytes(graph.budget)}"
        yield f"beside {format_bytes(graph.state_bytes)} of shards and their gradients{budget}"
    if graph.arena_bytes is not None:
        live = format_bytes(graph.arena_bound or 0)
        yield f"arena of {format_bytes(graph.arena_bytes)}, of which {live} are live at once"
    if graph.time.total:
        yield (
            f"modelled ({graph.time.cost_model}): {_us(graph.time.total)} = "
            f"{_us(graph.time.compute)} compute + {_us(graph.time.exposed)} exposed of "
            f"{_us(graph.time.communication)} communication"
        )


def _us(microseconds: float) -> str:
    return format_seconds(microseconds / 1e6)


def step_row(step: PlannedStep) -> tuple[str, ...]:
    """The cells of `STEP_COLUMNS`."""
    return (
        str(step.number),
        step.op,
        step.group,
        step.where,
        format_bytes(step.bytes) if step.bytes else "",
        step.axis,
        f"{step.end - step.start:.1f}" if step.end > step.start else "",
        f"{step.exposed:.1f}" if step.exposed else "",
        " ".join(map(str, step.names)),
        " ".join(step.overlaps),
        short_fqns(step.fqns) if step.bytes else "",
    )


def group_row(group: ParameterGroup) -> tuple[str, ...]:
    """The cells of `GROUP_COLUMNS`."""
    return (
        group.label,
        format_bytes(group.gather_bytes),
        format_bytes(group.shard_bytes),
        group.dtype if group.trainable else f"{group.dtype}, frozen",
        short_fqns(tuple("=".join(names) for names in group.fqns), 4),
    )


def format_lines(explanation: Explanation) -> Iterator[str]:
    """Which parameters compute in MXFP8, what that saves, and why the others do not."""
    groups = {group.name: group for group in explanation.groups}
    quantized = [each.fqn for each in explanation.formats if each.format]
    if quantized:
        planes = [group for group in groups.values() if group.planes == "rowwise"]
        sources = [groups[each.planes_of] for each in planes]
        moved, instead = (sum(each.gather_bytes for each in some) for some in (planes, sources))
        dtypes = " and ".join(dict.fromkeys(each.dtype for each in sources))
        saved = (
            f", gathered for each phase: {format_bytes(moved)} instead of {format_bytes(instead)} "
            f"in {dtypes}"
        )
        yield f"in MXFP8{saved if moved else ''}:"
        yield from indented(quantized)
    reasons: dict[str, list[str]] = {}
    for each in explanation.formats:
        if not each.format:
            reasons.setdefault(each.reason, []).append(each.fqn)
    if reasons:
        yield "not in MXFP8:"
    for reason, fqns in reasons.items():
        yield f"  {' '.join(fqns)}: {reason}"


def short_fqns(fqns: Sequence[str], most: int = 2) -> str:
    """The first names, and how many more there are; a prefix that all share is said once."""
    if not fqns:
        return ""
    prefix = _common_prefix(fqns)
    shown = [fqn.removeprefix(prefix) for fqn in fqns[:most]]
    if len(fqns) > most:
        shown.append(f"+{len(fqns) - most}")
    names = " ".join(shown)
    return f"{prefix}{{{names}}}" if prefix and len(fqns) > 1 else prefix + names


def _common_prefix(fqns: Sequence[str]) -> str:
    """The dotted prefix that all of ``fqns`` have, with its dot."""
    parts = [fqn.split(".")[:-1] for fqn in fqns]
    shared = []
    for column in zip(*parts, strict=False):
        if len(set(column)) > 1:
            break
        shared.append(column[0])
    return "".join(f"{part}." for part in shared)


def reasons(graph: GraphExplanation) -> Iterator[str]:
    """Why groups are kept or released and each step is where it is; equal reasons are told
    once."""
    told: dict[str, list[str]] = {}
    for decision in graph.decisions:
        told.setdefault(decision.reason, []).append(decision.group)
    for step in graph.steps:
        if step.reason:
            told.setdefault(step.reason, []).append(str(step.number))
    if told:
        yield "why"
    for reason, subjects in told.items():
        yield f"  {' '.join(subjects)}: {reason}"


def break_lines(breaks: Sequence[GraphBreak]) -> Iterator[str]:
    """Where and why, Dynamo's explanation below."""
    for each in breaks:
        place = f"{each.file}:{each.line} in {each.function}: {each.code}" if each.file else ""
        first, *more = each.reason.strip().splitlines() or [""]
        yield f"{place or 'place unknown'}"
        yield f"  {first}"
        yield from indented((line.strip() for line in more if line.strip()), 4)


def recompile_lines(explanation: Explanation) -> Iterator[str]:
    """What was compiled again, and which guard failed."""
    for each in explanation.recompiles:
        yield f"{each.compile_id} {each.where}".rstrip()
        yield from indented(each.failed_guard.strip().splitlines())


def indented(lines: Iterator[str] | Sequence[str], by: int = 2) -> list[str]:
    """``lines``, each behind ``by`` spaces."""
    return [f"{' ' * by}{line}" for line in lines]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
