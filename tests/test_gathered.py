"""Full parameters may be in two places at once: their own, and one in the arena."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compile_fsdp.runtime import collectives
from compile_fsdp.runtime.arena import Place
from compile_fsdp.runtime.parameter_group import FsdpParameterGroup
from tests.distributed import distributed
from tests.models import LanguageModel, language_batches
from tests.training import local_batch, shard_blocks


def a_block() -> tuple[nn.Module, FsdpParameterGroup]:
    """A sharded model, to be kept alive, and one of its groups."""
    sharded = shard_blocks(LanguageModel())
    with torch.no_grad():
        sharded(*local_batch(language_batches(1, 2)[0]))  # gives the groups their root's context
    group: FsdpParameterGroup = sharded.blocks[0]._fsdp_unit.groups[0]
    group.context.memory.is_static = True
    return sharded, group


@distributed(2)
def test_two_places_are_held_and_released_each_by_itself() -> None:
    _model, group = a_block()
    arena = group.context.memory.arena
    placed = group.acquire(place=Place(256, 1 << 14))
    group.wait_for_unshard(full=placed)
    assert arena.taken and group.is_held and not group.is_readable
    with collectives.recorded() as records:
        own = group.acquire()
        group.wait_for_unshard()
    assert not records, "what is there is copied, not gathered again"
    assert own is group.full_local_tensor
    # By bits: between tensors there is what was in memory before, which may be NaN.
    assert torch.equal(own.view(torch.int32), placed.view(torch.int32))
    assert own.data_ptr() != placed.data_ptr()
    group.drop(placed)
    assert not arena.taken and group.is_readable and own.untyped_storage().nbytes()
    again = group.acquire(place=Place(256, 1 << 14))
    assert again is own, "what is there is not gathered again"
    group.drop(again)
    group.drop()
    assert not group.is_unsharded and not own.untyped_storage().nbytes()
    with pytest.raises(RuntimeError, match="released more often"):
        group.drop(placed)


@distributed(2)
def test_what_was_prefetched_for_a_graph_serves_eager_code() -> None:
    _model, group = a_block()
    arena = group.context.memory.arena
    group.drop(group.acquire(place=Place(0, 1 << 14)))
    group.prefetch()
    assert arena.taken, "where a graph wanted it the last time"
    with collectives.recorded() as records:
        group.acquire()
    assert not records and not arena.taken
    group.drop()
    group.prefetch()
    assert not arena.taken, "eager code wanted it the last time"
    group.reshard_parameters()
    assert not group.is_unsharded


@distributed(2)
def test_what_was_kept_for_a_backward_serves_no_forward() -> None:
    _model, group = a_block()
    arena = group.context.memory.arena
    for place in (None, Place(0, 1 << 14)):
        group.keep(group.acquire(place=Place(0, 1 << 14)))
        assert group.is_kept and arena.taken
        with collectives.recorded() as records:
            full = group.acquire(place=place)
        assert len(records) == 1 and not group.is_kept
        assert bool(arena.taken) is (place is not None)
        group.drop(full)
    assert not group.is_unsharded and not arena.taken
