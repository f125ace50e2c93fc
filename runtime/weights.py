"""GroupWeights: the weight buffers of one parameter group, and how one follows another.

    main          what the optimizer updates     optimizer's placements    main dtype
      | cast, after a step
    post_optimizer  its part of the model weight optimizer's placements    compute dtype
      | redistribute, where the model weight is wider
    model         what compute gathers           parameter placements      compute dtype
      | all-gather
    full          the gathered model weight      replicated                compute dtype

Buffers that would hold the same values are the same memory: with equal dtypes ``main`` is
``post_optimizer``, with equal placements as well it is ``model``, and where nothing is sharded
``full`` is ``model``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.utils.dlpack import from_dlpack

from .dbuffer import DBuffer
from .layout import GlobalLayout
from .modes import without_autograd
from .placement import differing_axes
from .streams import Lane


class Weights(ABC):
    """Compute weights that are gathered into one flat buffer: what `Unsharding` asks of them.

    Attributes:
        full: the gathered weights; without memory while nobody reads them.
        gathers: False where ``full`` has the memory of this rank's shard: nothing is sharded, or
            there is one rank.
        redistribution_due: the shard is stale but for the optimizer's part of it.
    """

    full: DBuffer
    gathers: bool
    redistribution_due = False

    @property
    @abstractmethod
    def gathered_axes(self) -> tuple[int, ...]:
        """The mesh axes that a gather goes over."""

    @property
    @abstractmethod
    def follows(self) -> bool:
        """Whether `follow_main` has anything to do."""

    @abstractmethod
    def follow_main(self) -> None:
        """Write the main weight into its part of the shard.

        Where the shard is wider (ZeRO-1, ZeRO-2, HFSDP) the rest of it is stale until
        `redistribute`.
        """

    @property
    @abstractmethod
    def redistributed(self) -> tuple[tuple[DBuffer, DBuffer], ...]:
        """The optimizer's parts of the shard, each with what it is a part of."""

    def redistribute(self, lane: Lane, label: str) -> bool:
        """Bring a stale shard up to date on ``lane``, which has waited for who wrote its part;
        False if it was not stale."""
        if not self.redistribution_due:
            return False
        for part, whole in self.redistributed:
            widen(part, whole, lane, label=label)
        self.redistribution_due = False
        return True

    @abstractmethod
    def pieces(self, into: DBuffer) -> tuple[tuple[DBuffer, torch.Tensor], ...]:
        """The buffers that a gather into ``into`` moves, each with where it goes, 1-D."""

    def gather(self, into: DBuffer, lane: Lane, label: str, *, depends: bool) -> None:
        """Start gathering into ``into`` on ``lane``: ``full``, which gets memory, or one like it.

        ``depends``: something still on the lane writes the shard.
        """
        into.reallocate_storage(lane, label)
        for number, (piece, target) in enumerate(self.pieces(into)):
            whole = into if target is into.local else piece.like(into.placements, target)
            widen(piece, whole, lane, depends=depends and number == 0, label=label)

    def release(self, lane: Lane) -> None:
        """Take the memory of ``full`` away, after what compute has issued so far."""
        lane.wait_current()
        self.full.release_storage(lane)


