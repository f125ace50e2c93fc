"""Hooks on sharded parameters, penalties on them, and writes that cannot reach the shards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from compile_fsdp import Placements, fully_shard, fully_shard_optimizer, microbatch
from tests.distributed import distributed
from tests.models import LanguageModel, language_batches
from tests.training import (
    assert_gradients_close,
    cpu_mesh,
    drive,
    full,
    local_batch,
    shard_blocks,
)

DRIVERS = ["eager", "aot_eager"]


@pytest.mark.parametrize("driver", DRIVERS)
@distributed(2)
def test_hooks_see_the_reduced_sharded_gradient_and_may_replace_it(driver: str) -> None:
    """Registered before and after sharding; a removed one does not run."""
    model = LanguageModel()
    sharded = copy.deepcopy(model)
    calls: list[bool] = []
    for each in (model, sharded):
        each.blocks[0].up.weight.register_hook(lambda gradient: 3 * gradient)
        removed = each.blocks[0].up.bias.register_hook(lambda gradient: 5 * gradient)
        if each is sharded:
            shard_blocks(sharded)
        removed.remove()
        each.head._parameters["weight"].register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        each.embedding._parameters["weight"].register_hook(
            lambda gradient: calls.append(isinstance(gradient, DTensor))
        )
    (batch,) = language_batches(1, 2)
    drive(sharded, driver)(*local_batch(batch)).backward()
    model(*batch).backward()
    assert_gradients_close(sharded, model)
    assert calls == [True, False]


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("mode", ["zero3", "zero1"])
@distributed(2)
def test_an_optimizer_in_post_accumulate_hooks(mode: str, driver: str) -> None:
    """Each parameter is stepped and its gradient dropped when its backward has ended."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = LanguageModel()
    sharded = shard_blocks(copy.deepcopy(model), mesh, placements=getattr(Placements, mode)(mesh))
    call = drive(sharded, driver)
    for each in (model, sharded):
        step_in_hooks(each)
    for batch in language_batches(3, 2):
        call(*local_batch(batch)).backward()
        model(*batch).backward()
        assert all(parameter.grad is None for parameter in sharded.parameters())
    for left, right in zip(sharded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(left), right.detach(), rtol=1e-4, atol=2e-6)


def step_in_hooks(model: nn.Module) -> None:
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        if isinstance(parameter, DTensor):
            fully_shard_optimizer(optimizer)

        def step(parameter: torch.Tensor, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)


@pytest.mark.parametrize(("mode", "calls"), [("zero3", 2), ("zero1", 1)])
@distributed(2)
def test_post_accumulate_hooks_wait_for_the_last_microbatch_where_gradients_do(
    mode: str, calls: int
) -> None:
    mesh = cpu_mesh()
    model = nn.Linear(4, 4)
    fully_shard(model, mesh, getattr(Placements, mode)(mesh))
    finished: list[bool] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda each: finished.append(each.grad.placements == each.placements)
        )
    for is_last in (False, True):
        with microbatch(model, is_last):
            model(torch.randn(2, 4)).sum().backward()
    assert finished == [True] * calls * 2


@distributed(2)
def test_a_gradient_hook_where_gradients_are_finished_late_is_an_error_by_name() -> None:
    mesh = cpu_mesh()
    model = nn.Linear(4, 4)
    fully_shard(model, mesh, Placements.ddp(mesh))
    model._parameters["weight"].register_hook(lambda gradient: None)
    with pytest.raises(RuntimeError, match=r"'weight' has a hook .*post_accumulate"):
        model(torch.randn(2, 4)).sum().backward()


@pytest.mark.parametrize("penalty_first", [False, True])
@pytest.mark.parametrize("driver", DRIVERS)
@distributed(2)
def test_a_penalty_on_the_sharded_parameters(driver: str, penalty_first: bool) -> None:
    """Autograd itself adds the penalty's gradients, before or after the model's are reduced."""
    model = LanguageModel()
    sharded = shard_blocks(copy.deepcopy(model))
    call = drive(sharded, driver)

    def penalty(each: nn.Module) -> torch.Tensor:
        squares = [parameter.square().sum() for parameter in each.parameters()]
        return sum(s.full_tensor() if isinstance(s, DTensor) else s for s in squares)

    for batch in language_batches(2, 2):
        for each, run, part in ((sharded, call, local_batch(batch)), (model, model, batch)):
            if penalty_first:
                loss = 0.5 * penalty(each) + run(*part)
            else:
                loss = run(*part) + 0.5 * penalty(each)
            loss.backward()
        assert_gradients_close(sharded, model)


