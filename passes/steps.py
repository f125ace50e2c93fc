"""Steps and schedules: the immutable recipe between deciding and writing. No torch here.

A schedule is a list of steps, each with the place where it is written into the graph and the
earlier steps that it must name in its ``after`` or ``issued`` argument. Printed, it is a table:

     #  step         group     where                 bytes  names    behind
     0  unshard      root      at the start        4.0 KiB
     1  unshard      blocks.0  before embedding   12.0 KiB  0
     2  wait         root      before embedding             1
     3  unshard      blocks.1  before layer_norm  12.0 KiB  2        blocks.0
     4  wait         blocks.0  before layer_norm            3

"names" are the steps whose result the step takes as an argument, "behind" the groups whose
compute runs while the gather is in flight.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

from .estimates import Keeping, MemoryCurve, Timeline
from .facts import GraphFacts, GraphKind, GroupFacts

NO_PLACE = -1
"""The place of a buffer that has none: it is not gathered, or the graph has no arena."""


@dataclass(frozen=True)
class ArenaPlan:
    """Places for the gathered buffers of one graph in one run of bytes.

    Attributes:
        offsets: of the first byte of each, by group.
        size: bytes of the run.
        bound: the most bytes that are live at once: no plan can do with less.
    """

    offsets: Mapping[str, int]
    size: int
    bound: int

    def place(self, group: str) -> int:
        """The offset of ``group``, `NO_PLACE` where it has none."""
        return self.offsets.get(group, NO_PLACE)

    def __str__(self) -> str:
        more = self.size - self.bound
        over = f", {format_bytes(more)} more than are live at once" if more else ""
        return f"arena of {format_bytes(self.size)}{over}"


@dataclass(frozen=True)
class Step:
    """One communication step.

    Attributes:
        anchor: position in the original graph before which the step is written. Anchors never
            decrease along a schedule; steps with one anchor are written in schedule order.
        after: numbers of the earlier steps that the written node names as arguments, beyond the
            one whose result it works on.
        reason: why the step is where it is, for people. Says nothing that steps are compared by.
    """

    op: ClassVar[str]
    anchor: int
    after: tuple[int, ...] = ()
    reason: str = field(default="", compare=False, kw_only=True)

    @property
    def names(self) -> tuple[str, ...]:
        """The groups that the step is about."""
        return ()


@dataclass(frozen=True)
class GroupStep(Step):
    """A step of one parameter group."""

    group: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.group,)


@dataclass(frozen=True)
class GatherTogether(Step):
    """Start gathering several small groups by one collective; the unshard of each finds it
    gathered.

    Attributes:
        groups: in order of first reader.
        places: for each its offset in the arena, where there is one.
    """

    op: ClassVar[str] = "gather_together"
    groups: tuple[str, ...] = ()
    places: tuple[int, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return self.groups


@dataclass(frozen=True)
class Unshard(GroupStep):
    """Start gathering the group's flat buffer.

    Attributes:
        gathered: it is there already, kept since the forward graph or gathered together with
            others: nothing is communicated.
        place: its offset in the arena, where there is one.
    """

    op: ClassVar[str] = "unshard"
    gathered: bool = False
    place: int = NO_PLACE


@dataclass(frozen=True)
class Wait(GroupStep):
    """Compute from here on may read the gathered buffer."""

    op: ClassVar[str] = "wait"


@dataclass(frozen=True)
class Release(GroupStep):
    """Nothing reads the gathered buffer any more. Takes no order arguments: the reads place it,
    and the next step that can names it."""

    op: ClassVar[str] = "release"


@dataclass(frozen=True)
class Keep(Release):
    """Instead of a release at the end of a forward: the backward takes the buffer over."""

    op: ClassVar[str] = "keep"


@dataclass(frozen=True)
class ReduceInner(GroupStep):
    """Start reducing the group's gradients over dp_inner.

    Attributes:
        indices: the parameters that got a gradient in this graph, ascending.
    """

    op: ClassVar[str] = "reduce_inner"
    indices: tuple[int, ...] = ()


@dataclass(frozen=True)
class ReduceTogether(Step):
    """Start reducing the gradients of several small groups over dp_inner, by one collective.

    Attributes:
        groups: in order of their last gradients.
        indices: for each group its parameters that got a gradient in this graph, ascending.
    """

    op: ClassVar[str] = "reduce_together"
    groups: tuple[str, ...] = ()
    indices: tuple[tuple[int, ...], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return self.groups


@dataclass(frozen=True)
class ReduceOuter(GroupStep):
    """On the last microbatch, start the reduction over dp_outer."""

    op: ClassVar[str] = "reduce_outer"


@dataclass(frozen=True)
class WaitReductions(Step):
    """Whoever runs after the graph sees finished gradients.

    Attributes:
        groups: the reduced groups, in order of their reductions; ``after`` has the last step of
            each.
    """

    op: ClassVar[str] = "wait_reductions"
    groups: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return self.groups


@dataclass(frozen=True)
class Schedule:
    """The plan of one graph. Equal inputs give equal schedules on every rank and in every run.

    Attributes:
        steps: in the order in which they are issued.
        facts: the graph that was planned.
        groups: the groups that the steps name, by name.
        memory: modelled live bytes, by position.
        timeline: modelled times, by step.
        budget: the bytes that the policy allows a rank, None where it names no number.
        keeping: which groups stay unsharded between forward and backward, and why.
        arena: places for what the steps gather; None where the policy does not ask for them.
    """

    steps: tuple[Step, ...]
    facts: GraphFacts
    groups: Mapping[str, GroupFacts]
    memory: MemoryCurve = field(default_factory=MemoryCurve)
    timeline: Timeline = field(default_factory=Timeline)
    budget: int | None = None
    keeping: Keeping = field(default_factory=Keeping)
    arena: ArenaPlan | None = None

    @property
    def kind(self) -> GraphKind:
        """Which graph this is the plan of."""
        return self.facts.kind

    @property
    def over_budget(self) -> int:
        """Bytes by which the modelled peak exceeds the budget; 0 where it holds."""
        if self.budget is None:
            return 0
        return max(0, self.memory.state + self.memory.peak - self.budget)

    @property
    def reasons(self) -> dict[str, str]:
        """Why the groups of this graph are kept between forward and backward, or not."""
        found = self.keeping.reasons
        return {name: found[name] for name in self.groups if name in found}

    @property
    def sequence(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Op and groups of every step: what must be, and is, the same on every rank."""
        return tuple((step.op, step.names) for step in self.steps)

    def to_json(self) -> str:
        """The schedule as a JSON text.

        ``steps`` has one object for each step with the fields of its class and its modelled
        times (seconds); ``memory`` has the bytes at the peak and the curves by position, ``arena``,
        where there is one, its size and the offsets in it.
        """
        times = self.timeline.steps or (None,) * len(self.steps)
        rows = [
            {**_as_dict(step), **({} if time is None else {"time": asdict(time)})}
            for step, time in zip(self.steps, times, strict=True)
        ]
        memory = {
            "state": self.memory.state,
            "peak": self.memory.peak,
            "peak_at": self.memory.peak_at,
            "at_peak": self.memory.at_peak,
            "budget": self.budget,
            "over_budget": self.over_budget,
            "live": list(self.memory.live),
        }
        seconds = {
            name: getattr(self.timeline, name)
            for name in ("compute", "communication", "exposed", "total")
        }
        parts = {"kind": self.kind.value, "steps": rows, "memory": memory, "seconds": seconds}
        if self.arena is not None:
            parts["arena"] = asdict(self.arena)
        return json.dumps({**parts, "keeping": asdict(self.keeping)}, indent=1)

    def __str__(self) -> str:
        """The table of the module's docstring, below a line of totals."""
        header = ("#", "step", "group", "where", "bytes", "names", "behind")
        rows = [self._row(number, step) for number, step in enumerate(self.steps)]
        return "\n".join([self._title(), *table([header, *rows], right_aligned=(0, 4))])

    def _title(self) -> str:
        gathered = [
            step
            for step in self.steps
            if isinstance(step, GatherTogether) or (isinstance(step, Unshard) and not step.gathered)
        ]
        reduced = [step for step in self.steps if isinstance(step, ReduceInner | ReduceTogether)]
        parts = [
            f"{len(steps)} {verb} ({format_bytes(sum(self._bytes(step) for step in steps))})"
            for steps, verb in ((gathered, "unshard"), (reduced, "reduce"))
            if steps
        ]
        arena = f"; {self.arena}" if self.arena else ""
        return f"{self.kind.value}: {', '.join(parts) or 'no communication'}{arena}"

    def _row(self, number: int, step: Step) -> tuple[str, ...]:
        size = self._bytes(step)
        return (
            str(number),
            step.op,
            self._label(step),
            self.where(step),
            format_bytes(size) if size else "",
            " ".join(map(str, step.after)),
            " ".join(self._behind(number, step)),
        )

    def _label(self, step: Step) -> str:
        if isinstance(step, GatherTogether | ReduceTogether):
            return "+".join(self.groups[name].label for name in step.groups)
        return self.groups[step.group].label if isinstance(step, GroupStep) else ""

    def _bytes(self, step: Step) -> int:
        if isinstance(step, GatherTogether):
            return sum(self.groups[name].gather_bytes for name in step.groups)
        if isinstance(step, Unshard) and not step.gathered:
            return self.groups[step.group].gather_bytes
        if isinstance(step, ReduceInner | ReduceTogether | ReduceOuter):
            return sum(self.groups[name].reduce_bytes for name in step.names)
        return 0

    def where(self, step: Step) -> str:
        """The place of ``step`` in words. Steps that make a read possible say what they precede,
        the others what they follow."""
        if isinstance(step, Unshard | GatherTogether) and not step.after:
            return "at the start"
        if isinstance(step, GatherTogether | Unshard | Wait):
            return f"before {self.facts.names[step.anchor]}"
        if isinstance(step, ReduceOuter | WaitReductions) and step.anchor == self.facts.end:
            return "at the end"
        return f"after {self.facts.names[step.anchor - 1]}"

    def _behind(self, number: int, step: Step) -> list[str]:
        """Labels of the groups that compute between the issue of a gather and its wait."""
        if not isinstance(step, Unshard):
            return []
        labels = []
        for later in self.steps[number + 1 :]:
            if isinstance(later, Wait):
                if later.group == step.group:
                    break
                labels.append(self.groups[later.group].label)
        return labels


def format_bytes(size: int) -> str:
    """``size`` bytes for people: ``512 B``, ``12.0 KiB``, ``1.5 GiB``."""
    if size < 1024:
        return f"{size} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """``seconds`` for people: ``1.3 ms``."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.1f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def table(rows: Sequence[Sequence[str]], right_aligned: Sequence[int]) -> list[str]:
    """Lines in which the cells of each column of ``rows`` stand below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in right_aligned else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _as_dict(step: Step) -> dict[str, Any]:
    return {"step": step.op, **{field.name: getattr(step, field.name) for field in fields(step)}}
