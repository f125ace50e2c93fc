"""The cost model, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compile_fsdp.passes import hardware
from compile_fsdp.passes.costs import CostModel, DeviceCosts, LinkCosts, cost_model
from compile_fsdp.passes.facts import GroupFacts, NodeFacts

ROUND = CostModel(
    name="round numbers",
    device=DeviceCosts("device", (("bfloat16", 1e12), ("float32", 1e11)), 1e10, 1 << 30, 1e-6),
    in_node=LinkCosts(latency=1e-6, bandwidth=1e9),
    between_nodes=LinkCosts(latency=1e-5, bandwidth=1e8),
    ranks_per_node=4,
    start=1e-5,
    compute_share=1.0,
    memory_share=1.0,
    link_share=1.0,
)


def group(*mesh_shape: int, **fields: object) -> GroupFacts:
    facts = GroupFacts("g", "g", 8_000_000, 16_000_000, mesh_shape=mesh_shape, numel=4_000_000)
    return replace(facts, **fields)


def test_a_node_takes_the_longer_of_arithmetic_and_traffic() -> None:
    assert ROUND.node_seconds(NodeFacts()) == 0, "a view"
    matmul = NodeFacts(flops=10**9, dtype="bfloat16", moved=10**6)
    assert ROUND.node_seconds(matmul) == pytest.approx(1e-6 + 1e-3)
    assert ROUND.node_seconds(replace(matmul, dtype="float32")) == pytest.approx(1e-6 + 1e-2)
    assert ROUND.node_seconds(replace(matmul, moved=10**8)) == pytest.approx(1e-6 + 1e-2)
    assert ROUND.node_seconds(replace(matmul, dtype="float8")) == pytest.approx(1e-6 + 1e-2)


def test_a_gather_in_one_node() -> None:
    """Three hops; three quarters of the buffer come from others."""
    assert ROUND.gather_seconds([group(4)]) == pytest.approx(1e-5 + 3e-6 + 6e-3)
    assert ROUND.gather_seconds([group(1)]) == 0
    assert ROUND.gather_seconds([group(4, gather_bytes=0)]) == 0


def test_a_gather_over_two_nodes_uses_all_four_ports_of_each() -> None:
    inside, between = 8e6 * 7 / 8 / 1e9, 8e6 / 2 / 4 / 1e8
    assert between > inside
    assert ROUND.gather_seconds([group(8)]) == pytest.approx(1e-5 + 3e-6 + 1e-5 + between)


def test_gathering_together_saves_the_latency() -> None:
    one, both = ROUND.gather_seconds([group(4)]), ROUND.gather_seconds([group(4), group(4)])
    assert 2 * one - both == pytest.approx(ROUND.latency(group(4)))


def test_reductions_on_two_axes() -> None:
    """Inner: within a node. Outer: a quarter of the buffer, twice around two nodes, one port."""
    hsdp = group(2, 4, finishes_later=True)
    assert ROUND.reduce_inner_seconds([hsdp]) == pytest.approx(1e-5 + 3e-6 + 16e6 * 3 / 4 / 1e9)
    outer = 1e-5 + 1e-5 + 16e6 / 4 / 2 / 1 / 1e8
    assert ROUND.reduce_outer_seconds(hsdp) == pytest.approx(2 * outer)
    assert ROUND.reduce_outer_seconds(group(4)) == 0


def test_ddp_communicates_on_the_last_microbatch_only() -> None:
    ddp = group(4, finishes_later=True, reduces_inner=False, gather_bytes=0)
    assert ROUND.reduce_inner_seconds([ddp]) == 0
    assert ROUND.reduce_outer_seconds(ddp) == pytest.approx(2 * (1e-5 + 3e-6 + 16e6 * 3 / 4 / 1e9))


def test_every_device_and_link_has_a_model() -> None:
    for device in hardware.DEVICES:
        for link in hardware.LINKS:
            model = cost_model(f"{device}+{link}")
            assert model.gather_seconds([group(64)]) > model.gather_seconds([group(8)]) > 0
    assert cost_model("H100") == cost_model("h100+ib400")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h10", r"unknown device 'h10'; did you mean 'h100'\? Known: a100, h100"),
        ("h100+ib4000", r"unknown link 'ib4000'; did you mean 'ib400'\?"),
        ("", "unknown device ''. Known"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cost_model(name)


def test_numbers_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match=r"link_share must be in \(0, 1\], got 0"):
        replace(ROUND, link_share=0)
    with pytest.raises(ValueError, match="tokens must be 1 or more, got 0"):
        replace(ROUND, tokens=0)


def test_the_numbers_behind_a_bigger_machine_are_bigger() -> None:
    """A published figure that is off by a power of ten would show."""
    a100, h100, b200 = (cost_model(name).device for name in ("a100", "h100", "b200"))
    assert a100.rate("bfloat16") < h100.rate("bfloat16") < b200.rate("bfloat16")
    assert a100.bandwidth < h100.bandwidth < b200.bandwidth
    # 8 GPUs gather 16 GB of bf16 weights (Llama 3 8B): 14 GB arrive at 450 GB/s.
    llama = group(8, gather_bytes=16 * 10**9)
    assert cost_model("h100").gather_seconds([llama]) == pytest.approx(14 / 450 / 0.8, rel=0.01)
