"""Where tensors lie in a flat buffer, and where the buffer is cut between ranks.

A layout is pure arithmetic: the same on every rank, made once for all buffers of a parameter
group. Offsets and sizes count elements. The padded layout of shapes (5, 4), (2, 6) and (3,) on
two ranks, whose rows of 4, 6 and 1 elements have a least common multiple (the *chunk*) of 12:

    0                       20    23  24            36             48
    | (5, 4): rows 0..4      | (3,) | | (2, 6)       | padding      |
    |<-------- rank 0, 24 elements -->|<-------- rank 1, 24 -------->|

A tensor of at least a chunk starts on a chunk boundary; (3,) fills the gap after the first.
Segments are multiples of the chunk, so a cut that meets a tensor meets it between rows.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch.distributed.tensor import Shard

from compile_fsdp.runtime.layout_search import (
    Placer,
    TensorToPlace,
    find_segments,
    least_segment,
    round_up,
)
from compile_fsdp.runtime.placement import BlockAtomic, Flat, ShardLayout, TensorAtomic

__all__ = [
    "GlobalLayout",
    "least_padded_size",
    "make_layout",
    "packed_layout",
    "padded_layout",
    "tensor_atomic_layout",
]

Shape = tuple[int, ...]

# When padding is worth a search, and then unequal segments: as a share of the payload, and in
# elements a rank, below which padding costs nothing that anyone could measure.
_MAX_WASTE = 0.03
_SMALL_WASTE = 256


@dataclass(frozen=True)
class GlobalLayout:
    """A flat buffer's tensors and its segments.

    Attributes:
        tensor_shapes: Shapes in tensor order. A 0-D tensor is one row of one element.
        tensor_to_offset: First element of each tensor.
        size: Elements of the whole buffer, padding included.
        rank_to_offset: First element of each segment, not decreasing; segment i ends where
            segment i + 1 starts, the last one at ``size``. Its length is the shard count.
    """

    tensor_shapes: tuple[Shape, ...]
    tensor_to_offset: tuple[int, ...]
    size: int
    rank_to_offset: tuple[int, ...]

    @property
    def num_shards(self) -> int:
        """Number of segments."""
        return len(self.rank_to_offset)

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements of each tensor."""
        return tuple(math.prod(shape) for shape in self.tensor_shapes)

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        return (*self.rank_to_offset, self.size)

    @property
    def waste(self) -> int:
        """Elements of the buffer that belong to no tensor."""
        return self.size - sum(self.numels)

    def segment(self, rank: int, num_shards: int | None = None) -> tuple[int, int]:
        """The elements ``[start, stop)`` of one rank's segment.

        Args:
            rank: Segment number.
            num_shards: Cut into this many segments, each of as many of the layout's own;
                by default the layout's own.

        Raises:
            ValueError: ``num_shards`` does not divide the shard count, or there is no such
                segment.
        """
        num_shards = self.num_shards if num_shards is None else num_shards
        if num_shards < 1 or self.num_shards % num_shards:
            raise ValueError(
                f"a layout of {self.num_shards} segments cannot be cut into {num_shards}: "
                "expected a divisor"
            )
        if not 0 <= rank < num_shards:
            raise ValueError(f"segment {rank} of {num_shards}: expected 0..{num_shards - 1}")
        merged = self.num_shards // num_shards
        return self._bounds[rank * merged], self._bounds[(rank + 1) * merged]

    def elements(self, index: int, rank: int, num_shards: int | None = None) -> tuple[int, int]:
        """The elements ``[first, last)`` of tensor ``index``, from its start, on ``rank``."""
        start, stop = self.segment(rank, num_shards)
        offset, numel = self.tensor_to_offset[index], self.numels[index]
        first = min(max(start - offset, 0), numel)
        return first, min(max(stop - offset, first), numel)

    def rows(self, index: int, rank: int, num_shards: int | None = None) -> tuple[int, int]:
        """``(first_row, n_rows)`` of tensor ``index`` that lie in the segment of ``rank``.

        A tensor without elements belongs to the segment that holds its offset.

        Raises:
            ValueError: The layout cuts through a row (``Flat``).
        """
        rows, width = _rows_and_width(self.tensor_shapes[index])
        if rows * width == 0:
            return (0, rows) if rank == self._segment_at_start(index, num_shards) else (0, 0)
        first, last = self.elements(index, rank, num_shards)
        if first % width or last % width:
            raise ValueError(
                f"tensor {index} of shape {self.tensor_shapes[index]}: segment {rank} holds its "
                f"elements {first}..{last}, which is not whole rows of {width}; the layout is "
                "Flat. Use RowAtomic where rows are needed"
            )
        return first // width, (last - first) // width

    def rows_by_segment(self, index: int, num_shards: int | None = None) -> tuple[int, ...]:
        """How many rows of tensor ``index`` each segment holds; arguments and errors as `rows`."""
        num_shards = self.num_shards if num_shards is None else num_shards
        counts = [0] * num_shards
        offset, numel = self.tensor_to_offset[index], self.numels[index]
        for rank in range(self._segment_at_start(index, num_shards), num_shards):
            if self.segment(rank, num_shards)[0] >= offset + max(numel, 1):
                break
            counts[rank] = self.rows(index, rank, num_shards)[1]
        return tuple(counts)

    def _segment_at_start(self, index: int, num_shards: int | None) -> int:
        """The segment that holds the tensor's offset."""
        own = bisect_right(self.rank_to_offset, self.tensor_to_offset[index]) - 1
        return own * (num_shards or self.num_shards) // self.num_shards


