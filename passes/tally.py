"""No gradient gets lost between the joint graph and the backward graph.

Passes in between see gradient markers as plain functions, free to be merged or folded away (a
rank may own no element of a group, and everything about an empty tensor is foldable). So the
joint graph's gradients are counted, and the count travels to the backward graph with the
tangents' placeholders, which both have.
"""

from __future__ import annotations

from torch.fx import Graph

from .facts import GraphKind
from .gradients import count_gradients
from .targets import is_tangent
from .uses import GraphUses

_NOTE = "compile_fsdp_gradients"


def note_gradients(graph: Graph) -> None:
    """Note on a joint graph how many gradients it has of each parameter."""
    tangents = [node for node in graph.find_nodes(op="placeholder") if is_tangent(node)]
    if tangents:
        counts = count_gradients(graph)
        for node in tangents:
            node.meta[_NOTE] = counts


def check_gradients(graph: Graph, uses: GraphUses) -> None:
    """Compare a backward graph with the note, if it has one.

    Raises:
        RuntimeError: it has more or fewer gradients of some parameter than the joint graph had.
    """
    if uses.facts.kind is not GraphKind.BACKWARD:
        return
    notes = [node.meta[_NOTE] for node in graph.find_nodes(op="placeholder") if _NOTE in node.meta]
    if not notes:
        return
    found = {key: len(gradients) for key, gradients in uses.gradients.items()}
    for key in (*notes[0], *found):
        if notes[0].get(key, 0) != found.get(key, 0):
            raise RuntimeError(
                f"the joint graph has {notes[0].get(key, 0)} gradients of tensor {key[1]} of "
                f"parameter group {key[0]!r}, the backward graph {found.get(key, 0)}; a graph "
                "pass between them dropped or copied a gradient"
            )
