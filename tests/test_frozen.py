"""Frozen parameters: no gradient buffer, no reduction, and gradients still flow through (6, 7)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compile_fsdp import fully_shard
from compile_fsdp.runtime import collectives
from tests.distributed import distributed
from tests.training import (
    DRIVERS,
    assert_close,
    cpu_mesh,
    drive,
    local_batch,
    shard_blocks,
    train,
    train_reference,
)


class LoraLinear(nn.Module):
    """A frozen linear with a trainable low-rank update."""

    def __init__(self, width: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, width) * 0.1)
        self.b = nn.Parameter(torch.randn(width, rank) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


class LoraModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(LoraLinear(8), nn.GELU(), LoraLinear(8)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y)


def trainable_only(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], lr=1e-2, eps=1e-3
    )


@pytest.mark.parametrize("driver", DRIVERS)
@distributed(2)
def test_lora_trains_the_adapters_only(driver: str) -> None:
    model = LoraModel()
    batches = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(3)]
    sharded = shard_blocks(copy.deepcopy(model))
    for block in sharded.blocks.children():
        trainable, frozen = sorted(
            block.fsdp_parameter_groups, key=lambda group: not group.requires_grad
        )
        assert frozen.main_grad is None and frozen.pre_optimizer_main_grad is None
        assert frozen.main_weight is frozen.model_weight
        assert trainable.main_grad is not None
    call = drive(sharded, driver)
    with collectives.recorded() as records:
        call(*local_batch(batches[0])).backward()
    assert [record.kind for record in records].count("reduce_scatter") == 2
    sharded.zero_grad()
    run = train(sharded, batches, call=call, make_optimizer=trainable_only)
    assert_close(run, train_reference(model, batches, make_optimizer=trainable_only))
    for name, gradient in run.gradients[-1].items():
        assert (gradient is None) == ("base" in name), name


class TwoTowers(nn.Module):
    """A frozen tower that reads the input, then a trainable one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 3))]
        )
        self.blocks[0].requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.blocks[1](self.blocks[0](x)), y)


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@distributed(2)
def test_a_frozen_tower_before_a_trainable_one(driver: str) -> None:
    model = TwoTowers()
    batches = [(torch.randn(8, 6), torch.randn(8, 3)) for _ in range(3)]
    sharded = shard_blocks(copy.deepcopy(model))
    run = train(sharded, batches, call=drive(sharded, driver), make_optimizer=trainable_only)
    assert_close(run, train_reference(model, batches, make_optimizer=trainable_only))
    assert not any(
        group.is_unsharded for block in sharded.blocks for group in block.fsdp_parameter_groups
    )


@distributed(2)
def test_a_fully_frozen_model_has_no_gradient_and_stays_sharded() -> None:
    model = nn.Linear(4, 4).requires_grad_(False)
    expected = copy.deepcopy(model)
    fully_shard(model, cpu_mesh())
    x = torch.randn(2, 4, requires_grad=True)
    model(x).sum().backward()
    (gradient,) = torch.autograd.grad(expected(x).sum(), x)
    torch.testing.assert_close(x.grad, gradient)
    assert not any(group.is_unsharded for group in model.fsdp_parameter_groups)
