"""FlatStep: run an elementwise optimizer on stretches of the flat buffers, not tensor by tensor.

An optimizer that treats every element by itself computes the same for neighbours in one buffer
whether it sees them as one tensor or as many. So in a step it sees one tensor for each stretch of
parameters that lie side by side, are updated with the same settings and have a gradient::

    between steps   param_groups  [w, b, v]         state[w]["exp_avg"], state[b]["exp_avg"], ...
    in a step       param_groups  [w b v: 1-D]      state[w b v]["exp_avg"]: 1-D
                                                            ^ the parameters' state is views of it

A model of hundreds of parameters is stepped by as many operators as it has stretches. What cannot
be joined (its state differs from its neighbours', its gradient is elsewhere) is stepped as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from compile_fsdp.runtime.dtensor import spec_like
from compile_fsdp.runtime.parameter_group import get_containing_parameter_group
from compile_fsdp.runtime.row_dtensor import dtensor_of
from compile_fsdp.runtime.torch_internals import local_of, spec_of, writes_of

Members = tuple[torch.Tensor, ...]

__all__ = ["FlatStep", "is_elementwise_optimizer", "set_gradient"]

# Each element's update follows from its own weight, gradient and state, and from scalars. Not among
# them: LBFGS, SparseAdam, Adafactor, Muon; and ASGD, which replaces the scalars in its state.
_ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


def is_elementwise_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer`` is one of torch's own that treat every element by itself. A subclass
    may do something else."""
    return type(optimizer) in _ELEMENTWISE


