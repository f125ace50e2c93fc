"""Small groups that share a collective for gathers and reductions: the same bits, fewer calls."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from compile_fsdp import ShardLayout, fully_shard, microbatch
from compile_fsdp.passes.facts import GroupFacts
from compile_fsdp.passes.merge import joined, joined_reductions
from compile_fsdp.passes.policy import Policy
from compile_fsdp.runtime import collectives
from tests.distributed import distributed, run
from tests.models import LanguageModel, language_batches
from tests.training import Run, assert_same, drive, local_batch, shard_blocks, train

MERGED = {"merge_below": "1MiB", "reshard_after_forward": True}


def test_neighbours_are_joined_below_the_limit() -> None:
    def group(name: str, size: int, mergeable: str | None = "bf16 0") -> GroupFacts:
        return GroupFacts(name, name, size, size, mergeable=mergeable, reduces_with=mergeable)

    groups = {
        each.name: each
        for each in (
            group("a", 4),
            group("b", 4),
            group("c", 4),
            group("other dtype", 1, "fp32 0"),
            group("alone", 1, None),
            group("replicated", 0),
            group("d", 9),
            group("e", 1),
        )
    }

    def runs(policy: Policy) -> list[str]:
        gathered = joined(list(groups), groups, policy)
        assert joined_reductions(list(groups), groups, policy) == gathered
        return ["+".join(run) for run in gathered]

    tail = ["other dtype", "alone", "replicated", "d+e"]
    assert runs(Policy(merge_below=10)) == ["a+b", "c", *tail]
    assert runs(Policy(merge_below=12)) == ["a+b+c", *tail]
    assert runs(Policy(merge_below=0)) == list(groups)
    assert runs(Policy(merge_below=None)) == list(groups), "no ranks, no latency to save"


@pytest.mark.parametrize("layout", [ShardLayout.PADDED, ShardLayout.PACKED])
@pytest.mark.parametrize("mesh_shape", [(2,), (1, 2)])
@distributed(2)
def test_merging_changes_no_bit(layout: ShardLayout, mesh_shape: tuple[int, ...]) -> None:
    model = LanguageModel(blocks=3)
    batches = language_batches(2, 2)
    mesh = init_device_mesh(
        "cpu", mesh_shape, mesh_dim_names=("outer", "inner")[-len(mesh_shape) :]
    )
    runs = []
    for options in ({"reshard_after_forward": True}, MERGED):
        sharded = shard_blocks(copy.deepcopy(model), mesh, shard_layout=layout)
        call = drive(sharded, "aot_eager", **options)
        runs.append(train(sharded, batches, call=call))
    assert_same(*runs)


def labels_of_a_step(inner: str, kind: str = "all_gather", **options: Any) -> list[str]:
    sharded = shard_blocks(LanguageModel(blocks=3))
    call = drive(sharded, inner, **options)
    batch = local_batch(language_batches(1, 2)[0])
    call(*batch).backward()
    sharded.zero_grad()
    with collectives.recorded() as records:
        call(*batch).backward()
    assert not any(group.is_unsharded for group in sharded._fsdp_unit.context.groups())
    return [record.label for record in records if record.kind == kind]


@distributed(2)
def test_gathers_are_counted_exactly() -> None:
    assert labels_of_a_step("aot_eager", **MERGED) == [
        "root+blocks.0+blocks.1+blocks.2",
        "root+blocks.2+blocks.1+blocks.0",
    ]
    assert labels_of_a_step("aot_eager", "reduce_scatter", **MERGED) == [
        "blocks.2+blocks.1+blocks.0+root"
    ]
    # What is kept is not gathered a second time.
    assert labels_of_a_step("aot_eager", merge_below="1MiB") == [
        "root+blocks.0+blocks.1+blocks.2",
        "blocks.1+blocks.0",
    ]


class Sparse(LanguageModel):
    """The first block has a matrix that gets no gradient, and a frozen norm."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.blocks[0].unused = torch.nn.Linear(3, 5)
        self.blocks[0].norm.requires_grad_(False)


def accumulated(**options: Any) -> Run:
    """HSDP, two steps of two microbatches; each block has a ``grad_scale`` of its own."""
    torch.manual_seed(3)
    model = Sparse()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for number, block in enumerate(model.blocks):
        fully_shard(block, mesh, grad_scale=0.5 + number, shard_layout=ShardLayout.PACKED)
    fully_shard(model, mesh, shard_layout=ShardLayout.PACKED)
    call = drive(model, "aot_eager", **options)
    batches = language_batches(4, dist.get_world_size())
    first = iter(batches[::2])

    def two_microbatches(*last: torch.Tensor) -> torch.Tensor:
        with microbatch(model, is_last=False):
            call(*local_batch(next(first))).backward()
        return call(*last)

    return train(model, batches[1::2], call=two_microbatches)


@distributed(4)
def test_merged_reductions_accumulate_as_separate_ones() -> None:
    separate = accumulated(reshard_after_forward=True)
    with collectives.recorded() as records:
        merged = accumulated(**MERGED)
    assert_same(merged, separate)
    assert merged.gradients[0]["blocks.0.unused.weight"] is None
    reduced = [record.label for record in records if record.kind == "reduce_scatter"]
    # Each backward reduces everything trainable at once; frozen norms take no part.
    assert len(reduced) == 4 and {label.count("+") for label in reduced} == {2}


def gradients_that_differ() -> str:
    """Rank 1's second block has no gradient: its merged reduction is another one."""
    model = shard_blocks(Skipping())
    call = drive(model, "aot_eager", **MERGED)
    try:
        call(torch.randn(2, 4), dist.get_rank()).backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


class Skipping(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = self.blocks[0](x)
        # Both ranks read the same weights, so they gather alike.
        bias = self.blocks[1].bias if rank == 0 else self.blocks[1].bias.detach()
        return F.linear(x, self.blocks[1].weight, bias).square().mean()


def test_the_error_of_ranks_that_differ_names_all_groups() -> None:
    for message in run(2, gradients_that_differ):
        assert "ranks 0 and 1 differ" in message
        assert "gradients of 'blocks.1': all 2 and gradients of 'blocks.0'" in message
        assert "gradients of 'blocks.1': all but" in message


@pytest.mark.slow
@distributed(2)
def test_inductor_keeps_the_order_of_what_was_gathered_together() -> None:
    torch.manual_seed(0)
    model = LanguageModel()
    batches = language_batches(1, 2)
    losses = []
    for options in ({}, MERGED):
        sharded = shard_blocks(copy.deepcopy(model))
        losses.append(train(sharded, batches, call=drive(sharded, "inductor", **options)))
    assert_same(*losses)
