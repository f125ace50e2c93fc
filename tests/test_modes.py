"""Every row of the placement table, and every layout: the same numbers, the promised traffic."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate

from compile_fsdp import (
    BlockAtomic,
    Placements,
    ShardLayout,
    TensorAtomic,
    fully_shard,
    fully_shard_optimizer,
    microbatch,
)
from compile_fsdp.runtime import collectives
from tests.distributed import distributed
from tests.models import LanguageModel, language_batches
from tests.training import adamw, assert_gradients_close, drive, full, local_batch

MICROBATCHES = 2

ONE_AXIS, TWO_AXES = (2,), (2, 2)
MODES = {
    "ddp": (ONE_AXIS, {}, {"all_reduce": 1}),
    "zero1": (ONE_AXIS, {"all_gather": 1}, {"reduce_scatter": 1}),
    "zero2": (ONE_AXIS, {"all_gather": 1, "reduce_scatter": 1}, {"reduce_scatter": 1}),
    "zero3": (
        ONE_AXIS,
        {"all_gather": 2, "reduce_scatter": 1},
        {"all_gather": 2, "reduce_scatter": 1},
    ),
    "hsdp": (
        TWO_AXES,
        {"all_gather": 2, "reduce_scatter": 1},
        {"all_gather": 2, "reduce_scatter": 1, "all_reduce": 1},
    ),
    "hfsdp": (
        TWO_AXES,
        {"all_gather": 3, "reduce_scatter": 1},
        {"all_gather": 2, "reduce_scatter": 2},
    ),
}


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("dp_outer", "dp_inner")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def shard(model: LanguageModel, placements: Placements, mesh: DeviceMesh, **options: Any) -> None:
    for block in model.blocks:
        fully_shard(block, mesh, placements, **options)
    fully_shard(model, mesh, placements, **options)


def train_microbatches(model: Any, call: Any, steps: list, is_sharded: bool) -> list[Counter]:
    """Two microbatches a step; returns the collectives of ``blocks.0`` by microbatch."""
    optimizer = adamw(model)
    if is_sharded:
        fully_shard_optimizer(optimizer)
    counts = []
    for step in steps:
        for number, batch in enumerate(step):
            if not is_sharded:
                call(*batch).backward()
                continue
            with collectives.recorded() as records, microbatch(model, number == len(step) - 1):
                call(*local_batch(batch)).backward()
            counts.append(Counter(r.kind for r in records if r.label == "blocks.0"))
        optimizer.step()
        optimizer.zero_grad()
    return counts


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@pytest.mark.parametrize("mode", MODES)
@distributed(4)
def test_mode(mode: str, driver: str) -> None:
    shape, first, last = MODES[mode]
    shape = (*shape[:-1], 4 // shape[0]) if len(shape) == 2 else (4,)
    mesh = mesh_of(shape)
    steps = [language_batches(MICROBATCHES, 4) for _ in range(3)]
    model = LanguageModel()
    sharded = copy.deepcopy(model)
    shard(sharded, getattr(Placements, mode)(mesh), mesh)
    counts = train_microbatches(sharded, drive(sharded, driver), steps, is_sharded=True)
    train_microbatches(model, model, steps, is_sharded=False)
    for found, expected in zip(sharded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(found), expected.detach(), rtol=1e-4, atol=2e-6)
    assert [dict(count) for count in counts[MICROBATCHES:]] == [first, last] * 2, counts


LAYOUTS = {
    "packed": {"shard_layout": ShardLayout.PACKED},
    "blocks of 4 rows": {"placement": BlockAtomic(4)},
    "packed blocks of 4 rows": {
        "placement": BlockAtomic(4),
        "shard_layout": ShardLayout.PACKED,
    },
    "whole tensors": {"placement": TensorAtomic()},
}


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@pytest.mark.parametrize("layout", LAYOUTS)
@distributed(2)
def test_layout(layout: str, driver: str) -> None:
    options = dict(LAYOUTS[layout])
    placement = options.pop("placement", None)
    mesh = mesh_of((2,))
    placements = Placements(("dp_inner",), *[(placement,)] * 3) if placement else None
    model = LanguageModel()
    sharded = copy.deepcopy(model)
    if isinstance(placement, TensorAtomic):
        parameters = list(sharded.parameters())
        options["parameter_to_owner"] = {each: i % 2 for i, each in enumerate(parameters)}
    shard(sharded, placements, mesh, **options)
    steps = [language_batches(1, 2) for _ in range(3)]
    train_microbatches(sharded, drive(sharded, driver), steps, is_sharded=True)
    train_microbatches(model, model, steps, is_sharded=False)
    for found, expected in zip(sharded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(found), expected.detach(), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("mode", ["ddp", "zero1"])
@distributed(2)
def test_backwards_without_microbatch_lose_nothing(mode: str) -> None:
    """Several backwards under a partial gradient placement, each taken for the last."""
    mesh = mesh_of((2,))
    model = LanguageModel()
    sharded = copy.deepcopy(model)
    shard(sharded, getattr(Placements, mode)(mesh), mesh)
    for batch in language_batches(3, 2):
        sharded(*local_batch(batch)).backward()
        model(*batch).backward()
    for found, expected in zip(sharded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(found.grad), expected.grad)
    assert dist.get_world_size() == 2


@pytest.mark.parametrize("mode", ["ddp", "zero1"])
@distributed(2)
def test_a_dropped_gradient_does_not_come_back(mode: str) -> None:
    """Two optimizers, of which one zeroes its parameters' gradients between two backwards."""
    mesh = mesh_of((2,))
    model = LanguageModel()
    sharded = copy.deepcopy(model)
    shard(sharded, getattr(Placements, mode)(mesh), mesh)
    for batch in language_batches(2, 2):
        for each in (sharded, model):
            each.embedding._parameters["weight"].grad = None
        sharded(*local_batch(batch)).backward()
        model(*batch).backward()
    assert_gradients_close(sharded, model)


@distributed(2)
def test_zero1_with_one_block_compiled_below_an_eager_root() -> None:
    """Eager and compiled parts of one backward: every gradient is finished."""
    mesh = mesh_of((2,))
    model = LanguageModel()
    sharded = copy.deepcopy(model)
    shard(sharded, Placements.zero1(mesh), mesh)
    sharded.blocks[0].compile(backend="compile_fsdp", options={"inner": "aot_eager"})
    steps = [language_batches(1, 2) for _ in range(3)]
    train_microbatches(sharded, sharded, steps, is_sharded=True)
    train_microbatches(model, model, steps, is_sharded=False)
    for found, expected in zip(sharded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(found), expected.detach(), rtol=1e-4, atol=2e-6)
    sharded(*local_batch(steps[0][0])).backward()
    for name, parameter in sharded.named_parameters():
        assert parameter.grad.placements == parameter.placements, name


@distributed(2)
def test_illegal_placements_are_refused_by_axis() -> None:
    with pytest.raises(ValueError, match=r"'dp_inner' is R but the parameter placement"):
        Placements(("dp_inner",), (TensorAtomic(),), (Partial("avg"),), (Replicate(),))
