"""Capture: what a piece of work does on a device, done again without the host that asked for it.

    record(work)   the host runs ``work`` once; what it asks of the device is remembered, and done
    replay()       the device does the same again, on the same memory; no line of ``work`` runs

On CUDA this is a ``torch.cuda.CUDAGraph``. What must hold for it, and where it is taken care of:

- Every stream that takes part forks from the capturing one and joins it before the capture ends
  (`GroupContext.fork_lanes`, `GroupContext.join_lanes`).
- No event is waited for on the other side of the capture's beginning or end: nobody knows one then
  (`HostSide.settle` in ``host_state.py``).
- Communicators exist before: runs without a capture come first.
- Collectives are asynchronous and waited for on the lane that started them (`_CudaLane`): the
  communicator's stream then forks from the lane, and joins it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch

__all__ = ["GraphCapture", "GraphPool", "captures_by", "make_pool"]

_T = TypeVar("_T")


class GraphCapture(ABC):
    """One piece of work; recorded once, then replayed."""

    @abstractmethod
    def record(self, work: Callable[[], _T]) -> _T:
        """Run ``work``, remember what it does on the device, and return its result.

        When this returns it has been done once, in the order of the current stream.
        """

    @abstractmethod
    def replay(self) -> None:
        """Do it again, on the current stream."""


class GraphPool(Protocol):
    """Makes captures that share memory for what lives within one of them only.

    What is still referred to at the end of one is not shared. Two captures of a pool never run at
    once, and none runs while values are needed that another has put into shared memory.
    """

    def new(self) -> GraphCapture:
        """A capture with nothing recorded."""

    def is_busy(self) -> bool:
        """Whether somebody else is capturing on the current stream."""


class CudaPool:
    """CUDA graphs over one memory pool, all captured on one stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._handle: Any = torch.cuda.graph_pool_handle()

    def new(self) -> GraphCapture:
        """See `GraphPool`."""
        return _CudaCapture(self._handle, self._stream)

    def is_busy(self) -> bool:
        """See `GraphPool`."""
        return torch.cuda.is_current_stream_capturing()


class _CudaCapture(GraphCapture):
    def __init__(self, handle: Any, stream: torch.cuda.Stream) -> None:
        self._handle = handle
        self._stream = stream
        self._graph = torch.cuda.CUDAGraph()

    def record(self, work: Callable[[], _T]) -> _T:
        # "thread_local": NCCL's watchdog and other threads go on calling CUDA meanwhile.
        with torch.cuda.graph(
            self._graph,
            pool=self._handle,
            stream=self._stream,
            capture_error_mode="thread_local",
        ):
            result = work()
        # While it captures, a device does nothing.
        self._graph.replay()
        return result

    def replay(self) -> None:
        self._graph.replay()


_makers: dict[str, Callable[[torch.device], GraphPool]] = {"cuda": CudaPool}


def make_pool(device: torch.device) -> GraphPool:
    """A pool of captures on ``device``.

    Raises:
        ValueError: the device cannot capture.
    """
    maker = _makers.get(device.type)
    if maker is None:
        raise ValueError(
            f"CUDA graphs need CUDA parameters, found {device.type}; shard the model on a CUDA "
            'mesh, or leave out mode="reduce-overhead" and the option "cudagraphs"'
        )
    return maker(device)


@contextmanager
def captures_by(device_type: str, maker: Callable[[torch.device], GraphPool]) -> Iterator[None]:
    """Capture on devices of a type with ``maker`` while the context is open: for tests."""
    before = _makers.get(device_type)
    _makers[device_type] = maker
    try:
        yield
    finally:
        del _makers[device_type]
        if before is not None:
            _makers[device_type] = before
