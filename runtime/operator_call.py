"""Call: one call of an operator, whose arguments can be looked at by name and replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from compile_fsdp.runtime.torch_internals import (
    OpOverload,
    argument_names,
    operator_name,
    written_arguments,
)

__all__ = ["Call", "map_nested", "tensors_in"]


@dataclass(frozen=True)
class Call:
    """One call of an operator.

    Attributes:
        kind: the class of DTensors that are cut by rows.
        func: the operator.
        args, kwargs: what it was called with.
    """

    kind: type[DTensor]
    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        """The operator's name, without namespace and overload."""
        return operator_name(self.func)

    @property
    def arguments(self) -> dict[str, Any]:
        """What was given, by name."""
        names = argument_names(self.func)
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}

    @property
    def written(self) -> list[Any]:
        """The arguments that the operator writes into."""
        given = self.arguments
        return [given[name] for name in written_arguments(self.func) if name in given]

    def mapped(self, function: Callable[[Any], Any]) -> Call:
        """The call with ``function`` of every argument, in lists too."""
        args = tuple(map_nested(each, function) for each in self.args)
        kwargs = {name: map_nested(each, function) for name, each in self.kwargs.items()}
        return Call(self.kind, self.func, args, kwargs)

    def with_arguments(self, /, **changes: Any) -> Call:
        """The call with some arguments, all of which were given, replaced."""
        names = argument_names(self.func)
        args = tuple(changes.pop(n, each) for n, each in zip(names, self.args, strict=False))
        return Call(self.kind, self.func, args, {**self.kwargs, **changes})

    def run(self) -> Any:
        """What the operator returns."""
        return self.func(*self.args, **self.kwargs)

    def selected(self, count: int, indices: Sequence[int]) -> Call:
        """The call with these positions only of its lists of ``count``."""

        def select(value: Any) -> Any:
            if isinstance(value, list | tuple) and len(value) == count:
                return [value[index] for index in indices]
            return value

        args = tuple(select(each) for each in self.args)
        kwargs = {name: select(each) for name, each in self.kwargs.items()}
        return Call(self.kind, self.func, args, kwargs)


def map_nested(value: Any, function: Callable[[Any], Any]) -> Any:
    """``function`` of ``value``, or of everything in it if it is a list or a tuple."""
    if isinstance(value, list | tuple):
        mapped = [map_nested(each, function) for each in value]
        return mapped if isinstance(value, list) else tuple(mapped)
    return function(value)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a nest of lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
