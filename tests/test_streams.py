"""Lanes: what runs when. Works are fakes that write down that they were waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline

from compile_fsdp.runtime.recording import Recorder
from compile_fsdp.runtime.streams import Lane, lanes_made_by, make_lane

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Log:
    """What happened, in order."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def call(self, name: str) -> Callable[[], None]:
        return lambda: self.entries.append(name)

    def work(self, name: str) -> Callable[[], FakeWork]:
        def start() -> FakeWork:
            self.entries.append(f"{name} issued")
            return FakeWork(self, name)

        return start

    def take(self) -> str:
        taken, self.entries = ", ".join(self.entries), []
        return taken


class FakeWork:
    def __init__(self, log: Log, name: str) -> None:
        self._log, self._name = log, name

    def wait(self) -> None:
        self._log.entries.append(f"{self._name} done")


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def lane() -> Lane:
    return make_lane(CPU, "test")


def test_works_overlap_until_somebody_waits(lane: Lane, log: Log) -> None:
    lane.collective(log.work("a"))
    lane.collective(log.work("b"))
    assert log.take() == "a issued, b issued"
    lane.synchronize()
    assert log.take() == "a done, b done"
    lane.synchronize()
    assert log.take() == ""


def test_an_event_is_waited_for_and_nothing_after_it(lane: Lane, log: Log) -> None:
    lane.collective(log.work("a"))
    first = lane.record_event()
    lane.collective(log.work("b"))
    second = lane.record_event()
    first.wait()
    assert log.take() == "a issued, b issued, a done"
    first.wait()
    assert log.take() == ""
    second.wait()
    assert log.take() == "b done"


def test_an_event_knows_when_it_was_waited_for(lane: Lane, log: Log) -> None:
    lane.collective(log.work("a"))
    event = lane.record_event()
    lane.collective(log.work("b"))
    assert not event.has_passed
    event.wait()
    assert event.has_passed
    assert not lane.record_event().has_passed
    assert log.take() == "a issued, b issued, a done"


def test_settling_completes_calls_and_leaves_works_in_flight(lane: Lane, log: Log) -> None:
    """What the next collective would wait for anyway, and no more."""
    lane.collective(log.work("a"))
    lane.settle()
    assert log.take() == "a issued"
    lane.then(log.call("accumulate a"))
    lane.collective(log.work("b"), depends=True)
    lane.then(log.call("accumulate b"))
    event = lane.record_event()
    assert log.take() == "a done, accumulate a, b issued"
    lane.settle()
    assert log.take() == "b done, accumulate b"
    assert event.has_passed


def test_a_dependent_collective_waits_for_all_earlier_ones(lane: Lane, log: Log) -> None:
    lane.collective(log.work("a"))
    lane.collective(log.work("b"), depends=True)
    assert log.take() == "a issued, a done, b issued"


def test_a_call_follows_what_is_before_it(lane: Lane, log: Log) -> None:
    lane.then(log.call("at once"))
    assert log.take() == "at once"
    lane.collective(log.work("reduce"))
    lane.then(log.call("accumulate"))
    assert log.take() == "reduce issued"
    lane.synchronize()
    assert log.take() == "reduce done, accumulate"


def test_no_collective_passes_a_pending_call(lane: Lane, log: Log) -> None:
    for name in ("a", "b"):
        lane.collective(log.work(name))
        lane.then(log.call(f"accumulate {name}"))
    # One reduction is outstanding at most: the second was issued after the first had been used.
    assert log.take() == "a issued, a done, accumulate a, b issued"
    lane.synchronize()
    assert log.take() == "b done, accumulate b"


def test_a_collective_without_a_work_leaves_nothing_to_wait_for(lane: Lane, log: Log) -> None:
    lane.collective(lambda: None)
    lane.then(log.call("at once"))
    assert log.take() == "at once"


def test_a_lane_waits_for_another_lanes_event(log: Log) -> None:
    inner, outer = make_lane(CPU, "inner"), make_lane(CPU, "outer")
    inner.collective(log.work("inner"))
    inner.then(log.call("accumulate"))
    event = inner.record_event()
    inner.collective(log.work("later"))
    assert log.take() == "inner issued, inner done, accumulate, later issued"
    outer.wait_event(event)
    outer.collective(log.work("outer"))
    assert log.take() == "outer issued"
    outer.synchronize()
    assert log.take() == "outer done"
    inner.synchronize()
    assert log.take() == "later done"


