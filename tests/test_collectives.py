"""The collectives on flat tensors: values on equal, unequal and empty parts, and the record."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from compile_fsdp.runtime.collectives import (
    CollectiveRecord,
    all_gather,
    all_reduce,
    recorded,
    reduce_scatter,
)
from compile_fsdp.runtime.recording import Recorder
from compile_fsdp.runtime.streams import make_lane
from tests.distributed import distributed

CPU = torch.device("cpu")


def group() -> dist.ProcessGroup:
    default = dist.group.WORLD
    assert default is not None
    return default


def rank_values(rank: int, numel: int) -> torch.Tensor:
    """Values that tell the rank and the position, and whose sums are exact."""
    return torch.arange(float(numel)) + 1000.0 * (rank + 1)


def sizes_of(parts: str) -> list[int]:
    ranks = dist.get_world_size()
    return {
        "equal": [5] * ranks,
        "equal and large": [40_000] * ranks,
        "growing": [3 * rank + 1 for rank in range(ranks)],
        "one empty": [0 if rank == ranks - 1 else 4 for rank in range(ranks)],
        "one holds all": [7 if rank == 0 else 0 for rank in range(ranks)],
        "all empty": [0] * ranks,
    }[parts]


PARTS = pytest.mark.parametrize(
    "parts", ["equal", "equal and large", "growing", "one empty", "one holds all", "all empty"]
)


@PARTS
@pytest.mark.parametrize("in_place", [False, True])
@distributed(1, 2, 3, 4)
def test_all_gather(parts: str, in_place: bool) -> None:
    sizes, rank = sizes_of(parts), dist.get_rank()
    expected = torch.cat([rank_values(each, size) for each, size in enumerate(sizes)])
    output = torch.full_like(expected, -1.0)
    own = output.split(sizes)[rank] if in_place else torch.empty(sizes[rank])
    own.copy_(rank_values(rank, sizes[rank]))
    lane = make_lane(CPU, "gather")
    all_gather(lane, output, own, group(), sizes)
    lane.synchronize()
    assert torch.equal(output, expected)


@PARTS
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_place", [False, True])
@distributed(1, 2, 3, 4)
def test_reduce_scatter(parts: str, average: bool, dtype: torch.dtype, in_place: bool) -> None:
    sizes, rank, ranks = sizes_of(parts), dist.get_rank(), dist.get_world_size()
    inputs = [torch.arange(float(sum(sizes))).to(dtype) + each for each in range(ranks)]
    total = torch.stack(inputs).sum(0) * ((1.0 / ranks) if average else 1.0)
    mine = inputs[rank].clone()
    own = mine.split(sizes)[rank] if in_place else torch.empty(sizes[rank], dtype=dtype)
    lane = make_lane(CPU, "reduce")
    reduce_scatter(lane, own, mine, group(), sizes, average=average)
    lane.synchronize()
    assert torch.equal(own, total.to(dtype).split(sizes)[rank])


@pytest.mark.parametrize("average", [False, True])
@distributed(1, 2, 3, 4)
def test_all_reduce(average: bool) -> None:
    ranks = dist.get_world_size()
    tensor = rank_values(dist.get_rank(), 9)
    total = torch.stack([rank_values(rank, 9) for rank in range(ranks)]).sum(0)
    lane = make_lane(CPU, "reduce")
    all_reduce(lane, tensor, group(), average=average)
    lane.synchronize()
    assert torch.equal(tensor, total * (1.0 / ranks) if average else total)


@distributed(2)
def test_gathers_overlap_and_reductions_keep_their_order() -> None:
    lane = make_lane(CPU, "both")
    outputs, totals = [], []
    for number in range(4):
        outputs.append(torch.empty(2 * 3))
        all_gather(lane, outputs[-1], torch.full((3,), float(number)), group())
    for number in range(4):
        totals.append(torch.empty(2))
        source = torch.full((4,), number + float(dist.get_rank()))
        reduce_scatter(lane, totals[-1], source, group(), average=False)
    lane.synchronize()
    assert [output.tolist() for output in outputs] == [[float(n)] * 6 for n in range(4)]
    assert [total.tolist() for total in totals] == [[2.0 * n + 1.0] * 2 for n in range(4)]


@distributed(2)
def test_a_gather_may_depend_on_the_one_before() -> None:
    lane = make_lane(CPU, "gather")
    middle, output = torch.empty(4), torch.empty(8)
    own = torch.full((2,), dist.get_rank() + 1.0)
    all_gather(lane, middle, own, group())
    all_gather(lane, output, middle, group(), depends=True)
    lane.synchronize()
    assert output.tolist() == [1.0, 1.0, 2.0, 2.0] * 2


@distributed(2)
def test_results_can_be_written_under_inference_mode() -> None:
    lane = make_lane(CPU, "gather")
    output, total = torch.empty(4), torch.empty(2)
    with torch.inference_mode():
        all_gather(lane, output, torch.ones(2), group())
        reduce_scatter(lane, total, torch.ones(4), group(), average=True)
        lane.synchronize()
    assert not output.is_inference()
    assert output.tolist() == [1.0] * 4
    assert total.tolist() == [1.0] * 2


@distributed(2)
def test_a_gather_in_place_does_not_write_the_own_part() -> None:
    """Whoever owns that may write it while the other ranks are still to come."""
    lane, rank, beside = make_lane(CPU, "gather"), dist.get_rank(), dist.new_group()
    output = torch.zeros(8)
    own = output.split(4)[rank]
    own.fill_(1.0)
    if rank == 1:
        dist.barrier(beside)
    all_gather(lane, output, own, group())
    own.fill_(2.0)
    if rank == 0:
        dist.barrier(beside)
    lane.synchronize()
    assert own.tolist() == [2.0] * 4


@distributed(2)
def test_what_is_gathered_has_no_history() -> None:
    """Whoever calls may be recording a graph, of tensors that are in one."""
    lane, rank = make_lane(CPU, "gather"), dist.get_rank()
    output, own = torch.empty(3), torch.full((rank + 1,), 2.0, requires_grad=True)
    all_gather(lane, output, own, group(), [1, 2])
    lane.synchronize()
    assert not output.requires_grad and output.tolist() == [2.0] * 3


@distributed(2)
def test_the_record_lists_what_was_started() -> None:
    lane = make_lane(CPU, "lane")
    with recorded() as outer:
        all_gather(lane, torch.empty(8), torch.empty(4), group(), label="a")
        with recorded() as inner:
            reduce_scatter(lane, torch.empty(4), torch.zeros(8), group(), average=True, label="b")
        all_reduce(lane, torch.zeros(3), group(), average=True)
    all_reduce(lane, torch.zeros(3), group(), average=True)
    scattered = CollectiveRecord("reduce_scatter", 32, (0, 1), "b")
    assert inner == [scattered]
    gathered = CollectiveRecord("all_gather", 32, (0, 1), "a")
    assert outer == [gathered, scattered, CollectiveRecord("all_reduce", 12, (0, 1), "")]


@distributed(1)
def test_one_rank_does_not_communicate() -> None:
    recorder = Recorder()
    lane = recorder.make_lane("lane")
    buffer = torch.arange(4.0)
    with recorded() as records:
        all_gather(lane, buffer, buffer, group())
        all_reduce(lane, buffer, group(), average=True)
        reduce_scatter(lane, buffer, buffer, group(), average=True)
    assert records == []
    assert recorder.log == [], "the same memory needs no copy either"
    assert buffer.tolist() == [0.0, 1.0, 2.0, 3.0]


@distributed(2)
def test_sizes_that_do_not_fit() -> None:
    lane = make_lane(CPU, "lane")
    rank = dist.get_rank()
    with pytest.raises(ValueError, match=rf"all_gather over 2 ranks: rank {rank} has a part of 3"):
        all_gather(lane, torch.empty(5), torch.empty(3), group())
    with pytest.raises(ValueError, match=r"reduce_scatter over 2 ranks.*pass sizes="):
        reduce_scatter(lane, torch.empty(2), torch.empty(5), group(), average=True)
    with pytest.raises(ValueError, match=r"ranks' sizes \[1, 2, 3\]"):
        all_gather(lane, torch.empty(6), torch.empty(1), group(), [1, 2, 3])
