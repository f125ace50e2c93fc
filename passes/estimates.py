"""What a schedule is expected to take, in bytes and in seconds: plain, immutable data.

`memory` and `timeline` calculate these; nothing is decided by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class MemoryCurve:
    """Live bytes by position.

    Attributes:
        activations, gathered, gradients: results of nodes, unsharded parameters, and packed
            gradients that are being reduced; one entry for each node.
        state: bytes of the shards and their gradients, at all times.
    """

    activations: tuple[int, ...] = ()
    gathered: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    state: int = 0

    @property
    def live(self) -> tuple[int, ...]:
        """All of it but ``state``, by position."""
        rows = zip(self.activations, self.gathered, self.gradients, strict=True)
        return tuple(sum(row) for row in rows)

    @property
    def peak_at(self) -> int:
        """The position with the most live bytes, the first of them."""
        live = self.live
        return live.index(max(live)) if live else 0

    @property
    def peak(self) -> int:
        """The most live bytes, ``state`` not among them."""
        return max(self.live, default=0)

    @property
    def at_peak(self) -> dict[str, int]:
        """What the peak is made of."""
        names = ("activations", "gathered", "gradients")
        return {name: getattr(self, name)[self.peak_at] if self.live else 0 for name in names}


@dataclass(frozen=True)
class StepTime:
    """One step, in seconds from the start of the graph.

    Attributes:
        issued: when compute reaches the step.
        start, end: when its communication runs; ``issued`` both for steps that communicate nothing.
        exposed: how long compute stands still at this step.
    """

    issued: float
    start: float
    end: float
    exposed: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """The modelled run of one graph.

    Attributes:
        steps: one entry for each step of the schedule.
        compute: seconds of compute alone.
        total: seconds from the first node to the end of the last wait.
        communication: seconds of all collectives together.
    """

    steps: tuple[StepTime, ...] = ()
    compute: float = 0.0
    total: float = 0.0
    communication: float = 0.0

    @property
    def exposed(self) -> float:
        """Seconds in which compute waits for communication."""
        return self.total - self.compute


@dataclass(frozen=True)
class Keeping:
    """Which groups stay unsharded between a forward and its backward.

    Attributes:
        kept: their names, in the order in which backward takes them over.
        reasons: for every group that both read, what was decided and why.
        peak: the most bytes that forward and backward together hold, shards and their gradients
            among them, if nothing but what checkpointing drops is recomputed.
        over_budget: bytes by which that exceeds the budget.
    """

    kept: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    peak: int = 0
    over_budget: int = 0
