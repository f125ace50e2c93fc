"""Faults put into the library on purpose, one at a time, to see that the tests notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from compile_fsdp.runtime import collectives
from compile_fsdp.runtime.main_gradient import MainGradient
from compile_fsdp.runtime.parameter_group import FsdpParameterGroup
from compile_fsdp.runtime.weights import GroupWeights
from tests.configurations import Configuration
from tests.random_training import differences


def _drop_grad_scale(accumulate: Callable[..., None]) -> Callable[..., None]:
    def broken(self: Any, partial: Any, indices: Any, scale: float, lane: Any, **rest: Any) -> None:
        accumulate(self, partial, indices, 1.0, lane, **rest)

    return broken


def _lose_a_microbatch(reduce: Callable[..., None]) -> Callable[..., None]:
    def broken(self: Any, *arguments: Any) -> None:
        if self.context.is_last_microbatch:
            reduce(self, *arguments)

    return broken


def _bind_every_gradient(reduce: Callable[..., None]) -> Callable[..., None]:
    return lambda self, partial, indices=None: reduce(self, partial, None)


def _sum(reduce_scatter: Callable[..., None]) -> Callable[..., None]:
    return lambda *arguments, **rest: reduce_scatter(*arguments, **{**rest, "average": False})


def _gather_wrong_rows(all_gather: Callable[..., None]) -> Callable[..., None]:
    def broken(lane: Any, output: torch.Tensor, *arguments: Any, **rest: Any) -> None:
        all_gather(lane, output, *arguments, **rest)
        lane.then(lambda: output.copy_(output.roll(4)))

    return broken


def _forget_what_was_finished(set_aside: Callable[..., None]) -> Callable[..., None]:
    def broken(self: Any, *arguments: Any) -> None:
        set_aside(self, *arguments)
        self._carry = None

    return broken


def _do_nothing(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **rest: False


BROKEN = {
    "grad_scale dropped": (MainGradient, "accumulate", _drop_grad_scale),
    "all microbatches but the last lost": (
        FsdpParameterGroup,
        "reduce_inner_gradients",
        _lose_a_microbatch,
    ),
    "zeros instead of no gradient": (
        FsdpParameterGroup,
        "reduce_inner_gradients",
        _bind_every_gradient,
    ),
    "gradients summed, not averaged": (collectives, "reduce_scatter", _sum),
    "wrong rows gathered": (collectives, "all_gather", _gather_wrong_rows),
    "finished gradients lost": (MainGradient, "_set_finished_aside", _forget_what_was_finished),
    "gradients not finished": (MainGradient, "finish", _do_nothing),
    "model weights stale after a step": (GroupWeights, "redistribute", _do_nothing),
    "model weights never written": (GroupWeights, "follow_main", _do_nothing),
}


@contextmanager
def broken(how: str) -> Iterator[None]:
    """A library with one fault, in this process."""
    owner, name, breaking = BROKEN[how]
    with mock.patch.object(owner, name, breaking(getattr(owner, name))):
        yield


def differences_when_broken(how: str, configuration: Configuration) -> list[str]:
    with broken(how):
        return differences(configuration)
