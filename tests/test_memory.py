"""The bytes of the runtime's buffers are counted, observed, and in static memory found again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from compile_fsdp.runtime.arena import Place
from compile_fsdp.runtime.context import GroupContext
from compile_fsdp.runtime.memory import COMPUTE, Memory, MemoryEvent
from compile_fsdp.runtime.recording import Recorder
from compile_fsdp.runtime.streams import Lane, lanes_made_by, make_lane

CPU = torch.device("cpu")
GATHER = make_lane(CPU, "gather")
REDUCE = make_lane(CPU, "reduce_inner")
ON_CPU = {name: make_lane(CPU, name) for name in ("gather", "reduce_inner", "reduce_outer")}


def make_recorded(name: str) -> Lane:
    return Recorder().make_lane(name)


def make_on_cpu(name: str) -> Lane:
    return ON_CPU[name]


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def static() -> Memory:
    found = Memory()
    found.is_static = True
    return found


def watched(memory: Memory) -> list[MemoryEvent]:
    events: list[MemoryEvent] = []
    memory.observers.append(events.append)
    return events


def floats(memory: Memory, numel: int, lane: Lane | None = None) -> torch.Tensor:
    return memory.empty(numel, torch.float32, CPU, owner="test", lane=lane)


def test_an_allocation_ends_with_the_last_view(memory: Memory) -> None:
    events = watched(memory)
    tensor = floats(memory, 8, REDUCE)
    address = tensor.data_ptr()
    part = tensor[2:4]
    memory.give_back(tensor)
    del tensor
    assert [event.what for event in events] == ["allocate"]
    del part
    taken, freed = events
    assert taken == MemoryEvent("allocate", address, 32, "test", "reduce_inner")
    assert freed == MemoryEvent("free", address, 32, "test", "reduce_inner")
    assert (memory.allocations, memory.frees, memory.live_bytes, memory.peak_bytes) == (1, 1, 0, 32)


def test_nothing_is_said_about_no_bytes(memory: Memory, static: Memory) -> None:
    for each in (memory, static):
        events = watched(each)
        each.give_back(floats(each, 0))
        each.empty(4, torch.float32, torch.device("meta"), owner="test")
        assert not events and each.allocations == 0


def test_storage_that_grows_and_shrinks(memory: Memory) -> None:
    events = watched(memory)
    tensor = torch.empty(8)
    memory.shrink(tensor, lane=GATHER)  # nobody told us of these bytes
    for _ in range(2):
        memory.grow(tensor, 32, owner="test", lane=GATHER)
        tensor.fill_(1)
        memory.shrink(tensor, lane=GATHER)
        assert tensor.untyped_storage().nbytes() == 0
    memory.grow(tensor, 32, owner="test", lane=GATHER)
    del tensor
    assert [event.what for event in events] == ["allocate", "free"] * 3
    assert (memory.allocations, memory.frees, memory.live_bytes) == (3, 3, 0)


def test_bytes_come_from_a_source_that_may_be_replaced(memory: Memory) -> None:
    opened = []

    @contextmanager
    def source() -> Iterator[None]:
        opened.append("in")
        yield
        opened.append("out")

    memory.source = source
    floats(memory, 4)
    memory.grow(torch.empty(0), 16, owner="test")
    memory.arena.take(Place(0, 256), 4, torch.float32, CPU, owner="test", lane=GATHER)
    assert opened == ["in", "out"] * 3


def test_static_memory_comes_back_to_those_who_ask_for_the_same(static: Memory) -> None:
    first = floats(static, 8)
    address = first.data_ptr()
    static.give_back(first)
    others = (
        floats(static, 9),
        floats(static, 8, REDUCE),
        static.empty(8, torch.int32, CPU, owner="test"),
    )
    assert address not in [other.data_ptr() for other in others]
    again, another = floats(static, 8), floats(static, 8)
    assert again.data_ptr() == address != another.data_ptr()
    assert (static.allocations, static.frees) == (5, 0)


def test_static_memory_is_found_in_one_order_whatever_order_it_came_back_in(
    static: Memory,
) -> None:
    def step(back: list[int]) -> list[int]:
        tensors = [floats(static, 8) for _ in range(3)]
        for number in back:
            static.give_back(tensors[number])
        return [tensor.data_ptr() for tensor in tensors]

    assert step([2, 0, 1]) == step([0, 1, 2]) == step([1, 2, 0])
    assert static.allocations == 3


def test_static_memory_is_used_and_unused(static: Memory) -> None:
    events = watched(static)
    tensor = floats(static, 8)
    static.give_back(tensor)
    static.give_back(tensor)  # it is not his any more
    floats(static, 8)
    assert [event.what for event in events] == ["allocate", "free", "allocate"]
    assert [event.lane for event in events] == [COMPUTE] * 3
    assert (static.allocations, static.live_bytes, static.peak_bytes) == (1, 32, 32)


def test_what_is_not_given_back_is_let_go_of(static: Memory) -> None:
    """After an exception nobody knows whether something on a lane still reads it."""
    events = watched(static)
    tensor = floats(static, 8)
    del tensor
    assert [event.what for event in events] == ["allocate", "free"]
    assert (static.allocations, static.frees, static.live_bytes) == (1, 1, 0)
    floats(static, 8)
    assert static.allocations == 2


def test_who_has_an_address_next_is_not_taken_for_who_had_it(
    static: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may be given bytes before we hear that they were let go of."""
    same = bytearray(32)
    monkeypatch.setattr(static, "raw", lambda *_: torch.frombuffer(same, dtype=torch.float32))
    first, second = floats(static, 8), floats(static, 8)
    assert first.data_ptr() == second.data_ptr()
    del first
    assert (static.frees, static.live_bytes) == (1, 32)
    static.give_back(second)
    assert static.live_bytes == 0
    assert floats(static, 8) is second
    assert static.allocations == 2


