"""The placement table as data, and a training run that checks one row of it.

A row's collectives are those of one block with one parameter group, by microbatch: the first of a
step that follows another, one in the middle, the last. AG is an all-gather, RS a reduce-scatter,
AR an all-reduce; over two mesh axes a buffer takes one of them for each axis.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from compile_fsdp import (
    BlockAtomic,
    Placements,
    ShardLayout,
    TensorAtomic,
    fully_shard,
    fully_shard_optimizer,
    microbatch,
)
from compile_fsdp.runtime import collectives
from tests.models import LanguageModel, language_batches
from tests.training import TOLERANCE, adamw, drive, full, gradients_of, local_batch

STEPS, MICROBATCHES = 2, 3
SHORT = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR"}


@dataclass(frozen=True)
class Mode:
    """A row of the table. ``placements``: parameter, gradient, optimizer, as letters R, S, A."""

    name: str
    placements: str
    first: str
    middle: str
    last: str

    def on(self, mesh: DeviceMesh, shard: Shard) -> Placements:
        """The row's placements on ``mesh``, with ``shard`` for each S."""
        letters: dict[str, Placement] = {"R": Replicate(), "S": shard, "A": Partial("avg")}
        parts = [tuple(letters[letter] for letter in part) for part in self.placements.split()]
        return Placements(mesh.mesh_dim_names, *parts)  # type: ignore[arg-type]


ONE_AXIS = (
    Mode("DDP", "R A R", "", "", "AR"),
    Mode("ZeRO-1", "R A S", "AG", "", "RS"),
    Mode("ZeRO-2", "R S S", "AG RS", "RS", "RS"),
    Mode("ZeRO-3", "S S S", "AG AG RS", "AG AG RS", "AG AG RS"),
)
TWO_AXES = (
    Mode("DDP", "RR AA RR", "", "", "AR AR"),
    Mode("ZeRO-1", "RR AA SS", "AG AG", "", "RS RS"),
    Mode("ZeRO-2", "RR SS SS", "AG AG RS RS", "RS RS", "RS RS"),
    Mode("ZeRO-3", "SS SS SS", *["AG AG AG AG RS RS"] * 3),
    Mode("HSDP", "RS AS RS", "AG AG RS", "AG AG RS", "AG AG AR RS"),
    Mode("HFSDP", "RS AS SS", "AG AG AG RS", "AG AG RS", "AG AG RS RS"),
)
OTHER_COMBINATIONS = (
    Mode("no name", "RR AA RS", "AG", "", "AR RS"),
    Mode("no name", "RR AS RS", "AG RS", "RS", "AR RS"),
    Mode("no name", "RR AS SS", "AG AG RS", "RS", "RS RS"),
    Mode("no name", "RS AA RS", "AG AG", "AG AG", "AG AG AR RS"),
    Mode("no name", "RS AA SS", "AG AG AG", "AG AG", "AG AG RS RS"),
    Mode("no name", "RS SS SS", "AG AG AG RS RS", "AG AG RS RS", "AG AG RS RS"),
    Mode("no name", "SS AA SS", "AG AG AG AG", "AG AG AG AG", "AG AG AG AG RS RS"),
    Mode("no name", "SS AS SS", "AG AG AG AG RS", "AG AG AG AG RS", "AG AG AG AG RS RS"),
)
# On an axis of one rank nothing is sent: what is left on (2, 1) and on (1, 2).
OUTER_ONLY = (
    Mode("DDP", "RR AA RR", "", "", "AR"),
    Mode("ZeRO-1", "RR AA SS", "AG", "", "RS"),
    Mode("ZeRO-2", "RR SS SS", "AG RS", "RS", "RS"),
    Mode("ZeRO-3", "SS SS SS", *["AG AG RS"] * 3),
    Mode("HSDP", "RS AS RS", "", "", "AR"),
    Mode("HFSDP", "RS AS SS", "AG", "", "RS"),
)
INNER_ONLY = (
    *OUTER_ONLY[:4],
    Mode("HSDP", "RS AS RS", *["AG AG RS"] * 3),
    Mode("HFSDP", "RS AS SS", *["AG AG RS"] * 3),
)

