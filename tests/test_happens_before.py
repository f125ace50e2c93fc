"""The checker on logs written by hand: what races, what does not, and how it says so."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from compile_fsdp.runtime.happens_before import (
    Access,
    Allocate,
    Entry,
    Free,
    Record,
    Signal,
    Span,
    Wait,
    races,
)
from compile_fsdp.runtime.recorded_memory import Operators
from compile_fsdp.runtime.recording import Recorder

FULL = Span(1000, 1064)
GATHER = (Entry("gather", "then", "runtime/weights.py:1 gather"),)
GATHERED = Access(GATHER, "all_gather blocks.0", "collectives.py:1", (), (FULL,))
READ = Access((), "aten.mm", "model.py:7", (Span(1032, 1040),), ())
GONE = Free(1, "w.py:9")
MADE = Allocate(GATHER, 1, FULL, "weights.py:5")


def kinds(*log: Record) -> list[str]:
    return [race.kind for race in races(log)]


def signal(event: int, entries: tuple[Entry, ...] = GATHER) -> Signal:
    return Signal(entries, event, "here")


def wait(event: int, entries: tuple[Entry, ...] = ()) -> Wait:
    return Wait(entries, event, "here")


def test_a_gather_that_was_waited_for_may_be_read_and_freed_after_another_wait() -> None:
    right = [MADE, GATHERED, signal(1), wait(1), READ, signal(2, ()), wait(2, GATHER), GONE]
    assert kinds(*right) == []
    assert kinds(*(each for each in right if each != wait(1))) == ["gather"]
    assert kinds(*(each for each in right if each != wait(2, GATHER))) == ["freed early"]
    assert kinds(*right, READ) == ["used after free"]
    assert kinds(*right, MADE, GATHERED) == []


def test_an_event_stands_for_what_came_before_it() -> None:
    assert kinds(signal(1), GATHERED, wait(1), READ) == ["gather"]
    assert kinds(GATHERED, wait(1), signal(1), READ) == ["gather"]


def test_order_is_passed_on_from_stream_to_stream() -> None:
    third = (Entry("reduce", "then", "x"),)
    log = [GATHERED, signal(1), wait(1, third), signal(2, third), wait(2), READ]
    assert kinds(*log) == []


def test_reads_race_with_nothing_but_writes_and_other_bytes_with_nothing() -> None:
    reading = Access(GATHER, "send", "x", (FULL,), ())
    writing = Access((), "aten.add_", "x", (), (Span(1060, 1070),))
    beside = Access((), "aten.add_", "x", (), (Span(1064, 1070),))
    assert kinds(reading, READ) == []
    assert kinds(reading, writing) == ["unordered"]
    assert kinds(reading, beside) == []
    assert races([reading, writing])[0].bytes == 4


def test_new_memory_is_used_elsewhere_after_its_stream_only() -> None:
    assert kinds(MADE, READ) == ["unordered"]
    found = Allocate(GATHER, 1, FULL, "weights.py:5", new=False)
    assert kinds(found, READ) == []


def test_both_sides_are_named() -> None:
    assert_expected_inline(
        "\n".join(map(str, races([MADE, GATHERED, READ, READ, GONE]))),
        """\
16 bytes are used before their gather is known to be over:
    all_gather blocks.0 on stream gather writes it (collectives.py:1)
    then aten.mm on stream compute reads it (model.py:7); no wait orders the two
8 bytes are freed while they may still be in use:
    aten.mm on stream compute reads it (model.py:7)
    then a block of stream gather is freed (w.py:9); that stream has not waited for the use""",
    )


def test_operators_lists_and_results_are_seen() -> None:
    recorder = Recorder()
    lane = recorder.make_lane("lane")
    tensors = [torch.ones(4), torch.ones(4)]
    target = torch.empty(2, 4)
    with Operators(recorder):
        lane.then(lambda: torch._foreach_add_(tensors, 1.0))
        torch.stack(tensors, out=target)
        target.view(-1)[:2].t()
    with pytest.raises(RuntimeError, match=r"1 race: 32 bytes .*\n.*_foreach_add_") as failure:
        recorder.check()
    assert "stream compute reads it (tests/test_happens_before.py" in str(failure.value)
    assert len([each for each in recorder.log if isinstance(each, Access)]) == 2, "views are none"


@pytest.mark.parametrize("waits", [True, False])
def test_memory_that_dies_is_freed_on_its_stream(waits: bool) -> None:
    recorder = Recorder()
    lane = recorder.make_lane("lane")
    with Operators(recorder):
        held = [torch.zeros(4)]
        lane.wait_current()
        lane.then(lambda: held[0].zero_())  # type: ignore[arg-type, return-value]
        if waits:
            lane.synchronize()
        held.clear()
    assert [race.kind for race in recorder.races()] == ([] if waits else ["freed early"])
