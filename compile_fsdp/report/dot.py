"""The order of one graph's steps in Graphviz's language.

A solid arrow is an argument that a step names; a dotted one is the buffer or token it works on.
"""

from __future__ import annotations

from collections.abc import Iterator

from compile_fsdp.explanation import GraphExplanation, PlannedStep
from compile_fsdp.passes.steps import format_bytes

_COLOURS = {
    "unshard": "#cfe2f7",
    "reduce_inner": "#ecd3ee",
    "gather_together": "#cfe2f7",
    "reduce_together": "#ecd3ee",
    "reduce_outer": "#f7ddc7",
}

_WORKS_ON = {
    "wait": ("unshard",),
    "release": ("unshard",),
    "keep": ("unshard",),
    "reduce_outer": ("reduce_inner", "reduce_together"),
}


def render(graph: GraphExplanation) -> str:
    """See `Explanation.to_dot`."""
    lines = [
        f"digraph {_quoted(graph.name)} {{",
        "  rankdir=TB;",
        '  node [shape=box, style="rounded,filled", fillcolor="#f6f8fa", fontname="sans-serif"];',
        *(f"  {line}" for line in _nodes(graph)),
        *(f"  {line}" for line in _arrows(graph)),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _nodes(graph: GraphExplanation) -> Iterator[str]:
    for step in graph.steps:
        text = f"{step.number} {step.op} {step.group}".rstrip()
        if step.bytes:
            text += f"\n{format_bytes(step.bytes)} {step.axis}".rstrip()
        text += f"\n{step.where}"
        colour = _COLOURS.get(step.op)
        filled = f", fillcolor={_quoted(colour)}" if colour else ""
        tooltip = _quoted("\n".join(step.fqns) or step.op)
        yield f"s{step.number} [label={_quoted(text)}{filled}, tooltip={tooltip}];"


def _arrows(graph: GraphExplanation) -> Iterator[str]:
    for step in graph.steps:
        for earlier in step.names:
            yield f"s{earlier} -> s{step.number};"
        source = _works_on(graph, step)
        if source is not None and source.number not in step.names:
            yield f"s{source.number} -> s{step.number} [style=dotted];"


def _works_on(graph: GraphExplanation, step: PlannedStep) -> PlannedStep | None:
    """The step that made what ``step`` works on."""
    makers = _WORKS_ON.get(step.op, ())
    for earlier in reversed(graph.steps[: step.number]):
        if earlier.op in makers and step.group in (earlier.group, *earlier.group.split("+")):
            return earlier
    return None


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
