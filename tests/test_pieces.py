"""Programs in pieces: blocks compiled alone, several models, changing shapes (cases 22 and 23)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from compile_fsdp import fully_shard
from tests.distributed import distributed
from tests.models import VOCABULARY, WIDTH, Block, LanguageModel, language_batches
from tests.training import (
    adamw,
    assert_close,
    assert_gradients_close,
    cpu_mesh,
    drive,
    local_batch,
    shard_blocks,
    train,
    train_reference,
)

AOT_EAGER: dict[str, Any] = {"backend": "compile_fsdp", "options": {"inner": "aot_eager"}}


def assert_at_rest(model: nn.Module) -> None:
    groups = list(model._fsdp_unit.context.groups())
    assert not [group.label for group in groups if group.is_unsharded or group.is_held]


class Watching(LanguageModel):
    """An eager root that looks, between two blocks, whether the next one's weights are there."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.early: list[bool] = []
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if number:
                self.early.append(block.fsdp_parameter_groups[0].is_unsharded)
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@distributed(2)
def test_a_dozen_blocks_compiled_one_by_one() -> None:
    """Case 22, beyond Dynamo's limit of 8 recompilations of one function."""
    model = Watching(blocks=12)
    batches = language_batches(3, 2)
    sharded = shard_blocks(copy.deepcopy(model))
    for block in sharded.blocks:
        block.compile(**AOT_EAGER)
    counters.clear()
    run = train(sharded, batches)
    assert counters["stats"]["unique_graphs"] == 12
    assert sharded.early == [True] * 11, "gathers do not run ahead across the pieces"
    assert_at_rest(sharded)
    plain = LanguageModel(blocks=12)
    plain.load_state_dict(model.state_dict())
    assert_close(run, train_reference(plain, batches))


class Mixed(LanguageModel):
    """Eager code inside a compiled parent, and compiled code inside that."""

    def __init__(self) -> None:
        super().__init__(blocks=3)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embedding(tokens))
        x = self.uncompiled(x)
        x = self.blocks[2](x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    @torch.compiler.disable(recursive=False)
    def uncompiled(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](x) * 2.0


@pytest.mark.parametrize("inner", [False, True])
@distributed(2)
def test_eager_code_in_a_compiled_parent(inner: bool) -> None:
    model = Mixed()
    batches = language_batches(3, 2)
    sharded = shard_blocks(copy.deepcopy(model))
    if inner:
        sharded.blocks[1].compile(**AOT_EAGER)
    run = train(sharded, batches, call=drive(sharded, "aot_eager"))
    assert_close(run, train_reference(model, batches))
    assert_at_rest(sharded)


@distributed(2)
def test_shapes_that_change_every_step() -> None:
    """Case 23: once for the first shape, once for all others."""
    model = LanguageModel()
    sharded = shard_blocks(copy.deepcopy(model))
    plain = copy.deepcopy(model)
    optimizers = [adamw(sharded), adamw(plain)]
    call = drive(sharded, "aot_eager")
    counters.clear()
    for per_rank, length in ((2, 5), (3, 7), (4, 6), (2, 9), (5, 4)):
        batch = torch.randint(VOCABULARY, (2, 2 * per_rank, length))
        call(*local_batch(batch)).backward()
        plain(*batch).backward()
        assert_gradients_close(sharded, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@distributed(2)
def test_two_models_in_alternation(driver: str) -> None:
    """A generator and what judges it: gradients flow through both, each is stepped in turn."""
    plain = [Stack(), Stack()]
    sharded = [shard_blocks(copy.deepcopy(model)) for model in plain]
    calls = [drive(model, driver) for model in sharded]
    x = torch.randn(4, 3, WIDTH)
    for _ in range(2):
        for turn in range(2):
            calls[1](calls[0](local_batch([x])[0])).square().mean().backward()
            plain[1](plain[0](x)).square().mean().backward()
            for ours, theirs in zip(sharded, plain, strict=True):
                assert_gradients_close(ours, theirs)
            for models in (sharded, plain):
                torch.optim.SGD(models[turn].parameters(), lr=0.1).step()
                for model in models:
                    model.zero_grad()
    for model in sharded:
        assert_at_rest(model)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Branching(nn.Module):
    """One of two layers, as a tensor says; both bodies are graphs of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def left(x: torch.Tensor) -> torch.Tensor:
            return self.left(x).relu()

        def right(x: torch.Tensor) -> torch.Tensor:
            return self.right(x).relu()

        return torch.cond(x.sum() > 0, left, right, (x,)).sum()


@pytest.mark.parametrize("sign", [1.0, -1.0])
@distributed(2)
def test_parameters_in_the_bodies_of_a_condition(sign: float) -> None:
    model = Branching()
    sharded = copy.deepcopy(model)
    fully_shard(sharded, cpu_mesh())
    x = sign * torch.rand(4, WIDTH)
    found = torch.compile(sharded, **AOT_EAGER)(local_batch([x])[0])
    found.backward()
    expected = (model.left if sign > 0 else model.right)(x).relu().sum() / 2
    expected.backward()
    used, other = ("left", "right") if sign > 0 else ("right", "left")
    wanted = getattr(model, used).weight.grad
    gradient = getattr(sharded, used)._parameters["weight"].grad.full_tensor()
    torch.testing.assert_close(gradient, wanted)
    unused = getattr(sharded, other)._parameters["weight"].grad
    assert unused is None or not unused.full_tensor().any()
