"""Write a schedule into a graph. Mechanical: what is written where has been decided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import Graph, Node

from compile_fsdp.runtime.group_info import GroupInfo

from .graph_writer import GraphWriter
from .reduce import (
    erase_gradient_sums,
    write_reduce_inner,
    write_reduce_outer,
    write_reduce_together,
    write_wait_reductions,
)
from .steps import (
    GatherTogether,
    Keep,
    ReduceInner,
    ReduceOuter,
    ReduceTogether,
    Release,
    Schedule,
    Step,
    Unshard,
    Wait,
    WaitReductions,
)
from .unshard import erase_markers, write_gather_together, write_release, write_unshard, write_wait
from .uses import GraphUses

_WRITERS: Mapping[type[Step], Callable[[GraphWriter, Any], Node]] = {
    GatherTogether: write_gather_together,
    Unshard: write_unshard,
    Wait: write_wait,
    Release: write_release,
    Keep: write_release,
    ReduceInner: write_reduce_inner,
    ReduceTogether: write_reduce_together,
    ReduceOuter: write_reduce_outer,
    WaitReductions: write_wait_reductions,
}


def write_schedule(
    graph: Graph, uses: GraphUses, groups: Mapping[str, GroupInfo], schedule: Schedule
) -> None:
    """Write the steps of ``schedule`` into ``graph`` and take the markers out of it.

    Args:
        graph: the graph that ``uses`` was found in, unchanged since.
        uses: where its markers and gradients are.
        groups: description of every group of the model, by name.
        schedule: the plan made from ``uses.facts``.
    """
    writer = GraphWriter(graph, uses, groups, schedule.arena)
    for step in schedule.steps:
        writer.record(_WRITERS[type(step)](writer, step))
    erase_markers(writer)
    erase_gradient_sums(writer)
