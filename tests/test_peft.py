"""LoRA as users apply it, by ``peft``: before and after ``fully_shard`` (case 6)."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from compile_fsdp import fully_shard
from compile_fsdp.runtime import collectives
from tests.distributed import distributed
from tests.models import LanguageModel, language_batches
from tests.training import assert_gradients_close, drive, full, local_batch

DRIVERS = ["eager", "aot_eager"]


def lora(model: nn.Module) -> Any:
    """``model`` with adapters whose second factor is not zero, so that both get gradients."""
    config = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def fsdp_mesh() -> DeviceMesh:
    """``peft`` takes DTensors on a mesh axis of another name for tensor parallelism."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))


def shard(model: Any) -> None:
    """Blocks first; what ``peft`` wraps around the model is the root."""
    mesh = fsdp_mesh()
    for block in model.get_submodule(prefix_of(model) + "blocks").children():
        fully_shard(block, mesh)
    fully_shard(model, mesh)


def prefix_of(model: nn.Module) -> str:
    return "base_model.model." if isinstance(model, peft.PeftModel) else ""


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def train(model: nn.Module, call: Any, batches: Any, is_sharded: bool) -> None:
    optimizer = torch.optim.AdamW(trainable(model).values(), lr=1e-2, eps=1e-3)
    for batch in batches:
        call(*(local_batch(batch) if is_sharded else batch)).backward()
        optimizer.step()
        optimizer.zero_grad()


def check_training(sharded: Any, reference: Any, driver: str) -> None:
    """Every adapter and nothing else gets a gradient and is reduced; three steps agree."""
    call = drive(sharded, driver)
    batches = language_batches(3, 2)
    with collectives.recorded() as records:
        call(*local_batch(batches[0])).backward()
    reference(*batches[0]).backward()
    assert_gradients_close(sharded, reference)
    for name, each in sharded.named_parameters():
        assert (each.grad is not None) == ("lora_" in name), name
    reductions = [record.label for record in records if record.kind == "reduce_scatter"]
    assert len(reductions) == 2, reductions  # one for the adapters of each block
    for model in (sharded, reference):
        model.zero_grad()
    train(sharded, call, batches, is_sharded=True)
    train(reference, reference, batches, is_sharded=False)
    expected = dict(reference.named_parameters())
    for name, each in sharded.named_parameters():
        torch.testing.assert_close(full(each), expected[name].detach(), rtol=1e-4, atol=2e-6)


def check_saved_adapters(sharded: Any, reference: Any) -> None:
    """``get_peft_model_state_dict`` has the adapters, clean names, right values."""
    saved = peft.get_peft_model_state_dict(sharded)
    expected = peft.get_peft_model_state_dict(reference)
    assert saved.keys() == expected.keys()
    for name, value in saved.items():
        torch.testing.assert_close(full(value), expected[name], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("driver", DRIVERS)
@distributed(2)
def test_adapters_before_sharding(driver: str) -> None:
    reference = lora(LanguageModel())
    sharded = copy.deepcopy(reference)
    shard(sharded)
    check_training(sharded, reference, driver)
    check_saved_adapters(sharded, reference)


@pytest.mark.parametrize("driver", DRIVERS)
@distributed(2)
def test_adapters_after_sharding(driver: str) -> None:
    """Without ``fully_shard`` again an error by name; with it as if adapters had come first."""
    base = LanguageModel()
    torch.manual_seed(5)
    reference = lora(copy.deepcopy(base))
    shard(base)
    torch.manual_seed(5)
    sharded = lora(base)
    (batch, *_) = language_batches(1, 2)
    with pytest.raises(Exception, match=r"'\S*lora_A\S*' is trainable and was added after"):
        drive(sharded, driver)(*local_batch(batch))
    torch.compiler.reset()
    for block in base.blocks.children():
        fully_shard(block, fsdp_mesh())
    with pytest.raises(ValueError, match="sharded already and has no new parameters"):
        fully_shard(base, fsdp_mesh())
    check_training(sharded, reference, driver)
    check_saved_adapters(sharded, reference)


@distributed(2)
def test_adapters_that_are_fsdp_modules_of_their_own() -> None:
    base = LanguageModel()
    torch.manual_seed(5)
    reference = lora(copy.deepcopy(base))
    shard(base)
    torch.manual_seed(5)
    sharded = lora(base)
    for name, module in list(sharded.named_modules()):
        if name.endswith(".default") and any(True for _ in module.parameters()):
            fully_shard(module, fsdp_mesh())
    fully_shard(base, fsdp_mesh())
    call = sharded
    (batch, *_) = language_batches(1, 2)
    call(*local_batch(batch)).backward()
    reference(*batch).backward()
    assert_gradients_close(sharded, reference)


@distributed(2)
def test_merging_is_right_or_an_error() -> None:
    reference = lora(LanguageModel())
    sharded = copy.deepcopy(reference)
    shard(sharded)
    (batch,) = language_batches(1, 2)
    with torch.no_grad():
        expected = reference(*batch)
    sharded.merge_adapter()
    with torch.no_grad():
        merged = sharded(*batch)
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=2e-6)
    sharded.unmerge_adapter()
    plain = sharded.unload()
    del reference
    with torch.no_grad():
        assert torch.isfinite(plain(*batch))
