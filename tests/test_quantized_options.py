"""Layouts, options of the backend, mishaps and captured graphs with MXFP8 compute weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compile_fsdp import (
    Placements,
    ShardLayout,
    TensorAtomic,
    fully_shard,
    fully_shard_optimizer,
    zero_missing_gradients,
)
from compile_fsdp.runtime.collectives import recorded
from compile_fsdp.runtime.parameter_group import FsdpParameterGroup
from tests.distributed import distributed
from tests.graphed_training import Trainer, run_both
from tests.quantized import (
    MXFP8,
    Model,
    Pair,
    assert_nothing_left,
    batches,
    gathered,
    mesh_for,
    pair,
    reference_of,
    shard,
    shard_on,
)
from tests.test_mishaps import fail
from tests.training import cpu_mesh

SLOW_AOT_EAGER = pytest.param("aot_eager", marks=pytest.mark.slow)

# Layouts and options ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["padded", "packed", "whole tensors"])
@distributed(4)
def test_layouts(layout: str) -> None:
    """The head has two blocks of 32 rows, for four ranks."""
    model = Model()
    reference = reference_of(model)
    mesh, placements = mesh_for("zero3", (4,))
    options: dict[str, Any] = {}
    if layout == "packed":
        options["shard_layout"] = ShardLayout.PACKED
    elif layout == "whole tensors":
        placements = Placements(("inner",), *[(TensorAtomic(),)] * 3)
        options["parameter_to_owner"] = {each: n % 4 for n, each in enumerate(model.parameters())}
    for block in model.blocks:
        fully_shard(block, mesh, placements, MXFP8, **options)
    fully_shard(model, mesh, placements, MXFP8, **options)
    Pair(model, model, reference).train(batches(2))


OPTIONS = [
    {"prefetch": 0},
    {"memory_budget": "unlimited"},
    {"arena": True},
    *(pytest.param(each, marks=pytest.mark.slow) for each in ({"prefetch": 3}, {"merge_below": 1})),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@distributed(2)
def test_options_of_the_backend(options: dict[str, Any]) -> None:
    both = pair("aot_eager", compiling=options)
    tokens = batches(3)
    both.train(tokens[:2])
    with recorded() as records:
        both.backward(tokens[2])
    both.step()
    rowwise, columnwise = gathered(records, "rowwise"), gathered(records, "columnwise")
    assert rowwise == columnwise > 0, "nothing that forward gathers serves backward"
    assert_nothing_left(both.model)


class Matrix(nn.Linear):
    """Nothing else is gathered between two of them."""

    def __init__(self) -> None:
        super().__init__(32, 32, bias=False)


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Matrix() for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.one_hot(tokens % 32, 32).float()
        for block in self.blocks:
            x = block(x).relu()
        return x.square().mean()


@distributed(2)
def test_data_and_scales_of_small_groups_are_gathered_together() -> None:
    both = pair("aot_eager", make=Matrices, compiling={"merge_below": "1MiB"})
    both.train(batches(1))
    with recorded() as records:
        both.backward(batches(1)[0])
    labels = [each.label for each in records if each.kind == "all_gather"]
    first, second, third = (f"blocks.{number}:rowwise" for number in range(3))
    assert "+".join([first, second, third]) in labels or "+".join([second, third]) in labels
    both.step()
    both.assert_parameters_equal()


@distributed(2)
def test_blocks_compiled_one_by_one_gather_ahead() -> None:
    model = Model()
    reference = reference_of(model)
    shard(model)
    early: list[bool] = []
    for block in model.blocks:
        block.compile(backend="compile_fsdp", options={"inner": "aot_eager"})
    model.blocks[0].register_forward_hook(
        lambda *_: early.extend(group.is_rowwise_unsharded for group in quantised(model.blocks[1]))
    )
    Pair(model, model, reference).train(batches(3))
    assert early[-1], "what the next block reads is gathered before it is called"
    assert_nothing_left(model)


def quantised(module: nn.Module) -> list[FsdpParameterGroup]:
    return [group for group in module.fsdp_parameter_groups if group.planes]


@distributed(2)
def test_the_marker_runs_under_plain_backends() -> None:
    model = Model()
    reference = reference_of(model)
    shard(model)
    compiled = torch.compile(model, backend="aot_eager")
    Pair(model, compiled, reference).train(batches(2))


# Mishaps, captured graphs -------------------------------------------------------------------------


class Fragile(Model):
    """Its second block fails when told to."""

    fails_in = ""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embedding(tokens))
        x = self.blocks[1](fail(x, self.fails_in) if self.fails_in else x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("driver", ["eager", SLOW_AOT_EAGER])
@distributed(2)
def test_a_step_that_fails_leaves_nothing_behind(driver: str) -> None:
    both = pair(driver, make=Fragile)
    both.train(batches(1))
    for where in ("forward", "backward"):
        both.model.fails_in = where
        with pytest.raises(KeyError):
            both.optimizer.zero_grad(both.call(batches(1)[0]).backward())
        both.model.fails_in = ""
        both.optimizer.zero_grad()
        both.train(batches(2))
    assert_nothing_left(both.model)


class Skipping(Model):
    """Its second block is gathered ahead, and then not called."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embedding(tokens))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


@distributed(2)
def test_what_nobody_came_for_is_let_go_of() -> None:
    both = pair(make=Skipping)
    with torch.no_grad():
        both.call(batches(1)[0])
    assert_nothing_left(both.model)
    both.train(batches(2))
    assert_nothing_left(both.model)


@pytest.mark.parametrize("driver", ["eager", SLOW_AOT_EAGER])
@distributed(2)
def test_zeros_for_missing_gradients(driver: str) -> None:
    both = pair(driver)
    zero_missing_gradients(both.model)
    both.train(batches(2))


@distributed(2)
def test_captured_graphs() -> None:
    def program(trainer: Trainer) -> None:
        for number, tokens in enumerate(batches(6)):
            trainer.backward((tokens,))
            trainer.step()
            if number == 4:  # between two replays; the next one quantises
                with torch.no_grad():
                    for parameter in trainer.model.parameters():
                        parameter.mul_(0.5)

    runs = run_both(
        Model(), program, mesh=cpu_mesh(), shard=shard_on, prepare=fully_shard_optimizer
    )
    assert all(each.replays for each in runs)
