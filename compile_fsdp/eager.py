"""The eager driver: module hooks that unshard before compute and reduce after it.

Per FSDP module, in this order::

    pre-forward     unshard self, wait, prefetch the next module
    post-forward    release; watch the outputs for their gradients
    pre-backward    (first output gradient) unshard self, wait, prefetch the next in backward
    post-backward   (gradients of all inputs, or the end of the backward) release, reduce

A group whose every parameter has its gradient is reduced at once, without waiting for the
module's inputs. All hooks return at once while Dynamo traces: compiled graphs carry their
own communication, and hooks that the interpreter calls around compiled code hold nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn

from compile_fsdp.runtime.parameter_group import FsdpParameter, FsdpParameterGroup, Phase
from compile_fsdp.runtime.torch_internals import in_backward

from .inspection import check_all_managed, kept_tensors
from .torch_internals import (
    flatten,
    inlined_or_skipped,
    is_dynamo_active,
    never_compiled_alone,
    unflatten,
)
from .unit import FsdpUnit


def install_hooks(module: nn.Module, unit: FsdpUnit) -> None:
    """Drive ``unit`` from ``module``'s forward and from its parameters' gradients."""
    module.register_forward_pre_hook(_pre_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(_post_forward, always_call=True)
    unit.run_as_forward = _run_as_forward
    for group in unit.groups:
        watch_gradients(unit, group)


def remove_hooks(module: nn.Module) -> None:
    """Undo `install_hooks` on a module whose hooks were copied from another one's."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number in [key for key, hook in hooks.items() if hook in (_pre_forward, _post_forward)]:
            del hooks[number]
            module._forward_pre_hooks_with_kwargs.pop(number, None)
            module._forward_hooks_always_called.pop(number, None)


def watch_gradients(unit: FsdpUnit, group: FsdpParameterGroup) -> None:
    """Reduce ``group`` when all its trainable parameters, now and later, have their gradients."""
    watched: set[FsdpParameter] = set()
    unit.note_versions(group)

    def watch_trainable() -> None:
        for parameter, trainable in zip(group.parameters, group.trainable, strict=True):
            if trainable and parameter not in watched:
                watched.add(parameter)
                _reduce_when_complete(unit, group, parameter)

    group.when_trainable_changes(watch_trainable)


@inlined_or_skipped
def _unit_of(module: nn.Module) -> FsdpUnit:
    return cast(FsdpUnit, module._fsdp_unit)


@inlined_or_skipped
def _pre_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if torch.compiler.is_compiling():
        return None
    return _enter_forward(module, _unit_of(module), args, kwargs, is_dynamo_active())


@inlined_or_skipped
def _post_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    if torch.compiler.is_compiling():
        return None
    return _leave_forward(module, _unit_of(module), output, is_dynamo_active())


