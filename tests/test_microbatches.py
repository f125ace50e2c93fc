"""Gradient accumulation, and both ways of zeroing (cases 14 to 16)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from compile_fsdp import MixedPrecisionPolicy, Placements, fully_shard, microbatch
from tests.distributed import distributed
from tests.models import LanguageModel, language_batches
from tests.training import (
    adamw,
    assert_gradients_close,
    cpu_mesh,
    drive,
    full,
    local_batch,
    shard_blocks,
)


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@pytest.mark.parametrize("flagged", [True, False])
@distributed(1, 2)
def test_four_microbatches_add_up(driver: str, flagged: bool) -> None:
    model = LanguageModel()
    batches = language_batches(4, torch.distributed.get_world_size())
    sharded = shard_blocks(copy.deepcopy(model))
    call = drive(sharded, driver)
    for number, batch in enumerate(batches):
        if flagged:
            with microbatch(sharded, is_last=number == 3):
                call(*local_batch(batch)).backward()
        else:
            call(*local_batch(batch)).backward()
        model(*batch).backward()
    assert_gradients_close(sharded, model)


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@distributed(2)
def test_zeroing_in_place_and_by_dropping_agree(driver: str) -> None:
    batches = language_batches(3, 2)
    results = []
    for set_to_none in (True, False):
        torch.manual_seed(3)
        sharded = shard_blocks(LanguageModel())
        optimizer, call = adamw(sharded), drive(sharded, driver)
        for batch in batches:
            call(*local_batch(batch)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        results.append([full(parameter) for parameter in sharded.parameters()])
    for dropped, zeroed in zip(*results, strict=True):
        torch.testing.assert_close(dropped, zeroed, rtol=0, atol=0)


@distributed(2)
def test_a_gradient_kept_from_the_last_step_stays_what_it_was() -> None:
    sharded = shard_blocks(LanguageModel())
    first, second = language_batches(2, 2)
    sharded(*local_batch(first)).backward()
    kept = sharded.head._parameters["weight"].grad
    value = full(kept)
    sharded.zero_grad()
    sharded(*local_batch(second)).backward()
    torch.testing.assert_close(full(kept), value, rtol=0, atol=0)
    assert not torch.equal(full(sharded.head._parameters["weight"].grad), value)


@distributed(2)
def test_dropping_one_gradient_restarts_that_one_only() -> None:
    sharded = shard_blocks(LanguageModel())
    (batch,) = language_batches(1, 2)
    sharded(*local_batch(batch)).backward()
    once = {name: full(each.grad) for name, each in sharded.named_parameters()}
    kept = sharded.head._parameters["weight"].grad
    sharded.head._parameters["weight"].grad = None
    sharded(*local_batch(batch)).backward()
    sharded(*local_batch(batch)).backward()
    torch.testing.assert_close(full(kept), once["head.weight"], rtol=0, atol=0)
    for name, parameter in sharded.named_parameters():
        factor = 2 if name == "head.weight" else 3
        expected = sum([once[name]] * factor)
        torch.testing.assert_close(full(parameter.grad), expected, rtol=0, atol=0)


class LateUse(nn.Module):
    """The second head is used on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.early = nn.Linear(4, 2)
        self.late = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor, both: bool) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(x))
        out = self.early(hidden) + (self.late(hidden) if both else 0)
        return F.mse_loss(out, y)


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@distributed(2)
def test_a_parameter_used_first_on_the_last_microbatch(driver: str) -> None:
    model = LateUse()
    sharded = copy.deepcopy(model)
    policy = MixedPrecisionPolicy(grad_comm_dtype=torch.float64)
    fully_shard(sharded, cpu_mesh(), mixed_precision_policy=policy)
    call = drive(sharded, driver)
    for number in range(3):
        batch = [torch.randn(4, 4), torch.randn(4, 2)]
        model(*batch, number == 2).backward()
        with microbatch(sharded, is_last=number == 2):
            call(*local_batch(batch), number == 2).backward()
        late = sharded.late._parameters["weight"]
        assert (late.grad is None) == (number < 2)
    assert_gradients_close(sharded, model)


@distributed(2)
def test_microbatch_restores_the_flag_after_an_exception() -> None:
    sharded = shard_blocks(LanguageModel())
    context = sharded._fsdp_unit.context
    with pytest.raises(KeyError), microbatch(sharded, is_last=False):
        assert context.is_last_microbatch is False
        raise KeyError
    assert context.is_last_microbatch is True
    with pytest.raises(ValueError, match="nothing at or below this Linear is sharded"):
        with microbatch(nn.Linear(1, 1), is_last=True):
            pass


