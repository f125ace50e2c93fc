"""With an arena: the same numbers bit for bit, nothing allocated after the first steps, and
everything at the same addresses in every step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from compile_fsdp import Placements, microbatch
from compile_fsdp.compilation import Compilation
from compile_fsdp.passes.arena import aligned
from compile_fsdp.passes.steps import Schedule
from compile_fsdp.runtime.context import GroupContext
from compile_fsdp.runtime.main_gradient import MainGradient
from compile_fsdp.runtime.memory import Memory, MemoryEvent
from compile_fsdp.runtime.ops import recorded_steps
from tests.distributed import distributed
from tests.models import VOCABULARY, LanguageModel, language_batches
from tests.test_activation_checkpointing import Checkpointed, Selective
from tests.test_graph_breaks import BranchingBlock, BrokenRoot, DisabledBlock, PrintingBlock
from tests.training import Batch, adamw, cpu_mesh, drive, full, local_batch, shard_blocks

WARM_UP = 2
STEPS = 4


@dataclass
class Step:
    """What one training step did with memory."""

    allocations: int
    events: list[MemoryEvent]
    gradients: list[int]


@dataclass
class Training:
    """Losses, final parameters, and what each step did with memory."""

    values: list[torch.Tensor] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def assert_as(self, other: Training) -> None:
        for found, expected in zip(self.values, other.values, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)

    def assert_static(self) -> None:
        """From the second step after the first ones on, every step is like the one before it."""
        for step, before in zip(self.steps[WARM_UP + 1 :], self.steps[WARM_UP:], strict=False):
            assert step.allocations == before.allocations == 0
            assert step.events == before.events
            assert step.gradients == before.gradients
        assert self.steps[-1].events


def context_of(sharded: nn.Module) -> GroupContext:
    context: GroupContext = sharded._fsdp_unit.context  # type: ignore[union-attr, assignment]
    return context


def memory_of(sharded: nn.Module) -> Memory:
    return context_of(sharded).memory


def trained(
    sharded: nn.Module,
    call: Callable[..., Any],
    *,
    microbatches: int = 1,
    set_to_none: bool = True,
    between: Callable[[], object] = lambda: None,
) -> Training:
    """Some steps of AdamW; ``between`` is called after each."""
    found = Training()
    memory = memory_of(sharded)
    optimizer = adamw(sharded)
    batches: list[Batch] = list(language_batches(STEPS * microbatches, 2))
    for number in range(STEPS):
        events: list[MemoryEvent] = []
        memory.observers.append(events.append)
        before = memory.allocations
        for last in [*[False] * (microbatches - 1), True]:
            with microbatch(sharded, last):
                loss = call(*local_batch(batches.pop()))
                loss.backward()
            found.values.append(loss.detach().clone())
        memory.observers.remove(events.append)
        gradients = [p.grad.to_local() for p in sharded.parameters() if p.grad is not None]
        addresses = [gradient.data_ptr() for gradient in gradients]
        found.steps.append(Step(memory.allocations - before, events, addresses))
        found.values += [gradient.clone() for gradient in gradients]
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        between()
        assert number < STEPS
    found.values += [full(parameter) for parameter in sharded.parameters()]
    return found


def both(
    make: Callable[[], nn.Module],
    shard: Callable[[nn.Module], nn.Module] = shard_blocks,
    *,
    options: dict[str, Any] | None = None,
    **how: Any,
) -> tuple[Training, nn.Module]:
    """Train two copies of one model, without an arena and with one; the latter is returned."""
    model = make()
    plain, placed = shard(copy.deepcopy(model)), shard(model)
    options = options or {}
    expected = trained(plain, drive(plain, "aot_eager", **options), **how)
    torch._dynamo.reset()
    found = trained(placed, drive(placed, "aot_eager", arena=True, **options), **how)
    found.assert_as(expected)
    assert memory_of(placed).is_static and not memory_of(plain).is_static
    return found, placed


# One graph --------------------------------------------------------------------------------------


@distributed(1, 2)
def test_steps_are_static_and_the_same_numbers() -> None:
    found, placed = both(lambda: LanguageModel(blocks=3))
    found.assert_static()
    assert memory_of(placed).arena.unplanned == 0


@pytest.mark.parametrize("mode", ["zero1", "zero2", "ddp"])
@distributed(2)
def test_other_modes(mode: str) -> None:
    def shard(model: nn.Module) -> nn.Module:
        mesh = cpu_mesh()
        return shard_blocks(model, mesh, placements=getattr(Placements, mode)(mesh))

    found, _ = both(LanguageModel, shard, microbatches=2)
    found.assert_static()


@pytest.mark.parametrize("mode", ["hsdp", "hfsdp"])
@distributed(4)
def test_two_axes_with_microbatches(mode: str) -> None:
    def shard(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        return shard_blocks(model, mesh, placements=getattr(Placements, mode)(mesh))

    found, placed = both(LanguageModel, shard, microbatches=3)
    found.assert_static()
    assert memory_of(placed).arena.unplanned == 0


@distributed(2)
def test_gradients_that_are_zeroed_in_place() -> None:
    """Finished gradients are set aside for the next outer reduction: in memory that stays."""

    def shard(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
        return shard_blocks(model, mesh)

    found, _ = both(LanguageModel, shard, set_to_none=False)
    found.assert_static()


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False},
        {"reshard_after_forward": True},
        {"merge_below": 100_000},
        {"merge_below": 100_000, "reshard_after_forward": True},
        {"prefetch": 3},
    ],
    ids=str,
)
@distributed(2)
def test_other_policies(options: dict[str, Any]) -> None:
    found, placed = both(lambda: LanguageModel(blocks=3), options=options)
    found.assert_static()
    assert memory_of(placed).arena.unplanned == 0


@pytest.mark.parametrize("make", [Checkpointed, Selective])
@distributed(2)
def test_activation_checkpointing(make: type[LanguageModel]) -> None:
    found, _ = both(lambda: make(blocks=3))
    found.assert_static()


@distributed(2)
def test_tied_parameters() -> None:
    found, _ = both(lambda: LanguageModel(tied=True))
    found.assert_static()


@distributed(2)
def test_a_hook_keeps_what_it_has_seen() -> None:
    """A user may store the gradient that his hook is given: nothing may be written there again."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    sharded = shard_blocks(LanguageModel())
    for parameter in sharded.parameters():
        parameter.register_hook(
            lambda gradient: seen.append((gradient.to_local(), gradient.to_local().clone()))
        )
    trained(sharded, drive(sharded, "aot_eager", arena=True))
    assert len(seen) > STEPS
    assert all(torch.equal(kept, then) for kept, then in seen)


