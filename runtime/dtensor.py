"""DTensors over pieces of a DBuffer.

DTensor cuts a dim like ``torch.chunk``; a DBuffer cuts a flat buffer, so a rank's rows of one
tensor are few, many or none. `RowShard` is the ``Shard(0)`` that knows them:

    DTensor's own (5, 4) on 2 ranks      rows 0 1 2 | 3 4
    a DBuffer's, for example             rows 0 1 2 3 4 | (none)

It overrides the private methods of ``Shard`` through which DTensor moves data and computes
local shapes; they have been the same since torch 2.11. Only DTensors made here know their rows:
what an operator returns (an optimizer's state; on torch 2.14 even ``detach()``) has a plain
``Shard(0)``. Its local values and its reductions are right, but its ``full_tensor()`` is not:
make a DTensor of its local tensor and the spec of one of ours first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from compile_fsdp.runtime.collectives import all_gather, reduce_scatter
from compile_fsdp.runtime.placement import ShardAxes, segment_number
from compile_fsdp.runtime.streams import make_lane
from compile_fsdp.runtime.torch_internals import DTensorSpec, dtensor_spec

__all__ = ["RowShard", "make_spec", "segment_number"]


class RowShard(Shard):
    """``Shard(0)`` that knows the rows of every segment.

    Equal to a plain ``Shard(0)`` both ways: DTensor compares placements to tell whether an
    operator must redistribute, and rows of the buffers of one group always match. Its hash
    differs on purpose. DTensor caches redistribution plans, which hold placements, by spec; with
    an equal hash it would use here a plan made for a plain DTensor of the same shape, whose
    all-gather returns wrong rows without an error. Python and C++ compare hashes first.

    Attributes:
        rows: Number of rows of each segment.
        axes: The mesh's shard axes and this rank's place on them.
        position: Which of those axes this placement is for.
    """

    def __init__(self, rows: tuple[int, ...], axes: ShardAxes, position: int) -> None:
        super().__init__(0)
        self.rows = rows
        self.axes = axes
        self.position = position

    def _key(self) -> tuple[tuple[int, ...], ShardAxes, int]:
        return (self.rows, self.axes, self.position)

    def __hash__(self) -> int:
        return hash((RowShard, self._key()))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RowShard):
            return self._key() == other._key()
        return isinstance(other, Shard) and other.dim == 0

    def __reduce__(self) -> tuple[object, ...]:
        # Shard's own pickling forgets the attributes of subclasses.
        return (RowShard, self._key())

    @property
    def _is_last(self) -> bool:
        """Whether this is the innermost axis of more than one rank.

        DTensor takes the axes one by one and skips those of one rank. Only all axes together
        tell which rows are meant, so the last one does the work of all.
        """
        active = [number for number, size in enumerate(self.axes.sizes) if size > 1]
        return self.position == (active[-1] if active else 0)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks on each shard axis, outermost first."""
        return self.axes.sizes

    @property
    def coordinate(self) -> tuple[int, ...]:
        """This rank's index on each shard axis."""
        return self.axes.coordinate

    @property
    def _ranks(self) -> int:
        """Ranks on this axis."""
        return self.axes.sizes[self.position]

    def _first_row_and_rows(self, index: int) -> tuple[int, int]:
        """Of the rank ``index`` on this axis, other axes as this rank."""
        segment = self.axes.segments_along(self.axes.axes[self.position])[index]
        return sum(self.rows[:segment]), self.rows[segment]

    # DTensor's hooks. "Plain" below is what DTensor believes the outer axes hold.

    def _local_shard_size_and_offset(
        self, curr_local_size: int, num_chunks: int, rank: int | torch.SymInt
    ) -> tuple[int, int | torch.SymInt]:
        """``(rows, first row)`` on ``rank`` of this axis; checkpoints rely on it."""
        if not self._is_last or num_chunks != self._ranks:
            return curr_local_size, 0
        first, rows = self._first_row_and_rows(int(rank))
        return rows, first

    def _to_replicate_tensor(
        self,
        local_tensor: torch.Tensor,
        mesh: DeviceMesh,
        mesh_dim: int,
        current_logical_shape: Sequence[int | torch.SymInt],
    ) -> torch.Tensor:
        """Shard -> Replicate on one axis.

        The last axis gathers over all of them and keeps what a plain ``Shard(0)`` on the outer
        axes holds; those then go on as plain ones.
        """
        if mesh.size(mesh_dim) == self.axes.num_shards:
            # One axis, or several that DTensor flattened into one (last axis fastest).
            return self._gather(local_tensor, mesh, [mesh_dim])
        if not self._is_last:
            return super()._to_replicate_tensor(local_tensor, mesh, mesh_dim, current_logical_shape)
        first_axis = mesh_dim - self.position
        full = self._gather(local_tensor, mesh, list(range(first_axis, mesh_dim + 1)))
        for size, index in zip(
            self.axes.sizes, self.axes.coordinate[: self.position], strict=False
        ):
            full = full.narrow(0, *_chunk(full.shape[0], size, index))
        return full.contiguous()

    def _replicate_to_shard(
        self,
        local_tensor: torch.Tensor,
        mesh: DeviceMesh,
        mesh_dim: int,
        shard_index: int | torch.SymInt,
    ) -> torch.Tensor:
        """Replicate -> shard: the outer axes keep everything, the last one takes its rows."""
        if not self._is_last:
            return local_tensor
        if local_tensor.shape[0] != sum(self.rows):
            raise RuntimeError(
                f"expected the full {sum(self.rows)} rows of a tensor replicated on every shard "
                f"axis, found {local_tensor.shape[0]}; redistribute it to Replicate() first"
            )
        return local_tensor.narrow(0, *self._first_row_and_rows(int(shard_index))).clone()

    def _reduce_shard_tensor(
        self, tensor: torch.Tensor, mesh: DeviceMesh, reduce_op: str, mesh_dim: int
    ) -> torch.Tensor:
        """Partial -> shard on one axis."""
        if mesh.size(mesh_dim) != self.axes.num_shards or reduce_op not in ("sum", "avg"):
            raise NotImplementedError(
                f"Partial({reduce_op!r}) to Shard(0) over {len(self.axes.axes)} axes of a DBuffer: "
                "not implemented; redistribute to Replicate() first"
            )
        index = mesh.get_local_rank(mesh_dim)
        _, own_rows = self._first_row_and_rows(index)
        width = math.prod(tensor.shape[1:])
        output = tensor.new_empty((own_rows, *tensor.shape[1:]))
        lane = make_lane(tensor.device, "dtensor")
        lane.wait_current()
        reduce_scatter(
            lane,
            output.view(-1),
            tensor.contiguous().view(-1),
            mesh.get_group(mesh_dim),
            [count * width for count in self._rows_by_index()],
            average=reduce_op == "avg",
            label="dtensor",
        )
        lane.synchronize()
        return output

    def _to_new_shard_dim(
        self,
        local_tensor: torch.Tensor,
        mesh: DeviceMesh,
        mesh_dim: int,
        current_logical_shape: Sequence[int | torch.SymInt],
        new_shard_dim: int,
    ) -> torch.Tensor:
        """Shard(0) -> Shard(n): by way of Replicate."""
        full = self._to_replicate_tensor(local_tensor, mesh, mesh_dim, current_logical_shape)
        chunk = _chunk(
            full.shape[new_shard_dim], mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim)
        )
        return full.narrow(new_shard_dim, *chunk).contiguous()

    def _rows_by_index(self) -> list[int]:
        """Rows of each rank of this axis, other axes as this rank."""
        return [self._first_row_and_rows(index)[1] for index in range(self._ranks)]

    def _gather(
        self, local_tensor: torch.Tensor, mesh: DeviceMesh, mesh_axes: Sequence[int]
    ) -> torch.Tensor:
        """The full tensor, gathered over ``mesh_axes``, which together are the shard axes.

        Innermost axis first. What one rank holds after each step are the pieces of the ranks that
        share its coordinate on the axes still to do, in the order of their coordinates:

            sizes (outer 2, inner 2), rank (1, 0)   |1,0|  ->  |1,0|1,1|  ->  |0,0|0,1|1,0|1,1|
        """
        row_shape = local_tensor.shape[1:]
        width = math.prod(row_shape)
        coordinates = list(itertools.product(*(range(size) for size in self.axes.sizes)))
        segments = [self.axes.number_of(coordinate) for coordinate in coordinates]
        numels = [self.rows[segment] * width for segment in segments]
        lane = make_lane(local_tensor.device, "dtensor")
        lane.wait_current()
        held, pieces = local_tensor.contiguous().view(-1), 1
        for done, axis in enumerate(reversed(mesh_axes), start=1):
            ranks, prefix = mesh.size(axis), self.axes.coordinate[: len(mesh_axes) - done]
            first = next(i for i, c in enumerate(coordinates) if c[: len(prefix)] == prefix)
            bounds = range(first, first + ranks * pieces, pieces)
            sizes = [sum(numels[start : start + pieces]) for start in bounds]
            full = held.new_empty(sum(sizes))
            group = mesh.get_group(axis)
            all_gather(lane, full, held, group, sizes, depends=True, label="dtensor")
            held, pieces = full, pieces * ranks
        lane.synchronize()
        parts = dict(zip(segments, torch.split(held, numels), strict=True))
        return torch.cat([parts[segment] for segment in sorted(parts)]).view(
            sum(self.rows), *row_shape
        )


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


def _chunk(length: int, ranks: int, index: int) -> tuple[int, int]:
    """``(start, length)`` of a rank's part of a dim that is cut like ``torch.chunk``."""
    step = -(-length // ranks)
    start = min(step * index, length)
    return start, min(step, length - start)
