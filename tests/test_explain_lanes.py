"""A real plan over time: lanes, memory and overlaps say what the schedule says."""

from __future__ import annotations

import itertools

import pytest

from compile_fsdp.explanation import LANES, Explanation, GraphExplanation, ParameterGroup, Span
from compile_fsdp.lanes import memory_points, spans_of, time_unit
from compile_fsdp.passes.costs import cost_model
from compile_fsdp.passes.facts import GradientUse, GraphFacts, GraphKind, GroupFacts, ParameterUse
from compile_fsdp.passes.policy import Policy
from compile_fsdp.passes.schedule import plan
from tests.explaining import explain_hsdp, fake_world


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    with fake_world(4):
        return explain_hsdp()


def lane(graph: GraphExplanation, name: str) -> list[Span]:
    return [span for span in graph.spans if span.lane == name]


def busy(spans: list[Span]) -> float:
    return sum(span.end - span.start for span in spans)


def test_lanes_are_in_order_and_add_up(explanation: Explanation) -> None:
    for graph in explanation.graphs:
        assert graph.time_unit == "us"
        for name in LANES:
            for earlier, later in itertools.pairwise(lane(graph, name)):
                assert earlier.start <= earlier.end <= later.start + 1e-3
        compute = lane(graph, "compute")
        assert busy(compute) == pytest.approx(graph.time.compute, abs=0.05)
        moved = [span for span in graph.spans if span.lane != "compute"]
        assert busy(moved) == pytest.approx(graph.time.communication, abs=0.05)
        assert max(span.end for span in graph.spans) <= graph.time.total + 1e-3
        exposed = sum(step.exposed for step in graph.steps)
        assert exposed == pytest.approx(graph.time.exposed, abs=0.05)
        assert graph.time.total == pytest.approx(graph.time.compute + exposed, abs=0.05)


def test_nothing_reads_a_group_before_its_gather_has_ended(explanation: Explanation) -> None:
    for graph in explanation.graphs:
        ends = {span.label: span.end for span in lane(graph, "gather")}
        assert set(ends) == {"root", "blocks.0", "blocks.1"}
        for span in lane(graph, "compute"):
            for label in span.label.split():
                assert span.start >= ends[label] - 1e-3, (span, ends[label])


def test_every_collective_has_its_step_and_its_bytes(explanation: Explanation) -> None:
    sizes = {group.label: group.gather_bytes for group in explanation.groups}
    for graph in explanation.graphs:
        for span in graph.spans:
            if span.step is not None:
                step = graph.steps[span.step]
                assert (step.group, step.bytes, step.fqns) == (span.label, span.bytes, span.fqns)
                assert (step.start, step.end) == (span.start, span.end)
                assert step.bytes == sizes[step.group]
        totals = sum(total.count for total in graph.collectives)
        assert totals == sum(span.step is not None for span in graph.spans)


def test_what_computes_behind_a_gather(explanation: Explanation) -> None:
    overlaps = {
        (graph.kind, step.group): step.overlaps
        for graph in explanation.graphs
        for step in graph.steps
        if step.op == "unshard"
    }
    assert overlaps == {
        ("forward", "root"): (),
        ("forward", "blocks.0"): ("root",),
        ("forward", "blocks.1"): ("blocks.0",),
        ("backward", "root"): (),
        ("backward", "blocks.1"): ("root",),
        ("backward", "blocks.0"): ("blocks.1",),
    }


def test_names_are_from_the_root_of_the_model(explanation: Explanation) -> None:
    names = [fqn for group in explanation.groups for names in group.fqns for fqn in names]
    assert "blocks.1.norm.weight" in names and "embedding.weight" in names
    (last,) = [
        step
        for step in explanation.graphs[1].steps
        if (step.op, step.group) == ("reduce_inner", "root")
    ]
    assert last.fqns == ("embedding.weight", "head.weight") and last.axis == "shard"


def test_the_memory_curve_is_the_schedules(explanation: Explanation) -> None:
    for graph in explanation.graphs:
        times = [point.at for point in graph.memory]
        assert times == sorted(set(times))
        peak = graph.peak
        assert peak is not None and peak.parameters > 0
    forward, backward = explanation.graphs
    assert forward.memory[-1].parameters == 0, "all is released"
    assert {point.gradients for point in forward.memory} == {0}
    assert max(point.gradients for point in backward.memory) > 0


# Where nothing was modelled -------------------------------------------------------------------


def test_without_costs_time_is_the_position() -> None:
    """Facts whose nodes nobody has counted."""
    facts = GraphFacts(
        kind=GraphKind.BACKWARD,
        names=("shard", "tangent", "first", "mm", "grad", "output"),
        start=2,
        parameters=(ParameterUse("g", 0, ("mm",), 3, 3),),
        gradients=(GradientUse("g", 0, "grad", 4),),
    )
    groups = {"g": GroupFacts("g", "block", 64, 64, mesh_shape=(2,))}
    shown = {
        "g": ParameterGroup(
            "g", "block", (("block.w",),), ((4, 4),), "float32", "float32", True, 64, 64, 32
        )
    }
    costs = cost_model("cpu")
    schedule = plan(facts, groups, Policy(prefetch=1, costs=costs))
    assert time_unit(schedule) == "node"
    spans = {(s.lane, s.label): (s.start, s.end) for s in spans_of(schedule, shown, costs)}
    assert spans[("gather", "block")] == (2.0, 3.0)
    assert spans[("compute", "block")] == (3.0, 4.0)
    assert spans[("reduce_inner", "block")] == (5.0, 5.0)
    assert [point.at for point in memory_points(schedule, costs)] == [0.0, 2.0, 4.0, 5.0]
