"""Streams on a real device: what waits, what overlaps, and that nothing races or stops the host.

Collectives come from `tests.gpu.loopback`: a world of `RANKS` in this process, whose traffic is
real copies on a stream of their own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compile_fsdp import Placements, fully_shard_optimizer, microbatch
from compile_fsdp.runtime.streams import make_lane
from tests.gpu.loopback import Pace, loopback_world, world_of
from tests.gpu.support import (
    DEVICE,
    ON_CUDA,
    ROUNDING,
    SLOW,
    drive,
    floats,
    mesh_of,
    shard,
    stack,
)
from tests.gpu.traces import Event, beside_compute, trace_of
from tests.training import adamw

# Beyond 8 ranks the runtime makes one all-gather where there is gloo, too.
RANKS = 16

Step = Callable[[], object]


def two_steps(model: nn.Module, call: Callable[..., Any]) -> list[torch.Tensor]:
    """Losses of two steps of two microbatches, an evaluation between, then this rank's weights."""
    optimizer = adamw(model)
    fully_shard_optimizer(optimizer)
    found = []
    batches = floats(4)
    for step in range(2):
        for number, batch in enumerate(batches[2 * step : 2 * step + 2]):
            with microbatch(model, is_last=number == 1):
                loss = call(*batch)
                loss.backward()
            found.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(call(*batches[0]).clone())
    return found + [each.to_local().detach().clone() for each in model.parameters()]


def losses_and_weights(
    mode: str, driver: str, cycles: int = 0, pace: int | None = None, **options: Any
) -> list[torch.Tensor]:
    """`two_steps` of a new model in a world of its own.

    Args:
        mode: a row of `Placements`.
        cycles: for which compute idles before each block; no such node where it is 0.
        pace: cycles for which each collective idles; None: the host waits for each.
    """
    shape = (2, RANKS) if mode.startswith("h") else (RANKS,)
    with loopback_world(math.prod(shape)) as rules:
        mesh = mesh_of(*shape)
        model = shard(
            stack(blocks=2, cycles=cycles), mesh, placements=getattr(Placements, mode)(mesh)
        )
        call = drive(model, driver, **options)
        rules.synchronous, rules.cycles = pace is None, pace or 0
        found = two_steps(model, call)
        assert sum(rules.started.values()) >= 8
        if ON_CUDA:
            torch.cuda.synchronize()
    return found


expected_values = functools.cache(losses_and_weights)


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"value {number} of {len(found)} differs"


@pytest.mark.parametrize("slow", ["collectives", "compute"])
@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@pytest.mark.parametrize("mode", ["zero1", "zero2", "zero3", "hsdp", "hfsdp"])
def test_nothing_races(mode: str, driver: str, slow: str) -> None:
    """Bit for bit what comes out when the host waits for every collective, however late
    collectives are for compute, or compute for collectives."""
    if not ON_CUDA and slow == "compute":
        pytest.skip("nothing idles on a CPU")
    cycles, pace = (SLOW, 0) if slow == "compute" else (1, SLOW)
    found = losses_and_weights(mode, driver, cycles, pace)
    assert_equal(found, expected_values(mode, driver, 1))


