"""What buffers of well-known models waste: at most 3 %, by unequal segments where no equal ones
could. The same numbers as ``benchmarks/padding_waste.py`` prints."""

from __future__ import annotations

import itertools
import math
import random
import sys

import pytest

from benchmarks.model_shapes import MODELS
from compile_fsdp.runtime.layout import (
    least_padded_size,
    make_layout,
    packed_layout,
    padded_layout,
)
from tests.test_layout import Shape, check_layout

# In elements, of bf16 and of fp32 weights.
ALIGNMENTS = (8, 4)


@pytest.mark.parametrize("ranks", [8, 64, 512])
@pytest.mark.parametrize("model", MODELS)
def test_waste_is_at_most_three_percent_or_the_least_possible(model: str, ranks: int) -> None:
    for (unit, shapes), alignment in itertools.product(MODELS[model].items(), ALIGNMENTS):
        layout = padded_layout(shapes, ranks, alignment=alignment)
        check_layout(layout, shapes, 1, alignment)
        payload = layout.size - layout.waste
        least = least_padded_size(shapes, ranks, alignment=alignment)
        assert layout.size >= least
        assert layout.waste <= 0.03 * payload or layout.size == least, (
            f"{model}, {unit} on {ranks} ranks: {layout.size} elements for {payload}, although "
            f"{least} may be possible"
        )


@pytest.mark.parametrize("ranks", [8, 64, 512])
@pytest.mark.parametrize("model", MODELS)
def test_the_layout_that_is_used_wastes_at_most_three_percent(model: str, ranks: int) -> None:
    for (unit, shapes), alignment in itertools.product(MODELS[model].items(), ALIGNMENTS):
        layout = make_layout(shapes, ranks, alignment=alignment)
        check_layout(layout, shapes, 1, alignment)
        assert layout.waste <= 0.03 * (layout.size - layout.waste), unit
        equal = padded_layout(shapes, ranks, alignment=alignment)
        wasteful = equal.waste > 0.03 * (equal.size - equal.waste)
        assert (layout != equal) == wasteful, unit


@pytest.mark.parametrize("model", MODELS)
def test_most_units_waste_at_most_three_percent_on_8_ranks(model: str) -> None:
    for unit, shapes in MODELS[model].items():
        layout = padded_layout(shapes, 8, alignment=8)
        # A row of one stacked tensor is a whole expert: 8 rows on 8 ranks, and others beside them.
        few_rows = unit == "block, experts stacked"
        assert few_rows or layout.waste <= 0.03 * (layout.size - layout.waste), unit


@pytest.mark.parametrize("ranks", [8, 64, 512])
@pytest.mark.parametrize("model", MODELS)
def test_packed_has_no_padding_but_alignment(model: str, ranks: int) -> None:
    for shapes in MODELS[model].values():
        layout = packed_layout(shapes, ranks, alignment=8)
        check_layout(layout, shapes, 1, 8)
        assert layout.waste < 8 * len(shapes)


def smallest_segment_by_trying_all(shapes: list[Shape], ranks: int, alignment: int) -> int:
    """The smallest equal segment into which some offsets fit, found without any rule."""
    numels = [math.prod(shape) for shape in shapes]
    for segment in itertools.count(alignment, alignment):
        starts = range(0, segment * ranks, alignment)
        for offsets in itertools.product(starts, repeat=len(shapes)):
            spans = sorted(
                (offset, offset + numel) for offset, numel in zip(offsets, numels, strict=True)
            )
            apart = all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
            if apart and spans[-1][1] <= segment * ranks and _rows_whole(shapes, offsets, segment):
                return segment
    raise AssertionError("unreachable")


def _rows_whole(shapes: list[Shape], offsets: tuple[int, ...], segment: int) -> bool:
    return all(
        (cut - offset) % math.prod(shape[1:]) == 0
        for shape, offset in zip(shapes, offsets, strict=True)
        for cut in range(0, offset + math.prod(shape), segment)
        if cut > offset
    )


@pytest.mark.parametrize(
    ("shapes", "ranks", "alignment"),
    [
        ([(7, 3), (5, 2)], 3, 1),
        ([(6, 2), (4, 3)], 6, 1),  # both longer than two shares: a multiple of 6
        ([(5, 3), (5, 2)], 2, 1),  # longer than a share, not than two: 13 and no multiple of 3
        ([(2, 9), (3,), (4,)], 4, 1),  # a row is longer than an equal share
        ([(5, 3), (3, 2)], 2, 4),
        ([(3, 6), (2, 5)], 3, 2),
    ],
)
def test_no_layout_is_smaller_than_the_bound(
    shapes: list[Shape], ranks: int, alignment: int
) -> None:
    possible = smallest_segment_by_trying_all(shapes, ranks, alignment) * ranks
    assert least_padded_size(shapes, ranks, alignment=alignment) <= possible
    assert possible <= padded_layout(shapes, ranks, alignment=alignment).size


def test_the_bound_is_reached_where_it_can_be() -> None:
    """An equal share is 4, a row of 2 and one of 3 make it 6."""
    shapes: list[Shape] = [(6, 2), (4, 3)]
    assert smallest_segment_by_trying_all(shapes, 6, 1) == 6
    assert least_padded_size(shapes, 6) == 36


@pytest.mark.parametrize("ranks", [64, 512])
def test_hundreds_of_odd_tensors_take_little_work(ranks: int) -> None:
    """Counted in calls of Python functions, some millions of which are a second."""
    drawn = random.Random(3)
    shapes = [
        (drawn.randint(1, 3000), drawn.choice([1, drawn.randint(1, 2000)])) for _ in range(600)
    ]
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        padded = padded_layout(shapes, ranks, alignment=8)
        packed_layout(shapes, ranks, alignment=8)
    finally:
        sys.setprofile(None)
    assert calls < 500_000
    check_layout(padded, shapes, 1, 8)
