"""MainGradient: where a parameter group's gradients accumulate over a step.

Gradients arrive in contributions (one for each backward, or several where a graph broke)::

    contribution 1   partial --reduce--> shard   writes   main_grad   (begins the step)
    contribution 2   partial --reduce--> shard   adds to  main_grad
    last microbatch  main_grad --outer reduction--> pre_optimizer_main_grad (its own slice)

A step begins when no parameter has a ``.grad``: that is what ``zero_grad()`` leaves behind, and
needs no flag that a user's loop could forget.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .dbuffer import DBuffer
from .gradient_hooks import GradientHooks
from .host_state import GradientState, Uncapturable
from .memory import Memory
from .modes import without_autograd
from .placement import differing_axes, is_sharded
from .streams import Event, Lane
from .torch_internals import copy_each, local_of, zero_each

if TYPE_CHECKING:
    from .parameter import FsdpParameter


class MainGradient:
    """The gradient accumulator of one group.

    Args:
        allocate: makes a new buffer at the gradient placements, with bytes from the memory of a
            root; None: with bytes that nobody counts.
        finished_placements: placements a finished gradient has (the optimizer's).
        parameters: the sharded parameters, in tensor order, whose ``.grad`` is bound here.
        fqns: their names, for messages.

    Attributes:
        buffer: the accumulator at the gradient placements.
        finished: its view at the optimizer's placements.
        needs_outer: whether `finish` has anything to do.
        hooks: the hooks of the parameters.
    """

    def __init__(
        self,
        allocate: Callable[[Memory | None], DBuffer],
        finished_placements: Sequence[Placement],
        parameters: Sequence[nn.Parameter],
        fqns: Sequence[str],
    ) -> None:
        self._allocate = allocate
        self._finished_placements = tuple(finished_placements)
        self._parameters = tuple(parameters)
        self._fqns = tuple(fqns)
        self.hooks = GradientHooks(parameters, fqns)
        self._bound: dict[int, torch.Tensor] = {}
        self._use(allocate(None))
        # What a group without gradients shows: the same buffers, without memory.
        self._unallocated = (self.buffer, self.finished)
        self.buffer.release_storage()
        self.needs_outer = self.buffer.placements != self.finished.placements
        self._static: tuple[DBuffer, DBuffer] | None = None
        self._static_carry: torch.Tensor | None = None
        self._stale = False
        self._carry: torch.Tensor | None = None
        self._carry_in_use: torch.Tensor | None = None

    def _use(self, buffer: DBuffer) -> None:
        self.buffer = buffer
        if buffer.placements == self._finished_placements:
            self.finished = buffer
            return
        # Partial is held like Replicate, and the outer reduction works in place: the finished
        # gradient is a part of the very storage that the unfinished one is in.
        held = [Replicate() if each.is_partial() else each for each in buffer.placements]
        self.finished = buffer.like(held, buffer.local).view(self._finished_placements)

    def _use_fresh(self, memory: Memory) -> None:
        """Accumulate into new storage, so that a gradient that the user kept from the last step
        stays what it was; or, in static memory, into the same one again, where it does not."""
        if self._static is not None:
            self.buffer, self.finished = self._static
            return
        self._use(self._allocate(memory))
        if memory.is_static:
            self._static = (self.buffer, self.finished)

    def accumulate(
        self,
        partial: DBuffer,
        indices: Sequence[int],
        scale: float,
        lane: Lane,
        *,
        label: str = "",
    ) -> None:
        """Reduce ``partial`` to the gradient placements on ``lane`` and take ``scale`` times it in.

        ``.grad`` of the parameters in ``indices`` is bound at once, except of one that the user has
        frozen meanwhile; values are there when the lane has run.
        """
        missing = self._missing()
        if len(missing) < len(self._parameters):
            self._take_over_foreign_gradients(lane)
            missing = self._missing()
        begins = len(missing) == len(self._parameters)
        if begins:
            # Lets go of the old storage first.
            self.buffer, self.finished = self._unallocated
            self._bound.clear()
            self._use_fresh(lane.memory)
            self._stale = False
            self._carry = None
        else:
            if not lane.memory.is_static:
                self._leave_to_the_user(missing)
            if self._stale:
                self._set_finished_aside(missing, lane.memory)
        lane.wait_current()
        hooked = self.hooks.on(indices)
        # What a hook has seen, a user may have kept: that is no accumulator.
        direct = begins and not hooked and partial.dtype == self.buffer.dtype
        out = self.buffer if direct else None
        reduced = reduce_to(partial, self.buffer.placements, lane, out=out, label=label)
        self.hooks.see(reduced, hooked, lane)
        ends_here = not hooked and reduced is not partial and reduced is not self.buffer
        target = self.buffer.local
        # Dropped by the user, or never bound: their parts start from zero.
        restarted = [] if begins else [self.buffer.get_local_tensor(index) for index in missing]

        def take_in() -> None:
            with without_autograd():
                zero_each(restarted)
                if not begins:
                    target.add_(reduced.local, alpha=scale)
                elif reduced.local is target:
                    target.mul_(scale)
                elif scale == 1.0:
                    target.copy_(reduced.local)
                else:
                    torch.mul(reduced.local, scale, out=target)
            if ends_here:
                lane.memory.give_back(reduced.local)

        if reduced.local is not target or scale != 1.0:
            lane.then(take_in)
        unbound = set(missing)
        wanted = [i for i in indices if i in unbound and self._parameters[i].requires_grad]
        self._bind(self.buffer, wanted)

    def _missing(self) -> list[int]:
        """The parameters without a ``.grad``."""
        return [i for i, parameter in enumerate(self._parameters) if parameter.grad is None]

    @property
    def reduced_axis(self) -> int | None:
        """The one mesh axis that inner reductions go over; None where there are several or none."""
        axes = [axis for axis, each in enumerate(self.buffer.placements) if is_sharded(each)]
        return axes[0] if len(axes) == 1 else None

    def check_addition(self, index: int) -> None:
        """Whether somebody else may add a finished gradient to the ``.grad`` of a parameter now.

        Raises:
            RuntimeError: it waits for its last microbatch.
        """
        bound = self._bound.get(index)
        if self.needs_outer and not self._stale and self._parameters[index].grad is bound:
            if bound is not None:
                raise RuntimeError(
                    f"the loss reads the sharded parameter {self._fqns[index]!r} itself (a penalty "
                    "on model.parameters()), and its gradient came after those of the model, which "
                    "are not reduced over all axes yet; compute the penalty after the model's "
                    "forward, or in a backward of its own after the last microbatch"
                )

    def _take_over_foreign_gradients(self, lane: Lane) -> None:
        """Copy in every ``.grad`` that somebody else has put there (``p.grad = p.grad * 0.5``).

        Raises:
            RuntimeError: it cannot be taken over: it is not distributed like the parameter, or the
                accumulated gradients are waiting for their last microbatch.
        """
        foreign = [
            index
            for index, parameter in enumerate(self._parameters)
            if parameter.grad is not None and parameter.grad is not self._bound.get(index)
        ]
        if not foreign:
            return
        lane.synchronize()
        if self.buffer is self._unallocated[0]:
            self._use_fresh(lane.memory)
            self._stale = self.needs_outer
        # All before any place is written: they may be in one another's.
        for index, value in [(index, self._foreign_value(index)) for index in foreign]:
            self.finished.get_local_tensor(index).copy_(value)
            self._parameters[index].grad = None
        self._bind(self.finished, foreign)

    def _foreign_value(self, index: int) -> torch.Tensor:
        parameter = self._parameters[index]
        gradient = local = parameter.grad
        fits = not self.needs_outer or self._stale
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            # Not the shape alone, which may fit on some ranks only.
            fits = fits and gradient.placements == parameter.placements
            local = local_of(gradient)
        expected = self.finished.get_local_tensor(index).shape
        if not fits or local is None or local.shape != expected:
            raise RuntimeError(
                f"parameter {self._fqns[index]!r} has a .grad that was not put there by a "
                "backward, and another backward cannot add to it: expected a DTensor with the "
                "parameter's placements, set after the last microbatch; change gradients in "
                "place (p.grad.mul_(...)) instead"
            )
        ours = self.buffer.local.untyped_storage().data_ptr()
        return local.clone() if local.untyped_storage().data_ptr() == ours else local

    def _leave_to_the_user(self, dropped: Sequence[int]) -> None:
        """Who drops some gradients (a hook does, or one of two optimizers) may have kept them: they
        get memory of their own, for their place is about to be used again. (In static memory they
        are overwritten, as all are: captured graphs remember them.)"""
        for index in dropped:
            gradient = self._bound.pop(index, None)
            if isinstance(gradient, DTensor):
                local = local_of(gradient)
                local.data = local.clone()

    def _set_finished_aside(self, dropped: Sequence[int], memory: Memory) -> None:
        """Finished gradients were kept (several backwards, or zeroed in place): they come back
        after the next outer reduction, which must see only what has not been reduced yet. Those
        that the user dropped do not come back."""
        zero_each([self.finished.get_local_tensor(index) for index in dropped])
        kept = self.finished.local
        # Nobody reads an earlier one any more: every driver waits for an outer reduction before it
        # hands in more gradients.
        carry = self._static_carry
        if carry is None:
            size, device = kept.numel(), kept.device
            carry = memory.empty(size, kept.dtype, device, owner="kept gradients", lasting=True)
            self._static_carry = carry if memory.is_static else None
        self._carry = carry.copy_(kept)
        self.buffer.local.zero_()
        self._stale = False

    def finish(self, lane: Lane, accumulated: Event, *, label: str = "") -> None:
        """Reduce over the axes that are still partial, on ``lane`` after ``accumulated``.

        Binds ``.grad`` to the finished gradient. Nothing happens where the gradient placements
        leave nothing partial, or nothing is new.
        """
        if not self.needs_outer or self._stale or self.buffer is self._unallocated[0]:
            return
        lane.wait_event(accumulated)
        finished, carry = self.finished, self._carry
        # Kept until the next contribution: it is compute's memory, and the lane still reads it.
        self._carry_in_use, self._carry = carry, None
        reduce_in_place(self.buffer, finished, lane, label=label)
        if carry is not None:
            kept = carry

            def add_back() -> None:
                with without_autograd():
                    finished.local.add_(kept)

            lane.then(add_back)
        self._stale = True
        bound = [i for i, parameter in enumerate(self._parameters) if parameter.grad is not None]
        for index in bound:
            self._parameters[index].grad = None
        self._bind(finished, bound)

    def release_if_unused(self) -> None:
        """Let go of the storage when no parameter's ``.grad`` refers to it any more."""
        if self.buffer is not self._unallocated[0]:
            if len(self._missing()) == len(self._parameters):
                self.buffer, self.finished = self._unallocated
                self._bound.clear()

    def forget_events(self) -> None:
        """Compute has waited for all that this group's reductions have on lanes."""
        self._carry_in_use = None

    def host_state(self) -> GradientState:
        """What the next `accumulate` or `finish` decides by.

        Raises:
            Uncapturable: hooks of the user must be called, or a ``.grad`` be taken over.
        """
        if self.hooks.any_of_users():
            raise Uncapturable("a parameter has hooks")
        gradients = tuple(parameter.grad for parameter in self._parameters)
        for index, gradient in enumerate(gradients):
            if gradient is not None and gradient is not self._bound.get(index):
                raise Uncapturable("a .grad was not put there by a backward")
        return GradientState(
            address=self.buffer.local.data_ptr(),
            bound=tuple(gradient is not None for gradient in gradients),
            stale=self._stale,
            carry_address=0 if self._carry is None else self._carry.data_ptr(),
            buffers=(self.buffer, self.finished),
            gradients=gradients,
            carry=self._carry,
        )

    def put_host_state(self, state: GradientState) -> None:
        """Be as in ``state``, which a recorded run of a graph has left behind."""
        self.buffer, self.finished = state.buffers
        self._stale, self._carry = state.stale, state.carry
        self._bound.clear()
        for index, gradient in enumerate(state.gradients):
            if gradient is not None:
                self._bound[index] = gradient
            if self._parameters[index].grad is not gradient:
                self._parameters[index].grad = None
                self._parameters[index].grad = gradient

    def _bind(self, buffer: DBuffer, indices: Sequence[int]) -> None:
        for index, gradient in zip(indices, buffer.get_dtensors(indices), strict=True):
            self._parameters[index].grad = gradient
            self._bound[index] = gradient


def take_gradients(parameters: Sequence[FsdpParameter]) -> dict[int, torch.Tensor]:
    """The unsharded parameters' ``.grad`` by tensor index; they lose it."""
    gradients: dict[int, torch.Tensor] = {}
    for index, parameter in enumerate(parameters):
        if parameter.unsharded.grad is not None:
            gradients[index] = parameter.unsharded.grad
            parameter.unsharded.grad = None
    return gradients


def pack_gradients(
    partial: DBuffer, gradients: Mapping[int, torch.Tensor], fqns: Sequence[str]
) -> None:
    """Copy full gradients, by tensor index, into ``partial``; the others' parts become zero.

    Raises:
        RuntimeError: a gradient is sparse; the message names it from ``fqns``.
    """
    for index, gradient in gradients.items():
        if gradient.layout != torch.strided:
            raise RuntimeError(
                f"parameter {fqns[index]!r} has a {gradient.layout} gradient; sharded "
                "gradients must be dense (for nn.Embedding pass sparse=False)"
            )
    targets = partial.get_local_tensors(range(len(fqns)))
    copy_each([targets[index] for index in gradients], list(gradients.values()))
    zero_each([target for index, target in enumerate(targets) if index not in gradients])


def reduce_to(
    partial: DBuffer,
    placements: Sequence[Placement],
    lane: Lane,
    *,
    out: DBuffer | None = None,
    label: str = "",
) -> DBuffer:
    """Reduce-scatter ``partial`` over every axis that ``placements`` shards, inner first.

    Returns:
        ``partial`` itself if there is no such axis; else ``out``, or new memory of the lane.
    """
    axes = [axis for axis, placement in enumerate(placements) if isinstance(placement, Shard)]
    current = partial
    for axis in reversed(axes):
        step = list(current.placements)
        step[axis] = placements[axis]
        before = current
        current = current.redistribute(
            # The very tuple is recognised.
            placements if step == list(placements) else step,
            out=out if axis == axes[0] else None,
            lane=lane,
            depends=current is not partial,
            label=label,
        )
        if before is not partial:
            lane.then(functools.partial(lane.memory.give_back, before.local))
    return current


def reduce_in_place(source: DBuffer, target: DBuffer, lane: Lane, *, label: str = "") -> None:
    """Reduce ``source`` over every axis that ``target`` does not leave partial, inner first.

    ``target`` is a part of ``source``, or all of it; what lies between is as well, so nothing is
    allocated and ``source`` has no value afterwards. Inner first because a segment is cut by
    dp_inner first: the outer axis then works on one inner segment only.
    """
    axes = differing_axes(source.placements, target.placements)
    current = source
    for axis in reversed(axes):
        placements = list(current.placements)
        placements[axis] = target.placements[axis]
        if axis == axes[0]:
            out = target
        elif isinstance(placements[axis], Shard):
            out = current.view(placements)
        else:
            out = current.like(placements, current.local)
        current = current.redistribute(
            placements, out=out, lane=lane, depends=current is not source, label=label
        )
