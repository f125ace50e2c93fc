"""GradientHooks: what users hang on sharded parameters, and gradients that come past the group.

A sharded parameter takes no part in a forward, so autograd does not run its hooks. They run here,
on sharded gradients, after the reduction:

    p.register_hook(f)                        f(reduced gradient); may replace it
    p.register_post_accumulate_grad_hook(f)   f(p), at the end of the backward

A loss that reads sharded parameters directly (a penalty on ``model.parameters()``) makes autograd
add to ``.grad`` itself, which must wait for what is still being reduced into the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from .dbuffer import DBuffer
from .streams import Lane
from .torch_internals import (
    gradient_hooks,
    hook_tables,
    post_accumulate_hook_tables,
    post_accumulate_hooks,
)


class _Guard:
    """A hook of our own among the users'."""

    def __init__(self, prepare: Callable[[int], None], index: int) -> None:
        self._prepare = prepare
        self._index = index

    def __call__(self, gradient: torch.Tensor) -> None:
        self._prepare(self._index)


class GradientHooks:
    """The hooks of one group's sharded parameters.

    Args:
        parameters: the sharded parameters, in tensor order.
        fqns: their names, for messages.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], fqns: Sequence[str]) -> None:
        self._parameters = tuple(parameters)
        self._fqns = tuple(fqns)
        self._accumulated: dict[int, None] = {}
        self._guarded: set[int] = set()
        # Where the hooks of each parameter are, to see at a glance that there are none of users.
        self._tables = hook_tables(parameters)

    def guard(self, prepare: Callable[[int], None]) -> None:
        """Call ``prepare(index)`` before autograd itself adds to the ``.grad`` of a parameter."""
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad and index not in self._guarded:
                self._guarded.add(index)
                parameter.register_hook(_Guard(prepare, index))
        self._tables = hook_tables(self._parameters)

    def _users_hooks(self, index: int) -> list[Callable[[torch.Tensor], torch.Tensor | None]]:
        hooks = gradient_hooks(self._parameters[index])
        return [hook for hook in hooks if not isinstance(hook, _Guard)]

    def any_of_users(self) -> bool:
        """Whether users have hung any hook on these parameters."""
        return any(
            self._users_hooks(index) or post_accumulate_hooks(parameter)
            for index, parameter in enumerate(self._parameters)
        )

    def on(self, indices: Sequence[int]) -> list[int]:
        """Those of ``indices`` whose parameters users have hung a hook on that sees gradients."""
        tables = hook_tables(self._parameters)
        if tables == self._tables and sum(map(len, filter(None, tables))) == len(self._guarded):
            return []
        return [index for index in indices if self._users_hooks(index)]

    def see(self, reduced: DBuffer, hooked: Sequence[int], lane: Lane) -> None:
        """Show each parameter of `on` its part of ``reduced``, and take in what hooks return.

        Raises:
            RuntimeError: ``reduced`` is not finished: other ranks' parts are missing.
        """
        if not hooked:
            return
        if any(placement.is_partial() for placement in reduced.placements):
            raise RuntimeError(
                f"parameter {self._fqns[hooked[0]]!r} has a hook (register_hook), but under its "
                f"gradient placements {reduced.placements} a gradient is finished on the last "
                "microbatch only; use register_post_accumulate_grad_hook, or Shard gradients "
                "(ZeRO-2, ZeRO-3)"
            )
        lane.synchronize()
        for index in hooked:
            for hook in self._users_hooks(index):
                replaced = hook(reduced.get_dtensor(index))
                if replaced is not None:
                    local = getattr(replaced, "to_local", lambda replaced=replaced: replaced)()
                    reduced.get_local_tensor(index).copy_(local)
        lane.wait_current()

    def note(self, indices: Sequence[int]) -> bool:
        """Remember whose gradients have grown; True if a hook must run for one of them."""
        if not any(post_accumulate_hook_tables(self._parameters)):
            return False
        waiting = [index for index in indices if post_accumulate_hooks(self._parameters[index])]
        self._accumulated.update(dict.fromkeys(waiting))
        return bool(waiting)

    def call_post_accumulate(self) -> None:
        """Run the hooks of the parameters whose gradients have grown since the last call."""
        accumulated, self._accumulated = self._accumulated, {}
        for index in accumulated:
            for hook in post_accumulate_hooks(self._parameters[index]):
                hook(self._parameters[index])
