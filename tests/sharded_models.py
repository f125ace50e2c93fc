"""A small model under every way of sharding: mode, layout and mesh."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from compile_fsdp import BlockAtomic, Placements, ShardLayout, TensorAtomic, fully_shard

WIDTH = 6

# Name -> number of ranks, mesh shape, options of `fully_shard`.
WAYS: dict[str, tuple[int, tuple[int, ...], dict[str, Any]]] = {
    "padded": (2, (2,), {}),
    "packed": (2, (2,), {"shard_layout": ShardLayout.PACKED}),
    "blocks": (2, (2,), {"atomic": BlockAtomic(4)}),
    "tensors": (2, (2,), {"atomic": TensorAtomic()}),
    "zero2": (2, (2,), {"mode": "zero2"}),
    "many ranks": (4, (4,), {"shard_layout": ShardLayout.PACKED}),
    "hsdp": (4, (2, 2), {"mode": "hsdp", "shard_layout": ShardLayout.PACKED}),
    "hfsdp": (4, (2, 2), {"mode": "hfsdp", "shard_layout": ShardLayout.PACKED}),
}


class Odd(nn.Module):
    """Parameters of shapes that are cut unevenly, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 5)
        self.norm = nn.LayerNorm(5)
        self.down = nn.Linear(5, 3 * WIDTH, bias=False)
        self.row = nn.Parameter(torch.randn(1, WIDTH))
        self.one = nn.Parameter(torch.randn(1))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(F.gelu(self.up(x + self.row)))
        return (self.down(hidden) * self.scale + self.one).square().mean()


def batches(count: int, scale: float = 1.0) -> list[list[torch.Tensor]]:
    """``count`` global batches of 8 rows, the same on every rank."""
    generator = torch.Generator().manual_seed(11)
    return [[scale * torch.randn(8, WIDTH, generator=generator)] for _ in range(count)]


def shard_as(way: str, model: nn.Module) -> nn.Module:
    """``model``, sharded in place as `WAYS` says."""
    ranks, shape, options = WAYS[way]
    assert dist.get_world_size() == ranks
    options = dict(options)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
    mode, atomic = options.pop("mode", None), options.pop("atomic", None)
    placements = getattr(Placements, mode)(mesh) if mode else None
    if atomic is not None:
        placements = Placements(("inner",), *[(atomic,)] * 3)
    if isinstance(atomic, TensorAtomic):
        options["parameter_to_owner"] = {each: i % 2 for i, each in enumerate(model.parameters())}
    fully_shard(model, mesh, placements, **options)
    return model


def pair(way: str) -> tuple[nn.Module, nn.Module]:
    """A model and its sharded copy."""
    model = Odd()
    return model, shard_as(way, copy.deepcopy(model))
