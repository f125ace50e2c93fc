"""save_checkpoint and load_checkpoint on real ranks: values, names, other worlds."""

from __future__ import annotations

from pathlib import Path

import pytest

from compile_fsdp import (
    load_checkpoint,
    save_checkpoint,
)
from tests.checkpointing import (
    Values,
    adamw,
    assert_equal,
    shard,
    take_steps,
    values_of,
    zoo,
)
from tests.distributed import run


def save_after_steps(folder: Path, mode: str = "zero3") -> Values:
    model = shard(zoo(), mode)
    optimizer = adamw(model)
    take_steps(model, optimizer, 0, 2)
    save_checkpoint(model, optimizer, folder)
    return values_of(model, optimizer)


def load_all(folders: list[Path], mode: str = "zero3") -> list[Values]:
    """Each checkpoint in a model of other values, with an optimizer that never stepped."""
    results = []
    for folder in folders:
        model = shard(zoo(seed=1), mode)
        optimizer = adamw(model)
        load_checkpoint(model, optimizer, folder)
        results.append(values_of(model, optimizer))
    return results


@pytest.mark.compat
def test_any_number_of_ranks_loads_what_any_other_saved(tmp_path: Path) -> None:
    folders = [tmp_path / str(ranks) for ranks in (1, 2, 3, 4)]
    saved = [run(int(folder.name), save_after_steps, folder)[0] for folder in folders]
    for ranks in (1, 2, 3, 4):
        for loaded in run(ranks, load_all, folders):
            for found, expected in zip(loaded, saved, strict=True):
                assert_equal(found, expected)
