"""Layouts: known values, and what must hold for any shapes."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_fsdp.runtime.layout import (
    GlobalLayout,
    least_padded_size,
    make_layout,
    packed_layout,
    padded_layout,
    tensor_atomic_layout,
)
from compile_fsdp.runtime.placement import (
    BlockAtomic,
    Flat,
    RowAtomic,
    ShardLayout,
    TensorAtomic,
)

Shape = tuple[int, ...]


@pytest.mark.parametrize(
    ("shapes", "ranks", "offsets", "size"),
    [
        ([(5, 4), (2, 6), (3,)], 2, (0, 24, 20), 48),
        ([(4, 4), (1, 6)], 2, (0, 18), 24),
        # Chunk 16. (3, 8) leaves a gap of 8, in which (7, 8), 8 beyond whole chunks, starts.
        ([(3, 8), (4, 16), (7, 8)], 1, (0, 80, 24), 144),
    ],
)
def test_padded_golden(
    shapes: list[Shape], ranks: int, offsets: tuple[int, ...], size: int
) -> None:
    layout = padded_layout(shapes, ranks)
    assert layout.tensor_to_offset == offsets
    assert layout.size == size
    assert layout.rank_to_offset == tuple(size // ranks * rank for rank in range(ranks))


def test_tensor_atomic_golden() -> None:
    layout = tensor_atomic_layout([(4, 4), (3,), (2, 6), (7, 3)], [1, 3, 0, 3], 5)
    assert layout.tensor_to_offset == (12, 28, 0, 31)
    assert layout.rank_to_offset == (0, 12, 28, 28, 52)
    assert layout.size == 52
    assert [layout.segment(rank) for rank in range(5)] == [
        (0, 12),
        (12, 28),
        (28, 28),
        (28, 52),
        (52, 52),
    ]


def draw(layout: GlobalLayout) -> str:
    """A line for each rank: which rows it holds, and how much of its segment is padding."""
    lines = []
    for rank in range(layout.num_shards):
        start, stop = layout.segment(rank)
        held = []
        used = 0
        for index, shape in enumerate(layout.tensor_shapes):
            first, rows = layout.rows(index, rank)
            if rows:
                held.append(f"{index}[{first}:{first + rows}]")
                used += rows * math.prod(shape[1:])
        lines.append(f"rank {rank}  {start:3}..{stop:3}  {' '.join(held)}  +{stop - start - used}")
    return "\n".join(lines)


def test_padded_rows_by_rank() -> None:
    assert_expected_inline(
        draw(padded_layout([(5, 4), (2, 6), (3,), (), (0, 3)], 2)),
        """\
rank 0    0.. 24  0[0:5] 2[0:3] 3[0:1]  +0
rank 1   24.. 48  1[0:2]  +12""",
    )


def test_packed_rows_by_rank() -> None:
    assert_expected_inline(
        draw(packed_layout([(5, 4), (2, 6), (3,), (), (0, 3)], 3)),
        """\
rank 0    0.. 12  0[0:3]  +0
rank 1   12.. 26  0[3:5] 1[0:1]  +0
rank 2   26.. 36  1[1:2] 2[0:3] 3[0:1]  +0""",
    )


def test_packed_blocks_stay_whole() -> None:
    assert_expected_inline(
        draw(packed_layout([(10, 2), (3, 4)], 2, block=4)),
        """\
