"""How operators run on DTensors that are cut by rows: one decision for every operator.

An operator that treats each row by itself runs on each rank's own rows, and what it returns is cut
like what it was given; any other gets whole tensors and returns a replicated one::

    p * 2, p.clone(), exp_avg.lerp_(grad, b)   own rows     result cut like p
    p.mean(1), p[:, 1:], p.softmax(-1), p @ q  own rows     result cut like p
    p.norm(), p.sum(), p.mean(0)               own rows     added up over ranks, replicated
    p.view(-1)                                 own rows     elements for rows, cut alike
    p.max(), p.cumsum(0), p.tril_()            whole        replicated; written back if in place
    p.normal_()                                whole        as rank 0 draws it, everywhere
    p[3], p.t()                                refused      a view that no rank could give

torch's own dispatcher is never asked: it takes every ``Shard(0)`` to be cut like ``torch.chunk``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Partial, Replicate

from compile_fsdp.runtime.dtensor import cut_of, with_rows
from compile_fsdp.runtime.operator_call import Call, map_nested, tensors_in
from compile_fsdp.runtime.row_elementwise import is_elementwise, run_elementwise
from compile_fsdp.runtime.row_values import (
    cut_like,
    replicated_dtensor,
    rows_of,
    run_on_rows,
    to_be_reduced,
    whole,
    whole_argument,
)
from compile_fsdp.runtime.torch_internals import (
    OpOverload,
    dtensor_over,
    local_of,
    norm_placement,
    spec_of,
    written_arguments,
)

__all__ = ["run_operator"]

# Along the dims that they name every slice is treated alike, whatever the other slices are.
_ALONG_DIMS = frozenset(
    "_log_softmax _log_softmax_backward_data _softmax _softmax_backward_data all amax amin aminmax "
    "any argmax argmin argsort cummax cummin cumprod cumsum flip linalg_vector_norm logcumsumexp "
    "logsumexp max mean median min nanmedian nansum permute prod roll select slice sort split "
    "split_with_sizes squeeze std std_mean sum topk transpose unbind unfold unsqueeze var "
    "var_mean".split()
)

_FACTORIES = frozenset("new_empty new_full new_ones new_zeros".split())
_RESHAPES = frozenset("_reshape_alias _unsafe_view expand reshape view".split())


def run_operator(
    kind: type[DTensor], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run ``func``, of whose tensors at least one is a ``kind``, as this module's table says.

    Args:
        kind: the DTensor class whose instances are cut by rows.

    Raises:
        RuntimeError: ``func`` is a view of other than whole rows, or mixes DTensors with plain
            tensors that are not scalars.
    """
    result = run_elementwise(kind, func, args, kwargs)
    if result is not NotImplemented:
        return result
    call = Call(kind, func, args, kwargs)
    name = call.name
    if name == "is_same_size":
        return args[0].shape == args[1].shape
    if name == "is_pinned":
        return local_of(args[0]).is_pinned()
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _random(call)
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        return _unscale(call)
    if name.startswith(("_foreach_", "_fused_")):
        return _on_lists(call)
    if is_elementwise(func):
        return _elementwise(call)
    for names, rule in _RULES:
        if name in names:
            result = rule(call)
            if result is not NotImplemented:
                return result
    if isinstance(args[0] if args else None, kind) and func.is_view:
        raise _not_a_view(call)
    decomposed = func.decompose(*args, **kwargs)
    return _on_whole_tensors(call) if decomposed is NotImplemented else decomposed


def _model_of(call: Call, tensors: Sequence[torch.Tensor], written: Sequence[Any]) -> Any:
    """Which of ``tensors`` the result of an elementwise operator is cut like; None if none."""
    if written:
        return written[0] if isinstance(written[0], call.kind) else None
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    for tensor in tensors:
        if isinstance(tensor, call.kind) and tensor.ndim == len(shape):
            if tensor.shape[0] == shape[0]:
                return tensor
    return None


# One rule for each kind of operator -----------------------------------------------------------


def _elementwise(call: Call) -> Any:
    model = _model_of(call, list(tensors_in((call.args, call.kwargs))), call.written)
    return _on_whole_tensors(call) if model is None else run_on_rows(call, model)


