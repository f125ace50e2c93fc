"""What the nodes of a graph cost: FLOPs, bytes moved, bytes allocated and until when.

Sizes that are symbolic count with one fixed hint for each symbol, the same on every rank and in
every run: the size that a rank happened to see first is nobody else's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from .aliases import is_view_of
from .facts import NodeFacts
from .targets import ADD, is_call, is_gradient_marker, is_marker
from .torch_internals import hinted_size

_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)

# The CPU's kernel has no formula of its own in torch's table, and the same arguments.
_SAME_FORMULA = {
    "aten._scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
}


def node_facts(
    nodes: Sequence[Node],
    held: Mapping[Node, None],
    backward: Mapping[Node, None] | None = None,
    until: Mapping[Node, int] | None = None,
) -> tuple[NodeFacts, ...]:
    """The costs of ``nodes``, a whole graph in order.

    Args:
        nodes: all nodes, the output last.
        held: graph inputs that stay alive whatever the graph does (the caller holds them): flat
            shards, and the user's own tensors in a forward graph. They count for nothing.
        backward: in a joint graph, the nodes that compute gradients. What activation checkpointing
            drops does not live on for those.
        until: positions up to which results live on although no node reads them then: gradients
            wait for the last one of their group.

    Markers of parameters and of gradients cost nothing, nor do sums of the latter, which stand for
    the gradient of a flat shard: the schedule accounts for their memory.
    """
    memory = _Memory(held, backward or {})
    for position, node in enumerate(nodes):
        memory.visit(node, position)
    for node, position in (until or {}).items():
        memory.keep(node, position)
    return tuple(
        NodeFacts(
            allocates=memory.allocates[position],
            last=memory.last.get(position, position),
            flops=_flops(node),
            dtype=_dtype(node),
            moved=_moved(node) if memory.computes[position] else 0,
        )
        for position, node in enumerate(nodes)
    )


class _Memory:
    """Who allocates, and who uses it last.

    Attributes:
        allocates: bytes of new memory by position.
        last: by position of the allocating node, the position of the last use.
        computes: whether a node computes anything: it is no view, marker or input.
    """

    def __init__(self, held: Mapping[Node, None], backward: Mapping[Node, None]) -> None:
        self.held = held
        self.backward = backward
        self.allocates: list[int] = []
        self.last: dict[int, int] = {}
        self.computes: list[bool] = []
        self._owners: dict[Node, tuple[int, ...]] = {}
        self._dropped: dict[int, None] = {}
        self._never_computed: dict[Node, None] = {}

    def visit(self, node: Node, position: int) -> None:
        for argument in node.all_input_nodes:
            for owner in self._owners.get(argument, ()):
                if not (owner in self._dropped and node in self.backward):
                    self.last[owner] = position
        viewed = [argument for argument in node.all_input_nodes if is_view_of(node, argument)]
        if is_gradient_marker(node) or self._adds_up_markers(node):
            self._never_computed[node] = None
        free = node in self.held or is_marker(node) or node in self._never_computed
        tensors = [] if free else list(_tensors(node))
        if viewed:
            owners = [owner for argument in viewed for owner in self._owners.get(argument, ())]
            self._owners[node] = tuple(dict.fromkeys(owners))
            self.allocates.append(0)
        else:
            self._owners[node] = (position,) if tensors else ()
            if node.meta.get("recompute") in _RECOMPUTED:
                self._dropped[position] = None
            self.allocates.append(sum(_bytes(tensor) for tensor in tensors))
        self.computes.append(node.op == "call_function" and not viewed and not free)

    def keep(self, node: Node, until: int) -> None:
        """What ``node`` holds lives at least until a position."""
        for owner in self._owners.get(node, ()):
            self.last[owner] = max(self.last.get(owner, owner), until)

    def _adds_up_markers(self, node: Node) -> bool:
        """Whether ``node`` is a sum that autograd makes of gradient markers (see `gradients`)."""
        added = node.all_input_nodes
        return is_call(node, ADD) and all(each in self._never_computed for each in added)


def _tensors(node: Node) -> Iterator[torch.Tensor]:
    if node.op in ("call_function", "placeholder"):
        value = node.meta.get("val")
        for result in value if isinstance(value, tuple | list) else (value,):
            if isinstance(result, torch.Tensor):
                yield result


def _shape(tensor: torch.Tensor) -> list[int]:
    return [hinted_size(size) for size in tensor.shape]


def _bytes(tensor: torch.Tensor) -> int:
    numel = 1
    for size in _shape(tensor):
        numel *= size
    return numel * tensor.element_size()


def _moved(node: Node) -> int:
    read = sum(_bytes(tensor) for argument in node.all_input_nodes for tensor in _values(argument))
    return read + sum(_bytes(tensor) for tensor in _tensors(node))


def _values(node: Node) -> Iterator[torch.Tensor]:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        yield value


@functools.cache
def _flop_formulas() -> Mapping[Any, Callable[..., int]]:
    """torch's table, by operator. Imported when needed: from torch 2.14 on it imports Triton."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry


def _flops(node: Node) -> int:
    packet = getattr(node.target, "overloadpacket", None)
    if node.op != "call_function" or packet is None:
        return 0
    alias = _SAME_FORMULA.get(str(packet))
    formula = _flop_formulas().get(getattr(torch.ops.aten, alias) if alias else packet)
    if formula is None:
        return 0
    args = torch.fx.node.map_arg(node.args, _argument)
    kwargs = torch.fx.node.map_arg(node.kwargs, _argument)
    return int(formula(*args, **kwargs, out_val=_argument(node)))


def _argument(node: Node) -> Any:
    """What a FLOP formula wants of an argument: shapes in place of tensors."""
    value = node.meta.get("val")
    if isinstance(value, tuple | list):
        return tuple(_shape(each) if isinstance(each, torch.Tensor) else each for each in value)
    if isinstance(value, torch.Tensor):
        return _shape(value)
    return hinted_size(value) if isinstance(value, torch.SymInt) else value


def _dtype(node: Node) -> str:
    """The dtype of the first tensor that a node takes; "" when it takes none."""
    for argument in node.all_input_nodes:
        for value in _values(argument):
            return str(value.dtype).removeprefix("torch.")
    return ""
