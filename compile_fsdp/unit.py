"""FsdpUnit: the state of one FSDP module while it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from compile_fsdp.runtime.group_unsharding import GroupUnsharding
from compile_fsdp.runtime.parameter_group import FsdpParameter, FsdpParameterGroup, Phase

from .torch_internals import version_of

if TYPE_CHECKING:
    from .context import FsdpContext


def written_in_forward(fqn: str) -> RuntimeError:
    """The error for a forward that changes a parameter in place."""
    return RuntimeError(
        f"parameter {fqn!r} was changed in place inside a forward: that is the gathered copy, "
        "which is thrown away, and no shard would change. Change it between steps, on the sharded "
        "parameter (with torch.no_grad(): parameter.mul_(...)), or keep it as a buffer"
    )


class FsdpUnit:
    """State of one FSDP module: its groups, its phase, and what it holds.

    Attributes:
        fqn: name below the root ("" for the root itself).
        groups: the parameter groups it owns; empty for a root without parameters.
        context: what the units of one root share.
        phase: RESTING, FORWARD or BACKWARD.
        forwards: how many of its forwards are on the Python stack.
        unquantized: why parameters do not compute in the format that the policy asks for, by name
            below this module; empty where it asks for none.
        run_as_forward: calls a function between the eager hooks; set by `eager.install_hooks`.
    """

    run_as_forward: Callable[[FsdpUnit, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

    def __init__(self, groups: tuple[FsdpParameterGroup, ...], context: FsdpContext) -> None:
        self.fqn = ""
        self.groups = groups
        self.context = context
        self.phase = Phase.RESTING
        self.forwards = 0
        self.unquantized: dict[str, str] = {}
        self._held: dict[GroupUnsharding, None] = {}
        self._versions: dict[FsdpParameter, int] = {}

    def note_versions(self, group: FsdpParameterGroup) -> None:
        """Remember what `check_unwritten` compares with."""
        for parameter in group.parameters:
            self._versions[parameter] = version_of(parameter.unsharded)

    def check_unwritten(self) -> None:
        """Refuse what a forward wrote into a full parameter: it would be lost with the memory.

        Raises:
            RuntimeError: a parameter's version has changed.
        """
        for parameter, version in self._versions.items():
            if version_of(parameter.unsharded) != version:
                self._versions[parameter] = version_of(parameter.unsharded)
                raise written_in_forward(parameter.fqns[0])

    def move_to(self, phase: Phase) -> None:
        """Enter ``phase``.

        Raises:
            RuntimeError: a direct step between FORWARD and BACKWARD.
        """
        if Phase.RESTING not in (self.phase, phase) and self.phase is not phase:
            raise RuntimeError(
                f"FSDP module {self.fqn or '<root>'!r} cannot go from {self.phase.value} to "
                f"{phase.value}: a forward must end before its backward begins. If an exception "
                "interrupted a step, run the forward again from the root"
            )
        self.phase = phase

    def gathered_for(self, phase: Phase) -> tuple[GroupUnsharding, ...]:
        """What its modules read in ``phase``: its groups, or their planes."""
        return tuple(group.gathered_for(phase) for group in self.groups)

    def hold_all(self) -> None:
        """Unshard and hold every group, and let compute wait for the gathers."""
        self._hold(self.gathered_for(self.phase))

    def hold_for_recomputation(self) -> None:
        """Hold what a forward inside a backward reads, beside what the backward does."""
        self._hold([group.gathered_for(Phase.FORWARD) for group in self.groups if group.planes])

    def drop_for_recomputation(self) -> None:
        """Give back what `hold_for_recomputation` held and the backward does not read."""
        for group in self.groups:
            if group.planes:
                self.drop(group.gathered_for(Phase.FORWARD))

    def _hold(self, needed: Sequence[GroupUnsharding]) -> None:
        for each in needed:
            if each not in self._held:
                each.acquire(self.phase)
                self._held[each] = None
        for each in needed:
            each.wait_for_unshard(self.phase)

    def drop(self, group: GroupUnsharding) -> None:
        """Give the hold on ``group`` back, if this unit has one."""
        if group in self._held:
            del self._held[group]
            group.drop()

    def drop_all(self) -> None:
        """Give every hold back."""
        for group in list(self._held):
            self.drop(group)

    def forget(self) -> None:
        """Back to RESTING after an exception; the groups themselves have been released."""
        self._held.clear()
        self.phase = Phase.RESTING
        self.forwards = 0

    def prefetch(self, phase: Phase) -> None:
        """Start this unit's gathers for somebody who will hold them soon."""
        for each in self.gathered_for(phase):
            each.prefetch(phase)
