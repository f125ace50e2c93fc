"""fully_shard_optimizer: step hooks that keep gradients and model weights in their dtypes."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from compile_fsdp.runtime.parameter_group import (
    FsdpParameterGroup,
    get_containing_parameter_group,
    sync_model_weights_from_main_weights,
)
from compile_fsdp.runtime.row_dtensor import cut_tensor_like

from .flat_step import FlatStep, is_elementwise_optimizer, set_gradient
from .local_step import LocalStep


def fully_shard_optimizer(
    optimizer: torch.optim.Optimizer,
    *,
    precision_aware: bool = False,
    local: int | str | None = None,
) -> None:
    """Prepare ``optimizer`` for sharded parameters; call it once, after ``fully_shard``.

    Before each step, gradients whose dtype differs from their parameter's are cast to it; after
    it, the original gradients come back and model weights are refreshed from main weights. State
    that ``load_state_dict`` brings is distributed like the parameters.
    Without this call model weights are refreshed after every backward instead, which does the work
    for every microbatch, and gradients keep ``main_grads_dtype``: where that is not the main
    weights' dtype (bf16 compute under the default policy), AdamW and others refuse them.

    Args:
        optimizer: any optimizer over (some of) the sharded model's parameters.
        precision_aware: the optimizer accepts gradients of another dtype than the parameter's:
            they are not cast.
        local: None: the optimizer computes with DTensors; torch's own elementwise ones (AdamW, SGD
            and the like) with whole stretches of the flat buffers at once, which gives the same
            values. Otherwise it computes with plain tensors,
            this rank's part of each parameter, and ``local`` is the unit that it updates as a
            whole and that must not be split between ranks: a number of consecutive elements (the
            block size of 8-bit state; 1 for AdamW), ``"row"``, or ``"tensor"`` (Muon). Between
            steps ``param_groups`` and ``state`` have the parameters, and DTensors, as ever.

    Raises:
        TypeError: not a ``torch.optim.Optimizer``.
        ValueError: none of its parameters is sharded, one is as it was before ``fully_shard``, it
            has been prepared already, or a unit of ``local`` is split.
        NotImplementedError: later, by ``step(closure)``.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"fully_shard_optimizer needs a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if hasattr(optimizer, _HOOKS_ATTRIBUTE):
        raise ValueError(
            f"this {type(optimizer).__name__} has been through fully_shard_optimizer already; "
            "call it once"
        )
    if not any(get_containing_parameter_group(p) is not None for p in _parameters(optimizer)):
        raise ValueError(
            f"no parameter of this {type(optimizer).__name__} is sharded; build the optimizer "
            "from model.parameters() after fully_shard"
        )
    _check_sharded_forms(optimizer)
    local_step = None if local is None else LocalStep(local)
    if local_step is not None:
        local_step.check(optimizer)
    flat_step = FlatStep() if local is None and is_elementwise_optimizer(optimizer) else None
    hooks = _StepHooks(precision_aware, local_step, flat_step)
    hooks.mark_synced(optimizer)
    optimizer.register_step_pre_hook(hooks.before_step)
    optimizer.register_step_post_hook(hooks.after_step)
    optimizer.register_load_state_dict_post_hook(cut_state_like_parameters)
    setattr(optimizer, _HOOKS_ATTRIBUTE, hooks)
    _restore_when_a_step_raises(optimizer, hooks)


def _check_sharded_forms(optimizer: torch.optim.Optimizer) -> None:
    """No step writes the full form of a parameter: it would change nothing, and say nothing."""
    full: dict[FsdpParameterGroup, dict[int, str]] = {}
    for parameter in _parameters(optimizer):
        group = get_containing_parameter_group(parameter)
        if group is None:
            continue
        if group not in full:
            full[group] = {id(each.unsharded): each.fqns[0] for each in group.parameters}
        name = full[group].get(id(parameter))
        if name is not None:
            raise ValueError(
                f"this {type(optimizer).__name__} was built before fully_shard: expected the "
                f"sharded parameter {name!r} that model.parameters() has now, found the full one, "
                "which no step updates; build the optimizer after the last call of fully_shard"
            )


