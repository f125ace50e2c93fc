"""Groups that stay unsharded between forward and backward: the same numbers, gathers counted
exactly, and never a value that is older than an optimizer step."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from compile_fsdp import fully_shard, fully_shard_optimizer, microbatch
from compile_fsdp.runtime import collectives
from tests.distributed import distributed
from tests.models import VOCABULARY, WIDTH, Block, LanguageModel, language_batches
from tests.training import (
    adamw,
    assert_gradients_close,
    assert_same,
    cpu_mesh,
    drive,
    full,
    local_batch,
    shard_blocks,
    train,
)

EVERYTHING = {"memory_budget": "unlimited"}
NOTHING = {"reshard_after_forward": True}


def gathers(step: Callable[[], Any]) -> Counter[str]:
    """How often each group is gathered while ``step`` runs."""
    with collectives.recorded() as records:
        step()
    return Counter(record.label for record in records if record.kind == "all_gather")


def started(model: nn.Module, **options: Any) -> tuple[nn.Module, Callable[..., Any], list[Any]]:
    """A sharded copy of ``model``, compiled and run once, and its batch."""
    sharded = shard_blocks(copy.deepcopy(model))
    call = drive(sharded, "aot_eager", **options)
    batch = local_batch(language_batches(1, 2)[0])
    call(*batch).backward()
    sharded.zero_grad()
    return sharded, call, batch


def resting(model: nn.Module) -> bool:
    return not any(group.is_unsharded for group in model._fsdp_unit.context.groups())


@pytest.mark.parametrize(
    ("options", "once"),
    [
        ({}, {"root", "blocks.2"}),
        (EVERYTHING, {"root", "blocks.0", "blocks.1", "blocks.2"}),
        ({"reshard_after_forward": False}, {"root", "blocks.0", "blocks.1", "blocks.2"}),
        (NOTHING, set()),
        ({"prefetch": 0}, {"root"}),
        ({"reshard_after_forward": {"blocks.*": True}}, {"root"}),
        ({"reshard_after_forward": {"*": True, "blocks.0": False}}, {"blocks.0"}),
    ],
    ids=["default", "unlimited", "keep all", "keep none", "no prefetch", "pattern", "last wins"],
)
@distributed(2)
def test_kept_groups_are_gathered_once_a_step(options: dict[str, Any], once: set[str]) -> None:
    sharded, call, batch = started(LanguageModel(blocks=3), **options)
    found = gathers(lambda: call(*batch).backward())
    labels = ("root", "blocks.0", "blocks.1", "blocks.2")
    assert found == {label: 1 if label in once else 2 for label in labels}
    assert resting(sharded)


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@distributed(2)
def test_keeping_changes_no_bit(inner: str) -> None:
    """Over three optimizer steps: a kept buffer that outlived a step would show."""
    model = LanguageModel(blocks=3)
    batches = language_batches(3, 2)
    runs = []
    for options in (NOTHING, EVERYTHING):
        sharded = shard_blocks(copy.deepcopy(model))
        runs.append(train(sharded, batches, call=drive(sharded, inner, **options)))
        assert resting(sharded)
    assert_same(*runs)


@distributed(2)
def test_evaluation_keeps_nothing() -> None:
    sharded, call, batch = started(LanguageModel(), **EVERYTHING)
    with torch.no_grad():
        assert gathers(lambda: call(*batch)) == {"root": 1, "blocks.0": 1, "blocks.1": 1}
    assert resting(sharded)


@distributed(2)
def test_a_forward_whose_backward_never_comes() -> None:
    """What it kept is not read by the next forward, which gathers anew; a step frees it."""
    sharded, call, batch = started(LanguageModel(), **EVERYTHING)
    call(*batch)
    assert not resting(sharded)
    assert gathers(lambda: call(*batch).backward()) == {"root": 1, "blocks.0": 1, "blocks.1": 1}
    assert resting(sharded)
    optimizer = adamw(sharded)
    fully_shard_optimizer(optimizer)
    call(*batch)
    optimizer.step()
    assert resting(sharded)


@pytest.mark.parametrize(("prepared", "way"), [(True, None), (False, "foreach"), (False, "fused")])
@distributed(2)
def test_a_step_between_forward_and_backward_makes_backward_gather(
    prepared: bool, way: str | None
) -> None:
    """As without keeping: backward sees the weights of now, whoever wrote them."""
    results = []
    for options in (NOTHING, EVERYTHING):
        torch.manual_seed(0)
        sharded, call, batch = started(LanguageModel(), **options)
        ways = {way: True} if way else {}
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.5, **ways)
        if prepared:
            fully_shard_optimizer(optimizer)
        call(*batch).backward()
        loss = call(*batch)
        optimizer.step()
        optimizer.zero_grad()
        loss.backward()
        results.append([full(parameter.grad) for parameter in sharded.parameters()])
    for released, kept in zip(*results, strict=True):
        torch.testing.assert_close(released, kept, rtol=0, atol=0)


@pytest.mark.parametrize("counted", [True, False])
@distributed(2)
def test_the_next_forward_sees_a_step_that_nobody_announced(counted: bool) -> None:
    """Forward with a gradient, no backward, a step of an unprepared optimizer or a write that even
    autograd does not count, forward: what was kept is gathered anew."""
    sharded, _, batch = started(LanguageModel(), **EVERYTHING)
    # Of a function: the graph has all of the model in it, and no hook runs that lets go of things.
    call = drive(lambda *batch: sharded(*batch), "aot_eager", **EVERYTHING)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.5)
    call(*batch).backward()
    before = call(*batch)
    if counted:
        optimizer.step()
    else:
        sharded.zero_grad()  # nothing else says that there may have been a step
        for parameter in sharded.parameters():
            parameter.data.mul_(0.5)
    after = call(*batch)
    plain = LanguageModel()
    plain.load_state_dict({name: full(each) for name, each in sharded.named_parameters()})
    assert before.item() != after.item()
    torch.testing.assert_close(after, plain(*batch))


@distributed(2)
def test_microbatches_on_two_axes() -> None:
    model = LanguageModel()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
    sharded = shard_blocks(copy.deepcopy(model), mesh)
    call = drive(sharded, "aot_eager", **EVERYTHING)
    for number, batch in enumerate(language_batches(3, 2)):
        with microbatch(sharded, is_last=number == 2):
            found = gathers(lambda batch=batch: call(*local_batch(batch)).backward())
        assert found == {"root": 1, "blocks.0": 1, "blocks.1": 1}
        model(*batch).backward()
    assert_gradients_close(sharded, model)


@distributed(2)
def test_two_forwards_then_two_backwards() -> None:
    model = LanguageModel()
    sharded, call, _ = started(model, **EVERYTHING)
    first, second = language_batches(2, 2)
    losses: list[torch.Tensor] = []
    assert gathers(lambda: losses.extend(call(*local_batch(b)) for b in (first, second))) == {
        "root": 2,
        "blocks.0": 2,
        "blocks.1": 2,
    }
    assert not gathers(losses[1].backward), "the second forward kept them"
    assert gathers(losses[0].backward) == {"root": 1, "blocks.0": 1, "blocks.1": 1}
    for batch in (first, second):
        model(*batch).backward()
    assert_gradients_close(sharded, model)
    assert resting(sharded)


@distributed(2)
def test_backward_twice_through_one_graph() -> None:
    with functorch_config.patch(donated_buffer=False):  # or torch refuses retain_graph
        sharded, call, batch = started(LanguageModel(), **EVERYTHING)
        loss = call(*batch)
        assert not gathers(lambda: loss.backward(retain_graph=True))
        assert gathers(loss.backward) == {"root": 1, "blocks.0": 1, "blocks.1": 1}
    assert resting(sharded)


class Interrupted(torch.autograd.Function):
    fail = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Interrupted.fail:
            raise ArithmeticError("interrupted")
        return gradient


@distributed(2)
def test_an_interrupted_backward_leaves_nothing_behind() -> None:
    """It never reaches the graph that would take over what forward kept."""
    model = LanguageModel()
    sharded, call, batch = started(model, **EVERYTHING)
    Interrupted.fail = True
    with pytest.raises(ArithmeticError):
        Interrupted.apply(call(*batch)).backward()  # type: ignore[no-untyped-call]
    Interrupted.fail = False
    assert gathers(lambda: call(*batch).backward()) == {"root": 1, "blocks.0": 1, "blocks.1": 1}
    (whole,) = language_batches(1, 2)
    model(*whole).backward()
    assert_gradients_close(sharded, model)
    assert resting(sharded)


class Broken(LanguageModel):
    """Two graphs: everything up to the second block, and the rest."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embedding(tokens))
        torch._dynamo.graph_break()
        x = self.blocks[1](x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # The first graph cannot know when its backward comes, and keeps nothing by default; the
        # root is read by both graphs, but by the backward of the second only.
        ({}, {"root": 2, "blocks.0": 2, "blocks.1": 1}),
        (EVERYTHING, {"root": 2, "blocks.0": 1, "blocks.1": 1}),
    ],
    ids=["default", "unlimited"],
)
@distributed(2)
def test_a_graph_break(options: dict[str, Any], expected: dict[str, int]) -> None:
    model = Broken()
    sharded, call, batch = started(model, **options)
    assert gathers(lambda: call(*batch).backward()) == expected
    (whole,) = language_batches(1, 2)
    model(*whole).backward()
    assert_gradients_close(sharded, model)
    assert resting(sharded)


