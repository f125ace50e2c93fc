"""Ranks: what ranks do together, so that all of them go on or all of them raise."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

__all__ = ["Ranks", "explained"]

T = TypeVar("T")


@dataclass(frozen=True)
class _Failure:
    """An exception, as one rank tells the others."""

    kind: type[Exception]
    message: str

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        for kind in _KINDS:
            if isinstance(error, kind):
                return cls(kind, " ".join(str(error).split()))
        return cls(RuntimeError, " ".join(f"{type(error).__name__}: {error}".split()))


_KINDS = (FileNotFoundError, ImportError, ValueError, TypeError, RuntimeError)


class Ranks:
    """The ranks of the default process group; this process alone when there is none.

    Args:
        group: another group of the same ranks to talk through.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self.distributed else 0
        self.size = dist.get_world_size() if self.distributed else 1

    def together(self, step: Callable[[], T]) -> T:
        """Run ``step`` on every rank. If it fails on any, all raise the first one's error."""
        error: BaseException | None = None
        value: T | None = None
        try:
            value = step()
        except BaseException as caught:
            error = caught
        failures = self.gather(None if error is None else _Failure.of(error))
        if error is not None and not isinstance(error, Exception):
            raise error
        for rank, failure in enumerate(failures):
            if failure is not None:
                where = f" (on rank {rank})" if None in failures else ""
                raise failure.kind(f"{failure.message}{where}") from error
        return cast(T, value)

    def first(self, step: Callable[[], T]) -> T:
        """Run ``step`` on rank 0 and return its value on every rank, or raise on every rank."""
        value = self.together(lambda: step() if self.rank == 0 else None)
        return cast(T, self.gather(value)[0])

    def agree(self, values: Mapping[str, str]) -> None:
        """Raise ValueError on every rank when ``values`` are not the same on all of them."""
        digest = hashlib.sha256(repr(sorted(values.items())).encode()).digest()
        if len(set(self.gather(digest))) == 1:
            return
        everyone = self.gather(dict(values))
        for rank, other in enumerate(everyone):
            for name in sorted({*everyone[0], *other}):
                expected, found = everyone[0].get(name, "nothing"), other.get(name, "nothing")
                if expected != found:
                    raise ValueError(
                        f"ranks disagree on {name}: rank 0 has {expected}, rank {rank} has "
                        f"{found}; call with the same arguments on every rank"
                    )

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value``, in rank order, on every rank."""
        if not self.distributed:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return cast("list[T]", values)

    def to_first(self, value: T) -> list[T]:
        """Every rank's ``value``, in rank order, on rank 0; nothing elsewhere."""
        if not self.distributed:
            return [value]
        values: list[T | None] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return cast("list[T]", values or [])

    def from_first(self, values: Sequence[T]) -> T:
        """The one of rank 0's ``values`` that is for this rank; others' are not looked at."""
        if not self.distributed:
            return values[0]
        own: list[T | None] = [None]
        given = list(values) if self.rank == 0 else None
        dist.scatter_object_list(own, given, src=0, group=self._group)
        return cast(T, own[0])

    def send_to_first(self, tensor: torch.Tensor) -> None:
        """Send ``tensor``, contiguous, in host memory and not empty, to rank 0, which awaits it."""
        dist.send(_bytes_of(tensor), dst=0, group=self._group)

    def receive_from(self, rank: int, tensor: torch.Tensor) -> None:
        """On rank 0: receive into ``tensor``, contiguous, what ``rank`` sends."""
        dist.recv(_bytes_of(tensor), src=rank, group=self._group)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous ``tensor``; gloo does not know every dtype."""
    return tensor.view(-1).view(torch.uint8)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn errors of DCP, of files and of communication into one that says what became of it."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        failure = _Failure.of(cause)
        raise failure.kind(f"{what}: {failure.message} (on rank {rank})") from error
    except (OSError, RuntimeError) as error:
        failure = _Failure.of(error)
        raise failure.kind(f"{what}: {failure.message}") from error
