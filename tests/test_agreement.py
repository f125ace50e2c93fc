"""Ranks whose programs differ: an error on every rank, soon, and never a false alarm (case 9)."""

from __future__ import annotations

import copy
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from compile_fsdp import fully_shard, microbatch, zero_missing_gradients
from compile_fsdp.runtime import collectives
from compile_fsdp.runtime.agreement import TIMEOUT_VARIABLE, Agreement, agreement_of
from tests.distributed import RankFailure, distributed, run
from tests.models import WIDTH, Block, LanguageModel, language_batches
from tests.training import (
    adamw,
    assert_close,
    assert_gradients_close,
    assert_same,
    cpu_mesh,
    drive,
    local_batch,
    shard_blocks,
    train,
)

DRIVERS = pytest.mark.parametrize("driver", ["eager", "aot_eager"])


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Wait for other ranks so long and no longer; around the first collective."""
    os.environ[TIMEOUT_VARIABLE] = str(seconds)
    try:
        yield
    finally:
        del os.environ[TIMEOUT_VARIABLE]


def agreement() -> Agreement:
    found = agreement_of(dist.group.WORLD)
    assert found is not None
    return found


def what_it_says(step: Callable[[], Any]) -> str:
    """The error that ``step`` raises."""
    with pytest.raises(RuntimeError) as error:
        step()
    return str(error.value)


class Experts(nn.Module):
    """A forward uses one of two experts, as a router decides that knows only its rank's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.blocks[expert](self.stem(x)).square().mean()


def experts_in_one_group() -> nn.Module:
    model = Experts()
    fully_shard(model, cpu_mesh())
    return model


def experts_in_groups_of_their_own() -> nn.Module:
    return shard_blocks(Experts())


# Ranks that differ -------------------------------------------------------------------------------


def own_experts(make: Callable[[], nn.Module], driver: str, agreed_steps: int) -> str:
    with patience(100):  # nobody waits for that: the difference is found
        model = make()
        call = drive(model, driver)
        x = torch.randn(4, WIDTH)
        for _ in range(agreed_steps):
            call(x, 0).backward()
        return what_it_says(lambda: call(x, dist.get_rank()).backward())


@pytest.mark.parametrize("agreed_steps", [0, 4])
@DRIVERS
def test_experts_that_differ_between_ranks(driver: str, agreed_steps: int) -> None:
    """Case 9, in the first step, and after steps in which the ranks agreed."""
    for message in run(2, own_experts, experts_in_groups_of_their_own, driver, agreed_steps):
        assert "ranks 0 and 1 differ" in message
        rank0, rank1 = message.split("\n")[1:3]
        assert rank0.startswith("  rank 0:") and "'blocks.0'" in rank0
        assert rank1.startswith("  rank 1:") and "'blocks.1'" in rank1


@DRIVERS
def test_gradients_that_one_rank_does_not_have(driver: str) -> None:
    """Case 9 inside one group: everybody gathers the same, and gradients differ."""
    for message in run(2, own_experts, experts_in_one_group, driver, 0):
        assert "rank 0: reduce_scatter of gradients of 'root'" in message
        assert "gradients of 'root': all but blocks.1.norm.weight" in message
        assert "gradients of 'root': all but blocks.0.norm.weight" in message
        assert "zero_missing_gradients" in message


def other_order(driver: str) -> str:
    model = shard_blocks(LanguageModel(blocks=3))
    call = drive(model, driver, prefetch=3 * dist.get_rank())
    batch = local_batch(language_batches(1, 2)[0])
    return what_it_says(lambda: call(*batch).backward())


def test_a_rank_with_another_schedule() -> None:
    messages = run(2, other_order, "aot_eager")
    assert all("differ as collective" in message for message in messages)
    assert all("rank 0: " in message for message in messages)


def no_backward(driver: str) -> str:
    model = shard_blocks(LanguageModel())
    call = drive(model, driver)
    batch = local_batch(language_batches(1, 2)[0])
    for step in range(4):
        loss = call(*batch)
        if step % 2:
            loss.backward()

    def diverge() -> None:
        loss = call(*batch)
        if dist.get_rank() == 0:
            loss.backward()
        call(*batch)

    return what_it_says(diverge)


@DRIVERS
def test_a_rank_that_skips_a_backward(driver: str) -> None:
    """Both ways had been gone before, by all ranks together."""
    for message in run(2, no_backward, driver):
        assert "ranks 0 and 1 differ as collective" in message


def no_gradient_for_a_unit(driver: str) -> str:
    """Everybody gathers the unit; the gradient does not reach it on rank 1."""
    model = shard_blocks(Experts())
    x = torch.randn(4, WIDTH)

    def step() -> None:
        y = model.blocks[0](model.blocks[1](x).detach() if dist.get_rank() else model.blocks[1](x))
        y.sum().backward()

    if driver == "eager":
        return what_it_says(step)
    call = torch.compile(step, backend="compile_fsdp", options={"inner": driver})
    return what_it_says(call)


