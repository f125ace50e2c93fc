"""Which communication steps must run before which nodes, whatever order a compiler chooses.

A node runs after the nodes it takes as arguments, a write to memory after every earlier read and
write of it, a read after every earlier write. Nothing else orders two nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from .aliases import AliasTree, written_arguments


@dataclass
class _Accesses:
    """Steps behind the last write of a buffer, and behind the reads since; bit sets."""

    write: int = 0
    reads: int = 0


@dataclass
class Dependencies:
    """For every node the communication steps that must run before it, as a bit set."""

    nodes: Sequence[Node]
    communication: Sequence[Node]
    buffers: Sequence[AliasTree]
    bit: dict[Node, int] = field(init=False)
    before: dict[Node, int] = field(init=False)

    def __post_init__(self) -> None:
        self.bit = {node: 1 << number for number, node in enumerate(self.communication)}
        self.before = {}
        owner = {member: tree.root for tree in self.buffers for member in tree.members}
        memory = {tree.root: _Accesses() for tree in self.buffers}
        for node in self.nodes:
            buffers = dict.fromkeys(owner[a] for a in node.all_input_nodes if a in owner)
            if owner.get(node, node) is not node:  # a view touches no memory
                buffers = {}
            self.before[node] = self._behind(node.all_input_nodes)
            self._order_accesses(node, {root: memory[root] for root in buffers}, owner)

    def of(self, node: Node, earlier: Node) -> bool:
        """Whether ``node`` must run after the step ``earlier``."""
        return bool(self.before[node] & self.bit[earlier])

    def _behind(self, arguments: Iterable[Node]) -> int:
        steps = 0
        for argument in arguments:
            steps |= self.before[argument] | self.bit.get(argument, 0)
        return steps

    def _order_accesses(
        self, node: Node, touched: Mapping[Node, _Accesses], owner: Mapping[Node, Node]
    ) -> None:
        if not touched:
            return
        written = {owner[a]: None for a in written_arguments(node) if a in owner}
        for root, memory in touched.items():
            self.before[node] |= memory.write | (memory.reads if root in written else 0)
        own = self.before[node] | self.bit.get(node, 0)
        for root, memory in touched.items():
            if root in written:
                memory.write, memory.reads = own, 0
            else:
                memory.reads |= own
