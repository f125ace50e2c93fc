"""MXFP8 compute weights are gathered at half the bytes of bf16, in forward and in backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compile_fsdp import MixedPrecisionPolicy
from compile_fsdp.runtime.collectives import recorded
from tests.distributed import distributed
from tests.quantized import MXFP8, gathered, shard
from tests.training import drive

WIDTH = 128


class Block(nn.Module):
    """Nearly all of its parameters are in matrices, as in a transformer's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@pytest.mark.parametrize("mode", ["zero3", "hsdp"])
@distributed(2)
def test_each_phase_gathers_half(mode: str, driver: str) -> None:
    shape = (2,) if mode == "zero3" else (1, 2)
    # Everything that is gathered counts, also what stays in bf16.
    forward, backward = phases(MXFP8, mode, shape, driver)
    forward_in_bf16, backward_in_bf16 = phases(None, mode, shape, driver)
    assert 0.5 * forward_in_bf16 < forward <= 0.53 * forward_in_bf16
    assert 0.5 * backward_in_bf16 < backward <= 0.53 * backward_in_bf16


def phases(
    policy: MixedPrecisionPolicy | None, mode: str, shape: tuple[int, ...], driver: str
) -> tuple[int, int]:
    """Bytes that a forward and its backward gather, of a model in bf16."""
    model = Stack().to(torch.bfloat16)
    shard(model, policy, mode, shape)
    # Otherwise a compiled graph keeps the last weights that a forward reads for its backward, as
    # far as they are the same.
    options = {} if driver == "eager" else {"reshard_after_forward": True}
    call = drive(model, driver, **options)
    x = torch.randn(4, WIDTH).to(torch.bfloat16)
    call(x).backward()
    with recorded() as forward:
        loss = call(x)
    with recorded() as backward:
        loss.backward()
    return gathered(forward), gathered(backward)


@pytest.mark.parametrize("mode", ["zero1", "zero2"])
@distributed(2)
def test_the_gather_of_a_step_has_both_planes(mode: str) -> None:
    """What ZeRO-1 and ZeRO-2 gather once a step serves both phases: as many bytes as bf16."""
    totals = []
    for policy in (MXFP8, None):
        model = Stack().to(torch.bfloat16)
        shard(model, policy, mode)
        x = torch.randn(4, WIDTH).to(torch.bfloat16)
        model(x).backward()
        with recorded() as records:
            model(x).backward()
        totals.append(gathered(records))
    ours, in_bf16 = totals
    assert in_bf16 < ours <= 2 * 0.53 * in_bf16
