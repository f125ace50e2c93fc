"""DBuffers: every redistribution on every mesh, against values computed on one rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from compile_fsdp.runtime.collectives import recorded
from compile_fsdp.runtime.dbuffer import DBuffer
from compile_fsdp.runtime.happens_before import Access
from compile_fsdp.runtime.layout import (
    GlobalLayout,
    packed_layout,
    padded_layout,
    tensor_atomic_layout,
)
from compile_fsdp.runtime.placement import (
    BlockAtomic,
    Flat,
    ShardAxes,
    ShardLayout,
    TensorAtomic,
    is_average,
    is_sharded,
)
from compile_fsdp.runtime.recorded_memory import Operators
from compile_fsdp.runtime.recording import Recorder
from compile_fsdp.runtime.streams import make_lane
from compile_fsdp.runtime.torch_internals import spec_of
from tests.distributed import distributed

R, S, A = Replicate(), Shard(0), Partial("avg")
CPU = torch.device("cpu")
# Uneven, smaller than the ranks, one row, 0-D, without elements.
SHAPES = [(5, 4), (2, 6), (3,), (1, 7), (), (0, 3), (9, 2), (4, 0)]
MESHES: dict[int, list[tuple[int, ...]]] = {
    1: [(1,)],
    2: [(2,), (1, 2), (2, 1)],
    3: [(3,)],
    4: [(4,), (2, 2), (1, 4), (4, 1)],
}


def layout_of(kind: str, shards: int) -> GlobalLayout:
    """A layout of `SHAPES` for ``shards`` segments."""
    if kind == "padded":
        return padded_layout(SHAPES, shards)
    if kind == "aligned":
        return padded_layout(SHAPES, shards, alignment=4)
    if kind == "packed":
        return packed_layout(SHAPES, shards)
    if kind == "owned":
        owners = [(5 * index + 1) % shards for index in range(len(SHAPES))]
        return tensor_atomic_layout(SHAPES, owners, shards)
    return packed_layout(SHAPES, shards, block=0)


LAYOUTS = pytest.mark.parametrize("kind", ["padded", "aligned", "packed", "owned", "flat"])


def all_placements(ndim: int, shard: Placement = S) -> Iterator[tuple[Placement, ...]]:
    kinds: tuple[Placement, ...] = (R, A, shard)
    for placements in itertools.product(kinds, repeat=ndim):
        sharded = [is_sharded(each) for each in placements]
        if sharded == sorted(sharded):
            yield placements


def mean(values: list[torch.Tensor]) -> torch.Tensor:
    """The average as it is defined: the sum in rank order times 1/N."""
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total * (1.0 / len(values))


class Truth:
    """What every rank should hold: one value of the flat buffer for each coordinate."""

    def __init__(self, mesh: DeviceMesh, layout: GlobalLayout) -> None:
        self.mesh, self.layout = mesh, layout
        self.base = torch.arange(1.0, layout.size + 1)

    def contribution(
        self, placements: tuple[Placement, ...], coordinate: list[int]
    ) -> torch.Tensor:
        """The full flat buffer of one rank: partial axes have a value for each index."""
        value = self.base.clone()
        for axis, placement in enumerate(placements):
            if is_average(placement):
                value += 512.0 * (axis + 1) * coordinate[axis]
        return value

    def held(self, full: torch.Tensor, placements: tuple[Placement, ...]) -> torch.Tensor:
        """This rank's part of a full flat buffer."""
        axes = ShardAxes.of(self.mesh, placements)
        start, stop = self.layout.segment(axes.segment, axes.num_shards)
        return full[start:stop]

    def buffer(self, placements: tuple[Placement, ...]) -> DBuffer:
        """A buffer of these placements, with NaN where there is padding."""
        full = self.contribution(placements, self.coordinate)
        local = self.held(self.with_nan_padding(full), placements).clone()
        return DBuffer.from_local(local, self.mesh, placements, SHAPES, layout=self.layout)

    def with_nan_padding(self, full: torch.Tensor) -> torch.Tensor:
        padded = torch.full_like(full, math.nan)
        for offset, numel in zip(self.layout.tensor_to_offset, self.layout.numels, strict=True):
            padded[offset : offset + numel] = full[offset : offset + numel]
        return padded

    @property
    def coordinate(self) -> list[int]:
        return [self.mesh.get_local_rank(axis) for axis in range(self.mesh.ndim)]

    def after(
        self, old: tuple[Placement, ...], new: tuple[Placement, ...], axis: int
    ) -> torch.Tensor:
        """This rank's part after ``axis`` went from ``old`` to ``new``."""
        if not is_average(old[axis]):
            return self.held(self.contribution(old, self.coordinate), new)
        values = []
        for index in range(self.mesh.size(axis)):
            coordinate = self.coordinate
            coordinate[axis] = index
            values.append(self.contribution(old, coordinate))
        return self.held(mean(values), new)

    def check(self, result: DBuffer, expected: torch.Tensor) -> None:
        """Every tensor's piece is as in ``expected``, and none holds padding."""
        full = torch.full((self.layout.size,), math.nan)
        full[result.segment[0] : result.segment[1]] = expected
        for index, shape in enumerate(SHAPES):
            offset = self.layout.tensor_to_offset[index]
            axes = result.shard_axes
            first, last = self.layout.elements(index, axes.segment, axes.num_shards)
            piece = result.get_local_tensor(index)
            assert torch.equal(piece.reshape(-1), full[offset + first : offset + last]), (
                f"{result}: tensor {index} {shape}"
            )
            assert not piece.isnan().any()


