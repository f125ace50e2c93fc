"""Evaluation between training steps (case 18)."""

from __future__ import annotations

import copy

import pytest
import torch

from compile_fsdp import fully_shard_optimizer
from tests.distributed import distributed
from tests.models import LanguageModel, language_batches
from tests.training import (
    TOLERANCE,
    adamw,
    assert_gradients_close,
    drive,
    full,
    local_batch,
    mean_over_ranks,
    shard_blocks,
)


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@distributed(2)
def test_evaluation_between_steps_frees_parameters_and_changes_nothing(
    driver: str, mode: type
) -> None:
    model = LanguageModel()
    batches = language_batches(3, 2)
    plain, evaluated = shard_blocks(copy.deepcopy(model)), shard_blocks(copy.deepcopy(model))
    results = []
    for sharded in (plain, evaluated):
        call, optimizer = drive(sharded, driver), adamw(sharded)
        for batch in batches:
            if sharded is evaluated:
                with mode():
                    before = mean_over_ranks(call(*local_batch(batch)))
                assert not any(group.is_unsharded for group in every_group(sharded))
                sharded.state_dict()
            loss = call(*local_batch(batch))
            if sharded is evaluated:
                torch.testing.assert_close(before, mean_over_ranks(loss))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([full(parameter) for parameter in sharded.parameters()])
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)


@distributed(2)
def test_evaluation_first_then_training() -> None:
    """Nothing the runtime keeps may be born an inference tensor."""
    sharded = shard_blocks(LanguageModel())
    (batch,) = language_batches(1, 2)
    with torch.inference_mode():
        sharded(*local_batch(batch))
    sharded(*local_batch(batch)).backward()
    assert all(parameter.grad is not None for parameter in sharded.parameters())


@pytest.mark.parametrize("born_in_it", [False, True])
@distributed(2)
def test_a_model_that_is_sharded_in_inference_mode_can_be_trained(born_in_it: bool) -> None:
    model = LanguageModel()
    sharded = copy.deepcopy(model)
    (batch,) = language_batches(1, 2)
    with torch.inference_mode():
        if born_in_it:
            for each in sharded.modules():
                for name, parameter in list(each.named_parameters(recurse=False)):
                    setattr(each, name, torch.nn.Parameter(parameter.clone()))
        shard_blocks(sharded)
        before = mean_over_ranks(sharded(*local_batch(batch)))
    torch.testing.assert_close(before, model(*batch).detach())
    sharded(*local_batch(batch)).backward()
    model(*batch).backward()
    assert_gradients_close(sharded, model)


@distributed(2)
def test_steps_in_inference_mode() -> None:
    model = LanguageModel()
    sharded = shard_blocks(copy.deepcopy(model))
    optimizers = [adamw(each) for each in (sharded, model)]
    fully_shard_optimizer(optimizers[0])
    for batch in language_batches(3, 2):
        sharded(*local_batch(batch)).backward()
        model(*batch).backward()
        with torch.inference_mode():
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for found, expected in zip(sharded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(found), expected.detach(), **TOLERANCE)


def every_group(model: torch.nn.Module) -> list:
    return list(model._fsdp_unit.context.groups())
