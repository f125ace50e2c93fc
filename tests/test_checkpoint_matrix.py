"""Whatever saved a checkpoint, whatever loads it: modes, layouts, numbers of ranks, optimizers.

All combinations would be some thousands. `PAIRS` are few in which every two choices meet: each
mode that saves with each mode that loads, with each layout, with each number of ranks, and so on.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from compile_fsdp import (
    BlockAtomic,
    Placements,
    ShardLayout,
    TensorAtomic,
    async_save_checkpoint,
    fully_shard,
    load_checkpoint,
    save_checkpoint,
)
from tests.checkpointing import Values, adamw, assert_equal, values_of, zoo
from tests.distributed import run

ONE_AXIS = ("ddp", "zero1", "zero2", "zero3")
TWO_AXES = ("hsdp", "hfsdp")
MODES = (*ONE_AXIS, *TWO_AXES)
LAYOUTS = ("padded", "packed", "blocks", "whole")
RANKS = (1, 2, 3, 4)
OPTIMIZERS = ("adamw", "sgd")


@dataclasses.dataclass(frozen=True)
class World:
    """How a model is sharded."""

    mode: str
    layout: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.mode}-{self.layout}-{self.ranks}"

    @property
    def is_legal(self) -> bool:
        return not (self.layout == "whole" and self.mode in TWO_AXES)

    def shard(self, model: nn.Module) -> nn.Module:
        outer = 2 if self.ranks % 2 == 0 else 1
        shape, names = (self.ranks,), ("dp",)
        if self.mode in TWO_AXES:
            shape, names = (outer, self.ranks // outer), ("dp_outer", "dp_inner")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        placements = getattr(Placements, self.mode)(mesh)
        options: dict[str, Any] = {}
        if self.layout == "packed":
            options["shard_layout"] = ShardLayout.PACKED
        elif self.layout == "blocks":
            placements = with_shards(placements, BlockAtomic(2))
        elif self.layout == "whole":
            placements = with_shards(placements, TensorAtomic())
            owners = itertools.cycle(reversed(range(self.ranks)))
            options["parameter_to_owner"] = dict(zip(model.parameters(), owners, strict=False))
        for layer in model.get_submodule("layers").children():
            fully_shard(layer, mesh, placements, **options)
        fully_shard(model, mesh, placements, **options)
        return model


def with_shards(placements: Placements, shard: Shard) -> Placements:
    """``placements`` with ``shard`` for every ``Shard(0)``."""

    def exchanged(each: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(shard if isinstance(one, Shard) else one for one in each)

    return Placements(
        placements.dp_axes,
        exchanged(placements.parameter),
        exchanged(placements.gradient),
        exchanged(placements.optimizer),
    )


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "adamw":
        return adamw(model)
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterator[int] | range
) -> list[torch.Tensor]:
    """The losses, on this rank, of these steps of one run."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        loss = model(torch.randint(7, (2, 4), generator=generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


# Pairs ------------------------------------------------------------------------------------------


