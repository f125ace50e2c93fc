"""How each system is set up: what its documentation tells a user to write, and nothing else.

FSDP2: https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html; for compilation block by
block https://github.com/pytorch/torchtitan (`Module.compile` on each block, then `fully_shard`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .workloads import Transformer


@dataclass(frozen=True)
class Training:
    """A model that is ready to be trained.

    Attributes:
        call: computes the loss of a batch.
        optimizer: of its parameters.
    """

    call: Callable[..., torch.Tensor]
    optimizer: torch.optim.Optimizer


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The same for all, and the fastest for each: torch's default loop over parameters costs FSDP2
    six times as much, and this project twice."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def mesh_of_all() -> DeviceMesh:
    """One axis over all ranks."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def unsharded(model: Transformer) -> Training:
    """No communication: this rank's batch, ``torch.compile``."""
    return Training(torch.compile(model), adamw(model))


def ddp(model: Transformer) -> Training:
    """Replicated weights."""
    from torch.nn.parallel import DistributedDataParallel

    replicated = DistributedDataParallel(model)
    return Training(torch.compile(replicated), adamw(replicated))


def _fsdp2(model: Transformer) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of_all()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def fsdp2_eager(model: Transformer) -> Training:
    """FSDP2's hooks, nothing compiled."""
    _fsdp2(model)
    return Training(model, adamw(model))


def fsdp2_prefetching(model: Transformer) -> Training:
    """Eager, with the tutorial's explicit prefetching, two blocks ahead in both directions."""
    from torch.distributed.fsdp import FSDPModule

    _fsdp2(model)
    blocks: list[FSDPModule] = [block for block in model.blocks if isinstance(block, FSDPModule)]
    for number, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 3])
        block.set_modules_to_backward_prefetch(blocks[max(number - 2, 0) : number][::-1])
    return Training(model, adamw(model))


def fsdp2_whole(model: Transformer) -> Training:
    """``torch.compile`` of the whole model."""
    _fsdp2(model)
    return Training(torch.compile(model), adamw(model))


def fsdp2_blocks(model: Transformer) -> Training:
    """Each block compiled, then sharded."""
    for block in model.blocks:
        block.compile()
    _fsdp2(model)
    return Training(model, adamw(model))


def compile_fsdp(model: Transformer, options: Mapping[str, Any] | None) -> Training:
    """This project; None: eager."""
    from compile_fsdp import fully_shard, fully_shard_optimizer

    mesh = mesh_of_all()
    for block in model.blocks:
        fully_shard(block, mesh)
    fully_shard(model, mesh)
    optimizer = adamw(model)
    fully_shard_optimizer(optimizer)
    if options is None:
        return Training(model, optimizer)
    compiled = torch.compile(model, backend="compile_fsdp", options=dict(options))
    return Training(compiled, optimizer)


def ours_default(model: Transformer) -> Training:
    """Default options."""
    return compile_fsdp(model, {})


def ours_unlimited(model: Transformer) -> Training:
    """Weights are kept between forward and backward."""
    return compile_fsdp(model, {"memory_budget": "unlimited"})


def ours_eager(model: Transformer) -> Training:
    """The eager driver."""
    return compile_fsdp(model, None)


CONTENDERS: Mapping[str, Callable[[Transformer], Training]] = {
    "unsharded": unsharded,
    "DDP + compile": ddp,
    "FSDP2 eager": fsdp2_eager,
    "FSDP2 eager, prefetching": fsdp2_prefetching,
    "FSDP2 + compile, whole": fsdp2_whole,
    "FSDP2 + compile, by block": fsdp2_blocks,
    "compile_fsdp": ours_default,
    "compile_fsdp, unlimited": ours_unlimited,
    "compile_fsdp, eager": ours_eager,
}
"""By the name that tables show."""

FSDP2 = tuple(name for name in CONTENDERS if name.startswith("FSDP2"))
"""The best of them is what targets call FSDP2."""
