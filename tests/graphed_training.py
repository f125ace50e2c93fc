"""Run one program on a model with and without captured graphs, and compare bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from compile_fsdp import GraphRuns, graph_runs
from tests.capturing import captured_on_cpu
from tests.models import language_batches
from tests.training import adamw, drive, gradients_of, local_batch, shard_blocks

WARM_UP = "warm-up"


@dataclass
class Trainer:
    """A sharded, compiled model, and the values that a program has seen.

    Attributes:
        call: runs the compiled model.
        seen: whatever the program notes, in order.
    """

    model: nn.Module
    call: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    options: dict[str, Any]
    seen: list[torch.Tensor | None]

    def note(self, *values: torch.Tensor | None) -> None:
        """Remember values as they are now."""
        self.seen += [None if value is None else value.detach().clone() for value in values]

    def backward(self, batch: Sequence[torch.Tensor]) -> None:
        """One forward and backward on the same batch for every rank; notes the loss."""
        loss = self.call(*batch)
        loss.backward()
        self.note(loss)

    def step(self, *, set_to_none: bool = True) -> None:
        """An optimizer step; notes the gradients that go into it."""
        self.note(*gradients_of(self.model).values())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=set_to_none)


Program = Callable[[Trainer], None]


def run_both(
    model: nn.Module,
    program: Program,
    *,
    mesh: DeviceMesh | None = None,
    prepare: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None,
    shard: Callable[..., nn.Module] = shard_blocks,
    sharding: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[GraphRuns, ...]:
    """Run ``program`` with a copy of ``model`` as ever, and with another whose graphs are captured:
    what it notes, and the parameters afterwards, must be equal bit for bit.

    Returns:
        How the captured model's graphs ran.
    """
    results = []
    runs: tuple[GraphRuns, ...] = ()
    for captured in (False, True):
        torch.manual_seed(11)
        with captured_on_cpu(enabled=captured):
            sharded = shard(copy.deepcopy(model), mesh, **(sharding or {}))
            chosen = {"inner": "aot_eager", "cudagraphs": captured, **options}
            call = drive(sharded, "aot_eager", **chosen)
            optimizer = adamw(sharded)
            prepare(optimizer)
            trainer = Trainer(sharded, call, optimizer, chosen, [])
            program(trainer)
            trainer.note(*(each.to_local() for each in sharded.parameters()))
            results.append(trainer.seen)
            runs = graph_runs(sharded)
    for number, (plain, repeated) in enumerate(zip(*results, strict=True)):
        if plain is None or repeated is None:
            assert plain is repeated, f"value {number}"
        else:
            torch.testing.assert_close(repeated, plain, rtol=0, atol=0, msg=f"value {number}")
    return runs


def static_hack(model):
    for m in model.modules():
        for g in getattr(m, "fsdp_parameter_groups", ()):
            if g.gathers:
                g._weights.full.reallocate_storage()
                g._weights.full.release_storage = lambda *a, **k: None


def own_batches(count: int) -> list[list[torch.Tensor]]:
    """Batches of this rank."""
    return [local_batch(batch) for batch in language_batches(count, dist.get_world_size())]


def check_counts(
    runs: Sequence[GraphRuns], *expected: tuple[str, int, int, dict[str, int]]
) -> None:
    """Each graph's kind, captures, replays, and normal runs by reason are as ``expected``."""
    found = [
        (each.graph.split(" ")[-1], each.captures, each.replays, dict(each.normal)) for each in runs
    ]
    assert found == list(expected), f"found {found}, expected {list(expected)}"