def _on_lists(call: Call) -> Any:
    """An operator on lists of tensors, elementwise or a norm, position by position.

    Replicated tensors run along, as torch lacks rules for some of these operators; positions that
    write into a DTensor of torch's own that is sharded are torch's.
    """
    if call.name != "_foreach_norm" and not is_elementwise(call.func):
        return _on_whole_tensors(call)
    lists = [each for each in call.arguments.values() if isinstance(each, list | tuple)]
    tensor_lists = [each for each in lists if each and isinstance(each[0], torch.Tensor)]
    count, writes = len(tensor_lists[0]), bool(written_arguments(call.func))
    models: dict[int, DTensor] = {}
    for index in range(count):
        here = [each[index] for each in tensor_lists if len(each) == count]
        model = _model_of(call, here, here[:1] if writes else ())
        if model is None and all(_is_replicated(each) for each in here):
            model = next((each for each in here if isinstance(each, DTensor)), None)
        if model is not None:
            models[index] = model
    results: list[Any] = [None] * count
    if models:
        _put(results, models, _list_on_rows(call, count, models))
    rest = [index for index in range(count) if index not in models]
    if rest:
        as_replicated = call.selected(count, rest).mapped(_replicated_if_cut(call))
        _put(results, rest, as_replicated.run())
    if writes:
        _count_writes(call)
    return None if writes else results


def _count_writes(call: Call) -> None:
    """Note the writes as autograd does for other operators: it does not count those of operators
    on lists into DTensors, and a parameter that was written must be seen to have changed."""
    written = tensors_in(tuple(call.written))
    increment_version([tensor for tensor in written if not tensor.is_inference()])