@distributed(2)
def test_the_arena_is_as_large_as_planned_and_holds_all_there_is() -> None:
    schedules: list[Schedule] = []
    observe = Compilation.observe

    class Watching:
        def __init__(self) -> None:
            self.live: dict[int, int] = {}
            self.peak = 0

        def __call__(self, event: MemoryEvent) -> None:
            if event.lane == "gather":
                change = event.bytes if event.what == "allocate" else 0
                self.live[event.address] = change
                self.peak = max(self.peak, sum(map(aligned, self.live.values())))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Compilation,
            "observe",
            lambda self, kind, before, schedule, after: (
                schedules.append(schedule),
                observe(self, kind, before, schedule, after),
            ),
        )
        sharded = shard_blocks(LanguageModel(blocks=4))
        call = drive(sharded, "aot_eager", arena=True)
        watching = Watching()
        memory_of(sharded).observers.append(watching)
        with recorded_steps() as executed:
            trained(sharded, call)
    plans = [schedule.arena for schedule in schedules]
    assert len(plans) == 2 and all(plans)
    assert memory_of(sharded).arena.size == max(plan.size for plan in plans if plan)
    assert watching.peak == max(plan.bound for plan in plans if plan)
    planned = [step.op for schedule in schedules for step in schedule.steps]
    assert [step.op for step in executed] == planned * STEPS


# Several graphs, and the eager driver -----------------------------------------------------------


