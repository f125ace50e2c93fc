"""RowShard: the ``Shard(0)`` of a DTensor over a piece of a DBuffer.

DTensor cuts a dim like ``torch.chunk``; a DBuffer cuts a flat buffer, so a rank's rows of one
tensor are few, many or none, and `RowShard` knows them:

    DTensor's own (5, 4) on 2 ranks      rows 0 1 2 | 3 4
    a DBuffer's, for example             rows 0 1 2 3 4 | (none)

torch's operators know nothing of it: what they return would have a plain ``Shard(0)`` over other
rows than it says. So DTensors with such placements are of a class that runs operators itself,
`compile_fsdp.runtime.row_dtensor.RowDTensor`, and torch's own dispatcher is refused a `RowShard`
(see `RowShard.__hash__`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from compile_fsdp.runtime.collectives import all_gather
from compile_fsdp.runtime.placement import ShardAxes, segment_number
from compile_fsdp.runtime.streams import make_lane
from compile_fsdp.runtime.torch_internals import DTensorSpec, dtensor_spec, local_of, spec_of

__all__ = ["RowShard", "cut_of", "make_spec", "segment_number", "spec_like", "with_rows"]


class RowShard(Shard):
    """``Shard(0)`` that knows the rows of every segment.

    Equal to a plain ``Shard(0)`` both ways, and to a `RowShard` with the same rows.

    Attributes:
        rows: Number of rows of each segment.
        axes: The mesh's shard axes and this rank's place on them.
        position: Which of those axes this placement is for.
        total: Rows of the whole tensor.
        own: ``(first row, rows)`` of this rank.
    """

    def __init__(self, rows: tuple[int, ...], axes: ShardAxes, position: int) -> None:
        super().__init__(0)
        self.rows = rows
        self.axes = axes
        self.position = position
        # Every operator asks.
        self.total = sum(rows)
        self.own = sum(rows[: axes.segment]), rows[axes.segment]

    def _key(self) -> tuple[tuple[int, ...], ShardAxes, int]:
        return (self.rows, self.axes, self.position)

    def __hash__(self) -> NoReturn:
        """Refuse: torch's dispatcher and its redistribution look plans up by a hash of placements.

        Without a hash nothing of torch's can take these rows for those of ``torch.chunk``.
        """
        raise RuntimeError(
            "torch's own DTensor operators do not know which rows each rank holds of a tensor that "
            "compile_fsdp has sharded, and this DTensor was made by torch (DTensor.from_local or "
            "redistribute) with a sharded parameter's placements: make it like the parameter "
            "instead, torch.empty_like(parameter).copy_(tensor), or let fully_shard_optimizer "
            "prepare the optimizer whose state it is"
        )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RowShard):
            return self._key() == other._key()
        return isinstance(other, Shard) and other.dim == 0

    def __reduce__(self) -> tuple[object, ...]:
        # Shard's own pickling forgets the attributes of subclasses.
        return (RowShard, self._key())

    def gather(self, local: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """The full tensor, in new memory; every rank of the shard axes takes part.

        Innermost axis first. What one rank holds after each step are the pieces of the ranks that
        share its coordinate on the axes still to do, in the order of their coordinates:

            sizes (outer 2, inner 2), rank (1, 0)   |1,0|  ->  |1,0|1,1|  ->  |0,0|0,1|1,0|1,1|
        """
        row_shape = local.shape[1:]
        width = math.prod(row_shape)
        sizes_by_axis, own = self.axes.sizes, self.axes.coordinate
        coordinates = list(itertools.product(*(range(size) for size in sizes_by_axis)))
        segments = [self.axes.number_of(coordinate) for coordinate in coordinates]
        numels = [self.rows[segment] * width for segment in segments]
        lane = make_lane(local.device, "dtensor")
        held, pieces = local.contiguous().view(-1), 1
        # Compute's memory, which the lane works on until compute has waited for it.
        kept = [held]
        for done, axis in enumerate(reversed(self.axes.axes), start=1):
            ranks, prefix = mesh.size(axis), own[: len(own) - done]
            first = next(i for i, c in enumerate(coordinates) if c[: len(prefix)] == prefix)
            bounds = range(first, first + ranks * pieces, pieces)
            sizes = [sum(numels[start : start + pieces]) for start in bounds]
            full = held.new_empty(sum(sizes))
            kept.append(full)
            lane.wait_current()
            group = mesh.get_group(axis)
            all_gather(lane, full, held, group, sizes, depends=True, label="dtensor")
            held, pieces = full, pieces * ranks
        lane.synchronize()
        parts = dict(zip(segments, torch.split(held, numels), strict=True))
        ordered = [parts[segment] for segment in sorted(parts)]
        return torch.cat(ordered).view(self.total, *row_shape)

    def own_rows(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a full tensor, aliasing it."""
        return full.narrow(0, *self.own)

    def _local_shard_size_and_offset(
        self, curr_local_size: int, num_chunks: int, rank: int | torch.SymInt
    ) -> tuple[int, int | torch.SymInt]:
        """``(rows, first row)`` on ``rank`` of this axis: torch's checkpoints and its functions on
        state dicts ask for them, axis by axis. All axes together tell; the last one answers."""
        active = [number for number, size in enumerate(self.axes.sizes) if size > 1]
        is_last = self.position == (active[-1] if active else 0)
        if not is_last or num_chunks != self.axes.sizes[self.position]:
            return curr_local_size, 0
        segment = self.axes.segments_along(self.axes.axes[self.position])[int(rank)]
        return self.rows[segment], sum(self.rows[:segment])


