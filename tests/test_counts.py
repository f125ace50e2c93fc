"""How much one steady-state step does: counted, not timed, so it is the same on every machine.

A number that grew is a step that became slower or larger: a collective, an allocation, a copy or a
Python call more. One that shrank is a gain: write it down here.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

from benchmarks.copies import copies_in
from compile_fsdp import Explanation, capture, fully_shard_optimizer
from compile_fsdp.backend import compile_fsdp
from compile_fsdp.runtime import collectives
from compile_fsdp.runtime.memory import Memory, MemoryEvent
from compile_fsdp.runtime.ops import recorded_steps
from tests.distributed import run
from tests.explaining import batch, fake_world, sharded_language_model
from tests.models import LanguageModel, language_batches
from tests.training import adamw, drive, local_batch, shard_blocks

A_COPY = re.compile(r"aten\.(clone|copy|cat|stack|_to_copy)")


@dataclass(frozen=True)
class Counts:
    """What forward and backward of one step did on a rank.

    Attributes:
        collectives: started, by kind.
        steps: operators of the runtime, by name.
        memory: how often the runtime's buffers took memory, and gave it back.
        copies: of tensors, by why.
    """

    collectives: dict[str, int]
    steps: dict[str, int]
    memory: tuple[int, int]
    copies: dict[str, int]


def steady_step(driver: str) -> Counts:
    """The fourth step and the fifth: two blocks of 6 parameters, and a root of 2."""
    model = shard_blocks(LanguageModel())
    call = drive(model, driver)
    optimizer = adamw(model)
    fully_shard_optimizer(optimizer)
    data = local_batch(language_batches(1, 2)[0])

    def passes() -> None:
        call(*data).backward()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        passes()
        update()
    memory = model._fsdp_unit.context.memory
    before = settled(memory)
    with recorded_steps() as steps, collectives.recorded() as records:
        passes()
        update()
        # Collectives are finished, and gradients dropped: what was taken has been given back.
        after = settled(memory)
    return Counts(
        dict(Counter(record.kind for record in records)),
        dict(Counter(step.op for step in steps)),
        (after[0] - before[0], after[1] - before[1]),
        dict(Counter(copy.where for copy in copies_in(passes))),
    )


def settled(memory: Memory) -> tuple[int, int]:
    """How often memory was taken and given back, once nothing changes any more: gloo's own threads
    let go of what they have sent a little after a collective is over."""
    counts, same = (memory.allocations, memory.frees), 0
    while same < 20:
        time.sleep(0.01)
        now = memory.allocations, memory.frees
        counts, same = now, same + 1 if now == counts else 0
    return counts


def on_both_ranks(driver: str) -> Counts:
    first, second = run(2, steady_step, driver)
    assert first == second, "ranks do different things"
    return first


def test_an_eager_step() -> None:
    """Each group is gathered in forward and in backward, and reduced once."""
    counts = on_both_ranks("eager")
    assert counts.collectives == {"all_gather": 6, "reduce_scatter": 3}
    assert counts.steps == {}
    assert counts.memory == (15, 15)
    # Each gradient into its group's buffer; each bias (`addmm`), and both parts of each gather,
    # which gloo does by itself for groups as small as these.
    assert counts.copies == {"packing": 14, "compute": 4 + 2 * 6}


def test_a_compiled_step() -> None:
    """Two groups stay unsharded, the root's and the last block's: two gathers less than eager."""
    counts = on_both_ranks("aot_eager")
    assert counts.collectives == {"all_gather": 4, "reduce_scatter": 3}
    assert counts.steps == {
        "unshard": 6,
        "wait": 6,
        "release": 4,
        "keep": 2,
        "reduce_inner": 3,
        "wait_reductions": 1,
    }
    assert counts.memory == (13, 13)
    assert counts.copies == {"packing": 14, "compute": 4 + 2 * 4}


def graphs() -> tuple[int, Explanation]:
    """How many inputs Dynamo's graph has, and the graphs after the passes."""
    inputs: list[int] = []

    def backend(gm: torch.fx.GraphModule, examples: Any) -> Callable[..., Any]:
        inputs.append(len(examples))
        return compile_fsdp(gm, examples, options={"inner": "aot_eager"})

    with fake_world(2), capture() as seen:
        model = sharded_language_model()
        compiled: Any = torch.compile(model, backend=backend)
        compiled(*batch()).backward()
    (count,) = inputs
    return count, seen.explanation


def test_the_graphs() -> None:
    """An input for each group and each argument; steps, views of gathered buffers, no copies."""
    inputs, explanation = graphs()
    assert inputs == 3 + 2
    forward, backward = (graph.after.splitlines() for graph in explanation.graphs)
    for lines, steps, views in ((forward, 9, 14), (backward, 13, 9)):
        assert sum("compile_fsdp." in line for line in lines) == steps
        assert sum("as_strided(full_" in line for line in lines) == views
        assert not [
            line for line in lines if re.search(r"aten\.(clone|copy|cat|stack|_to_copy)", line)
        ]


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
def test_gradients_go_before_their_successors_take_memory(driver: str) -> None:
    """Packed ones when they have been sent, those of the last step one group after another, or all
    at once when a forward starts."""
    with fake_world(2):
        model = sharded_language_model()
        call = drive(model, driver)
        live, most = Counter[str](), Counter[str]()

        def observe(event: MemoryEvent) -> None:
            kind = event.owner.partition(" of ")[0]
            live[kind] += 1 if event.what == "allocate" else -1
            most[kind] = max(most[kind], live[kind])

        model._fsdp_unit.context.memory.observers.append(observe)
        for _ in range(2):
            loss = call(*batch())
            model.zero_grad()
            loss.backward()
        assert most["gradients"] == 1 and live["gradients"] == 0
        assert most["main gradients"] == live["main gradients"] == 3
        model.zero_grad()
        call(*batch())
        assert live["main gradients"] == 0