def test_a_unit_without_gradients_on_one_rank() -> None:
    for message in run(2, no_gradient_for_a_unit, "eager"):
        assert "ranks 0 and 1 differ" in message
        assert "rank 0: all_gather of 'blocks.1'" in message or "gradients of 'blocks.1'" in message


# Ranks that are gone -----------------------------------------------------------------------------


def exit_in_backward(driver: str) -> None:
    model = shard_blocks(LanguageModel())
    call = drive(model, driver)
    batch = local_batch(language_batches(1, 3)[0])
    call(*batch).backward()
    loss = call(*batch)
    if dist.get_rank() == 2:
        loss.register_hook(lambda _: os._exit(7))
    loss.backward()


@DRIVERS
def test_a_rank_that_dies_in_backward(driver: str) -> None:
    with pytest.raises(RankFailure) as failure:
        run(3, exit_in_backward, driver)
    report = str(failure.value)
    assert "the process ended with code 7" in report
    for rank in (0, 1):
        assert f"rank {rank} could not complete the" in report or f"(rank {rank}" in report
    assert re.search(r"could not complete the \w+ of (gradients of )?'(root|blocks\.\d)'", report)
    assert "hung" not in report


def sleep_in_backward(driver: str) -> str:
    with patience(4):
        model = shard_blocks(LanguageModel())
        call = drive(model, driver)
        batch = local_batch(language_batches(1, 2)[0])
        call(*batch).backward()
        dist.barrier()  # compiling takes longer than the time-out
        loss = call(*batch)
        if dist.get_rank() == 1:
            loss.register_hook(lambda _: time.sleep(7))
        return what_it_says(loss.backward)


@DRIVERS
def test_a_rank_that_sleeps(driver: str) -> None:
    for message in run(2, sleep_in_backward, driver):
        assert "rank 0 has waited" in message
        assert "rank 1 did not come this far" in message
        assert re.search(r"for the all_gather of '(root|blocks\.\d)'", message)


# Ranks that differ in what does not matter -------------------------------------------------------