def cut_of(tensor: object) -> RowShard | None:
    """How ``tensor`` is cut by rows; None for anything but a DTensor with a `RowShard`.

    Raises:
        RuntimeError: torch made the DTensor, of a local tensor that has other rows.
    """
    if not isinstance(tensor, DTensor):
        return None
    for placement in spec_of(tensor).placements:
        if isinstance(placement, RowShard):
            found = tuple(local_of(tensor).shape[:1])
            if (placement.total, (placement.own[1],)) != (tensor.shape[0], found):
                raise RuntimeError(
                    f"a DTensor of shape {tuple(tensor.shape)} says it is sharded like a parameter "
                    f"of {placement.total} rows, of which this rank holds {placement.own[1]}, but "
                    f"its local tensor has shape {tuple(local_of(tensor).shape)}; make it with "
                    "torch.empty_like(parameter).copy_(tensor)"
                )
            return placement
    return None


def make_spec(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    dtype: torch.dtype,
    rows: tuple[int, ...],
    axes: ShardAxes,
) -> DTensorSpec:
    """The spec of the DTensors over one tensor of a flat buffer.

    Args:
        mesh: The mesh of ``placements``.
        placements: One for each mesh axis.
        shape: The tensor's full shape; it is contiguous.
        dtype: The tensor's.
        rows: Rows of each segment.
        axes: The shard axes of ``placements``.
    """
    exact: list[Placement] = list(placements)
    for position, axis in enumerate(axes.axes):
        exact[axis] = RowShard(rows, axes, position)
    lengths = [max(length, 1) for length in shape]
    stride = [math.prod(lengths[dim + 1 :]) for dim in range(len(lengths))]
    return dtensor_spec(mesh, exact, shape, stride, dtype)


def with_rows(spec: DTensorSpec, rows: tuple[int, ...], local: torch.Tensor) -> DTensorSpec:
    """As `spec_like`, of a view whose segments have ``rows``."""
    placements = [
        RowShard(rows, each.axes, each.position) if isinstance(each, RowShard) else each
        for each in spec.placements
    ]
    shape = (sum(rows), *local.shape[1:])
    return dtensor_spec(spec.mesh, placements, shape, local.stride(), local.dtype)


def spec_like(spec: DTensorSpec, rows: int, local: torch.Tensor) -> DTensorSpec:
    """The spec of the tensor of which ``local`` is this rank's part, cut like that of ``spec``.

    ``rows``: of the whole tensor, if it has any. The outermost stride does not depend on them.
    """
    meta, shape = spec.tensor_meta, torch.Size((rows, *local.shape[1:])[: local.ndim])
    if meta is not None and (meta.shape, meta.stride) == (shape, local.stride()):
        if meta.dtype == local.dtype:
            return spec
    return dtensor_spec(spec.mesh, spec.placements, shape, local.stride(), local.dtype)
