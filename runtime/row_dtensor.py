"""RowDTensor: the DTensors over pieces of flat buffers, and whatever operators make of them.

A parameter, its gradient, ``p.clone()``, ``exp_avg``: each knows which rows each rank holds (see
`RowShard`), so ``full_tensor()``, checkpoints and torch's functions on state dicts are right for
all of them. `row_operators` says how operators run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from compile_fsdp.runtime.dtensor import RowShard, cut_of, spec_like
from compile_fsdp.runtime.operator_call import tensors_in
from compile_fsdp.runtime.row_operators import run_operator
from compile_fsdp.runtime.row_values import replicated_dtensor, rows_of, whole
from compile_fsdp.runtime.torch_internals import (
    DISPATCHES_SUBCLASSES_AS_DTENSOR,
    DTensorSpec,
    OpOverload,
    TorchDispatchMode,
    dtensor_over,
    local_of,
    spec_of,
)

__all__ = ["RowDTensor", "cut_tensor_like", "dtensor_of"]


_T = TypeVar("_T", bound=torch.Tensor)


class _RowOperators(TorchDispatchMode):
    """While it is active, operators on a `RowDTensor` run as `RowDTensor.__torch_dispatch__` has
    them run."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(tensor, RowDTensor) for tensor in tensors_in((args, kwargs))):
            return run_operator(RowDTensor, func, args, kwargs)
        return func(*args, **kwargs)


