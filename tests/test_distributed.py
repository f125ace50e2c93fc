"""The harness of `tests.distributed` itself: worlds, values, and every way to fail."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.distributed import RankFailure, distributed, run


def rank_and_size(offset: int) -> tuple[int, int, torch.Tensor]:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_returns_a_value(world_size: int) -> None:
    results = run(world_size, rank_and_size, 10)
    assert [result[:2] for result in results] == [(rank, world_size) for rank in range(world_size)]
    expected = float(sum(10 + rank for rank in range(world_size)))
    assert all(result[2].item() == expected for result in results)


@pytest.mark.parametrize("value", [5, 6])
@distributed(1, 2)
def test_decorated_bodies_take_parameters(value: int) -> None:
    assert value in (5, 6)
    assert dist.is_initialized()


def process_and_state() -> tuple[int, float, torch.dtype, bool]:
    state = (os.getpid(), torch.rand(()).item(), torch.get_default_dtype(), torch.is_grad_enabled())
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    return state


def test_processes_live_on_but_not_their_state() -> None:
    first, second = run(2, process_and_state), run(2, process_and_state)
    assert first == second
    assert all(state[2:] == (torch.float32, True) for state in second)


def full_of_sum() -> torch.Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    # Propagated specs come from DTensor's cache; one that outlived its world would be used here.
    total = tensor + tensor
    assert isinstance(total, DTensor)
    return total.full_tensor()


def test_dtensor_caches_do_not_outlive_a_world() -> None:
    for world_size in (2, 4, 2):
        for full in run(world_size, full_of_sum):
            assert torch.equal(full, torch.full((4, 2), 2.0))


def fail_on(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "raises":
            raise KeyError("the reason")
        if how == "dies":
            os._exit(7)
        time.sleep(60)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "expected"),
    [("raises", "KeyError: 'the reason'"), ("dies", "code 7"), ("hangs", "in fail_on")],
)
def test_a_failing_rank_is_named(how: str, expected: str) -> None:
    run(2, rank_and_size, 0)  # the processes are up: the time limit is for the body alone
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"(?s)fail_on: rank . of 2 .*---- rank 1") as failure:
        run(2, fail_on, 1, how, timeout=4.0 if how == "hangs" else 60.0)
    assert expected in str(failure.value)
    assert time.monotonic() - start < 40.0
    # The world after a failed one is sound.
    assert len(run(2, rank_and_size, 0)) == 2
