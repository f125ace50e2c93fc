"""How a DBuffer changes the placement of one mesh axis.

    from      to          by                  a rank's piece
    shard     Replicate   all-gather          grows to the pieces of all ranks of the axis
    Partial   Replicate   all-reduce          keeps its place
    Partial   shard       reduce-scatter      shrinks to the rank's own segment
    Replicate shard       local slice         shrinks, no communication
    Replicate Partial     relabelling         "avg" only: the average of equal values

Pieces are contiguous in the flat buffer, so each is one collective without copies in or out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import Placement, Replicate

from compile_fsdp.runtime import collectives
from compile_fsdp.runtime.modes import without_autograd
from compile_fsdp.runtime.placement import axis_names, is_sharded
from compile_fsdp.runtime.process_groups import group_of_lane
from compile_fsdp.runtime.streams import Lane, make_lane

if TYPE_CHECKING:
    from compile_fsdp.runtime.dbuffer import DBuffer

__all__ = ["redistribute"]


def redistribute(
    source: DBuffer,
    placements: tuple[Placement, ...],
    out: DBuffer | None,
    lane: Lane | None,
    *,
    depends: bool,
    label: str,
) -> DBuffer:
    """See `DBuffer.redistribute`."""
    changed = source.changed_axes(placements)
    if len(changed) > 1:
        axes = axis_names(source.mesh)
        raise ValueError(
            f"redistribute {source.placements} to {placements}: one axis changes per call, found "
            f"{[axes[axis] for axis in changed]}; call redistribute() once for each"
        )
    if out is not None:
        _check_out(source, placements, out)
    if lane is None:
        own_lane = make_lane(source.device, "redistribute")
        own_lane.wait_current()
        move = _Move(source, placements, out, own_lane, depends, label, lane_goes=True)
        result = _apply(move, changed)
        own_lane.synchronize()
        return result
    return _apply(_Move(source, placements, out, lane, depends, label), changed)


@dataclass(frozen=True)
class _Move:
    source: DBuffer
    placements: tuple[Placement, ...]
    out: DBuffer | None
    lane: Lane
    depends: bool
    label: str
    lane_goes: bool = False

    def destination(self) -> DBuffer:
        """Where a collective writes."""
        if self.out is not None:
            return self.out
        source, lane = self.source, self.lane
        local = lane.memory.empty(
            source.local_numel(self.placements),
            source.dtype,
            source.device,
            owner=f"redistributed {self.label}",
            # Where the lane goes, nobody would order on it what compute does with its memory.
            lane=None if self.lane_goes else lane,
        )
        if self.lane_goes:
            lane.wait_current()
        return source.like(self.placements, local)

    def copy(self, target: DBuffer, values: torch.Tensor) -> DBuffer:
        """Put ``values`` into ``target`` on the lane, unless they are there."""

        def put() -> None:
            with without_autograd():
                target.local.copy_(values)

        if target.local.data_ptr() != values.data_ptr():
            self.lane.then(put)
        return target


def _apply(move: _Move, changed: Sequence[int]) -> DBuffer:
    if not changed:
        return move.source if move.out is None else move.copy(move.out, move.source.local)
    axis = changed[0]
    old, new = move.source.placements[axis], move.placements[axis]
    step = _STEPS.get((_kind(old), _kind(new)))
    if step is None:
        raise ValueError(
            f"redistribute axis {axis_names(move.source.mesh)[axis]!r} from {old} to {new}: not "
            "possible in one step; redistribute to Replicate() first"
        )
    return step(move, axis)


def _gather(move: _Move, axis: int) -> DBuffer:
    source, target = move.source, move.destination()
    collectives.all_gather(
        move.lane,
        target.local,
        source.local,
        group_of_lane(source.mesh, axis, move.lane.name),
        source.segment_sizes(axis),
        depends=move.depends,
        label=move.label,
    )
    return target


def _reduce_scatter(move: _Move, axis: int) -> DBuffer:
    source, target = move.source, move.destination()
    collectives.reduce_scatter(
        move.lane,
        target.local,
        source.local,
        group_of_lane(source.mesh, axis, move.lane.name),
        target.segment_sizes(axis),
        average=True,
        depends=move.depends,
        label=move.label,
    )
    return target


def _all_reduce(move: _Move, axis: int) -> DBuffer:
    target = move.destination()
    move.copy(target, move.source.local)
    collectives.all_reduce(
        move.lane,
        target.local,
        group_of_lane(move.source.mesh, axis, move.lane.name),
        average=True,
        depends=move.depends,
        label=move.label,
    )
    return target


def _slice(move: _Move, axis: int) -> DBuffer:
    result = move.source.view(move.placements)
    return result if move.out is None else move.copy(move.out, result.local)


def _relabel(move: _Move, axis: int) -> DBuffer:
    if move.out is not None:
        return move.copy(move.out, move.source.local)
    return move.source.like(move.placements, move.source.local)


_STEPS: dict[tuple[str, str], Callable[[_Move, int], DBuffer]] = {
    ("shard", "replicate"): _gather,
    ("partial", "replicate"): _all_reduce,
    ("partial", "shard"): _reduce_scatter,
    ("replicate", "shard"): _slice,
    ("replicate", "partial"): _relabel,
}


def _kind(placement: Placement) -> str:
    if is_sharded(placement):
        return "shard"
    return "replicate" if isinstance(placement, Replicate) else "partial"


def _check_out(source: DBuffer, placements: tuple[Placement, ...], out: DBuffer) -> None:
    if out.is_like(source, placements):
        return
    for what, expected, found in (
        ("mesh", source.mesh, out.mesh),
        ("placements", placements, out.placements),
        ("layout", source.layout, out.layout),
        ("dtype", source.dtype, out.dtype),
        ("device", source.device, out.device),
    ):
        if expected != found:
            raise ValueError(
                f"redistribute: out must agree with the buffer in {what}: expected {expected}, "
                f"found {found}"
            )
