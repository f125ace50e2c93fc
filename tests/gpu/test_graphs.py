"""CUDA graphs: captured steps repeat what calls compute, on new inputs, and do get repeated.

On a CPU a stand-in captures, which remembers operators and runs them again on the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from compile_fsdp import fully_shard_optimizer, graph_runs, microbatch
from tests.gpu.loopback import world_of
from tests.gpu.support import (
    ON_CUDA,
    ROUNDING,
    SLOW,
    backend,
    floats,
    shard,
    stack,
)
from tests.training import adamw

# Of each kind of call two warm up and the third is captured.
STEPS = 7
RANKS = 16

Values = list[torch.Tensor]


def run_steps(
    ranks: int,
    compiled: Callable[[nn.Module], Any],
    *,
    microbatches: int = 1,
    to_none: bool = True,
    synchronous: bool = False,
    cycles: int = 0,
    captured: bool = False,
) -> Values:
    """Losses of `STEPS` steps on ever new batches, then this rank's weights."""
    with world_of(ranks) as pace, capturing() if captured else nullcontext():
        model = shard(stack())
        call = compiled(model)
        optimizer = adamw(model)
        fully_shard_optimizer(optimizer)
        pace.synchronous, pace.cycles = synchronous, cycles
        batches = iter(floats(STEPS * microbatches))
        found = []
        for _ in range(STEPS):
            for number in range(microbatches):
                with microbatch(model, is_last=number == microbatches - 1):
                    loss = call(*next(batches))
                    loss.backward()
                found.append(loss.detach().clone())
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        if captured:
            assert_replayed(model)
        return found + [each.to_local().detach().clone() for each in model.parameters()]


def capturing() -> AbstractContextManager[object]:
    """A context in which compiled graphs can be captured on `DEVICE`."""
    if ON_CUDA:
        return nullcontext()
    from tests.capturing import captured_on_cpu

    return captured_on_cpu()


def assert_replayed(model: nn.Module) -> None:
    """The forward and the backward graph were captured, and most calls repeated that."""
    runs = graph_runs(model)
    kinds = {run.graph.split()[-1] for run in runs}
    assert {"forward", "backward"} <= kinds, "; ".join(map(str, runs))
    for run in runs:
        assert run.captures >= 1 and run.replays >= 2, str(run)


def compiling(**options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: torch.compile(model, backend=backend, options=options)


@pytest.mark.parametrize("to_none", [True, False], ids=["none", "zeros"])
@pytest.mark.parametrize("ranks", [1, RANKS])
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_replays_compute_what_calls_do(inner: str, ranks: int, to_none: bool) -> None:
    expected = run_steps(ranks, compiling(inner=inner), to_none=to_none)
    found = run_steps(
        ranks, compiling(inner=inner, cudagraphs=True), to_none=to_none, captured=True
    )
    torch.testing.assert_close(found, expected, **ROUNDING)


@pytest.mark.parametrize("ranks", [1, RANKS])
def test_microbatches_are_captured_by_their_kind(ranks: int) -> None:
    """The first, the middle and the last of a step do different things to gradients."""
    options = {"inner": "aot_eager"}
    expected = run_steps(ranks, compiling(**options), microbatches=3)
    found = run_steps(ranks, compiling(**options, cudagraphs=True), microbatches=3, captured=True)
    torch.testing.assert_close(found, expected, **ROUNDING)


def test_a_captured_step_does_not_race() -> None:
    """Each collective idles inside of the capture as well; every branch is joined."""
    options = {"inner": "aot_eager"}
    expected = run_steps(RANKS, compiling(**options), synchronous=True)
    found = run_steps(RANKS, compiling(**options, cudagraphs=True), cycles=SLOW, captured=True)
    torch.testing.assert_close(found, expected, **ROUNDING)


def test_the_mode_is_the_option_with_inductor() -> None:
    expected = run_steps(1, compiling())

    def compiled(model: nn.Module) -> Any:
        return torch.compile(model, backend=backend, mode="reduce-overhead")

    found = run_steps(1, compiled, captured=True)
    torch.testing.assert_close(found, expected, **ROUNDING)


@pytest.mark.cuda_only
@pytest.mark.parametrize("ranks", [1, RANKS])
def test_the_host_never_waits_in_a_replayed_step(ranks: int) -> None:
    with world_of(ranks):
        model = shard(stack())
        call = torch.compile(
            model, backend=backend, options={"inner": "aot_eager", "cudagraphs": True}
        )
        optimizer = adamw(model)
        fully_shard_optimizer(optimizer)
        batches = floats(STEPS)

        def step(number: int) -> None:
            call(*batches[number]).backward()
            optimizer.step()
            optimizer.zero_grad()

        for number in range(STEPS - 1):
            step(number)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(STEPS - 1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_replayed(model)
