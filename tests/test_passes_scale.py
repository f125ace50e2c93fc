"""The passes over a graph do twice the work for twice the blocks (counted in calls, not timed)."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph

from compile_fsdp.passes.emit import write_schedule
from compile_fsdp.passes.facts import GraphKind
from compile_fsdp.passes.schedule import Policy, plan
from compile_fsdp.passes.uses import find_uses, group_facts
from compile_fsdp.passes.verify import verify
from tests.passes_support import WIDTH, StubGroup, registered, traced
from tests.test_schedule_shows import work

KINDS = (GraphKind.FORWARD, GraphKind.BACKWARD)


def calls(blocks: int, merge_below: int) -> tuple[int, int]:
    """What finding the uses, planning and writing cost on both graphs together, and the proof."""
    groups = [
        StubGroup(f"blocks.{number}", {f"{number}.weight": torch.randn(WIDTH, WIDTH)})
        for number in range(blocks)
    ]

    def loss(x: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
        for group, shard in zip(groups, shards, strict=True):
            weight = torch.ops.compile_fsdp.parameter(shard, group.info.name, 0)
            x = F.rms_norm(torch.tanh(F.linear(x, weight)), (WIDTH,)) + x
        return x.sum()

    passes = proof = 0
    with registered(*groups) as infos:
        graphs = traced(loss, torch.randn(2, WIDTH), *(group.shard for group in groups))

        def rewrite(graph: Graph, kind: GraphKind) -> None:
            uses = find_uses(graph, infos, kind)
            schedule = plan(uses.facts, group_facts(infos), Policy(merge_below=merge_below))
            write_schedule(graph, uses, infos, schedule)
            prove.append(functools.partial(verify, graph, uses.facts, infos, schedule))

        for kind in KINDS:
            prove: list[functools.partial[None]] = []
            graph = graphs[kind].graph
            passes += work(functools.partial(rewrite, graph, kind))
            proof += work(prove[0])
    return passes, proof


@pytest.mark.parametrize("merge_below", [0, pytest.param(256, marks=pytest.mark.slow)])
def test_80_blocks_take_twice_the_work_of_40(merge_below: int) -> None:
    calls(4, merge_below)  # what is computed once in a process
    small, large = calls(40, merge_below), calls(80, merge_below)
    for name, less, more in zip(("passes", "verify"), small, large, strict=True):
        assert 1.7 * less < more < 2.3 * less, f"{name}: {less} calls, then {more}"