def pairwise() -> list[tuple[World, World, str]]:
    """Who saves, who loads, and the optimizer: greedily, until every two choices have met.

    Each mode saves twice, so that there are few checkpoints to write.
    """
    layouts = itertools.cycle(LAYOUTS)
    sources = []
    for number, mode in enumerate((*MODES, *MODES)):
        source = World(mode, next(layouts), RANKS[(number + number // 4) % 4])
        if not source.is_legal:
            source = dataclasses.replace(source, layout="packed")
        sources.append((source, OPTIMIZERS[number // 6]))
    targets = [World(*each) for each in itertools.product(MODES, LAYOUTS, RANKS)]
    candidates = [
        (source, target, kind) for source, kind in sources for target in targets if target.is_legal
    ]
    open_meetings = set().union(*map(meetings, candidates))
    pairs = []
    while open_meetings:
        best = max(candidates, key=lambda pair: len(meetings(pair) & open_meetings))
        open_meetings -= meetings(best)
        pairs.append(best)
    return pairs


def meetings(pair: tuple[World, World, str]) -> set[tuple[tuple[str, object], ...]]:
    """The pairs of choices that meet in one pair of worlds, but not those within one world."""
    source, target, kind = pair
    saving = [(f"saving {name}", value) for name, value in dataclasses.asdict(source).items()]
    loading = [(f"loading {name}", value) for name, value in dataclasses.asdict(target).items()]
    both = set(itertools.product(saving, loading))
    return both | {(choice, ("optimizer", kind)) for choice in loading}


PAIRS = pairwise()
SOURCES = sorted({(source, kind) for source, _, kind in PAIRS}, key=str)


def test_the_pairs_are_few_and_enough() -> None:
    met = set().union(*map(meetings, PAIRS))
    for names in (MODES, LAYOUTS, RANKS):
        field = {MODES: "mode", LAYOUTS: "layout", RANKS: "ranks"}[names]
        for one, other in itertools.product(names, names):
            assert ((f"saving {field}", one), (f"loading {field}", other)) in met
    assert len(PAIRS) < 50 and len(SOURCES) <= 12


def save_all(folder: Path) -> dict[str, Values]:
    """What the sources of this number of ranks save."""
    saved = {}
    for source, kind in SOURCES:
        if source.ranks == dist.get_world_size():
            model = source.shard(zoo())
            optimizer = make_optimizer(kind, model)
            train(model, optimizer, range(2))
            save_checkpoint(model, optimizer, folder / f"{source}-{kind}")
            dcp_save(model.state_dict(), checkpoint_id=folder / f"{source}-dcp")
            saved[f"{source}-{kind}"] = values_of(model, optimizer)
    return saved


def load_all(folder: Path) -> dict[int, tuple[Values, Values]]:
    """What this number of ranks loads, by number of the pair: of ours, and of plain DCP."""
    loaded = {}
    for number, (source, target, kind) in enumerate(PAIRS):
        if target.ranks == dist.get_world_size():
            model = target.shard(zoo(seed=1))
            optimizer = make_optimizer(kind, model)
            if number % 2:
                train(model, optimizer, range(1))
            load_checkpoint(model, optimizer, folder / f"{source}-{kind}")
            values = values_of(model, optimizer)
            other = target.shard(zoo(seed=2))
            state = other.state_dict()
            dcp_load(state, checkpoint_id=folder / f"{source}-dcp")
            other.load_state_dict(state)
            loaded[number] = (values, values_of(other))
    return loaded


def test_every_world_loads_what_every_other_saved(tmp_path: Path) -> None:
    saved: dict[str, Values] = {}
    for ranks in RANKS:
        saved.update(run(ranks, save_all, tmp_path)[0])
    checked = 0
    for ranks in RANKS:
        for number, (ours, plain) in run(ranks, load_all, tmp_path)[-1].items():
            source, target, kind = PAIRS[number]
            expected = saved[f"{source}-{kind}"]
            try:
                assert_equal(ours, expected)
                assert_equal(plain, {name: expected[name] for name in plain})
            except AssertionError as error:
                raise AssertionError(f"{source} into {target} with {kind}: {error}") from error
            assert any(name.endswith("/exp_avg") for name in ours) is (kind == "adamw")
            checked += 1
    assert checked == len(PAIRS)


# By torch.distributed.checkpoint alone ----------------------------------------------------------


def trained_zoo(seed: int) -> nn.Module:
    """Without the parameter that gets no gradient: torch's functions make state for all."""
    model = zoo(seed=seed)
    del model.unused
    return model


def exchange_by_dcp(folder: Path, world: World, kind: str, saves: bool) -> Values:
    """What ``get_state_dict`` gives goes to disk, and what comes from there to its counterpart."""
    model = world.shard(trained_zoo(0 if saves else 1))
    optimizer = make_optimizer(kind, model)
    if saves:
        train(model, optimizer, range(2))
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    if saves:
        dcp_save(state, checkpoint_id=folder)
    else:
        dcp_load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    return values_of(model, optimizer)


@pytest.mark.compat
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_torch_own_state_dict_functions_exchange_optimizer_state(kind: str, tmp_path: Path) -> None:
    source = World("zero3", "packed", 3)
    expected = run(3, exchange_by_dcp, tmp_path / "c", source, kind, True)[0]
    for target in (World("zero1", "blocks", 2), World("hsdp", "padded", 4)):
        for found in run(target.ranks, exchange_by_dcp, tmp_path / "c", target, kind, False):
            assert_equal(found, expected)


# Going on ---------------------------------------------------------------------------------------


def change_worlds(folder: Path, worlds: list[World]) -> list[str]:
    """Each world resumes what the one before it saved in the middle of its run."""
    wrong = []
    for number, (before, after) in enumerate(itertools.pairwise(worlds)):
        kind = OPTIMIZERS[number % 2]
        model = before.shard(zoo())
        optimizer = make_optimizer(kind, model)
        train(model, optimizer, range(2))
        pending = async_save_checkpoint(model, optimizer, folder)
        expected = train(model, optimizer, range(2, 5))
        pending.result()

        model = after.shard(zoo(seed=1))
        optimizer = make_optimizer(kind, model)
        load_checkpoint(model, optimizer, folder)
        found = train(model, optimizer, range(2, 5))
        if not all(map(torch.equal, found, expected)):
            wrong.append(f"{before} to {after} with {kind}: {found} against {expected}")
    return wrong


def test_a_run_goes_on_in_any_mode_and_layout_bitwise(tmp_path: Path) -> None:
    """On 2 ranks, where a sum has one order, whichever collective makes it."""
    every = [World(mode, layout, 2) for mode in MODES for layout in LAYOUTS]
    worlds = [world for world in every if world.is_legal]
    # An order in which neighbours differ in both.
    worlds = worlds[::5] + worlds[1::5] + worlds[2::5] + worlds[3::5] + worlds[4::5]
    for wrong in run(2, change_worlds, tmp_path / "c", worlds):
        assert not wrong


@pytest.mark.parametrize("ranks", [3, 4])
def test_a_run_goes_on_in_the_same_world_bitwise(ranks: int, tmp_path: Path) -> None:
    for mode, layout in (("zero3", "packed"), ("hsdp", "blocks"), ("hfsdp", "padded")):
        worlds = [World(mode, layout, ranks)] * 2
        for wrong in run(ranks, change_worlds, tmp_path / mode, worlds):
            assert not wrong
