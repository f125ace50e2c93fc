"""Deep copies of sharded modules: equal at first, and then models of their own."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from compile_fsdp import MixedPrecisionPolicy, Placements, fully_shard, fully_shard_optimizer
from tests.distributed import distributed
from tests.models import LanguageModel, language_batches
from tests.training import (
    adamw,
    assert_same,
    cpu_mesh,
    drive,
    full,
    local_batch,
    shard_blocks,
    train,
)


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(parameter) for name, parameter in model.named_parameters()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@distributed(2)
def test_a_copy_trains_like_its_original_and_without_it(driver: str) -> None:
    batches = language_batches(3, 2)
    original = shard_blocks(LanguageModel(tied=True))
    call = drive(original, driver)
    train(original, batches, call=call)
    before = parameters(original)
    copied = copy.deepcopy(original)
    assert type(copied) is type(original)
    assert_equal(parameters(copied), before)

    run = train(copied, batches, call=drive(copied, driver))
    assert_equal(parameters(original), before)
    assert copied.head._parameters["weight"] is copied.embedding._parameters["weight"]
    assert_same(train(original, batches, call=call), run)
    groups = [*original._fsdp_unit.context.groups(), *copied._fsdp_unit.context.groups()]
    assert len({group.name for group in groups}) == 6
    assert not any(group.is_unsharded for group in groups)


@distributed(2)
def test_a_copy_shares_no_memory_and_outlives_its_original() -> None:
    original = shard_blocks(LanguageModel())
    copied = copy.deepcopy(original)
    before = parameters(copied)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.zero_()
    assert_equal(parameters(copied), before)
    del original
    copied(*local_batch(language_batches(1, 2)[0])).backward()
    assert all(parameter.grad is not None for parameter in copied.parameters())


@distributed(2)
def test_what_a_copy_keeps() -> None:
    """Flags, attributes, buffers, dtypes, and a sharded block without its parent."""
    model = LanguageModel().to(torch.bfloat16)
    model.register_buffer("steps", torch.tensor(3))
    model.blocks[0].norm.requires_grad_(False)
    model.head.weight.decay = 0.1
    shard_blocks(model, mixed_precision_policy=MixedPrecisionPolicy())
    model.head._parameters["weight"].requires_grad_(False)
    copied = copy.deepcopy(model)
    assert copied.steps == 3 and copied.steps is not model.steps
    assert copied.head._parameters["weight"].decay == 0.1
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert {name: p.requires_grad for name, p in copied.named_parameters()} == flags
    assert_equal(parameters(copied), parameters(model))
    batch = local_batch(language_batches(1, 2)[0])
    assert torch.equal(copied(*batch), model(*batch))
    block = copy.deepcopy(model.blocks[1])
    x = torch.randn(2, 12, dtype=torch.bfloat16)
    assert torch.equal(block(x), model.blocks[1](x))


@distributed(4)
def test_copies_on_two_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = shard_blocks(LanguageModel(), mesh, placements=Placements.hfsdp(mesh))
    batches = language_batches(2, 4)
    copied = copy.deepcopy(model)
    assert_same(train(model, batches), train(copied, batches))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@distributed(2)
def test_an_average_of_the_weights(dtype: torch.dtype) -> None:
    """``AveragedModel`` copies the model and then writes into the copy's parameters."""
    model = shard_blocks(LanguageModel().to(dtype))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = adamw(model)
    fully_shard_optimizer(optimizer)
    expected = parameters(model)
    batch = local_batch(language_batches(1, 2)[0])
    for step in range(3):
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        now = parameters(model)
        for name in expected:
            expected[name] = now[name] if step == 0 else torch.lerp(expected[name], now[name], 0.5)
        with torch.no_grad():
            found = average(*batch)
        plain = LanguageModel().to(dtype)
        plain.load_state_dict(expected)
        assert torch.equal(found, plain(*batch)), step
    assert_equal(parameters(average.module), expected)


@distributed(1)
def test_what_cannot_be_copied() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model, cpu_mesh())
    with pytest.raises(RuntimeError, match="an FSDP module above it owns its parameters"):
        copy.deepcopy(model[0])
    with pytest.raises(RuntimeError, match="cannot be pickled"):
        pickle.dumps(model)
    assert dist.get_world_size() == 1
