"""When planes of MXFP8 weights are there: gathered for who reads them, and let go of behind him."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from compile_fsdp.runtime.collectives import recorded
from tests.distributed import distributed
from tests.quantized import (
    Block,
    Model,
    assert_nothing_left,
    batches,
    gathered,
    pair,
    shard,
)


class PartsCalled(Model):
    """No block is called itself: what it holds is gathered when it is read."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block.down(F.gelu(block.up(block.norm(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


@distributed(2)
def test_what_is_gathered_when_it_is_read() -> None:
    both = pair(make=PartsCalled)
    with recorded() as forward:
        loss = both.model(batches(1)[0])
    assert_nothing_left(both.model)
    with recorded() as backward:
        loss.backward()
    assert gathered(forward, "columnwise") == gathered(backward, "rowwise") == 0
    assert gathered(forward, "rowwise") == gathered(backward, "columnwise") > 0
    both.optimizer.zero_grad()
    both.train(batches(2))
    assert_nothing_left(both.model)


class Watched(Block):
    """Notes in its backward which planes of ``blocks`` are there. ``part``: recomputes a part of
    itself, and is not recomputed as a whole."""

    part: bool
    blocks: list[Watched]
    noted: list[list[bool]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        if self.part:
            return x + checkpoint(self.feed_forward, hidden, use_reentrant=False)
        return x + self.feed_forward(hidden)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.up(x))
        if hidden.requires_grad:
            hidden.register_hook(self.note)
        return self.down(hidden)

    def note(self, _: torch.Tensor) -> None:
        groups = [group for block in self.blocks for group in block.fsdp_parameter_groups]
        self.noted += [[each.is_unsharded for each in group.planes] for group in groups]


@pytest.mark.parametrize("part", [False, True])
@distributed(2)
def test_planes_leave_when_nobody_reads_them_any_more(part: bool) -> None:
    model = Model(recompute=not part)
    noted: list[list[bool]] = []
    for block in model.blocks:
        block.__class__ = Watched
        block.part, block.blocks, block.noted = part, [model.blocks[1]], noted
    shard(model)
    model(batches(1)[0]).backward()
    within, behind = (each for each in noted if each)
    assert within == [part, True], "rowwise planes serve the recomputation alone"
    assert behind == [False, False]
