"""The everyday case of `row_operators`, without its questions: tensors that are all cut alike.

An optimizer's step is thousands of elementwise operators on a parameter, its gradient and its
state, which have the same rows everywhere. Those run on the local tensors at once; anything else
(broadcasting, other rows, whole tensors) is `NotImplemented` here and decided there.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from compile_fsdp.runtime.dtensor import RowShard, spec_like
from compile_fsdp.runtime.torch_internals import (
    OpOverload,
    argument_names,
    dtensor_over,
    local_of,
    number_of_results,
    operator_name,
    spec_of,
    written_arguments,
)

__all__ = ["is_elementwise", "run_elementwise"]

# Elementwise, although not tagged "pointwise".
_UNTAGGED = frozenset(
    "_to_copy alias clone copy copy_ detach detach_ empty_like fill fill_ full_like lift_fresh "
    "masked_fill masked_fill_ ones_like view_as_complex view_as_real zero zero_ zeros_like".split()
)


# On lists of tensors, one number for each; torch does not tag them "reduction".
_LIST_REDUCTIONS = frozenset(("_foreach_max", "_foreach_norm", "_foreach_powsum"))


def is_elementwise(func: OpOverload) -> bool:
    """Whether every element of the result depends on the elements at its place only; for
    operators on lists, at its place in the tensor of its position."""
    name = operator_name(func)
    if name.startswith(("_foreach_", "_fused_")):
        return name not in _LIST_REDUCTIONS and torch.Tag.reduction not in func.tags
    return torch.Tag.pointwise in func.tags or name in _UNTAGGED


def run_elementwise(
    kind: type[DTensor], func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run ``func`` on the rows of this rank if all its tensors are cut alike.

    Args:
        kind: the DTensor class whose instances are cut by rows.

    Returns:
        What ``func`` returns, cut alike; NotImplemented if it is no such operator or call.
    """
    form = _form_of(func)
    if form is None or any(isinstance(each, torch.Tensor) for each in kwargs.values()):
        return NotImplemented
    if form == "lists":
        return _on_lists(kind, func, args, kwargs)
    model: DTensor | None = None
    locals_: list[Any] = []
    for each in args:
        if type(each) is kind:
            if model is None:
                model = each
            elif not _alike(model, each):
                return NotImplemented
            locals_.append(local_of(each))
        elif _is_value(each):
            locals_.append(each)
        else:
            return NotImplemented
    if model is None or (form == "in place" and model is not args[0]):
        return NotImplemented
    result = func(*locals_, **kwargs)
    if form == "in place":
        return model
    return dtensor_over(result, spec_like(spec_of(model), model.shape[0], result), kind)


def _on_lists(
    kind: type[DTensor], func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    models = args[0]
    if any(isinstance(each, list | tuple) for each in kwargs.values()):
        return NotImplemented
    if not all(type(model) is kind for model in models):
        return NotImplemented
    locals_: list[Any] = []
    written: list[torch.Tensor] = []
    writes = _writes_into(func)
    for name, each in zip(argument_names(func), args, strict=False):
        if not isinstance(each, list | tuple):
            if not _is_value(each):
                return NotImplemented
            locals_.append(each)
            continue
        if not each:  # what an option of the operator would need
            locals_.append(each)
            continue
        if len(each) != len(models):
            return NotImplemented
        mine = _locals_alike(kind, models, each)
        if mine is None:
            return NotImplemented
        locals_.append(mine)
        if name in writes:
            written += each
    result = func(*locals_, **kwargs)
    if writes:
        # Autograd counts the writes of other operators, but not those of operators on lists into
        # DTensors; a parameter that was written must be seen to have changed.
        increment_version([each for each in written if not each.is_inference()])
        return None
    return [
        dtensor_over(each, spec_like(spec_of(model), model.shape[0], each), kind)
        for each, model in zip(result, models, strict=True)
    ]


def _locals_alike(
    kind: type[DTensor], models: Sequence[DTensor], values: Sequence[Any]
) -> list[Any] | None:
    """The local tensors of ``values``, or None if one is not cut like the model at its place."""
    locals_: list[Any] = []
    for model, value in zip(models, values, strict=True):
        if type(value) is kind:
            if value is not model and not _alike(model, value):
                return None
            locals_.append(local_of(value))
        elif _is_value(value):
            locals_.append(value)
        else:
            return None
    return locals_


def _is_value(value: Any) -> bool:
    """Whether ``value`` is the same for every element: no tensor, or a plain one without dims."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and not isinstance(value, DTensor)
    return not isinstance(value, list | tuple)


def _alike(one: DTensor, other: DTensor) -> bool:
    """Whether two tensors have the same shape, and the same rows on every rank."""
    mine, its = spec_of(one), spec_of(other)
    if mine is its:
        return True
    if mine.mesh is not its.mesh or one.shape != other.shape:
        return False
    for a, b in zip(mine.placements, its.placements, strict=True):
        if a is b:
            continue
        if not (isinstance(a, RowShard) and isinstance(b, RowShard)):
            if a != b:
                return False
        elif a.rows != b.rows or a.axes != b.axes:
            return False
    return True


@functools.cache
def _form_of(func: OpOverload) -> str | None:
    """``"in place"`` (into the first argument), ``"new"`` or ``"lists"``; None for others."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        return None
    if not is_elementwise(func):
        return None
    if operator_name(func).startswith(("_foreach_", "_fused_")):
        return "lists"
    writes = _writes_into(func)
    if number_of_results(func) != 1:
        return None
    if not writes:
        return "new"
    return "in place" if writes == frozenset(argument_names(func)[:1]) else None


@functools.cache
def _writes_into(func: OpOverload) -> frozenset[str]:
    return frozenset(written_arguments(func))
