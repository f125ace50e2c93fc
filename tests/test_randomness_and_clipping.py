"""Dropout under a seed, gradient clipping, and GradScaler (cases 29 and 31)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from compile_fsdp import fully_shard
from tests.distributed import distributed
from tests.models import LanguageModel, language_batches
from tests.training import (
    adamw,
    cpu_mesh,
    drive,
    full,
    local_batch,
    shard_blocks,
)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.linear(x), 0.5)


@distributed(2)
def test_dropout_masks_follow_the_seed_and_differ_by_rank() -> None:
    sharded = Dropping()
    fully_shard(sharded, cpu_mesh())
    x = torch.ones(8, 16)
    outputs = {}
    for driver in ("eager", "aot_eager"):
        call = drive(sharded, driver)
        torch.manual_seed(100 + dist.get_rank())
        outputs[driver] = call(x).detach()
    torch.testing.assert_close(outputs["eager"], outputs["aot_eager"], rtol=0, atol=0)
    masks = [torch.empty(8, 16) for _ in range(2)]
    dist.all_gather(masks, (outputs["eager"] != 0).float())
    assert not torch.equal(*masks)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@distributed(2, 3)
def test_clipping_uses_the_global_norm(driver: str, foreach: bool) -> None:
    model = LanguageModel()
    (batch,) = language_batches(1, dist.get_world_size())
    sharded = shard_blocks(copy.deepcopy(model))
    drive(sharded, driver)(*local_batch(batch)).backward()
    model(*batch).backward()
    found = torch.nn.utils.clip_grad_norm_(sharded.parameters(), 0.1, foreach=foreach)
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)
    assert expected > 0.1
    torch.testing.assert_close(full(found), expected)
    for clipped, wanted in zip(sharded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(clipped.grad), wanted.grad)


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@distributed(2)
def test_an_inf_on_one_rank_makes_every_rank_skip_the_step(driver: str) -> None:
    sharded = shard_blocks(LanguageModel())
    optimizer, call = adamw(sharded), drive(sharded, driver)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    batch = local_batch(language_batches(1, 2)[0])

    def step(poison: bool) -> bool:
        before = [full(parameter) for parameter in sharded.parameters()]
        loss = call(*batch) * (float("inf") if poison else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = [full(parameter) for parameter in sharded.parameters()]
        return any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))

    assert step(poison=False)
    assert not step(poison=dist.get_rank() == 0)
    assert scaler.get_scale() == 2.0
    assert step(poison=False)