def _restore_when_a_step_raises(optimizer: torch.optim.Optimizer, hooks: _StepHooks) -> None:
    """Undo `_StepHooks.before_step` where no hook would: a step that raises has no hook after it.

    Whoever catches the exception finds parameters, gradients and state as ever. The step of this
    one optimizer is wrapped, as torch's learning rate schedulers do, which find what they have
    left there (``wraps`` copies it) and may wrap it again.
    """
    step = optimizer.step

    @functools.wraps(step)
    def restoring(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except BaseException:
            hooks.restore(self)
            raise

    setattr(optimizer, "step", types.MethodType(restoring, optimizer))  # noqa: B010


_HOOKS_ATTRIBUTE = "_compile_fsdp_hooks"


def cut_state_like_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer's DTensors the rows of their parameters.

    ``torch.distributed.checkpoint.state_dict`` cuts what it loads like ``torch.chunk``, whatever
    the parameter's rows are. All ranks take part.
    """
    with torch.no_grad():
        for parameter in _parameters(optimizer):
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if not isinstance(value, torch.Tensor):
                    continue
                scalar = isinstance(parameter, DTensor) and parameter.ndim == value.ndim == 0
                if scalar and not isinstance(value, DTensor) and name != "step":
                    # Those functions take every 0-D tensor for a step count.
                    state[name] = torch.empty_like(parameter).copy_(value)
                else:
                    state[name] = cut_tensor_like(value, parameter)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for param_group in optimizer.param_groups:
        yield from param_group["params"]


class _StepHooks:
    """What one optimizer's step does before and after."""

    def __init__(
        self, precision_aware: bool, local_step: LocalStep | None, flat_step: FlatStep | None
    ) -> None:
        self._precision_aware = precision_aware
        self._local_step = local_step
        self._flat_step = flat_step
        self._original_gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._marked: tuple[torch.Tensor, ...] = ()

    def mark_synced(self, optimizer: torch.optim.Optimizer) -> None:
        """Tell the groups which parameters' steps refresh their model weights."""
        parameters = tuple(_parameters(optimizer))
        if list(map(id, parameters)) == list(map(id, self._marked)):
            return
        self._marked = parameters
        groups: dict[FsdpParameterGroup, list[torch.Tensor]] = {}
        for parameter in parameters:
            group = get_containing_parameter_group(parameter)
            if group is not None:
                groups.setdefault(group, []).append(parameter)
        for group, members in groups.items():
            group.refreshed_by_steps(members)

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:
            raise NotImplementedError(
                f"{type(optimizer).__name__}.step(closure) is not supported with sharded "
                "parameters: run forward and backward first, then call step() without a closure"
            )
        self.restore(optimizer)  # whoever called the class' step has not
        self.mark_synced(optimizer)
        if self._flat_step is not None:
            self._flat_step.enter(optimizer, cast=not self._precision_aware)
        if not self._precision_aware:
            self._cast_gradients(optimizer)
        if self._local_step is not None:
            self._local_step.enter(optimizer)

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer its parameters back, and these their gradients."""
        for inside in (self._local_step, self._flat_step):
            if inside is not None:
                inside.leave(optimizer)
        for parameter, gradient in self._original_gradients:
            set_gradient(parameter, gradient)
        self._original_gradients.clear()

    def _cast_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in _parameters(optimizer):
            gradient = parameter.grad
            if gradient is not None and gradient.dtype != parameter.dtype:
                self._original_gradients.append((parameter, gradient))
                set_gradient(parameter, gradient.to(parameter.dtype))

    def after_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.restore(optimizer)
        sync_model_weights_from_main_weights(list(_parameters(optimizer)))
