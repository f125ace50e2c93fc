"""DTensors over pieces of a DBuffer.

DTensor cuts a dim like ``torch.chunk``; a DBuffer cuts a flat buffer, so a rank's rows of one
tensor are few, many or none. `RowShard` is the ``Shard(0)`` that knows them:

    DTensor's own (5, 4) on 2 ranks      rows 0 1 2 | 3 4
    a DBuffer's, for example             rows 0 1 2 3 4 | (none)

It overrides the private methods of ``Shard`` through which DTensor moves data and computes
local shapes; they have been the same since torch 2.11. torch may drop the subclass from a
tensor that an operator returns (an optimizer's state): only DTensors made here are exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from compile_fsdp.runtime.collectives import all_gather, reduce_scatter
from compile_fsdp.runtime.streams import make_lane

__all__ = ["RowShard", "make_dtensor", "segment_number"]


def segment_number(coordinate: Sequence[int], sizes: Sequence[int]) -> int:
    """Number of a rank's segment, given its coordinate on the shard axes, outermost first.

    The innermost axis is the most significant digit, so that the pieces of one inner rank are
    adjacent and gathering them over the outer axes yields one contiguous piece:

        segment        0      1      2      3        sizes (outer 2, inner 2)
        (outer, inner) (0,0)  (1,0)  (0,1)  (1,1)
    """
    number = 0
    for index, size in zip(reversed(coordinate), reversed(sizes), strict=True):
        number = number * size + index
    return number


class RowShard(Shard):
    """``Shard(0)`` that knows the rows of every segment.

    Equal to a plain ``Shard(0)`` both ways: DTensor compares placements to tell whether an
    operator must redistribute, and rows of the buffers of one group always match. Its hash
    differs on purpose. DTensor caches redistribution plans, which hold placements, by spec; with
    an equal hash it would use here a plan made for a plain DTensor of the same shape, whose
    all-gather returns wrong rows without an error. Python and C++ compare hashes first.

    Attributes:
        rows: Number of rows of each segment.
        sizes: Sizes of the shard axes, outermost first.
        coordinate: This rank's coordinate on those axes.
        position: Which of those axes this placement is for.
    """

    def __init__(
        self,
        rows: tuple[int, ...],
        sizes: tuple[int, ...],
        coordinate: tuple[int, ...],
        position: int,
    ) -> None:
        super().__init__(0)
        self.rows = rows
        self.sizes = sizes
        self.coordinate = coordinate
        self.position = position

    def _key(self) -> tuple[object, ...]:
        return (self.rows, self.sizes, self.coordinate, self.position)

    def __hash__(self) -> int:
        return hash((RowShard, self._key()))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RowShard):
            return self._key() == other._key()
        return isinstance(other, Shard) and other.dim == 0

    def __reduce__(self) -> tuple[object, ...]:
        # Shard's own pickling forgets the attributes of subclasses.
        return (RowShard, (self.rows, self.sizes, self.coordinate, self.position))

    @property
    def _is_last(self) -> bool:
        """Whether this is the innermost axis of more than one rank.

        DTensor takes the axes one by one and skips those of one rank. Only all axes together
        tell which rows are meant, so the last one does the work of all.
        """
        active = [number for number, size in enumerate(self.sizes) if size > 1]
        return self.position == (active[-1] if active else 0)

    def _first_row_and_rows(self, index: int) -> tuple[int, int]:
        coordinate = list(self.coordinate)
        coordinate[self.position] = index
        segment = segment_number(coordinate, self.sizes)
        return sum(self.rows[:segment]), self.rows[segment]

    # DTensor's hooks. "Plain" below is what DTensor believes the outer axes hold.

    def _local_shard_size_and_offset(
        self, curr_local_size: int, num_chunks: int, rank: int
    ) -> tuple[int, int]:
        """``(rows, first row)`` on ``rank`` of this axis; checkpoints rely on it."""
        if not self._is_last or num_chunks != self.sizes[self.position]:
            return curr_local_size, 0
        first, rows = self._first_row_and_rows(int(rank))
        return rows, first

    def _to_replicate_tensor(
        self,
        local_tensor: torch.Tensor,
        mesh: DeviceMesh,
        mesh_dim: int,
        current_logical_shape: Sequence[int],
    ) -> torch.Tensor:
        """Shard -> Replicate on one axis.

        The last axis gathers over all of them and keeps what a plain ``Shard(0)`` on the outer
        axes holds; those then go on as plain ones.
        """
        if mesh.size(mesh_dim) == math.prod(self.sizes):
            # One axis, or several that DTensor flattened into one (last axis fastest).
            return self._gather(local_tensor, mesh, [mesh_dim])
        if not self._is_last:
            return super()._to_replicate_tensor(local_tensor, mesh, mesh_dim, current_logical_shape)
        first_axis = mesh_dim - self.position
        full = self._gather(local_tensor, mesh, list(range(first_axis, mesh_dim + 1)))
        for size, index in zip(self.sizes, self.coordinate[: self.position], strict=False):
            full = full.narrow(0, *_chunk(full.shape[0], size, index))
        return full.contiguous()

    def _replicate_to_shard(
        self, local_tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, shard_index: int
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
        if mesh.size(mesh_dim) != math.prod(self.sizes) or reduce_op not in ("sum", "avg"):
            raise NotImplementedError(
                f"Partial({reduce_op!r}) to a shard over {len(self.sizes)} axes that is cut by "
                "rows of a DBuffer; redistribute to Replicate() first"
            )
        index = mesh.get_local_rank(mesh_dim)
        _, own_rows = self._first_row_and_rows(index)
        width = math.prod(tensor.shape[1:])
        output = tensor.new_empty((own_rows, *tensor.shape[1:]))
        lane = make_lane(tensor.device, "dtensor")
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
        current_logical_shape: Sequence[int],
        new_shard_dim: int,
    ) -> torch.Tensor:
        """Shard(0) -> Shard(n): by way of Replicate."""
        full = self._to_replicate_tensor(local_tensor, mesh, mesh_dim, current_logical_shape)
        chunk = _chunk(
            full.shape[new_shard_dim], mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim)
        )
        return full.narrow(new_shard_dim, *chunk).contiguous()

    def _rows_by_index(self) -> list[int]:
        """Rows of each rank of this axis, when no other axis has more than one rank."""
        return [self._first_row_and_rows(index)[1] for index in range(self.sizes[self.position])]

    def _gather(
        self, local_tensor: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int]
    ) -> torch.Tensor:
        """The full tensor, gathered over mesh ``axes`` that together are the shard axes.

        Innermost axis first, so that pieces arrive with the last axis fastest.
        """
        row_shape = local_tensor.shape[1:]
        width = math.prod(row_shape)
        flat = local_tensor.contiguous().view(-1)
        coordinates = list(itertools.product(*(range(size) for size in self.sizes)))
        rows = [self.rows[segment_number(each, self.sizes)] for each in coordinates]
        lane = make_lane(local_tensor.device, "dtensor")
        inner_ranks = 1
        for number, axis in reversed(list(enumerate(axes))):
            ranks = mesh.size(axis)
            pieces = inner_ranks * ranks
            # Pieces are numbered with the last axis fastest; these are those of the ranks that
            # share this rank's coordinate on the axes outside of this one.
            first = pieces * segment_number(
                self.coordinate[:number][::-1], self.sizes[:number][::-1]
            )
            sizes = [
                sum(rows[first + i * inner_ranks : first + (i + 1) * inner_ranks]) * width
                for i in range(ranks)
            ]
            output = flat.new_empty(sum(sizes))
            all_gather(
                lane, output, flat, mesh.get_group(axis), sizes, depends=True, label="dtensor"
            )
            flat, inner_ranks = output, pieces
        lane.synchronize()
        parts = flat.split([count * width for count in rows])
        by_segment = sorted(
            range(len(parts)), key=lambda i: segment_number(coordinates[i], self.sizes)
        )
        return torch.cat([parts[i] for i in by_segment]).view(sum(self.rows), *row_shape)


def make_dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    rows: Sequence[int],
) -> DTensor:
    """A DTensor over this rank's rows of one tensor of a flat buffer. No communication.

    Args:
        local: This rank's rows, shape ``(n_rows, *shape[1:])``; aliased, not copied.
        mesh: The mesh of ``placements``.
        placements: One for each mesh axis; shard axes are a suffix.
        shape: The tensor's full shape.
        rows: Rows of each segment of the shard axes.
    """
    axes = [axis for axis, placement in enumerate(placements) if isinstance(placement, Shard)]
    sizes = tuple(mesh.size(axis) for axis in axes)
    coordinate = tuple(mesh.get_local_rank(axis) for axis in axes)
    exact: list[Placement] = list(placements)
    for position, axis in enumerate(axes):
        exact[axis] = RowShard(tuple(rows), sizes, coordinate, position)
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        local, mesh, exact, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _chunk(length: int, ranks: int, index: int) -> tuple[int, int]:
    """``(start, length)`` of a rank's part of a dim that is cut like ``torch.chunk``."""
    step = -(-length // ranks)
    start = min(step * index, length)
    return start, min(step, length - start)
