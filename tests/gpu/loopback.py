"""A process group of several ranks that are all this process: real traffic on one GPU.

Every other rank is taken for a copy of this one, so what it would send is what this rank sends:

    all-gather       |own|own|own|own|        reduce-scatter, average    own part of the input
    all-reduce, sum  ranks times the input    all-to-all                 own part, from each

The values of a model with these collectives mean nothing, but each program has one right result:
that of the same program with collectives which the host waits for. On CUDA a collective runs on a
stream of the group's own, as NCCL's do, and may be slowed down: compute that does not wait for it,
and memory that is used again too early, give other values then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from compile_fsdp.runtime import agreement
from tests.gpu.support import ON_CUDA, world

NAME = "loopback"


@dataclass
class Pace:
    """How collectives run.

    Attributes:
        cycles: clock cycles of the GPU that each one idles before it starts.
        synchronous: the host waits for the device before and after each.
        started: how many have been started, by kind.
    """

    cycles: int = 0
    synchronous: bool = False
    started: dict[str, int] = field(default_factory=dict)


PACE = Pace()


class _Work(dist.Work):
    """A finished work on the host; on CUDA, an event that the waiting stream waits for."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        super().__init__()
        self._event = event

    def wait(self, timeout: object = None) -> bool:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        return self._event is None or self._event.query()


class LoopbackGroup(dist.ProcessGroup):
    """See the module. Methods have the names by which torch.distributed calls them, of which torch
    2.13 changed some."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._ranks = (rank, size)
        self._name = ""
        self._stream = torch.cuda.Stream() if ON_CUDA else None
        # The others never write into the store, so nobody must wait for them there.
        agreement._agreements[self] = None

    def rank(self) -> int:
        return self._ranks[0]

    def size(self) -> int:
        return self._ranks[1]

    def getBackendName(self) -> str:
        return NAME

    # torch keeps names in the backends of a group, of which this one has none.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def _run(self, kind: str, *copies: tuple[torch.Tensor, torch.Tensor]) -> dist.Work:
        """Copy the second of each pair into the first, on this group's stream."""
        PACE.started[kind] = PACE.started.get(kind, 0) + 1
        if self._stream is None:
            for target, source in copies:
                target.copy_(source)
            return _Work(None)
        if PACE.synchronous:
            torch.cuda.synchronize()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if PACE.cycles:
                torch.cuda._sleep(PACE.cycles)
            for target, source in copies:
                target.copy_(source)
        if PACE.synchronous:
            torch.cuda.synchronize()
        return _Work(self._stream.record_event())

    def _allgather_base(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        parts = output.view(self.size(), -1)
        return self._run("all_gather", *((part, input) for part in parts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        copies = []
        for parts, own in zip(outputs, inputs, strict=True):
            for part in parts:
                common = min(part.numel(), own.numel())
                copies.append((part.view(-1)[:common], own.view(-1)[:common]))
        return self._run("all_gather", *copies)

    def _reduce_scatter_base(self, output: Any, input: Any, opts: Any) -> dist.Work:
        return self.reduce_scatter([output], [input.chunk(self.size())], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        assert opts.reduceOp == dist.ReduceOp.AVG
        pairs = zip(outputs, inputs, strict=True)
        return self._run("reduce_scatter", *((out, parts[self.rank()]) for out, parts in pairs))

    def allreduce(self, tensors: Any, opts: Any) -> dist.Work:
        if opts.reduceOp == dist.ReduceOp.AVG:
            return self._run("all_reduce")
        assert opts.reduceOp == dist.ReduceOp.SUM
        return self._run("all_reduce", *((each, each * self.size()) for each in tensors))

    def alltoall_base(
        self, output: Any, input: Any, received: Sequence[int], sent: Sequence[int], opts: Any
    ) -> dist.Work:
        cut = input.split(list(sent)) if sent else input.chunk(self.size())
        own = cut[self.rank()]
        parts = output.split(list(received)) if received else output.chunk(self.size())
        return self._run("all_to_all", *((part, own) for part in parts))

    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:
        (tensor,) = tensors
        if opts.rootRank == self.rank():
            self._sent = tensor
            return self._run("broadcast")
        # What another rank sends is what this one has sent; the runtime has the first rank begin.
        common = min(tensor.numel(), self._sent.numel())
        return self._run("broadcast", (tensor[:common], self._sent[:common]))

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._run("barrier")

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base


def _create(store: object, rank: int, size: int, timeout: object) -> LoopbackGroup:
    return LoopbackGroup(rank, size)


@contextmanager
def world_of(ranks: int) -> Iterator[Pace]:
    """A rank alone, with NCCL or gloo; or this process as rank 0 of several, see the module."""
    if ranks > 1:
        with loopback_world(ranks) as pace:
            yield pace
        return
    with world():
        yield Pace()


@contextmanager
def loopback_world(ranks: int) -> Iterator[Pace]:
    """This process is rank 0 of ``ranks``, the others being copies of it."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])
    PACE.cycles, PACE.synchronous = 0, False
    PACE.started.clear()
    with world(NAME, ranks):
        yield PACE
