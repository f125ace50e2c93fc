"""The collectives of the runtime, on flat tensors: the only calls of torch.distributed's.

Each starts on a `Lane` and returns at once. Two backends matter and the tensor's device tells
them apart: NCCL for CUDA and gloo for CPU (or torch's fake backend, which takes either path).

What gloo does badly was measured (torch 2.13, 2 and 4 ranks on two cores, interleaved) and is
avoided:

- It has no AVG: sum, then multiply by 1/N.
- Its reduce-scatter takes 1.3 to 3 times as long as an all-to-all and a local sum, for buffers of
  16 KiB to 16 MiB: the latter is used.
- Its all-gather takes 0.9 to 2 times as long as one broadcast for each rank, all in flight
  together and straight into the output, and fails on unequal parts: broadcasts are used, but not
  for equal parts of little (32 KiB: twice as fast; 256 KiB: as fast) or of more than 8 ranks. (An
  uneven all-to-all would need a copy of the input for each rank.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from compile_fsdp.runtime import symmetric_memory
from compile_fsdp.runtime.agreement import Step
from compile_fsdp.runtime.announcing import Works, in_agreement
from compile_fsdp.runtime.modes import without_autograd
from compile_fsdp.runtime.streams import Lane, Waitable

__all__ = ["CollectiveRecord", "all_gather", "all_reduce", "recorded", "reduce_scatter"]

# torch 2.13 deprecated the first of each pair of public names in favour of the second.
_all_gather_single: Callable[..., Waitable | None] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_reduce_scatter_single: Callable[..., Waitable | None] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
# torch.distributed's functions are not annotated as returning a work.
_all_gather: Callable[..., Waitable | None] = dist.all_gather
_reduce_scatter: Callable[..., Waitable | None] = dist.reduce_scatter
_all_reduce: Callable[..., Waitable | None] = dist.all_reduce
_all_to_all_single: Callable[..., Waitable | None] = dist.all_to_all_single

# The number of broadcasts in flight for one gather of equal parts on gloo.
_MOST_BROADCASTS = 8

# Bytes of a full buffer up to which gloo's own gather of equal parts is the faster one.
_SMALL_GATHER = 256 * 1024


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective that was started.

    Attributes:
        kind: ``"all_gather"``, ``"reduce_scatter"`` or ``"all_reduce"``.
        bytes: Size of the full (unsharded) buffer.
        ranks: Global ranks of the group.
        label: What the caller named it.
    """

    kind: str
    bytes: int
    ranks: tuple[int, ...]
    label: str


# The lists of the `recorded` contexts that are open. Not a context variable: backward may run
# in autograd's own threads, which do not inherit one.
_open_recordings: list[list[CollectiveRecord]] = []


@contextmanager
def recorded() -> Iterator[list[CollectiveRecord]]:
    """Collect a record of every collective that is started while the context is open."""
    records: list[CollectiveRecord] = []
    _open_recordings.append(records)
    try:
        yield records
    finally:
        # By identity: two open recordings may be equal.
        _open_recordings[:] = [other for other in _open_recordings if other is not records]


def all_gather(
    lane: Lane,
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup,
    sizes: Sequence[int] | None = None,
    *,
    depends: bool = False,
    label: str = "",
) -> None:
    """Gather every rank's ``input`` into ``output``, in rank order.

    Args:
        lane: Where the collective runs.
        output: 1-D contiguous, as long as all inputs together.
        input: 1-D contiguous; may be the rank's own slice of ``output``.
        group: The ranks taking part. With one rank there is no communication.
        sizes: Elements of each rank's input, when they are unequal; the same on every rank.
        depends: ``input`` is written by something that is still on the lane.
        label: Name for `recorded`.

    Raises:
        ValueError: Sizes of output, input and ``sizes`` do not fit.
    """
    sizes = _check_sizes("all_gather", output, input, group, sizes)
    if group.size() == 1 or output.numel() == 0:
        _copy_unless_same(lane, output, input)
        return
    on_cuda = output.device.type == "cuda"
    even = len(set(sizes)) == 1
    # gloo's own gather also writes the rank's own part, which may be the input, and whoever owns
    # that may write it before the gather is waited for.
    few = output.numel() * output.element_size() <= _SMALL_GATHER and not _share(output, input)
    by_one = even and (on_cuda or few or group.size() > _MOST_BROADCASTS)

    def start() -> Waitable | None:
        if by_one:
            return _all_gather_single(output, input, group=group, async_op=True)
        parts = list(output.split(list(sizes)))
        if on_cuda:
            return _all_gather(parts, input, group=group, async_op=True)
        return _broadcast_each(parts, input, group)

    lane.collective(
        _announced(start, "all_gather", output, group, label, (output, input) if even else ()),
        depends=depends,
        reads=[input],
        writes=[output],
        label=f"all_gather {label}",
    )


def reduce_scatter(
    lane: Lane,
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup,
    sizes: Sequence[int] | None = None,
    *,
    average: bool,
    depends: bool = False,
    label: str = "",
) -> None:
    """Add up every rank's ``input`` and leave the rank's own part of the sum in ``output``.

    On gloo the ranks' parts are added in rank order. ``input`` must stay alive and unchanged
    until the lane has run; the lane's queue holds a reference to it until then.

    Args:
        lane: Where the collective runs.
        output: 1-D contiguous; may be the rank's own slice of ``input``.
        input: 1-D contiguous, as long as all outputs together.
        group: The ranks taking part. With one rank there is no communication.
        sizes: Elements of each rank's output, when they are unequal; the same on every rank.
        average: Divide by the number of ranks.
        depends: ``input`` is written by something that is still on the lane.
        label: Name for `recorded`.

    Raises:
        ValueError: Sizes of output, input and ``sizes`` do not fit.
    """
    sizes = _check_sizes("reduce_scatter", input, output, group, sizes)
    if group.size() == 1 or input.numel() == 0:
        _copy_unless_same(lane, output, input)
        return
    if output.device.type != "cuda":
        _reduce_scatter_by_all_to_all(lane, output, input, group, sizes, average, depends, label)
        return
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    even = len(set(sizes)) == 1

    def start() -> Waitable | None:
        if even:
            return _reduce_scatter_single(output, input, op=op, group=group, async_op=True)
        parts = list(input.split(list(sizes)))
        return _reduce_scatter(output, parts, op=op, group=group, async_op=True)

    lane.collective(
        _announced(start, "reduce_scatter", input, group, label, (input, output) if even else ()),
        depends=depends,
        reads=[input],
        writes=[output],
        label=f"reduce_scatter {label}",
    )