@distributed(2)
def test_a_penalty_that_comes_before_gradients_are_finished_is_an_error_by_name() -> None:
    """Computed first, its gradient is the last: autograd would add a finished one to the rest."""
    mesh, model = cpu_mesh(), nn.Linear(4, 4)
    fully_shard(model, mesh, Placements.zero1(mesh))
    for penalty_first in (False, True):
        terms = [lambda: model(torch.randn(2, 4)).sum()]
        terms.append(lambda: model._parameters["weight"].square().sum().full_tensor())
        if not penalty_first:
            sum(term() for term in terms).backward()
            continue
        model.zero_grad()
        with pytest.raises(RuntimeError, match=r"reads the sharded parameter 'weight' itself"):
            sum(term() for term in reversed(terms)).backward()


@pytest.mark.parametrize("driver", DRIVERS)
@distributed(2)
def test_writing_a_parameter_in_forward_is_refused_by_name(driver: str) -> None:
    class Clamps(nn.Linear):
        writes = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                if self.writes:
                    self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    model = nn.Sequential(Clamps(4, 4))
    before = model[0].weight.detach().clone()
    fully_shard(model, cpu_mesh())
    with pytest.raises(Exception, match=r"'0\.weight' was changed in place inside a forward"):
        drive(model, driver)(torch.randn(2, 4))
    torch.testing.assert_close(full(model[0]._parameters["weight"]), before, rtol=0, atol=0)
    assert not any(group.is_unsharded for group in model.fsdp_parameter_groups)
    model[0].writes = False
    torch.compiler.reset()
    drive(model, driver)(torch.randn(2, 4)).sum().backward()


@distributed(2)
def test_assigning_and_deleting_a_parameter_are_errors_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model, cpu_mesh())
    same = model[0]._parameters["weight"]
    model[0].weight = same
    with pytest.raises(RuntimeError, match=r"'0\.weight' is sharded: assigning to it"):
        model[0].weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(RuntimeError, match=r"'0\.bias' is sharded: assigning to it"):
        model[0].bias = None
    with pytest.raises(RuntimeError, match=r"'0\.weight' is sharded and cannot be deleted"):
        torch.nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Identity())
    assert model[0]._parameters["weight"] is same
    model.load_state_dict({"0.weight": torch.ones(4, 4)}, strict=False)
    torch.testing.assert_close(full(same), torch.ones(4, 4))


@distributed(2)
def test_a_conversion_that_is_refused_has_converted_nothing() -> None:
    class WithBuffer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4, affine=False)
            self.register_buffer("table", torch.ones(4))
            self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    model = shard_blocks(WithBuffer())
    for convert in (
        lambda: model.double(),
        lambda: model.half(),
        lambda: model.to(torch.bfloat16),
        lambda: model.to("meta"),
    ):
        with pytest.raises(
            RuntimeError, match=r"'weight' of a sharded FsdpLinear is torch.float32"
        ):
            convert()
        assert {buffer.dtype for buffer in model.buffers()} == {torch.float32, torch.int64}
        assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}


@distributed(2)
def test_functional_call_computes_with_what_it_is_given() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    sharded = copy.deepcopy(model)
    fully_shard(sharded, cpu_mesh())
    x = torch.randn(3, 4)
    given = {
        name: torch.randn_like(each).requires_grad_() for name, each in model.named_parameters()
    }
    results = []
    for each in (sharded, model):
        loss = torch.func.functional_call(each, given, (x,)).sum()
        results.append((loss.detach(), torch.autograd.grad(loss, list(given.values()))))
    torch.testing.assert_close(*results)
    with pytest.raises(
        RuntimeError, match=r"'0\.weight' of a sharded module was replaced by anoth"
    ):
        shards = {name: each.detach() for name, each in sharded.named_parameters()}
        torch.func.functional_call(sharded, shards, (x,))
    sharded(x).sum().backward()
    model(x).sum().backward()
    assert_gradients_close(sharded, model)