LAYOUTS: dict[str, tuple[Shard, ShardLayout]] = {
    "padded": (Shard(0), ShardLayout.PADDED),
    "packed": (Shard(0), ShardLayout.PACKED),
    "blocks of 4 rows": (BlockAtomic(4), ShardLayout.PADDED),
    "packed blocks of 4": (BlockAtomic(4), ShardLayout.PACKED),
    "whole tensors": (TensorAtomic(), ShardLayout.PADDED),
}


@dataclass
class Result:
    """What one driver did: numbers for the comparison and the report."""

    difference: float = 0.0
    compilations: int = 0
    collectives: list[str] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """A CPU mesh whose last axes are named dp_outer and dp_inner."""
    names = ("dp_outer", "dp_inner")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def shard_model(
    model: LanguageModel, placements: Placements | None, mesh: DeviceMesh, **options: Any
) -> None:
    """Shard every block, then the rest."""
    for block in model.blocks:
        fully_shard(block, mesh, placements, **options)
    fully_shard(model, mesh, placements, **options)


def check_mode(
    mode: Mode, shape: tuple[int, ...], layout: str, drivers: tuple[str, ...]
) -> list[tuple[str, float, int]]:
    """Train by one row in each driver: right numbers, the promised collectives, one graph.

    Runs on every rank. Returns (driver, difference from one process, compiled graphs).
    """
    model = LanguageModel()
    shard, shard_layout = LAYOUTS[layout]
    results = {}
    for driver in drivers:
        sharded = copy.deepcopy(model)
        owners = None
        if isinstance(shard, TensorAtomic):
            owners = {each: i % shape[0] for i, each in enumerate(sharded.parameters())}
        mesh = mesh_of(shape)
        options = {"shard_layout": shard_layout, "parameter_to_owner": owners}
        shard_model(sharded, mode.on(mesh, shard), mesh, **options)
        results[driver] = train(sharded, driver)
    reference = train(model, None)
    for driver, result in results.items():
        for number, (found, wanted) in enumerate(zip(result.values, reference.values, strict=True)):
            what = f"{driver}, value {number} of gradients and parameters: "
            torch.testing.assert_close(
                found, wanted, **TOLERANCE, msg=lambda text, what=what: what + text
            )
            scale = wanted.abs().max().clamp(min=1e-3)
            difference = float((found - wanted).abs().max() / scale)
            result.difference = max(result.difference, difference)
        expected = [mode.first, mode.middle, mode.last]
        # Nobody knows whether the weights were written between sharding and the first step.
        assert result.collectives[MICROBATCHES:] == expected, (driver, result.collectives)
        assert result.compilations == (driver != "eager"), "one graph serves all microbatches"
        for found, wanted in zip(result.values, results[drivers[0]].values, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    return [(driver, each.difference, each.compilations) for driver, each in results.items()]


def train(model: LanguageModel, driver: str | None) -> Result:
    """Some steps of some microbatches; ``driver`` None: on the whole batches in one process.

    ``values`` are the gradients of each step and the final parameters; ``collectives`` those of
    the first block in each microbatch.
    """
    result = Result()
    optimizer = adamw(model)
    if driver is not None:
        fully_shard_optimizer(optimizer)
    call: Callable[..., Any] = model if driver is None else drive(model, driver)
    counters.clear()
    for _ in range(STEPS):
        for number, batch in enumerate(language_batches(MICROBATCHES, 4)):
            if driver is None:
                call(*batch).backward()
                continue
            is_last = number == MICROBATCHES - 1
            with collectives.recorded() as records, microbatch(model, is_last):
                call(*local_batch(batch)).backward()
            kinds = sorted(SHORT[each.kind] for each in records if each.label == "blocks.0")
            result.collectives.append(" ".join(kinds))
        result.values += [each for each in gradients_of(model).values() if each is not None]
        optimizer.step()
        optimizer.zero_grad()
    result.compilations = counters["stats"]["unique_graphs"]
    result.values += [full(parameter) for parameter in model.parameters()]
    return result
