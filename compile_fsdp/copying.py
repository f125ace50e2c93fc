"""Deep copies of sharded modules: ``copy.deepcopy(model)``, as for an average of the weights.

A copy is made in two steps. The modules are copied as they were before they were sharded, with
parameters on the meta device. Then every unit is sharded like its original, children first, and
the local parts of the weights are copied: nothing is gathered, no rank talks to another.

The copy has groups, buffers, names and hooks of its own. As with any module, it has no gradients
and is not compiled.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar, cast

import torch
from torch import nn

from compile_fsdp.runtime.parameter import _CONTAINING_PARAMETER_GROUP_ATTR, FsdpParameter
from compile_fsdp.runtime.parameter_group import FsdpParameterGroup

from .eager import remove_hooks
from .fully_shard import commit, units_of
from .module import SLOTS_ATTRIBUTE, UNIT_ATTRIBUTE
from .unit import FsdpUnit

_Module = TypeVar("_Module", bound=nn.Module)

# A key of deepcopy's memo, beside the ids that are its others: modules are being copied as they
# were before they were sharded.
_UNSHARDED = "compile_fsdp: unsharded"


def is_copying(memo: dict[Any, Any]) -> bool:
    """Whether ``memo`` belongs to a `copy_sharded` that is copying the modules below its root."""
    return _UNSHARDED in memo


def copy_sharded(module: _Module, memo: dict[Any, Any]) -> _Module:
    """A deep copy of an FSDP module and everything below it."""
    units = list(units_of(module))
    for _, unit in units:
        for group in unit.groups:
            for parameter in group.parameters:
                plain = _plain_parameter(group, parameter, memo)
                memo[id(parameter.sharded)] = memo[id(parameter.unsharded)] = plain
    memo[_UNSHARDED] = True
    try:
        copied = copy_unsharded(module, memo)
    finally:
        del memo[_UNSHARDED]
    for fqn, unit in reversed(units):  # children before their parents
        _shard_alike(copied.get_submodule(fqn), unit, memo)
    return copied


def copy_unsharded(module: _Module, memo: dict[Any, Any]) -> _Module:
    """A deep copy of ``module`` as it was before it was sharded, except for what ``memo`` knows."""
    original: type[_Module] = type(module)._fsdp_original_class  # type: ignore[attr-defined]
    copied = original.__new__(original)
    memo[id(module)] = copied
    state: dict[str, Any] = module.__getstate__()  # type: ignore[no-untyped-call]
    kept = {key: state[key] for key in state if key not in (UNIT_ATTRIBUTE, SLOTS_ATTRIBUTE)}
    copied.__setstate__(copy.deepcopy(kept, memo))  # type: ignore[no-untyped-call]
    return copied


def _plain_parameter(
    group: FsdpParameterGroup, parameter: FsdpParameter, memo: dict[Any, Any]
) -> nn.Parameter:
    """What ``parameter`` was before it was sharded, on meta, with a copy of its attributes."""
    plain = nn.Parameter(
        torch.empty(parameter.sharded.shape, dtype=group.dtype, device="meta"),
        requires_grad=group.main_grad is not None,
    )
    # torch marks Parameters that are DTensors by the second attribute.
    ours = (_CONTAINING_PARAMETER_GROUP_ATTR, "_is_param")
    attributes = {key: value for key, value in vars(parameter.sharded).items() if key not in ours}
    plain.__dict__.update(copy.deepcopy(attributes, memo))
    return plain


def _shard_alike(module: nn.Module, unit: FsdpUnit, memo: dict[Any, Any]) -> None:
    remove_hooks(module)
    groups = []
    for group in unit.groups:
        members = {
            fqn: memo[id(parameter.sharded)]
            for parameter in group.parameters
            for fqn in parameter.fqns
        }
        groups.append(group.sharded_alike(module, members))
    commit(module, tuple(groups), unit.context.device, unified=unit.context.unified)
    copied = cast(FsdpUnit, module.__dict__[UNIT_ATTRIBUTE])
    copied.unquantized.update(unit.unquantized)
    context = copied.context
    context.zeros_missing_gradients = unit.context.zeros_missing_gradients