def redistributions(
    ndim: int,
    kind: str,
) -> Iterator[tuple[tuple[Placement, ...], tuple[Placement, ...], int]]:
    """Every change of one axis that the table allows."""
    for old, new in itertools.product(
        all_placements(ndim, Flat() if kind == "flat" else S), repeat=2
    ):
        changed = [axis for axis in range(ndim) if old[axis] != new[axis]]
        if len(changed) == 1:
            axis = changed[0]
            if not (is_sharded(old[axis]) and is_average(new[axis])):
                yield old, new, axis


def truths(kind: str) -> Iterator[tuple[DeviceMesh, Truth]]:
    """Every mesh of this world, and the truth about buffers of one layout on it."""
    ranks = dist.get_world_size()
    for shape in MESHES[ranks]:
        mesh = init_device_mesh("cpu", shape)
        yield mesh, Truth(mesh, layout_of(kind, ranks))


@LAYOUTS
@distributed(1, 2, 3, 4)
def test_every_redistribution(kind: str) -> None:
    for mesh, truth in truths(kind):
        for old, new, axis in redistributions(mesh.ndim, kind):
            expected = truth.after(old, new, axis)
            source = truth.buffer(old)
            truth.check(source.redistribute(new), expected)
            truth.check(source, truth.held(truth.contribution(old, truth.coordinate), old))
            out = truth.buffer(new)
            out.local.fill_(-1.0)
            assert source.redistribute(new, out) is out
            truth.check(out, expected)
            lane = make_lane(CPU, "test")
            result = source.redistribute(new, lane=lane)
            lane.synchronize()
            truth.check(result, expected)


@LAYOUTS
@distributed(2, 4)
def test_redistribution_in_place(kind: str) -> None:
    """``out`` is a part of the source's storage, or the source a part of the out's."""
    for mesh, truth in truths(kind):
        for old, new, axis in redistributions(mesh.ndim, kind):
            expected = truth.after(old, new, axis)
            if is_sharded(old[axis]):
                whole = truth.buffer(new)
                source = whole.view(old)
                source.local.copy_(truth.buffer(old).local)
                source.redistribute(new, whole)
                truth.check(whole, expected)
            elif is_sharded(new[axis]):
                source = truth.buffer(old)
                held = [R if is_average(each) else each for each in old]
                held[axis] = R
                alias = DBuffer.from_local(
                    source.local, mesh, held, SHAPES, layout=truth.layout
                ).view([R if is_average(each) else each for each in new])
                out = DBuffer.from_local(alias.local, mesh, new, SHAPES, layout=truth.layout)
                source.redistribute(new, out)
                truth.check(out, expected)


