"""What a rank holds of a parameter group at all times, read off its buffers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.distributed.tensor import Placement

from compile_fsdp.runtime.dbuffer import DBuffer
from compile_fsdp.runtime.parameter_group import FsdpParameterGroup


@dataclass(frozen=True)
class GroupSizes:
    """Bytes of one rank, and the parameters behind them.

    Attributes:
        label: the group, for people.
        parameters: elements of all parameters of the group; a tied one counts once.
        trainable: how many of them are trained.
        padded: elements of the gathered flat buffer.
        parameter_bytes: ``parameters`` in the compute dtype.
        padding_bytes: what the flat buffer has on top, in the compute dtype, over all ranks.
        weights: model weight and, where it is another buffer, main weight.
        gradients: accumulated gradients.
        main_elements: elements that this rank's optimizer updates.
        refresh_bytes: buffer of the all-gather that brings model weights up to date after a step
            where they are wider than what the optimizer updates; 0 where they are not.
        refresh_ranks: ranks of that all-gather.
    """

    label: str
    parameters: int
    trainable: int
    padded: int
    parameter_bytes: int
    padding_bytes: int
    weights: int
    gradients: int
    main_elements: int
    refresh_bytes: int = 0
    refresh_ranks: int = 1


def sizes_of(group: FsdpParameterGroup) -> GroupSizes:
    """The sizes of a live group, on rank 0."""
    shapes = group.layout.tensor_shapes
    counts = [math.prod(shape) for shape in shapes]
    parameters = sum(counts)
    trained = sum(count for count, trains in zip(counts, group.trainable, strict=True) if trains)
    item = group.dtype.itemsize
    weights = _bytes(group.model_weight)
    if group.main_weight.dtype != group.model_weight.dtype:
        weights += _bytes(group.main_weight)
    refresh_bytes, refresh_ranks = _refresh(group)
    return GroupSizes(
        label=group.label,
        parameters=parameters,
        trainable=trained,
        padded=group.layout.size,
        parameter_bytes=parameters * item,
        padding_bytes=(group.layout.size - parameters) * item,
        weights=weights,
        gradients=0 if group.main_grad is None else _bytes(group.main_grad),
        main_elements=group.main_weight.local.numel() if group.requires_grad else 0,
        refresh_bytes=refresh_bytes,
        refresh_ranks=refresh_ranks,
    )


def _bytes(buffer: DBuffer) -> int:
    """Of this rank's part, whether or not it has storage now."""
    return buffer.local.numel() * buffer.dtype.itemsize


def _refresh(group: FsdpParameterGroup) -> tuple[int, int]:
    if not group.requires_grad:
        return 0, 1
    before: tuple[Placement, ...] = tuple(group.post_optimizer_model_weight.placements)
    after = tuple(group.model_weight.placements)
    ranks = math.prod(
        group.mesh.size(axis)
        for axis, (old, new) in enumerate(zip(before, after, strict=True))
        if old != new
    )
    return (_bytes(group.model_weight), ranks) if ranks > 1 else (0, 1)