class FlatStep:
    """What `enter` and `leave` do to an optimizer."""

    def __init__(self) -> None:
        self._known: dict[Members, _Stretch] = {}
        # Stretches that cannot be joined as a whole, and the parts of them that can.
        self._splits: dict[Members, list[Members]] = {}
        self._inside: list[tuple[dict[str, Any], list[torch.Tensor]]] = []
        self._joined: list[_Stretch] = []

    def enter(self, optimizer: torch.optim.Optimizer, *, cast: bool) -> None:
        """Show the optimizer stretches in the place of their parameters.

        Args:
            cast: give gradients the dtype of their parameters.
        """
        # What this step does not use is forgotten: there may be as many stretches as there are sets
        # of parameters with gradients.
        before, self._known = self._known, {}
        splits, self._splits = self._splits, {}
        for group in optimizer.param_groups:
            parameters = list(group["params"])
            self._inside.append((group, parameters))
            if _applies_to(group):
                group["params"] = self._shown(optimizer, parameters, before, splits, cast)

    def _shown(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: list[torch.Tensor],
        before: Mapping[Members, _Stretch],
        splits: Mapping[Members, list[Members]],
        cast: bool,
    ) -> list[torch.Tensor]:
        """What the optimizer sees instead of ``parameters``: plain tensors, or nothing else than
        before, as it may use operators on lists, which do not mix them with DTensors."""
        shown: list[torch.Tensor] = []
        joined: dict[Members, _Stretch] = {}

        def join(members: Members) -> bool:
            stretch = before.get(members) or _Stretch(members)
            if stretch.enter(optimizer, cast=cast):
                joined[members] = stretch
                shown.append(stretch.flat)
                return True
            return False

        for members in _stretches(parameters):
            parts = splits.get(members) or _parts_of(members, optimizer)
            self._splits[members] = parts
            for part in parts:
                if join(part):
                    continue
                # Its state may have changed: looked at anew next time.
                self._splits.pop(members, None)
                if len(part) == 1 or not all(join((each,)) for each in part):
                    for stretch in joined.values():
                        stretch.leave(optimizer)
                    return parameters
        self._known |= joined
        self._joined += joined.values()
        return [*shown, *(each for each in parameters if not _has_rows(each))]

    def leave(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer its parameters back, with their parts of the state."""
        for stretch in self._joined:
            stretch.leave(optimizer)
        for group, parameters in self._inside:
            group["params"] = parameters
            if not self._joined:
                continue
            # Which of them were joined differs between ranks, and whoever saves state goes through
            # it in order.
            for parameter in parameters:
                if parameter in optimizer.state:
                    optimizer.state[parameter] = optimizer.state.pop(parameter)
        self._joined.clear()
        self._inside.clear()


class _Stretch:
    """Parameters side by side in one buffer.

    Attributes:
        flat: all of them, 1-D, aliasing.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._locals = [_local(member) for member in members]
        self.flat = nn.Parameter(_joined_memory(self._locals), members[0].requires_grad)
        # By name of state: the flat value, each member's part of it, and what scalars are in.
        self._flat_state: dict[str, Any] = {}
        self._parts: dict[str, Sequence[Any]] = {}
        self._scalars: dict[str, torch.Tensor] = {}
        self._scalar_writes = 0
        self._originals: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def enter(self, optimizer: torch.optim.Optimizer, *, cast: bool) -> bool:
        """Show ``flat``, gradient and state; False, and nothing is changed, if they do not fit."""
        gradients = [_local(member.grad) for member in self._members]
        locals_ = [_local(member) for member in self._members]
        if not _side_by_side(gradients) or not _side_by_side(locals_):
            return False
        if _joined_memory(locals_).data_ptr() != self.flat.data_ptr():
            # The parameters have got other memory since.
            self.flat = nn.Parameter(_joined_memory(locals_), self.flat.requires_grad)
        states = [optimizer.state.get(member) or {} for member in self._members]
        if not self._is_known(states) and not self._take_over(states):
            return False
        gradient = _joined_memory(gradients)
        if cast and gradient.dtype != self.flat.dtype:
            gradient = gradient.to(self.flat.dtype)
            self._show_gradient(gradient)
        self.flat.grad_dtype = gradient.dtype
        self.flat.grad = gradient
        for member in self._members:
            optimizer.state.pop(member, None)
        if self._flat_state:
            optimizer.state[self.flat] = dict(self._flat_state)
        return True

    def _show_gradient(self, gradient: torch.Tensor) -> None:
        """Let whoever looks at the members' gradients within the step see, and write, this one."""
        for member, part in zip(self._members, self._cut_tensor(gradient), strict=True):
            self._originals.append((member, member.grad))
            set_gradient(member, part)

    def _is_known(self, states: Sequence[dict[str, Any]]) -> bool:
        """Whether the members' state is the very parts that the last step left, and nobody wrote
        scalars since (a checkpoint may be loaded in place)."""
        if writes_of(tuple(self._scalars.values())) != self._scalar_writes:
            return False
        return all(
            state.keys() == self._parts.keys()
            and all(state[name] is parts[index] for name, parts in self._parts.items())
            for index, state in enumerate(states)
        )

    def _take_over(self, states: Sequence[dict[str, Any]]) -> bool:
        """Join state that somebody else has put there; False if that is impossible."""
        names = states[0].keys()
        if any(state.keys() != names for state in states):
            return False
        joined: dict[str, Any] = {}
        for name in names:
            values = [state[name] for state in states]
            if all(_is_like(v, local) for v, local in zip(values, self._locals, strict=True)):
                locals_ = [_local(value) for value in values]
                if len({each.dtype for each in locals_}) != 1:
                    return False
                joined[name] = torch.cat([each.reshape(-1) for each in locals_])
            elif all(_is_same(values[0], value) for value in values[1:]):
                first = values[0]
                joined[name] = first.clone() if isinstance(first, torch.Tensor) else first
            else:
                return False
        self._flat_state, self._parts, self._scalars = joined, {}, {}
        self._scalar_writes = 0
        return True

    def leave(self, optimizer: torch.optim.Optimizer) -> None:
        """Give each member its part of the state, and its gradient back."""
        self.flat.grad = None
        for member, original in self._originals:
            set_gradient(member, original)
        self._originals.clear()
        state = dict(optimizer.state.pop(self.flat, {}))
        for name, value in state.items():
            if value is not self._flat_state.get(name) or name not in self._parts:
                self._scalars.pop(name, None)
                self._parts[name] = self._cut(name, value)
            elif isinstance(value, torch.Tensor) and name in self._scalars:
                self._scalars[name].fill_(value)
        self._parts = {name: self._parts[name] for name in state}
        self._flat_state = state
        self._scalars = {name: self._scalars[name] for name in state if name in self._scalars}
        self._scalar_writes = writes_of(tuple(self._scalars.values()))
        for index, member in enumerate(self._members):
            if state:
                optimizer.state[member] = {name: self._parts[name][index] for name in state}

    def _cut(self, name: str, value: Any) -> Sequence[Any]:
        if not isinstance(value, torch.Tensor):
            return [value] * len(self._members)
        if value.shape != self.flat.shape:
            self._scalars[name] = value.repeat(len(self._members))
            return self._scalars[name].unbind()
        return self._cut_tensor(value)

    def _cut_tensor(self, value: torch.Tensor) -> list[DTensor]:
        parts = value.split([local.numel() for local in self._locals])
        return [
            _like(member, part.view(local.shape))
            for member, local, part in zip(self._members, self._locals, parts, strict=True)
        ]


def _parts_of(members: Members, optimizer: torch.optim.Optimizer) -> list[Members]:
    """``members`` in runs whose states have the same names and scalars."""
    runs: list[list[torch.Tensor]] = []
    for member in members:
        if runs and _states_fit(optimizer.state, runs[-1][-1], member):
            runs[-1].append(member)
        else:
            runs.append([member])
    return [tuple(run) for run in runs]


def set_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Bind ``parameter.grad``, which may be of another dtype than before."""
    parameter.grad = None
    if gradient is not None:
        parameter.grad_dtype = gradient.dtype
        parameter.grad = gradient


def _applies_to(settings: Mapping[str, Any]) -> bool:
    """Whether the parameters with these ``settings`` can all be shown as plain tensors."""
    parameters: Sequence[torch.Tensor] = settings["params"]
    if settings.get("fused") and any(each.device.type == "cpu" for each in parameters):
        return False  # torch's fused kernels for CPUs round otherwise where a tensor ends
    return all(
        _has_rows(each) or each.grad is None or not isinstance(each, DTensor) for each in parameters
    )


def _has_rows(parameter: torch.Tensor) -> bool:
    """Whether ``parameter`` is of a parameter group, with a gradient that is distributed alike."""
    gradient = parameter.grad
    if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
        return False
    return (
        get_containing_parameter_group(parameter) is not None
        and parameter.placements == gradient.placements
        and local_of(parameter).shape == local_of(gradient).shape
    )


def _stretches(parameters: Sequence[torch.Tensor]) -> Iterator[Members]:
    """Those of ``parameters`` that have gradients in a parameter group, in runs that lie side by
    side in one buffer and have gradients of one dtype."""
    joinable: dict[Any, list[torch.Tensor]] = {}
    for parameter in filter(_has_rows, parameters):
        gradient = parameter.grad
        assert gradient is not None
        group = get_containing_parameter_group(parameter)
        key = id(group), parameter.dtype, gradient.dtype, parameter.requires_grad
        joinable.setdefault(key, []).append(parameter)
    for members in joinable.values():
        places = [(int(_local(member).storage_offset()), member) for member in members]
        run: list[torch.Tensor] = []
        end = 0
        for start, member in sorted(places, key=lambda place: place[0]):
            here = _local(member).numel()
            if run and here and end and start != end:
                yield tuple(run)
                run = []
            run.append(member)
            end = start + here if here else end
        yield tuple(run)


def _local(tensor: Any) -> torch.Tensor:
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def _side_by_side(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether contiguous ``tensors`` of one dtype follow one another in one storage; those without
    elements are everywhere."""
    before: torch.Tensor | None = None
    for tensor in tensors:
        if tensor.dtype != tensors[0].dtype or not tensor.is_contiguous():
            return False
        if not tensor.numel():
            continue
        if before is not None:
            storage = before.untyped_storage().data_ptr()
            if tensor.untyped_storage().data_ptr() != storage:
                return False
            if tensor.storage_offset() != before.storage_offset() + before.numel():
                return False
        before = tensor
    return True


def _joined_memory(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """What `_side_by_side` ``tensors`` cover, 1-D, aliasing."""
    first = next((each for each in tensors if each.numel()), tensors[0]).detach()
    return first.as_strided((sum(each.numel() for each in tensors),), (1,), first.storage_offset())


def _states_fit(states: Mapping[torch.Tensor, Any], one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two parameters' states have the same names and the same scalars."""
    a, b = states.get(one) or {}, states.get(other) or {}
    return a.keys() == b.keys() and all(
        _is_same(a[name], b[name])
        or (_is_like(a[name], _local(one)) and _is_like(b[name], _local(other)))
        for name in a
    )


def _is_like(value: Any, local: torch.Tensor) -> bool:
    """Whether ``value`` has an element for each of ``local``."""
    if not isinstance(value, DTensor):
        return isinstance(value, torch.Tensor) and 0 < value.ndim and value.shape == local.shape
    mine = _local(value)
    return mine.shape == local.shape and mine.is_contiguous() and type(mine) is torch.Tensor


def _is_same(one: Any, other: Any) -> bool:
    """Whether two scalars are equal."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        plain = not isinstance(one, DTensor) and not isinstance(other, DTensor)
        return plain and one.ndim == other.ndim == 0 and torch.equal(one, other)
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    return bool(one == other)


def _like(member: torch.Tensor, local: torch.Tensor) -> DTensor:
    assert isinstance(member, DTensor)
    return dtensor_of(local, spec_like(spec_of(member), member.shape[:1].numel(), local))
