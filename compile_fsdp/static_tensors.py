"""Memory at one address: what is copied into it, and who still reads it.

A captured forward saves activations at addresses of its own, the same in each of its runs. Autograd
gets each time new tensors over them, on lease: when all are gone, nobody needs the values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack

from compile_fsdp.runtime.modes import without_autograd

__all__ = ["Lease", "new_like", "put_into"]


def new_like(value: Any) -> torch.Tensor | None:
    """Memory for ``value``, of its shape and strides; None where it is no tensor."""
    if not isinstance(value, torch.Tensor):
        return None
    with without_autograd():
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )


def put_into(memory: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Copy ``value`` into ``memory``, one of `new_like`, and return it."""
    with without_autograd():
        _without_repetition(memory).copy_(_without_repetition(value))
    return memory


def _without_repetition(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with one of each row that expanding has made many of."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


class Lease:
    """The memory of a captured forward's saved tensors, while autograd refers to it."""

    def __init__(self) -> None:
        self._storages: list[StorageWeakRef] = []
        self._owners: dict[int, torch.Tensor] = {}

    @property
    def is_running(self) -> bool:
        """Whether anybody may still read the values of the last forward."""
        return not all(storage.expired() for storage in self._storages)

    def begin(self, saved: Sequence[Any], fixed: Iterable[Any]) -> list[Any]:
        """``saved`` for autograd, over the same memory.

        What lies in the memory of one of the ``fixed`` inputs (a parameter) is passed as it is.
        """
        self._storages.clear()
        self._owners = {each.data_ptr(): each for each in saved if isinstance(each, torch.Tensor)}
        outside = {_storage_address(each) for each in fixed if isinstance(each, torch.Tensor)}
        return [self._lent(each, outside) for each in saved]

    def _lent(self, value: Any, outside: set[int]) -> Any:
        if not isinstance(value, torch.Tensor) or _storage_address(value) in outside:
            return value
        if value.numel() == 0:
            return value
        lent = from_dlpack(value.detach())
        self._storages.append(StorageWeakRef(lent.untyped_storage()))
        return lent

    def covers(self, tensors: Iterable[Any]) -> bool:
        """Whether all of ``tensors`` are among what the last forward has saved."""
        return all(
            value.numel() == 0 or value.data_ptr() in self._owners
            for value in tensors
            if isinstance(value, torch.Tensor)
        )

    def owner_of(self, value: Any) -> Any:
        """``value``, which is covered, by a tensor that is not on lease."""
        if not isinstance(value, torch.Tensor) or value.numel() == 0:
            return value
        owner = self._owners[value.data_ptr()]
        if (owner.shape, owner.stride(), owner.dtype) == (value.shape, value.stride(), value.dtype):
            return owner
        return owner.view(value.dtype).as_strided(value.shape, value.stride())


def _storage_address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
