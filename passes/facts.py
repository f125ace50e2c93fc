"""What the scheduler may know about a graph and its groups: plain, immutable data.

A *position* is the index of a node in the graph as the passes found it. "Before position p" and
"after position p - 1" are the same place.

No torch here: a plan can be made, printed and tested without one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class GraphKind(Enum):
    """Which of AOTAutograd's graphs this is."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INFERENCE = "inference"


@dataclass(frozen=True)
class ParameterUse:
    """Parameter ``index`` of ``group`` is read, through any chain of views, by ``readers``.

    Attributes:
        group: name of the parameter group.
        index: which tensor of the group.
        readers: names of the nodes that read its values, in graph order, never empty.
        first: position of the first reader.
        last: position of the last reader.
    """

    group: str
    index: int
    readers: tuple[str, ...]
    first: int
    last: int


@dataclass(frozen=True)
class GradientUse:
    """Node ``gradient`` is one summand of the gradient of parameter ``index`` of ``group``.

    Attributes:
        group: name of the parameter group.
        index: which tensor of the group.
        gradient: name of the node that computes the full gradient.
        position: its position.
    """

    group: str
    index: int
    gradient: str
    position: int


@dataclass(frozen=True)
class NodeFacts:
    """What one node costs.

    Memory is counted by allocation: views own nothing, and what they look at lives until the last
    of them is used.

    Attributes:
        allocates: bytes of memory that the node brings into being, 0 for a view. For a graph
            input: what becomes free when the graph is done with it.
        last: position of the last node that uses this memory; the graph's end when it is returned.
        flops: floating-point operations of matrix multiplications, attention and convolutions.
        dtype: in which they are done ("bfloat16"), "" when there are none.
        moved: bytes read and written, 0 for a view.
    """

    allocates: int = 0
    last: int = 0
    flops: int = 0
    dtype: str = ""
    moved: int = 0


@dataclass(frozen=True)
class GraphFacts:
    """Everything about one graph that a schedule may depend on.

    Attributes:
        kind: forward, backward or inference.
        names: node names by position; the last one is the output.
        start: position of the first node that is not a graph input.
        parameters: uses in order of first reader.
        gradients: summands in the order in which autograd adds them up.
        gradient_outputs: which graph outputs are sums of nothing but those gradients.
        nodes: what each node costs, by position; empty when nobody has counted. Sizes of data, and
            so rank-dependent: nothing that orders or counts collectives may depend on them.
        kept: groups that a forward graph keeps unsharded for its backward graph, and that the
            backward graph takes over.
        packs_in_place: the compiler has gradients computed in the buffer that is reduced.
    """

    kind: GraphKind
    names: tuple[str, ...]
    start: int
    parameters: tuple[ParameterUse, ...] = ()
    gradients: tuple[GradientUse, ...] = ()
    gradient_outputs: tuple[int, ...] = ()
    nodes: tuple[NodeFacts, ...] = ()
    kept: tuple[str, ...] = ()
    packs_in_place: bool = False

    @property
    def is_backward(self) -> bool:
        """Whether this is a backward graph."""
        return self.kind is GraphKind.BACKWARD

    @property
    def end(self) -> int:
        """Position of the output node."""
        return len(self.names) - 1


@dataclass(frozen=True)
class GroupFacts:
    """Everything about one parameter group that a schedule may depend on.

    Attributes:
        name: name of the parameter group, equal on all ranks.
        label: short name for people.
        gather_bytes: size of the gathered flat buffer.
        reduce_bytes: size of the packed gradients that are reduced.
        finishes_later: whether the last microbatch has a reduction of its own (reduce_outer).
        reduces_inner: whether every backward has a reduction (reduce_inner) that communicates.
        numel: elements of the gathered flat buffer.
        dtype: compute dtype ("bfloat16").
        mesh_shape: sizes of the data-parallel axes, dp_outer first.
        state_bytes: what a rank keeps of the group all the time: its part of weight and gradient.
        mergeable: groups with equal values may be gathered by one collective: same mesh and dtype.
            None: never.
        reduces_with: groups with equal values may share an inner reduction: same model, mesh, axis
            and dtype of communication. None: never.
    """

    name: str
    label: str
    gather_bytes: int
    reduce_bytes: int
    finishes_later: bool = False
    reduces_inner: bool = True
    numel: int = 0
    dtype: str = "float32"
    mesh_shape: tuple[int, ...] = ()
    state_bytes: int = 0
    mergeable: str | None = None
    reduces_with: str | None = None
