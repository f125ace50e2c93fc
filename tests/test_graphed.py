"""Captured graphs do what uncaptured ones do, bit for bit, and are captured and repeated as often
as they should be. On CPU: `tests.capturing` stands in for CUDA graphs."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from compile_fsdp import (
    MixedPrecisionPolicy,
    fully_shard_optimizer,
    zero_missing_gradients,
)
from compile_fsdp.runtime.agreement import TIMEOUT_VARIABLE
from tests.capturing import captured_on_cpu
from tests.distributed import RankFailure, distributed, run
from tests.graphed_training import WARM_UP, Trainer, check_counts, own_batches, run_both
from tests.models import LanguageModel, language_batches
from tests.training import shard_blocks

WARM = {WARM_UP: 2}
LOST = "its forward ran without a CUDA graph"


def train_steps(trainer: Trainer, *, set_to_none: bool = True, steps: int = 6) -> None:
    for batch in own_batches(steps):
        trainer.backward(batch)
        trainer.step(set_to_none=set_to_none)


@distributed(1, 2)
def test_from_the_third_step_on_all_is_repeated() -> None:
    runs = run_both(LanguageModel(), train_steps)
    check_counts(runs, ("forward", 1, 3, WARM), ("backward", 1, 3, WARM))


@distributed(2)
def test_gradients_that_are_zeroed_in_place_are_other_calls() -> None:
    runs = run_both(LanguageModel(), partial(train_steps, set_to_none=False))
    # The very first backward finds no gradients.
    check_counts(runs, ("forward", 1, 3, WARM), ("backward", 1, 2, {WARM_UP: 3}))


@distributed(2)
def test_prepared_optimizers_and_bf16() -> None:
    model = LanguageModel().to(torch.bfloat16)
    policy = {"mixed_precision_policy": MixedPrecisionPolicy(grad_comm_dtype=torch.float32)}
    runs = run_both(model, train_steps, prepare=fully_shard_optimizer, sharding=policy)
    check_counts(runs, ("forward", 1, 2, {WARM_UP: 3}), ("backward", 1, 2, {**WARM, LOST: 1}))


@distributed(2)
def test_groups_that_are_kept_for_the_backward() -> None:
    runs = run_both(LanguageModel(), train_steps, reshard_after_forward=False)
    check_counts(runs, ("forward", 1, 3, WARM), ("backward", 1, 3, WARM))


@distributed(2)
def test_groups_that_are_gathered_and_reduced_together() -> None:
    runs = run_both(LanguageModel(), train_steps, merge_below="1MiB")
    check_counts(runs, ("forward", 1, 3, WARM), ("backward", 1, 3, WARM))


@distributed(2)
def test_evaluation_between_steps() -> None:
    def program(trainer: Trainer) -> None:
        for batch in own_batches(6):
            trainer.backward(batch)
            trainer.step()
            with torch.no_grad():
                trainer.note(trainer.call(*batch))

    runs = run_both(LanguageModel(), program)
    check_counts(runs, ("forward", 1, 3, WARM), ("backward", 1, 3, WARM), ("inference", 1, 3, WARM))


@distributed(2)
def test_two_forwards_before_two_backwards() -> None:
    def program(trainer: Trainer) -> None:
        batches = own_batches(12)
        for one, other in zip(batches[::2], batches[1::2], strict=True):
            first, second = trainer.call(*one), trainer.call(*other)
            second.backward()
            first.backward()
            trainer.note(first, second)
            trainer.step()

    runs = run_both(LanguageModel(), program)
    waits = "an earlier forward waits for its backward"
    forward, backward = runs
    # Every second forward, from the second step on, which is when the first is captured.
    check_counts([forward], ("forward", 1, 4, {**WARM, waits: 5}))
    assert backward.captures == 1 and backward.normal[LOST] > 0


@distributed(2)
def test_a_forward_whose_backward_never_comes() -> None:
    def program(trainer: Trainer) -> None:
        for batch in own_batches(6):
            trainer.note(trainer.call(*batch))
            trainer.backward(batch)
            trainer.step()

    runs = run_both(LanguageModel(), program)
    check_counts(runs, ("forward", 1, 9, WARM), ("backward", 1, 3, WARM))


class Failure(Exception):
    pass


@distributed(2)
def test_exceptions_in_the_middle_of_a_step() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, loss: torch.Tensor) -> torch.Tensor:
            return loss.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            raise Failure

    def program(trainer: Trainer) -> None:
        for number, batch in enumerate(own_batches(8)):
            if number % 2:
                with pytest.raises(Failure):
                    Fails.apply(trainer.call(*batch)).backward()  # type: ignore[no-untyped-call]
            trainer.backward(batch)
            trainer.step()

    runs = run_both(LanguageModel(), program)
    check_counts(runs[1:], ("backward", 1, 5, WARM))


@distributed(2)
def test_results_of_earlier_calls_stay_what_they_were() -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = torch.relu(self.blocks[0](x))
            return hidden, hidden[0]

    def program(trainer: Trainer) -> None:
        kept = []
        for number in range(6):
            x = torch.full((3, 4), float(number), requires_grad=True)
            hidden, row = trainer.call(x)
            (hidden.sum() + row.sum()).backward()
            kept += [hidden, row, x.grad]
        trainer.note(*kept)
        trainer.step()

    assert run_both(Returns(), program)[0].replays == 3


@distributed(2)
def test_hooks_gradients_of_others_and_withheld_ones_need_the_host() -> None:
    def program(trainer: Trainer) -> None:
        batches = iter(own_batches(9))
        for _ in range(3):
            trainer.backward(next(batches))
            trainer.step()
        parameter = next(trainer.model.parameters())
        handle = parameter.register_hook(lambda gradient: gradient * 2)
        trainer.backward(next(batches))
        handle.remove()
        parameter.grad = parameter.grad * 0.5
        trainer.backward(next(batches))
        trainer.step()
        zero_missing_gradients(trainer.model)
        trainer.backward(next(batches))
        trainer.step()
        zero_missing_gradients(trainer.model, False)
        trainer.backward(next(batches))
        trainer.step()

    runs = run_both(LanguageModel(), program)
    reasons = {
        "a parameter has hooks": 1,
        "a .grad was not put there by a backward": 1,
        "gradients are kept back until the backward ends": 1,
    }
    check_counts(runs, ("forward", 1, 4, WARM), ("backward", 1, 1, {**WARM, **reasons}))


def hook_on_one_rank() -> None:
    def program(trainer: Trainer) -> None:
        for number, batch in enumerate(own_batches(6)):
            if number == 4 and dist.get_rank() == 0:
                next(trainer.model.parameters()).register_hook(lambda gradient: None)
            trainer.backward(batch)
            trainer.step()

    os.environ[TIMEOUT_VARIABLE] = "3"
    try:
        run_both(LanguageModel(), program)
    finally:
        del os.environ[TIMEOUT_VARIABLE]


def test_ranks_must_repeat_or_run_together() -> None:
    with pytest.raises(RankFailure, match="a run without a CUDA graph of the backward graph"):
        run(2, hook_on_one_rank)


@distributed(2)
def test_dropout_draws_anew_in_each_repetition() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(8, 8)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.blocks[0](x), 0.5)

    def program(trainer: Trainer) -> None:
        x = torch.ones(4, 8)
        masks = []
        for _ in range(6):
            output = trainer.call(x)
            output.sum().backward()
            masks.append(tuple((output == 0).flatten().tolist()))
            trainer.note(output)
            trainer.step()
        assert len(set(masks)) == 6

    assert run_both(Drops(), program)[0].replays == 3


@distributed(2)
def test_buffers_are_written_in_place() -> None:
    class Normalises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4)])
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.blocks[0](x)).square()

    def program(trainer: Trainer) -> None:
        for _ in range(6):
            trainer.call(torch.randn(5, 4)).sum().backward()
            trainer.note(*trainer.model.buffers())
            trainer.step()
        trainer.model.eval()
        for _ in range(4):
            with torch.inference_mode():
                trainer.note(trainer.call(torch.randn(5, 4)))

    runs = run_both(Normalises(), program)
    assert [each.replays for each in runs] == [3, 3, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cudagraphs": 1}, "'cudagraphs' must be a bool"),
        ({"cudagraphs": True, "inductor": {"triton.cudagraphs": True}}, "leave out Inductor's"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    from compile_fsdp.backend import CompileOptions

    with pytest.raises((TypeError, ValueError), match=message):
        CompileOptions.parse(options)


@pytest.mark.parametrize("how", [{"mode": "reduce-overhead"}, {"options": {"cudagraphs": True}}])
@distributed(1)
def test_a_cpu_mesh_has_no_cuda_graphs(how: dict[str, object]) -> None:
    model = shard_blocks(LanguageModel())
    compiled = torch.compile(model, backend="compile_fsdp", **how)  # type: ignore[call-overload]
    with pytest.raises(Exception, match="CUDA graphs need CUDA parameters, found cpu"):
        compiled(*language_batches(1, 1)[0])


@distributed(1)
def test_the_emulation_notices_a_value_that_the_host_reads() -> None:
    with captured_on_cpu() as pool:
        with pytest.raises(RuntimeError, match="reads a value"):
            pool.new().record(lambda: torch.ones(1).item())
