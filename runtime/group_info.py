"""What a compiler pass may know about a parameter group: plain, immutable data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .parameter_group import FsdpParameterGroup


@dataclass(frozen=True)
class GroupInfo:
    """A parameter group without its storage.

    The op fakes and the graph passes read groups only through this class, so planning needs
    neither weights nor a process group, and the same description makes a cache key.

    Attributes:
        name: stable name, equal on every rank and in every run ("0/blocks.0/0").
        label: short name for people ("blocks.0", or "blocks.0[1]" for a second group).
        fqns: for each tensor its fully qualified names, several when tied.
        shapes: for each tensor its full shape.
        offsets: for each tensor its element offset in the gathered flat buffer.
        full_numel: elements of the gathered flat buffer, padding included.
        local_numel: elements of this rank's flat shard.
        dtype: compute dtype of the gathered buffer.
        grad_comm_dtype: dtype in which gradients are reduced.
        requires_grad: False for a frozen group.
        trainable: for each tensor whether it gets gradients; empty: all do as ``requires_grad``.
        mesh_shape: sizes of the data-parallel mesh axes, dp_outer first.
        reduced_axis: the one mesh axis over which every backward reduces gradients; None where
            that are several or none.
        ranks: global ranks of the mesh. They differ between the ranks of a larger job, so they are
            not part of the text that makes cache keys; only which groups share them is.
        gathers: False when parameters are replicated and unsharding moves nothing.
        finishes_later: the inner reduction leaves gradients partial over some axis; the last
            microbatch finishes them (DDP and ZeRO-1, the outer axis of HSDP and HFSDP).
    """

    name: str
    label: str
    fqns: tuple[tuple[str, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    full_numel: int
    local_numel: int
    dtype: torch.dtype
    requires_grad: bool
    mesh_shape: tuple[int, ...]
    grad_comm_dtype: torch.dtype = torch.float32
    gathers: bool = True
    finishes_later: bool = False
    trainable: tuple[bool, ...] = ()
    reduced_axis: int | None = None
    ranks: tuple[int, ...] = field(default=(), repr=False)

    def is_trainable(self, index: int) -> bool:
        """Whether tensor ``index`` gets gradients."""
        return self.trainable[index] if self.trainable else self.requires_grad

    @property
    def full_bytes(self) -> int:
        """Bytes of the gathered flat buffer."""
        return self.full_numel * self.dtype.itemsize

    @property
    def world_size(self) -> int:
        """Ranks that share this group."""
        size = 1
        for axis_size in self.mesh_shape:
            size *= axis_size
        return size


def describe(group: FsdpParameterGroup) -> GroupInfo:
    """``group`` as plain data."""
    return GroupInfo(
        name=group.name,
        label=group.label,
        fqns=tuple(parameter.fqns for parameter in group.parameters),
        shapes=tuple(tuple(shape) for shape in group.layout.tensor_shapes),
        offsets=tuple(group.layout.tensor_to_offset),
        full_numel=group.layout.size,
        local_numel=group.model_weight.local.numel(),
        dtype=group.dtype,
        requires_grad=group.requires_grad,
        trainable=group.trainable,
        mesh_shape=tuple(group.mesh.shape),
        ranks=group.ranks,
        grad_comm_dtype=group.grad_comm_dtype,
        gathers=group.gathers,
        finishes_later=group.finishes_later,
        reduced_axis=group.reduced_axis,
    )
