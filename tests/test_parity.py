"""The same numbers in every driver, and as one process and PyTorch's FSDP2 compute them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from compile_fsdp import MixedPrecisionPolicy, fully_shard_optimizer
from tests.distributed import distributed
from tests.models import LanguageModel, language_batches
from tests.training import (
    assert_close,
    assert_same,
    drive,
    shard_blocks,
    train,
    train_fsdp2,
    train_reference,
)

STEPS = 3


def sharded_run(model: torch.nn.Module, driver: str, batches: list, **options: object):
    sharded = shard_blocks(copy.deepcopy(model))
    return train(sharded, batches, call=drive(sharded, driver), **options)


@pytest.mark.compat
@distributed(1, 2, 4)
def test_all_drivers_agree_with_one_process() -> None:
    """aot_eager is bitwise equal to eager; Inductor and one process are equal within rounding."""
    model = LanguageModel()
    batches = language_batches(STEPS, dist.get_world_size())
    reference = train_reference(model, batches)
    eager = sharded_run(model, "eager", batches)
    assert_close(eager, reference)
    assert_same(sharded_run(model, "aot_eager", batches), eager)
    if dist.get_world_size() == 2:  # the same graphs on every world, and slow to compile
        assert_close(sharded_run(model, "inductor", batches), reference)


@pytest.mark.compat
@distributed(2)
def test_eager_is_bitwise_equal_to_fsdp2() -> None:
    """On two ranks a sum has one order, and both runtimes halve it afterwards."""
    model = LanguageModel()
    batches = language_batches(STEPS, 2)
    assert_same(sharded_run(model, "eager", batches), train_fsdp2(model, batches))


@distributed(1)
def test_a_world_of_one_is_bitwise_equal_to_the_unsharded_module() -> None:
    model = LanguageModel()
    batches = language_batches(STEPS, 1)
    assert_same(sharded_run(model, "eager", batches), train_reference(model, batches))


@distributed(2)
@pytest.mark.parametrize("driver", ["eager", "aot_eager", "inductor"])
def test_bf16_compute_with_fp32_main_weights(driver: str) -> None:
    """The optimizer works on fp32, compute on bf16: as FSDP2's mixed precision does.

    The reference keeps fp32 weights, computes with their bf16 values and takes the bf16
    gradients; gradients of a rank's half batch are rounded to bf16 before they are averaged, so
    two ranks agree with it to a few bf16 roundings (2 ** -8 each).
    """
    model = LanguageModel()
    batches = language_batches(STEPS, dist.get_world_size())
    reference = _train_bf16_reference(model, batches)

    sharded = shard_blocks(
        copy.deepcopy(model).to(torch.bfloat16),
        mixed_precision_policy=MixedPrecisionPolicy(main_grads_dtype=torch.float32),
    )
    assert all(parameter.dtype is torch.float32 for parameter in sharded.parameters())
    # The same fp32 start as the reference: bf16 initial values have lost bits.
    sharded.load_state_dict(model.state_dict())
    run = train(sharded, batches, call=drive(sharded, driver), prepare=fully_shard_optimizer)
    torch.testing.assert_close(
        torch.stack(run.losses), torch.stack(reference), rtol=2**-7, atol=2**-7
    )


def _train_bf16_reference(model: torch.nn.Module, batches: list) -> list[torch.Tensor]:
    main = copy.deepcopy(model)
    compute = copy.deepcopy(model).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(main.parameters(), lr=1e-2, eps=1e-3)
    losses = []
    for batch in batches:
        loss = compute(*batch)
        loss.backward()
        losses.append(loss.detach().clone())
        for own, theirs in zip(main.parameters(), compute.parameters(), strict=True):
            own.grad, theirs.grad = theirs.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for own, theirs in zip(main.parameters(), compute.parameters(), strict=True):
                theirs.copy_(own)
    return losses
