"""Several small groups, one collective.

A collective takes its time however little it moves, so small groups are gathered together. Their
shards are copied into one buffer, and what comes back is dealt out:

    rank 0   a0 b0                                       full a   a0 a1
                    \\                                   /
                      all-gather   a0 b0 | a1 b1  deal
                    /                                   \\
    rank 1   a1 b1                                       full b   b0 b1

Their gradients are reduced together the other way round: cut into the ranks' parts, these are sent
as one, and each group takes its piece of what comes back into its own main gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import Partial, Placement

from . import collectives
from .agreement import Label
from .arena import Place
from .dbuffer import DBuffer
from .memory import Memory
from .modes import without_autograd
from .process_groups import group_of_lane
from .streams import Lane
from .unsharding import Missing, Unsharding

if TYPE_CHECKING:
    from .parameter_group import FsdpParameterGroup


def gather_together(
    lane: Lane, groups: Sequence[tuple[str, Unsharding]], places: Sequence[Place | None]
) -> None:
    """Start gathering on ``lane`` what is not there of ``groups``, given with their labels.

    ``places`` has for each where it goes, as of `Unsharding.unshard`.

    They have equal dtypes and are cut over the same ranks. Those whose shards are being refreshed
    on the lane, or are cut over several axes, are gathered one by one.
    """
    with without_autograd():
        waiting = [
            _Waiting(label, each, missing)
            for (label, each), place in zip(groups, places, strict=True)
            if (missing := each.missing(lane, label, place)).needed
        ]
        plain = all(
            len(each.unsharding.weights.gathered_axes) == 1 and not each.missing.refreshing
            for each in waiting
        )
        if plain and len(waiting) > 1:
            _gather_staged(lane, waiting)
            return
        for each in waiting:
            each.unsharding.gather(each.missing, lane, each.label)


@dataclass(frozen=True)
class _Waiting:
    """A group that must be gathered."""

    label: str
    unsharding: Unsharding
    missing: Missing


def _gather_staged(lane: Lane, groups: Sequence[_Waiting]) -> None:
    label = _label_of_all([each.label for each in groups])
    for each in groups:
        each.missing.target.buffer.reallocate_storage(lane, each.label)
    pieces = [
        piece
        for each in groups
        for piece in each.unsharding.weights.pieces(each.missing.target.buffer)
    ]
    shards, targets = zip(*pieces, strict=True)
    first = shards[0]
    (axis,) = groups[0].unsharding.weights.gathered_axes
    ranks = range(first.mesh.size(axis))
    cuts = [[each.layout.segment(rank, len(ranks)) for rank in ranks] for each in shards]
    sizes = [sum(stop - start for start, stop in (cut[rank] for cut in cuts)) for rank in ranks]
    sent = _new(
        lane.memory, sum(each.local.numel() for each in shards), first, f"sent {label}", lane
    )
    staged = _new(lane.memory, sum(sizes), first, f"staged {label}", lane)
    with lane.allocating():
        torch.cat([each.local for each in shards], out=sent)
    group = group_of_lane(first.mesh, axis, lane.name)
    collectives.all_gather(lane, staged, sent, group, sizes, label=label)
    parts = [
        target[slice(*cut[rank])]
        for rank in ranks
        for target, cut in zip(targets, cuts, strict=True)
    ]

    def deal() -> None:
        with without_autograd():
            received = staged.split([part.numel() for part in parts])
            for part, values in zip(parts, received, strict=True):
                part.copy_(values)
        lane.memory.give_back(sent)
        lane.memory.give_back(staged)

    lane.then(deal)
    for each in groups:
        each.unsharding.note_gathered(each.missing.target, lane)


def reduce_together(
    lane: Lane, contributions: Mapping[FsdpParameterGroup, Mapping[int, torch.Tensor]]
) -> torch.Tensor:
    """Start reducing the full gradients of several groups, by tensor index, on ``lane``.

    The groups reduce over one and the same mesh axis (`FsdpParameterGroup.reduced_axis`), in one
    dtype. What each contributes is scaled and bound as by a reduction of its own.

    Returns:
        What is sent: compute's memory, to be kept until the lane has run.
    """
    groups = list(contributions)
    packed = [group.pack(gradients) for group, gradients in contributions.items()]
    first, axis = packed[0], groups[0].reduced_axis
    assert axis is not None
    process_group = group_of_lane(first.mesh, axis, lane.name)
    ranks, own = range(process_group.size()), process_group.rank()
    cuts = [[each.layout.segment(rank, len(ranks)) for rank in ranks] for each in packed]
    sizes = [[stop - start for start, stop in cut] for cut in cuts]
    totals = [sum(size[rank] for size in sizes) for rank in ranks]
    labels = [group.gradient_label(tuple(given)) for group, given in contributions.items()]
    label = _label_of_all(labels)
    parts_sent = [
        each.local[slice(*cut[rank])]
        for rank in ranks
        for each, cut in zip(packed, cuts, strict=True)
    ]
    sent = _new(lane.memory, sum(totals), first, f"sent {label}")
    torch.cat(parts_sent, out=sent)
    for each in packed:
        lane.memory.give_back(each.local)
    received = _new(lane.memory, totals[own], first, f"reduced {label}", lane)
    lane.wait_current()
    collectives.reduce_scatter(
        lane, received, sent, process_group, totals, average=True, label=label
    )
    parts = received.split([size[own] for size in sizes])
    for group, each, part in zip(groups, packed, parts, strict=True):
        reduced = DBuffer.from_local(
            part, each.mesh, _reduced(group, axis), each.tensor_shapes, layout=each.layout
        )
        group.accumulate(reduced, tuple(contributions[group]))
    lane.then(lambda: lane.memory.give_back(received))
    return sent


def _new(
    memory: Memory, numel: int, like: DBuffer, owner: str, lane: Lane | None = None
) -> torch.Tensor:
    return memory.empty(numel, like.dtype, like.device, owner=owner, lane=lane)


def _reduced(group: FsdpParameterGroup, axis: int) -> list[Placement]:
    """Placements of a partial gradient that has been reduced over ``axis``."""
    placements: list[Placement] = [Partial("avg")] * group.mesh.ndim
    if group.main_grad is not None:
        placements[axis] = group.main_grad.placements[axis]
    return placements


def _label_of_all(labels: Sequence[str]) -> Label:
    subjects = [getattr(label, "subject", label) for label in labels]
    return Label("+".join(labels), " and ".join(subjects))
