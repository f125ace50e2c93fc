"""Write reductions, and take the sums of gradient markers out of the graph.

    token = reduce_inner([mm, sum_1], "blocks.0", [0, 1], [...])
    token_1 = reduce_outer(token, "blocks.0", [...])
    wait_reductions([token_1], ["blocks.0"])
    return (..., None, ...)          # was: the sum of parameter_grad(mm, ...), ...

Gradients reach the parameters through the runtime; autograd gets None for the flat shards.
"""

from __future__ import annotations

from torch.fx import Node

from .steps import ReduceInner, ReduceOuter, WaitReductions
from .targets import ADD, REDUCE_INNER, REDUCE_OUTER, WAIT_REDUCTIONS
from .uses import graph_outputs
from .writing import GraphWriter


def write_reduce_inner(writer: GraphWriter, step: ReduceInner) -> Node:
    """Write ``token = reduce_inner(gradients, group, indices, after)``."""
    writer.token[step.group] = writer.call(
        REDUCE_INNER,
        [_write_gradient(writer, step, index) for index in step.indices],
        step.group,
        list(step.indices),
        writer.named_by(step),
        before=writer.place(step),
        name=writer.readable("token", step.group),
    )
    return writer.token[step.group]


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
    """Return None where a sum of gradients was returned, and remove the sums."""
    if not writer.uses.sums:
        return
    returned = list(graph_outputs(writer.graph))
    for number in writer.uses.facts.gradient_outputs:
        returned[number] = None
    writer.graph.output_node().args = (tuple(returned),)
    for node in reversed(writer.uses.sums):
        writer.graph.erase_node(node)


def _write_gradient(writer: GraphWriter, step: ReduceInner, index: int) -> Node:
    """The gradient of one parameter: the node that computes it, or a sum of several.

    Added up as autograd adds them in eager mode, oldest first, so the result is bitwise equal.
    """
    total, *rest = writer.uses.gradients[step.group, index]
    for gradient in rest:
        place = writer.place(step)
        total = writer.call(ADD, total, gradient, before=place, name=f"{total.name}_sum")
    return total
