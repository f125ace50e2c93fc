"""Optimizers that run on each rank's part of the parameters: Muon, 8-bit state (case 32)."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from compile_fsdp import BlockAtomic, Placements, fully_shard, fully_shard_optimizer
from tests.distributed import distributed, run
from tests.sharded_models import WAYS, batches, pair
from tests.training import full


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.ndim == 2]


def others(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.ndim != 2]


def train(model: nn.Module, optimizers: list[optim.Optimizer]) -> None:
    for batch in batches(3):
        model(*batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@distributed(2)
def test_muon_on_whole_tensors_equals_one_process() -> None:
    model, sharded = pair("tensors")
    runs = []
    for each, options in ((model, None), (sharded, {"local": "tensor"})):
        muon = optim.Muon(matrices(each), lr=0.05)
        adamw = optim.AdamW(others(each), lr=0.05)
        if options is not None:
            fully_shard_optimizer(muon, **options)
            fully_shard_optimizer(adamw)
        train(each, [muon, adamw])
        runs.append(muon)
    for whole, part in zip(model.parameters(), sharded.parameters(), strict=True):
        assert torch.equal(full(part), whole.detach())
    for whole, part in zip(matrices(model), matrices(sharded), strict=True):
        buffer = runs[1].state[part]["momentum_buffer"]
        assert type(buffer) is type(part)
        assert torch.equal(full(buffer), runs[0].state[whole]["momentum_buffer"])


def check_refusals() -> None:
    _, sharded = pair("packed")
    muon = optim.Muon(matrices(sharded), lr=0.05)
    with pytest.raises(ValueError, match=r"'\w+\.weight' of shape .* TensorAtomic\(\)"):
        fully_shard_optimizer(muon, local="tensor")
    with pytest.raises(ValueError, match="expected no cut within 4096 elements"):
        fully_shard_optimizer(muon, local=4096)
    for wrong in (0, -1, True, "block", 2.5):
        with pytest.raises(ValueError, match="expected a number of elements, 'row' or 'tensor'"):
            fully_shard_optimizer(muon, local=wrong)
    # Without `local` its matrix products would need a view of other ranks' rows.
    fully_shard_optimizer(muon)
    sharded(*batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match="would have to be a view of rows"):
        muon.step()


def test_a_unit_that_is_split_is_refused() -> None:
    run(2, check_refusals)


@pytest.mark.parametrize("way", ["packed", "hfsdp", "zero2"])
def test_local_steps_equal_steps_on_dtensors(way: str) -> None:
    run(WAYS[way][0], check_local_steps, way)


def check_local_steps(way: str) -> None:
    _, first = pair(way)
    torch.manual_seed(1234)
    _, second = pair(way)
    second.load_state_dict(first.state_dict())
    optimizers = []
    for model, options in ((first, {}), (second, {"local": "row"})):
        optimizer = optim.AdamW(model.parameters(), lr=0.05)
        fully_shard_optimizer(optimizer, **options)
        train(model, [optimizer])
        optimizers.append(optimizer)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(full(one), full(other))
        states = [optimizers[0].state[one], optimizers[1].state[other]]
        assert states[0].keys() == states[1].keys()
        for key, value in states[0].items():
            assert isinstance(states[1][key], DTensor) == isinstance(value, DTensor)
            assert torch.equal(full(value), full(states[1][key]))


class Failing(optim.SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise KeyError("out of memory, say")
        return super().step(closure)


@distributed(2)
def test_a_step_that_raises_can_be_retried() -> None:
    model, sharded = pair("packed")
    theirs, ours = (Failing(each.parameters(), lr=0.1) for each in (model, sharded))
    fully_shard_optimizer(ours, local="row")
    (batch,) = batches(1)
    model(*batch).backward()
    sharded(*batch).backward()
    ours.fails = True
    with pytest.raises(KeyError):
        ours.step()
    ours.fails = False
    ours.step()
    theirs.step()
    assert ours.param_groups[0]["params"] == list(sharded.parameters())
    for whole, part in zip(model.parameters(), sharded.parameters(), strict=True):
        assert torch.equal(full(part), whole.detach())


def wide_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
@distributed(2)
def test_block_state_equals_one_process(name: str) -> None:
    """torchao's blocks are 256 (128 in 4 bits) consecutive elements: 4 rows or 1 row here."""
    torchao = importlib.import_module("torchao.optim")
    model = wide_model()
    sharded = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    fully_shard(sharded, mesh, Placements(("dp",), *[(BlockAtomic(4),)] * 3))
    optimizers = [
        getattr(torchao, name)(matrices(each), lr=0.01, block_size=256) for each in (model, sharded)
    ]
    fully_shard_optimizer(optimizers[1], local=256)
    generator = torch.Generator().manual_seed(3)
    # It compiles every parameter's step; the arithmetic is the same without.
    with torch.compiler.set_stance("force_eager"):
        for _ in range(3):
            x = torch.randn(8, 64, generator=generator)
            for each, optimizer in zip((model, sharded), optimizers, strict=True):
                each(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    for whole, part in zip(matrices(model), matrices(sharded), strict=True):
        assert torch.equal(full(part), whole.detach())
        kind = type(optimizers[1].state[part]["exp_avg"]).__name__
        # It leaves small pieces, and none at all, as they are.
        assert kind.startswith("OptimState") == (part.to_local().numel() >= 4096)
