"""torch's optimizers on sharded parameters: the same as in one process after three steps (case 32).

Every rank gets the whole batch, so gradients are equal bit for bit, and so is the step of an
optimizer that treats every element by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from compile_fsdp import fully_shard_optimizer
from tests.distributed import run
from tests.sharded_models import WAYS, batches, pair
from tests.training import full

Make = Callable[..., optim.Optimizer]

EXACT: dict[str, Make] = {
    "adamw": optim.AdamW,
    "adamw foreach": partial(optim.AdamW, foreach=True),
    "adamw amsgrad": partial(optim.AdamW, amsgrad=True, foreach=True),
    "sgd": partial(optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd foreach": partial(optim.SGD, momentum=0.9, foreach=True),
    "rmsprop": partial(optim.RMSprop, momentum=0.9, centered=True),
    "rmsprop foreach": partial(optim.RMSprop, foreach=True),
    "adagrad": optim.Adagrad,
    "adagrad foreach": partial(optim.Adagrad, foreach=True),
    "rprop": optim.Rprop,
    "rprop foreach": partial(optim.Rprop, foreach=True),
    "adadelta": optim.Adadelta,
    "adamax foreach": partial(optim.Adamax, foreach=True),
    "nadam": optim.NAdam,
    "radam foreach": partial(optim.RAdam, foreach=True),
    "asgd": optim.ASGD,
}
# Fused kernels round once less in vector registers than in what is left over of a piece; Adafactor
# has sums and norms over the rows of all ranks, added in another order.
ROUNDED: dict[str, Make] = {
    "adamw fused": partial(optim.AdamW, fused=True),
    "sgd fused": partial(optim.SGD, momentum=0.9, nesterov=True, fused=True),
    "adagrad fused": partial(optim.Adagrad, fused=True),
    "adafactor": optim.Adafactor,
    "adafactor foreach": partial(optim.Adafactor, foreach=True),
}


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: decayed matrices, and the rest."""
    parameters = list(model.parameters())
    return [
        {"params": [each for each in parameters if each.ndim > 1], "weight_decay": 0.1},
        {"params": [each for each in parameters if each.ndim <= 1], "weight_decay": 0.0},
    ]


def train(model: nn.Module, make: Make, prepare: dict[str, Any] | None) -> optim.Optimizer:
    groups: Iterable[Any] = param_groups(model)
    if make in (EXACT["rprop"], EXACT["rprop foreach"]):
        groups = model.parameters()
    optimizer = make(groups, lr=0.05)
    if prepare is not None:
        fully_shard_optimizer(optimizer, **prepare)
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    for batch in batches(3):
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return optimizer


def check_parity(way: str, name: str) -> None:
    make = {**EXACT, **ROUNDED}[name]
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if name in ROUNDED else {"rtol": 0, "atol": 0}
    model, sharded = pair(way)
    # Rprop writes through a mask, which torch's DTensor cannot for a 0-D parameter.
    prepare = {"local": 1} if name.startswith("rprop") else {}
    expected, found = train(model, make, None), train(sharded, make, prepare)
    for whole, part in zip(model.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(full(part), whole.detach(), **tolerance)
        for key, value in expected.state[whole].items():
            ours = found.state[part][key]
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(full(ours), value, **tolerance)
            else:
                assert ours == value


@pytest.mark.parametrize("name", [*EXACT, *ROUNDED])
def test_parity_with_one_process(name: str) -> None:
    run(2, check_parity, "packed", name)


@pytest.mark.parametrize("name", ["adamw foreach", "sgd fused", "rprop", "adafactor"])
def test_parity_on_two_axes(name: str) -> None:
    run(4, check_parity, "hfsdp", name)


def check_scaler(way: str, fused: bool) -> None:
    _, sharded = pair(way)
    optimizer = optim.AdamW(sharded.parameters(), lr=0.05, fused=fused)
    fully_shard_optimizer(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for poison in (False, True, False):
        before = [full(each) for each in sharded.parameters()]
        # A batch of one rank's own: with an inf, the others' gradients are finite at first.
        factor = float("inf") if poison and dist.get_rank() == 0 else 1.0
        scaler.scale(sharded(*batches(1)[0]) * factor).backward()
        if poison and dist.get_rank() % WAYS[way][1][-1]:
            for each in sharded.parameters():
                each.grad.to_local().fill_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        same = [torch.equal(full(a), b) for a, b in zip(sharded.parameters(), before, strict=True)]
        assert all(same) if poison else not any(same)
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", ["packed", "hfsdp"])
def test_an_inf_on_one_rank_makes_every_rank_skip(way: str, fused: bool) -> None:
    """Only the ranks that hold some of the inner axis's first segment see it in their gradients."""
    run(WAYS[way][0], check_scaler, way, fused)