rank 0    0.. 16  0[0:8]  +0
rank 1   16.. 32  0[8:10] 1[0:3]  +0""",
    )


shapes_strategy = st.lists(
    st.one_of(
        st.just(()),
        st.tuples(st.integers(0, 40)),
        st.tuples(st.integers(0, 40), st.integers(0, 9)),
        st.tuples(st.integers(1, 12), st.integers(1, 13), st.integers(1, 3)),
    ),
    max_size=9,
)
arguments = {
    "shapes": shapes_strategy,
    "ranks": st.integers(1, 9),
    "block": st.integers(0, 4),
    "alignment": st.sampled_from([1, 4, 8]),
}


def check_layout(layout: GlobalLayout, shapes: list[Shape], block: int, alignment: int) -> None:
    """What every layout promises."""
    assert layout.tensor_shapes == tuple(shapes)
    spans = [
        (offset, offset + math.prod(shape))
        for offset, shape in zip(layout.tensor_to_offset, shapes, strict=True)
    ]
    filled = sorted(span for span in spans if span[0] < span[1])
    assert all(0 <= start and stop <= layout.size for start, stop in spans)
    assert all(before[1] <= after[0] for before, after in pairwise(filled)), "tensors overlap"
    assert all(start % alignment == 0 for start, _ in spans)
    assert all(start % alignment == 0 for start in layout.rank_to_offset)
    cuts = layout.rank_to_offset
    assert cuts[0] == 0
    assert list(cuts) == sorted(cuts)
    assert cuts[-1] <= layout.size
    for (start, stop), shape in zip(spans, shapes, strict=True):
        unit = max(1, math.prod(shape[1:]) * block)
        for cut in cuts:
            if start < cut < stop:
                assert (cut - start) % unit == 0, f"cut {cut} splits a unit of {shape}"
    if block > 0:
        check_rows(layout, shapes)


def check_rows(layout: GlobalLayout, shapes: list[Shape]) -> None:
    """Every row is on one rank, ranks hold rows in order."""
    for index, shape in enumerate(shapes):
        for shards in {1, layout.num_shards}:
            pieces = [layout.rows(index, rank, shards) for rank in range(shards)]
            assert tuple(rows for _, rows in pieces) == layout.rows_by_segment(index, shards)
            assert sum(rows for _, rows in pieces) == (shape[0] if shape else 1)
            held = [(first, rows) for first, rows in pieces if rows]
            assert all(a[0] + a[1] == b[0] for a, b in pairwise(held))


@given(**arguments)
@settings(max_examples=400, deadline=None)
def test_padded_promises(shapes: list[Shape], ranks: int, block: int, alignment: int) -> None:
    layout = padded_layout(shapes, ranks, block=block, alignment=alignment)
    check_layout(layout, shapes, block, alignment)
    sizes = {stop - start for start, stop in map(layout.segment, range(ranks))}
    assert len(sizes) == 1, "segments are equal"
    assert layout.size >= least_padded_size(shapes, ranks, block=block, alignment=alignment)


@given(**arguments)
@settings(max_examples=400, deadline=None)
def test_packed_promises(shapes: list[Shape], ranks: int, block: int, alignment: int) -> None:
    layout = packed_layout(shapes, ranks, block=block, alignment=alignment)
    check_layout(layout, shapes, block, alignment)
    assert list(layout.tensor_to_offset) == sorted(layout.tensor_to_offset)
    if alignment == 1:
        assert layout.waste == 0
        unit = max([1, *(max(1, math.prod(shape[1:]) * block) for shape in shapes)])
        longest = max(stop - start for start, stop in map(layout.segment, range(ranks)))
        assert longest <= layout.size / ranks + unit, "each cut is at the nearest legal place"


# Large enough for the search that replaces a wasteful chunk rule.
odd_shapes = st.lists(
    st.tuples(st.integers(1, 400), st.sampled_from([1, 7, 16, 97, 130, 131])),
    min_size=1,
    max_size=8,
)


@given(
    shapes=odd_shapes,
    ranks=st.integers(1, 12),
    block=st.integers(0, 3),
    alignment=st.sampled_from([1, 4]),
)
@settings(max_examples=400, deadline=None)
def test_searched_layouts_keep_the_promises(
    shapes: list[Shape], ranks: int, block: int, alignment: int
) -> None:
    layout = padded_layout(shapes, ranks, block=block, alignment=alignment)
    check_layout(layout, shapes, block, alignment)
    sizes = {stop - start for start, stop in map(layout.segment, range(ranks))}
    assert len(sizes) == 1, "segments are equal"
    assert layout.size >= least_padded_size(shapes, ranks, block=block, alignment=alignment)


@given(
    shapes=shapes_strategy,
    ranks=st.integers(1, 5),
    alignment=st.sampled_from([1, 8]),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_tensor_atomic_promises(
    shapes: list[Shape], ranks: int, alignment: int, data: st.DataObject
) -> None:
    owner = st.integers(0, ranks - 1)
    owners = data.draw(st.lists(owner, min_size=len(shapes), max_size=len(shapes)))
    layout = tensor_atomic_layout(shapes, owners, ranks, alignment=alignment)
    check_layout(layout, shapes, 1, alignment)
    for index, shape in enumerate(shapes):
        if math.prod(shape):
            rows = [layout.rows(index, rank)[1] for rank in range(ranks)]
            assert rows[owners[index]] == sum(rows), "whole on its owner"


@given(shapes=shapes_strategy, outer=st.integers(1, 4), inner=st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_segments_of_fewer_shards_are_unions(shapes: list[Shape], outer: int, inner: int) -> None:
    layout = packed_layout(shapes, outer * inner)
    for rank in range(inner):
        start, stop = layout.segment(rank, inner)
        assert start == layout.segment(rank * outer)[0]
        assert stop == layout.segment(rank * outer + outer - 1)[1]


def gpt2_block(width: int) -> list[Shape]:
    shapes: list[Shape] = []
    for wide_in, wide_out in ((1, 3), (1, 1), (1, 4), (4, 1)):
        shapes += [(wide_in * width, wide_out * width), (wide_out * width,)]
    return [*shapes, *[(width,)] * 4]


def resnet50() -> list[Shape]:
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for conv in ((width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                shapes += [conv, (conv[0],), (conv[0],)]
            if block == 0:
                shapes += [(4 * width, channels, 1, 1), (4 * width,), (4 * width,)]
            channels = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


LLAMA_8B_BLOCK: list[Shape] = [
    (4096, 4096),
    (1024, 4096),
    (1024, 4096),
    (4096, 4096),
    (14336, 4096),
    (14336, 4096),
    (4096, 14336),
    (4096,),
    (4096,),
]
VIT_STEM: list[Shape] = [(1, 1, 768), (1, 257, 768), (768, 3, 14, 14), (768,), (1000, 768), (1000,)]
COPRIME: list[Shape] = [(1009, 1013), (1013, 1009), (997, 1019), (500,)]


@pytest.mark.parametrize(
    ("model", "shapes", "most_ranks"),
    [
        ("gpt2", gpt2_block(768), 16),
        ("llama", LLAMA_8B_BLOCK, 512),
        ("resnet50", resnet50(), 64),
        ("vit stem", VIT_STEM, 4),
        ("coprime rows", COPRIME, 4),
    ],
)
def test_waste_on_real_models(model: str, shapes: list[Shape], most_ranks: int) -> None:
    ranks = 1
    while ranks <= most_ranks:
        layout = padded_layout(shapes, ranks)
        payload = layout.size - layout.waste
        assert layout.waste <= 0.03 * payload, f"{model} on {ranks} ranks wastes {layout.waste}"
        check_layout(layout, shapes, 1, 1)
        ranks *= 2


def test_make_layout_follows_the_placement() -> None:
    shapes = [(10, 3), (4, 5)]
    assert make_layout(shapes, 2, shard=None) == padded_layout(shapes, 2)
    assert make_layout(shapes, 2, shard=RowAtomic()) == padded_layout(shapes, 2)
    assert make_layout(shapes, 2, shard=BlockAtomic(2)) == padded_layout(shapes, 2, block=2)
    packed = make_layout(shapes, 2, shard=Flat(), shard_layout=ShardLayout.PACKED)
    assert packed == packed_layout(shapes, 2, block=0)
    assert packed.rank_to_offset == (0, 25)
    owned = make_layout(shapes, 2, shard=TensorAtomic(), owners=[1, 0])
    assert owned == tensor_atomic_layout(shapes, [1, 0], 2)


def test_errors_say_what_was_expected() -> None:
    with pytest.raises(ValueError, match="TensorAtomic needs the rank that owns each tensor"):
        make_layout([(2,)], 2, shard=TensorAtomic())
    with pytest.raises(ValueError, match=r"owner of tensor 0: expected a rank in 0..1, found 2"):
        tensor_atomic_layout([(2,)], [2], 2)
    with pytest.raises(ValueError, match="owners: expected one for each of 1 tensors, found 2"):
        tensor_atomic_layout([(2,)], [0, 1], 2)
    with pytest.raises(ValueError, match="num_shards >= 1"):
        padded_layout([(2,)], 0)
    layout = packed_layout([(4, 5)], 6, block=0)
    with pytest.raises(ValueError, match=r"not whole rows of 5; the layout is Flat"):
        layout.rows(0, 0)
    with pytest.raises(ValueError, match="a layout of 6 segments cannot be cut into 4"):
        layout.segment(0, 4)
    with pytest.raises(ValueError, match=r"segment 6 of 6: expected 0..5"):
        layout.segment(6)
