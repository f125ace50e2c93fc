"""Several small groups, one collective.

A collective takes its time however little it moves, so small groups are gathered together. Their
shards are copied into one buffer, and what comes back is dealt out:

    rank 0   a0 b0                                       full a   a0 a1
                    \\                                   /
                      all-gather   a0 b0 | a1 b1  deal
                    /                                   \\
    rank 1   a1 b1                                       full b   b0 b1
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import collectives
from .agreement import Label
from .streams import Lane
from .unsharding import Unsharding


def gather_together(lane: Lane, groups: Sequence[tuple[str, Unsharding]]) -> None:
    """Start gathering on ``lane`` what is not there of ``groups``, given with their labels.

    They have equal dtypes and are cut over the same ranks. Those whose shards are being refreshed
    on the lane, or are cut over several axes, are gathered one by one.
    """
    with torch.inference_mode(False), torch.no_grad():
        missing = [(label, each, each.missing(lane, label)) for label, each in groups]
        waiting = [(label, each) for label, each, (needed, _) in missing if needed]
        plain = all(
            len(each.weights.gathered_axes) == 1 and not refreshing
            for _, each, (needed, refreshing) in missing
            if needed
        )
        if plain and len(waiting) > 1:
            _gather_staged(lane, waiting)
            return
        for label, each, (needed, refreshing) in missing:
            if needed:
                each.gather(lane, label, depends=refreshing)


def _gather_staged(lane: Lane, groups: Sequence[tuple[str, Unsharding]]) -> None:
    weights = [each.weights for _, each in groups]
    first = weights[0].model
    (axis,) = weights[0].gathered_axes
    ranks = range(first.mesh.size(axis))
    cuts = [[each.model.layout.segment(rank, len(ranks)) for rank in ranks] for each in weights]
    sizes = [sum(stop - start for start, stop in (cut[rank] for cut in cuts)) for rank in ranks]
    with lane.allocating():
        for each in weights:
            each.full.reallocate_storage()
        sent = torch.cat([each.model.local for each in weights])
        staged = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
    labels = [label for label, _ in groups]
    subjects = [getattr(label, "subject", label) for label in labels]
    label = Label("+".join(labels), " and ".join(subjects))
    collectives.all_gather(lane, staged, sent, first.mesh.get_group(axis), sizes, label=label)
    parts = [
        each.full.local[slice(*cut[rank])]
        for rank in ranks
        for each, cut in zip(weights, cuts, strict=True)
    ]

    def deal() -> None:
        with torch.inference_mode(False), torch.no_grad():
            received = staged.split([part.numel() for part in parts])
            for part, values in zip(parts, received, strict=True):
                part.copy_(values)

    lane.then(deal)
    for _, unsharding in groups:
        unsharding.note_gathered(lane)