@pytest.mark.parametrize("communicated", [torch.float32, torch.float64])
@distributed(2)
def test_grad_scale_multiplies_each_contribution(communicated: torch.dtype) -> None:
    model = nn.Linear(4, 2)
    scaled, plain = copy.deepcopy(model), copy.deepcopy(model)
    policy = MixedPrecisionPolicy(grad_comm_dtype=communicated)
    fully_shard(scaled, cpu_mesh(), None, policy, grad_scale=0.25)
    fully_shard(plain, cpu_mesh(), None, policy)
    for _ in range(2):
        x = torch.randn(3, 4)
        scaled(x).sum().backward()
        plain(x).sum().backward()
    for small, large in zip(scaled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(small.grad), 0.25 * full(large.grad), rtol=0, atol=0)


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@distributed(2)
def test_a_parameter_unused_in_the_second_backward_keeps_its_gradient(driver: str) -> None:
    model = LateUse()
    sharded = copy.deepcopy(model)
    fully_shard(sharded, cpu_mesh())
    call = drive(sharded, driver)
    for both in (True, False):
        batch = [torch.randn(4, 4), torch.randn(4, 2)]
        model(*batch, both).backward()
        call(*local_batch(batch), both).backward()
    assert_gradients_close(sharded, model)


@distributed(2)
def test_a_replaced_gradient_is_added_to() -> None:
    sharded = shard_blocks(LanguageModel())
    (batch,) = language_batches(1, 2)
    sharded(*local_batch(batch)).backward()
    once = {name: full(each.grad) for name, each in sharded.named_parameters()}
    for parameter in sharded.parameters():
        parameter.grad = parameter.grad * 0.5
    sharded(*local_batch(batch)).backward()
    for name, parameter in sharded.named_parameters():
        torch.testing.assert_close(full(parameter.grad), 1.5 * once[name])


@distributed(2)
def test_a_gradient_of_an_earlier_step_is_put_back() -> None:
    """Where the gradients of this one are elsewhere by now, and none is its own."""
    model = LateUse()
    fully_shard(model, cpu_mesh())
    batch = [torch.randn(4, 4), torch.randn(4, 2)]
    late = model.late._parameters["weight"]
    model(*batch, True).backward()
    kept, once = late.grad, full(late.grad)
    loss = model(*batch, False)
    model.zero_grad()
    loss.backward()
    late.grad = kept
    model(*batch, True).backward()
    torch.testing.assert_close(full(late.grad), once + once, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["zero3", "zero1"])
@distributed(2)
def test_a_gradient_that_was_there_before_the_first_backward_is_added_to(mode: str) -> None:
    model, mesh = nn.Linear(4, 4), cpu_mesh()
    sharded = copy.deepcopy(model)
    fully_shard(sharded, mesh, getattr(Placements, mode)(mesh))
    x = torch.randn(4, 4)
    for each, part in ((sharded, local_batch([x])[0]), (model, x)):
        each._parameters["weight"].grad = torch.ones_like(each._parameters["weight"])
        for _ in range(2):
            each(part).square().mean().backward()
    assert_gradients_close(sharded, model)


@distributed(2)
def test_a_gradient_that_is_distributed_otherwise_is_refused_by_name() -> None:
    """On all ranks, also on one whose part has the right shape, or could be broadcast."""
    mesh, model = cpu_mesh(), nn.Linear(4, 4)
    fully_shard(model, mesh)
    model._parameters["bias"].grad = DTensor.from_local(torch.ones(4), mesh, [Replicate()])
    with pytest.raises(RuntimeError, match=r"'bias' has a \.grad .* the parameter's placements"):
        model(torch.randn(2, 4)).sum().backward()


@distributed(2)
def test_gradients_that_change_places_are_added_to() -> None:
    """Each is put where the other one lies. (Sharded ones that have other rows are refused.)"""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sharded, mesh = copy.deepcopy(model), cpu_mesh()
    fully_shard(sharded, mesh, Placements.ddp(mesh))
    x = torch.randn(4, 4)
    for each, part in ((sharded, local_batch([x])[0]), (model, x)):
        each(part).square().mean().backward()
        first, second = (layer._parameters["weight"] for layer in each)
        first.grad, second.grad = second.grad, first.grad
        each(part).square().mean().backward()
    assert_gradients_close(sharded, model)


@pytest.mark.parametrize(
    ("driver", "mode"), [("eager", "zero3"), ("aot_eager", "zero3"), ("eager", "ddp")]
)
@distributed(2)
def test_a_step_with_an_older_gradient_reaches_the_next_forward(driver: str, mode: str) -> None:
    """Zeroed in place and then not used, ``late`` still decays; nobody announces the steps, and its
    unit reduces nothing between them. Nobody counts what operators on lists write into replicated
    parameters either."""
    model = LateUse().to(torch.bfloat16)
    sharded = copy.deepcopy(model)
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32)
    mesh = cpu_mesh()
    for each in (sharded.late, sharded):
        placements = getattr(Placements, mode)(mesh)
        fully_shard(each, mesh, placements, mixed_precision_policy=policy)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.5, weight_decay=0.5, foreach=True)
    call = drive(sharded, driver)
    batch = [torch.randn(4, 4, dtype=torch.bfloat16), torch.randn(4, 2, dtype=torch.bfloat16)]
    call(*local_batch(batch), True).backward()
    for both in (False, False):
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        with torch.no_grad():
            call(*local_batch(batch), True)
        (group,) = sharded.late.fsdp_parameter_groups
        expected = group.main_weight.local.to(torch.bfloat16)
        torch.testing.assert_close(group.model_weight.local, expected, rtol=0, atol=0)
        call(*local_batch(batch), both).backward()