def test_waiting_for_another_lane_is_put_off(log: Log) -> None:
    inner, outer = make_lane(CPU, "inner"), make_lane(CPU, "outer")
    inner.collective(log.work("inner"))
    outer.collective(log.work("before"))
    outer.wait_event(inner.record_event())
    assert log.take() == "inner issued, before issued"
    outer.collective(log.work("after"))
    assert log.take() == "before done, inner done, after issued"


def test_a_lanes_own_event_costs_it_nothing(lane: Lane, log: Log) -> None:
    lane.collective(log.work("a"))
    lane.wait_event(lane.record_event())
    lane.collective(log.work("b"))
    assert log.take() == "a issued, b issued"


def test_a_failing_entry_fails_once(lane: Lane, log: Log) -> None:
    def fail() -> None:
        raise RuntimeError("the entry's own error")

    lane.collective(log.work("a"))
    lane.then(fail)
    event = lane.record_event()
    lane.then(log.call("behind"))
    with pytest.raises(RuntimeError, match="own error"):
        event.wait()
    event.wait()
    lane.synchronize()
    assert log.take() == "a issued, a done, behind"
    lane.collective(log.work("b"))
    assert log.take() == "b issued", "the failed call does not count as pending"


def test_a_collective_that_cannot_start_leaves_the_lane_as_it_was(lane: Lane, log: Log) -> None:
    def refuse() -> None:
        raise ValueError("no")

    lane.collective(log.work("a"))
    with pytest.raises(ValueError, match="no"):
        lane.collective(refuse)
    lane.synchronize()
    assert log.take() == "a issued, a done"


def test_two_threads_wait_for_the_same_entry(lane: Lane) -> None:
    entered, release = threading.Event(), threading.Event()
    finished: list[str] = []

    class SlowWork:
        def wait(self) -> None:
            entered.set()
            assert release.wait(30)
            finished.append("work")

    lane.collective(SlowWork)
    event = lane.record_event()

    def waiter() -> None:
        event.wait()
        finished.append("waiter")

    threads = [threading.Thread(target=waiter) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert entered.wait(30)
    assert finished == []
    release.set()
    for thread in threads:
        thread.join(30)
    assert finished == ["work", "waiter", "waiter"]


def test_recording_lanes_say_what_they_are_asked_for(log: Log) -> None:
    recorder = Recorder()
    with lanes_made_by(recorder.make_lane):
        gather, reduce, other = (make_lane(CPU, name) for name in ("gather", "reduce", "gather"))
    gather.wait_current()
    gather.collective(log.work("a"))
    event = gather.record_event()
    event.wait()
    reduce.wait_event(event)
    reduce.collective(log.work("b"), depends=True, label="reduce_scatter b")
    reduce.then(log.call("accumulate"))
    reduce.then(other.synchronize)
    assert_expected_inline(
        "\n".join(map(str, recorder.log)),
        """\
compute: event 1
gather: waits for event 1
gather: collective
gather: event 2
compute: waits for event 2
reduce: waits for event 2
reduce: reduce_scatter b
gather 2: event 3
reduce: waits for event 3""",
    )
    assert log.take() == "a issued, a done, b issued, b done, accumulate"


def test_no_lane_for_other_devices() -> None:
    assert repr(make_lane(torch.device("meta"), "planning")) == "_CpuLane('planning')"
    with pytest.raises(ValueError, match="lane 'x': expected a cpu or cuda device, found mps"):
        make_lane(torch.device("mps"), "x")


@needs_cuda
def test_cuda_lane_orders_without_the_host() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    lane = make_lane(device, "gather")
    source = torch.zeros(1 << 20, device=device)
    torch.cuda._sleep(50_000_000)
    source.fill_(3.0)
    with lane.allocating():
        target = torch.empty_like(source)
    lane.wait_current()

    def copy() -> None:
        target.copy_(source)

    lane.then(copy)
    lane.synchronize()
    assert not torch.cuda.current_stream().query(), "the host did not wait"
    assert bool((target == 3.0).all())
