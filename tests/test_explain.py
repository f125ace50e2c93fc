"""`explain` and `capture`: what they see, and that a model does not notice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compile_fsdp
from compile_fsdp import Explanation, FsdpModule, capture, explain, fully_shard
from tests.distributed import run
from tests.explaining import (
    batch,
    compiled,
    explain_hsdp,
    explain_language_model,
    fake_world,
    sharded_language_model,
)
from tests.training import cpu_mesh


@pytest.fixture
def world_of_two() -> Iterator[None]:
    with fake_world(2):
        yield


in_a_world_of_two = pytest.mark.usefixtures("world_of_two")


def names(explanation: Explanation) -> list[str]:
    return [graph.name for graph in explanation.graphs]


def test_ranks_agree() -> None:
    first, second = run(2, explain_language_model)
    assert first == second and first.world_size == 2
    assert Explanation.from_json(first.to_json()) == first


def test_the_collectives_of_a_mesh_with_two_axes() -> None:
    with fake_world(4):
        explanation = explain_hsdp()
    totals = [
        (graph.kind, total.kind, total.lane, total.axis, total.count)
        for graph in explanation.graphs
        for total in graph.collectives
    ]
    assert totals == [
        ("forward", "all_gather", "gather", "shard", 3),
        ("backward", "all_gather", "gather", "shard", 3),
        ("backward", "reduce_scatter", "reduce_inner", "shard", 3),
        ("backward", "all_reduce", "reduce_outer", "replicate", 3),
    ]
    for total in explanation.graphs[1].collectives:
        assert total.bytes == sum(group.gather_bytes for group in explanation.groups)


def test_groups_that_are_gathered_and_reduced_together() -> None:
    with fake_world(4):
        explanation = explain_hsdp(merge_below="1MiB")
    together = "blocks.1+blocks.0+root"
    backward = explanation.graphs[1]
    counts = [(total.lane, total.axis, total.count) for total in backward.collectives]
    assert counts == [
        ("gather", "shard", 1),
        ("reduce_inner", "shard", 1),
        ("reduce_outer", "replicate", 3),
    ]
    (step,) = [step for step in backward.steps if step.op == "reduce_together"]
    assert step.group == together and step.axis == "shard"
    assert step.bytes == sum(group.reduce_bytes for group in explanation.groups)
    assert set(step.fqns) == {"=".join(n) for group in explanation.groups for n in group.fqns}
    assert [span.label for span in backward.spans if span.lane == "reduce_inner"] == [together]
    assert "token_together = reduce_together(0: " in backward.communication
    assert "reduce_together" in explanation.to_json()
    assert f"s{step.number} -> s{step.number + 1} [style=dotted]" in explanation.to_dot(1)


# What a model does not notice ------------------------------------------------------------------


class Noticing(nn.Module):
    """Has everything that a forward may change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("rebound", torch.zeros(2))
        self.calls = 0
        self.cache: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.rebound = self.rebound + 1
        self.added = x
        out = F.dropout(self.norm(self.linear(x)))
        torch._dynamo.graph_break()
        return self.linear(out).sum()


def state(model: Noticing) -> list[torch.Tensor]:
    shards = [parameter.to_local().clone() for parameter in model.parameters()]
    return [*shards, *(buffer.clone() for buffer in model.buffers()), torch.get_rng_state()]


@in_a_world_of_two
def test_explain_leaves_the_model_as_it_was() -> None:
    model = Noticing()
    fully_shard(model, cpu_mesh())
    rebound = model.rebound
    before = state(model)
    explanation = explain(compiled(model), torch.ones(3, 4))
    assert [graph.kind for graph in explanation.graphs] == ["forward", "backward"] * 2
    for found, expected in zip(state(model), before, strict=True):
        assert torch.equal(found, expected)
    assert model.rebound is rebound and model.calls == 0 and not hasattr(model, "added")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(not group.is_held for group in model.fsdp_parameter_groups)


@in_a_world_of_two
def test_explain_plans_for_inductor_and_writes_no_code() -> None:
    """With default options, by which some groups are kept for a backward that does not run."""
    from torch._inductor import metrics

    model = sharded_language_model()
    metrics.reset()
    forward, backward = explain(model, *batch()).graphs
    assert metrics.generated_kernel_count == 0
    assert (forward.kind, backward.kind) == ("forward", "backward")
    assert "aten.rsqrt(" in forward.after, "Inductor's passes ran: LayerNorm is decomposed"
    assert "aten.native_layer_norm(" not in forward.after
    groups = [
        group
        for module in model.modules()
        if isinstance(module, FsdpModule)
        for group in module.fsdp_parameter_groups
    ]
    assert not any(group.is_kept or group.is_unsharded for group in groups)


@in_a_world_of_two
def test_explain_keeps_gradients_that_accumulate() -> None:
    model = sharded_language_model()
    run_model = compiled(model)
    run_model(*batch()).backward()
    before = {name: each.grad.to_local().clone() for name, each in model.named_parameters()}
    explain(run_model, *batch())
    for name, each in model.named_parameters():
        torch.testing.assert_close(
            each.grad.to_local(), before[name], rtol=0, atol=0, equal_nan=True
        )


@in_a_world_of_two
def test_explain_changes_no_compiled_code() -> None:
    """Neither the code nor Dynamo's idea of which sizes vary."""
    model = sharded_language_model()
    tokens, targets = batch()
    run_model = compiled(model)
    explain(run_model, tokens, targets)
    explain(run_model, tokens[:, :3], targets[:, :3])
    with capture() as first:
        run_model(tokens, targets).backward()
    assert first.explanation.recompiles == ()
    explain(run_model, tokens[:, :2], targets[:, :2])
    with torch._dynamo.config.patch(error_on_recompile=True), capture() as second:
        run_model(tokens, targets).backward()
    assert second.explanation == first.explanation
    inputs = [line for line in first.explanation.graphs[0].after.splitlines() if "i64[" in line]
    assert "i64[2, 5]" in inputs[0], "compiled for the one size that it was called with"