@pytest.mark.parametrize("keep", [False, True])
@distributed(2)
def test_blocks_compiled_one_by_one_keep_only_what_they_are_told_to(keep: bool) -> None:
    """Each block's graph is followed by its own backward, as far as it can see."""
    model = LanguageModel()
    sharded = shard_blocks(copy.deepcopy(model))
    options = {"inner": "aot_eager", "verify": True, **(EVERYTHING if keep else {})}
    for block in sharded.blocks:
        block.compile(backend="compile_fsdp", options=options)
    (whole,) = language_batches(1, 2)
    batch = local_batch(whole)
    sharded(*batch).backward()
    sharded.zero_grad()
    found = gathers(lambda: sharded(*batch).backward())
    assert found == {"root": 2, "blocks.0": 1 if keep else 2, "blocks.1": 1 if keep else 2}
    model(*whole).backward()
    assert_gradients_close(sharded, model)
    assert resting(sharded)


class CheckpointedOutside(nn.Module):
    """Eager checkpointing around a compiled block: its forward graph runs again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return (x.sum(-1) * targets).mean()


@distributed(2)
def test_a_forward_graph_that_is_recomputed_in_backward_takes_over_what_it_kept() -> None:
    model = CheckpointedOutside()
    sharded = copy.deepcopy(model)
    for block in sharded.blocks:
        fully_shard(block, cpu_mesh())
        block.compile(backend="compile_fsdp", options={"inner": "aot_eager", **EVERYTHING})
    fully_shard(sharded, cpu_mesh())
    (whole,) = language_batches(1, 2)
    batch = local_batch(whole)
    sharded(*batch).backward()
    sharded.zero_grad()
    found = gathers(lambda: sharded(*batch).backward())
    assert found["blocks.0"] == found["blocks.1"] == 1
    model(*whole).backward()
    assert_gradients_close(sharded, model)
    assert resting(sharded)
