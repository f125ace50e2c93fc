"""What operators need of tensors that are cut by rows: their rows here, or all of them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate

from compile_fsdp.runtime.dtensor import RowShard, cut_of, spec_like
from compile_fsdp.runtime.operator_call import Call, map_nested
from compile_fsdp.runtime.torch_internals import (
    dtensor_over,
    dtensor_spec,
    local_of,
    spec_of,
)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full value of ``tensor``, a plain tensor on every rank; gathered if it is cut by rows."""
    if not isinstance(tensor, DTensor):
        return tensor
    if all(placement.is_replicate() for placement in tensor.placements):
        return local_of(tensor)
    cut = cut_of(tensor)
    with torch.no_grad():
        if cut is not None:
            return cut.gather(local_of(tensor), tensor.device_mesh)
        everywhere = [Replicate()] * tensor.device_mesh.ndim
        return local_of(tensor.redistribute(placements=everywhere))


def whole_argument(tensor: torch.Tensor) -> torch.Tensor:
    """As `whole`, of an operator's argument.

    Raises:
        RuntimeError: a plain tensor that is no scalar: nobody says that it is equal on every rank.
    """
    if not isinstance(tensor, DTensor) and tensor.numel() > 1:
        raise RuntimeError(
            "an operator got a sharded tensor and a plain one of shape "
            f"{tuple(tensor.shape)}: expected DTensors or scalars only. Use full_tensor() or "
            "to_local() of the sharded tensor, or make the other one a DTensor "
            "(DTensor.from_local(tensor, mesh, [Replicate()]))"
        )
    return whole(tensor)


def replicated_dtensor(tensor: torch.Tensor, like: DTensor) -> DTensor:
    """``tensor``, a full value, as a replicated DTensor on the mesh of ``like``."""
    everywhere = [Replicate()] * like.device_mesh.ndim
    spec = dtensor_spec(like.device_mesh, everywhere, tensor.shape, tensor.stride(), tensor.dtype)
    return dtensor_over(tensor, spec)


def rows_of(tensor: torch.Tensor, cut: RowShard, ndim: int) -> torch.Tensor:
    """What an operator on this rank's rows needs of ``tensor``, broadcast to ``ndim`` dims.

    That is its local tensor if it is cut in the same places, its rows if it has others or all of
    them, and the whole of it if it has no dim of rows.
    """
    own = cut_of(tensor)
    has_rows = tensor.ndim == ndim and tensor.shape[:1] == (cut.total,)
    if own is not None and has_rows and _same_cut(own, cut):
        return local_of(cast(DTensor, tensor))
    full = whole_argument(tensor)
    return cut.own_rows(full) if has_rows else full


def _same_cut(one: RowShard, other: RowShard) -> bool:
    return (one.rows, one.axes) == (other.rows, other.axes)


def cut_like(call: Call, result: Any, model: DTensor, aliases: dict[int, Any]) -> Any:
    """Local results as DTensors cut like ``model``; what was written into as what it was."""
    cut = cut_of(model)
    assert cut is not None

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in aliases:
            return aliases[id(value)]
        return dtensor_over(value, spec_like(spec_of(model), cut.total, value), call.kind)

    return map_nested(result, wrap)


def run_on_rows(call: Call, model: DTensor) -> Any:
    """Run the operator on this rank's rows of everything; its results are cut like ``model``."""
    cut = cut_of(model)
    assert cut is not None
    aliases: dict[int, Any] = {}

    def local(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        rows = rows_of(value, cut, model.ndim)
        if any(value is each for each in written):
            aliases[id(rows)] = value
        return rows

    written = call.written
    return cut_like(call, call.mapped(local).run(), model, aliases)


def to_be_reduced(part: torch.Tensor, placement: Placement, like: DTensor) -> DTensor:
    """This rank's ``part`` of a reduction over the rows of ``like``, to be completed as
    ``placement`` says over the axes that cut ``like``."""
    placements = [
        placement if isinstance(each, RowShard) else Replicate()
        for each in spec_of(like).placements
    ]
    spec = dtensor_spec(like.device_mesh, placements, part.shape, part.stride(), part.dtype)
    return dtensor_over(part, spec)
