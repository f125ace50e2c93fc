"""Freezing and unfreezing after ``fully_shard``: as in one process, in every driver (case 6)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from compile_fsdp import MixedPrecisionPolicy, Placements, fully_shard, fully_shard_optimizer
from compile_fsdp.runtime import collectives
from tests.distributed import distributed
from tests.models import LanguageModel, language_batches
from tests.training import (
    assert_gradients_close,
    cpu_mesh,
    drive,
    full,
    local_batch,
    shard_blocks,
)

EAGER_AND_COMPILED = ["eager", "aot_eager"]


def frozen_model() -> LanguageModel:
    """Block 0 and the embedding are frozen."""
    model = LanguageModel()
    model.blocks[0].requires_grad_(False)
    model.embedding.requires_grad_(False)
    return model


# What is (un)frozen before each step.
SCHEDULE: tuple[Callable[[Any], None], ...] = (
    lambda model: None,
    lambda model: model.blocks[0].requires_grad_(True),
    lambda model: model.blocks[1].requires_grad_(False),
    lambda model: model.blocks[1].up._parameters["bias"].requires_grad_(True),
    lambda model: model.requires_grad_(True),
    lambda model: model.embedding.requires_grad_(False),
)


def train_in_stages(
    model: Any, call: Any, is_sharded: bool, prepared: bool = False, stages: int = len(SCHEDULE)
) -> list[Any]:
    """Each stage (un)freezes, hands new parameters to the optimizer and takes a step.

    Returns for each step the full gradients by name.
    """
    known = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(known, lr=1e-2, eps=1e-3, weight_decay=0.1)
    if prepared:
        fully_shard_optimizer(optimizer)
    gradients = []
    for change, batch in zip(SCHEDULE[:stages], language_batches(stages, 2), strict=True):
        change(model)
        new = [each for each in model.parameters() if each.requires_grad]
        new = [each for each in new if not any(each is other for other in known)]
        if new:
            optimizer.add_param_group({"params": new})
            known += new
        call(*(local_batch(batch) if is_sharded else batch)).backward()
        gradients.append(
            {
                name: None if each.grad is None else full(each.grad).float()
                for name, each in model.named_parameters()
            }
        )
        optimizer.step()
        optimizer.zero_grad()
    return gradients


def assert_stages_agree(found: list[Any], expected: list[Any], **tolerance: float) -> None:
    for step, (left, right) in enumerate(zip(found, expected, strict=True)):
        for name, wanted in right.items():
            what = f"gradient of {name} in step {step}"
            if wanted is None or left[name] is None:
                assert wanted is left[name], what
            else:
                torch.testing.assert_close(
                    left[name], wanted, **tolerance, msg=lambda text, what=what: f"{what}: {text}"
                )


@pytest.mark.parametrize("driver", EAGER_AND_COMPILED)
@distributed(2)
def test_a_training_in_stages(driver: str) -> None:
    """Groups and single parameters, frozen and unfrozen between steps; AdamW gets them late."""
    model = frozen_model()
    sharded = shard_blocks(copy.deepcopy(model))
    found = train_in_stages(sharded, drive(sharded, driver), is_sharded=True)
    expected = train_in_stages(model, model, is_sharded=False)
    assert_stages_agree(found, expected, rtol=1e-4, atol=2e-6)
    for left, right in zip(sharded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(left), right.detach(), rtol=1e-4, atol=2e-6)


@distributed(2)
def test_eager_and_compiled_stages_are_bitwise_equal() -> None:
    model = frozen_model()
    results = []
    for driver in EAGER_AND_COMPILED:
        sharded = shard_blocks(copy.deepcopy(model))
        results.append(train_in_stages(sharded, drive(sharded, driver), is_sharded=True))
    assert_stages_agree(*results, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("mode", "driver"), [("zero1", "eager"), ("zero1", "aot_eager"), ("hfsdp", "eager")]
)
@distributed(2)
def test_an_unfrozen_group_gets_the_main_weight_of_its_mode(mode: str, driver: str) -> None:
    """bf16 compute: the main weight of a frozen group is the bf16 model weight at the parameter's
    placements; unfrozen it is fp32 at the optimizer's, and the Parameter is the same object."""
    shape = (1, 2) if mode == "hfsdp" else (2,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
    placements = getattr(Placements, mode)(mesh)
    model = frozen_model().to(torch.bfloat16)
    sharded = shard_blocks(copy.deepcopy(model), mesh, placements=placements)
    weight = sharded.blocks[0].up._parameters["weight"]
    assert weight.dtype is torch.bfloat16
    # The reference is sharded with everything trainable, and freezes what the other one had frozen.
    reference = copy.deepcopy(model).requires_grad_(True)
    shard_blocks(reference, mesh, placements=placements)
    reference.blocks[0].requires_grad_(False)
    reference.embedding.requires_grad_(False)
    options = {"is_sharded": True, "prepared": True, "stages": 3}
    found = train_in_stages(sharded, drive(sharded, driver), **options)
    expected = train_in_stages(reference, reference, **options)
    assert_stages_agree(found, expected, rtol=0, atol=0)
    assert weight is sharded.blocks[0].up._parameters["weight"]
    assert weight.dtype is torch.float32 and weight.requires_grad
    (group,) = sharded.blocks[0].fsdp_parameter_groups
    assert group.main_weight.dtype is torch.float32
    assert (
        group.main_weight.placements
        == reference.blocks[0].fsdp_parameter_groups[0].main_weight.placements
    )


@pytest.mark.parametrize("driver", EAGER_AND_COMPILED)
@distributed(2)
def test_gradient_buffers_and_reductions_follow_the_flag(driver: str) -> None:
    sharded = shard_blocks(LanguageModel())
    (group,) = sharded.blocks[0].fsdp_parameter_groups
    call = drive(sharded, driver)
    (batch,) = language_batches(1, 2)

    def reductions() -> int:
        with collectives.recorded() as records:
            call(*local_batch(batch)).backward()
        sharded.zero_grad()
        return [r.kind for r in records if r.label == "blocks.0"].count("reduce_scatter")

    for trainable, expected in ((True, 1), (False, 0), (True, 1), (True, 1), (False, 0)):
        sharded.blocks[0].requires_grad_(trainable)
        assert reductions() == expected
        assert (group.main_grad is not None) == trainable
        assert (group.pre_optimizer_main_grad is not None) == trainable
        assert group.flat_leaf.requires_grad == trainable


@pytest.mark.parametrize("inside_a_function", [False, True])
@distributed(2)
def test_a_flag_that_changes_compiles_anew_once(inside_a_function: bool) -> None:
    """Where the compiled function is not the module itself, no hook runs before Dynamo looks at its
    guards: the call itself runs with the new flag, the next one is compiled for it."""
    from torch._dynamo.utils import counters

    sharded = shard_blocks(frozen_model())

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 2 * sharded(tokens, targets)

    call = drive(step if inside_a_function else sharded, "aot_eager")
    (batch,) = language_batches(1, 2)
    counts = []
    for number in range(6):
        if number == 2:
            sharded.blocks[0].requires_grad_(True)
        before = counters["stats"]["unique_graphs"]
        call(*local_batch(batch)).backward()
        counts.append(counters["stats"]["unique_graphs"] - before)
        bias = sharded.blocks[0].up._parameters["bias"]
        assert (bias.grad is not None) == (number >= 2)
        sharded.zero_grad()
    assert counts == ([1, 0, 0, 1, 0, 0] if inside_a_function else [1, 0, 1, 0, 0, 0]), counts


@pytest.mark.parametrize("driver", EAGER_AND_COMPILED)
@distributed(2)
def test_freezing_between_forward_and_backward_drops_that_gradient(driver: str) -> None:
    """As torch does: a leaf that needs no gradient any more gets none."""
    model = LanguageModel()
    sharded = shard_blocks(copy.deepcopy(model))
    (batch,) = language_batches(1, 2)
    losses = drive(sharded, driver)(*local_batch(batch)), model(*batch)
    for each, loss in zip((sharded, model), losses, strict=True):
        each.head._parameters["weight"].requires_grad_(False)
        loss.backward()
    assert_gradients_close(sharded, model)
    assert sharded.head._parameters["weight"].grad is None


@distributed(2)
def test_another_backend_says_that_the_flag_came_too_late_and_then_follows() -> None:
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False))
    fully_shard(model, cpu_mesh())
    # A function, so that no hook runs before Dynamo looks at its guards.
    call = torch.compile(lambda x: model(x), backend="aot_eager")
    x = torch.randn(2, 4, requires_grad=True)
    call(x).sum().backward()
    model.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"'0\.\w+' was made trainable after its model was comp"):
        call(x)
    call(x).sum().backward()
    assert all(each.grad is not None for each in model.parameters())


@distributed(2)
def test_a_weak_reference_to_a_parameter_that_must_change_its_dtype_is_an_error_by_name() -> None:
    import weakref

    model = nn.Linear(4, 4).to(torch.bfloat16).requires_grad_(False)
    fully_shard(model, cpu_mesh(), mixed_precision_policy=MixedPrecisionPolicy())
    held = weakref.ref(model._parameters["weight"])
    model.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"'weight' was frozen when fully_shard was called"):
        model(torch.randn(2, 4).to(torch.bfloat16))
    assert held() is not None
