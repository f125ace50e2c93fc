"""Shard a model as a plan asks: its blocks, then the root."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from compile_fsdp.runtime.mixed_precision import MixedPrecisionPolicy
from compile_fsdp.runtime.placement import Placements

from ..fully_shard import fully_shard
from ..module import FsdpModule
from .errors import PlanError
from .workload import Built

MODES: dict[str, tuple[int, Callable[[DeviceMesh], Placements]]] = {
    "ddp": (1, Placements.ddp),
    "zero1": (1, Placements.zero1),
    "zero2": (1, Placements.zero2),
    "zero3": (1, Placements.zero3),
    "hsdp": (2, Placements.hsdp),
    "hfsdp": (2, Placements.hfsdp),
}
"""Axes of the mesh, and the placements on it, by mode."""


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded.

    Attributes:
        mode: one of `MODES`.
        checkpoints: recompute each block in backward instead of keeping its activations.
        dtype: of the parameters; None: as they are.
        main_grads_dtype: dtype in which gradients accumulate; None: the parameters'.
    """

    mode: str
    checkpoints: bool = False
    dtype: torch.dtype | None = None
    main_grads_dtype: torch.dtype | None = None

    @property
    def axes(self) -> int:
        """Axes of the mesh that the mode wants."""
        return MODES[self.mode][0]


def shard(built: Built, mesh: DeviceMesh, how: Sharding) -> tuple[str, ...]:
    """Shard ``built.model`` in place, unless it is sharded already.

    Returns:
        Names of the sharded modules below the root.

    Raises:
        PlanError: nothing can be sharded.
    """
    model = built.model
    own = tuple(
        name for name, each in model.named_modules() if name and isinstance(each, FsdpModule)
    )
    if own or isinstance(model, FsdpModule):
        if how.checkpoints:
            _checkpoint(model, own)
        return own
    if how.dtype is not None:
        model.to(how.dtype)
    blocks = largest_list(model) if built.blocks is None else built.blocks
    if how.checkpoints:
        if not blocks:
            raise PlanError(
                "--activation-checkpointing: the model has no blocks (no nn.ModuleList with "
                "parameters) to recompute one by one; checkpoint in the model itself"
            )
        _checkpoint(model, blocks)
    placements = MODES[how.mode][1](mesh)
    policy = MixedPrecisionPolicy(main_grads_dtype=how.main_grads_dtype)
    try:
        for name in (*blocks, ""):
            fully_shard(model.get_submodule(name), mesh, placements, policy)
    except (ValueError, NotImplementedError) as error:
        raise PlanError(f"the model cannot be sharded: {error}") from error
    return blocks


def largest_list(model: nn.Module) -> tuple[str, ...]:
    """Names of the elements of the ``nn.ModuleList`` (or ``nn.Sequential``) with most parameters
    that is not inside of another one; none when there is no such list."""
    found: dict[str, tuple[int, nn.Module]] = {}
    for name, module in model.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList | nn.Sequential) and not inside:
            found[name] = (sum(each.numel() for each in module.parameters()), module)
    name, (size, module) = max(
        found.items(), key=lambda item: item[1][0], default=("", (0, nn.ModuleList()))
    )
    prefix = f"{name}." if name else ""
    return tuple(
        f"{prefix}{child}"
        for child, block in module.named_children()
        if size and any(True for _ in block.parameters())
    )


def _checkpoint(model: nn.Module, names: tuple[str, ...]) -> None:
    for name in names:
        block = model.get_submodule(name)
        recomputed = functools.partial(checkpoint, block.forward, use_reentrant=False)
        block.forward = recomputed
