"""GroupUnsharding: the half of a parameter group that gathers, holds and releases its weights."""

from __future__ import annotations

import torch

from .arena import Place
from .context import GroupContext
from .gathered import Gathered
from .group_identity import GroupIdentity
from .profiling import profiled
from .unsharding import Phase, Unsharding
from .weights import Weights


class GroupUnsharding(GroupIdentity):
    """The part of `FsdpParameterGroup` that deals with weights; it knows no gradient.

    Attributes:
        context: what the group shares with the others of its root, its lanes among it.
        planes: what is quantised from its main weight, and gathered instead; empty: nothing.
    """

    context: GroupContext
    planes: tuple[GroupUnsharding, ...] = ()
    _weights: Weights
    _unsharding: Unsharding

    # Buffers -----------------------------------------------------------------------------------

    @property
    def full_local_tensor(self) -> torch.Tensor:
        """The group's own gathered flat buffer, 1-D, ``info.full_numel`` elements of the compute
        dtype. The unsharded Parameters are views of it."""
        return self._weights.full.local

    # Main weight -> model weight ---------------------------------------------------------------

    def sync_model_weight_from_main_weight(self) -> None:
        """Write what an optimizer step changed into the model weight.

        Only the optimizer's view of the model weight is written. Where the model weight is wider
        (ZeRO-1, ZeRO-2, HFSDP) it is stale until the next unshard redistributes it. Full parameters
        that a forward kept are older than the step, and released.
        """
        if self.is_kept:
            self._unsharding.release(self.context.lanes.gather)
        if self.planes:
            # Who reads the weight itself, which is rare, writes it then.
            self._unsharding.maybe_stepped = True
        else:
            self._unsharding.sync()
        self.context.weights_are_new = True
        for planes in self.planes:
            planes.sync_model_weight_from_main_weight()

    def note_step(self) -> None:
        """A step that nobody announced may have written the main weight."""
        self._unsharding.maybe_stepped = True
        for planes in self.planes:
            planes.note_step()

    # Unshard and reshard -----------------------------------------------------------------------

    @property
    def is_unsharded(self) -> bool:
        """Whether the full parameters have storage (a gather may still be in flight)."""
        return self._unsharding.is_unsharded

    def unshard_parameters(self, phase: Phase | None = None) -> None:
        """Start gathering the full parameters on the gather lane; idempotent while unsharded.

        Refreshes a stale model weight first. Returns at once: `wait_for_unshard` orders compute
        behind the gather. ``phase`` names what the ready event is recorded for; of a quantised
        group, which planes are gathered (None: the parameters themselves).
        """
        if self.planes and phase is not None:
            self.gathered_for(phase).unshard_parameters(phase)
        else:
            self._unshard(phase, None)

    def gathered_for(self, phase: Phase) -> GroupUnsharding:
        """What is gathered for ``phase``: this group, or the planes that linear layers read."""
        return self.planes[phase is Phase.BACKWARD] if self.planes else self

    @profiled("unshard")
    def _unshard(self, phase: Phase | None, place: Place | None) -> Gathered:
        lane = self.context.lanes.gather
        if self.context.weights_are_new or not self.context.is_driven:
            # Written since the last `GroupContext.begin_graph`, by a step within a forward and its
            # backward; or nobody says when a graph begins.
            lane.wait_current()
            self.context.weights_are_new = False
        return self._unsharding.unshard(lane, phase, label=self.label, place=place)

    def prefetch(self, phase: Phase | None = None) -> None:
        """As `unshard_parameters`, for somebody who will hold the group soon: where he wanted the
        full parameters the last time."""
        self._unshard(phase, self._unsharding.expected_place)

    @property
    def unsharding(self) -> Unsharding:
        """The state of the full parameters, for gathering several groups together."""
        return self._unsharding

    @profiled("wait")
    def wait_for_unshard(
        self, phase: Phase | None = None, full: torch.Tensor | None = None
    ) -> None:
        """Compute issued after this may read the full parameters, in ``full`` (None: their own).

        Raises:
            RuntimeError: nothing was unsharded.
        """
        if self.planes and phase is not None:
            self.gathered_for(phase).wait_for_unshard(phase, full)
            return
        if not self.is_unsharded:
            raise RuntimeError(
                f"parameter group {self.label or self.name!r}: wait_for_unshard was called while "
                "the parameters are sharded; call unshard_parameters first"
            )
        self._unsharding.wait(phase, full)

    def reshard_parameters(self) -> None:
        """Return to shards: full parameters, and planes, lose their storage, whoever holds them."""
        self.reshard_alone()
        for planes in self.planes:
            planes.reshard_parameters()

    @profiled("reshard")
    def reshard_alone(self) -> None:
        """`reshard_parameters` without planes."""
        self._unsharding.forget_holders()
        if self.is_unsharded:
            self._unsharding.release(self.context.lanes.gather)

    def release_unsharded_storage(self, *, rowwise_only: bool = False) -> None:
        """Resize the gathered buffer to zero, ordered after the compute issued so far.

        Views that autograd saved stay valid objects; they come back to life with the next
        unshard.

        Args:
            rowwise_only: nothing but the rowwise planes of a quantised group; another group has
                no planes to tell apart, and keeps its storage.
        """
        if not rowwise_only:
            self._unsharding.release(self.context.lanes.gather)
        for planes in self.planes[: 1 if rowwise_only else None]:
            planes.release_unsharded_storage()

    def acquire(self, phase: Phase | None = None, place: Place | None = None) -> torch.Tensor:
        """Unshard, and hold: they stay until as many `drop` calls.

        Args:
            phase: as of `unshard_parameters`.
            place: where a plan puts them in the arena; None: in `full_local_tensor`.

        Returns:
            The flat buffer that they will be in: `full_local_tensor` if they are there already.
        """
        gathered = self._unshard(phase, place)
        gathered.holders += 1
        return gathered.buffer.local

    def drop(self, full: torch.Tensor | None = None) -> None:
        """Give one hold back; the last one releases the storage.

        ``full``: what `acquire` returned; None: `full_local_tensor`.

        Raises:
            RuntimeError: nobody holds the group there.
        """
        self._drop(full, keep=False)

    def keep(self, full: torch.Tensor | None = None) -> None:
        """Give one hold back, but leave the full parameters to the backward of this forward.

        An `acquire` inside a backward takes them over without a gather. A new forward, a step or
        `reshard_parameters` ends it. Where others hold the group too, they decide.

        Raises:
            RuntimeError: nobody holds the group there.
        """
        self._drop(full, keep=True)

    @profiled("reshard")
    def _drop(self, full: torch.Tensor | None, *, keep: bool) -> None:
        lane, label = self.context.lanes.gather, self.label or self.name
        self._unsharding.drop(lane, label, full, keep=keep)

    def copy_full_parameter(self, index: int) -> torch.Tensor:
        """A copy of full tensor ``index``: gather, copy, release. The marker's slow path."""
        self.context.lanes.gather.wait_current()
        self.acquire()
        try:
            self.wait_for_unshard()
            return self._weights.full.get_local_tensor(index).clone()
        finally:
            self.drop()

    @property
    def is_kept(self) -> bool:
        """Whether a forward left the full parameters to its backward; nobody holds them."""
        return self._unsharding.kept

    @property
    def gathers(self) -> bool:
        """Whether unsharding moves anything; False for replicated weights and a world of one."""
        return self._weights.gathers

    @property
    def is_held(self) -> bool:
        """Whether somebody holds the group unsharded (a prefetch alone does not)."""
        return self._unsharding.holders > 0

    @property
    def is_readable(self) -> bool:
        """Whether somebody holds the group where the unsharded Parameters look."""
        return self._unsharding.own.holders > 0
