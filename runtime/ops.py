"""The torch.library ops that compiled graphs call (``torch.ops.compile_fsdp.*``).

Two families:

*Markers*, functional, put into the graph by the parameter property while Dynamo traces:

    parameter(shard, group, index, keep) -> full parameter
    parameter_grad(grad, group, index) -> a gradient shaped like ``shard``

They say *which* parameter is read and *which* gradient is produced, nothing about when; ``keep``,
that the group stays unsharded between the forward and the backward graph. Their
implementations are right and slow (one gather or reduction for each call), so a sharded model
also runs under ``backend="eager"``, ``"aot_eager"`` or ``"inductor"``.

*Scheduled communication*, written by the passes in place of the markers:

    gather_together -> unshard of each      (small groups, one collective)
    unshard -> wait -> (reads of views of full) -> release, or keep at the end of a forward
    reduce_inner -> reduce_outer -> wait_reductions
    reduce_together in place of the reduce_inner of several small groups

``unshard`` and ``gather_together`` may say where in an arena of how many bytes a group goes.
``after`` and ``issued`` take tensors that nobody reads: they carry order (design: "order is
dataflow, not luck"). ``wait``, ``release`` and ``keep`` declare that they mutate ``full``, so a
compiler keeps every read of ``full`` between them. ``packed`` says that the gradients are one
tensor, laid out like the group's gathered buffer.

Nothing here decides anything: each op finds its group by name and tells it what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import torch

from .arena import Place
from .communication_errors import CommunicationError
from .modes import without_autograd
from .registry import registry
from .torch_internals import in_backward

if TYPE_CHECKING:
    from .parameter_group import FsdpParameterGroup

NAMESPACE = "compile_fsdp"

NO_ARENA = -1
"""The arena's size in a graph that was planned without one."""

NO_PLACE = -1
"""The offset of a group that is not gathered, or has no place in the arena."""

_SCHEMAS = (
    "parameter(Tensor shard, str group, int index, bool keep=False) -> Tensor",
    "parameter_grad(Tensor grad, str group, int index) -> Tensor",
    "gather_together(Tensor[] shards, str[] groups, Tensor[] after, int[] offsets=[], "
    "int arena=-1) -> Tensor",
    "unshard(Tensor shard, str group, Tensor[] after, int offset=-1, int arena=-1) -> Tensor",
    "wait(Tensor(a!) full, str group, Tensor[] issued) -> ()",
    "release(Tensor(a!) full, str group) -> ()",
    "keep(Tensor(a!) full, str group) -> ()",
    "reduce_inner(Tensor[] gradients, str group, int[] indices, Tensor[] after, "
    "bool packed=False) -> Tensor",
    "reduce_together(Tensor[] gradients, str[] groups, int[] counts, int[] indices, "
    "Tensor[] after) -> Tensor",
    "reduce_outer(Tensor token, str group, Tensor[] after) -> Tensor",
    "wait_reductions(Tensor(a!)[] tokens, str[] groups) -> ()",
)


@dataclass(frozen=True)
class ExecutedStep:
    """One call of one of these ops: its name and the name of its group (or groups)."""

    op: str
    group: str | list[str]


# Not a context variable: backward may run in autograd's own threads, which do not inherit one.
_open_recordings: list[list[ExecutedStep]] = []


@contextmanager
def recorded_steps() -> Iterator[list[ExecutedStep]]:
    """Collect the ops that run while the context is open, in the order in which they run."""
    steps: list[ExecutedStep] = []
    _open_recordings.append(steps)
    try:
        yield steps
    finally:
        _open_recordings[:] = [other for other in _open_recordings if other is not steps]


_library = torch.library.Library(NAMESPACE, "DEF")
for _schema in _SCHEMAS:
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def _group(name: str) -> FsdpParameterGroup:
    return cast("FsdpParameterGroup", registry.lookup(name))


kernels: dict[str, Callable[..., Any]] = {}
"""The implementation of each op by its name, for who wants to see what happens inside."""