@inlined_or_skipped
def _run_as_forward(
    unit: FsdpUnit,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a method of a module, the first of ``args``, between the hooks of ``unit``."""
    compiled = is_dynamo_active()
    output = replaced = None
    try:
        watched = _enter_forward(args[0], unit, args, kwargs, compiled)
        args, kwargs = (args, kwargs) if watched is None else watched
        output = function(*args, **kwargs)
    finally:
        replaced = _leave_forward(args[0], unit, output, compiled)
    return output if replaced is None else replaced


@never_compiled_alone
def _enter_forward(
    module: nn.Module, unit: FsdpUnit, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: bool
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """``compiled``: Dynamo compiles what the module runs, and graphs bring their own gathers; what
    Dynamo leaves to the interpreter unshards on demand."""
    if in_backward():
        # Recomputation: the weights serve this backward, and the forward order says nothing
        # about what is needed next.
        unit.move_to(Phase.BACKWARD)
        unit.hold_all()
        unit.hold_for_recomputation()
        unit.context.finish_at_end_of_backward()
    else:
        outermost = unit.context.eager_depth == 0
        unit.context.enter_forward(unit)
        if compiled:
            return None
        if outermost and torch.is_grad_enabled():
            check_all_managed(module)
        unit.hold_all()
        unit.context.prefetch_after(unit, Phase.FORWARD)
    return _watch_inputs(unit, args, kwargs) if torch.is_grad_enabled() else None


@never_compiled_alone
def _leave_forward(module: nn.Module, unit: FsdpUnit, output: Any, compiled: bool) -> Any:
    """Returns the output where it must be replaced, else None (as a forward hook does).

    Called after an exception too, with no output.
    """
    on_demand: tuple[FsdpParameterGroup, ...] = ()
    replaced = None
    if not compiled:
        outermost = unit.context.eager_depth <= 1
        groups = unit.context.groups() if outermost else unit.groups
        replaced = _without_views_of_full_parameters(groups, output)
    if unit.phase is Phase.FORWARD:
        on_demand = unit.context.leave_forward(unit)
    if torch.is_grad_enabled() and (on_demand or not compiled):
        watched = output if replaced is None else replaced
        kept = [] if compiled else list(kept_tensors(module))
        _watch_outputs(unit, (watched, kept), on_demand, holds_unit=not compiled)
    if unit.phase is Phase.BACKWARD:
        unit.drop_for_recomputation()
    unit.check_unwritten()
    return replaced


def _without_views_of_full_parameters(groups: Iterable[FsdpParameterGroup], output: Any) -> Any:
    """A module may return its parameter; outside it, the memory would be gone. None: it did not."""
    storages = {group.full_local_tensor.untyped_storage().data_ptr() for group in groups}
    leaves, structure = flatten(output)
    escaping = [
        position
        for position, leaf in enumerate(leaves)
        if type(leaf) in (torch.Tensor, nn.Parameter)
        and leaf.layout == torch.strided
        and leaf.untyped_storage().data_ptr() in storages
    ]
    for position in escaping:
        leaves[position] = leaves[position].clone()
    return unflatten(leaves, structure) if escaping else None


def _watch_outputs(
    unit: FsdpUnit,
    output: Any,
    on_demand: tuple[FsdpParameterGroup, ...],
    *,
    holds_unit: bool,
) -> None:
    """Unshard when the first gradient of an output arrives: the unit's own groups, and those that
    were unsharded on demand below it, whose owners' hooks did not run."""

    @never_compiled_alone
    def pre_backward(gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"backward with create_graph=True through FSDP module {unit.fqn or '<root>'!r}: "
                "gradients of gradients are not supported with sharded parameters; compute them "
                "with an unsharded copy"
            )
        unit.context.finish_at_end_of_backward()
        for group in on_demand:
            unit.context.unshard_on_demand(group)
        if not holds_unit:
            return
        entering = unit.phase is Phase.RESTING
        unit.move_to(Phase.BACKWARD)
        unit.hold_all()
        if entering:
            unit.context.prefetch_after(unit, Phase.BACKWARD)

    for tensor in _tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(pre_backward)


def _tensors_in(output: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """The tensors in nests of containers, dataclasses and plain objects."""
    for leaf in flatten(output)[0]:
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif depth > 0 and hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module | type):
            yield from _tensors_in(list(vars(leaf).values()), depth - 1)


def _watch_inputs(
    unit: FsdpUnit, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Pass the tensors among the arguments through `_PostBackward`.

    Only the arguments themselves: a list or dict stays the caller's own, into which the module may
    write. A unit whose inputs are all nested is finished at the end of the backward.
    """
    values = [*args, *kwargs.values()]
    watched = [
        position
        for position, value in enumerate(values)
        if isinstance(value, torch.Tensor) and value.requires_grad
    ]
    if not watched:
        return None
    passed = _PostBackward.apply(  # type: ignore[no-untyped-call]
        unit, *(values[position] for position in watched)
    )
    for position, tensor in zip(watched, passed, strict=True):
        values[position] = tensor
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))


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
    # Weakly: autograd holds the hook where Python's garbage collector cannot see it.
    unit_reference, group_reference = weakref.ref(unit), weakref.ref(group)
    fqn = parameter.fqns[0]

    @never_compiled_alone
    def accumulated(_: torch.Tensor) -> None:
        unit, group = unit_reference(), group_reference()
        if unit is None or group is None:
            return
        unit.context.finish_at_end_of_backward()
        # Gradients of quantised weights need no weights.
        if group.gathers and not group.planes and not group.is_readable:
            raise RuntimeError(
                f"parameter {fqn!r} got a gradient although nothing announced the backward of its "
                f"FSDP module {unit.fqn or '<root>'!r}, so its weights were not there: what the "
                "module computed reached the loss without being among its outputs or attributes "
                "(written into an argument, or into a global). Return it from the module's "
                "forward, or compile the model"
            )
        if all(
            other.unsharded.grad is not None or not trainable
            for other, trainable in zip(group.parameters, group.trainable, strict=True)
        ):
            # The weights stay: a path without a gradient (a detached use) may still read them.
            group.reduce_gradients()

    parameter.unsharded.register_post_accumulate_grad_hook(accumulated)
