"""The static arena: the same numbers, and steps that take no memory from anybody."""

from __future__ import annotations

import pytest
import torch

from compile_fsdp import fully_shard_optimizer
from tests.gpu.loopback import world_of
from tests.gpu.support import (
    DEVICE,
    ON_CUDA,
    ROUNDING,
    drive,
    floats,
    shard,
    stack,
)
from tests.training import adamw


@pytest.mark.parametrize("ranks", [1, 16])
@pytest.mark.parametrize("driver", ["aot_eager", "inductor"])
def test_steps_after_warm_up_allocate_no_buffer(driver: str, ranks: int) -> None:
    """Neither from torch's allocator, by the runtime's own count, nor does that one ask CUDA for
    more; and every gathered buffer is where the plan has put it."""
    results = []
    for arena in (False, True):
        with world_of(ranks):
            model = shard(stack())
            call = drive(model, driver, arena=arena)
            optimizer = adamw(model)
            fully_shard_optimizer(optimizer)
            memory = model._fsdp_unit.context.memory
            found, counts = [], []
            for batch in floats(8):
                loss = call(*batch)
                loss.backward()
                found.append(loss.detach().clone())
                optimizer.step()
                optimizer.zero_grad()
                counts.append((memory.allocations, _segments()))
            found += [each.to_local().detach().clone() for each in model.parameters()]
        results.append(found)
        if arena:
            assert memory.is_static
            assert len(set(counts[4:])) == 1, f"(buffers, segments) after each step: {counts}"
            assert memory.arena.unplanned == 0
            assert memory.arena.size > 0 or ranks == 1, "one rank has nothing to gather"
    # Two compilations by Inductor may tune a kernel differently; operators are what they are.
    tolerance = ROUNDING if driver == "inductor" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(*results, **tolerance)


def _segments() -> int:
    """How many pieces of memory torch's allocator has taken from CUDA so far."""
    if not ON_CUDA:
        return 0
    return int(torch.cuda.memory_stats(DEVICE)["segment.all.allocated"])
