"""Symmetric memory: buffers that NCCL's ranks read and write in each other's memory directly.

A collective whose buffers are *windows* of its communicator needs no staging copies inside of NCCL:
symmetric kernels, or copy engines, move the data over NVLink. torch has an allocator of such memory
behind a memory pool, and a call that makes a window of an allocation, for one process group:

    allocate   within `StagingPool.allocating`: gathered buffers, packed and reduced gradients, the
               arena, and the shards that are sent
    register   before a collective starts: `register` makes windows of its buffers, once for each
               allocation and process group. Every rank of the group must do so at the same point,
               and the host waits; later steps find the memory, and the window, again
    start      the collective is the same call as ever: NCCL sees windows and takes its own way

Ranks allocate alike because they run one program on buffers of one size: groups whose segments
differ in size take the plain path. That registration happens at a point of the program and not
inside of the allocator is on purpose: the pools of ``ProcessGroupNCCL.register_mem_pool`` register
new memory while it is allocated, which torch has found to hang where ranks' allocators decide
differently (pytorch pull request 192112), and has given up since.

Only torch can tell whether a device can do it: the first use on a process group tries, and the
ranks agree on the outcome.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .layout import GlobalLayout
from .process_groups import backend_of, connect
from .torch_internals import SymmetricMemoryOfTorch, is_fake_group, nccl_version

__all__ = [
    "IF_AVAILABLE",
    "StagingPool",
    "explain_unsupported",
    "register",
    "staging_pool",
]

IF_AVAILABLE: Literal["if_available"] = "if_available"
"""The choice of ``use_symm_mem`` that takes the plain path where the other cannot be had."""

_OLDEST_NCCL = (2, 27)

_log = logging.getLogger(__name__)


class SymmetricMemoryApi(Protocol):
    """What is asked of torch."""

    def allocating(self, device: torch.device) -> AbstractContextManager[object]:
        """A context in which this thread allocates from the pool of ``device``."""

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is in such a pool."""

    def rendezvous(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Make a window of ``group`` of the allocation that ``tensor`` is in; once. Collective."""


class StagingPool:
    """Where a group's staging buffers come from.

    Attributes:
        device: of the buffers.
    """

    def __init__(self, device: torch.device, api: SymmetricMemoryApi) -> None:
        self.device = device
        self.api = api

    def allocating(self) -> AbstractContextManager[object]:
        """A context in which tensors are allocated in symmetric memory."""
        return self.api.allocating(self.device)


# One for a device, as torch has one pool for it; empty where nobody asked for symmetric memory.
_pools: dict[torch.device, StagingPool] = {}
# Why a process group cannot; None: it can. Asked once for each.
_found_out: weakref.WeakKeyDictionary[dist.ProcessGroup, str | None] = weakref.WeakKeyDictionary()


def explain_unsupported(device: torch.device, group: dist.ProcessGroup) -> str | None:
    """Why the ranks of ``group`` cannot have symmetric memory on ``device``; None if they may.

    Looks at what is installed, without communication.
    """
    if device.type != "cuda":
        return f"it is memory of CUDA devices, and the mesh is for {device.type!r}"
    if is_fake_group(group):
        return "a fake process group has no communicator"
    backend = backend_of(group, device.type)
    if backend is None or not backend.startswith("nccl"):
        return f"it belongs to NCCL, and the process group's backend is {backend!r}"
    if not SymmetricMemoryOfTorch.is_there():
        return f"torch {torch.__version__} has no memory pool of NCCL's; 2.13 has"
    version = nccl_version()
    if version < _OLDEST_NCCL:
        found, needed = (".".join(map(str, each)) for each in (version, _OLDEST_NCCL))
        return f"NCCL {found} is too old; {needed} has symmetric windows"
    return None


def staging_pool(
    choice: bool | str,
    mesh: DeviceMesh,
    layout: GlobalLayout,
    device: torch.device,
) -> StagingPool | None:
    """Where the staging buffers of a parameter group come from; None: ordinary memory.

    Collective over each axis of ``mesh``, the first time for each.

    Args:
        choice: what the user passed as ``use_symm_mem``.
        mesh: the data-parallel mesh.
        layout: of the group's buffers.
        device: of the buffers.

    Raises:
        ValueError: ``choice`` is True and it cannot be had.
    """
    if choice is False:
        return None
    reason = _uneven(layout)
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        reason = reason or explain_unsupported(device, group) or _try_out(device, group)
    if reason is None:
        if device not in _pools:
            _pools[device] = StagingPool(device, SymmetricMemoryOfTorch())
        return _pools[device]
    if choice == IF_AVAILABLE:
        _tell_once(reason)
        return None
    raise ValueError(
        f"use_symm_mem=True: {reason}; pass use_symm_mem=False, or use_symm_mem={IF_AVAILABLE!r} "
        "for the plain path"
    )


@functools.cache
def _tell_once(reason: str) -> None:
    _log.warning("no symmetric memory, plain buffers instead: %s", reason)


def _uneven(layout: GlobalLayout) -> str | None:
    sizes = {stop - start for start, stop in map(layout.segment, range(layout.num_shards))}
    if len(sizes) == 1:
        return None
    return (
        f"the ranks' segments are of different sizes ({min(sizes)} to {max(sizes)} elements), and "
        "windows are of one size"
    )


def _try_out(device: torch.device, group: dist.ProcessGroup) -> str | None:
    """Why the ranks of ``group`` cannot make a window, as the first of them found out."""
    if group.size() == 1:
        return None
    if group not in _found_out:
        connect([group], device)
        reason = None
        try:
            api = SymmetricMemoryOfTorch()
            with api.allocating(device):
                tensor = torch.zeros(1, device=device)
            api.rendezvous(tensor, group)
        except RuntimeError as error:
            reason = f"{device} cannot: {str(error).strip().splitlines()[0]}"
        failed = torch.tensor([reason is not None], dtype=torch.int32, device=device)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
        if reason is None and bool(failed.item()):
            reason = f"another rank of {dist.get_process_group_ranks(group)} cannot"
        _found_out[group] = reason
    return _found_out[group]


def register(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Make windows of ``group`` of those ``tensors`` that are in symmetric memory.

    Collective where one is not yet. Nothing happens where nobody uses symmetric memory.
    """
    if not _pools or not tensors:
        return
    pool = _pools.get(tensors[0].device)
    if pool is not None:
        for tensor in tensors:
            if pool.api.is_symmetric(tensor):
                pool.api.rendezvous(tensor, group)


def allocating_in(pool: StagingPool | None) -> AbstractContextManager[object]:
    """A context in which tensors are allocated in ``pool``, or as usual without one."""
    return nullcontext() if pool is None else pool.allocating()
