"""What NCCL and torch are asked for beside collectives, on one GPU: groups are made by splitting
the mesh's communicator, and symmetric memory comes from torch's pool and can be registered."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from compile_fsdp.runtime.process_groups import REDUCE_INNER, _new_group, backend_of, connect
from compile_fsdp.runtime.symmetric_memory import explain_unsupported
from compile_fsdp.runtime.torch_internals import SymmetricMemoryOfTorch
from tests.gpu.support import DEVICE, mesh_of

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.cuda_only]


def test_a_lanes_communicator_is_split_from_the_mesh() -> None:
    axis = mesh_of().get_group()
    assert backend_of(axis, "cuda") == "nccl"
    assert axis.bound_device_id == DEVICE
    own = _new_group(axis, "nccl", REDUCE_INNER, "dp")
    assert own is not axis
    assert own.group_desc == "compile_fsdp reduce_inner dp"
    assert own.bound_device_id == DEVICE
    connect([own], DEVICE)
    value = torch.ones(4, device=DEVICE)
    dist.all_reduce(value, group=own)
    assert value.tolist() == [1.0] * 4
    dist.destroy_process_group(own)


def test_symmetric_memory_is_pooled_and_registered() -> None:
    group = mesh_of().get_group()
    reason = explain_unsupported(DEVICE, group)
    if reason is not None:
        pytest.skip(f"no symmetric memory: {reason}")
    memory = SymmetricMemoryOfTorch()
    with memory.allocating(DEVICE):
        staged = torch.zeros(1 << 20, device=DEVICE)
    plain = torch.zeros(1 << 20, device=DEVICE)
    assert memory.is_symmetric(staged)
    assert not memory.is_symmetric(plain)
    # Memory that shrinks and grows, as that of gathered buffers, stays in the pool.
    storage = staged.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    with memory.allocating(DEVICE):
        storage.resize_(size)
    assert memory.is_symmetric(staged)
    dist.all_reduce(torch.zeros(1, device=DEVICE), group=group)  # the communicator is there
    for _ in range(2):
        memory.rendezvous(staged, group)
    dist.all_reduce(staged.fill_(2.0), group=group)
    assert staged[-1].item() == 2.0
