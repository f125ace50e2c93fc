"""Activation checkpointing: the same gradients, and gathers counted exactly (case 20)."""

from __future__ import annotations

import copy
import functools
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from compile_fsdp.runtime import collectives
from tests.distributed import distributed
from tests.models import LanguageModel, language_batches
from tests.training import (
    assert_close,
    drive,
    local_batch,
    shard_blocks,
    train,
    train_reference,
)


class Checkpointed(LanguageModel):
    """Every block is recomputed in backward."""

    options: ClassVar[dict[str, Any]] = {"use_reentrant": False}

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, **self.options)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Reentrant(Checkpointed):
    options: ClassVar[dict[str, Any]] = {"use_reentrant": True}


class Selective(Checkpointed):
    """Everything but the results of matmuls is recomputed."""

    options: ClassVar[dict[str, Any]] = {
        "use_reentrant": False,
        "context_fn": functools.partial(
            create_selective_checkpoint_contexts,
            [torch.ops.aten.mm.default, torch.ops.aten.addmm.default],
        ),
    }


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@pytest.mark.parametrize("make", [Checkpointed, Reentrant, Selective])
@distributed(2)
def test_recomputation_gives_the_same_gradients(make: type[LanguageModel], driver: str) -> None:
    model = make()
    batches = language_batches(3, 2)
    sharded = shard_blocks(copy.deepcopy(model))
    call = drive(sharded, driver)
    assert_close(train(sharded, batches, call=call), train_reference(model, batches))
    assert not any(group.is_unsharded for group in sharded._fsdp_unit.context.groups())


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@pytest.mark.parametrize("make", [Checkpointed, Reentrant, Selective])
@distributed(2)
def test_recomputation_costs_no_gather_of_its_own(make: type[LanguageModel], driver: str) -> None:
    """One gather in forward; recomputation and backward share the second one. A compiled model
    keeps its last block."""
    sharded = shard_blocks(make())
    call = drive(sharded, driver)
    batch = local_batch(language_batches(1, 2)[0])
    call(*batch).backward()
    sharded.zero_grad()
    with collectives.recorded() as records:
        call(*batch).backward()
    for label in ("blocks.0", "blocks.1"):
        kinds = [record.kind for record in records if record.label == label]
        kept = driver == "aot_eager" and label == "blocks.1"
        assert kinds.count("all_gather") == (1 if kept else 2), (label, kinds)
        assert kinds.count("reduce_scatter") == 1, (label, kinds)
