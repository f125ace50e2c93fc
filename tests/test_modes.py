"""Every row of the placement table, and every layout: the same numbers, the promised traffic.

``python -m pytest tests -k modes -q`` ends with a table of what was checked.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from compile_fsdp import Placements, ShardLayout, fully_shard
from compile_fsdp.runtime import collectives
from tests.conftest import ModeReport
from tests.distributed import distributed, run
from tests.models import LanguageModel, language_batches
from tests.modes import (
    INNER_ONLY,
    LAYOUTS,
    ONE_AXIS,
    OTHER_COMBINATIONS,
    OUTER_ONLY,
    TWO_AXES,
    Mode,
    check_mode,
    mesh_of,
    shard_model,
    train,
)
from tests.training import (
    TOLERANCE,
    assert_gradients_close,
    drive,
    full,
    local_batch,
)

BOTH, EAGER = ("eager", "aot_eager"), ("eager",)

Case = tuple[Mode, tuple[int, ...], str, tuple[str, ...]]


def cases() -> list[Case]:
    """Every row on its mesh in both drivers; other meshes and layouts mostly in eager."""
    chosen: list[Case] = []
    chosen += [(mode, (4,), "padded", BOTH) for mode in ONE_AXIS]
    chosen += [(mode, (2, 2), "padded", BOTH) for mode in TWO_AXES]
    chosen += [(mode, (2, 2), "padded", EAGER) for mode in OTHER_COMBINATIONS]
    for modes, shape in ((OUTER_ONLY, (2, 1)), (INNER_ONLY, (1, 2))):
        chosen += [
            (mode, shape, "padded", BOTH if mode.name == "HFSDP" else EAGER) for mode in modes
        ]
    for layout in list(LAYOUTS)[1:]:
        for mode in ONE_AXIS[1:]:
            chosen.append((mode, (2,), layout, BOTH if mode.name == "ZeRO-3" else EAGER))
    for layout in ("packed", "packed blocks of 4"):
        chosen += [(mode, (2, 2), layout, EAGER) for mode in TWO_AXES[3:]]
    return chosen


def name_of(case: Case) -> str:
    mode, shape, layout, _ = case
    return "-".join((mode.name, mode.placements, "x".join(map(str, shape)), layout))


@pytest.mark.parametrize("case", cases(), ids=name_of)
def test_mode(case: Case, mode_report: ModeReport) -> None:
    mode, shape, layout, drivers = case
    ranks = torch.Size(shape).numel()
    found = run(ranks, check_mode, mode, shape, layout, drivers)[0]
    for driver, difference, compilations in found:
        mode_report.add(mode, shape, layout, driver, difference, compilations)


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp"])
@distributed(4)
def test_named_placements_are_the_rows(name: str) -> None:
    """``Placements.ddp(mesh)`` and its like are what the rows above are made of."""
    rows = TWO_AXES[4:] if name.startswith("h") else ONE_AXIS
    mesh = mesh_of((2, 2) if name.startswith("h") else (4,))
    (row,) = [each for each in rows if each.name.replace("-", "").lower() == name]
    assert getattr(Placements, name)(mesh) == row.on(mesh, Shard(0))


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@distributed(4)
def test_packed_moves_no_padding(shape: tuple[int, ...]) -> None:
    """Rows of 12 and 20 elements do not go together: padded segments are larger than an equal
    share, packed ones are not, and differ."""
    mesh = mesh_of(shape)
    zero3 = (ONE_AXIS if len(shape) == 1 else TWO_AXES)[3]
    module = nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 28))
    payload = sum(parameter.numel() for parameter in module.parameters())
    kinds, moved = ("all_gather", "reduce_scatter"), {}
    for layout in ShardLayout:
        sharded = copy.deepcopy(module)
        fully_shard(sharded, mesh, zero3.on(mesh, Shard(0)), shard_layout=layout)
        with collectives.recorded() as records:
            sharded(torch.randn(2, 12)).sum().backward()
        moved[layout] = {kind: max(r.bytes for r in records if r.kind == kind) for kind in kinds}
        (group,) = sharded.fsdp_parameter_groups
        sizes = {stop - start for start, stop in map(group.layout.segment, range(4))}
        assert (len(sizes) == 1) == (layout is ShardLayout.PADDED)
    assert moved[ShardLayout.PACKED] == dict.fromkeys(kinds, 4 * payload)
    assert min(moved[ShardLayout.PADDED].values()) > 4 * payload


PARTIAL = (*ONE_AXIS[:2], *TWO_AXES[:2], *TWO_AXES[4:])


@pytest.mark.parametrize(
    ("driver", "mode"),
    [*(("eager", mode) for mode in PARTIAL), *(("aot_eager", mode) for mode in PARTIAL[1::4])],
    ids=lambda each: each if isinstance(each, str) else f"{each.name}-{each.placements}",
)
def test_backwards_without_microbatch_lose_nothing(driver: str, mode: Mode) -> None:
    """Several backwards under a partial gradient placement, each taken for the last."""
    shape = (2,) if len(mode.placements) == 5 else (2, 2)
    run(torch.Size(shape).numel(), accumulate_without_microbatch, driver, mode, shape)


def accumulate_without_microbatch(driver: str, mode: Mode, shape: tuple[int, ...]) -> None:
    mesh = mesh_of(shape)
    model = LanguageModel()
    sharded = copy.deepcopy(model)
    shard_model(sharded, mode.on(mesh, Shard(0)), mesh)
    call = drive(sharded, driver)
    for batch in language_batches(3, 4):
        call(*local_batch(batch)).backward()
        model(*batch).backward()
    assert_gradients_close(sharded, model)


@pytest.mark.parametrize("mode", ["ddp", "zero1"])
@distributed(2)
def test_a_dropped_gradient_does_not_come_back(mode: str) -> None:
    """Two optimizers, of which one zeroes its parameters' gradients between two backwards."""
    mesh = mesh_of((2,))
    model = LanguageModel()
    sharded = copy.deepcopy(model)
    shard_model(sharded, getattr(Placements, mode)(mesh), mesh)
    for batch in language_batches(2, 2):
        for each in (sharded, model):
            each.embedding._parameters["weight"].grad = None
        sharded(*local_batch(batch)).backward()
        model(*batch).backward()
    assert_gradients_close(sharded, model)


@distributed(2)
def test_zero1_with_one_block_compiled_below_an_eager_root() -> None:
    """Eager and compiled parts of one backward: every gradient is finished."""
    mesh = mesh_of((2,))
    model = LanguageModel()
    sharded = copy.deepcopy(model)
    shard_model(sharded, Placements.zero1(mesh), mesh)
    sharded.blocks[0].compile(backend="compile_fsdp", options={"inner": "aot_eager"})
    train(sharded, "eager")
    train(model, None)
    for found, expected in zip(sharded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(found), expected.detach(), **TOLERANCE)
    (batch,) = language_batches(1, 2)
    sharded(*local_batch(batch)).backward()
    for name, parameter in sharded.named_parameters():
        assert parameter.grad.placements == parameter.placements, name