class GroupWeights(Weights):
    """Main, model and full weights of tensors that share one layout.

    Args:
        tensors: initial full values, equal on every rank; meta tensors give shapes only.
        mesh: the data-parallel mesh.
        layout: the layout all buffers share.
        model_placements, main_placements: for each mesh axis.
        dtype: of the model weight.
        main_dtype: of the main weight.
        device: where the buffers live.

    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        mesh: DeviceMesh,
        layout: GlobalLayout,
        model_placements: Sequence[Placement],
        main_placements: Sequence[Placement],
        dtype: torch.dtype,
        main_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def distribute(placements: Sequence[Placement], dtype: torch.dtype) -> DBuffer:
            return DBuffer.distribute_tensors(
                tensors, mesh, placements, dtype=dtype, device=device, layout=layout
            )

        self.model = distribute(model_placements, dtype)
        self.post_optimizer = self.model.view(main_placements)
        if main_dtype != dtype:
            # From the tensors, not from the model weight: nothing of an initial value that the
            # main dtype can hold is lost.
            self.main = distribute(main_placements, main_dtype)
        elif self.post_optimizer.placements == self.model.placements:
            self.main = self.model
        else:
            self.main = self.post_optimizer
        self.gathers = shard_count(mesh, model_placements) > 1
        self.full = self._make_full(mesh, layout)

    def _make_full(self, mesh: DeviceMesh, layout: GlobalLayout) -> DBuffer:
        replicated = [Replicate()] * mesh.ndim
        shapes = layout.tensor_shapes
        if self.gathers:
            return DBuffer(
                mesh, replicated, shapes, self.model.dtype, self.model.device, layout=layout
            )
        local = same_memory(self.model.local)
        return DBuffer.from_local(local, mesh, replicated, shapes, layout=layout)

    def separate_main(self, placements: Sequence[Placement], dtype: torch.dtype) -> bool:
        """Give frozen weights the main weight of trainable ones, with the model weight's values.

        Returns:
            Whether ``main`` is another buffer now.
        """
        self.post_optimizer = self.model.view(placements)
        before = self.main
        if dtype != self.model.dtype:
            self.main = self.post_optimizer.cast(dtype)
        elif self.post_optimizer.placements != self.model.placements:
            self.main = self.post_optimizer
        return self.main is not before

    def follow_main(self) -> None:
        """See `Weights.follow_main`."""
        if self.main is not self.model and self.main is not self.post_optimizer:
            self.post_optimizer.local.copy_(self.main.local)
        self.redistribution_due = self.post_optimizer.placements != self.model.placements

    @property
    def follows(self) -> bool:
        """See `Weights.follows`."""
        copies = self.main is not self.model and self.main is not self.post_optimizer
        return copies or self.post_optimizer.placements != self.model.placements

    @property
    def redistributed(self) -> tuple[tuple[DBuffer, DBuffer], ...]:
        """See `Weights.redistributed`."""
        return ((self.post_optimizer, self.model),)

    @property
    def gathered_axes(self) -> tuple[int, ...]:
        """See `Weights.gathered_axes`."""
        return differing_axes(self.model.placements, self.full.placements)

    def pieces(self, into: DBuffer) -> tuple[tuple[DBuffer, torch.Tensor], ...]:
        """See `Weights.pieces`."""
        return ((self.model, into.local),)


def same_memory(local: torch.Tensor) -> torch.Tensor:
    """``local`` with a storage of its own over the same memory: the op ``unshard`` must not return
    what autograd and compilers would recognise as its input."""
    # A fake tensor has no memory that could be shared.
    return from_dlpack(local) if type(local) is torch.Tensor else torch.empty_like(local)


def copy_on(lane: Lane, target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` into ``target`` after what is on ``lane``."""

    def copy() -> None:
        with without_autograd():
            target.copy_(source)

    lane.then(copy)


def widen(
    source: DBuffer, target: DBuffer, lane: Lane, *, depends: bool = False, label: str = ""
) -> None:
    """Gather ``source`` into ``target``, one axis at a time, outer axes first.

    Outer first because a segment is cut by dp_inner first and by dp_outer second: undoing the
    outer cut yields a whole dp_inner segment, which is gathered at its place in ``target``.
    ``depends``: something still on the lane writes ``source``.
    """
    axes = source.changed_axes(target.placements)
    current = source
    for axis in axes:
        out = target
        if axis != axes[-1]:
            placements = list(current.placements)
            placements[axis] = target.placements[axis]
            out = target.view(placements)
        current = current.redistribute(
            out.placements,
            out=out,
            lane=lane,
            depends=depends or current is not source,
            label=label,
        )


def shard_count(mesh: DeviceMesh, placements: Sequence[Placement]) -> int:
    """Into how many parts ``placements`` cut a buffer."""
    count = 1
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            count *= mesh.size(axis)
    return count
