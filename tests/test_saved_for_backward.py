"""No unsharded parameter is kept between forward and backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed import distributed
from tests.models import LanguageModel, language_batches
from tests.training import drive, local_batch, shard_blocks

WIDTH = 32  # so large that one unsharded weight outweighs all activations of a (2, 5) batch


def saved_bytes(call: Any, batch: Any, ignore: set[int]) -> int:
    """Bytes of the distinct storages that autograd holds after a forward."""
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if id(tensor) not in ignore and storage.data_ptr() not in ignore:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = call(*batch)
    del loss
    return sum(storages.values())


def parameter_storages(model: nn.Module) -> set[int]:
    return {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}


@pytest.mark.compat
@pytest.mark.parametrize("driver", ["aot_eager", "inductor"])
@distributed(2)
def test_compiled_forward_saves_no_more_than_an_unsharded_one(driver: str) -> None:
    model = LanguageModel(width=WIDTH)
    sharded = shard_blocks(copy.deepcopy(model))
    batch = local_batch(language_batches(1, 2)[0])
    flat = {
        group.flat_leaf.untyped_storage().data_ptr()
        for group in sharded._fsdp_unit.context.groups()
    }
    plain = torch.compile(model, backend=driver)
    found = saved_bytes(drive(sharded, driver), batch, flat)
    expected = saved_bytes(plain, batch, parameter_storages(model))
    smallest_weight = WIDTH * WIDTH * 4
    assert expected > 0
    assert found < expected + smallest_weight, (found, expected)


@distributed(2)
def test_eager_keeps_parameters_without_their_memory() -> None:
    """Autograd holds views of the gathered buffers, whose storage is gone after the forward."""
    sharded = shard_blocks(LanguageModel(width=WIDTH))
    batch = local_batch(language_batches(1, 2)[0])
    loss = sharded(*batch)
    for group in sharded._fsdp_unit.context.groups():
        assert group.full_local_tensor.untyped_storage().nbytes() == 0, group.label
    loss.backward()
    for group in sharded._fsdp_unit.context.groups():
        assert group.full_local_tensor.untyped_storage().nbytes() == 0, group.label