def test_another_backend_leaves_no_gradient_of_flat_shards_behind() -> None:
    """Autograd is given one for each; it is as large as the shard, and nobody reads it."""
    with fake_world(2):
        model = sharded_language_model()
        torch.compile(model, backend="aot_eager")(*batch()).backward()
        assert all(each.flat_leaf.grad is None for each in model._fsdp_unit.context.groups())
        assert all(parameter.grad is not None for parameter in model.parameters())


def calls_of(work: Callable[[], object]) -> int:
    """Python functions that ``work`` calls."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def optimizer_calls() -> tuple[int, int, int]:
    """Of an operator on a parameter and its gradient, of a step, of one of plain tensors."""
    with fake_world(2):
        model = sharded_language_model()
        optimizer = adamw(model)
        fully_shard_optimizer(optimizer)
        plain = LanguageModel()
        plain_optimizer = adamw(plain)
        for _ in range(3):
            for call, each in ((model, optimizer), (plain, plain_optimizer)):
                call(*batch()).backward()
                each.step()
        parameter = next(model.parameters())
        gradient = parameter.grad
        assert gradient is not None
        with torch.no_grad():
            parameter.add_(gradient, alpha=-0.1)
            operator = calls_of(lambda: parameter.add_(gradient, alpha=-0.1))
        return operator, calls_of(optimizer.step), calls_of(plain_optimizer.step)


def test_python_calls_of_an_optimizer_step() -> None:
    """At most: releases of torch differ by a few calls."""
    operator, step, plain = optimizer_calls()
    assert operator <= 20, "Python calls of parameter.add_(gradient)"
    parameters = 14
    assert step - plain <= 60 * parameters, "Python calls that a step of AdamW adds to torch's own"


def test_no_gradient_of_a_matrix_is_copied() -> None:
    """Inductor has them computed where they are reduced from."""
    options = {"inductor": {"fx_graph_cache": False, "cpp.enable_kernel_profile": True}}
    with fake_world(2):
        model = sharded_language_model()
        call: Any = torch.compile(model, backend="compile_fsdp", options=options)
        call(*batch()).backward()
        copies = copies_in(lambda: call(*batch()).backward())
        assert not [copy for copy in copies if copy.where == "packing"]


def test_what_is_being_reduced_goes_with_the_operator() -> None:
    """Inductor's code drops the buffer at once, and gives its memory to no other tensor: the
    runtime holds it until it has been reduced, and no longer."""
    with fake_world(2):
        model = sharded_language_model()
        options = {"inductor": {"fx_graph_cache": False}}
        call: Any = torch.compile(model, backend="compile_fsdp", options=options)
        _, codes = run_and_get_code(lambda: call(*batch()).backward())
    (lines,) = (code.splitlines() for code in codes if "reduce_inner" in code)
    called = " = torch.ops.compile_fsdp.reduce_inner.default("
    reductions = [number for number, line in enumerate(lines) if called in line]
    assert len(reductions) == 3
    for number in reductions:
        found = re.search(r"reduce_inner.default\(\[(buf\d+)\]", lines[number])
        assert found is not None, lines[number]
        after = "\n".join(line for line in lines[number + 1 :] if "assert_" not in line)
        assert re.match(rf"( *del buf\d+\n)*? *del {found[1]}\n", after), after[:200]
        assert not re.search(rf"\b{found[1]}\b", after.split(f"del {found[1]}\n", 1)[1])


def kernels_of(call: Callable[..., Any]) -> int:
    """Kernels that Inductor writes for a forward and backward."""
    from torch._inductor import metrics

    metrics.reset()
    call(*batch()).backward()
    return metrics.generated_kernel_count


@pytest.mark.slow
def test_inductor_writes_one_kernel_more_than_for_the_unsharded_model() -> None:
    """Waits and releases may cut a fused kernel in two; here they cut one at most. The gradient of
    a bias is a view of a sum, and is put into its place by two loops of the kernel that sums (one
    for the vectors, one for what is left); each loop counts as a kernel."""
    options = {"inductor": {"fx_graph_cache": False}}
    with fake_world(2):
        ours = torch.compile(sharded_language_model(), backend="compile_fsdp", options=options)
        found = kernels_of(ours)
        torch.manual_seed(3)
        model: nn.Module = LanguageModel()
        plain = torch.compile(model, options={"fx_graph_cache": False})
        linears = [each for each in model.modules() if isinstance(each, nn.Linear)]
        biases = sum(each.bias is not None for each in linears)
        assert found <= kernels_of(plain) + 1 + 2 * biases
