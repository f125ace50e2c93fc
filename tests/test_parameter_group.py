"""FsdpParameterGroup alone: what it refuses, and how parameters and buffers lead to one another."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from compile_fsdp import MixedPrecisionPolicy, Placements, fully_shard, zero_missing_gradients
from compile_fsdp.runtime.parameter_group import (
    FsdpParameterGroup,
    Phase,
    get_containing_parameter_group,
    sync_model_weights_from_main_weights,
)
from tests.distributed import distributed
from tests.training import cpu_mesh, full, mean_over_ranks


def make_group(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> FsdpParameterGroup:
    shard = [Shard(0)]
    return FsdpParameterGroup(
        module, parameters, cpu_mesh(), shard, shard, shard, MixedPrecisionPolicy()
    )


@distributed(1)
def test_empty_and_mixed_groups_are_refused_by_name() -> None:
    module = nn.Linear(2, 2)
    half = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    with pytest.raises(ValueError, match="at least one parameter"):
        make_group(module, {})
    with pytest.raises(ValueError, match=r"share dtype: 'weight' has torch.float32, 'half'"):
        make_group(module, {"weight": module.weight, "half": half})
    with pytest.raises(ValueError, match=r"share requires_grad: 'weight' has True, 'frozen'"):
        make_group(module, {"weight": module.weight, "frozen": frozen})


@distributed(2)
def test_parameters_lead_to_their_group_and_back() -> None:
    module = nn.Linear(4, 4)
    original = module.weight
    fully_shard(module, cpu_mesh())
    (group,) = module.fsdp_parameter_groups
    weight = group.parameters[0]
    assert weight.fqns == ("weight",)
    assert weight.unsharded is original
    assert weight.sharded is module._parameters["weight"]
    assert get_containing_parameter_group(weight.sharded) is group
    assert get_containing_parameter_group(weight.unsharded) is group
    assert get_containing_parameter_group(nn.Parameter(torch.zeros(1))) is None
    assert group.owning_module is module


@distributed(2)
def test_a_group_that_outlives_its_module_says_so() -> None:
    module = nn.Linear(4, 4)
    group = make_group(module, dict(module.named_parameters()))
    del module
    gc.collect()
    with pytest.raises(RuntimeError, match="outlived the module that owned it"):
        _ = group.owning_module


@distributed(2)
def test_unsharding_is_counted_and_events_belong_to_phases() -> None:
    module = nn.Linear(4, 4)
    value = module.weight.detach().clone()
    fully_shard(module, cpu_mesh())
    (group,) = module.fsdp_parameter_groups
    storage = group.full_local_tensor.untyped_storage()
    version = group.parameters[0].unsharded._version
    group.acquire(Phase.FORWARD)
    group.acquire(Phase.BACKWARD)
    group.wait_for_unshard(Phase.BACKWARD)
    torch.testing.assert_close(group.parameters[0].unsharded.detach(), value, rtol=0, atol=0)
    group.drop()
    assert group.is_unsharded and storage.nbytes() > 0
    group.drop()
    assert not group.is_unsharded and storage.nbytes() == 0
    assert group.parameters[0].unsharded._version == version


@distributed(2)
def test_a_sync_writes_the_optimizers_view_and_the_next_unshard_the_rest() -> None:
    """ZeRO-1 in bf16: the step changes this rank's part, one gather brings the others'."""
    mesh = cpu_mesh()
    module = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    fully_shard(module, mesh, Placements.zero1(mesh))
    (group,) = module.fsdp_parameter_groups
    if mesh.get_rank() == 1:
        time.sleep(0.2)  # rank 0 is still sending when it syncs
    group.unshard_parameters()
    group.main_weight.local.fill_(0.5)
    sync_model_weights_from_main_weights([*module.parameters(), torch.zeros(1)])
    assert (group.post_optimizer_model_weight.local == 0.5).all()
    assert not (group.model_weight.local == 0.5).all()
    group.unshard_parameters()
    group.wait_for_unshard()
    assert (group.parameters[0].unsharded == 0.5).all()


@pytest.mark.parametrize("withheld", [False, True])
@pytest.mark.parametrize("indices", [(0, 1, 2), (0, 2), (1,)])
@distributed(2)
def test_packed_gradients_are_reduced_like_others(indices: Sequence[int], withheld: bool) -> None:
    """Also those of some parameters only: the others' part of the buffer has anything in it."""
    groups = []
    for packs in (False, True):
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2, bias=False))
        fully_shard(module, cpu_mesh())
        if withheld:
            zero_missing_gradients(module)
        (group,) = module.fsdp_parameter_groups
        groups.append(group)
        info = group.info
        torch.manual_seed(dist.get_rank())
        handed_over = []
        expected = [torch.zeros(shape) for shape in info.shapes]
        for _ in range(2):
            packed = torch.full((info.full_numel,), torch.nan)
            gradients = {}
            for index in indices:
                gradients[index] = torch.randn(info.shapes[index])
                expected[index] += gradients[index]
                start = info.offsets[index]
                packed[start : start + gradients[index].numel()] = gradients[index].flatten()
            handed_over.append((packed, packed.clone()))
            if packs:
                group.reduce_packed(packed, indices)
            else:
                group.reduce_gradients(gradients)
        if withheld:
            # A graph may still read a gradient that it has handed over.
            for packed, before in handed_over:
                assert torch.equal(packed.nan_to_num(), before.nan_to_num())
        assert withheld or group.context.has_reduced(group)
        group.context.end_of_backward()
        assert not group.context.has_reduced(group)
    plain, by_packing = ([each.sharded.grad for each in group.parameters] for group in groups)
    for one, other, total in zip(plain, by_packing, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert torch.equal(one.to_local(), other.to_local())
            torch.testing.assert_close(full(other), mean_over_ranks(total))
