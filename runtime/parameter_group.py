"""FsdpParameterGroup: parameters that are gathered, released and reduced together.

A group is its weights (`GroupUnsharding`), its gradients (`MainGradient`) and which of its
parameters are trainable. It does not know who asks: the eager hooks and the compiled graphs drive
it through the same few methods::

    acquire ... wait_for_unshard ... (compute) ... drop          holds are counted
    reduce_gradients ... reduce_outer_gradients                  .grad is bound at once
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement

from .context import GroupContext
from .dbuffer import DBuffer
from .group_arguments import (
    check_partial,
    legal_placements,
    mesh_device,
    owners_of,
    unique_parameters,
)
from .group_info import GroupInfo, describe
from .group_unsharding import GroupUnsharding
from .layout import make_layout
from .main_gradient import MainGradient, pack_gradients, take_gradients
from .memory import Memory
from .mixed_precision import MixedPrecisionPolicy
from .parameter import (
    _CONTAINING_PARAMETER_GROUP_ATTR,
    FsdpParameter,
    bind_parameters,
    get_containing_parameter_group,
    rebind_sharded,
    sync_model_weights_from_main_weights,
)
from .placement import ShardLayout, strictest_shard
from .profiling import profiled
from .symmetric_memory import allocating_in, staging_pool
from .torch_internals import in_backward, ranks_of, will_accumulate
from .trainability import Trainability
from .unsharding import Phase, Unsharding
from .weights import GroupWeights, shard_count

__all__ = [
    "ALIGNMENT_BYTES",
    "_CONTAINING_PARAMETER_GROUP_ATTR",
    "FsdpParameter",
    "FsdpParameterGroup",
    "Phase",
    "get_containing_parameter_group",
    "sync_model_weights_from_main_weights",
]

ALIGNMENT_BYTES = 16
"""Tensor starts and rank segments are aligned to this: vector loads, and NCCL's fast path."""


