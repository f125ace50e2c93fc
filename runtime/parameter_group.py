"""FsdpParameterGroup: parameters that are gathered, released and reduced together.

A group is its weights (`GroupUnsharding`), its gradients (`MainGradient`) and which of its
parameters are trainable. It does not know who asks: the eager hooks and the compiled graphs drive
it through the same few methods::

    acquire ... wait_for_unshard ... (compute) ... drop          holds are counted
    reduce_gradients ... reduce_outer_gradients                  .grad is bound at once
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from .context import GroupContext
from .dbuffer import DBuffer
from .group_arguments import (
    legal_placements,
    mesh_device,
    owners_of,
    unique_parameters,
)
from .group_info import GroupInfo, describe
from .group_reduction import GroupReduction
from .layout import make_layout
from .main_gradient import MainGradient
from .memory import Memory
from .mixed_precision import MixedPrecisionPolicy
from .modes import without_autograd
from .mxfp8 import BLOCK, check_eligible
from .parameter import (
    _CONTAINING_PARAMETER_GROUP_ATTR,
    FsdpParameter,
    bind_parameters,
    get_containing_parameter_group,
    rebind_sharded,
    sync_model_weights_from_main_weights,
)
from .placement import BlockAtomic, ShardLayout, strictest_shard
from .planes import PlaneUnit
from .symmetric_memory import allocating_in, staging_pool
from .torch_internals import in_backward, ranks_of
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


class FsdpParameterGroup(GroupReduction):
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

    planes: tuple[PlaneUnit, ...] = ()

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
        self.context = GroupContext(self.device)

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
        self.scaled_matmul = mixed_precision_policy.scaled_matmul
        quantized = mixed_precision_policy.compute_weights is not None
        if quantized:
            for original, (fqn, *_) in originals.items():
                check_eligible(f"parameter {fqn!r}", original.shape)
        # The layout serves frozen weights too: they may become trainable.
        self._when_trainable = (main_grad_placements, main_weight_placements, precision)
        placements = (*model_weight_placements, *main_grad_placements, *main_weight_placements)
        self._owners = owners_of(originals, placements, parameter_to_owner, mesh)
        smallest = precision.smallest_itemsize(self.dtype)
        alignment = max(1, ALIGNMENT_BYTES // smallest)
        # Blocks of 32 rows of 32 columns or more: at least 32 scales, a byte each, and so aligned.
        blocks = [BlockAtomic(BLOCK)] if quantized else []
        self.layout = make_layout(
            [tuple(original.shape) for original in originals],
            shard_count(mesh, main_weight_placements),
            shard=strictest_shard((*placements, *blocks)),
            shard_layout=shard_layout,
            owners=self._owners,
            alignment=alignment,
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
        with without_autograd():
            local = self.model_weight.local
            self.flat_leaf = nn.Parameter(local, requires_grad=first.requires_grad)
            self.parameters = bind_parameters(self, originals, self._weights)
        self._unsharding = Unsharding(self._weights, [each.sharded for each in self.parameters])
        self._trainability = Trainability(self.parameters)
        self._gradient = self._create_gradient() if self.requires_grad else None
        if quantized:
            self.planes = self._make_planes()

    def _make_planes(self) -> tuple[PlaneUnit, PlaneUnit]:
        with allocating_in(self.staging):
            return PlaneUnit(self, columnwise=False), PlaneUnit(self, columnwise=True)

    def rename(self, name: str, label: str, model: int = 0) -> None:
        """See `GroupIdentity.rename`; planes take their names from it."""
        super().rename(name, label, model)
        for planes in self.planes:
            planes.follow_name()

    @property
    def is_rowwise_unsharded(self) -> bool:
        """Whether rowwise planes are gathered (a gather may still be in flight)."""
        return any(each.gathers and each.is_unsharded for each in self.planes[:1])

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
        with without_autograd():
            alike.main_weight.local.copy_(self.main_weight.local)
            alike.model_weight.local.copy_(self.model_weight.local)
        for mine, other in zip(self.parameters, alike.parameters, strict=True):
            other.sharded.requires_grad_(mine.sharded.requires_grad)
        # An average of the weights is no optimizer, and writes in ways that leave no trace.
        alike._unsharding.always_refreshes = alike.main_weight is not alike.model_weight
        for planes in alike.planes:
            planes.unsharding.always_refreshes = True
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

    # For passes, ops and compilers -------------------------------------------------------------

    @property
    def info(self) -> GroupInfo:
        """This group as plain data, for passes and op fakes."""
        return describe(self)

    def copy_full_parameter(self, index: int) -> torch.Tensor:
        """See `GroupUnsharding.copy_full_parameter`.

        Raises:
            RuntimeError: the parameter has been made trainable, which this graph does not know.
        """
        if not in_backward() and self.follow_requires_grad() and self.trainable[index]:
            raise RuntimeError(
                f"parameter {self.fqns[index]!r} was made trainable after its model was compiled "
                'by another backend than "compile_fsdp", which cannot take that in within a call; '
                'call the model again (it is compiled anew), or use backend="compile_fsdp"'
            )
        return super().copy_full_parameter(index)

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
        if self._refreshed_by_steps:
            # What is trainable now may be in an optimizer that tells us nothing.
            self.refreshed_by_steps(())
        self._gradient.hooks.guard(self._before_foreign_addition())
        return True

    def _separate_main_weight(self) -> None:
        _, main_placements, precision = self._when_trainable
        if self._weights.separate_main(main_placements, precision.main_params_dtype):
            for index, parameter in enumerate(self.parameters):
                rebind_sharded(parameter, self.main_weight.get_dtensor(index))
            for planes in self.planes:
                planes.use_main(self.main_weight)

    def when_trainable_changes(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` now and whenever `follow_requires_grad` finds a change."""
        self._trainability.listen(listener)
