"""DTensors over DBuffers: what torch's own functions make of uneven, packed and empty shards."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from compile_fsdp.runtime.dbuffer import DBuffer
from compile_fsdp.runtime.dtensor import RowShard
from compile_fsdp.runtime.layout import GlobalLayout, packed_layout, padded_layout
from compile_fsdp.runtime.placement import Flat
from tests.distributed import distributed

R, S, A = Replicate(), Shard(0), Partial("avg")
SHAPES = [(5, 4), (2, 6), (3,), (1, 7), (0, 3), (9, 2), (4, 0), (5, 4)]
MESHES: dict[int, list[tuple[int, ...]]] = {
    1: [(1,)],
    2: [(2,), (1, 2), (2, 1)],
    3: [(3,)],
    4: [(4,), (2, 2), (1, 4), (4, 1)],
}
LAYOUTS = pytest.mark.parametrize("kind", ["padded", "packed"])


def layout_of(kind: str, shards: int) -> GlobalLayout:
    return (padded_layout if kind == "padded" else packed_layout)(SHAPES, shards)


def full_values(scale: float = 1.0) -> list[torch.Tensor]:
    """Distinct values whose sums and squares are exact."""
    return [
        scale * (torch.arange(float(torch.Size(shape).numel())).view(shape) + 10.0 * index)
        for index, shape in enumerate(SHAPES)
    ]


def sharded_placements(ndim: int) -> list[tuple[Placement, ...]]:
    return [(S,)] if ndim == 1 else [(S, S), (R, S)]


@LAYOUTS
@distributed(1, 2, 3, 4)
def test_full_tensor_and_norm(kind: str) -> None:
    ranks, values = dist.get_world_size(), full_values()
    for shape in MESHES[ranks]:
        mesh = init_device_mesh("cpu", shape)
        for placements in sharded_placements(mesh.ndim):
            buffer = DBuffer.distribute_tensors(
                values, mesh, placements, layout=layout_of(kind, ranks)
            )
            for index, value in enumerate(values):
                dtensor = buffer.get_dtensor(index)
                assert dtensor.shape == value.shape
                assert dtensor.stride() == value.stride()
                assert dtensor.placements == placements
                local = dtensor.to_local()
                assert local.shape == buffer.get_local_tensor(index).shape
                assert torch.equal(dtensor.full_tensor(), value)
                norm = torch.linalg.vector_norm(dtensor)
                assert isinstance(norm, DTensor)
                torch.testing.assert_close(norm.full_tensor(), torch.linalg.vector_norm(value))


@distributed(2)
def test_a_dtensor_aliases_its_buffer() -> None:
    mesh = init_device_mesh("cpu", (2,))
    buffer = DBuffer.distribute_tensors([torch.zeros(4, 2)], mesh, [S])
    first, second = buffer.get_dtensor(0), buffer.get_dtensor(0)
    assert first is not second
    first.add_(1.0)
    assert buffer.get_local_tensor(0).tolist() == [[1.0, 1.0]] * 2
    assert second.full_tensor().tolist() == [[1.0, 1.0]] * 4


@distributed(2, 4)
def test_plain_dtensors_of_the_same_shape_do_not_interfere() -> None:
    """DTensor caches redistribution plans by spec, and our placement equals the plain one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    value = full_values()[0]
    plain = distribute_tensor(value, mesh, [S])
    buffer = DBuffer.distribute_tensors(
        full_values(), mesh, [S], layout=layout_of("packed", dist.get_world_size())
    )
    first, last = buffer.get_dtensor(0), buffer.get_dtensor(7)
    for _ in range(2):
        assert torch.equal(plain.full_tensor(), value)
        # Two tensors of one shape that are cut in different places.
        assert torch.equal(first.full_tensor(), value)
        assert torch.equal(last.full_tensor(), full_values()[7])
        # Operators find their plans in a cache too.
        first.mul_(1.0)
        last.mul_(1.0)
        plain.mul_(1.0)


@distributed(2)
def test_equality_copies_and_no_hash() -> None:
    mesh = init_device_mesh("cpu", (2,))
    buffer = DBuffer.distribute_tensors(
        full_values(), mesh, [S], layout=layout_of("packed", dist.get_world_size())
    )
    exact, again, other = (buffer.get_dtensor(index).placements[0] for index in (0, 0, 7))
    assert isinstance(exact, RowShard)
    assert exact == S
    assert S == exact
    assert not exact.is_replicate()
    assert exact == again
    assert exact != other
    assert (exact == Shard(1), exact == "S(0)") == (False, False)
    with pytest.raises(RuntimeError, match=r"torch.empty_like\(parameter\).copy_\(tensor\)"):
        hash(exact)
    for copied in (copy.deepcopy(exact), pickle.loads(pickle.dumps(exact))):
        assert isinstance(copied, RowShard)
        assert (copied.rows, copied.axes, copied.position) == (exact.rows, exact.axes, 0)


