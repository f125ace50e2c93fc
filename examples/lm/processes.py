"""The processes of a run: one, or as many as torchrun started."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lm.errors import InputError

T = TypeVar("T")

_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class World:
    """This process among the others. `control` is a gloo group for small CPU messages."""

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup

    def collectively(self, action: Callable[[], T]) -> T:
        """The action's result; an InputError on any rank is raised on every rank.

        So all of them stop together, and none waits for one that has left.
        """
        outcome: T | InputError
        try:
            outcome = action()
        except InputError as error:
            outcome = error
        own = str(outcome) if isinstance(outcome, InputError) else None
        for rank, message in enumerate(self.gather(own)):
            if message is not None:
                raise InputError(message if rank == 0 else f"rank {rank}: {message}")
        assert not isinstance(outcome, InputError)
        return outcome

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in rank order, on every rank."""
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def barrier(self) -> None:
        dist.barrier(group=self.control)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise mean over the ranks of a tensor on this rank's device."""
        total = values.clone()
        dist.all_reduce(total)
        return total / self.size

    def mesh(self) -> DeviceMesh:
        return init_device_mesh(self.device.type, (self.size,), mesh_dim_names=("dp",))


def join_world() -> World:
    """Connect to the other processes: NCCL where every process has a CUDA device, else gloo."""
    device = torch.device("cpu")
    if _has_cuda() and not _too_few_devices():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=_TIMEOUT)
    else:
        dist.init_process_group(backend, init_method="tcp://localhost:0", rank=0, world_size=1)
    control = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo")
    assert control is not None
    return World(dist.get_rank(), dist.get_world_size(), device, control)


def check_devices() -> None:
    """Raises InputError where processes would have to share a CUDA device."""
    if _has_cuda() and _too_few_devices():
        raise InputError(
            f"{os.environ['LOCAL_WORLD_SIZE']} processes on this machine, but only"
            f" {torch.cuda.device_count()} CUDA devices; start fewer with --nproc-per-node, or"
            " set CUDA_VISIBLE_DEVICES= to train on the CPU"
        )


def _has_cuda() -> bool:
    return torch.cuda.is_available() and dist.is_nccl_available()


def _too_few_devices() -> bool:
    return torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