def make_layout(
    shapes: Sequence[Sequence[int]],
    num_shards: int,
    *,
    shard: Shard | None = None,
    shard_layout: ShardLayout = ShardLayout.PADDED,
    owners: Sequence[int] | None = None,
    alignment: int = 1,
) -> GlobalLayout:
    """The layout that keeps the promise of ``shard`` (None: nothing is cut).

    Args:
        shapes: One shape for each tensor.
        num_shards: Number of segments.
        shard: A ``Shard(0)`` or a subclass of `compile_fsdp.runtime.placement`.
        shard_layout: Equal segments or no padding; without meaning for ``TensorAtomic``. Where
            equal segments cannot do with at most 3 % of padding, ``PADDED`` has unequal ones too.
        owners: For ``TensorAtomic``, the rank that owns each tensor.
        alignment: Tensors and segments start at multiples of so many elements; 1 = anywhere.

    Raises:
        ValueError: ``TensorAtomic`` without ``owners``; an argument that is out of range.
    """
    if isinstance(shard, TensorAtomic):
        if owners is None:
            raise ValueError("TensorAtomic needs the rank that owns each tensor; pass owners=")
        return tensor_atomic_layout(shapes, owners, num_shards, alignment=alignment)
    block = shard.rows if isinstance(shard, BlockAtomic) else 1
    block = 0 if isinstance(shard, Flat) else block
    if shard_layout is ShardLayout.PADDED:
        layout = padded_layout(shapes, num_shards, block=block, alignment=alignment)
        if not _is_wasteful(layout):
            return layout
    return packed_layout(shapes, num_shards, block=block, alignment=alignment)


def _is_wasteful(layout: GlobalLayout) -> bool:
    payload = layout.size - layout.waste
    return layout.waste > max(_MAX_WASTE * payload, _SMALL_WASTE * layout.num_shards)


def padded_layout(
    shapes: Sequence[Sequence[int]], num_shards: int, *, block: int = 1, alignment: int = 1
) -> GlobalLayout:
    """Equal segments; rows, or blocks of ``block`` rows, stay whole.

    Args:
        shapes: One shape for each tensor.
        num_shards: Number of segments.
        block: Rows that are never split from one another; 0 allows any cut (``Flat``).
        alignment: Tensors and segments start at multiples of so many elements.

    Tensors are placed by the chunk rule of the module's picture. Where that wastes more than 3 %
    and more than 256 elements a rank (the chunk of rows 1009 and 1013 is a million elements), a
    search over segment sizes replaces it if it finds a smaller buffer.
    """
    tensors = _tensors(shapes, num_shards, block, alignment)
    layout = _chunked(tensors, num_shards, alignment)
    if _is_wasteful(layout):
        found = find_segments(tensors, num_shards, alignment, layout.size)
        if found is not None:
            segment, offsets = found
            return _equal_segments(tensors, offsets, segment * num_shards, num_shards)
    return layout


def least_padded_size(
    shapes: Sequence[Sequence[int]], num_shards: int, *, block: int = 1, alignment: int = 1
) -> int:
    """Elements below which no layout of equal segments exists, in whatever order; arguments as
    for `padded_layout`.

    What `padded_layout` wastes up to here is the price of equal segments, of whole rows and of
    tensors in one piece, not of the plan; ``ShardLayout.PACKED`` does not pay it. See
    `compile_fsdp.runtime.layout_search.least_segment`.
    """
    tensors = _tensors(shapes, num_shards, block, alignment)
    return least_segment(tensors, num_shards, alignment) * num_shards


def packed_layout(
    shapes: Sequence[Sequence[int]], num_shards: int, *, block: int = 1, alignment: int = 1
) -> GlobalLayout:
    """Tensors in order, back to back; each cut at the legal place nearest to an equal share.

    Arguments as for `padded_layout`. With ``alignment`` > 1 there are gaps of less than the
    alignment before tensors, and cuts are made at aligned places only.

        | (5, 4)                | (2, 6)    | (3,) |        35 elements, 2 ranks
        |<--- rank 0, 16 -->|<------- rank 1, 19 ------>|   a row of 4 ends nearest to 17.5
    """
    tensors = _tensors(shapes, num_shards, block, alignment)
    offsets: list[int] = []
    size = 0
    for tensor in tensors:
        offsets.append(round_up(size, alignment))
        size = offsets[-1] + tensor.numel
    starts = [0]
    for rank in range(1, num_shards):
        ideal = rank * size / num_shards
        cut = _nearest_cut(ideal, tensors, offsets, size, alignment)
        starts.append(max(cut, starts[-1]))
    return GlobalLayout(_shapes(tensors), tuple(offsets), size, tuple(starts))


