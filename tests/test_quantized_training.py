"""Training with MXFP8 compute weights is bitwise as the same model in one process.

That one quantises its full fp32 weights as sharded ranks do theirs: see `tests.quantized`.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from compile_fsdp.runtime.collectives import recorded
from tests.distributed import distributed
from tests.quantized import (
    RECOMPUTES_IN_GRAPHS,
    VOCABULARY,
    WIDTH,
    Model,
    Pair,
    adamw,
    assert_nothing_left,
    batches,
    gathered,
    reference_of,
    shard,
)
from tests.training import TOLERANCE, drive, full

CASES = [
    ("zero1", (2,), "eager", False),
    ("zero1", (2,), "aot_eager", False),
    ("zero2", (2,), "eager", False),
    ("zero2", (2,), "aot_eager", False),
    ("zero3", (2,), "eager", False),
    ("zero3", (2,), "eager", True),
    ("zero3", (2,), "aot_eager", False),
    ("zero3", (2,), "aot_eager", True),
    ("hsdp", (1, 2), "eager", True),
    ("ddp", (2,), "eager", False),
]
ON_TWO_AXES = [("hsdp", "eager"), ("hsdp", "aot_eager"), ("hfsdp", "eager"), ("hfsdp", "aot_eager")]


@pytest.mark.compat
@pytest.mark.parametrize(("mode", "shape", "driver", "recompute"), CASES)
@distributed(2)
def test_three_steps(mode: str, shape: tuple[int, ...], driver: str, recompute: bool) -> None:
    check(mode, shape, driver, recompute)


@pytest.mark.parametrize(("mode", "driver"), ON_TWO_AXES)
@distributed(4)
def test_three_steps_on_two_axes(mode: str, driver: str) -> None:
    check(mode, (2, 2), driver, recompute=False)


def check(mode: str, shape: tuple[int, ...], driver: str, recompute: bool) -> None:
    model = Model(recompute)
    reference = reference_of(model)
    call = drive(shard(model, mode=mode, shape=shape), driver)
    pair = Pair(model, call, reference)
    counters.clear()
    for tokens in batches(3):
        with recorded() as forward:
            loss = call(tokens)
        with recorded() as backward:
            loss.backward()
        expected = reference(tokens)
        expected.backward()
        assert torch.equal(loss, expected)
        if mode == "zero3":
            recomputed = recompute and (driver == "eager" or RECOMPUTES_IN_GRAPHS)
            check_phases(gathered(forward, "rowwise"), forward, backward, recomputed)
        pair.step()
    pair.assert_parameters_equal()
    assert counters["stats"]["unique_graphs"] == (driver != "eager")
    assert_nothing_left(model)


def check_phases(once: int, forward: list, backward: list, recompute: bool) -> None:  # type: ignore[type-arg]
    """Forward gathers rowwise planes, backward columnwise ones; and what it recomputes rowwise."""
    assert once > 0
    assert gathered(forward, "columnwise") == 0
    assert gathered(backward, "columnwise") == once
    head = VOCABULARY * WIDTH * 33 // 32  # is not recomputed
    assert gathered(backward, "rowwise") == (once - head if recompute else 0)


@pytest.mark.slow
@distributed(2)
def test_inductor_agrees_within_rounding() -> None:
    """Inductor fuses, and so rounds sums elsewhere. A weight that differs by that may be rounded to
    the other of two neighbouring E4M3 numbers, which are 6 % apart: so one step is compared, whose
    quantised weights are the same, and of later ones only the loss."""
    model = Model()
    reference = reference_of(model)
    call = drive(shard(model), "inductor")
    ours, theirs = adamw(model), torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step, tokens in enumerate(batches(3)):
        loss, expected = call(tokens), reference(tokens)
        tolerance = TOLERANCE if step == 0 else {"rtol": 1e-2, "atol": 0}
        torch.testing.assert_close(loss, expected, **tolerance)
        loss.backward()
        expected.backward()
        if step == 0:
            check_close(model, reference)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()


def check_close(model: nn.Module, reference: nn.Module) -> None:
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    for (name, parameter), other in pairs:
        torch.testing.assert_close(
            full(parameter.grad), other.grad, **TOLERANCE, msg=lambda text, name=name: name + text
        )