class FsdpParameterGroup(GroupUnsharding):
    """A set of parameters of one dtype and one ``requires_grad``, sharded as one buffer.

    They may be frozen and made trainable later, each by itself (see `follow_requires_grad`).

    Args:
        owning_module: the FSDP module whose parameters these are; held weakly.
        fqn_to_parameter: names relative to ``owning_module``; the order is tensor order. A tied
            parameter counts once, under all of its names.
        mesh: the data-parallel mesh, dp_outer before dp_inner when it has two axes.
        model_weight_placements, main_grad_placements, main_weight_placements: one placement for
            each mesh axis (``Placements.parameter`` / ``.gradient`` / ``.optimizer``).
        mixed_precision_policy: dtypes of main weights, main gradients and their communication.
        grad_scale: factor on every gradient contribution (expert parallelism: a rank's experts
            already saw ``ep_size`` ranks' tokens).
        use_symmetric_memory: stage communication in symmetric memory (True), where that can be had
            (``"if_available"``), or not (False).
        parameter_to_owner: for ``TensorAtomic`` placements: the rank that holds each parameter.
        shard_layout: ``PADDED`` gives every rank a segment of the same size where that takes at
            most 3 % of padding, ``PACKED`` has no padding and segments that differ.

    Raises:
        ValueError: no parameter, parameters that differ in dtype or requires_grad, illegal
            placements, no symmetric memory where it must be, or under ``TensorAtomic`` a parameter
            without an owner in the mesh.
        TypeError: an owner is not a number.
    """

    def __init__(
        self,
        owning_module: nn.Module,
        fqn_to_parameter: Mapping[str, nn.Parameter],
        mesh: DeviceMesh,
        model_weight_placements: Sequence[Placement],
        main_grad_placements: Sequence[Placement],
        main_weight_placements: Sequence[Placement],
        mixed_precision_policy: MixedPrecisionPolicy,
        grad_scale: float = 1.0,
        use_symmetric_memory: bool | str = False,
        parameter_to_owner: Mapping[nn.Parameter, int] | None = None,
        shard_layout: ShardLayout = ShardLayout.PADDED,
    ) -> None:
        super().__init__(owning_module)
        originals = unique_parameters(fqn_to_parameter)
        first = next(iter(originals))
        precision = mixed_precision_policy.resolve(first.dtype)
        self.mesh = mesh
        # Not read from the mesh later: tracing knows no values of tensors.
        self.ranks = ranks_of(mesh)
        self.device = mesh_device(mesh)
        self.grad_scale = grad_scale
        self.dtype = first.dtype
        self.grad_comm_dtype = precision.grad_comm_dtype
        self._withheld: DBuffer | None = None
        self.context = GroupContext(self.device)
        # Whether a step refreshes the model weight (see `refreshed_by_steps`). Otherwise every
        # backward may be followed by a step that nobody tells us of.
        self.syncs_with_optimizer = False
        self._refreshed_by_steps: set[torch.Tensor] = set()

        model_weight_placements, main_grad_placements, main_weight_placements = legal_placements(
            mesh, model_weight_placements, main_grad_placements, main_weight_placements
        )
        self._made_with = (
            model_weight_placements,
            main_grad_placements,
            main_weight_placements,
            mixed_precision_policy,
        )
        self._shard_layout = shard_layout
        # The layout serves frozen weights too: they may become trainable.
        self._when_trainable = (main_grad_placements, main_weight_placements, precision)
        placements = (*model_weight_placements, *main_grad_placements, *main_weight_placements)
        self._owners = owners_of(originals, placements, parameter_to_owner, mesh)
        self.layout = make_layout(
            [tuple(original.shape) for original in originals],
            shard_count(mesh, main_weight_placements),
            shard=strictest_shard(placements),
            shard_layout=shard_layout,
            owners=self._owners,
            alignment=max(1, ALIGNMENT_BYTES // precision.smallest_itemsize(self.dtype)),
        )
        self.staging = staging_pool(use_symmetric_memory, mesh, self.layout, self.device)
        self.context.add_staging(self.staging)
        # Nothing updates a frozen weight: its main weight is its model weight.
        frozen = not first.requires_grad
        with allocating_in(self.staging):
            self._weights = GroupWeights(
                [original.detach() for original in originals],
                mesh,
                self.layout,
                model_weight_placements,
                model_weight_placements if frozen else main_weight_placements,
                self.dtype,
                self.dtype if frozen else precision.main_params_dtype,
                self.device,
            )
        self.flat_leaf = nn.Parameter(self.model_weight.local, requires_grad=first.requires_grad)
        self.parameters = bind_parameters(self, originals, self._weights)
        self._unsharding = Unsharding(self._weights, [each.sharded for each in self.parameters])
        self._trainability = Trainability(self.parameters)
        self._gradient = self._create_gradient() if self.requires_grad else None

    # Construction ------------------------------------------------------------------------------

    def sharded_alike(
        self, owning_module: nn.Module, fqn_to_parameter: Mapping[str, nn.Parameter]
    ) -> FsdpParameterGroup:
        """A group of its own with this one's settings, flags and weights.

        Args:
            owning_module: what the new group belongs to.
            fqn_to_parameter: this group's names, in its order, to parameters of the same shapes.
        """
        owners = self._owners and dict(
            zip(unique_parameters(fqn_to_parameter), self._owners, strict=True)
        )
        alike = FsdpParameterGroup(
            owning_module,
            fqn_to_parameter,
            self.mesh,
            *self._made_with,
            self.grad_scale,
            self.staging is not None,
            parameter_to_owner=owners or None,
            shard_layout=self._shard_layout,
        )
        with torch.inference_mode(False), torch.no_grad():
            alike.main_weight.local.copy_(self.main_weight.local)
            alike.model_weight.local.copy_(self.model_weight.local)
        for mine, other in zip(self.parameters, alike.parameters, strict=True):
            other.sharded.requires_grad_(mine.sharded.requires_grad)
        # An average of the weights is no optimizer, and writes in ways that leave no trace.
        alike._unsharding.always_refreshes = alike.main_weight is not alike.model_weight
        return alike

    def _create_gradient(self) -> MainGradient:
        grad_placements, main_placements, precision = self._when_trainable
        sharded = [parameter.sharded for parameter in self.parameters]
        for parameter in sharded:
            parameter.grad_dtype = precision.main_grads_dtype

        def allocate(memory: Memory | None) -> DBuffer:
            # None: it is made once, and is no part of a step.
            numel, dtype = self.main_weight.local_numel(grad_placements), precision.main_grads_dtype
            if memory is None:
                local = Memory().raw(numel, dtype, self.device, None)
            else:
                owner = f"main gradients of {self.label}"
                local = memory.empty(numel, dtype, self.device, owner=owner, lasting=True)
            return self.main_weight.like(grad_placements, local)

        gradient = MainGradient(allocate, main_placements, sharded, self.fqns)
        gradient.hooks.guard(self._before_foreign_addition())
        return gradient

    def _before_foreign_addition(self) -> Callable[[int], None]:
        """What must happen before autograd itself adds to a ``.grad``. Refers to the group weakly:
        autograd holds it where Python's garbage collector cannot see it."""
        reference = weakref.ref(self)

        def prepare(index: int) -> None:
            group = reference()
            if group is not None and group._gradient is not None:
                group.context.wait_for_reductions()
                group._gradient.check_addition(index)

        return prepare

    # Buffers -----------------------------------------------------------------------------------

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

    # For passes, ops and compilers -------------------------------------------------------------

    @property
    def info(self) -> GroupInfo:
        """This group as plain data, for passes and op fakes."""
        return describe(self)

    @property
    def finishes_later(self) -> bool:
        """Whether the inner reduction leaves gradients that `reduce_outer_gradients` finishes."""
        return self._gradient is not None and self._gradient.needs_outer

    def copy_full_parameter(self, index: int) -> torch.Tensor:
        """A copy of full parameter ``index``: gather, copy, release. The marker's slow path.

        Raises:
            RuntimeError: the parameter has been made trainable, which this graph does not know.
        """
        if not in_backward() and self.follow_requires_grad() and self.trainable[index]:
            raise RuntimeError(
                f"parameter {self.fqns[index]!r} was made trainable after its model was compiled "
                'by another backend than "compile_fsdp", which cannot take that in within a call; '
                'call the model again (it is compiled anew), or use backend="compile_fsdp"'
            )
        self.context.lanes.gather.wait_current()
        self.acquire()
        try:
            self.wait_for_unshard()
            return self._weights.full.get_local_tensor(index).clone()
        finally:
            self.drop()

    @property
    def reduced_axis(self) -> int | None:
        """The mesh axis over which `reduce_inner_gradients` communicates; None where that are
        several or none."""
        return None if self._gradient is None else self._gradient.reduced_axis

    # Trainable or frozen -----------------------------------------------------------------------

    @property
    def trainable(self) -> tuple[bool, ...]:
        """For each parameter whether it is trainable, as of the last `follow_requires_grad`."""
        return self._trainability.flags

    @property
    def requires_grad(self) -> bool:
        """Whether any parameter is trainable; a group without one has no gradient buffer."""
        return any(self.trainable)

    def follow_requires_grad(self) -> bool:
        """Take over the ``requires_grad`` flags that the user has set on the sharded parameters.

        Called before a forward, never within one. A group that becomes trainable gets a gradient
        buffer and, where dtype or placements ask for it, a main weight of its own: the sharded
        Parameter objects stay the same ones.

        Returns:
            Whether a flag has changed since the last call.

        Raises:
            RuntimeError: a sharded parameter cannot change its dtype or placements, because
                somebody holds a weak reference to it.
        """
        if not self._trainability.has_changed():
            return False
        if self._gradient is None:
            self._separate_main_weight()
            self._gradient = self._create_gradient()
        self._trainability.take_over(self.flat_leaf)
        self._gradient.hooks.guard(self._before_foreign_addition())
        return True

    def _separate_main_weight(self) -> None:
        _, main_placements, precision = self._when_trainable
        if self._weights.separate_main(main_placements, precision.main_params_dtype):
            for index, parameter in enumerate(self.parameters):
                rebind_sharded(parameter, self.main_weight.get_dtensor(index))

    def when_trainable_changes(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` now and whenever `follow_requires_grad` finds a change."""
        self._trainability.listen(listener)

    # Gradients ---------------------------------------------------------------------------------

    def gradients_wanted(self) -> bool:
        """Whether the running backward was asked for this group's gradients.

        False inside ``torch.autograd.grad`` with respect to inputs only.
        """
        return self.requires_grad and (not in_backward() or will_accumulate(self.flat_leaf))

    def allocate_partial_grad_buffer(self) -> DBuffer:
        """An uninitialised full gradient buffer, ``Partial("avg")`` on every axis, in
        ``grad_comm_dtype``, with the group's layout."""
        placements = [Partial("avg")] * self.mesh.ndim
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
        with torch.inference_mode(False), torch.no_grad():
            if gradients is None:
                gradients = take_gradients(self.parameters)
            if gradients:
                partial = self.pack(gradients)
                if self.context.zeros_missing_gradients:
                    self._withhold(partial)
                else:
                    self.reduce_inner_gradients(partial, tuple(gradients))

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
        if self._gradient is None:
            return
        with torch.inference_mode(False), torch.no_grad():
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
        check_partial(partial, self)
        indices = range(len(self.parameters)) if indices is None else indices
        self.accumulate(partial, indices)
        self.context.note_reduction((self,), partial)
        self.expect_hooks(indices)

    def accumulate(self, partial: DBuffer, indices: Sequence[int]) -> None:
        """The reduction of `reduce_inner_gradients`, by a caller who keeps ``partial`` alive. It
        may be at the gradient placements already, reduced together with other groups'."""
        if self._gradient is not None:
            lane, label = self.context.lanes.reduce_inner, self.gradient_label(indices)
            self._gradient.accumulate(partial, indices, self.grad_scale, lane, label=label)
            if not self.syncs_with_optimizer:
                self._unsharding.maybe_stepped = True

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
            with torch.inference_mode(False), torch.no_grad():
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
                self._unsharding.maybe_stepped = True

    def release_unused_gradient_storage(self) -> None:
        """Free ``main_grad`` when no parameter's ``.grad`` refers to it any more."""
        if self._gradient is not None:
            self._gradient.release_if_unused()
