"""Write gathers, waits and releases, and turn markers into views of the gathered buffer.

    full = unshard(shard, "blocks.0", [...])
    wait(full, "blocks.0", [...])
    as_strided = as_strided(full, [64, 64], [64, 1], 4096)     # was: parameter(shard, ..., 1)
    ...
    release(full, "blocks.0")

The gathered buffer is one flat tensor whose storage starts with its first element (the
runtime's contract), so a parameter is a strided view of it: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Graph, Node
from torch.fx.node import Argument

from .aliases import AliasTree, alias_trees
from .graph_writer import GraphWriter, insert_call, refresh_value
from .steps import GatherTogether, Keep, Release, Unshard, Wait
from .targets import (
    AS_STRIDED,
    CLONE,
    GATHER_TOGETHER,
    KEEP,
    RELEASE,
    UNSHARD,
    WAIT,
    is_gradient_marker,
    is_marker,
    parameter_key,
)


def clone_escaping_views(graph: Graph) -> None:
    """Give every view of a parameter that outlives the graph memory of its own.

    A view escapes when the graph returns it, or when it is itself the gradient of a parameter
    (the gradient of ``(a * b).sum()`` by ``a`` can be ``b``), which a reduction reads at a place
    of its own. The gathered buffer is released in the graph, so what escapes is copied where the
    view stands; the copy is then an ordinary reader.
    """
    output = graph.output_node()
    for tree in alias_trees(graph, [node for node in graph.nodes if is_marker(node)]):
        for view in tuple(tree.members):
            leaving = [user for user in view.users if user is output or is_gradient_marker(user)]
            if not leaving:
                continue
            name = f"{view.name}_copy"
            clone = insert_call(graph, CLONE, (view,), before=view.next, name=name)
            for user in leaving:
                user.replace_input_with(view, clone)


def write_gather_together(writer: GraphWriter, step: GatherTogether) -> Node:
    """Write ``token = gather_together(shards, groups, after)``."""
    return writer.call(
        GATHER_TOGETHER,
        [writer.uses.shards[group] for group in step.groups],
        list(step.groups),
        writer.named_by(step),
        before=writer.place(step),
        name="together",
        kwargs=_in_arena(writer, offsets=list(step.places)),
    )


def write_unshard(writer: GraphWriter, step: Unshard) -> Node:
    """Write ``full = unshard(shard, group, after)``."""
    writer.full[step.group] = writer.call(
        UNSHARD,
        writer.uses.shards[step.group],
        step.group,
        writer.named_by(step),
        before=writer.place(step),
        name=writer.readable("full", step.group),
        kwargs=_in_arena(writer, offset=step.place),
    )
    return writer.full[step.group]


def _in_arena(writer: GraphWriter, **where: Argument) -> dict[str, Argument]:
    """Where a gather puts what it gathers: not told in a graph without an arena."""
    return {} if writer.arena is None else {**where, "arena": writer.arena.size}


def write_wait(writer: GraphWriter, step: Wait) -> Node:
    """Write ``wait(full, group, issued)``, followed by the views that replace the markers."""
    full, place = writer.full[step.group], writer.place(step)
    name = writer.readable("wait", step.group)
    writer.call(WAIT, full, step.group, writer.named_by(step), before=place, name=name)
    trees = [tree for tree in writer.uses.markers[step.group] if tree.readers]
    _write_views(writer, trees, full, place)
    _move_views_down(writer, trees, step)
    return full


def write_release(writer: GraphWriter, step: Release) -> Node:
    """Write ``release(full, group)``, or ``keep(full, group)``."""
    full = writer.full[step.group]
    name = writer.readable(step.op, step.group)
    target = KEEP if isinstance(step, Keep) else RELEASE
    writer.call(target, full, step.group, before=writer.place(step), name=name)
    return full


def erase_markers(writer: GraphWriter) -> None:
    """Remove all markers, and views that nobody reads: only those can still use a marker."""
    trees = [tree for trees in writer.uses.markers.values() for tree in trees]
    members = {node: None for tree in trees for node in tree.members}
    for node in sorted(members, key=writer.uses.position.__getitem__, reverse=True):
        if is_marker(node) or not node.users:
            writer.graph.erase_node(node)


def _write_views(writer: GraphWriter, trees: Sequence[AliasTree], full: Node, place: Node) -> None:
    """Point every marker's users at a view of ``full``, one view for each tensor."""
    views: dict[int, Node] = {}
    for tree in trees:
        group, index = parameter_key(tree.root)
        if index not in views:
            info = writer.groups[group]
            shape = info.shapes[index]
            geometry = (list(shape), contiguous_strides(shape), info.offsets[index])
            name = info.fqns[index][0]
            views[index] = writer.call(AS_STRIDED, full, *geometry, before=place, name=name)
        tree.root.replace_all_uses_with(views[index])


def _move_views_down(writer: GraphWriter, trees: Sequence[AliasTree], step: Wait) -> None:
    """Move views that stood before the wait behind it: their base is made there now.

    Whoever reads them is further down still, since the wait stands before the first reader. All
    their other arguments are sizes, which are known further up.
    """
    position = writer.uses.position
    views = {view: None for tree in trees for view in tree.aliases}
    for view in sorted(views, key=position.__getitem__):
        if position[view] < step.anchor:
            writer.place(step).prepend(view)
        refresh_value(view)


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """Element strides of a contiguous tensor, as torch counts them (a size of 0 counts as 1)."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]