@in_a_world_of_two
def test_a_model_that_raises_is_left_as_it_was_too() -> None:
    model = Noticing()
    fully_shard(model, cpu_mesh())
    before = state(model)
    with pytest.raises(Exception, match=r"shape|size"):
        explain(compiled(model), torch.ones(3, 5))
    for found, expected in zip(state(model), before, strict=True):
        assert torch.equal(found, expected)
    assert model.calls == 0


# What a capture sees ---------------------------------------------------------------------------


@in_a_world_of_two
def test_a_capture_sees_what_was_compiled_before() -> None:
    model = sharded_language_model()
    run_model = compiled(model)
    run_model(*batch()).backward()
    with capture() as seen:
        for _ in range(3):
            run_model(*batch()).backward()
    assert names(seen.explanation) == ["graph 0: forward (0/0)", "graph 1: backward (0/0)"]
    assert [graph.calls for graph in seen.explanation.graphs] == [3, 0]
    assert seen.explanation.notes == ()


@in_a_world_of_two
def test_explain_and_capture_agree() -> None:
    model = sharded_language_model()
    run_model = compiled(model)
    explained = explain(run_model, *batch())
    with capture() as seen:
        run_model(*batch()).backward()
    for ours, theirs in zip(explained.graphs, seen.explanation.graphs, strict=True):
        assert (ours.before, ours.after, ours.steps) == (theirs.before, theirs.after, theirs.steps)


@in_a_world_of_two
def test_captures_are_nested_and_share_nothing() -> None:
    model = sharded_language_model()
    run_model = compiled(model)
    with capture() as outer:
        run_model(*batch()).backward()
        with capture() as inner, torch.no_grad():
            run_model(*batch())
        run_model(*batch()).backward()
    with capture() as after:
        pass
    assert [graph.kind for graph in inner.explanation.graphs] == ["inference"]
    kinds = ["forward", "backward", "inference"]
    assert [graph.kind for graph in outer.explanation.graphs] == kinds
    assert [graph.calls for graph in outer.explanation.graphs] == [2, 0, 1]
    assert not after.explanation


@in_a_world_of_two
def test_a_capture_cannot_be_entered_twice() -> None:
    with capture() as seen, pytest.raises(RuntimeError, match="open already"), seen:
        pass


@in_a_world_of_two
def test_recompiles_name_the_guard_that_failed() -> None:
    model = sharded_language_model()
    run_model = compiled(model)
    tokens, targets = batch()
    with capture() as seen:
        run_model(tokens, targets)
        run_model(tokens[:, :3], targets[:, :3])
    (recompile,) = seen.explanation.recompiles
    assert recompile.compile_id == "0/1"
    assert "size mismatch at index 1. expected 5, actual 3" in recompile.failed_guard
    assert "recompiles\n  0/1 models.py" in str(seen.explanation)


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break(msg="nothing to compile yet")
        x = self.first(x)
        torch._dynamo.graph_break(msg="in the middle")
        return self.second(x).sum()


@in_a_world_of_two
def test_graph_breaks_name_the_users_line() -> None:
    model = Breaking()
    fully_shard(model, cpu_mesh())
    explanation = explain(compiled(model), torch.ones(2, 4))
    found = [(each.function, each.code, each.compile_id != "") for each in explanation.breaks]
    call = "torch._dynamo.graph_break(msg="
    assert found == [
        ("forward", f'{call}"nothing to compile yet")', False),
        ("forward", f'{call}"in the middle")', True),
    ]
    assert "in the middle" in explanation.breaks[1].reason
    read = [
        [step.fqns for step in graph.steps if step.op == "unshard"]
        for graph in explanation.graphs
        if graph.kind == "forward"
    ]
    assert len(read) == 2
    text = str(explanation)
    assert "2 graph breaks" in text and "tests/test_explain.py" in text


# Input that cannot be explained ----------------------------------------------------------------


@in_a_world_of_two
def test_what_cannot_be_explained() -> None:
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match="nothing at or below this Linear is sharded"):
        explain(nn.Linear(4, 4), x)
    with pytest.raises(TypeError, match=r"must be an nn\.Module, got function"):
        explain(test_what_cannot_be_explained, x)  # type: ignore[arg-type]
    model = Breaking()
    fully_shard(model, cpu_mesh())
    with pytest.raises(ValueError, match="backend 'eager'"):
        explain(torch.compile(model, backend="eager"), x)
    with pytest.raises(ValueError, match="unknown option 'innner'"):
        explain(torch.compile(model, backend="compile_fsdp", options={"innner": "x"}), x)
    model.first.compile(backend="compile_fsdp")
    with pytest.raises(ValueError, match="'first' was compiled in place"):
        explain(model, x)


@in_a_world_of_two
def test_nothing_captured_says_what_to_do() -> None:
    model = sharded_language_model()
    with capture() as seen:
        model(*batch()).backward()  # eager: module hooks, no graph
    assert not seen.explanation
    assert "Nothing was captured" in str(seen.explanation)
    with capture() as seen:
        compiled(model)(*batch())
    assert "no backward graph yet" in str(seen.explanation)


def test_the_names_are_public() -> None:
    assert {"Capture", "Explanation", "capture", "explain"} <= set(compile_fsdp.__all__)
