"""Write reductions, and take the sums of gradient markers out of the graph.

    token = reduce_inner([mm, sum_1], "blocks.0", [0, 1], [...])
    token_1 = reduce_outer(token, "blocks.0", [...])
    wait_reductions([token_1], ["blocks.0"])
    return (..., None, ...)          # was: the sum of parameter_grad(mm, ...), ...

Gradients reach the parameters through the runtime; autograd gets None for the flat shards.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from .gradients import graph_outputs
from .graph_writer import GraphWriter
from .steps import ReduceInner, ReduceOuter, ReduceTogether, Step, WaitReductions
from .targets import ADD, REDUCE_INNER, REDUCE_OUTER, REDUCE_TOGETHER, WAIT_REDUCTIONS


def write_reduce_inner(writer: GraphWriter, step: ReduceInner) -> Node:
    """Write ``token = reduce_inner(gradients, group, indices, after)``."""
    writer.token[step.group] = writer.call(
        REDUCE_INNER,
        [_write_gradient(writer, step, step.group, index) for index in step.indices],
        step.group,
        list(step.indices),
        writer.named_by(step),
        before=writer.place(step),
        name=writer.readable("token", step.group),
    )
    return writer.token[step.group]


def write_reduce_together(writer: GraphWriter, step: ReduceTogether) -> Node:
    """Write ``token = reduce_together(gradients, groups, counts, indices, after)``."""
    keys = [(g, index) for g, own in zip(step.groups, step.indices, strict=True) for index in own]
    token = writer.call(
        REDUCE_TOGETHER,
        [_write_gradient(writer, step, *key) for key in keys],
        list(step.groups),
        [len(own) for own in step.indices],
        [index for _, index in keys],
        writer.named_by(step),
        before=writer.place(step),
        name="token_together",
    )
    writer.token.update(dict.fromkeys(step.groups, token))
    return token


def write_reduce_outer(writer: GraphWriter, step: ReduceOuter) -> Node:
    """Write ``token = reduce_outer(token, group, after)``."""
    writer.token[step.group] = writer.call(
        REDUCE_OUTER,
        writer.token[step.group],
        step.group,
        writer.named_by(step),
        before=writer.place(step),
        name=writer.readable("outer_token", step.group),
    )
    return writer.token[step.group]


def write_wait_reductions(writer: GraphWriter, step: WaitReductions) -> Node:
    """Write ``wait_reductions(tokens, groups)``."""
    tokens = writer.named_by(step)
    groups = list(step.groups)
    return writer.call(
        WAIT_REDUCTIONS, tokens, groups, before=writer.place(step), name="wait_reductions"
    )


def erase_gradient_sums(writer: GraphWriter) -> None:
    """Return what is left of the sums of gradients, mostly None, and remove the sums."""
    if not writer.uses.sums:
        return
    output = writer.graph.output_node()
    returned = list(graph_outputs(writer.graph))
    for total in writer.uses.sums:
        returned[total.output] = _write_sum(writer, total.rest, output) if total.rest else None
    output.args = (tuple(returned),)
    nodes = {node: None for total in writer.uses.sums for node in total.nodes}
    for node in sorted(nodes, key=writer.uses.position.__getitem__, reverse=True):
        writer.graph.erase_node(node)


def _write_gradient(writer: GraphWriter, step: Step, group: str, index: int) -> Node:
    """The gradient of one parameter: the node that computes it, or a sum of several."""
    gradients = writer.uses.gradients[group, index]
    return _write_sum(writer, gradients, writer.place(step))


def _write_sum(writer: GraphWriter, summands: Sequence[Node], place: Node) -> Node:
    """Added up as autograd adds them in eager mode, oldest first, to be bitwise equal."""
    total, *rest = summands
    for summand in rest:
        total = writer.call(ADD, total, summand, before=place, name=f"{total.name}_sum")
    return total
