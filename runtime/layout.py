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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch.distributed.tensor import Shard

from compile_fsdp.runtime.placement import BlockAtomic, Flat, ShardLayout, TensorAtomic

__all__ = [
    "GlobalLayout",
    "make_layout",
    "packed_layout",
    "padded_layout",
    "tensor_atomic_layout",
]

Shape = tuple[int, ...]

# When the chunk rule's padding is worth a search: as a share of the payload, and in elements a
# rank, below which padding costs nothing that anyone could measure.
_MAX_WASTE = 0.03
_SMALL_WASTE = 256
# The search tries segment sizes in steps of 1/256, up to 1/8 above each of its starting points.
_STEPS_PER_SHARE = 256
_STEPS = 32


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
        stop = (rank + 1) * merged
        bounds = (*self.rank_to_offset, self.size)
        return bounds[rank * merged], bounds[stop]

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
            return (0, rows) if rank == self._owner_of_empty(index, num_shards) else (0, 0)
        first, last = self.elements(index, rank, num_shards)
        if first % width or last % width:
            raise ValueError(
                f"tensor {index} of shape {self.tensor_shapes[index]}: segment {rank} holds its "
                f"elements {first}..{last}, which is not whole rows of {width}; the layout is "
                "Flat. Use RowAtomic where rows are needed"
            )
        return first // width, (last - first) // width

    def _owner_of_empty(self, index: int, num_shards: int | None) -> int:
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
        shard_layout: Equal segments or no padding; without meaning for ``TensorAtomic``.
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
    flat = isinstance(shard, Flat)
    build = padded_layout if shard_layout is ShardLayout.PADDED else packed_layout
    return build(shapes, num_shards, block=0 if flat else block, alignment=alignment)


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
    payload = layout.size - layout.waste
    if layout.waste > max(_MAX_WASTE * payload, _SMALL_WASTE * num_shards):
        return _searched(tensors, num_shards, alignment, layout.size) or layout
    return layout


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
        offsets.append(_round_up(size, alignment))
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
        size = _round_up(size, alignment)
        starts.append(size)
        for index, tensor in enumerate(tensors):
            if owners[index] == rank:
                offsets[index] = _round_up(size, alignment)
                size = offsets[index] + tensor.numel
    return GlobalLayout(_shapes(tensors), tuple(offsets), size, tuple(starts))


@dataclass(frozen=True)
class _Tensor:
    """A tensor to place: ``unit`` elements from its start are never split."""

    index: int
    shape: Shape
    numel: int
    unit: int


def _tensors(
    shapes: Sequence[Sequence[int]], num_shards: int, block: int, alignment: int
) -> list[_Tensor]:
    if num_shards < 1 or block < 0 or alignment < 1:
        raise ValueError(
            "expected num_shards >= 1, block >= 0 and alignment >= 1, found "
            f"{num_shards}, {block} and {alignment}"
        )
    tensors = []
    for index, shape in enumerate(map(tuple, shapes)):
        rows, width = _rows_and_width(shape)
        unit = 1 if rows * width == 0 or block == 0 else width * block
        tensors.append(_Tensor(index, shape, rows * width, unit))
    return tensors


def _rows_and_width(shape: Shape) -> tuple[int, int]:
    """Number of dim-0 rows and elements of a row."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def _shapes(tensors: Sequence[_Tensor]) -> tuple[Shape, ...]:
    return tuple(tensor.shape for tensor in tensors)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _nearest_cut(
    ideal: float, tensors: Sequence[_Tensor], offsets: Sequence[int], size: int, alignment: int
) -> int:
    """The legal cut nearest to ``ideal``, the lower of two: a tensor's start or a row's."""
    candidates = [0, size] if size % alignment == 0 else [0]
    for tensor, offset in zip(tensors, offsets, strict=True):
        step = math.lcm(tensor.unit, alignment)
        below = offset + step * max(0, int(ideal - offset) // step)
        candidates += [
            cut for cut in (offset, below, below + step) if cut <= offset + tensor.numel - 1
        ]
    return min(candidates, key=lambda cut: (abs(cut - ideal), cut))


def _chunked(tensors: Sequence[_Tensor], num_shards: int, alignment: int) -> GlobalLayout:
    """The chunk rule; see the module's picture."""
    chunk = math.lcm(alignment, *(tensor.unit for tensor in tensors))

    def first_legal(start: int, tensor: _Tensor) -> int:
        return _round_up(start, math.lcm(tensor.unit, alignment))

    placer = _Placer(len(tensors))
    waiting = [tensor for tensor in tensors if tensor.numel >= chunk]
    while waiting:
        tensor = waiting.pop(0)
        placer.put(tensor, _round_up(placer.end, chunk))
        # A later tensor may start in the gap before the next chunk boundary, with what it has
        # beyond whole chunks, if that is whole rows (a last block may be short): it ends on a
        # boundary then, so boundaries inside of it are between rows.
        gap_end = _round_up(placer.end, chunk)
        for partner in waiting:
            head = partner.numel % chunk
            if 0 < head <= gap_end - placer.end and head % math.lcm(partner.unit, alignment) == 0:
                waiting.remove(partner)
                placer.put(partner, gap_end - head)
                break
    placer.fill([tensor for tensor in tensors if tensor.numel < chunk], first_legal)
    return _equal_segments(tensors, placer, _round_up(placer.end, chunk * num_shards), num_shards)