def tensor_atomic_layout(
    shapes: Sequence[Sequence[int]],
    owners: Sequence[int],
    num_shards: int,
    *,
    alignment: int = 1,
) -> GlobalLayout:
    """Every tensor whole on its owner: ordered by owner, then in tensor order.

    Args:
        shapes: One shape for each tensor.
        owners: The segment number of each tensor.
        num_shards: Number of segments; one without a tensor is empty.
        alignment: Tensors and segments start at multiples of so many elements.

    Raises:
        ValueError: ``owners`` has another length than ``shapes`` or is out of range.
    """
    tensors = _tensors(shapes, num_shards, 1, alignment)
    if len(owners) != len(tensors):
        raise ValueError(
            f"owners: expected one for each of {len(tensors)} tensors, found {len(owners)}"
        )
    for index, owner in enumerate(owners):
        if not 0 <= owner < num_shards:
            raise ValueError(
                f"owner of tensor {index}: expected a rank in 0..{num_shards - 1}, found {owner}"
            )
    offsets = [0] * len(tensors)
    starts: list[int] = []
    size = 0
    for rank in range(num_shards):
        size = round_up(size, alignment)
        starts.append(size)
        for index, tensor in enumerate(tensors):
            if owners[index] == rank:
                offsets[index] = round_up(size, alignment)
                size = offsets[index] + tensor.numel
    return GlobalLayout(_shapes(tensors), tuple(offsets), size, tuple(starts))


def _tensors(
    shapes: Sequence[Sequence[int]], num_shards: int, block: int, alignment: int
) -> list[TensorToPlace]:
    if num_shards < 1 or block < 0 or alignment < 1:
        raise ValueError(
            "expected num_shards >= 1, block >= 0 and alignment >= 1, found "
            f"{num_shards}, {block} and {alignment}"
        )
    tensors = []
    for index, shape in enumerate(map(tuple, shapes)):
        rows, width = _rows_and_width(shape)
        unit = 1 if rows * width == 0 or block == 0 else width * block
        # Cuts are aligned, and so are starts.
        tensors.append(TensorToPlace(index, shape, rows * width, math.lcm(unit, alignment)))
    return tensors


def _rows_and_width(shape: Shape) -> tuple[int, int]:
    """Number of dim-0 rows and elements of a row."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def _shapes(tensors: Sequence[TensorToPlace]) -> tuple[Shape, ...]:
    return tuple(tensor.shape for tensor in tensors)


def _nearest_cut(
    ideal: float,
    tensors: Sequence[TensorToPlace],
    offsets: Sequence[int],
    size: int,
    alignment: int,
) -> int:
    """The legal cut nearest to ``ideal``, the lower of two: a tensor's start or a row's."""
    candidates = [0, size] if size % alignment == 0 else [0]
    following = bisect_right(offsets, ideal)
    candidates += offsets[following : following + 1]
    if following:
        tensor, offset = tensors[following - 1], offsets[following - 1]
        below = offset + tensor.unit * (int(ideal - offset) // tensor.unit)
        ends = offset + tensor.numel
        candidates += [offset, *(cut for cut in (below, below + tensor.unit) if cut < ends)]
    return min(candidates, key=lambda cut: (abs(cut - ideal), cut))


def _chunked(tensors: Sequence[TensorToPlace], num_shards: int, alignment: int) -> GlobalLayout:
    """The chunk rule; see the module's picture."""
    chunk = math.lcm(alignment, *(tensor.unit for tensor in tensors))

    def first_legal(start: int, tensor: TensorToPlace) -> int:
        return round_up(start, tensor.unit)

    placer = Placer(len(tensors))
    waiting = [tensor for tensor in tensors if tensor.numel >= chunk]
    while waiting:
        tensor = waiting.pop(0)
        placer.put(tensor, round_up(placer.end, chunk))
        # A later tensor may start in the gap before the next chunk boundary, with what it has
        # beyond whole chunks, if that is whole rows (a last block may be short): it ends on a
        # boundary then, so boundaries inside of it are between rows.
        gap_end = round_up(placer.end, chunk)
        for partner in waiting:
            head = partner.numel % chunk
            if 0 < head <= gap_end - placer.end and head % partner.unit == 0:
                waiting.remove(partner)
                placer.put(partner, gap_end - head)
                break
    # Python's sort is stable: tensor order decides between equals.
    small = sorted((t for t in tensors if t.numel < chunk), key=lambda tensor: -tensor.numel)
    placer.fill(small, first_legal)
    size = round_up(placer.end, chunk * num_shards)
    return _equal_segments(tensors, placer.offsets, size, num_shards)


def _equal_segments(
    tensors: Sequence[TensorToPlace], offsets: Sequence[int], size: int, num_shards: int
) -> GlobalLayout:
    starts = tuple(size // num_shards * rank for rank in range(num_shards))
    return GlobalLayout(_shapes(tensors), tuple(offsets), size, starts)