@pytest.mark.parametrize(
    "options",
    [
        {"prefetch": 0},
        {"prefetch": 2, "reshard_after_forward": True},
        {"memory_budget": "unlimited"},
        {"merge_below": "1MiB"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_no_schedule_races(options: dict[str, Any]) -> None:
    found = losses_and_weights("zero3", "aot_eager", 1, SLOW, **options)
    assert_equal(found, expected_values("zero3", "aot_eager", 1))


def test_inductor_races_no_more() -> None:
    """Within rounding: each compilation tunes its kernels, and sums in blocks of its own."""
    found = losses_and_weights("zero3", "inductor", pace=SLOW)
    torch.testing.assert_close(found, losses_and_weights("zero3", "inductor"), **ROUNDING)


@pytest.mark.cuda_only
def test_compute_overlaps_a_lane_until_it_waits() -> None:
    lane = make_lane(DEVICE, "gather")
    buffer = torch.zeros(1 << 20, device=DEVICE)
    lane.wait_current()
    ended, computed = torch.cuda.Event(), torch.cuda.Event()

    def gather() -> None:
        torch.cuda._sleep(100 * SLOW)
        buffer.fill_(1.0)
        ended.record()

    lane.then(gather)
    event = lane.record_event()
    torch.ones(64, 64, device=DEVICE).sum()
    computed.record()
    computed.synchronize()
    assert not ended.query(), "compute stood still until the lane was through"
    event.wait()
    seen = buffer.sum()
    assert seen.item() == buffer.numel(), "compute read before the lane had written"


@contextmanager
def trained(driver: str, ranks: int, cycles: int = 0) -> Iterator[tuple[Step, Pace]]:
    """One training step, warmed up, in a world of ``ranks``."""
    with world_of(ranks) as pace:
        model = shard(stack(width=256, blocks=4, cycles=cycles))
        optimizer = adamw(model)
        fully_shard_optimizer(optimizer)
        call = drive(model, driver, **({} if driver == "eager" else {"prefetch": 1}))
        (batch,) = floats(1, width=256)

        def step() -> None:
            call(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            step()
        if ON_CUDA:
            torch.cuda.synchronize()
        yield step, pace


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
def test_a_trace_names_what_is_gathered_and_reduced(driver: str, tmp_path: Path) -> None:
    with trained(driver, RANKS) as (step, _):
        names = [str(event.get("name")) for event in trace_of(step, tmp_path / "trace.json")]
    for verb in ("unshard", "wait", "reshard"):
        for block in range(4):
            start = f"compile_fsdp.{verb} blocks.{block} ("
            assert any(name.startswith(start) for name in names), f"no range {start}...)"


@pytest.mark.cuda_only
@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
def test_gathers_overlap_compute_in_a_trace(driver: str, tmp_path: Path) -> None:
    """Both idle for the same time, so a gather that compute has to wait for overlaps nothing."""
    with trained(driver, RANKS, cycles=SLOW // 4) as (step, pace):
        pace.cycles = SLOW // 4
        events = trace_of(step, tmp_path / "trace.json")
    found, beside = beside_compute(events, "spin")
    assert found >= 8, f"{found} collectives"
    # The first gather of forward and of backward, and the last reduction, have nothing beside them.
    assert beside >= found - 4, f"{beside} of {found} overlap compute"


def test_what_runs_beside_compute() -> None:
    """`beside_compute`, on a trace of which everything is known."""

    def event(name: str, stream: int, start: float, end: float) -> Event:
        times = {"ts": start, "dur": end - start}
        return {"cat": "kernel", "name": name, "args": {"stream": stream}, **times}

    events: list[Event] = [
        {"cat": "cpu_op", "name": "spin", "ts": 0, "dur": 9},
        event("GeluCUDAKernel", 7, 10, 20),
        event("spin_kernel", 7, 20, 30),
        event("spin_kernel", 13, 0, 10),
        event("spin_kernel", 13, 15, 16),
        event("spin_kernel", 13, 29, 40),
        event("copy", 13, 12, 13),
    ]
    assert beside_compute(events, "spin") == (3, 2)


@pytest.mark.cuda_only
@pytest.mark.parametrize("ranks", [1, RANKS])
@pytest.mark.parametrize("driver", ["eager", "aot_eager", "inductor"])
def test_the_host_never_waits_inside_a_step(driver: str, ranks: int) -> None:
    """Forward, backward, optimizer step and zero_grad: torch raises at whatever synchronises."""
    with trained(driver, ranks) as (step, _):
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda_only
@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
def test_the_allocator_does_not_grow_after_warm_up(driver: str) -> None:
    """Nothing waits for a stream before its memory can be used again, as ``record_stream`` would:
    ten steps need no more memory from the driver than the first ones."""
    with trained(driver, RANKS) as (step, pace):
        pace.cycles = SLOW // 4
        step()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats(DEVICE)["segment.all.allocated"]
        for _ in range(10):
            step()
        torch.cuda.synchronize()
        assert torch.cuda.memory_stats(DEVICE)["segment.all.allocated"] == before
