"""GroupReduction: the half of a parameter group that has what a step reads and writes: its main
weights, and gradients that are packed, reduced and accumulated."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

from .dbuffer import DBuffer
from .group_arguments import check_partial
from .group_unsharding import GroupUnsharding
from .layout import GlobalLayout
from .main_gradient import MainGradient, pack_gradients, take_gradients
from .modes import without_autograd
from .profiling import profiled
from .symmetric_memory import StagingPool
from .torch_internals import accumulation_into, in_backward, will_be_executed, zero_each
from .weights import GroupWeights

if TYPE_CHECKING:
    from .parameter_group import FsdpParameterGroup


class GroupReduction(GroupUnsharding):
    """The part of `FsdpParameterGroup` that deals with main weights and gradients.

    Attributes:
        mesh: the data-parallel mesh.
        layout: where each tensor is in the buffers.
        staging: where buffers of reductions must come from; None: anywhere.
        device: where the buffers live.
        grad_scale: factor on every gradient contribution.
        grad_comm_dtype: dtype in which gradients are reduced.
        flat_leaf: this rank's flat shard, which graphs take as input.
        syncs_with_optimizer: whether a step refreshes the model weight (see `refreshed_by_steps`).
            Otherwise every backward may be followed by a step that nobody tells us of.
    """

    mesh: DeviceMesh
    layout: GlobalLayout
    staging: StagingPool | None
    device: torch.device
    grad_scale: float
    grad_comm_dtype: torch.dtype
    flat_leaf: nn.Parameter
    _weights: GroupWeights
    _gradient: MainGradient | None

    def __init__(self, owning_module: nn.Module) -> None:
        super().__init__(owning_module)
        self.syncs_with_optimizer = False
        self._refreshed_by_steps: set[torch.Tensor] = set()
        self._withheld: DBuffer | None = None

    @property
    def requires_grad(self) -> bool:
        """Whether any parameter is trainable; a group without one has no gradient buffer."""
        raise NotImplementedError

    # Buffers -----------------------------------------------------------------------------------

    @property
    def main_weight(self) -> DBuffer:
        """What the optimizer updates. It *is* ``model_weight`` when dtype and placements agree."""
        return self._weights.main

    @property
    def model_weight(self) -> DBuffer:
        """The compute copy, at the parameter placements."""
        return self._weights.model

    @property
    def post_optimizer_model_weight(self) -> DBuffer:
        """The view of ``model_weight`` at the optimizer's placements: what a step writes."""
        return self._weights.post_optimizer

    @property
    def main_grad(self) -> DBuffer | None:
        """The gradient accumulator at the gradient placements; None when the group is frozen.

        It has no storage while no parameter has a ``.grad``.
        """
        return self._gradient.buffer if self._gradient and self.requires_grad else None

    @property
    def pre_optimizer_main_grad(self) -> DBuffer | None:
        """The view of ``main_grad`` at the optimizer's placements; None when frozen."""
        return self._gradient.finished if self._gradient and self.requires_grad else None

    @property
    def gradient(self) -> MainGradient | None:
        """How gradients accumulate; None before any parameter has been trainable."""
        return self._gradient

    @property
    def finishes_later(self) -> bool:
        """Whether the inner reduction leaves gradients that `reduce_outer_gradients` finishes."""
        return self._gradient is not None and self._gradient.needs_outer

    @property
    def reduced_axis(self) -> int | None:
        """The mesh axis over which `reduce_inner_gradients` communicates; None where that are
        several or none."""
        return None if self._gradient is None else self._gradient.reduced_axis

    def shard_for_saving(self, index: int) -> DTensor:
        """This rank's shard of main weight ``index``, aliasing it.

        By a storage of its own: what copies whole storages, as ``torch.distributed.checkpoint``
        does before it saves in the background, then copies these rows and not the flat buffer.
        """
        return self.main_weight.get_dtensor(index, own_storage=True)

    # Reducing ----------------------------------------------------------------------------------

    def gradients_wanted(self) -> bool:
        """Whether the running backward was asked for this group's gradients.

        False inside ``torch.autograd.grad`` with respect to inputs only.
        """
        return self.requires_grad and (not in_backward() or will_be_executed(self._accumulation))

    @functools.cached_property
    def _accumulation(self) -> Node:
        return accumulation_into(self.flat_leaf)

    @functools.cached_property
    def _partial_placements(self) -> tuple[Placement, ...]:
        return (Partial("avg"),) * self.mesh.ndim

    def allocate_partial_grad_buffer(self) -> DBuffer:
        """An uninitialised full gradient buffer, ``Partial("avg")`` on every axis, in
        ``grad_comm_dtype``, with the group's layout."""
        placements = self._partial_placements
        numel, owner = self.main_weight.local_numel(placements), f"gradients of {self.label}"
        memory = self.context.memory
        local = memory.empty(numel, self.grad_comm_dtype, self.device, owner=owner)
        return self.main_weight.like(placements, local)

    def pack(self, gradients: Mapping[int, torch.Tensor]) -> DBuffer:
        """A partial gradient buffer with these full gradients, by tensor index, and zeros."""
        partial = self.allocate_partial_grad_buffer()
        pack_gradients(partial, gradients, self.fqns)
        return partial

    def copy_gradients_to_partial_buffer(self, partial: DBuffer) -> tuple[int, ...]:
        """Move the unsharded parameters' ``.grad`` into ``partial``; returns their indices.

        The ``.grad`` of every unsharded parameter is None afterwards; parameters that had none
        are zero in ``partial``.
        """
        gradients = take_gradients(self.parameters)
        pack_gradients(partial, gradients, self.fqns)
        return tuple(gradients)

    def reduce_gradients(self, gradients: Mapping[int, torch.Tensor] | None = None) -> None:
        """Pack gradients and start their inner reduction.

        Args:
            gradients: full gradients by tensor index; None takes the unsharded parameters'
                ``.grad``. Nothing happens when there is none.
        """
        with without_autograd():
            if gradients is None:
                gradients = take_gradients(self.parameters)
            if gradients:
                self.context.settle_reductions()
                self._reduce_or_withhold(self.pack(gradients), tuple(gradients))

    def reduce_packed(self, packed: torch.Tensor, indices: Sequence[int]) -> None:
        """Start the inner reduction of gradients that have been packed already.

        Args:
            packed: 1-D, ``info.full_numel`` elements of ``grad_comm_dtype``, each gradient at its
                parameter's offset. It must not be written any more. The parts of other parameters
                are set to zero here.
            indices: whose gradients it holds.
        """
        with without_autograd():
            partial = self._adopt_or_copy(packed)
            if len(indices) < len(self.parameters):
                others = set(range(len(self.parameters))).difference(indices)
                zero_each([partial.get_local_tensor(index) for index in sorted(others)])
            self._reduce_or_withhold(partial, indices)

    def _adopt_or_copy(self, packed: torch.Tensor) -> DBuffer:
        """A copy where reductions read from memory of a kind of its own (symmetric memory), or
        withheld gradients are yet to be added to it."""
        if self.staging is None and not self.context.zeros_missing_gradients:
            return self.main_weight.like(self._partial_placements, packed)
        partial = self.allocate_partial_grad_buffer()
        partial.local.copy_(packed)
        return partial

    def _reduce_or_withhold(self, partial: DBuffer, indices: Sequence[int]) -> None:
        if self.context.zeros_missing_gradients:
            self._withhold(partial)
        else:
            self.reduce_inner_gradients(partial, indices)

    def _withhold(self, partial: DBuffer) -> None:
        """Keep packed gradients until the end of the backward."""
        if self._withheld is None:
            self._withheld = partial
        else:
            self._withheld.local.add_(partial.local)
            self.context.memory.give_back(partial.local)
        self.context.note_withheld()

    def reduce_withheld_gradients(self) -> None:
        """Reduce what this backward kept back, or zeros where it had nothing; of every parameter.

        See `GroupContext.zeros_missing_gradients`. Nothing happens for a frozen group.
        """
        if not self.requires_grad:
            return
        with without_autograd():
            partial, self._withheld = self._withheld, None
            if partial is None:
                partial = self.allocate_partial_grad_buffer()
                partial.local.zero_()
            self.reduce_inner_gradients(partial)

    @profiled("reduce_inner")
    def reduce_inner_gradients(
        self, partial: DBuffer, indices: Sequence[int] | None = None
    ) -> None:
        """Reduce ``partial`` to the gradient placements and add it to ``main_grad``.

        This contribution is multiplied by ``grad_scale``. The first contribution of a step
        writes ``main_grad``, later ones add. ``.grad`` of the parameters in ``indices`` (None:
        all) is bound to ``main_grad`` at once; its values are there after
        ``context.wait_for_reductions()``, of a group that no driver runs at once.

        Raises:
            RuntimeError: the group is frozen.
            ValueError: ``partial`` is not one of `allocate_partial_grad_buffer`.
        """
        if self._gradient is None:
            raise RuntimeError(f"parameter group {self.label!r} is frozen and has no gradients")
        check_partial(partial, self._as_group)
        indices = range(len(self.parameters)) if indices is None else indices
        self.context.settle_reductions()
        self.accumulate(partial, indices)
        self.context.note_reduction((self._as_group,), partial)
        self.expect_hooks(indices)

    def accumulate(self, partial: DBuffer, indices: Sequence[int]) -> None:
        """The reduction of `reduce_inner_gradients`, by a caller who keeps ``partial`` alive. It
        may be at the gradient placements already, reduced together with other groups'."""
        if self._gradient is not None:
            lane, label = self.context.lanes.reduce_inner, self.gradient_label(indices)
            self._gradient.accumulate(partial, indices, self.grad_scale, lane, label=label)
            if not self.syncs_with_optimizer:
                self.note_step()

    def expect_hooks(self, indices: Sequence[int]) -> None:
        """Run post-accumulate hooks of the parameters in ``indices`` when this backward ends."""
        if self._gradient is not None and self._gradient.hooks.note(indices):
            self.context.finish_at_end_of_backward()

    def call_gradient_hooks(self) -> None:
        """Run post-accumulate hooks of the parameters whose gradients are finished."""
        gradient = self._gradient
        if gradient and (self.context.is_last_microbatch or not gradient.needs_outer):
            gradient.hooks.call_post_accumulate()

    @profiled("reduce_outer")
    def reduce_outer_gradients(self) -> None:
        """Finish gradients over the axes that the gradient placements left partial.

        Writes ``pre_optimizer_main_grad`` and binds ``.grad`` to it; a no-op where the inner
        reduction already finished them, or nothing is new.
        """
        if self._gradient is not None:
            lanes = self.context.lanes
            with without_autograd():
                accumulated = lanes.reduce_inner.record_event()
                self._gradient.finish(lanes.reduce_outer, accumulated, label=self.label)
            self.context.note_outer_reduction()

    def forget_unreduced_gradients(self) -> None:
        """Drop what an interrupted backward left on the unsharded parameters, which no
        ``zero_grad`` sees."""
        for parameter in self.parameters:
            parameter.unsharded.grad = None
        self.flat_leaf.grad = None
        self._withheld = None

    def refreshed_by_steps(self, parameters: Iterable[torch.Tensor]) -> None:
        """Steps that write these sharded ``parameters`` refresh the model weight. Other optimizers
        may have the group's other parameters, and tell us nothing."""
        self._refreshed_by_steps.update(parameters)
        others = {each.sharded for each in self.parameters} - self._refreshed_by_steps
        self.syncs_with_optimizer = not any(each.requires_grad for each in others)

    def expect_step(self) -> None:
        """An optimizer that tells us nothing may have stepped: it writes every parameter that has
        a ``.grad``, also one that is older than the last backward (momentum, weight decay)."""
        if not self.syncs_with_optimizer and self._gradient is not None:
            if any(parameter.sharded.grad is not None for parameter in self.parameters):
                self.note_step()

    def release_unused_gradient_storage(self) -> None:
        """Free ``main_grad`` when no parameter's ``.grad`` refers to it any more."""
        if self._gradient is not None:
            self._gradient.release_if_unused()

    @property
    def _as_group(self) -> FsdpParameterGroup:
        return cast("FsdpParameterGroup", self)
