"""What the eager driver looks for in a module tree: strangers, and losses that are kept.

Both walks visit every module once for each forward of a root and touch plain dicts only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from compile_fsdp.runtime.parameter_group import get_containing_parameter_group

from .module import METHODS_ATTRIBUTE, SLOTS_ATTRIBUTE, UNIT_ATTRIBUTE
from .torch_internals import flatten

_KEPT_MARK = "compile_fsdp_watched"
_STATE = frozenset(nn.Module().__dict__) | {SLOTS_ATTRIBUTE, UNIT_ATTRIBUTE, METHODS_ATTRIBUTE}


def check_all_managed(root: nn.Module) -> None:
    """Refuse trainable parameters below ``root`` that no FSDP module owns: ranks would train them
    apart.

    Raises:
        RuntimeError: names the parameter.
    """
    for module in root.modules():
        # Under a managed name there is another tensor while functional_call runs.
        managed = module.__dict__.get(SLOTS_ATTRIBUTE, ())
        for name, parameter in module._parameters.items():
            if (
                parameter is not None
                and parameter.requires_grad
                and name not in managed
                and get_containing_parameter_group(parameter) is None
            ):
                raise _unmanaged(root, parameter, name)


def _unmanaged(root: nn.Module, parameter: nn.Parameter, name: str) -> RuntimeError:
    """The error for a trainable ``parameter`` below ``root`` that no FSDP module owns."""
    names = [fqn for fqn, each in root.named_parameters() if each is parameter]
    return RuntimeError(
        f"parameter {(names or [name])[0]!r} is trainable and was added after fully_shard, so its "
        "gradient would be another one on every rank. Call fully_shard again on the sharded "
        "modules that got new parameters, children before parents: it takes in what is new "
        "(then build the optimizer)"
    )


def kept_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors with a gradient that ``module`` and the modules below it keep as attributes.

    Those of FSDP modules below are left to their own hooks, and none is found twice.
    """
    pending = [module]
    while pending:
        current = pending.pop()
        for name, value in current.__dict__.items():
            if name not in _STATE and isinstance(value, torch.Tensor | list | tuple | dict):
                yield from _new_results(value)
        pending.extend(
            child
            for child in current._modules.values()
            if child is not None and UNIT_ATTRIBUTE not in child.__dict__
        )


def _new_results(value: Any) -> Iterator[torch.Tensor]:
    for leaf in [value] if isinstance(value, torch.Tensor) else flatten(value)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            metadata = cast("dict[Any, Any]", leaf.grad_fn.metadata)
            if _KEPT_MARK not in metadata:
                metadata[_KEPT_MARK] = True
                yield leaf