class RowDTensor(DTensor):
    """A DTensor with at least one `RowShard` among its placements."""

    if DISPATCHES_SUBCLASSES_AS_DTENSOR:

        @classmethod
        def __torch_function__(
            cls,
            func: Callable[..., Any],
            types: Sequence[type],
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            """What is called from Python; autograd's own calls still go torch's way there."""
            with _RowOperators():  # type: ignore[no-untyped-call]
                return DTensor.__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return run_operator(RowDTensor, func, args, kwargs or {})

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        """As ``DTensor.redistribute``; by way of the full tensor, unless nothing changes."""
        cut = cut_of(self)
        if placements is not None and any(isinstance(each, RowShard) for each in placements):
            if all(_same(a, b) for a, b in zip(placements, self.placements, strict=False)):
                return self
        if cut is None or placements is None:
            return super().redistribute(device_mesh, placements, **options)
        full = _gathered(self)
        return full.redistribute(device_mesh, placements, **options)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole value, a plain tensor on every rank; all ranks take part."""
        full = _gathered(self)
        return full.to_local(grad_placements=grad_placements)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's rows, aliasing the DTensor; its gradient is cut the same way.

        Raises:
            RuntimeError: ``grad_placements`` are others than the DTensor's.
        """
        if grad_placements is not None and tuple(grad_placements) != self.placements:
            raise RuntimeError(
                f"to_local(grad_placements={tuple(grad_placements)}) of a sharded tensor: expected "
                f"its own placements {self.placements}; leave grad_placements out"
            )
        if not torch.is_grad_enabled():
            return local_of(self)
        return _ToLocal.apply(self)  # type: ignore[no-untyped-call, no-any-return]

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> RowDTensor:
        plain = DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride)
        return _over(local_of(plain), spec_of(plain), plain.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> RowDTensor:
        """A copy with memory of its own. That of a parameter is a parameter, of no group."""
        if id(self) not in memo:
            if not self.is_leaf:
                raise RuntimeError(
                    "only tensors that autograd did not compute can be deep-copied; detach() first"
                )
            local = local_of(self).detach().clone()
            attributes = copy.deepcopy(_attributes(self), memo)
            memo[id(self)] = _rebuild(local, spec_of(self), _kind(self), attributes)
            if self.grad is not None:
                memo[id(self)].grad = copy.deepcopy(self.grad, memo)
        return cast(RowDTensor, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Only this rank's rows are pickled, not the flat buffer that they lie in."""
        plain: DTensor = dtensor_over(local_of(self).detach().clone(), spec_of(self))
        return _unpickle, (plain, _kind(self), _attributes(self))


def dtensor_of(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor over ``local``, which it aliases: a `RowDTensor` if ``spec`` has a `RowShard`."""
    if any(isinstance(placement, RowShard) for placement in spec.placements):
        return dtensor_over(local, spec, RowDTensor)
    return dtensor_over(local, spec)


def cut_tensor_like(tensor: _T, like: torch.Tensor) -> _T | RowDTensor:
    """``tensor`` as a `RowDTensor` if it is a DTensor with as many rows as ``like``, which is one.

    Without communication where torch has given it the placements of ``like``; its local tensor is
    then aliased. Anything else comes back as it is.
    """
    cut = cut_of(like)
    if cut is None or not isinstance(tensor, DTensor) or isinstance(tensor, RowDTensor):
        return tensor
    if tensor.ndim == 0 or tensor.shape[0] != cut.total:
        return tensor
    if all(placement.is_replicate() for placement in tensor.placements):
        if tensor.shape != like.shape:
            return tensor
    local = rows_of(tensor, cut, tensor.ndim)
    if local is not local_of(tensor):
        local = local.clone()
    spec = spec_like(spec_of(cast(DTensor, like)), cut.total, local)
    return dtensor_over(local, spec, RowDTensor)


def _same(one: Placement, other: Placement) -> bool:
    return isinstance(one, RowShard) == isinstance(other, RowShard) and one == other


def _over(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool) -> RowDTensor:
    dtensor = dtensor_over(local, spec, RowDTensor)
    return cast(RowDTensor, dtensor.requires_grad_(requires_grad))


def _kind(tensor: torch.Tensor) -> tuple[bool, bool]:
    return isinstance(tensor, nn.Parameter), tensor.requires_grad


def _attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """What the user has set on a tensor."""
    hidden = ("_is_param", "_local_tensor", "_spec")
    return {name: value for name, value in tensor.__dict__.items() if name not in hidden}


def _rebuild(
    local: torch.Tensor, spec: DTensorSpec, kind: tuple[bool, bool], attributes: dict[str, Any]
) -> torch.Tensor:
    is_parameter, requires_grad = kind
    dtensor: torch.Tensor = dtensor_over(local, spec, RowDTensor)
    if is_parameter:
        dtensor = nn.Parameter(dtensor, requires_grad=requires_grad)
    else:
        dtensor.requires_grad_(requires_grad)
    dtensor.__dict__.update(attributes)
    return dtensor


def _unpickle(plain: DTensor, kind: tuple[bool, bool], attributes: dict[str, Any]) -> torch.Tensor:
    return _rebuild(local_of(plain), spec_of(plain), kind, attributes)


class _Gather(torch.autograd.Function):
    """A RowDTensor to a replicated DTensor; the gradient back to the rows."""

    @staticmethod
    def forward(ctx: Any, tensor: RowDTensor) -> DTensor:
        ctx.spec = spec_of(tensor)
        ctx.cut = cut_of(tensor)
        return replicated_dtensor(whole(tensor), tensor)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> DTensor:
        local = rows_of(gradient, ctx.cut, gradient.ndim).contiguous()
        return dtensor_of(local, spec_like(ctx.spec, ctx.cut.total, local))


def _gathered(tensor: RowDTensor) -> DTensor:
    return _Gather.apply(tensor)  # type: ignore[no-untyped-call, no-any-return]


class _ToLocal(torch.autograd.Function):
    """A RowDTensor to this rank's rows, and their gradient back."""

    @staticmethod
    def forward(ctx: Any, tensor: RowDTensor) -> torch.Tensor:
        ctx.spec = spec_of(tensor)
        ctx.rows = tensor.shape[0]
        local = local_of(tensor)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> DTensor:
        return dtensor_of(gradient, spec_like(ctx.spec, ctx.rows, gradient))
