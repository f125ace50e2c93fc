"""Host state: what the host decides a graph's communication by, and what deciding leaves behind.

The ops of a graph decide when they run: whether a weight is stale, whether a gradient is the
first of its step, whether this microbatch is the last. A captured graph (``capture.py``) decides
nothing, it repeats. But all its decisions follow from few values, so a run of a graph is a step
from one `HostState` to another:

    before    ----- the ops run, and the device works ----->   after      recorded
    before    ----- the device repeats, after is put in place          replayed

`HostState.key` of the state before says whether a recorded run fits. States that no recorded run
can fit (a user's hook must be called) raise `Uncapturable`. No state has an event in it: at both
ends of a recorded run compute has waited for every lane (`HostSide.settle`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch

from .agreement import Step, agreement_of
from .registry import registry
from .torch_internals import in_backward

if TYPE_CHECKING:
    from .arena import Slot
    from .dbuffer import DBuffer
    from .parameter_group import FsdpParameterGroup

__all__ = [
    "GatheredState",
    "GradientState",
    "HostSide",
    "HostState",
    "Uncapturable",
    "UnshardingState",
]


class Uncapturable(Exception):
    """No error: this run of a graph needs the host; the text says what for."""


@dataclass(frozen=True)
class GatheredState:
    """What full parameters in one place are like.

    Attributes:
        address: of the place; 0 where it has no memory.
        is_there, holders, kept, outdated: see `Gathered`.
        buffer, slot: the place.
    """

    address: int
    is_there: bool
    holders: int
    kept: bool
    outdated: bool
    buffer: DBuffer = field(repr=False)
    slot: Slot | None = field(repr=False)

    @property
    def key(self) -> Hashable:
        """What a recorded run depends on; refers to no memory."""
        return self.address, self.is_there, self.holders, self.kept, self.outdated


@dataclass(frozen=True)
class UnshardingState:
    """What one group's full parameters are like.

    Attributes:
        own, placed: where they may be, see `Unsharding`.
        always_refreshes: see `Unsharding`.
        refreshes: the next unshard syncs the model weight from the main weight.
        redistributes: the next unshard brings the rest of a wider model weight up to date.
    """

    own: GatheredState
    placed: GatheredState | None
    always_refreshes: bool
    refreshes: bool
    redistributes: bool

    @property
    def key(self) -> Hashable:
        """What a recorded run depends on; refers to no memory."""
        placed = self.placed and self.placed.key
        return self.own.key, placed, self.always_refreshes, self.refreshes, self.redistributes


@dataclass(frozen=True)
class GradientState:
    """What one group's gradients are like.

    Attributes:
        address: of the accumulator; 0 while no parameter has a gradient.
        bound: for each parameter whether it has a ``.grad``.
        stale: they are finished.
        carry_address: of finished gradients that were set aside, 0: there are none.
        buffers: the accumulator and its finished view.
        gradients: each parameter's ``.grad``.
        carry: what was set aside.
    """

    address: int
    bound: tuple[bool, ...]
    stale: bool
    carry_address: int
    buffers: tuple[DBuffer, DBuffer] = field(repr=False)
    gradients: tuple[torch.Tensor | None, ...] = field(repr=False)
    carry: torch.Tensor | None = field(repr=False)

    @property
    def key(self) -> Hashable:
        """What a recorded run depends on; refers to no memory."""
        return self.address, self.bound, self.stale, self.carry_address


@dataclass(frozen=True)
class GroupState:
    """One group as a graph finds it, or leaves it.

    Attributes:
        unsharding: its weights.
        gradient: its gradients; None in a forward, which has nothing to do with them.
        wanted: whether the running backward was asked for its gradients.
        reduced: whether the running backward has reduced some already.
    """

    unsharding: UnshardingState
    gradient: GradientState | None
    wanted: bool
    reduced: bool

    @property
    def key(self) -> Hashable:
        """What a recorded run depends on."""
        gradient = self.gradient and self.gradient.key
        return self.unsharding.key, gradient, self.wanted, self.reduced


@dataclass(frozen=True)
class HostState:
    """All that a graph's communication is decided by.

    Attributes:
        flags: of the contexts, see `GroupContext.host_flags`.
        groups: the groups, in the order of `HostSide.groups`.
    """

    flags: tuple[Hashable, ...]
    groups: tuple[GroupState, ...]

    @property
    def key(self) -> Hashable:
        """Equal keys: the same run. It refers to no memory."""
        return self.flags, tuple(group.key for group in self.groups)


class HostSide:
    """The groups that a graph reads or reaches, and their contexts, during one call of it.

    Args:
        names: of the groups that the graph reads.

    Attributes:
        groups: those, and any whose gathers they start for another graph.
        contexts: what these share.
    """

    def __init__(self, names: Iterable[str]) -> None:
        read = [cast("FsdpParameterGroup", registry.lookup(name)) for name in names]
        self.contexts = tuple(dict.fromkeys(group.context for group in read))
        reached = [
            cast("FsdpParameterGroup", each)
            for group in read
            for each in group.context.reached_from(group)
        ]
        self.groups = tuple(dict.fromkeys((*read, *reached)))

    def begin(self) -> None:
        """What each graph's first gather does on the host, which may be done twice."""
        for context in self.contexts:
            context.begin_graph()

    def agree(self, how: str, kind: str) -> None:
        """Tell the other ranks ``how`` this rank runs the graph of this ``kind`` ("forward"), whose
        collectives come next.

        To NCCL a collective in a CUDA graph and one outside are different things: all ranks must
        start the same.

        Raises:
            RuntimeError: another rank does something else.
        """
        first = self.groups[0]
        step = Step.of_call(how, f"the {kind} graph of {first.label!r}, model {first.model}")
        for group in {id(group.mesh): group for group in self.groups}.values():
            for axis in range(group.mesh.ndim):
                agreement = agreement_of(group.mesh.get_group(axis))
                if agreement is not None:
                    agreement.announce(step)

    def settle(self) -> None:
        """Compute waits for all lanes, and nobody ever for an event of theirs from before."""
        for context in self.contexts:
            context.join_lanes()
        self.forget_events()

    def forget_events(self) -> None:
        """Nobody waits any more for what is on the lanes."""
        for group in self.groups:
            group.unsharding.forget_events()
            if group.gradient is not None:
                group.gradient.forget_events()

    def fork(self) -> None:
        """All lanes go on after what compute has issued so far."""
        for context in self.contexts:
            context.fork_lanes()

    @property
    def arenas(self) -> tuple[int, ...]:
        """Where gathered parameters are put: a captured graph knows nothing of another arena."""
        return tuple(context.memory.arena.address for context in self.contexts)

    def state(self) -> HostState:
        """How things are now.

        Raises:
            Uncapturable: a run from here needs the host.
        """
        backward = in_backward()
        flags = tuple(context.host_flags() for context in self.contexts)
        return HostState(
            (backward, torch.is_inference_mode_enabled(), *flags),
            tuple(_state_of(group, backward) for group in self.groups),
        )

    def put(self, state: HostState) -> None:
        """Make things as in ``state``, which a recorded run of this graph has left behind."""
        for group, after in zip(self.groups, state.groups, strict=True):
            group.unsharding.put_host_state(after.unsharding, group.context.memory.arena)
            if after.gradient is not None and group.gradient is not None:
                group.gradient.put_host_state(after.gradient)
            if after.reduced:
                group.context.note_reduced(group)


def _state_of(group: FsdpParameterGroup, backward: bool) -> GroupState:
    unsharding = group.unsharding.host_state()
    if not backward:
        return GroupState(unsharding, None, False, False)
    gradient = None if group.gradient is None else group.gradient.host_state()
    reduced = group.context.has_reduced(group)
    return GroupState(unsharding, gradient, group.gradients_wanted(), reduced)
