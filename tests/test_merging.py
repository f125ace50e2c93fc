"""Small groups that are gathered by one collective: the same bits, fewer collectives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from compile_fsdp import ShardLayout
from compile_fsdp.passes.facts import GroupFacts
from compile_fsdp.passes.merge import joined
from compile_fsdp.passes.policy import Policy
from compile_fsdp.runtime import collectives
from tests.distributed import distributed
from tests.models import LanguageModel, language_batches
from tests.training import assert_same, drive, local_batch, shard_blocks, train

MERGED = {"merge_below": "1MiB", "reshard_after_forward": True}


def test_neighbours_are_joined_below_the_limit() -> None:
    def group(name: str, size: int, mergeable: str | None = "bf16 0") -> GroupFacts:
        return GroupFacts(name, name, size, size, mergeable=mergeable)

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
        return ["+".join(run) for run in joined(list(groups), groups, policy)]

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


def labels_of_a_step(inner: str, **options: Any) -> list[str]:
    sharded = shard_blocks(LanguageModel(blocks=3))
    call = drive(sharded, inner, **options)
    batch = local_batch(language_batches(1, 2)[0])
    call(*batch).backward()
    sharded.zero_grad()
    with collectives.recorded() as records:
        call(*batch).backward()
    assert not any(group.is_unsharded for group in sharded._fsdp_unit.context.groups())
    return [record.label for record in records if record.kind == "all_gather"]


@distributed(2)
def test_gathers_are_counted_exactly() -> None:
    assert labels_of_a_step("aot_eager", **MERGED) == [
        "root+blocks.0+blocks.1+blocks.2",
        "root+blocks.2+blocks.1+blocks.0",
    ]
    # What is kept is not gathered a second time.
    assert labels_of_a_step("aot_eager", merge_below="1MiB") == [
        "root+blocks.0+blocks.1+blocks.2",
        "blocks.1+blocks.0",
    ]


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
