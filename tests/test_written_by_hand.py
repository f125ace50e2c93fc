"""Model weights follow what writes the main weights: by hand, or an optimizer that is not prepared.

The modes are those in which a step leaves the model weight stale (ZeRO-1, ZeRO-2, HFSDP), or in
which it has another dtype.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from compile_fsdp import MixedPrecisionPolicy, Placements, fully_shard, fully_shard_optimizer
from compile_fsdp.runtime.torch_internals import writes_of
from tests.distributed import distributed, run
from tests.training import cpu_mesh, drive

MODES = ("ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp")
X = torch.linspace(-1, 1, 24).reshape(4, 6)


def pair(mode: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """A model and its sharded copy, of which rank 1 holds no row of the bias."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3).to(dtype)
    shape, names = ((1, 2), ("outer", "inner")) if mode in ("hsdp", "hfsdp") else ((2,), ("dp",))
    if mode == "hfsdp":
        shape = (2, 1)  # type: ignore[assignment]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    sharded = copy.deepcopy(model)
    fully_shard(sharded, mesh, getattr(Placements, mode)(mesh))
    return model, sharded


def scale_each(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.5)


def copy_each(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter * 4)


def write_one(model: nn.Module) -> None:
    nn.init.constant_(model.bias, 3.0)


def write_by_hand(mode: str, dtype: torch.dtype, driver: str) -> None:
    model, sharded = pair(mode, dtype)
    call = drive(sharded, driver)
    x = X.to(dtype)
    with torch.no_grad():
        torch.testing.assert_close(call(x), model(x), rtol=0, atol=0)
        for write in (scale_each, copy_each, write_one, scale_each):
            write(model)
            write(sharded)
            torch.testing.assert_close(call(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_written_by_hand_is_used(mode: str, dtype: torch.dtype, driver: str) -> None:
    run(2, write_by_hand, mode, dtype, driver)


@distributed(2)
def test_one_of_two_optimizers_of_a_group_is_not_prepared() -> None:
    """Its steps are seen too, also those of foreach operators, which autograd does not count."""
    model, sharded = pair("zero1", torch.float32)
    prepared = torch.optim.SGD([sharded.weight], lr=0.1)
    fully_shard_optimizer(prepared)
    ours = [prepared, torch.optim.SGD([sharded.bias], lr=0.2, foreach=True)]
    theirs = [torch.optim.SGD([model.weight], lr=0.1), torch.optim.SGD([model.bias], lr=0.2)]
    for _ in range(3):
        for each, optimizers in ((sharded, ours), (model, theirs)):
            each(X).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(sharded(X), model(X))


@distributed(2)
def test_a_step_that_nobody_announces_or_counts() -> None:
    """Operators on lists write replicated parameters, which torch's DTensor does not count, and
    their gradients are dropped before the next forward."""
    mesh = cpu_mesh()
    model = nn.Linear(6, 3).to(torch.bfloat16)
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32)
    fully_shard(model, mesh, Placements.ddp(mesh), policy)
    (group,) = model.fsdp_parameter_groups
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=True)
    for _ in range(2):
        model(X.to(torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(X.to(torch.bfloat16))
        assert torch.equal(group.model_weight.local, group.main_weight.local.to(torch.bfloat16))


def test_tensors_that_do_not_count_hide_no_writes_of_others() -> None:
    counted = torch.zeros(2)
    with torch.inference_mode():
        uncounted = torch.zeros(2)
    before = writes_of((counted, uncounted))
    counted.add_(1)
    assert writes_of((counted, uncounted)) == before + 1
