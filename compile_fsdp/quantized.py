"""Which parameters compute in MXFP8, why the others do not, and how their modules do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from compile_fsdp.runtime.mixed_precision import MixedPrecisionPolicy
from compile_fsdp.runtime.mxfp8 import BLOCK, SOURCE_DTYPES, is_eligible
from compile_fsdp.runtime.quantized_linear import linear_in_graph, linear_with_planes
from compile_fsdp.runtime.scaled_matmul import obstacle_to_scaled_matmul

if TYPE_CHECKING:
    from .module import ParameterSlot

__all__ = ["Quantization", "linear_forward", "quantization"]

_DTYPES = ", ".join(map(str, SOURCE_DTYPES))


@dataclass(frozen=True)
class Quantization:
    """What a policy's ``compute_weights`` means for the parameters of one module.

    Attributes:
        parameters: those that compute in MXFP8.
        others: why each of the others does not, by its first name.
    """

    parameters: frozenset[nn.Parameter] = frozenset()
    others: Mapping[str, str] = field(default_factory=dict)


def quantization(
    module: nn.Module,
    owned: Mapping[str, nn.Parameter],
    policy: MixedPrecisionPolicy,
    device: torch.device,
) -> Quantization:
    """Choose among the parameters ``owned``, by name below ``module``; they compute on ``device``.

    Raises:
        ValueError: main weights have a dtype that is not quantised; a parameter that the policy
            names cannot be; the policy names none with one of its patterns; the device has no
            products of quantised matrices, which the policy asks for.
    """
    if policy.compute_weights is None:
        return Quantization()
    _check_main_dtype(policy)
    if policy.scaled_matmul:
        _check_matmul(device)
    names: dict[nn.Parameter, list[str]] = {}
    for fqn, parameter in owned.items():
        names.setdefault(parameter, []).append(fqn)
    patterns = policy.compute_weights
    if isinstance(patterns, Mapping):
        _check_patterns(patterns, owned)
    chosen: list[nn.Parameter] = []
    others: dict[str, str] = {}
    for parameter, fqns in names.items():
        obstacle = _obstacle(module, parameter, fqns)
        if isinstance(patterns, Mapping):
            pattern = next((p for p in patterns for fqn in fqns if fnmatchcase(fqn, p)), None)
            if pattern is None or patterns[pattern] is None:
                obstacle = "compute_weights " + (
                    "has no pattern for it" if pattern is None else f"says {pattern!r}: None"
                )
            elif obstacle is not None:
                raise _named_in_vain(fqns[0], pattern, obstacle)
        if obstacle is None:
            chosen.append(parameter)
        else:
            others[fqns[0]] = obstacle
    return Quantization(frozenset(chosen), others)


def _obstacle(module: nn.Module, parameter: nn.Parameter, fqns: list[str]) -> str | None:
    """Why ``parameter`` cannot be quantised; None: it can be."""
    for fqn in fqns:
        owner_fqn, _, name = fqn.rpartition(".")
        owned_by = module.get_submodule(owner_fqn)
        owner = getattr(type(owned_by), "_fsdp_original_class", type(owned_by))
        also = f", as {fqn!r}" if len(fqns) > 1 else ""
        if name != "weight" or owner.forward is not nn.Linear.forward:
            return f"it is the {name} of {owner.__name__}{also}, not the weight of an nn.Linear"
        if "forward" in vars(owned_by):
            return f"its {owner.__name__} has got a forward of its own{also}"
        if issubclass(owner, NonDynamicallyQuantizableLinear):
            return f"nn.MultiheadAttention reads it itself{also}"
    if not is_eligible(parameter.shape) or parameter.numel() == 0:
        return f"its shape is {tuple(parameter.shape)}, not multiples of {BLOCK}"
    if parameter.dtype not in SOURCE_DTYPES:
        return f"its dtype is {parameter.dtype}, not one of {_DTYPES}"
    return None


def _named_in_vain(fqn: str, pattern: str, obstacle: str) -> ValueError:
    return ValueError(
        f"fully_shard: parameter {fqn!r} cannot compute in MXFP8, which compute_weights asks for "
        f"with {pattern!r}: {obstacle}. Expected the weight of an nn.Linear, of one of {_DTYPES}, "
        f"whose dims are multiples of {BLOCK}. Leave it out of compute_weights, say "
        f'{{{fqn!r}: None, ...}} first, or pass compute_weights="mxfp8", which takes what can be'
    )


def _check_patterns(patterns: Mapping[str, str | None], owned: Mapping[str, nn.Parameter]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(fqn, pattern) for fqn in owned):
            raise ValueError(
                f"fully_shard: compute_weights has the pattern {pattern!r}, which is the name of "
                f"no parameter that this call shards: {', '.join(owned) or 'none'}. Names are "
                "those below the module that is sharded, and each call has a policy of its own"
            )


def _check_main_dtype(policy: MixedPrecisionPolicy) -> None:
    dtype = policy.main_params_dtype
    if dtype is not None and dtype not in SOURCE_DTYPES:
        raise ValueError(
            f"fully_shard: main_params_dtype={dtype} does not go with compute_weights="
            f"{policy.compute_weights!r}: MXFP8 is quantised from one of {_DTYPES}. Use one of "
            "these, or leave compute_weights out"
        )


def _check_matmul(device: torch.device) -> None:
    obstacle = obstacle_to_scaled_matmul(device)
    if obstacle is not None:
        raise ValueError(
            f"fully_shard: scaled_matmul=True {obstacle}. Leave it out: weights are gathered in "
            "MXFP8 all the same, and dequantised before products"
        )


def linear_forward(self: Any, input: torch.Tensor) -> torch.Tensor:
    """``nn.Linear.forward`` of a module whose weight is quantised.

    Raises:
        TypeError: ``input`` has a dtype that no weight can be dequantised to.
    """
    slot: ParameterSlot = self._fsdp_slots["weight"]
    if not input.is_floating_point():
        raise TypeError(
            f"the linear layer of {slot.fqn!r} computes in MXFP8 and needs an input of a "
            f"floating-point dtype, found {input.dtype}; convert it"
        )
    if torch.compiler.is_compiling():
        rowwise, columnwise = slot.planes
        return linear_in_graph(
            input,
            self.bias,
            slot.flat_leaf,
            rowwise,
            columnwise,
            slot.group_name,
            slot.index,
            slot.count,
            scaled=slot.scaled_matmul,
        )
    parameter = slot.group.parameters[slot.index]
    if self._parameters["weight"] is not parameter.sharded:
        # Replaced, for the time of a functional_call.
        return F.linear(input, self.weight, self.bias)
    return linear_with_planes(
        input,
        parameter.unsharded,
        self.bias,
        slot.read_rowwise,
        slot.read_columnwise,
        scaled=slot.scaled_matmul,
    )