def all_reduce(
    lane: Lane,
    tensor: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    average: bool,
    depends: bool = False,
    label: str = "",
) -> None:
    """Replace ``tensor`` (1-D contiguous) by the sum, or the average, over the group's ranks.

    ``depends``: ``tensor`` is written by something that is still on the lane.
    """
    if group.size() == 1 or tensor.numel() == 0:
        return
    on_cuda = tensor.device.type == "cuda"
    op = dist.ReduceOp.AVG if average and on_cuda else dist.ReduceOp.SUM

    def start() -> Waitable | None:
        return _all_reduce(tensor, op=op, group=group, async_op=True)

    lane.collective(
        _announced(start, "all_reduce", tensor, group, label, (tensor,)),
        depends=depends,
        writes=[tensor],
        label=f"all_reduce {label}",
    )
    if average and not on_cuda:
        lane.then(_without_autograd(lambda: tensor.mul_(1.0 / group.size())))


def _announced(
    start: Callable[[], Waitable | None],
    kind: str,
    full: torch.Tensor,
    group: dist.ProcessGroup,
    label: str,
    staged: Sequence[torch.Tensor] = (),
) -> Callable[[], Waitable | None]:
    """``start``, recorded, as soon as the ranks of ``group`` agree on it.

    ``staged`` are buffers of one size on every rank: symmetric memory, where it is in use.
    """

    def registered() -> Waitable | None:
        symmetric_memory.register(staged, group)
        return start()

    agreed = in_agreement(registered, Step.of(kind, label, full), group, full.device)

    def recording() -> Waitable | None:
        _record(kind, full, group, label)
        return agreed()

    return recording


def _broadcast_each(
    parts: list[torch.Tensor], input: torch.Tensor, group: dist.ProcessGroup
) -> Waitable:
    own = parts[group.rank()]
    if not _same_memory(own, input):
        with without_autograd():
            own.copy_(input)
    works: list[Waitable] = []
    for rank, part in enumerate(parts):
        if part.numel():
            source = dist.get_global_rank(group, rank)
            work = dist.broadcast(part, source, group=group, async_op=True)
            if work is not None:
                works.append(work)
    return Works(works)


def _reduce_scatter_by_all_to_all(
    lane: Lane,
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup,
    sizes: Sequence[int],
    average: bool,
    depends: bool,
    label: str,
) -> None:
    ranks = group.size()
    # Without a list of sizes gloo has less to do; equal parts it works out itself.
    given = [output.numel()] * ranks
    lists = (None, None) if given == list(sizes) else (given, list(sizes))
    received = lane.memory.empty(
        ranks * output.numel(), input.dtype, input.device, owner=f"received {label}", lane=lane
    )

    def start() -> Waitable | None:
        return _all_to_all_single(received, input, *lists, group=group, async_op=True)

    def add_up() -> None:
        parts = received.view(ranks, output.numel())
        if ranks == 2:
            torch.add(parts[0], parts[1], out=output)
        else:
            torch.sum(parts, dim=0, out=output)
        if average:
            output.mul_(1.0 / ranks)
        lane.memory.give_back(received)

    lane.collective(
        _announced(start, "reduce_scatter", input, group, label),
        depends=depends,
        reads=[input],
        writes=[received],
        label=f"reduce_scatter {label}",
    )
    lane.then(_without_autograd(add_up))


def _check_sizes(
    kind: str,
    full: torch.Tensor,
    part: torch.Tensor,
    group: dist.ProcessGroup,
    sizes: Sequence[int] | None,
) -> Sequence[int]:
    ranks = group.size()
    if sizes is None:
        sizes = [part.numel()] * ranks
    if len(sizes) != ranks or sum(sizes) != full.numel() or sizes[group.rank()] != part.numel():
        raise ValueError(
            f"{kind} over {ranks} ranks: rank {group.rank()} has a part of {part.numel()} "
            f"elements and a full buffer of {full.numel()}, which does not fit the ranks' sizes "
            f"{list(sizes)}; pass sizes= when the parts are unequal"
        )
    return sizes


def _copy_unless_same(lane: Lane, output: torch.Tensor, input: torch.Tensor) -> None:
    if not _same_memory(output, input):
        lane.then(_without_autograd(lambda: output.copy_(input)))


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are parts of one storage: on all ranks, or on none."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.device == b.device and a.dtype == b.dtype and a.data_ptr() == b.data_ptr()


def _without_autograd(fn: Callable[[], object]) -> Callable[[], None]:
    def call() -> None:
        # A lane is drained by whoever waits, under whatever mode that caller is in.
        with without_autograd():
            fn()

    return call


def _record(kind: str, full: torch.Tensor, group: dist.ProcessGroup, label: str) -> None:
    if _open_recordings:
        ranks = tuple(dist.get_process_group_ranks(group))
        record = CollectiveRecord(kind, full.numel() * full.element_size(), ranks, str(label))
        for records in _open_recordings:
            records.append(record)
