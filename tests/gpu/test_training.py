"""One rank trains as the unsharded model does, in every driver and every way of sharding."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from compile_fsdp import (
    MixedPrecisionPolicy,
    Placements,
    fully_shard_optimizer,
    load_checkpoint,
    microbatch,
    save_checkpoint,
)
from tests.gpu.support import (
    BF16_ROUNDING,
    DEVICE,
    ROUNDING,
    drive,
    floats,
    language_model,
    mesh_of,
    shard,
    stack,
    tokens,
)
from tests.training import (
    Batch,
    Run,
    adamw,
    assert_close,
    assert_same,
    full,
    gradients_of,
    train,
    train_reference,
)

pytestmark = pytest.mark.usefixtures("alone")

STEPS = 3


@pytest.mark.parametrize("driver", ["eager", "aot_eager", "inductor"])
def test_a_language_model(driver: str) -> None:
    batches = tokens(STEPS)
    reference = train_reference(language_model(), batches)
    model = shard(language_model())
    assert_close(train(model, batches, call=drive(model, driver)), reference, **ROUNDING)


def test_the_compiled_graph_computes_what_the_eager_driver_does() -> None:
    """Bit for bit: the same operators on the same memory."""
    batches = floats(STEPS)
    runs = []
    for driver in ("eager", "aot_eager"):
        model = shard(stack())
        runs.append(train(model, batches, call=drive(model, driver)))
    assert_same(*runs)
    assert_close(runs[0], train_reference(stack(), batches), **ROUNDING)


@pytest.mark.parametrize("driver", ["eager", "aot_eager", "inductor"])
def test_bf16_compute_with_fp32_main_weights(driver: str) -> None:
    batches = [(x.to(torch.bfloat16),) for (x,) in floats(STEPS)]
    reference = _with_main_weights(stack(), batches)
    model = shard(
        stack().to(torch.bfloat16),
        mixed_precision_policy=MixedPrecisionPolicy(main_grads_dtype=torch.float32),
    )
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    # The same fp32 start as the reference: bf16 initial values have lost bits.
    model.load_state_dict(stack().state_dict())
    call = drive(model, driver)
    run = train(model, batches, call=call, prepare=fully_shard_optimizer)
    losses = torch.stack(run.losses), torch.stack(reference.losses)
    torch.testing.assert_close(*losses, **BF16_ROUNDING)
    torch.testing.assert_close(run.parameters, reference.parameters, **BF16_ROUNDING)


def _with_main_weights(main: nn.Module, batches: Sequence[Batch]) -> Run:
    """Mixed precision by hand: fp32 weights for the optimizer, bf16 copies of them for compute."""
    compute = copy.deepcopy(main).to(torch.bfloat16)
    optimizer = adamw(main)
    run = Run()
    for batch in batches:
        loss = compute(*batch)
        loss.backward()
        run.losses.append(loss.detach().clone())
        for own, theirs in zip(main.parameters(), compute.parameters(), strict=True):
            assert theirs.grad is not None
            own.grad, theirs.grad = theirs.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for own, theirs in zip(main.parameters(), compute.parameters(), strict=True):
                theirs.copy_(own)
    run.parameters = {name: full(each) for name, each in main.named_parameters()}
    return run


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
def test_microbatches(driver: str, to_none: bool) -> None:
    """Gradients of three microbatches add up, for two steps, whatever zero_grad leaves behind."""
    batches = floats(6)
    plain, model = stack(), shard(stack())
    call = drive(model, driver)
    optimizers = [adamw(plain), adamw(model)]
    for step in range(2):
        for number, batch in enumerate(batches[3 * step : 3 * step + 3]):
            plain(*batch).backward()
            with microbatch(model, is_last=number == 2):
                call(*batch).backward()
        expected = gradients_of(plain)
        torch.testing.assert_close(gradients_of(model), expected, **ROUNDING)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
    expected_weights = {name: full(each) for name, each in plain.named_parameters()}
    weights = {name: full(each) for name, each in model.named_parameters()}
    torch.testing.assert_close(weights, expected_weights, **ROUNDING)


@pytest.mark.parametrize(
    ("mode", "shape"),
    [("zero1", (1,)), ("zero2", (1,)), ("zero3", (1,)), ("hsdp", (1, 1)), ("hfsdp", (1, 1))],
)
@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
def test_every_way_of_sharding(mode: str, shape: tuple[int, ...], driver: str) -> None:
    batches = floats(STEPS)
    mesh = mesh_of(*shape)
    model = shard(stack(), mesh, placements=getattr(Placements, mode)(mesh))
    run = train(model, batches, call=drive(model, driver), prepare=fully_shard_optimizer)
    assert_close(run, train_reference(stack(), batches), **ROUNDING)


@pytest.mark.parametrize("driver", ["eager", "aot_eager", "inductor"])
def test_activation_checkpointing(driver: str) -> None:
    batches = floats(STEPS)
    model = shard(stack(recompute=True))
    run = train(model, batches, call=drive(model, driver))
    assert_close(run, train_reference(stack(), batches), **ROUNDING)


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
def test_evaluation_between_steps(driver: str) -> None:
    """It computes with the weights of the moment, and training goes on as if it had not been."""
    batches = floats(STEPS)
    runs = []
    for evaluates in (False, True):
        model = shard(stack())
        call = drive(model, driver)
        optimizer = adamw(model)
        losses = []
        for batch in batches:
            losses.append(call(*batch))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
            if evaluates:
                plain = stack()
                plain.load_state_dict({name: full(p) for name, p in model.named_parameters()})
                with torch.no_grad():
                    torch.testing.assert_close(call(*batch), plain(*batch), **ROUNDING)
        runs.append(torch.stack(losses))
    assert torch.equal(*runs)


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
def test_a_saved_run_goes_on_where_it_was(driver: str, tmp_path: Path) -> None:
    """Model and optimizer come back bit for bit, in a model that was initialised otherwise."""
    batches = floats(4)
    runs = []
    first = shard(stack())
    optimizer = adamw(first)
    call = drive(first, driver)
    for batch in batches[:2]:
        call(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(first, optimizer, tmp_path / "saved")
    other = stack()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    second = shard(other)
    resumed = adamw(second)
    load_checkpoint(second, resumed, tmp_path / "saved")
    for model, own, run in ((first, optimizer, call), (second, resumed, drive(second, driver))):
        for batch in batches[2:]:
            run(*batch).backward()
            own.step()
            own.zero_grad()
        runs.append({name: full(each) for name, each in model.named_parameters()})
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0)
    assert next(iter(runs[0].values())).device == DEVICE