def test_neither_a_part_nor_a_stranger_can_be_given_back(static: Memory) -> None:
    tensor = floats(static, 8)
    static.give_back(tensor[:4])
    static.give_back(torch.empty(8))
    assert floats(static, 8).data_ptr() != tensor.data_ptr()


def test_what_lasts_takes_nobodys_place_and_gives_up_none(static: Memory) -> None:
    """A captured graph writes into bytes that are handed out again, whoever has them by then."""
    passing = floats(static, 8)
    static.give_back(passing)
    lasting = static.empty(8, torch.float32, CPU, owner="test", lasting=True)
    assert lasting.data_ptr() != passing.data_ptr()
    static.give_back(lasting)
    addresses = {floats(static, 8).data_ptr() for _ in range(2)}
    assert passing.data_ptr() in addresses and lasting.data_ptr() not in addresses


def test_bytes_that_are_taken_in_inference_mode_are_written_outside_of_it(static: Memory) -> None:
    with torch.inference_mode():
        tensor = floats(static, 8)
        static.give_back(tensor)
    again = floats(static, 8)
    assert again is tensor
    again.fill_(1)


@pytest.mark.parametrize(("make", "taken"), [(make_recorded, 3), (make_on_cpu, 1)])
def test_what_is_sent_lies_where_the_next_but_one_before_lay(
    make: Callable[[str], Lane], taken: int
) -> None:
    """Where nobody knows whether a lane has read it, two are in flight; else the last one is
    done with before the next one takes memory."""
    with lanes_made_by(make):
        context = GroupContext(CPU)
        context.is_driven = context.memory.is_static = True
        for _ in range(5):
            context.settle_reductions()
            context.note_reduction((), floats(context.memory, 8))
    context.wait_for_reductions()
    assert (context.memory.allocations, context.memory.live_bytes) == (taken, 0)


# The arena --------------------------------------------------------------------------------------


def test_a_place_is_the_start_of_a_storage(static: Memory) -> None:
    """``as_strided`` counts from there."""
    arena = static.arena
    low = arena.take(Place(0, 1024), 64, torch.float32, CPU, owner="a", lane=GATHER)
    high = arena.take(Place(256, 1024), 64, torch.bfloat16, CPU, owner="b", lane=GATHER)
    assert high.tensor.data_ptr() - low.tensor.data_ptr() == 256
    assert high.tensor.storage_offset() == 0 and high.tensor.dtype is torch.bfloat16
    low.tensor.fill_(1)
    high.tensor.as_strided((8, 8), (8, 1), 0).fill_(2)
    assert low.tensor.eq(1).all() and high.tensor.eq(2).all()
    assert arena.size == 1024 and arena.taken == ((0, 256), (256, 384))
    assert static.allocations == 1


def test_a_place_that_somebody_is_in_is_given_to_nobody_else(static: Memory) -> None:
    arena = static.arena
    there = arena.take(Place(0, 512), 64, torch.float32, CPU, owner="a", lane=GATHER)
    there.tensor.fill_(1)
    for _ in range(3):
        other = arena.take(Place(0, 512), 128, torch.float32, CPU, owner="b", lane=GATHER)
        assert other.block is not None and other.tensor.storage_offset() == 0
        other.tensor.fill_(2)
        arena.leave(other)
    assert there.tensor.eq(1).all()
    assert arena.unplanned == 3
    assert static.allocations == 2, "elsewhere is kept as well"
    arena.leave(there)
    again = arena.take(Place(0, 512), 128, torch.float32, CPU, owner="b", lane=GATHER)
    assert again.block is None and again.tensor.data_ptr() == there.tensor.data_ptr()
    # An op that names what was in a place must not be seen to return it.
    storages = {each.tensor.untyped_storage()._cdata for each in (there, again)}
    assert len(storages) == 2


def test_an_arena_grows_around_those_who_are_in_it(static: Memory) -> None:
    arena = static.arena
    old = arena.take(Place(0, 256), 64, torch.float32, CPU, owner="a", lane=GATHER)
    old.tensor.fill_(1)
    new = arena.take(Place(0, 512), 128, torch.float32, CPU, owner="b", lane=GATHER)
    new.tensor.fill_(2)
    assert old.tensor.eq(1).all() and arena.unplanned == 0 and arena.size == 512
    arena.leave(old)
    assert arena.taken == ((0, 512),)
    arena.leave(new)
    assert static.live_bytes == 0
    same = arena.take(Place(0, 512), 128, torch.float32, CPU, owner="b", lane=GATHER)
    assert same.tensor is new.tensor


def test_an_arena_that_was_planned_too_small_grows(static: Memory) -> None:
    slot = static.arena.take(Place(256, 256), 64, torch.float32, CPU, owner="a", lane=GATHER)
    assert slot.block is None and static.arena.size == 512
