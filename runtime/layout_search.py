"""The search for equal segments that waste little, where the chunk rule wastes much.

The chunk rule lets a cut fall anywhere in any tensor. But there are only ``num_shards - 1`` cuts,
every ``segment`` elements:

    cuts        0            S            2S            3S
    offsets     | A ............. | gap | B ................. | C |
                    one cut in A: shift A by    two cuts in B: S has to be a multiple
                    less than a row             of B's row

So rows that do not go together cost a shift for each cut, not a common multiple, except in
tensors longer than two segments. `least_segment` says how small a segment can be at all,
`find_segments` looks for the smallest one above it that the tensors can be packed into.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Placer", "TensorToPlace", "find_segments", "least_segment", "round_up"]

# Segment sizes tried: number k is k**3 / _GROWTH of the least one above it. That is 0.1 % after 4
# tries, 1.5 % after 10, and four times the least one at the end.
_TRIES = 64
_GROWTH = 65536


@dataclass(frozen=True)
class TensorToPlace:
    """A tensor of ``numel`` elements, which is cut after multiples of ``unit`` elements only.

    A row or a block of rows, or more where a cut after one would not be aligned.
    """

    index: int
    shape: tuple[int, ...]
    numel: int
    unit: int


FirstLegal = Callable[[int, TensorToPlace], int | None]


def round_up(value: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def least_segment(tensors: Sequence[TensorToPlace], num_shards: int, alignment: int) -> int:
    """Elements below which no equal segments can hold ``tensors``, whatever their order.

    Four things force it up: all segments together hold every element; the first unit lies within
    one segment; segments start at multiples of ``alignment``; and a tensor longer than two segments
    has two neighbouring cuts inside, both at ends of its units, so that their distance, which is
    the segment, is a multiple of its unit.
    """
    share = -(-sum(tensor.numel for tensor in tensors) // num_shards)
    longest_unit = max((min(tensor.unit, tensor.numel) for tensor in tensors), default=0)
    return _next_possible(max(share, longest_unit), tensors, alignment)


def find_segments(
    tensors: Sequence[TensorToPlace], num_shards: int, alignment: int, limit: int
) -> tuple[int, list[int]] | None:
    """``(segment, offsets)``: the smallest equal segments found, and each tensor's first element.

    Segment sizes are tried from `least_segment` upwards; for each, three orders of packing. None
    when nothing of less than ``limit`` elements in all was found.
    """
    least = least_segment(tensors, num_shards, alignment)
    tried = 0
    for number in range(_TRIES):
        wanted = least + least * number**3 // _GROWTH
        segment = _next_possible(wanted, tensors, alignment)
        if segment * num_shards >= limit:
            return None
        if segment == tried:
            continue
        tried = segment
        for order in _orders(tensors, segment):
            placer = Placer(len(tensors), segment * num_shards)
            if placer.fill(order, _legal_for(segment, alignment)):
                return segment, placer.offsets
    return None


def _next_possible(segment: int, tensors: Sequence[TensorToPlace], alignment: int) -> int:
    """The least segment size from ``segment`` on that suits all tensors longer than two of it."""
    while True:
        long = [tensor for tensor in tensors if tensor.numel > 2 * segment]
        rounded = round_up(segment, math.lcm(alignment, *(tensor.unit for tensor in long)))
        if rounded == segment:
            return segment
        # Growing, a segment may first reach a size from which on a tensor asks for nothing.
        freed = (-(-tensor.numel // 2) for tensor in long)
        segment = min(rounded, *(size for size in freed if size > segment), rounded)


def _orders(tensors: Sequence[TensorToPlace], segment: int) -> list[list[TensorToPlace]]:
    """Orders of packing: the largest first; or first what is hard to place, because its units do
    not divide the segment; or of that, first what needs a cut. Tensor order decides ties."""

    def divides(tensor: TensorToPlace) -> bool:
        return segment % tensor.unit == 0

    largest_first = sorted(tensors, key=lambda tensor: -tensor.numel)
    hardest_first = sorted(largest_first, key=divides)
    return [
        largest_first,
        hardest_first,
        sorted(hardest_first, key=lambda tensor: tensor.numel <= segment),
    ]


def _legal_for(segment: int, alignment: int) -> FirstLegal:
    """What finds the first offset at which cuts every ``segment`` meet whole units only.

    None: there is none in the segment that holds the start nor in the next.
    """

    def first_legal(start: int, tensor: TensorToPlace) -> int | None:
        start = round_up(start, alignment)
        next_cut = round_up(start + 1, segment)
        step = tensor.unit
        candidates = (
            start,
            # Whole steps before the next cut; at it; whole steps before the one after it.
            next_cut - (next_cut - start) // step * step,
            next_cut,
            next_cut + segment % step,
        )
        for offset in candidates:
            first_cut = round_up(offset + 1, segment)
            after_cut = offset + tensor.numel - first_cut
            if after_cut <= 0:
                return offset
            if (first_cut - offset) % tensor.unit == 0 and (
                after_cut <= segment or segment % tensor.unit == 0
            ):
                return offset
        return None

    return first_legal


class Placer:
    """Puts tensors at offsets and remembers the gaps between them.

    | a tensor         | gap | a tensor     | gap | a tensor | end

    Args:
        count: Number of tensors.
        limit: `fill` gives up beyond so many elements; None: it never does.
    """

    def __init__(self, count: int, limit: int | None = None) -> None:
        self.offsets = [0] * count
        self.end = 0
        self._limit = limit
        self._gaps: list[tuple[int, int]] = []

    def put(self, tensor: TensorToPlace, offset: int) -> None:
        """Place a tensor at or after the end."""
        if offset > self.end:
            self._gaps.append((self.end, offset))
        self.offsets[tensor.index] = offset
        self.end = offset + tensor.numel

    def fill(self, tensors: Sequence[TensorToPlace], first_legal: FirstLegal) -> bool:
        """Each tensor, in order, into the first gap with room for it, or at the end.

        Args:
            first_legal: The first legal offset from a given one on, None if there is none.

        Returns:
            Whether there was a legal place for every tensor.
        """
        for tensor in tensors:
            if self._put_in_gap(tensor, first_legal):
                continue
            offset = first_legal(self.end, tensor)
            if offset is None:
                return False
            self.put(tensor, offset)
            if self._limit is not None and self.end > self._limit:
                return False
        return True

    def _put_in_gap(self, tensor: TensorToPlace, first_legal: FirstLegal) -> bool:
        for number, (start, stop) in enumerate(self._gaps):
            if stop - start < tensor.numel:
                continue
            offset = first_legal(start, tensor)
            if offset is not None and offset + tensor.numel <= stop:
                self.offsets[tensor.index] = offset
                pieces = [(start, offset), (offset + tensor.numel, stop)]
                self._gaps[number : number + 1] = [gap for gap in pieces if gap[0] < gap[1]]
                return True
        return False
