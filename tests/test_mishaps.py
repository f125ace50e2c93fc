"""What goes wrong in the middle of a run, and runs that last (cases 36, 37 and 39)."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

from compile_fsdp import fully_shard, zero_missing_gradients
from compile_fsdp.runtime.agreement import agreement_of
from tests.distributed import distributed
from tests.models import WIDTH, Block, LanguageModel, language_batches
from tests.test_pieces import assert_at_rest
from tests.training import (
    adamw,
    assert_close,
    cpu_mesh,
    drive,
    gradients_of,
    local_batch,
    shard_blocks,
    train,
    train_reference,
)

DRIVERS = pytest.mark.parametrize("driver", ["eager", "aot_eager"])


class FragileModel(LanguageModel):
    """Its first block fails when told to."""

    def __init__(self) -> None:
        super().__init__(blocks=3)
        self.blocks[0] = Fragile()


class Fragile(Block):
    """Fails when told to; every rank is told the same."""

    fails_in = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.fails_in:
            x = fail(x, self.fails_in)
        return x


@torch.compiler.disable
def fail(x: torch.Tensor, where: str) -> torch.Tensor:
    if where == "forward":
        raise KeyError("out of luck")

    def in_backward(_: torch.Tensor) -> None:
        raise KeyError("out of luck")

    x = x * 1.0
    x.register_hook(in_backward)
    return x


@pytest.mark.parametrize("where", ["forward", "backward"])
@DRIVERS
@distributed(2)
def test_a_step_after_one_that_failed(driver: str, where: str) -> None:
    """Case 36: twice in a row, on every rank, before a step and between steps."""
    model = LanguageModel(blocks=3)
    model.blocks[1] = Fragile()
    batches = language_batches(2, 2)
    sharded = shard_blocks(copy.deepcopy(model))
    call = drive(sharded, driver)
    for _ in range(2):
        for _ in range(2):
            sharded.blocks[1].fails_in = where
            with pytest.raises(KeyError, match="out of luck"):
                call(*local_batch(batches[0])).backward()
        sharded.blocks[1].fails_in = ""
        sharded.zero_grad()
        expected = train_reference(model, batches)
        assert_close(train(sharded, batches, call=call), expected)
        assert_at_rest(sharded)
        model.load_state_dict(expected.parameters)


@DRIVERS
@distributed(2)
def test_gradients_of_a_failed_backward_are_there_when_it_is_caught(driver: str) -> None:
    """Reductions that it had started do not come after what the user does to gradients."""
    sharded = shard_blocks(FragileModel())
    call = drive(sharded, driver)
    batch = local_batch(language_batches(1, 2)[0])
    call(*batch).backward()
    sharded.zero_grad()
    call(*batch).backward()
    once = gradients_of(sharded)
    sharded.blocks[0].fails_in = "backward"
    with pytest.raises(KeyError, match="out of luck"):
        call(*batch).backward()
    sharded.zero_grad(set_to_none=False)
    sharded.blocks[0].fails_in = ""
    call(*batch).backward()
    for name, gradient in gradients_of(sharded).items():
        torch.testing.assert_close(gradient, once[name], rtol=0, atol=0, msg=name)


@distributed(2)
def test_what_a_failed_backward_withheld_is_forgotten() -> None:
    """Neither is it added to the next one's, nor does it make that one reduce anything."""
    model = nn.Sequential(Fragile(), Fragile())
    for each in (*model, model):
        fully_shard(each, cpu_mesh())
    zero_missing_gradients(model)
    x = torch.randn(2, WIDTH, requires_grad=True)
    model(x).sum().backward()
    once = gradients_of(model)
    for retry in ("inputs only", "all"):
        model.zero_grad()
        model[0].fails_in = "backward"
        with pytest.raises(KeyError, match="out of luck"):
            model(x).sum().backward()
        model[0].fails_in = ""
        model.zero_grad()
        if retry == "all":
            model(x).sum().backward()
        else:
            torch.autograd.grad(model(x).sum(), x)
            assert all(parameter.grad is None for parameter in model.parameters())
    for name, gradient in gradients_of(model).items():
        torch.testing.assert_close(gradient, once[name], rtol=0, atol=0, msg=name)


@DRIVERS
@distributed(2)
def test_nothing_grows_in_200_steps(driver: str) -> None:
    """Case 37, with an evaluation now and then."""
    sharded = shard_blocks(LanguageModel(width=4, blocks=1))
    call = drive(sharded, driver)
    optimizer = adamw(sharded)
    batch = local_batch(language_batches(1, 2)[0])

    def steps(count: int) -> tuple[int, int]:
        for step in range(count):
            call(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                with torch.no_grad():
                    call(*batch)
        gc.collect()
        alive = gc.get_objects()
        return len(alive), sum(issubclass(type(each), torch.Tensor) for each in alive)

    steps(20)
    objects, tensors = steps(20)
    later_objects, later_tensors = steps(180)
    assert later_tensors <= tensors, later_tensors - tensors
    # Interpreter and torch keep a few objects of their own; one in 20 steps would be 9.
    assert later_objects - objects < 20, later_objects - objects
    assert dist.get_world_size() == 2 and agreement_of(dist.group.WORLD) is not None


@DRIVERS
@distributed(2)
def test_a_nan_on_one_rank_is_seen_by_all(driver: str) -> None:
    """Case 39."""
    sharded = shard_blocks(LanguageModel())
    call = drive(sharded, driver)
    loss = call(*local_batch(language_batches(1, 2)[0]))
    (loss * (float("nan") if dist.get_rank() else 1.0)).backward()
    for name, parameter in sharded.named_parameters():
        if name != "embedding.weight":  # tokens that do not occur have zeros
            assert parameter.grad.to_local().isnan().all(), name
    norm = nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
    assert norm.full_tensor().isnan()
