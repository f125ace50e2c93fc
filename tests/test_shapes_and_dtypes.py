"""Parameters of awkward shape, and several dtypes in one module (cases 4 and 5)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compile_fsdp import fully_shard, fully_shard_optimizer
from tests.distributed import distributed
from tests.models import Block
from tests.training import (
    assert_close,
    cpu_mesh,
    drive,
    full,
    shard_blocks,
    train,
    train_reference,
)


class OddShapes(nn.Module):
    """0-D, (1,), (1, N) with fewer rows than ranks, 5 rows, an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(6)])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor([0.25]))
        self.row = nn.Parameter(torch.randn(1, 6))
        self.five = nn.Parameter(torch.randn(5, 6))
        self.empty = nn.Parameter(torch.empty(0, 6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x * self.scale + self.shift + self.row)
        x = torch.cat([x, self.empty.expand(0, 6)])
        return F.mse_loss(x @ self.five.t(), y)


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@distributed(1, 2, 3)
def test_awkward_shapes_train_and_keep_their_shape(driver: str) -> None:
    model = OddShapes()
    batches = [(torch.randn(12, 6), torch.randn(12, 5)) for _ in range(3)]
    sharded = shard_blocks(copy.deepcopy(model))
    assert {n: p.shape for n, p in sharded.named_parameters()} == {
        n: p.shape for n, p in model.named_parameters()
    }
    run = train(sharded, batches, call=drive(sharded, driver))
    assert_close(run, train_reference(model, batches))
    state = {name: full(value) for name, value in sharded.state_dict().items()}
    assert {n: v.shape for n, v in state.items()} == {
        n: v.shape for n, v in model.state_dict().items()
    }


class MixedDtypes(nn.Module):
    """bf16 linears and an fp32 norm in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16).to(torch.bfloat16)
        self.norm = nn.LayerNorm(16)
        self.down = nn.Linear(16, 4).to(torch.bfloat16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.up(x.to(torch.bfloat16)).float())
        return F.mse_loss(self.down(x.to(torch.bfloat16)).float(), y)


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@distributed(2)
def test_two_dtypes_make_two_groups(driver: str) -> None:
    model = MixedDtypes()
    batches = [(torch.randn(8, 8), torch.randn(8, 4)) for _ in range(3)]
    sharded = copy.deepcopy(model)
    fully_shard(sharded, cpu_mesh())
    assert [group.dtype for group in sharded.fsdp_parameter_groups] == [
        torch.bfloat16,
        torch.float32,
    ]
    run = train(sharded, batches, call=drive(sharded, driver), prepare=fully_shard_optimizer)
    # .grad keeps the parameter's own dtype unless the policy says otherwise.
    assert run.gradients[0]["up.weight"].dtype is torch.bfloat16
    assert run.gradients[0]["norm.weight"].dtype is torch.float32
    # Main weights are fp32 where the reference updates bf16 in place: a few bf16 roundings.
    reference = train_reference(model, batches)
    for found, expected in zip(run.losses, reference.losses, strict=True):
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)


@distributed(1)
def test_a_world_of_one_still_casts() -> None:
    """Case 17: bf16 compute weights, fp32 main weights."""
    model = nn.Linear(4, 4).to(torch.bfloat16)
    fully_shard(model, cpu_mesh())
    (group,) = model.fsdp_parameter_groups
    assert group.model_weight.dtype is torch.bfloat16
    assert group.main_weight.dtype is torch.float32
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
    assert model(torch.randn(2, 4, dtype=torch.bfloat16)).dtype is torch.bfloat16


@distributed(2)
def test_attributes_and_requires_grad_survive() -> None:
    model = nn.Linear(4, 4)
    model.weight.is_special = "yes"
    model.bias.requires_grad_(False)
    fully_shard(model, cpu_mesh())
    assert model.weight.is_special == "yes"
    assert [p.requires_grad for p in model.parameters()] == [True, False]
