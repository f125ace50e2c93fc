"""Nodes with fake values, at planned places: what `unshard` and `reduce` write with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument, map_arg

from compile_fsdp.runtime.group_info import GroupInfo

from .steps import ArenaPlan, Step
from .uses import GraphUses


class GraphWriter:
    """The state of writing one schedule into one graph.

    Steps are written in schedule order. Each records the node that later steps name when they
    must follow it: the gathered buffer or the token of a reduction.
    """

    def __init__(
        self,
        graph: Graph,
        uses: GraphUses,
        groups: Mapping[str, GroupInfo],
        arena: ArenaPlan | None = None,
    ) -> None:
        self.graph = graph
        self.arena = arena
        self.uses = uses
        self.groups = groups
        self.full: dict[str, Node] = {}
        self.token: dict[str, Node] = {}
        self._results: list[Node] = []

    def place(self, step: Step) -> Node:
        """The node before which ``step`` is written."""
        return self.uses.nodes[step.anchor]

    def named_by(self, step: Step) -> list[Node]:
        """The results of the steps that ``step`` must name, each once."""
        return list(dict.fromkeys(self._results[number] for number in step.after))

    def record(self, result: Node) -> None:
        """Close a step: ``result`` is what naming it means."""
        self._results.append(result)

    def call(
        self,
        target: Any,
        *args: Argument,
        before: Node,
        name: str | None = None,
        kwargs: Mapping[str, Argument] | None = None,
    ) -> Node:
        """Insert a call of ``target``; see `insert_call`."""
        return insert_call(self.graph, target, args, before=before, name=name, kwargs=kwargs)

    def readable(self, prefix: str, group: str) -> str:
        """A node name for people. Nothing depends on it; FX makes it unique and legal."""
        return f"{prefix}_{self.groups[group].label}"


def insert_call(
    graph: Graph,
    target: Any,
    args: tuple[Argument, ...],
    *,
    before: Node,
    name: str | None = None,
    kwargs: Mapping[str, Argument] | None = None,
) -> Node:
    """Insert a call of ``target`` before a node, with its fake result in ``meta["val"]``."""
    with graph.inserting_before(before):
        node = graph.create_node("call_function", target, args, dict(kwargs or {}), name=name)
    refresh_value(node)
    return node


def refresh_value(node: Node) -> None:
    """Compute the fake result of a call from those of its arguments.

    The fake tensors' storages tell which nodes share memory, so they must follow when a view
    gets a new base.
    """
    args = map_arg(node.args, lambda argument: argument.meta["val"])
    kwargs = map_arg(node.kwargs, lambda argument: argument.meta["val"])
    with torch.no_grad():
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
