"""Programs that Dynamo cannot capture whole, and how often it compiles (cases 21, 22 and 24)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from compile_fsdp import fully_shard
from tests.distributed import distributed
from tests.models import VOCABULARY, WIDTH, Block, LanguageModel, language_batches
from tests.training import (
    adamw,
    assert_close,
    cpu_mesh,
    drive,
    local_batch,
    shard_blocks,
    train,
    train_reference,
)


class PrintingBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.norm(x))
        torch._dynamo.graph_break()
        return x + self.down(F.gelu(hidden))


class BranchingBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.norm(x))
        if hidden.abs().sum() >= 0:  # the same on every rank, which Dynamo cannot know
            return x + self.down(F.gelu(hidden))
        return x - self.down(F.gelu(hidden))


class DisabledBlock(Block):
    """The middle of the block, parameters and all, runs where Dynamo may not look."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.middle(x)))

    @torch._dynamo.disable
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.norm(x)) + self.up.bias


class BrokenRoot(nn.Module):
    """The root itself breaks, with a parameter of its own on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embedding(tokens) * self.scale)
        torch._dynamo.graph_break()
        x = self.blocks[1](x * self.scale)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def with_blocks(block: type[Block]) -> LanguageModel:
    model = LanguageModel()
    model.blocks = nn.ModuleList([block(), Block(), block()])
    return model


BROKEN = {
    "print": lambda: with_blocks(PrintingBlock),
    "branch": lambda: with_blocks(BranchingBlock),
    "disabled": lambda: with_blocks(DisabledBlock),
    "root": BrokenRoot,
}


@pytest.mark.parametrize(
    ("program", "driver"),
    [*((program, "aot_eager") for program in BROKEN), ("root", "inductor")],
)
@distributed(2)
def test_graph_breaks_give_the_same_numbers(program: str, driver: str) -> None:
    model = BROKEN[program]()
    batches = language_batches(3, 2)
    sharded = shard_blocks(copy.deepcopy(model))
    counters.clear()
    run = train(sharded, batches, call=drive(sharded, driver))
    assert counters["stats"]["unique_graphs"] > 1, "the program was meant to break the graph"
    assert_close(run, train_reference(model, batches))
    assert not any(group.is_unsharded for group in sharded._fsdp_unit.context.groups())


@distributed(2)
def test_blocks_compiled_one_by_one_below_an_eager_root() -> None:
    model = LanguageModel()
    batches = language_batches(3, 2)
    sharded = shard_blocks(copy.deepcopy(model))
    for block in sharded.blocks:
        block.compile(backend="compile_fsdp", options={"inner": "aot_eager", "verify": True})
    assert_close(train(sharded, batches), train_reference(model, batches))


@distributed(2)
def test_compiling_before_sharding_works_too() -> None:
    model = LanguageModel()
    batches = language_batches(3, 2)
    sharded = copy.deepcopy(model)
    compiled = torch.compile(sharded, backend="compile_fsdp", options={"inner": "aot_eager"})
    shard_blocks(sharded)
    assert_close(train(sharded, batches, call=compiled), train_reference(model, batches))


@distributed(2)
def test_sharding_the_wrapper_that_torch_compile_returned() -> None:
    model = nn.Linear(4, 4)
    compiled = torch.compile(model, backend="compile_fsdp", options={"inner": "aot_eager"})
    fully_shard(compiled, cpu_mesh())
    assert type(compiled).__name__ == "OptimizedModule"
    compiled(torch.randn(2, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@distributed(2)
def test_one_graph_and_no_recompilation_in_ten_steps() -> None:
    sharded = shard_blocks(LanguageModel())
    optimizer = adamw(sharded)
    counter = CompileCounterWithBackend("compile_fsdp")
    call = torch.compile(sharded, backend=counter)
    for batch in language_batches(12, 2):
        call(*local_batch(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert counter.frame_count == 1


@distributed(2)
def test_hooks_break_no_trace() -> None:
    sharded = shard_blocks(LanguageModel())
    (batch,) = language_batches(1, 2)
    explanation = torch._dynamo.explain(sharded)(*local_batch(batch))
    assert explanation.graph_break_count == 0, explanation.break_reasons
    assert explanation.graph_count == 1


@distributed(2)
def test_one_graph_input_for_each_group() -> None:
    """Dynamo guards on flat shards, not on parameters."""
    sharded = shard_blocks(LanguageModel())
    (batch,) = language_batches(1, 2)
    counter = CompileCounterWithBackend("eager")
    torch.compile(sharded, backend=counter)(*local_batch(batch))
    (graph,) = counter.graphs
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    groups = list(sharded._fsdp_unit.context.groups())
    assert len(inputs) == len(groups) + 2  # tokens and targets