def _list_on_rows(call: Call, count: int, models: dict[int, DTensor]) -> Any:
    def local(index: int, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        cut = cut_of(models[index])
        return whole(value) if cut is None else rows_of(value, cut, models[index].ndim)

    def locals_of(value: Any) -> Any:
        if isinstance(value, list | tuple) and len(value) == count:
            return [local(index, value[index]) for index in models]
        return whole(value) if isinstance(value, torch.Tensor) else value

    args = tuple(locals_of(each) for each in call.args)
    kwargs = {name: locals_of(each) for name, each in call.kwargs.items()}
    if call.name == "_foreach_norm":
        return _norms(Call(call.kind, call.func, args, kwargs), list(models.values()))
    result = call.func(*args, **kwargs)
    if result is None or written_arguments(call.func):
        return None
    return [
        cut_like(call, each, model, {})
        if isinstance(model, call.kind)
        else replicated_dtensor(each, model)
        for each, model in zip(result, models.values(), strict=True)
    ]


def _is_replicated(tensor: torch.Tensor) -> bool:
    """Whether every rank holds all of ``tensor``."""
    if not isinstance(tensor, DTensor):
        return tensor.numel() == 1
    return all(placement.is_replicate() for placement in tensor.placements)


def _norms(call: Call, models: Sequence[DTensor]) -> list[Any]:
    """Norms of whole tensors, those over the same axes added up in one collective."""
    given = call.arguments
    order = float(given.get("ord", 2))
    filled = [_not_empty(each, order) for each in given.pop("self")]
    parts = call.func(filled, **given)
    result: list[Any] = [None] * len(models)
    alike: dict[Any, list[int]] = {}
    for index, model in enumerate(models):
        alike.setdefault((_meaning(model), parts[index].dtype), []).append(index)
    for indices in alike.values():
        model = models[indices[0]]
        together = torch.stack([parts[index] for index in indices])
        norms = whole(to_be_reduced(together, norm_placement(order), model))
        for index, norm in zip(indices, norms.unbind(), strict=True):
            result[index] = replicated_dtensor(norm, model)
    return result


def _norm(call: Call) -> Any:
    given = call.arguments
    model, dims = given["self"], _dims(call)
    if 0 not in dims:
        return run_on_rows(call, model)
    order = float(given.get("ord", 2))
    part = call.with_arguments(self=_not_empty(local_of(model), order)).run()
    return replicated_dtensor(whole(to_be_reduced(part, norm_placement(order), model)), model)


def _not_empty(local: torch.Tensor, order: float) -> torch.Tensor:
    """``local``, or where it has no rows what counts for nothing in a maximum or minimum."""
    if local.numel() or not math.isinf(order) or local.shape[0]:
        return local
    return local.new_full((1, *local.shape[1:]), 0.0 if order > 0 else math.inf)


def _along_dims(call: Call) -> Any:
    given = call.arguments
    model = given.get("self", next(iter(given.values())))
    if not isinstance(model, call.kind):
        return NotImplemented
    if call.name == "linalg_vector_norm":
        return _norm(call)
    if call.name == "squeeze":
        return _squeeze(call, model)
    if call.name == "slice" and 0 in _dims(call):
        start, end, step = given.get("start"), given.get("end"), given.get("step", 1)
        if range(model.shape[0])[slice(start, end, step)] == range(model.shape[0]):
            return run_on_rows(Call(call.kind, torch.ops.aten.alias.default, (model,), {}), model)
        return NotImplemented
    if call.name == "permute":
        return run_on_rows(call, model) if _dims(call)[:1] == [0] else NotImplemented
    if 0 not in _dims(call):
        return run_on_rows(call, model)
    if call.name in ("sum", "mean") and (model.is_floating_point() or model.is_complex()):
        return _sum(call, model)
    return NotImplemented


def _sum(call: Call, model: DTensor) -> DTensor:
    """A sum or a mean over rows and perhaps other dims, in no less than single precision."""
    given = call.arguments
    dims, dtype = _dims(call), given.get("dtype") or model.dtype
    working = dtype if dtype.itemsize >= 4 else torch.float32
    part = local_of(model).sum(dims, keepdim=given.get("keepdim", False), dtype=working)
    total = whole(to_be_reduced(part, Partial("sum"), model))
    if call.name == "mean":
        total = total / math.prod(model.shape[dim] for dim in dims)
    return replicated_dtensor(total.to(dtype), model)


def _squeeze(call: Call, model: DTensor) -> Any:
    dims = [dim for dim in _dims(call) if model.shape[dim] == 1]
    if 0 in dims:
        return NotImplemented
    squeeze = Call(call.kind, torch.ops.aten.squeeze.dims, (model, dims), {})
    return run_on_rows(squeeze, model)


def _dims(call: Call) -> list[int]:
    """The dims that an operator names, not negative; all where it names none."""
    given = call.arguments
    model = given.get("self", next(iter(given.values())))
    ndim = model.ndim + (call.name == "unsqueeze")
    named: list[int] = []
    for name in ("dim", "dims", "dim0", "dim1", "dimension"):
        value = given.get(name)
        if value is not None:
            named += value if isinstance(value, list | tuple) else [value]
    if not named and call.name in ("select", "slice", "split", "split_with_sizes", "unbind"):
        return [0]
    if not named and call.name in ("sort", "argsort", "topk"):
        return [ndim - 1]
    return [dim % ndim for dim in named] if named else list(range(ndim))


def _reshape(call: Call) -> Any:
    """A view of whole rows as other rows: ``(R, a, b)`` as ``(R * a, b)``, as ``(R * a * b,)``."""
    given = call.arguments
    model = given["self"]
    cut, local = cut_of(model), local_of(model)
    assert cut is not None
    if "size" not in given:  # view(dtype), which changes the last dim
        same = given["dtype"].itemsize == model.element_size()
        return run_on_rows(call, model) if same or model.ndim > 1 else NotImplemented
    size = list(given["size"])
    if call.name == "expand":
        if len(size) != model.ndim or size[0] not in (-1, model.shape[0]):
            return NotImplemented
        return cut_like(call, _resized(call, local, local.shape[0], size), model, {})
    size = _without_unknown(size, model.numel())
    old, new = math.prod(model.shape[1:]), math.prod(size[1:])
    if old * new == 0 or not size:
        keeps = bool(size) and size[0] == cut.total
        rows = list(cut.rows)
    else:
        keeps = all(count * old % new == 0 for count in cut.rows)
        rows = [count * old // new for count in cut.rows]
    if not keeps:
        return NotImplemented
    result = _resized(call, local, rows[cut.axes.segment], size)
    return dtensor_over(result, with_rows(spec_of(model), tuple(rows), result), call.kind)


def _resized(call: Call, local: torch.Tensor, rows: int, size: list[int]) -> torch.Tensor:
    result: torch.Tensor = call.with_arguments(self=local, size=[rows, *size[1:]]).run()
    return result


def _without_unknown(size: list[int], numel: int) -> list[int]:
    known = math.prod(length for length in size if length != -1)
    return [numel // max(known, 1) if length == -1 else length for length in size]


def _product(call: Call) -> Any:
    """``mm``: rows of the first matrix times the whole second; ``bmm``: slices of both."""
    model = call.args[0]
    if call.name == "bmm":
        tensors = list(tensors_in(call.args))
        cut = next(each for each in tensors if isinstance(each, call.kind))
        return run_on_rows(call, cut)
    if not isinstance(model, call.kind):
        return NotImplemented
    result = call.func(local_of(model), whole_argument(call.args[1]), **call.kwargs)
    return cut_like(call, result, model, {})


def _factory(call: Call) -> Any:
    """``new_zeros(size)`` and the like: cut by the same rows where there are as many."""
    given = call.arguments
    model, size = given["self"], list(given["size"])
    local = local_of(model)
    if size[:1] == [model.shape[0]]:
        result = call.with_arguments(self=local, size=[local.shape[0], *size[1:]]).run()
        return cut_like(call, result, model, {})
    return replicated_dtensor(call.with_arguments(self=local).run(), model)


_RULES: tuple[tuple[frozenset[str], Callable[[Call], Any]], ...] = (
    (_ALONG_DIMS, _along_dims),
    (_RESHAPES, _reshape),
    (_FACTORIES, _factory),
    (frozenset(("mm", "bmm")), _product),
)


# Whole tensors --------------------------------------------------------------------------------


def _on_whole_tensors(call: Call, drawn: bool = False) -> Any:
    """Run the operator on full values, on every rank; its results are replicated.

    What it writes into goes back into each rank's rows. ``drawn``: from a random generator, of
    which the first rank's counts.
    """
    written = call.written
    if any(isinstance(each, DTensor) and not isinstance(each, call.kind) for each in written):
        # Into a DTensor of torch's own: it finds the place.
        call.mapped(_replicated_if_cut(call)).run()
        return written[0] if len(written) == 1 else tuple(written)
    model = next(t for t in tensors_in((call.args, call.kwargs)) if isinstance(t, call.kind))
    values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def full(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in values:
            values[id(value)] = (value, whole_argument(value))
        return values[id(value)][1]

    result = call.mapped(full).run()
    aliases = {}
    for tensor in written:
        value = values[id(tensor)][1]
        aliases[id(value)] = tensor
        _write_back(call, tensor, _as_first_rank(value, model) if drawn else value)

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in aliases:
            return aliases[id(value)]
        return replicated_dtensor(_as_first_rank(value, model) if drawn else value, model)

    return map_nested(result, wrap)


def _write_back(call: Call, tensor: torch.Tensor, value: torch.Tensor) -> None:
    cut = cut_of(tensor)
    if cut is None:
        return
    if value.shape != tensor.shape:
        raise RuntimeError(
            f"{call.func} would change the shape of a sharded tensor from {tuple(tensor.shape)} to "
            f"{tuple(value.shape)}; make a new one instead"
        )
    local_of(cast(DTensor, tensor)).copy_(cut.own_rows(value))


def _random(call: Call) -> Any:
    """As the first rank draws it for the whole tensor, whatever the other ranks' seeds are.

    So the ranks' rows are not alike, replicas are equal, and with the same seed so is one process.
    """
    result = _on_whole_tensors(call, drawn=True)
    model = next(t for t in tensors_in((call.args, call.kwargs)) if isinstance(t, call.kind))
    cut = cut_of(model)
    assert cut is not None
    if isinstance(result, DTensor) and cut_of(result) is None and result.shape == model.shape:
        return cut_like(call, cut.own_rows(local_of(result)).clone(), model, {})
    return result


def _as_first_rank(value: torch.Tensor, model: DTensor) -> torch.Tensor:
    everywhere = [Replicate()] * model.device_mesh.ndim
    with torch.no_grad():
        return local_of(
            DTensor.from_local(value.contiguous(), model.device_mesh, everywhere, run_check=True)
        )


def _unscale(call: Call) -> None:
    """GradScaler's: every rank learns of an inf that one of them has."""
    gradients, found, scale = call.args
    mine = [each for each in gradients if isinstance(each, call.kind)]
    rest = [each for each in gradients if not isinstance(each, call.kind)]
    if rest:
        call.func(rest, found, scale)
    call.func([local_of(each) for each in mine], found, scale)
    for model in {_meaning(each): each for each in mine}.values():
        found.copy_(whole(to_be_reduced(found.clone(), Partial("max"), model)))


def _meaning(tensor: DTensor) -> tuple[int, tuple[int, ...]]:
    """Equal for tensors that are cut over the same axes of the same mesh."""
    cut = cut_of(tensor)
    return id(tensor.device_mesh), () if cut is None else cut.axes.axes


def _not_a_view(call: Call) -> RuntimeError:
    return RuntimeError(
        f"{call.func} of a sharded tensor of shape {tuple(call.args[0].shape)} would have to be a "
        "view of rows that other ranks hold; a copy would not write through. Use full_tensor() "
        "for a copy of the whole tensor, or to_local() for a view of this rank's rows"
    )


def _replicated_if_cut(call: Call) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if isinstance(value, call.kind):
            return replicated_dtensor(whole(value), value)
        return value

    return convert


def _put(results: list[Any], indices: Any, values: Sequence[Any] | None) -> None:
    if values is not None:
        for index, value in zip(indices, values, strict=True):
            results[index] = value
