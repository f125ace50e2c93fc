"""The eager driver: module hooks that unshard before compute and reduce after it.

Per FSDP module, in this order::

    pre-forward     unshard self, wait, prefetch the next module
    post-forward    release; watch the outputs for their gradients
    pre-backward    (first output gradient) unshard self, wait, prefetch the next in backward
    post-backward   (gradients of all inputs, or the end of the backward) release, reduce

A group whose every parameter has its gradient is released and reduced at once, without waiting
for the module's inputs. All hooks return at once while Dynamo traces: compiled graphs carry their
own communication.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from compile_fsdp.runtime.parameter_group import FsdpParameter, FsdpParameterGroup, Phase
from compile_fsdp.runtime.torch_internals import in_backward

from .module import FsdpUnit
from .torch_internals import flatten, never_compiled_alone, unflatten


def install_hooks(module: nn.Module, unit: FsdpUnit) -> None:
    """Drive ``unit`` from ``module``'s forward and from its parameters' gradients."""
    module.register_forward_pre_hook(_pre_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(_post_forward, prepend=False)
    for group in unit.groups:
        if group.requires_grad:
            for parameter in group.parameters:
                _reduce_when_complete(unit, group, parameter)


@never_compiled_alone
def _pre_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if torch.compiler.is_compiling():
        return None
    unit = cast(FsdpUnit, module._fsdp_unit)
    if in_backward():
        # Recomputation: the weights serve this backward, and the forward order says nothing
        # about what is needed next.
        unit.move_to(Phase.BACKWARD)
        unit.hold_all()
        unit.context.finish_at_end_of_backward()
        return None
    unit.context.enter_forward(unit)
    unit.move_to(Phase.FORWARD)
    unit.hold_all()
    unit.context.prefetch_after(unit, Phase.FORWARD)
    for group in unit.groups:
        group.release_unused_gradient_storage()
    return _watch_inputs(unit, args, kwargs) if torch.is_grad_enabled() else None


@never_compiled_alone
def _post_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    unit = cast(FsdpUnit, module._fsdp_unit)
    if unit.phase is Phase.FORWARD:
        unit.drop_all()
        unit.move_to(Phase.RESTING)
        unit.context.leave_forward()
    if torch.is_grad_enabled():
        _watch_outputs(unit, output)


def _watch_outputs(unit: FsdpUnit, output: Any) -> None:
    @never_compiled_alone
    def pre_backward(gradient: torch.Tensor) -> None:
        unit.context.finish_at_end_of_backward()
        entering = unit.phase is Phase.RESTING
        unit.move_to(Phase.BACKWARD)
        unit.hold_all()
        if entering:
            unit.context.prefetch_after(unit, Phase.BACKWARD)

    for tensor in flatten(output)[0]:
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(pre_backward)


def _watch_inputs(
    unit: FsdpUnit, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    leaves, spec = flatten((args, kwargs))
    watched = [
        position
        for position, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    if not watched:
        return None
    passed = _PostBackward.apply(  # type: ignore[no-untyped-call]
        unit, *(leaves[position] for position in watched)
    )
    for position, tensor in zip(watched, passed, strict=True):
        leaves[position] = tensor
    return cast(tuple[tuple[Any, ...], dict[str, Any]], unflatten(leaves, spec))


class _PostBackward(torch.autograd.Function):
    """Identity on a module's inputs; its backward runs when the module's has run.

    The engine executes ready nodes latest-created first, and this node is created before
    everything in the module, so even paths that do not reach the inputs are done by then.
    """

    @staticmethod
    def forward(ctx: Any, unit: FsdpUnit, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.unit = unit
        return tuple(tensor.view_as(tensor) for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if ctx.unit.phase is Phase.BACKWARD:
            ctx.unit.context.finish_unit_backward(ctx.unit)
        return (None, *gradients)


def _reduce_when_complete(
    unit: FsdpUnit, group: FsdpParameterGroup, parameter: FsdpParameter
) -> None:
    @never_compiled_alone
    def accumulated(_: torch.Tensor) -> None:
        unit.context.finish_at_end_of_backward()
        if all(other.unsharded.grad is not None for other in group.parameters):
            # Whoever else reads these weights in this backward has run: their gradients were
            # summed before the last of them got here.
            unit.drop(group)
            group.reduce_gradients()

    parameter.unsharded.register_post_accumulate_grad_hook(accumulated)
