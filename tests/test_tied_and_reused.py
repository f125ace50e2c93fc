"""Parameters and modules that are used more than once (cases 1, 2 and 10)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from compile_fsdp import fully_shard
from compile_fsdp.runtime import collectives
from tests.distributed import distributed
from tests.models import VOCABULARY, WIDTH, Block, LanguageModel, language_batches
from tests.training import (
    DRIVERS,
    assert_close,
    assert_gradients_close,
    cpu_mesh,
    drive,
    local_batch,
    shard_blocks,
    train,
    train_reference,
)


@pytest.mark.compat
@pytest.mark.parametrize("driver", DRIVERS)
@distributed(2)
def test_a_tied_head_has_one_shard_and_summed_gradients(driver: str) -> None:
    model = LanguageModel(tied=True)
    batches = language_batches(3, 2)
    sharded = shard_blocks(copy.deepcopy(model))
    assert sharded.head._parameters["weight"] is sharded.embedding._parameters["weight"]
    tied = [
        parameter.fqns
        for group in sharded.fsdp_parameter_groups
        for parameter in group.parameters
        if len(parameter.fqns) > 1
    ]
    assert tied == [("embedding.weight", "head.weight")]
    run = train(sharded, batches, call=drive(sharded, driver))
    assert_close(run, train_reference(model, batches))

    sharded.load_state_dict(sharded.state_dict())
    assert sharded.head._parameters["weight"] is sharded.embedding._parameters["weight"]


class OneBlockThreeTimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for _ in range(3):
            x = self.blocks[0](x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@distributed(2)
def test_a_block_called_three_times_is_reduced_once(driver: str) -> None:
    model = OneBlockThreeTimes()
    batches = language_batches(3, 2)
    sharded = shard_blocks(copy.deepcopy(model))
    call = drive(sharded, driver)
    call(*local_batch(batches[0])).backward()
    sharded.zero_grad()
    with collectives.recorded() as records:
        call(*local_batch(batches[0])).backward()
    reductions = [record.kind for record in records].count("reduce_scatter")
    assert reductions == 2, records  # the root's group and the block's
    sharded.zero_grad()
    assert_close(train(sharded, batches, call=call), train_reference(model, batches))


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@distributed(2)
def test_two_forwards_then_two_backwards(driver: str) -> None:
    model = LanguageModel()
    first, second = language_batches(2, 2)
    sharded = shard_blocks(copy.deepcopy(model))
    call = drive(sharded, driver)
    losses = [call(*local_batch(batch)) for batch in (first, second)]
    for loss in losses:
        loss.backward()
    for batch in (first, second):
        model(*batch).backward()
    assert_gradients_close(sharded, model)


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@distributed(2)
def test_backward_twice_through_a_retained_graph(driver: str) -> None:
    model = LanguageModel()
    (batch,) = language_batches(1, 2)
    sharded = shard_blocks(copy.deepcopy(model))
    loss = drive(sharded, driver)(*local_batch(batch))
    loss.backward(retain_graph=True)
    loss.backward()
    expected_loss = model(*batch)
    expected_loss.backward(retain_graph=True)
    expected_loss.backward()
    assert_gradients_close(sharded, model)


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@distributed(2)
def test_gradients_of_inputs_only_leave_parameters_alone(driver: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    sharded = copy.deepcopy(model)
    fully_shard(sharded, cpu_mesh())
    call = drive(sharded, driver)
    x = torch.randn(3, 4, requires_grad=True)
    (found,) = torch.autograd.grad(call(x).sum(), x)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(found, expected)
    assert all(parameter.grad is None for parameter in sharded.parameters())
    assert all(not group.is_unsharded for group in sharded.fsdp_parameter_groups)
    call(x).sum().backward()
    assert all(parameter.grad is not None for parameter in sharded.parameters())


@distributed(2)
def test_a_parameter_shared_by_two_fsdp_modules_is_refused_by_name() -> None:
    model = LanguageModel(tied=True)
    mesh = cpu_mesh()
    fully_shard(model.embedding, mesh)
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=r"'head\.weight' is already owned") as error:
        fully_shard(model, mesh)
    assert "common parent" in str(error.value)
    assert dict(model.named_parameters()) == before
    assert type(model) is LanguageModel
    assert dist.get_world_size() == 2


class ReadElsewhere(nn.Module):
    """Weights read outside their owner's forward, detached, and returned."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4, bias=False), Prompt()])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weight = self.blocks[0].weight
        hidden = torch.tanh(F.linear(F.linear(x, weight.detach()), weight))
        return F.mse_loss(hidden + self.blocks[1](), y)


class Prompt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(4))

    def forward(self) -> torch.Tensor:
        return self.prompt


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@distributed(2)
def test_weights_read_outside_their_module_detached_and_returned(driver: str) -> None:
    model = ReadElsewhere()
    batches = [(torch.randn(6, 4), torch.randn(6, 4)) for _ in range(3)]
    sharded = shard_blocks(copy.deepcopy(model))
    run = train(sharded, batches, call=drive(sharded, driver))
    assert_close(run, train_reference(model, batches))
    assert not any(group.is_unsharded for group in sharded._fsdp_unit.context.groups())


@distributed(2)
def test_gradients_of_gradients_are_refused_in_eager() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    fully_shard(model, cpu_mesh())
    x = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph=True through FSDP module '<root>'"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


class KeepsItsLoss(nn.Module):
    """A router whose auxiliary loss is kept on the module instead of being returned."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.auxiliary = [self.other((x * self.linear.weight[0]).square()).sum()]
        return x.detach()


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@distributed(2)
def test_a_loss_that_is_kept_on_a_module_has_its_weights_in_backward(driver: str) -> None:
    model = KeepsItsLoss()
    sharded = copy.deepcopy(model)
    fully_shard(sharded, cpu_mesh())
    call = drive(sharded, driver)
    for _ in range(2):
        x = torch.randn(2, 4)
        call(x)
        model(x)
        for each in (sharded, model):
            each.linear.auxiliary[0].backward()
    assert_gradients_close(sharded, model)
    assert not any(group.is_unsharded for group in sharded.fsdp_parameter_groups)


class WritesItsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:
        losses.append((x * self.linear.weight[0]).square().sum())
        return x.detach()


@distributed(2)
def test_a_loss_that_is_no_output_is_an_error_by_name_and_not_garbage() -> None:
    """The gradient of the weight reads only the input, so torch itself notices nothing."""
    model, losses = WritesItsLoss(), []
    fully_shard(model, cpu_mesh())
    model(torch.randn(2, 4), losses)
    with pytest.raises(RuntimeError, match=r"'linear\.weight' got a gradient although nothing"):
        losses[0].backward()


@distributed(2)
def test_the_same_graph_again_after_an_exception_in_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sharded = copy.deepcopy(model)
    fully_shard(sharded, cpu_mesh())
    x = torch.randn(3, 4)
    fail = [True]

    def raise_once(gradient: torch.Tensor) -> None:
        if fail and fail.pop():
            raise ArithmeticError("once")

    handle = sharded[0].register_forward_hook(
        lambda module, args, output: output.register_hook(raise_once) and None
    )
    loss = sharded(x).sum()
    with pytest.raises(ArithmeticError):
        loss.backward(retain_graph=True)
    handle.remove()
    loss.backward()
    model(x).sum().backward()
    assert_gradients_close(sharded, model)