def _searched(
    tensors: Sequence[_Tensor], num_shards: int, alignment: int, limit: int
) -> GlobalLayout | None:
    """The best layout of equal segments that the search finds below ``limit`` elements.

    The chunk rule lets a cut fall anywhere in any tensor. But there are only ``num_shards - 1``
    cuts. Given the segment size, a tensor that at most one cut meets can be shifted by less than
    a row so that the cut falls between rows; only one that two cuts meet needs a segment size
    which is a multiple of its row. So coprime rows cost a shift for each cut, not a common
    multiple, as long as no two tensors with them are larger than two segments (then no layout of
    equal segments does better than a multiple of both; use ``ShardLayout.PACKED``).
    """
    total = sum(tensor.numel for tensor in tensors)
    for segment in _segment_candidates(tensors, num_shards, alignment):
        if segment * num_shards >= limit:
            return None
        if segment * num_shards < total:
            continue
        placer = _Placer(len(tensors))

        def first_legal(start: int, tensor: _Tensor, segment: int = segment) -> int | None:
            return _first_legal_offset(start, tensor, segment, alignment)

        if placer.fill(tensors, first_legal) and placer.end <= segment * num_shards:
            return _equal_segments(tensors, placer, segment * num_shards, num_shards)
    return None


def _segment_candidates(
    tensors: Sequence[_Tensor], num_shards: int, alignment: int
) -> Sequence[int]:
    """Segment sizes worth a try, ascending.

    From an equal share upwards, and from each size at which one tensor fewer is met by two cuts
    or has to be; rounded to what the larger tensors ask for.
    """
    share = -(-sum(tensor.numel for tensor in tensors) // num_shards)
    bounds = {share}
    for tensor in tensors:
        bounds |= {bound for bound in (tensor.numel, -(-tensor.numel // 2)) if bound > share}
    candidates = set()
    for bound in bounds:
        for must in (bound, 2 * bound):
            multiple = math.lcm(alignment, *(t.unit for t in tensors if t.numel > must))
            step = _round_up(max(1, bound // _STEPS_PER_SHARE), multiple)
            first = _round_up(bound, multiple)
            candidates |= {first + step * number for number in range(_STEPS)}
    return sorted(candidates)


def _first_legal_offset(start: int, tensor: _Tensor, segment: int, alignment: int) -> int | None:
    """The first offset from ``start`` on at which cuts every ``segment`` meet whole units only.

    None: there is none in the segment that holds ``start`` nor in the next.
    """
    start = _round_up(start, alignment)
    next_cut = _round_up(start + 1, segment)
    step = math.lcm(tensor.unit, alignment)
    candidates = (
        start,
        # Whole steps before the next cut; at it; whole steps before the one after it.
        next_cut - (next_cut - start) // step * step,
        next_cut,
        next_cut + segment % step,
    )
    for offset in candidates:
        first_cut = _round_up(offset + 1, segment)
        after_cut = offset + tensor.numel - first_cut
        if after_cut <= 0:
            return offset
        if (first_cut - offset) % tensor.unit == 0 and (
            after_cut <= segment or segment % tensor.unit == 0
        ):
            return offset
    return None


def _equal_segments(
    tensors: Sequence[_Tensor], placer: _Placer, size: int, num_shards: int
) -> GlobalLayout:
    starts = tuple(size // num_shards * rank for rank in range(num_shards))
    return GlobalLayout(_shapes(tensors), tuple(placer.offsets), size, starts)


class _Placer:
    """Puts tensors at offsets and remembers the gaps between them.

    | a tensor         | gap | a tensor     | gap | a tensor | end
    """

    def __init__(self, count: int) -> None:
        self.offsets = [0] * count
        self.end = 0
        self._gaps: list[tuple[int, int]] = []

    def put(self, tensor: _Tensor, offset: int) -> None:
        """Place a tensor at or after the end."""
        if offset > self.end:
            self._gaps.append((self.end, offset))
        self.offsets[tensor.index] = offset
        self.end = offset + tensor.numel

    def fill(
        self, tensors: Sequence[_Tensor], first_legal: Callable[[int, _Tensor], int | None]
    ) -> bool:
        """Each tensor, largest first, into the first gap with room for it, or at the end.

        Args:
            first_legal: The first legal offset from a given one on, None if there is none.

        Returns:
            Whether there was a legal place for every tensor.
        """
        # Python's sort is stable: tensor order decides between equals.
        for tensor in sorted(tensors, key=lambda tensor: -tensor.numel):
            if not self._put_in_gap(tensor, first_legal):
                offset = first_legal(self.end, tensor)
                if offset is None:
                    return False
                self.put(tensor, offset)
        return True

    def _put_in_gap(
        self, tensor: _Tensor, first_legal: Callable[[int, _Tensor], int | None]
    ) -> bool:
        for number, (start, stop) in enumerate(self._gaps):
            offset = first_legal(start, tensor)
            if offset is not None and offset + tensor.numel <= stop:
                self.offsets[tensor.index] = offset
                pieces = [(start, offset), (offset + tensor.numel, stop)]
                self._gaps[number : number + 1] = [gap for gap in pieces if gap[0] < gap[1]]
                return True
        return False