@distributed(4)
def test_the_collectives_of_the_table() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    truth = Truth(mesh, layout_of("padded", 4))
    rank = dist.get_rank()
    inner = (rank // 2 * 2, rank // 2 * 2 + 1)
    outer = (rank % 2, rank % 2 + 2)
    steps = [
        ((A, A), (A, S), "reduce_scatter", inner),
        ((A, S), (S, S), "reduce_scatter", outer),
        ((S, S), (R, S), "all_gather", outer),
        ((R, S), (R, R), "all_gather", inner),
        ((A, S), (R, S), "all_reduce", outer),
        ((R, R), (R, S), None, None),
        ((R, R), (A, R), None, None),
    ]
    for old, new, kind, ranks in steps:
        with recorded() as records:
            truth.buffer(old).redistribute(new, label="step")
        found = [(record.kind, record.ranks, record.label) for record in records]
        assert found == ([(kind, ranks, "step")] if kind else [])


@distributed(4)
def test_steps_on_one_lane_follow_one_another() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    truth = Truth(mesh, layout_of("packed", 4))
    lane = make_lane(CPU, "test")
    source = truth.buffer((S, S))
    half = source.redistribute((R, S), lane=lane)
    full = half.redistribute((R, R), lane=lane, depends=True)
    lane.synchronize()
    truth.check(full, truth.base)
    partial = truth.buffer((A, A))
    once = partial.redistribute((A, S), lane=lane)
    twice = once.redistribute((S, S), lane=lane)
    lane.synchronize()
    corners = [[outer, inner] for outer in range(2) for inner in range(2)]
    average = mean([truth.contribution((A, A), corner) for corner in corners])
    truth.check(twice, truth.held(average, (S, S)))


@pytest.mark.parametrize("kind", ["padded", "packed"])
@distributed(1, 2, 4)
def test_distributed_tensors_come_back(kind: str) -> None:
    ranks = dist.get_world_size()
    tensors = [torch.randn(shape) for shape in SHAPES]
    for shape in MESHES[ranks]:
        mesh = init_device_mesh("cpu", shape)
        for placements in all_placements(mesh.ndim):
            if any(is_average(each) for each in placements):
                continue
            buffer = DBuffer.distribute_tensors(
                tensors, mesh, placements, layout=layout_of(kind, ranks)
            )
            for axis in range(mesh.ndim):
                wider = [R if each <= axis else placements[each] for each in range(mesh.ndim)]
                buffer = buffer.redistribute(wider)
            for index, tensor in enumerate(tensors):
                piece = buffer.get_local_tensor(index)
                assert piece.shape == tensor.shape
                assert torch.equal(piece, tensor)


@distributed(2)
def test_construction() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    rank = dist.get_rank()
    buffer = DBuffer(mesh, [S], [(5, 4), (2, 6), (3,)], torch.bfloat16)
    assert buffer.layout == padded_layout([(5, 4), (2, 6), (3,)], 2)
    assert (buffer.local.shape, buffer.local.dtype) == ((24,), torch.bfloat16)
    assert buffer.segment == ((0, 24) if rank == 0 else (24, 48))
    assert [tuple(buffer.get_local_tensor(i).shape) for i in range(3)] == (
        [(5, 4), (0, 6), (3,)] if rank == 0 else [(0, 4), (2, 6), (0,)]
    )
    packed = DBuffer(mesh, [S], [(5, 4)], torch.float32, shard_layout=ShardLayout.PACKED)
    assert packed.local.numel() == (8 if rank == 0 else 12)
    blocks = DBuffer(mesh, [BlockAtomic(4)], [(5, 4)], torch.float32)
    assert blocks.get_local_tensor(0).shape == ((4, 4) if rank == 0 else (1, 4))
    flat = DBuffer(mesh, [Flat()], [(3, 3)], torch.float32)
    assert flat.get_local_tensor(0).shape == ((5,) if rank == 0 else (4,))
    meta = DBuffer(mesh, [S], [(5, 4)], torch.float32, "meta")
    assert meta.local.is_meta


@distributed(2)
def test_meta_tensors_give_their_shape() -> None:
    mesh = init_device_mesh("cpu", (2,))
    tensors = [torch.empty(4, 2, device="meta"), torch.ones(2, 2)]
    buffer = DBuffer.distribute_tensors(tensors, mesh, [R], dtype=torch.float64)
    assert buffer.device == CPU
    assert buffer.get_local_tensor(0).shape == (4, 2)
    assert torch.equal(buffer.get_local_tensor(1), torch.ones(2, 2, dtype=torch.float64))


@distributed(2)
def test_views_alias() -> None:
    mesh = init_device_mesh("cpu", (2,))
    full = DBuffer(mesh, [R], [(4, 2)], torch.float32)
    full.local.zero_()
    shard = full.view([S])
    shard.local.fill_(7.0)
    start, stop = shard.segment
    assert full.local[start:stop].tolist() == [7.0] * 4
    assert full.local.sum().item() == 28.0
    own_part_of_partial = DBuffer(mesh, [A], [(4, 2)], torch.float32).view([S])
    assert own_part_of_partial.segment == shard.segment
    with pytest.raises(
        ValueError, match=r"view of axis 0 as R: it is S\(0\), and a view only narrows"
    ):
        shard.view([R])
    half = full.cast(torch.bfloat16)
    assert (half.dtype, half.placements, half.layout) == (torch.bfloat16, (R,), full.layout)
    assert full.cast(torch.float32) is full
    assert full.redistribute([R]) is full


@distributed(2)
def test_storage_comes_and_goes_below_the_views() -> None:
    mesh = init_device_mesh("cpu", (2,))
    buffer = DBuffer(mesh, [R], [(4, 2), (3,)], torch.float32)
    piece, shard = buffer.get_local_tensor(0), buffer.view([S])
    assert buffer.has_storage
    buffer.release_storage()
    assert [buffer.has_storage, shard.has_storage] == [False, False]
    assert piece.untyped_storage().nbytes() == 0
    buffer.reallocate_storage()
    buffer.reallocate_storage()
    assert [buffer.has_storage, shard.has_storage] == [True, True]
    buffer.local.fill_(3.0)
    assert piece.tolist() == [[3.0, 3.0]] * 4
    for call in (shard.release_storage, buffer.view([S]).release_storage):
        with pytest.raises(RuntimeError, match="it is a part of a larger buffer; release that one"):
            call()
    empty = DBuffer(mesh, [R], [], torch.float32)
    empty.release_storage()
    assert empty.has_storage


@distributed(2)
def test_buffers_made_under_inference_mode_can_be_trained() -> None:
    mesh = init_device_mesh("cpu", (2,))
    with torch.inference_mode():
        source = DBuffer.distribute_tensors([torch.ones(4, 2)], mesh, [S])
        full = source.redistribute([R])
        copied = source.cast(torch.float64)
        dtensor = source.get_dtensor(0)
    for tensor in (source.local, full.local, copied.local, dtensor):
        assert not tensor.is_inference()
        assert not tensor.requires_grad


@distributed(2)
def test_a_recording_lane_sees_what_a_redistribution_does() -> None:
    mesh = init_device_mesh("cpu", (2,))
    recorder = Recorder()
    lane = recorder.make_lane("gather")
    shard = DBuffer.distribute_tensors([torch.ones(4, 2)], mesh, [S])
    with Operators(recorder):
        full = shard.redistribute([R], lane=lane, label="a")
        full.redistribute([S], lane=lane)
        shard.redistribute([R], full, lane=lane, depends=True, label="b")
        full.redistribute([S], shard, lane=lane)
    done = [str(record) for record in recorder.log if isinstance(record, Access)]
    # Without a place to put it, a slice needs nothing of the lane.
    assert done == ["gather: all_gather a", "gather: all_gather b", "gather: aten.copy_.default"]


@distributed(4)
def test_errors_say_what_was_expected() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    shapes = [(4, 2)]
    layout = padded_layout(shapes, 4)
    buffer = DBuffer(mesh, [R, R], shapes, torch.float32, layout=layout)
    with pytest.raises(ValueError, match=r"one axis changes per call, found \['outer', 'inner'\]"):
        buffer.redistribute([S, S])
    with pytest.raises(ValueError, match="expected one for each of the axes"):
        buffer.redistribute([R])
    with pytest.raises(ValueError, match="axis 'outer' is sharded but an axis inside it is not"):
        buffer.redistribute([S, R])
    shard = buffer.view([R, S])
    with pytest.raises(ValueError, match=r"redistribute axis 'inner' from .* not possible in one"):
        shard.redistribute([R, A])
    for what, out in (
        ("placements", DBuffer(mesh, [R, R], shapes, torch.float32, layout=layout)),
        ("layout", DBuffer(mesh, [R, S], shapes, torch.float32, layout=padded_layout(shapes, 8))),
        ("dtype", DBuffer(mesh, [R, S], shapes, torch.float64, layout=layout)),
        ("device", DBuffer(mesh, [R, S], shapes, torch.float32, "meta", layout=layout)),
    ):
        with pytest.raises(ValueError, match=f"out must agree with the buffer in {what}"):
            buffer.redistribute([R, S], out)
    other = init_device_mesh("cpu", (4, 1))
    elsewhere = DBuffer(other, [R, S], shapes, torch.float32, layout=layout)
    with pytest.raises(ValueError, match="out must agree with the buffer in mesh"):
        buffer.redistribute([R, S], elsewhere)
    with pytest.raises(ValueError, match=r"cut the buffer into 4, which does not divide .* 2 seg"):
        DBuffer(mesh, [S, S], shapes, torch.float32, layout=padded_layout(shapes, 2))
    with pytest.raises(ValueError, match=r"layout: expected shapes \(\(4, 2\),\), found"):
        DBuffer(mesh, [S, S], shapes, torch.float32, layout=padded_layout([(2, 4)], 4))
    with pytest.raises(ValueError, match="local: expected a contiguous 1-D tensor of 8 elements"):
        DBuffer.from_local(torch.empty(4, 2), mesh, [R, R], shapes, layout=layout)
    with pytest.raises(ValueError, match=r"expected tensors of one dtype, found .*pass dtype="):
        DBuffer.distribute_tensors([torch.ones(1), torch.ones(1).double()], mesh, [R, R])
    with pytest.raises(ValueError, match="TensorAtomic needs the rank that owns each tensor"):
        DBuffer(mesh, [R, TensorAtomic()], shapes, torch.float32)
    with pytest.raises(ValueError, match=r"expected Shard\(0\), found S"):
        DBuffer(mesh, [R, Shard(1)], shapes, torch.float32)


@distributed(2)
def test_parts_that_may_cut_rows_are_told_from_those_that_may_not() -> None:
    """Their placements are equal for DTensor, and one buffer may be asked for both."""
    mesh = init_device_mesh("cpu", (2,))
    whole = DBuffer(mesh, [Replicate()], [(4, 3)], torch.float32)
    flat, rows = whole.view([Flat()]), whole.view([Shard(0)])
    assert flat.get_local_tensor(0).shape == (6,)
    assert rows.get_local_tensor(0).shape == (2, 3)
    assert whole.view([Flat()]).get_local_tensor(0).shape == (6,)


@distributed(2)
def test_buffers_that_differ_in_dtype_only_share_no_dtensors() -> None:
    """What is worked out once for a layout and placements is asked for in several dtypes; the
    last rank has no row of the last tensor."""
    mesh = init_device_mesh("cpu", (2,))
    single = DBuffer(mesh, [S], [(4, 3), (1, 3)], torch.float32)
    for buffer in (single, single.cast(torch.float64), single.like([S], single.local)):
        for dtensor in (*buffer.get_dtensors((0, 1)), buffer.get_dtensor(1)):
            meta = spec_of(dtensor).tensor_meta
            assert meta is not None
            found = {meta.dtype, dtensor.dtype, dtensor.to_local().dtype, (dtensor + 1).dtype}
            assert found == {buffer.dtype}


@pytest.mark.parametrize("fake_first", [False, True])
@distributed(2)
def test_a_piece_without_elements_is_as_real_as_its_buffer(fake_first: bool) -> None:
    """DTensor asks with fake tensors for shapes; one rank has no row of the last tensor."""
    buffer = DBuffer(init_device_mesh("cpu", (2,)), [S], [(4, 3), (1, 3)], torch.float32)
    fake = buffer.like([S], FakeTensorMode().from_tensor(buffer.local))
    for each in (fake, buffer) if fake_first else (buffer, fake):
        assert {type(piece) for piece in each.get_local_tensors((0, 1))} == {type(each.local)}


@LAYOUTS
@distributed(1, 2)
def test_all_pieces_are_the_pieces_one_by_one(kind: str) -> None:
    """Of the same memory, whatever lies between them."""
    for mesh, truth in truths(kind):
        olds = {old for old, _, _ in redistributions(mesh.ndim, kind)}
        for buffer in (truth.buffer(old) for old in olds):
            together = buffer.get_local_tensors(range(len(SHAPES)))
            for index, piece in enumerate(together):
                alone = buffer.get_local_tensor(index)
                assert piece.shape == alone.shape and torch.equal(piece, alone)
                assert not piece.numel() or piece.data_ptr() == alone.data_ptr()