@distributed(2)
def test_what_torch_makes_with_our_placements_is_right_or_refused() -> None:
    """``DTensor.from_local`` and ``redistribute`` return a class whose operators are torch's."""
    mesh, values = init_device_mesh("cpu", (2,)), full_values()
    buffer = DBuffer.distribute_tensors(values, mesh, [S], layout=layout_of("packed", 2))
    ours = buffer.get_dtensor(0)
    meta = {"shape": ours.shape, "stride": ours.stride()}
    made = DTensor.from_local(ours.to_local(), mesh, ours.placements, **meta)
    # With one of ours, ours runs the operator.
    assert torch.equal((ours + made).full_tensor(), 2 * values[0])
    for operator in (torch.sqrt, torch.sum, DTensor.full_tensor, torch.Tensor.clone):
        with pytest.raises(RuntimeError, match=r"empty_like\(parameter\).copy_\(tensor\)"):
            operator(made)
    replicated = DTensor.from_local(values[0], mesh, [R])
    with pytest.raises(RuntimeError, match=r"empty_like\(parameter\).copy_\(tensor\)"):
        replicated.redistribute(placements=ours.placements)
    # What it says to do.
    for plain in (replicated, distribute_tensor(values[0], mesh, ours.placements)):
        again = torch.empty_like(ours).copy_(plain)
        assert torch.equal(again.to_local(), ours.to_local())
        assert torch.equal(again.full_tensor(), values[0])
    short = DTensor.from_local(torch.ones(1, 4), mesh, ours.placements, **meta)
    with pytest.raises(RuntimeError, match="of which this rank holds"):
        ours + short


@LAYOUTS
@distributed(2, 4)
def test_redistribute(kind: str) -> None:
    ranks, values = dist.get_world_size(), full_values()
    for shape in MESHES[ranks]:
        mesh = init_device_mesh("cpu", shape)
        everywhere = [R] * mesh.ndim
        for placements in sharded_placements(mesh.ndim):
            buffer = DBuffer.distribute_tensors(
                values, mesh, placements, layout=layout_of(kind, ranks)
            )
            for index, value in enumerate(values):
                dtensor = buffer.get_dtensor(index)
                replicated = dtensor.redistribute(placements=everywhere)
                assert torch.equal(replicated.to_local(), value)
                back = torch.empty_like(dtensor).copy_(replicated)
                assert torch.equal(back.to_local(), dtensor.to_local())
                assert torch.equal(back.full_tensor(), value)
                if value.ndim == 2:
                    columns = dtensor.redistribute(placements=[*everywhere[1:], Shard(1)])
                    assert torch.equal(columns.full_tensor(), value)
                plain = dtensor.redistribute(placements=list(placements))
                assert torch.equal(plain.full_tensor(), value)
                assert dtensor.redistribute(placements=dtensor.placements) is dtensor


