"""Plans for clusters that are not there, against hand calculation; nothing is compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from compile_fsdp.cli.target import Sizes, workload_of
from compile_fsdp.passes.costs import cost_model
from compile_fsdp.passes.policy import Policy
from compile_fsdp.planning.advice import changes
from compile_fsdp.planning.capture import Captured, capture_step, recapture
from compile_fsdp.planning.communication import traffic
from compile_fsdp.planning.errors import PlanError
from compile_fsdp.planning.predict import memory_budget_option, predict
from compile_fsdp.planning.search import search
from compile_fsdp.planning.sharding import MODES, Sharding, largest_list, shard
from compile_fsdp.planning.sizes import sizes_of
from compile_fsdp.planning.workload import Built, Workload
from compile_fsdp.planning.world import MeshShape, parse_mesh, pretended
from tests.models import VOCABULARY, WIDTH, LanguageModel

CONFIGS = Path(__file__).resolve().parent.parent / "examples" / "configs"
BLOCKS = 3
# LayerNorm, up and down with biases; embedding and head.
BLOCK = 2 * WIDTH + 2 * 4 * WIDTH * WIDTH + 5 * WIDTH
ROOT = 2 * VOCABULARY * WIDTH


def build(_: DeviceMesh) -> Built:
    tokens = torch.zeros(2, 5, dtype=torch.long)
    return Built(LanguageModel(blocks=BLOCKS), (tokens, tokens.clone()))


TINY = Workload("tiny", build)
POLICY = Policy(costs=cost_model("h100"))


@pytest.fixture(scope="module")
def tiny() -> Captured:
    return capture_step(TINY, parse_mesh("4x2", 2), Sharding("hsdp"), decompose=False)


def test_llama_8b_by_hand() -> None:
    """Sharded on shapes, not traced. 64 ranks, 8 of them on dp_inner, bf16 with fp32 main
    weights."""
    width, hidden, key_value, vocabulary = 4096, 14336, 1024, 128256
    block = 2 * width * width + 2 * key_value * width + 3 * hidden * width + 2 * width
    root = 2 * vocabulary * width + width
    assert 32 * block + root == 8_030_261_248

    workload = workload_of(f"hf:{CONFIGS / 'llama3_8b.json'}", Sizes(1, None, None))
    shape = parse_mesh("8x8")
    with pretended(shape, axes=2) as mesh:
        built = workload.build(mesh)
        blocks = shard(built, mesh, Sharding("hsdp"))
        assert built.samples == (8192, "tokens")
        assert blocks == tuple(f"model.layers.{number}" for number in range(32))
        groups = [
            group
            for name in (*blocks, "")
            for group in built.model.get_submodule(name).fsdp_parameter_groups
        ]
        sizes = [sizes_of(group) for group in groups]
    assert sum(each.parameters for each in sizes) == 8_030_261_248
    assert {each.parameters for each in sizes[:-1]} == {block}
    assert sizes[-1].parameters == root
    padding = sum(each.padded - each.parameters for each in sizes)
    assert 0 <= padding < 0.001 * 8_030_261_248
    share = (8_030_261_248 + padding) // 8
    assert sum(each.weights for each in sizes) == (2 + 4) * share
    assert sum(each.gradients for each in sizes) == 2 * share
    assert sum(each.main_elements for each in sizes) == share


def test_bytes_of_a_step_by_hand(tiny: Captured) -> None:
    """Everything is gathered in forward; backward gathers what was not kept; HSDP reduces within
    dp_inner, then this rank's half over dp_outer."""
    plan = predict(tiny, POLICY)
    sizes = tiny.sizes.values()
    assert sorted(each.parameters for each in sizes) == sorted([ROOT, *[BLOCK] * BLOCKS])
    every = sum(each.padded for each in sizes) * 4
    block = next(each.padded for each in sizes if each.label == "blocks.0") * 4
    assert plan.kept == ("root", "blocks.2")
    moved = {(row.axis, row.kind, row.when): (row.count, row.bytes) for row in traffic(plan)}
    assert moved == {
        ("dp_inner", "all_gather", "forward"): (BLOCKS + 1, every),
        ("dp_inner", "all_gather", "backward"): (BLOCKS - 1, (BLOCKS - 1) * block),
        ("dp_inner", "reduce_scatter", "backward"): (BLOCKS + 1, every),
        ("dp_outer", "all_reduce", "backward"): (BLOCKS + 1, every // 2),
    }


STATE = {
    # Parts of weights, gradients and optimizer state that a rank of 8, in 4 replicas of 2, holds.
    "ddp": (1, 1, 1),
    "zero1": (1, 1, 8),
    "zero2": (1, 8, 8),
    "zero3": (8, 8, 8),
    "hsdp": (2, 2, 2),
    "hfsdp": (2, 2, 8),
}


def test_the_arena_by_hand(tiny: Captured) -> None:
    """The root and two blocks at a time, each at a multiple of 256 bytes; what a plan says is what
    the passes do."""
    found = predict(tiny, POLICY).arena
    sizes = {name: -(-group.gather_bytes // 256) * 256 for name, group in tiny.groups.items()}
    root, *blocks = sizes.values()
    assert found is not None and found.size == found.bound == root + 2 * blocks[0]
    assert found.offsets.keys() == sizes.keys()
    planned = predict(tiny, dataclasses.replace(POLICY, arena=True)).schedules
    assert found in [schedule.arena for schedule in planned]


@pytest.mark.parametrize("mode", MODES)
def test_state_of_a_rank_by_mode(tiny: Captured, mode: str) -> None:
    """Sharded anew and not traced anew; AdamW, fp32: weight and main weight are one buffer."""
    there = recapture(tiny, TINY, tiny.shape, Sharding(mode))
    memory = predict(there, POLICY).memory
    every = sum(each.padded for each in there.sizes.values()) * 4
    weights, gradients, optimizer = STATE[mode]
    assert memory.weights == every // weights
    assert memory.gradients == every // gradients
    assert memory.optimizer == 2 * every // optimizer
    refreshes = [row for row in traffic(predict(there, POLICY)) if row.when == "after a step"]
    expected = {"zero1": every, "zero2": every, "hfsdp": every // 2}
    assert [row.bytes for row in refreshes] == ([expected[mode]] if mode in expected else [])


def test_a_plan_made_anew_is_the_plan_of_a_trace_on_that_mesh(tiny: Captured) -> None:
    """What a graph computes does not depend on the mesh."""
    shape, how = parse_mesh("8"), Sharding("zero3")
    traced = predict(capture_step(TINY, shape, how, decompose=False), POLICY)
    moved = predict(recapture(tiny, TINY, shape, how), POLICY)
    assert moved.memory == traced.memory
    assert moved.seconds == traced.seconds
    assert [len(each.steps) for each in moved.schedules] == [
        len(each.steps) for each in traced.schedules
    ]


def slow_network() -> Policy:
    costs = cost_model("h100")
    slow = dataclasses.replace(costs.in_node, bandwidth=1e6, latency=0.0)
    return Policy(costs=dataclasses.replace(costs, in_node=slow, between_nodes=slow))


def test_advice_is_planned_again(tiny: Captured) -> None:
    """Where gathers are slow and reductions are not, keeping everything saves all gathers of
    backward, and no more memory is used than the kept groups have."""
    groups = {
        name: dataclasses.replace(group, reduce_bytes=4) for name, group in tiny.groups.items()
    }
    tiny = dataclasses.replace(tiny, groups=groups)
    plan = predict(tiny, slow_network())
    found = changes(plan, None)
    best = found[0]
    assert "keep" in best.text and best.step < 0
    assert best.after.seconds.total == pytest.approx(plan.seconds.total * (1 + best.step))
    assert 0 < best.memory <= sum(each.padded for each in tiny.sizes.values()) * 4
    assert not any(
        row.when == "backward" and row.kind == "all_gather" for row in traffic(best.after)
    )
    nothing_fits = changes(plan, 1)
    assert nothing_fits and not any(change.fits for change in nothing_fits)


def test_a_budget_counts_everything_and_says_what_the_option_is(tiny: Captured) -> None:
    plan = predict(tiny, POLICY)
    same = predict(tiny, dataclasses.replace(POLICY, memory_budget=10 * plan.memory.total))
    assert len(same.kept) == BLOCKS + 1
    # AdamW's state is in the budget, and not in the option.
    assert 10**6 - memory_budget_option(plan, 10**6) == plan.memory.optimizer
    with pytest.raises(PlanError, match="cannot hold this"):
        predict(tiny, dataclasses.replace(POLICY, memory_budget=plan.memory.state))


def test_search_tries_every_mode_and_ranks(tiny: Captured) -> None:
    said: list[str] = []
    found = search(tiny, TINY, POLICY, "adamw", None, said.append)
    assert {each.mode for each in found} == set(MODES)
    assert {each.mesh for each in found if each.mode == "hsdp"} == {"4x2", "2x4"}
    rates = [each.plan.rate for each in found]
    assert rates == sorted(rates, reverse=True)
    assert said[0].startswith("1/8: ddp")


def test_checkpointing_drops_activations() -> None:
    shape = parse_mesh("2")
    plans = [
        predict(
            capture_step(TINY, shape, Sharding("zero3", checkpoints=each), decompose=False), POLICY
        )
        for each in (False, True)
    ]
    assert plans[1].memory.activations < plans[0].memory.activations
    assert plans[1].seconds.compute > plans[0].seconds.compute
    assert plans[1].flops == plans[0].flops, "recomputation is no work of the model"


@pytest.mark.parametrize(
    ("text", "node", "expected"),
    [
        ("64x8", None, MeshShape(64, 8, 8)),
        ("8x64", None, MeshShape(8, 64, 8)),
        ("512", None, MeshShape(1, 512, 8)),
        ("2", None, MeshShape(1, 2, 2)),
        ("4x4", 2, MeshShape(4, 4, 2)),
    ],
)
def test_meshes(text: str, node: int | None, expected: MeshShape) -> None:
    assert parse_mesh(text, node) == expected


@pytest.mark.parametrize("text", ["", "x8", "8x", "0x8", "8x8x8", "-2", "3x5", "12", "2x12"])
def test_meshes_that_are_none(text: str) -> None:
    with pytest.raises(PlanError, match="--mesh"):
        parse_mesh(text, 8)


def test_the_largest_list_is_not_inside_of_another() -> None:
    model = torch.nn.ModuleDict(
        {
            "small": torch.nn.ModuleList([torch.nn.Linear(2, 2)]),
            "large": torch.nn.ModuleList(
                [torch.nn.ModuleDict({"experts": torch.nn.ModuleList([torch.nn.Linear(9, 9)] * 2)})]
            ),
        }
    )
    assert largest_list(model) == ("large.0",)
    assert largest_list(torch.nn.Linear(2, 2)) == ()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not torch.distributed.is_initialized()
    assert type(torch.zeros(1)) is torch.Tensor
