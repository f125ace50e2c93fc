"""More of captured graphs: the placement table, batches of changing shapes, and corners."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import compile_fsdp.graphed as graphed
from compile_fsdp import RowAtomic, fully_shard_optimizer, graph_runs, microbatch
from tests.capturing import captured_on_cpu
from tests.distributed import distributed
from tests.graphed_training import WARM_UP, Trainer, check_counts, own_batches, run_both
from tests.models import Block, LanguageModel
from tests.modes import ONE_AXIS, TWO_AXES, Mode, mesh_of
from tests.training import drive, shard_blocks

WARM = {WARM_UP: 2}
LOST = "its forward ran without a CUDA graph"


def train_microbatches(trainer: Trainer, *, steps: int = 4) -> None:
    batches = own_batches(3 * steps)
    for number, batch in enumerate(batches):
        last = number % 3 == 2
        with microbatch(trainer.model, is_last=last):
            trainer.backward(batch)
        if last:
            trainer.step()


def check_mode(mode: Mode, shape: tuple[int, ...]) -> None:
    mesh = mesh_of(shape)
    placements = mode.on(mesh, RowAtomic())
    runs = run_both(
        LanguageModel(),
        train_microbatches,
        mesh=mesh,
        prepare=fully_shard_optimizer,
        sharding={"placements": placements},
    )
    # First, middle and last microbatch each have a backward of their own kind, and the first of a
    # step may have a forward of its own. What a forward of the very first step lacks (it finds no
    # step before it) its backward lacks as well.
    found = "; ".join(map(str, runs))
    forward, backward = runs
    assert backward.captures == 3 and backward.normal[WARM_UP] in (6, 7), found
    assert backward.normal.keys() <= {WARM_UP, LOST} and backward.normal.get(LOST, 0) <= 1, found
    assert backward.captures + backward.replays + sum(backward.normal.values()) == 12, found
    assert forward.normal.keys() == {WARM_UP} and 1 <= forward.captures <= 2, found


@pytest.mark.parametrize("mode", ONE_AXIS, ids=str)
@distributed(2)
def test_microbatches_on_one_axis(mode: Mode) -> None:
    check_mode(mode, (2,))


@pytest.mark.parametrize("mode", TWO_AXES[-2:], ids=str)
@distributed(4)
def test_microbatches_on_two_axes(mode: Mode) -> None:
    check_mode(mode, (2, 2))


@distributed(2)
def test_every_batch_shape_is_captured_by_itself_up_to_a_limit() -> None:
    def program(trainer: Trainer) -> None:
        for length in (3, 4, 5, 3, 4, 5, 3, 4, 5, 3, 4, 5):
            batch = torch.randint(31, (2, length))
            trainer.backward((batch, batch))
            trainer.step()

    runs = run_both(LanguageModel(), program)
    assert sum(each.captures for each in runs if "forward" in each.graph) == 3
    assert sum(each.replays for each in runs if "forward" in each.graph) == 3


@distributed(2)
def test_more_kinds_of_calls_than_are_captured() -> None:
    before, graphed.MOST_CAPTURES = graphed.MOST_CAPTURES, 1
    try:

        def program(trainer: Trainer) -> None:
            for length in (3, 4, 5, 3, 4, 5, 3, 4, 5, 3, 4, 5):
                batch = torch.randint(31, (2, length))
                trainer.backward((batch, batch))
                trainer.step()

        runs = run_both(LanguageModel(), program)
    finally:
        graphed.MOST_CAPTURES = before
    assert any("1 other kinds of calls are captured" in each.normal for each in runs)


@distributed(2)
def test_backwards_twice_and_for_inputs_only() -> None:
    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[0](x).square().sum()

    def program(trainer: Trainer) -> None:
        for _ in range(5):
            x = torch.randn(3, 4, requires_grad=True)
            loss = trainer.call(x)
            (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
            loss.backward(retain_graph=True)
            loss.backward()
            trainer.note(gradient, x.grad)
            trainer.step()

    check_counts(run_both(Squares(), program)[1:], ("backward", 3, 6, {WARM_UP: 6}))


@distributed(2)
def test_checkpointed_blocks() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x.square().sum()

    def program(trainer: Trainer) -> None:
        for _ in range(6):
            trainer.backward([torch.randn(2, 12)])
            trainer.step()

    runs = run_both(Checkpointed(), program)
    check_counts(runs, ("forward", 1, 3, WARM), ("backward", 1, 3, WARM))


@distributed(2)
def test_blocks_that_are_compiled_one_by_one() -> None:
    class ByBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x.sum()

    def program(trainer: Trainer) -> None:
        for block in trainer.model.blocks:
            block.compile(backend="compile_fsdp", options=trainer.options)
        for _ in range(7):
            loss = trainer.model(torch.randn(3, 4))
            loss.backward()
            trainer.note(loss)
            trainer.step()

    runs = run_both(ByBlock(), program, prefetch=0)
    assert all(each.replays >= 3 for each in runs), "; ".join(map(str, runs))


@distributed(1)
def test_graphs_of_inductor_are_handed_over() -> None:
    """What Inductor's code does on a CPU cannot be repeated, so this ends with the warm-up. The
    second model is compiled from Inductor's cache."""
    for _ in range(2):
        torch.compiler.reset()
        with captured_on_cpu() as pool:
            model = shard_blocks(LanguageModel())
            call = drive(model, "inductor", cudagraphs=True)
            for batch in own_batches(2):
                call(*batch).backward()
            check_counts(graph_runs(model), ("forward", 0, 0, WARM), ("backward", 0, 0, WARM))
            assert pool.captures == []
