"""A list of numbers of which ranges can be raised and maximums asked for, in logarithmic time."""

from __future__ import annotations

from collections.abc import Sequence


class RangeMaximum:
    """Numbers by position, as a tree of maximums.

    A node of the tree stands for the positions below it: its maximum counts what was added to all
    of them at once, `_added`, and what was added further down.
    """

    def __init__(self, values: Sequence[int]) -> None:
        self._size = len(values)
        self._leaves = 1
        while self._leaves < max(self._size, 1):
            self._leaves *= 2
        self._maximum = [0] * (2 * self._leaves)
        self._added = [0] * (2 * self._leaves)
        self._maximum[self._leaves : self._leaves + self._size] = values
        for node in reversed(range(1, self._leaves)):
            self._maximum[node] = max(self._maximum[2 * node], self._maximum[2 * node + 1])

    def __len__(self) -> int:
        return self._size

    def add(self, first: int, past: int, amount: int) -> None:
        """Add ``amount`` at the positions from ``first`` until ``past``."""
        self._add(1, 0, self._leaves, first, past, amount)

    def maximum(self, first: int, past: int) -> int:
        """The maximum from ``first`` until ``past``; 0 of an empty range."""
        return self._ask(1, 0, self._leaves, first, past) or 0

    def _add(self, node: int, low: int, high: int, first: int, past: int, amount: int) -> None:
        if past <= low or high <= first:
            return
        if first <= low and high <= past:
            self._maximum[node] += amount
            self._added[node] += amount
            return
        middle = (low + high) // 2
        self._add(2 * node, low, middle, first, past, amount)
        self._add(2 * node + 1, middle, high, first, past, amount)
        below = max(self._maximum[2 * node], self._maximum[2 * node + 1])
        self._maximum[node] = below + self._added[node]

    def _ask(self, node: int, low: int, high: int, first: int, past: int) -> int | None:
        if past <= low or high <= first:
            return None
        if first <= low and high <= past:
            return self._maximum[node]
        middle = (low + high) // 2
        left = self._ask(2 * node, low, middle, first, past)
        right = self._ask(2 * node + 1, middle, high, first, past)
        found = [each for each in (left, right) if each is not None]
        return max(found) + self._added[node] if found else None
