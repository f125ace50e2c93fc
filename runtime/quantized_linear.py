"""The linear layer of a quantised group: rowwise planes forward, columnwise planes backward.

    forward     y      = x @ dequantize(rowwise).T + bias       sums over the weight's columns
    backward    grad x = grad y @ dequantize(columnwise)        sums over its rows
                grad w = grad y.T @ x                           reads no weight

Forward and backward ask for the planes by themselves, so neither holds what the other reads, and a
forward that is recomputed in backward reads rowwise planes again. A graph reads them through
markers: each is a node of its own in the graph that needs it, and dequantising is a few pointwise
operations that a compiler may fuse. The eager driver reads them where they were gathered.

With ``scaled`` nothing is dequantised: the device multiplies what is quantised, and so are x and
grad y, along the rows that the product sums over. The gradient of the weight stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .mxfp8 import dequantize
from .planes import unit_name
from .scaled_matmul import scaled_matmul

__all__ = ["linear_in_graph", "linear_with_planes"]

Planes = tuple[torch.Tensor, torch.Tensor]


def linear_with_planes(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rowwise: Callable[[], Planes],
    columnwise: Callable[[], Planes],
    *,
    scaled: bool = False,
) -> torch.Tensor:
    """``F.linear`` with a quantised weight, as the eager driver computes it.

    Args:
        input: ``(..., cols)``; the product is computed in its dtype, or in autocast's.
        weight: ``(rows, cols)``: what autograd gives the gradient to. Its values are not read.
        bias: ``(rows,)`` or None.
        rowwise, columnwise: return data and scales of the planes when they are needed.
        scaled: multiply quantised numbers, see above.
    """
    result: torch.Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
        input, weight, bias, rowwise, columnwise, scaled
    )
    return result


def linear_in_graph(
    input: torch.Tensor,
    bias: torch.Tensor | None,
    leaf: torch.Tensor,
    rowwise: torch.Tensor,
    columnwise: torch.Tensor,
    group: str,
    index: int,
    count: int,
    *,
    scaled: bool = False,
) -> torch.Tensor:
    """``F.linear`` with matrix ``index`` of a quantised group, as compilers trace it.

    Args:
        input: ``(..., cols)``; the product is computed in its dtype, or in autocast's.
        bias: ``(rows,)`` or None.
        leaf: the flat leaf of the group, which the gradient of the matrix is marked as a part of.
        rowwise, columnwise: the flat leaves of the group's planes.
        group: the group's name.
        index: of the matrix.
        count: how many matrices the group has.
        scaled: multiply quantised numbers, see above.
    """
    result: torch.Tensor = _TracedLinear.apply(  # type: ignore[no-untyped-call]
        input, bias, leaf, rowwise, columnwise, group, index, count, scaled
    )
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rowwise: Callable[[], Planes],
        columnwise: Callable[[], Planes],
        scaled: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(input)
        ctx.columnwise, ctx.scaled = columnwise, scaled
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _forward(input, rowwise(), bias, scaled)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (input,) = ctx.saved_tensors
        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_input = _gradient_of_input(grad, ctx.columnwise(), input.dtype, ctx.scaled)
        if ctx.needs_input_grad[1]:
            of_weight = _gradient_of_weight(grad, input)
        if ctx.needs_input_grad[2]:
            of_bias = _gradient_of_bias(grad, ctx.bias_dtype)
        return of_input, of_weight, of_bias, None, None, None


class _TracedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        bias: torch.Tensor | None,
        leaf: torch.Tensor,
        rowwise: torch.Tensor,
        columnwise: torch.Tensor,
        group: str,
        index: int,
        count: int,
        scaled: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, columnwise)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.group, ctx.index, ctx.count, ctx.scaled = group, index, count, scaled
        planes = _marked(rowwise, group, index, count, columnwise=False)
        return _forward(input, planes, bias, scaled)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, columnwise = ctx.saved_tensors
        group, index, count = ctx.group, ctx.index, ctx.count
        of_input = of_bias = of_leaf = None
        if ctx.needs_input_grad[0]:
            planes = _marked(columnwise, group, index, count, columnwise=True)
            of_input = _gradient_of_input(grad, planes, input.dtype, ctx.scaled)
        if ctx.needs_input_grad[1]:
            of_bias = _gradient_of_bias(grad, ctx.bias_dtype)
        if ctx.needs_input_grad[2]:
            of_weight = _gradient_of_weight(grad, input)
            of_leaf = torch.ops.compile_fsdp.parameter_grad(of_weight, group, index)
        return of_input, of_bias, of_leaf, None, None, None, None, None, None


def _marked(leaf: torch.Tensor, group: str, index: int, count: int, *, columnwise: bool) -> Planes:
    name = unit_name(group, columnwise)
    data = torch.ops.compile_fsdp.parameter(leaf, name, index)
    return data, torch.ops.compile_fsdp.parameter(leaf, name, count + index)


def _forward(
    input: torch.Tensor, planes: Planes, bias: torch.Tensor | None, scaled: bool
) -> torch.Tensor:
    if not scaled:
        return F.linear(input, dequantize(*planes, dtype=input.dtype), bias)
    device = input.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else input.dtype
    product = scaled_matmul(_rows(input), planes, dtype)
    product = product if bias is None else product + bias.to(dtype)
    return product.reshape(*input.shape[:-1], product.shape[-1])


def _gradient_of_input(
    grad: torch.Tensor, planes: Planes, dtype: torch.dtype, scaled: bool
) -> torch.Tensor:
    if not scaled:
        return (grad @ dequantize(*planes, columnwise=True, dtype=grad.dtype)).to(dtype)
    data, scales = planes
    # As the device reads them: contiguous along what the product sums over.
    turned = data.t().contiguous(), scales.t().contiguous()
    product = scaled_matmul(_rows(grad), turned, grad.dtype).to(dtype)
    return product.reshape(*grad.shape[:-1], product.shape[-1])


def _gradient_of_weight(grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    # Autocast computed in the gradient's dtype.
    return _rows(grad).t() @ _rows(input).to(grad.dtype)


def _gradient_of_bias(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _rows(grad).sum(0).to(dtype)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten(0, -2) if tensor.ndim > 1 else tensor.unsqueeze(0)