@DRIVERS
@distributed(2)
def test_sequence_lengths_that_differ_between_ranks(driver: str) -> None:
    """Case 25. Rank 1 compiles another graph, or the same one once more; rank 0 does not."""
    model = shard_blocks(LanguageModel())
    call = drive(model, driver)
    optimizer = adamw(model)
    for length in (5, 5, 7, 9, 5):
        batch = torch.randint(31, (2, 2, length if dist.get_rank() else 5))
        call(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()


@distributed(2)
def test_training_on_other_lengths_on_each_rank_gives_the_same_bits_compiled() -> None:
    """Case 25. The ranks' graphs have other shapes, and plan the same communication."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    batches = [
        tuple(torch.randint(31, (2, length), generator=generator) for _ in range(2))
        for length in ((5, 17) if rank else (40, 40))
    ]
    model = LanguageModel()
    runs = []
    for driver in ("eager", "aot_eager"):
        sharded = shard_blocks(copy.deepcopy(model))
        call = drive(sharded, driver)
        given = iter(batches)
        step = lambda *_, call=call, given=given: call(*next(given))  # noqa: E731
        runs.append(train(sharded, language_batches(2, 2), call=step))
    assert_same(*runs)


def keep_by_own_shapes() -> str:
    model = shard_blocks(LanguageModel(blocks=3))
    call = drive(model, "aot_eager", memory_budget="128KiB")
    with patience(100):  # nobody waits for that
        batch = torch.randint(31, (2, 2, 1000 if dist.get_rank() else 4))
        return what_it_says(lambda: call(*batch).backward())


def test_a_budget_in_bytes_and_shapes_that_differ() -> None:
    """Case 25, in the one mode where a rank's own shapes decide: what it keeps unsharded is not
    gathered again, so the ranks' communication differs, and they say so."""
    for message in run(2, keep_by_own_shapes):
        assert "ranks 0 and 1 differ" in message
        assert "all_gather of 'blocks." in message


@DRIVERS
@distributed(2)
def test_no_store_is_asked_in_the_steady_state(driver: str) -> None:
    model = shard_blocks(LanguageModel())
    call = drive(model, driver)
    batch = local_batch(language_batches(1, 2)[0])
    claims = []
    for _ in range(6):
        call(*batch).backward()
        claims.append(agreement().claims)
    assert 0 < claims[0] < claims[2]
    assert claims[2] == claims[5]


@distributed(2)
def test_a_choice_is_compared_each_time_and_nothing_else() -> None:
    """Training with an evaluation now and then: one comparison where either may follow."""
    model = shard_blocks(LanguageModel())
    batch = local_batch(language_batches(1, 2)[0])
    for step in range(12):
        if step == 9:
            before = agreement().claims
        model(*batch).backward()
        if step % 3 == 2:
            with torch.no_grad():
                model(*batch)
    assert 3 <= agreement().claims - before <= 8


@distributed(4)
def test_two_axes_agree_each_for_itself() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = shard_blocks(LanguageModel(), mesh)
    batch = local_batch(language_batches(1, 4)[0])
    for step in range(4):
        with microbatch(model, is_last=step % 2 == 1):
            model(*batch).backward()
    for axis in range(2):
        found = agreement_of(mesh.get_group(axis))
        assert found is not None and found.claims > 0


@distributed(1)
def test_one_rank_has_nobody_to_agree_with() -> None:
    assert agreement_of(dist.group.WORLD) is None


@distributed(2)
def test_a_time_out_that_is_no_number() -> None:
    os.environ[TIMEOUT_VARIABLE] = "soon"
    try:
        with pytest.raises(ValueError, match="COMPILE_FSDP_TIMEOUT must be a number of seconds"):
            agreement_of(dist.group.WORLD)
    finally:
        del os.environ[TIMEOUT_VARIABLE]


# Zeros for what a rank does not have -------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [1, 2])
@DRIVERS
@distributed(2)
def test_zeros_for_missing_gradients_give_the_same_numbers(driver: str, microbatches: int) -> None:
    """Case 9 with the opt-in: parity with one process that runs both ranks' experts."""
    torch.manual_seed(0)
    plain = Experts()
    sharded = copy.deepcopy(plain)
    fully_shard(sharded, cpu_mesh())
    zero_missing_gradients(sharded)
    call = drive(sharded, driver)
    xs = torch.randn(3, microbatches, 2, 4, WIDTH)

    def losses_of_ranks(batch: torch.Tensor) -> torch.Tensor:
        return sum(plain(x, rank) for x in batch for rank, x in enumerate(x)) / 2

    expected = train(plain, [[x] for x in xs], call=losses_of_ranks, distributed=False)

    def own_losses(batch: torch.Tensor) -> torch.Tensor:
        rank = dist.get_rank()
        for x in batch[:-1]:
            with microbatch(sharded, is_last=False):
                call(x[rank], rank).backward()
        return call(batch[-1][rank], rank)

    def own_batch(batch: torch.Tensor) -> torch.Tensor:
        return own_losses(batch)

    run_ = train(sharded, [[torch.cat([x] * 2)] for x in xs], call=own_batch)
    del expected.losses[:], run_.losses[:]  # of the last microbatch only
    assert_close(run_, expected)


class TwoHeads(nn.Module):
    """Both heads run on every rank; which of them the loss sees is the rank's own affair."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [block(x).square().mean() for block in self.blocks]


@DRIVERS
@distributed(2)
def test_a_rank_without_gradients_of_a_whole_unit_contributes_zeros(driver: str) -> None:
    torch.manual_seed(0)
    plain = TwoHeads()
    sharded = shard_blocks(copy.deepcopy(plain))
    zero_missing_gradients(sharded)
    call = drive(sharded, driver)
    xs = torch.randn(2, 4, WIDTH)
    # Rank 0 trains both heads, rank 1 the first one.
    sum(plain(xs[0]) + plain(xs[1])[:1]).div(2).backward()
    sum(call(xs[dist.get_rank()])[: 2 - dist.get_rank()]).backward()
    assert_gradients_close(sharded, plain)


@DRIVERS
@distributed(2)
def test_frozen_units_contribute_no_zeros(driver: str) -> None:
    """Neither one that was always frozen nor one that was trained before."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    model[0].requires_grad_(False)
    for each in (*model, model):
        fully_shard(each, cpu_mesh())
    zero_missing_gradients(model)
    call = drive(model, driver)
    for labels in (["1", "2"], ["2"]):
        with collectives.recorded() as records:
            call(torch.randn(2, 4)).sum().backward()
        assert sorted(each.label for each in records if each.kind == "reduce_scatter") == labels
        model.zero_grad()
        model[1].requires_grad_(False)


@distributed(2)
def test_zeros_only_where_gradients_were_asked_for() -> None:
    model = experts_in_one_group()
    zero_missing_gradients(model)
    x = torch.randn(4, WIDTH, requires_grad=True)
    torch.autograd.grad(model(x, dist.get_rank()), x)
    assert all(parameter.grad is None for parameter in model.parameters())
    model(x, dist.get_rank()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
    zero_missing_gradients(model, enabled=False)
    model(x, 0).backward()
    assert model.blocks[1].up.weight.grad is None


def test_zeros_need_a_sharded_module() -> None:
    with pytest.raises(ValueError, match="zero_missing_gradients: nothing at or below"):
        zero_missing_gradients(nn.Linear(2, 2))