def _implements(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the implementation of an op for every device.

    Runs without autograd and outside inference mode: the runtime keeps what it allocates, and a
    tensor born in inference mode could never be written again in training.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            for recording in _open_recordings:
                recording.append(ExecutedStep(name, args[1]))
            try:
                with without_autograd():
                    return function(*args, **kwargs)
            except CommunicationError as error:
                error.add_place(f"at compile_fsdp.{name} of {args[1]!r} in a graph")
                raise

        kernels[name] = kernel
        _library.impl(name, kernel, "CompositeExplicitAutograd")
        return function

    return register


def _fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what an op returns under fake tensors."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.register_fake(f"{NAMESPACE}::{name}", function, lib=_library)
        return function

    return register


def new_token(device: torch.device) -> torch.Tensor:
    """A fresh one-element tensor that stands for "this has been issued".

    Never shared between calls: a compiler may reuse the memory of a dead token.
    """
    return torch.empty(1, device=device)


# Markers ----------------------------------------------------------------------------------------


@_implements("parameter")
def _parameter(shard: torch.Tensor, group: str, index: int, keep: bool = False) -> torch.Tensor:
    return _group(group).copy_full_parameter(index)


@_fake("parameter")
def _parameter_fake(
    shard: torch.Tensor, group: str, index: int, keep: bool = False
) -> torch.Tensor:
    info = registry.lookup(group).info
    return shard.new_empty(info.shapes[index], dtype=info.dtype)


def _parameter_setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.group, ctx.index, *_ = inputs
    ctx.others = len(inputs) - 1
    if not registry.lookup(ctx.group).info.is_trainable(ctx.index):
        # Frozen among trainable ones: the flat shard alone would say that it wants a gradient.
        ctx.mark_non_differentiable(output)


def _parameter_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    part = torch.ops.compile_fsdp.parameter_grad(grad, ctx.group, ctx.index)
    return (part, *(None for _ in range(ctx.others)))


torch.library.register_autograd(
    f"{NAMESPACE}::parameter",
    _parameter_backward,
    setup_context=_parameter_setup_context,
    lib=_library,
)


@_implements("parameter_grad")
def _parameter_grad(grad: torch.Tensor, group: str, index: int) -> torch.Tensor:
    live = _group(group)
    if live.gradients_wanted():
        live.reduce_gradients({index: grad})
        live.context.finish_at_end_of_backward()
    # Autograd wants a gradient for the flat leaf. The real one has gone into main_grad; the end
    # of the backward drops this one.
    return grad.new_zeros(live.info.local_numel, dtype=live.info.dtype)


@_fake("parameter_grad")
def _parameter_grad_fake(grad: torch.Tensor, group: str, index: int) -> torch.Tensor:
    info = registry.lookup(group).info
    return grad.new_empty((info.local_numel,), dtype=info.dtype)


# Scheduled communication -----------------------------------------------------------------------


@_implements("gather_together")
def _gather_together(
    shards: Sequence[torch.Tensor],
    groups: Sequence[str],
    after: Sequence[torch.Tensor],
    offsets: Sequence[int] = (),
    arena: int = NO_ARENA,
) -> torch.Tensor:
    live = [_group(name) for name in groups]
    if not after:
        live[0].context.begin_graph()
    places = [_place(live[0], offset, arena) for offset in offsets or [NO_PLACE] * len(live)]
    live[0].context.gather_together(live, places)
    return new_token(live[0].device)


@_fake("gather_together")
def _gather_together_fake(
    shards: Sequence[torch.Tensor],
    groups: Sequence[str],
    after: Sequence[torch.Tensor],
    offsets: Sequence[int] = (),
    arena: int = NO_ARENA,
) -> torch.Tensor:
    return shards[0].new_empty((1,), dtype=torch.float32)


@_implements("unshard")
def _unshard(
    shard: torch.Tensor,
    group: str,
    after: Sequence[torch.Tensor],
    offset: int = NO_PLACE,
    arena: int = NO_ARENA,
) -> torch.Tensor:
    live = _group(group)
    if not after:
        live.context.begin_graph()
    full = live.acquire(place=_place(live, offset, arena))
    live.context.prefetch_beyond_graph(live)
    return full


@_fake("unshard")
def _unshard_fake(
    shard: torch.Tensor,
    group: str,
    after: Sequence[torch.Tensor],
    offset: int = NO_PLACE,
    arena: int = NO_ARENA,
) -> torch.Tensor:
    info = registry.lookup(group).info
    return shard.new_empty((info.full_numel,), dtype=info.dtype)


def _place(group: FsdpParameterGroup, offset: int, arena: int) -> Place | None:
    """A graph with an arena, even one of no bytes, makes its root's memory static."""
    if arena == NO_ARENA:
        return None
    group.context.memory.is_static = True
    return None if offset == NO_PLACE else Place(offset, arena)


@_implements("wait")
def _wait(full: torch.Tensor, group: str, issued: Sequence[torch.Tensor]) -> None:
    _group(group).wait_for_unshard(full=full)


@_implements("release")
def _release(full: torch.Tensor, group: str) -> None:
    _group(group).drop(full)


@_implements("keep")
def _keep(full: torch.Tensor, group: str) -> None:
    _group(group).keep(full)


@_implements("reduce_inner")
def _reduce_inner(
    gradients: Sequence[torch.Tensor],
    group: str,
    indices: Sequence[int],
    after: Sequence[torch.Tensor],
    packed: bool = False,
) -> torch.Tensor:
    live = _group(group)
    if live.gradients_wanted():
        if in_backward():
            live.context.finish_at_end_of_backward()
        if packed:
            live.reduce_packed(gradients[0], indices)
        else:
            live.reduce_gradients(dict(zip(indices, gradients, strict=True)))
    return new_token(live.device)


@_fake("reduce_inner")
def _reduce_inner_fake(
    gradients: Sequence[torch.Tensor],
    group: str,
    indices: Sequence[int],
    after: Sequence[torch.Tensor],
    packed: bool = False,
) -> torch.Tensor:
    return gradients[0].new_empty((1,), dtype=torch.float32)


@_implements("reduce_together")
def _reduce_together(
    gradients: Sequence[torch.Tensor],
    groups: Sequence[str],
    counts: Sequence[int],
    indices: Sequence[int],
    after: Sequence[torch.Tensor],
) -> torch.Tensor:
    """``counts[n]`` of the gradients, with their indices, belong to ``groups[n]``."""
    given = zip(indices, gradients, strict=True)
    contributions = {
        _group(name): dict(islice(given, count)) for name, count in zip(groups, counts, strict=True)
    }
    wanted = {live: mine for live, mine in contributions.items() if live.gradients_wanted()}
    if wanted:
        context = next(iter(wanted)).context
        if in_backward():
            context.finish_at_end_of_backward()
        context.reduce_together(wanted)
    return new_token(gradients[0].device)


@_fake("reduce_together")
def _reduce_together_fake(
    gradients: Sequence[torch.Tensor],
    groups: Sequence[str],
    counts: Sequence[int],
    indices: Sequence[int],
    after: Sequence[torch.Tensor],
) -> torch.Tensor:
    return gradients[0].new_empty((1,), dtype=torch.float32)


@_implements("reduce_outer")
def _reduce_outer(token: torch.Tensor, group: str, after: Sequence[torch.Tensor]) -> torch.Tensor:
    live = _group(group)
    context = live.context
    # Withheld gradients are reduced, and finished, when the backward ends.
    finishes = context.is_last_microbatch and not context.zeros_missing_gradients
    if finishes and live.gradients_wanted():
        live.reduce_outer_gradients()
    return new_token(live.device)


@_fake("reduce_outer")
def _reduce_outer_fake(
    token: torch.Tensor, group: str, after: Sequence[torch.Tensor]
) -> torch.Tensor:
    return torch.empty_like(token)


@_implements("wait_reductions")
def _wait_reductions(tokens: Sequence[torch.Tensor], groups: Sequence[str]) -> None:
    lives = [_group(name) for name in groups]
    for context in dict.fromkeys(live.context for live in lives):
        if in_backward():
            context.wait_for_reductions()
        else:
            # Gradients that a forward graph computes: this is their end.
            context.end_of_backward()
    for live in lives:
        if live.is_kept:  # the backward that it was kept for did without it
            live.reshard_alone()


def _returns_nothing(*arguments: Any) -> None: ...


for _name in ("wait", "release", "keep", "wait_reductions"):
    _fake(_name)(_returns_nothing)