def broken(block: type[nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = LanguageModel(blocks=0)
        model.blocks = nn.ModuleList(block() for _ in range(3))
        return model

    return make


@pytest.mark.parametrize("block", [PrintingBlock, BranchingBlock])
@distributed(2)
def test_graph_breaks(block: type[nn.Module]) -> None:
    """Graphs that were planned one by one put groups into the same places: who comes second is
    put elsewhere, in every step alike. The loop over the blocks, and so the root's parameters, is
    left to the interpreter, which gathers them into memory of their own in forward and backward."""
    found, placed = both(broken(block))
    assert [step.allocations for step in found.steps[WARM_UP:]] == [2] * (STEPS - WARM_UP)
    assert memory_of(placed).arena.unplanned > 0


@distributed(2)
def test_a_root_that_breaks() -> None:
    both(BrokenRoot)[0].assert_static()


@distributed(2)
def test_the_eager_driver_reads_what_a_graph_gathered() -> None:
    """What Dynamo does not see unshards on demand, in memory of its own that comes and goes."""
    both(broken(DisabledBlock))


@distributed(2)
def test_blocks_that_are_compiled_one_by_one() -> None:
    def prepared(arena: bool, model: nn.Module) -> nn.Module:
        sharded = shard_blocks(model)
        for block in sharded.blocks:
            block.compile(
                backend="compile_fsdp",
                options={"inner": "aot_eager", "verify": True, "arena": arena},
            )
        return sharded

    model = LanguageModel(blocks=4)
    plain, placed = prepared(False, copy.deepcopy(model)), prepared(True, model)
    expected = trained(plain, plain)
    torch._dynamo.reset()
    found = trained(placed, placed)
    found.assert_as(expected)
    assert memory_of(placed).arena.size > 0


@distributed(2)
def test_evaluation_and_eager_calls_between_steps() -> None:
    (tokens, targets) = local_batch(language_batches(1, 2)[0])

    def between(sharded: nn.Module, call: Callable[..., Any]) -> Callable[[], None]:
        def evaluate() -> None:
            with torch.no_grad():
                first, second = call(tokens, targets), sharded(tokens, targets)
                torch.testing.assert_close(first, second, rtol=0, atol=0)
            sharded(tokens, targets).backward()
            sharded.zero_grad()

        return evaluate

    model = LanguageModel()
    plain, placed = shard_blocks(copy.deepcopy(model)), shard_blocks(model)
    call = drive(plain, "aot_eager")
    expected = trained(plain, call, between=between(plain, call))
    torch._dynamo.reset()
    call = drive(placed, "aot_eager", arena=True)
    found = trained(placed, call, between=between(placed, call))
    found.assert_as(expected)
    found.assert_static()


@distributed(2)
def test_a_forward_without_a_backward() -> None:
    """What it kept is gathered anew by the next one, in the same place."""
    batch = local_batch(language_batches(1, 2)[0])
    model = LanguageModel(blocks=3)
    plain, placed = shard_blocks(copy.deepcopy(model)), shard_blocks(model)
    call = drive(plain, "aot_eager")
    expected = trained(plain, call, between=lambda: call(*batch))
    torch._dynamo.reset()
    again = drive(placed, "aot_eager", arena=True)
    found = trained(placed, again, between=lambda: again(*batch))
    found.assert_as(expected)
    found.assert_static()


@distributed(2)
def test_two_forwards_then_two_backwards() -> None:
    def step(call: Callable[..., Any], batches: Sequence[Batch]) -> list[torch.Tensor]:
        losses = [call(*local_batch(batch)) for batch in batches]
        for loss in losses:
            loss.backward()
        return losses

    model = LanguageModel(blocks=3)
    plain, placed = shard_blocks(copy.deepcopy(model)), shard_blocks(model)
    batches = language_batches(2, 2)
    step(drive(plain, "aot_eager"), batches)
    torch._dynamo.reset()
    call = drive(placed, "aot_eager", arena=True)
    for _ in range(3):
        placed.zero_grad()
        step(call, batches)
    for found, expected in zip(placed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(full(found.grad), full(expected.grad))


@distributed(2)
def test_two_models_in_one_process() -> None:
    first, second = LanguageModel(), LanguageModel(blocks=3)
    expected = [
        trained(plain, drive(plain, "aot_eager"))
        for plain in (shard_blocks(copy.deepcopy(first)), shard_blocks(copy.deepcopy(second)))
    ]
    torch._dynamo.reset()
    placed = shard_blocks(first), shard_blocks(second)
    calls = [drive(each, "aot_eager", arena=True) for each in placed]
    batch = local_batch(language_batches(1, 2)[0])

    def other() -> None:
        with torch.no_grad():
            calls[1](*batch)

    found = trained(placed[0], calls[0], between=other)
    found.assert_as(expected[0])
    found.assert_static()
    trained(placed[1], calls[1]).assert_as(expected[1])
    assert memory_of(placed[0]) is not memory_of(placed[1])


@distributed(2)
def test_a_gradient_that_the_user_kept_is_overwritten_and_one_put_back_is_not() -> None:
    """Static gradients are at one address; one that is given back as ``.grad`` is taken in."""
    sharded = shard_blocks(LanguageModel())
    call = drive(sharded, "aot_eager", arena=True)
    batch = local_batch(language_batches(1, 2)[0])
    parameter = next(sharded.parameters())
    call(*batch).backward()
    kept = parameter.grad
    once = full(kept)
    sharded.zero_grad()
    with torch.no_grad():
        call(*batch)  # notices that nobody has a gradient any more
    parameter.grad = kept
    call(*batch).backward()
    torch.testing.assert_close(full(parameter.grad), 2 * once, rtol=0, atol=0)
    assert parameter.grad.to_local().data_ptr() == kept.to_local().data_ptr()
    kept, parameter.grad = parameter.grad, None  # this one alone
    call(*batch).backward()
    assert torch.equal(full(parameter.grad), once) and torch.equal(full(kept), once)
    assert parameter.grad.to_local().data_ptr() == kept.to_local().data_ptr()


@distributed(2)
def test_an_exception_then_a_retry() -> None:
    """At the start and the end of a forward graph, and in the middle of a backward graph."""
    model = LanguageModel(blocks=3)
    plain, placed = shard_blocks(copy.deepcopy(model)), shard_blocks(model)
    expected = trained(plain, drive(plain, "aot_eager"))
    torch._dynamo.reset()
    call = drive(placed, "aot_eager", arena=True)
    tokens, targets = local_batch(language_batches(1, 2)[0])
    for _ in range(2):
        for wrong in ((tokens + VOCABULARY, targets), (tokens, targets + VOCABULARY)):
            with pytest.raises((IndexError, RuntimeError)):
                call(*wrong)
        loss = call(tokens, targets)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MainGradient, "accumulate", fail)
            # What runs a graph wraps it in an error of its own.
            with pytest.raises((KeyError, RuntimeError), match="out of luck"):
                loss.backward()
        placed.zero_grad()
    found = trained(placed, call)
    found.assert_as(expected)
    found.assert_static()
    assert memory_of(placed).arena.taken == ()


def fail(*arguments: Any, **rest: Any) -> None:
    raise KeyError("out of luck")
