"""QuantizedDBuffers: four planes that are cut alike, moved by themselves, and equal in bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from compile_fsdp.runtime.collectives import recorded
from compile_fsdp.runtime.dbuffer import DBuffer
from compile_fsdp.runtime.layout import GlobalLayout, make_layout, packed_layout
from compile_fsdp.runtime.mxfp8 import dequantize, quantize
from compile_fsdp.runtime.placement import (
    BlockAtomic,
    Flat,
    ShardLayout,
    TensorAtomic,
    differing_axes,
)
from compile_fsdp.runtime.quantized_dbuffer import QuantizedDBuffer, quantized_layout
from compile_fsdp.runtime.streams import make_lane
from tests.distributed import distributed, run

R, S, A = Replicate(), Shard(0), Partial("avg")
# Of different widths; fewer blocks than ranks; without elements.
SHAPES = [(96, 64), (32, 160), (64, 32), (0, 64), (160, 96), (32, 0)]
BOTH = {"rowwise": True, "columnwise": True}
ROWWISE = {"rowwise": True, "columnwise": False}
COLUMNWISE = {"rowwise": False, "columnwise": True}
MESHES: dict[int, list[tuple[int, ...]]] = {1: [(1,)], 2: [(2,), (1, 2)], 4: [(4,), (2, 2)]}
LAYOUTS: dict[str, Callable[[int], GlobalLayout]] = {
    "padded": lambda ranks: quantized_layout(SHAPES, ranks),
    "packed": lambda ranks: quantized_layout(SHAPES, ranks, shard_layout=ShardLayout.PACKED),
    "aligned": lambda ranks: quantized_layout(SHAPES, ranks, alignment=16),
    "owned": lambda ranks: quantized_layout(
        SHAPES, ranks, shard=TensorAtomic(), owners=[(3 * i + 1) % ranks for i in range(6)]
    ),
}


def matrices(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(shape, generator=generator) * 3.0**index).to(dtype)
        for index, shape in enumerate(SHAPES)
    ]


def widest_first(mesh: DeviceMesh) -> list[tuple[Placement, ...]]:
    """Every placement of a mesh, those that gathers lead to first."""
    return [(R,), (S,)] if mesh.ndim == 1 else [(R, R), (R, S), (S, S)]


def check_rows(buffer: QuantizedDBuffer, full: list[torch.Tensor], columnwise: bool) -> None:
    """This rank's rows of the planes are those rows of the quantised full tensors."""
    axes = buffer.planes_for(rowwise=not columnwise, columnwise=columnwise)[0].shard_axes
    for index, tensor in enumerate(full):
        first, count = buffer.layout.rows(index, axes.segment, axes.num_shards)
        data, scales = quantize(tensor, columnwise=columnwise)
        per_row = 32 if columnwise else 1
        rows = slice(first, first + count)
        scale_rows = slice(first // per_row, (first + count) // per_row)
        found = buffer.get_local_data(index, columnwise=columnwise)
        found_scales = buffer.get_local_scales(index, columnwise=columnwise)
        assert found.dtype is torch.float8_e4m3fn
        assert found_scales.dtype is torch.float8_e8m0fnu
        assert torch.equal(found.view(torch.uint8), data[rows].view(torch.uint8))
        assert torch.equal(found_scales.view(torch.uint8), scales[scale_rows])
        values = buffer.dequantize(index, columnwise=columnwise, dtype=torch.bfloat16)
        whole = dequantize(data, scales, columnwise=columnwise, dtype=torch.bfloat16)
        assert torch.equal(values, whole[rows])


@pytest.mark.parametrize("kind", LAYOUTS)
@distributed(1, 2, 4)
def test_gathered_planes_are_those_of_the_whole_tensors(kind: str) -> None:
    """Quantised from a rank's own rows and gathered: every byte as from the full tensors."""
    ranks = dist.get_world_size()
    full = matrices(torch.bfloat16)
    for shape in MESHES[ranks]:
        mesh = init_device_mesh("cpu", shape)
        layout = LAYOUTS[kind](ranks)
        for placements in widest_first(mesh):
            main = DBuffer.distribute_tensors(full, mesh, placements, layout=layout)
            with recorded() as records:
                buffer = QuantizedDBuffer(mesh, placements, SHAPES, layout=layout)
                assert buffer.quantize_(main) is buffer
            assert not records, "quantised from this rank's part only"
            for columnwise in (False, True):
                check_rows(buffer, full, columnwise)
            for axis in range(mesh.ndim):
                wider = [R if each <= axis else placements[each] for each in range(mesh.ndim)]
                buffer = buffer.redistribute(wider, **BOTH)
                for columnwise in (False, True):
                    check_rows(buffer, full, columnwise)
            assert buffer.is_rowwise_unsharded
            assert buffer.is_columnwise_unsharded


@distributed(2, 4)
def test_every_redistribution_with_and_without_out() -> None:
    ranks = dist.get_world_size()
    full = matrices()
    for shape, kind in itertools.product(MESHES[ranks], LAYOUTS):
        mesh = init_device_mesh("cpu", shape)
        layout = LAYOUTS[kind](ranks)
        for old, new in itertools.product(widest_first(mesh), repeat=2):
            if len(differing_axes(old, new)) > 1:
                continue
            main = DBuffer.distribute_tensors(full, mesh, old, layout=layout)
            source = QuantizedDBuffer(mesh, old, SHAPES, layout=layout).quantize_(main)
            for columnwise, which in ((False, ROWWISE), (True, COLUMNWISE)):
                moved = source.redistribute(new, **which)
                assert (moved.has_rowwise, moved.has_columnwise) == (not columnwise, columnwise)
                check_rows(moved, full, columnwise)
                out = QuantizedDBuffer(mesh, new, SHAPES, layout=layout)
                for plane in out.planes_for(**BOTH):
                    plane.local.fill_(0x7F)
                lane = make_lane(torch.device("cpu"), "test")
                assert source.redistribute(new, out, lane=lane, label="w", **which) is out
                lane.synchronize()
                check_rows(out, full, columnwise)
                others = out.planes_for(rowwise=columnwise, columnwise=not columnwise)
                assert all((plane.local == 0x7F).all() for plane in others), "not asked for"


@distributed(2, 4)
def test_a_view_is_what_a_step_writes() -> None:
    """ZeRO-1 and HFSDP: an optimizer's part of wider planes is quantised into them in place."""
    ranks = dist.get_world_size()
    full = matrices()
    for shape in MESHES[ranks]:
        mesh = init_device_mesh("cpu", shape)
        layout = quantized_layout(SHAPES, ranks)
        order = widest_first(mesh)
        for wide, narrow in itertools.pairwise(order):
            buffer = QuantizedDBuffer(mesh, wide, SHAPES, layout=layout)
            main = DBuffer.distribute_tensors(full, mesh, narrow, layout=layout)
            part = buffer.view(narrow).quantize_(main)
            part.redistribute(wide, buffer, **BOTH)
            for columnwise in (False, True):
                check_rows(buffer, full, columnwise)
            # A wider main weight is narrowed: this rank has the rows.
            narrow_buffer = QuantizedDBuffer(mesh, narrow, SHAPES, layout=layout)
            narrow_buffer.quantize_(DBuffer.distribute_tensors(full, mesh, wide, layout=layout))
            check_rows(narrow_buffer, full, True)


@distributed(2, 4)
def test_a_phase_gathers_half_the_bytes_of_bf16() -> None:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    shapes = [(256, 128), (128, 256), (384, 128)]
    tensors = [torch.randn(shape) for shape in shapes]
    for kind in ShardLayout:
        layout = quantized_layout(shapes, ranks, shard_layout=kind, alignment=16)
        main = DBuffer.distribute_tensors(tensors, mesh, [S], layout=layout)
        buffer = QuantizedDBuffer(mesh, [S], shapes, layout=layout).quantize_(main)
        plain = DBuffer(mesh, [S], shapes, torch.bfloat16, shard_layout=kind, alignment=8)
        with recorded() as records:
            plain.redistribute([R])
        bf16 = sum(record.bytes for record in records)
        for which in (ROWWISE, COLUMNWISE):
            with recorded() as records:
                buffer.redistribute([R], label="w", **which)
            assert [(record.kind, record.label) for record in records] == [("all_gather", "w")] * 2
            data, scales = (record.bytes for record in records)
            assert data == 32 * scales
            assert data + scales <= 0.53 * bf16


@distributed(2)
def test_planes_have_storage_of_their_own() -> None:
    mesh = init_device_mesh("cpu", (2,))
    layout = quantized_layout(SHAPES, 2)
    full = matrices()
    main = DBuffer.distribute_tensors(full, mesh, [S], layout=layout)
    source = QuantizedDBuffer(mesh, [S], SHAPES, layout=layout).quantize_(main)
    assert not source.is_rowwise_unsharded
    gathered = QuantizedDBuffer(mesh, [R], SHAPES, layout=layout)
    view = gathered.get_local_data(0)
    gathered.release_storage(**BOTH)
    assert not gathered.is_rowwise_unsharded
    assert not gathered.is_columnwise_unsharded
    lane = make_lane(torch.device("cpu"), "gather")
    gathered.reallocate_storage(lane, "block", **ROWWISE)
    source.redistribute([R], gathered, lane=lane, **ROWWISE)
    lane.synchronize()
    assert lane.memory.live_bytes == sum(
        plane.local.numel() for plane in gathered.planes_for(**ROWWISE)
    )
    assert gathered.is_rowwise_unsharded
    assert not gathered.is_columnwise_unsharded
    assert torch.equal(view.view(torch.uint8), quantize(full[0])[0].view(torch.uint8))
    with pytest.raises(RuntimeError, match=r"dequantize: the columnwise planes .* been released"):
        gathered.dequantize(0, columnwise=True)
    data, scales = gathered.planes_for(**ROWWISE)
    scales.release_storage(lane)
    assert data.has_storage and not gathered.is_rowwise_unsharded
    gathered.release_storage(lane, **ROWWISE)
    assert lane.memory.live_bytes == 0
    gathered.reallocate_storage(**COLUMNWISE)
    source.redistribute([R], gathered, **COLUMNWISE)
    check_rows(gathered, full, True)
    assert not gathered.is_rowwise_unsharded
    assert sum(plane.has_storage for plane in gathered.planes_for(**BOTH)) == 2
    whole = DBuffer.distribute_tensors(full, mesh, [R], layout=layout)
    with pytest.raises(RuntimeError, match=r"quantize_: the rowwise planes .* reallocate_storage"):
        gathered.quantize_(whole)
    with pytest.raises(RuntimeError, match="it is a part of a larger buffer"):
        source.redistribute([R], **ROWWISE).view([S]).release_storage(**ROWWISE)


@distributed(2)
def test_data_and_scales_in_one_storage() -> None:
    """Whoever owns the bytes frees them; a matrix is two strided views of what was gathered."""
    mesh = init_device_mesh("cpu", (2,))
    layout = quantized_layout(SHAPES, 2, alignment=16)
    full = matrices()
    main = DBuffer.distribute_tensors(full, mesh, [S], layout=layout)
    source = QuantizedDBuffer(mesh, [S], SHAPES, layout=layout).quantize_(main)
    storage = torch.empty(layout.size + layout.size // 32, dtype=torch.uint8)
    gathered = QuantizedDBuffer(
        mesh,
        [R],
        SHAPES,
        layout=layout,
        rowwise=False,
        local=[storage[: layout.size], storage[layout.size :]],
    )
    source.redistribute([R], gathered, **COLUMNWISE)
    assert gathered.is_columnwise_unsharded
    for offset, (rows, cols), tensor in zip(layout.tensor_to_offset, SHAPES, full, strict=True):
        data = storage.as_strided((rows, cols), (cols, 1), offset)
        scales = storage.as_strided((rows // 32, cols), (cols, 1), layout.size + offset // 32)
        expected, expected_scales = quantize(tensor, columnwise=True)
        assert torch.equal(data, expected.view(torch.uint8))
        assert torch.equal(scales, expected_scales)
    storage.untyped_storage().resize_(0)
    assert not gathered.is_columnwise_unsharded


@distributed(2)
def test_planes_of_one_lane_are_in_flight_together() -> None:
    """Only the first collective of a move waits for what the lane still writes."""
    mesh = init_device_mesh("cpu", (2,))
    layout = quantized_layout(SHAPES, 2)
    main = DBuffer.distribute_tensors(matrices(), mesh, [S], layout=layout)
    source = QuantizedDBuffer(mesh, [S], SHAPES, layout=layout).quantize_(main)
    lane = make_lane(torch.device("cpu"), "gather")
    collective, issued = lane.collective, []

    def observed(start: Callable[[], Any], *, depends: bool, **others: Any) -> None:
        issued.append(depends)
        collective(start, depends=depends, **others)

    lane.collective = observed
    moved = source.redistribute([R], lane=lane, depends=True, **BOTH)
    lane.synchronize()
    assert issued == [True, False, False, False]
    check_rows(moved, matrices(), False)


def quantised_shard(
    shapes: list[tuple[int, int]], packed: bool, alignment: int
) -> tuple[list[list[int]], list[bool]]:
    """For each plane the bytes of each tensor on this rank, and whether it is aligned."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layout = quantized_layout(
        shapes,
        dist.get_world_size(),
        shard_layout=ShardLayout.PACKED if packed else ShardLayout.PADDED,
        alignment=alignment,
    )
    generator = torch.Generator().manual_seed(3)
    full = [torch.randn(shape, generator=generator) for shape in shapes]
    main = DBuffer.distribute_tensors(full, mesh, [S], layout=layout)
    buffer = QuantizedDBuffer(mesh, [S], shapes, layout=layout).quantize_(main)
    gathered = buffer.redistribute([R], **BOTH)
    for columnwise in (False, True):
        check_rows(buffer, full, columnwise)
        check_rows(gathered, full, columnwise)
    planes = buffer.planes_for(**BOTH)
    aligned = [
        all(
            offset % alignment == 0 for offset in (plane.segment[0], *plane.layout.tensor_to_offset)
        )
        for plane in planes
    ]
    held = [[plane.get_local_tensor(i).numel() for i in range(len(shapes))] for plane in planes]
    return held, aligned


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(*[st.integers(0, 5).map(lambda n: 32 * n)] * 2), min_size=1, max_size=5),
    st.booleans(),
    st.sampled_from([1, 16]),
)
def test_any_shapes(shapes: list[tuple[int, int]], packed: bool, alignment: int) -> None:
    results = run(2, quantised_shard, shapes, packed, alignment)
    for held, aligned in results:
        assert all(aligned), "tensors and segments of every plane"
        rowwise, rowwise_scales, columnwise, columnwise_scales = held
        assert rowwise == columnwise
        assert rowwise_scales == columnwise_scales
        assert rowwise == [32 * count for count in rowwise_scales], "the same rows in each plane"
    total = [a + b for a, b in zip(results[0][0][0], results[1][0][0], strict=True)]
    assert total == [rows * cols for rows, cols in shapes]


@distributed(1)
def test_construction() -> None:
    mesh = init_device_mesh("cpu", (1,))
    meta = QuantizedDBuffer(mesh, [R], SHAPES, "meta")
    assert meta.device == torch.device("meta")
    assert all(plane.local.is_meta for plane in meta.planes_for(**BOTH))
    rowwise = QuantizedDBuffer(mesh, [R], SHAPES, columnwise=False)
    assert rowwise.has_rowwise
    assert not rowwise.has_columnwise
    assert not rowwise.is_columnwise_unsharded
    assert [plane.dtype for plane in rowwise.planes_for(**ROWWISE)] == [torch.uint8] * 2
    bytes_ = torch.zeros(32 * 32, dtype=torch.uint8), torch.zeros(32, dtype=torch.uint8)
    over = QuantizedDBuffer(mesh, [R], [(32, 32)], columnwise=False, local=bytes_)
    main = DBuffer.distribute_tensors([torch.ones(32, 32)], mesh, [R], layout=over.layout)
    over.quantize_(main)
    assert (bytes_[1] == 127 - 8).all(), "the bytes handed in are the planes"
    blocks = QuantizedDBuffer(mesh, [BlockAtomic(48)], [(96, 32)])
    assert blocks.layout == make_layout([(96, 32)], 1, shard=BlockAtomic(96), alignment=32)
    assert "1 tensors" in repr(over)
    assert "rowwise" in repr(over)
    assert "columnwise" not in repr(over)


@distributed(4)
def test_errors() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    shapes = [(64, 64)]
    layout = quantized_layout(shapes, 4)

    def make(**options: object) -> QuantizedDBuffer:
        arguments: dict[str, object] = {"placements": [R, S], "tensor_shapes": shapes}
        return QuantizedDBuffer(mesh, **(arguments | options))  # type: ignore[arg-type]

    for shape in [(33, 64), (64, 40), (64,), (2, 32, 32)]:
        with pytest.raises(ValueError, match=r"tensor 1 has shape .*both dims a multiple of 32"):
            make(tensor_shapes=[(32, 32), shape])
        with pytest.raises(ValueError, match="tensor 0 has shape"):
            quantized_layout([shape], 2)
    with pytest.raises(ValueError, match=r"placement of axis 'outer': expected Replicate\(\) or"):
        make(placements=[A, S])
    with pytest.raises(ValueError, match="axis 'outer' is sharded but an axis inside it is not"):
        make(placements=[S, R])
    # Rows whole, but not blocks of 32 of them.
    with pytest.raises(ValueError, match=r"segment 1 starts within rows 0..31 of tensor 0 .*whole"):
        make(layout=make_layout(shapes, 4))
    with pytest.raises(ValueError, match=r"segment 1 starts within rows .*quantized_layout\(\)"):
        make(layout=make_layout([(96, 96)], 4, shard=Flat()), tensor_shapes=[(96, 96)])
    with pytest.raises(ValueError, match="a segment starts at element 1, which is no multiple"):
        make(layout=GlobalLayout(((64, 64),), (64,), 64 * 64 + 64, (0, 1, 32, 64)))
    with pytest.raises(ValueError, match="a tensor starts at element 3, which is no multiple"):
        make(layout=GlobalLayout(((64, 64),), (3,), 64 * 64 + 3, (0, 0, 0, 0)))
    with pytest.raises(ValueError, match="the buffer ends at element 4097, which is no multiple"):
        make(layout=GlobalLayout(((64, 64),), (0,), 64 * 64 + 1, (0, 0, 0, 0)))
    with pytest.raises(ValueError, match=r"layout: expected shapes \(\(64, 64\),\), found"):
        make(layout=packed_layout([(4096,)], 4))
    with pytest.raises(ValueError, match="cut the buffer into 4, which does not divide"):
        make(placements=[S, S], layout=quantized_layout(shapes, 2))
    with pytest.raises(ValueError, match="expected rowwise or columnwise planes, found none"):
        make(rowwise=False, columnwise=False)
    with pytest.raises(ValueError, match="local: expected a tensor for each of 4 planes, found 1"):
        make(local=[torch.empty(0)])

    buffer = make(layout=layout)
    rowwise = make(layout=layout, columnwise=False)
    with pytest.raises(ValueError, match="has no columnwise planes"):
        rowwise.planes_for(**BOTH)
    with pytest.raises(ValueError, match="has no columnwise planes"):
        buffer.redistribute([R, R], rowwise, **COLUMNWISE)
    with pytest.raises(ValueError, match="expected rowwise=True or columnwise=True"):
        buffer.redistribute([R, R], rowwise=False, columnwise=False)
    with pytest.raises(ValueError, match="quantised values cannot be added up"):
        make(layout=layout, placements=[R, R]).redistribute([A, R], **BOTH)
    with pytest.raises(ValueError, match="one axis changes per call"):
        make(layout=layout, placements=[S, S]).redistribute([R, R], **BOTH)

    other = quantized_layout(shapes, 8)
    with pytest.raises(ValueError, match=r"must agree with the buffer in layout.*quantized_layout"):
        buffer.quantize_(DBuffer(mesh, [R, S], shapes, torch.float32, layout=other))
    with pytest.raises(ValueError, match="must agree with the buffer in mesh"):
        elsewhere = init_device_mesh("cpu", (4, 1))
        buffer.quantize_(DBuffer(elsewhere, [R, S], shapes, torch.float32, layout=layout))
    with pytest.raises(ValueError, match=r"is P.*avg.* on axis 'outer', so its values"):
        buffer.quantize_(DBuffer(mesh, [A, S], shapes, torch.float32, layout=layout))
    with pytest.raises(ValueError, match="a view only narrows"):
        buffer.quantize_(DBuffer(mesh, [S, S], shapes, torch.float32, layout=layout))
    with pytest.raises(TypeError, match=r"found torch.float64; convert it first"):
        buffer.quantize_(DBuffer(mesh, [R, S], shapes, torch.float64, layout=layout))
