"""LocalStep: run an optimizer on this rank's part of each parameter, as plain tensors.

An optimizer that is not made of operators which DTensor knows (8-bit state, Muon's matrix products)
needs none of them where no unit that it updates as a whole is split between ranks::

    between steps   param_groups  [p: RowDTensor]      state[p]["exp_avg"]: RowDTensor
    in a step       param_groups  [rows of p: plain]   state[rows]["exp_avg"]: plain
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from compile_fsdp.runtime.dtensor import cut_of, spec_like
from compile_fsdp.runtime.parameter_group import get_containing_parameter_group
from compile_fsdp.runtime.row_dtensor import RowDTensor, dtensor_of
from compile_fsdp.runtime.torch_internals import local_of, spec_of


class LocalStep:
    """What `enter` and `leave` do to an optimizer.

    Args:
        unit: what the optimizer updates as a whole: a number of consecutive elements, ``"row"`` or
            ``"tensor"``.

    Raises:
        ValueError: it is none of them.
    """

    def __init__(self, unit: int | str) -> None:
        is_count = isinstance(unit, int) and not isinstance(unit, bool) and unit >= 1
        if not is_count and unit not in ("row", "tensor"):
            raise ValueError(
                "fully_shard_optimizer(local=...): expected a number of elements, 'row' or "
                f"'tensor', the unit that the optimizer updates as a whole; found {unit!r}"
            )
        self._unit = unit
        self._locals: dict[torch.Tensor, nn.Parameter] = {}
        self._inside: list[tuple[dict[str, Any], list[torch.Tensor]]] = []

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError if a unit of one of the parameters is split between ranks."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._check_parameter(parameter)

    def _check_parameter(self, parameter: torch.Tensor) -> None:
        cut = cut_of(parameter)
        if cut is None or parameter.numel() == 0:
            return
        width = math.prod(parameter.shape[1:])
        first = 0
        for count in cut.rows:
            start, stop = first * width, (first + count) * width
            first += count
            for edge in (start, stop):
                if count and 0 < edge < parameter.numel() and not self._may_end_at(edge):
                    raise _split_unit(parameter, self._unit, edge)

    def _may_end_at(self, edge: int) -> bool:
        if isinstance(self._unit, int):
            return edge % self._unit == 0
        return self._unit == "row"

    def enter(self, optimizer: torch.optim.Optimizer) -> None:
        """Show the optimizer this rank's parts."""
        for group in optimizer.param_groups:
            parameters = list(group["params"])
            self._inside.append((group, parameters))
            group["params"] = [self._enter(optimizer, each) for each in parameters]

    def _enter(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.Tensor:
        if not isinstance(parameter, DTensor):
            return parameter
        self._check_parameter(parameter)
        part = self._part_of(parameter)
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            part.grad_dtype = gradient.dtype
            part.grad = local_of(gradient)
        if parameter in optimizer.state:
            state = optimizer.state.pop(parameter)
            optimizer.state[part] = {
                name: local_of(value) if isinstance(value, DTensor) else value
                for name, value in state.items()
            }
        return part

    def _part_of(self, parameter: DTensor) -> nn.Parameter:
        local = local_of(parameter).detach()
        part = self._locals.get(parameter)
        if part is None or (part.data_ptr(), part.shape) != (local.data_ptr(), local.shape):
            part = self._locals[parameter] = nn.Parameter(local, parameter.requires_grad)
        return part

    def leave(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer its parameters back, and make DTensors of state like theirs."""
        for group, parameters in self._inside:
            for parameter, part in zip(parameters, group["params"], strict=True):
                if part is not parameter:
                    part.grad = None
                    _take_back(optimizer, parameter, part)
            group["params"] = parameters
        self._inside.clear()


def _take_back(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, part: torch.Tensor
) -> None:
    if part not in optimizer.state:
        return
    state = optimizer.state.pop(part)
    for name, value in state.items():
        # Quantised state is of a class of its own and stays this rank's.
        if type(value) is torch.Tensor and value.shape == part.shape and name != "step":
            state[name] = _like(parameter, value)
    optimizer.state[parameter] = state


def _like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    if isinstance(parameter, RowDTensor):
        return dtensor_of(value, spec_like(spec_of(parameter), parameter.shape[0], value))
    made: DTensor = torch.empty_like(parameter, dtype=value.dtype)  # type: ignore[assignment]
    local_of(made).copy_(value)
    return made


def _split_unit(parameter: torch.Tensor, unit: int | str, edge: int) -> ValueError:
    group = get_containing_parameter_group(parameter)
    fqns: list[str] = []
    if group is not None:
        fqns = [each.fqns[0] for each in group.parameters if each.sharded is parameter]
    name = repr(fqns[0]) if fqns else "a parameter"
    what = f"{unit} elements" if isinstance(unit, int) else f"a {unit}"
    way_out = "TensorAtomic()" if unit == "tensor" else "BlockAtomic(rows)"
    return ValueError(
        f"fully_shard_optimizer(local={unit!r}): {name} of shape {tuple(parameter.shape)} is cut "
        f"after element {edge}: expected no cut within {what}; shard it with {way_out} placements "
        "that keep them together, or give it to another optimizer"
    )