@LAYOUTS
@distributed(4)
def test_redistribute_one_of_two_shard_axes(kind: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    buffer = DBuffer.distribute_tensors(full_values(), mesh, [S, S], layout=layout_of(kind, 4))
    for index, value in enumerate(full_values()):
        dtensor = buffer.get_dtensor(index)
        for target in ([S, R], [R, S]):
            half = dtensor.redistribute(placements=target)
            assert torch.equal(half.full_tensor(), value), f"{value.shape} by way of {target}"


@distributed(4)
def test_full_tensor_over_a_flattened_mesh() -> None:
    """With a flattened mesh at hand DTensor gathers over both axes in one step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    mesh._flatten("both")
    buffer = DBuffer.distribute_tensors(full_values(), mesh, [S, S])
    for index, value in enumerate(full_values()):
        assert torch.equal(buffer.get_dtensor(index).full_tensor(), value)


@LAYOUTS
@distributed(1, 2, 4)
def test_optimizers_and_clipping(kind: str) -> None:
    ranks = dist.get_world_size()
    for shape in MESHES[ranks]:
        mesh = init_device_mesh("cpu", shape)
        for placements in sharded_placements(mesh.ndim):
            layout = layout_of(kind, ranks)
            weights = DBuffer.distribute_tensors(full_values(0.25), mesh, placements, layout=layout)
            grads = DBuffer.distribute_tensors(full_values(0.5), mesh, placements, layout=layout)
            whole = [nn.Parameter(value) for value in full_values(0.25)]
            parts = [nn.Parameter(weights.get_dtensor(index)) for index in range(len(whole))]
            for index, value in enumerate(full_values(0.5)):
                whole[index].grad = value
                parts[index].grad = grads.get_dtensor(index)
            expected = nn.utils.clip_grad_norm_(whole, 1.0)
            norm = nn.utils.clip_grad_norm_(parts, 1.0)
            assert isinstance(norm, DTensor)
            torch.testing.assert_close(norm.full_tensor(), expected)
            for foreach in (False, True):
                torch.optim.AdamW(whole, lr=0.1, foreach=foreach).step()
                torch.optim.AdamW(parts, lr=0.1, foreach=foreach).step()
                torch.optim.SGD(whole, lr=0.1, momentum=0.9, foreach=foreach).step()
                torch.optim.SGD(parts, lr=0.1, momentum=0.9, foreach=foreach).step()
            for index, parameter in enumerate(whole):
                part = parts[index].data
                assert isinstance(part, DTensor)
                full = DBuffer.get_dtensor(weights, index).full_tensor()
                torch.testing.assert_close(full, parameter.data)


@LAYOUTS
@distributed(2, 4)
def test_checkpoint_chunks(kind: str) -> None:
    """torch.distributed.checkpoint asks a DTensor which part of the tensor it holds."""
    ranks, values = dist.get_world_size(), full_values()
    for shape in MESHES[ranks]:
        mesh = init_device_mesh("cpu", shape)
        for placements in sharded_placements(mesh.ndim):
            buffer = DBuffer.distribute_tensors(
                values, mesh, placements, layout=layout_of(kind, ranks)
            )
            for index, value in enumerate(values):
                dtensor = buffer.get_dtensor(index)
                (chunk,) = dtensor.__create_chunk_list__()
                local = dtensor.to_local()
                assert tuple(chunk.sizes) == tuple(local.shape)
                if local.numel():
                    first = chunk.offsets[0]
                    assert torch.equal(value[first : first + chunk.sizes[0]], local)


@LAYOUTS
@distributed(2, 3)
def test_a_partial_dtensor_reduces_to_our_rows(kind: str) -> None:
    ranks, values = dist.get_world_size(), full_values()
    mesh = init_device_mesh("cpu", (ranks,))
    buffer = DBuffer.distribute_tensors(values, mesh, [S], layout=layout_of(kind, ranks))
    for index, value in enumerate(values):
        if value.numel() == 0:
            continue
        target = buffer.get_dtensor(index)
        for operation in ("sum", "avg"):
            partial = DTensor.from_local(value * (dist.get_rank() + 1), mesh, [Partial(operation)])
            reduced = torch.empty_like(target).copy_(partial)
            factor = sum(range(1, ranks + 1)) / (ranks if operation == "avg" else 1)
            torch.testing.assert_close(reduced.to_local(), target.to_local() * factor)


@distributed(2)
def test_partial_and_replicated_buffers_give_plain_dtensors() -> None:
    mesh = init_device_mesh("cpu", (2,))
    values = [torch.full((3, 2), dist.get_rank() + 1.0), torch.tensor(dist.get_rank() * 2.0)]
    partial = DBuffer.distribute_tensors(values, mesh, [A])
    assert partial.get_dtensor(0).full_tensor().tolist() == [[1.5, 1.5]] * 3
    assert partial.get_dtensor(1).full_tensor().item() == 1.0
    replicated = partial.redistribute([R])
    assert replicated.get_dtensor(0).placements == (R,)
    assert replicated.get_dtensor(1).shape == ()


@distributed(2)
def test_what_a_dtensor_cannot_say_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    scalars = DBuffer.distribute_tensors([torch.tensor(1.0), torch.ones(2)], mesh, [S])
    with pytest.raises(ValueError, match="tensor 0 is 0-D: DTensor cannot shard it"):
        scalars.get_dtensor(0)
    flat = DBuffer.distribute_tensors([torch.ones(3, 3)], mesh, [Flat()])
    with pytest.raises(ValueError, match=r"not whole rows of 3; the layout is Flat"):
        flat.get_dtensor(0)
