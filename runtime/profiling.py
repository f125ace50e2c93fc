"""Ranges in a profile that name what a parameter group does, and for which parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

import torch

from .torch_internals import is_profiling

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Named(Protocol):
    """What a range says of a group."""

    label: str
    name: str

    @property
    def fqns(self) -> list[str]: ...


_S = TypeVar("_S", bound=Named)

SHOWN = 3
"""Parameters that a range names; a group may have hundreds, and a range is one line."""


def profiled(
    verb: str,
) -> Callable[[Callable[Concatenate[_S, _P], _R]], Callable[Concatenate[_S, _P], _R]]:
    """Show the calls of a group's method as ``compile_fsdp.verb label (fqn, fqn, +4)``.

    Without an active profiler a call costs one look at a flag more.
    """

    def decorate(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
        @functools.wraps(method)
        def ranged(self: _S, *args: _P.args, **kwargs: _P.kwargs) -> _R:
            if not is_profiling():
                return method(self, *args, **kwargs)
            with torch.profiler.record_function(range_name(verb, self)):
                return method(self, *args, **kwargs)

        return cast(Callable[Concatenate[_S, _P], _R], ranged)

    return decorate


def range_name(verb: str, group: Named) -> str:
    """The name of a range."""
    names = group.fqns[:SHOWN]
    if len(group.fqns) > SHOWN:
        names.append(f"+{len(group.fqns) - SHOWN}")
    return f"compile_fsdp.{verb} {group.label or group.name} ({', '.join(names)})"
