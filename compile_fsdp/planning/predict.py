"""From the facts of a traced step to bytes and seconds: a plan with given options.

Pure and quick (milliseconds for 80 blocks), so that plans with other options can be made for
comparison. The scheduler and the cost model are those that the backend uses.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from compile_fsdp.passes.arena import plan_arena
from compile_fsdp.passes.costs import CostModel
from compile_fsdp.passes.estimates import Keeping
from compile_fsdp.passes.facts import GraphFacts, GroupFacts
from compile_fsdp.passes.keep import choose
from compile_fsdp.passes.policy import Policy
from compile_fsdp.passes.schedule import plan
from compile_fsdp.passes.steps import ArenaPlan, Schedule, format_bytes
from compile_fsdp.passes.timeline import timeline

from .capture import Captured
from .errors import PlanError

OPTIMIZER_STATES = {"adamw": 2, "sgd": 0, "momentum": 1}
"""Tensors of state in the main dtype (float32) that an optimizer keeps for each parameter."""

_MAIN_BYTES = 4


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank at the moment when most are in use.

    Attributes:
        weights, gradients, optimizer: at all times.
        activations, gathered, packed: at the peak: results of nodes, unsharded parameters, and
            packed gradients on their way into a reduction.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int
    packed: int

    @property
    def state(self) -> int:
        """What is in use at all times."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """The peak."""
        return self.state + self.activations + self.gathered + self.packed


@dataclass(frozen=True)
class Seconds:
    """Modelled seconds of one step.

    Attributes:
        forward, backward, optimizer: its parts.
        compute: of forward and backward, were nothing to be waited for.
        communication: all collectives, one after the other.
        exposed: in which compute waits for communication.
    """

    forward: float
    backward: float
    optimizer: float
    compute: float
    communication: float
    exposed: float

    @property
    def total(self) -> float:
        """The step."""
        return self.forward + self.backward + self.optimizer


@dataclass(frozen=True)
class Prediction:
    """A plan, in numbers.

    Attributes:
        captured: what it is a plan of.
        policy: by which it was made.
        schedules: one for each graph: forward, backward.
        memory, seconds: see their classes.
        flops: of the model in a step: three times what its forward computes.
        optimizer: which optimizer's state was counted.
    """

    captured: Captured
    policy: Policy
    schedules: tuple[Schedule, ...]
    memory: Memory
    seconds: Seconds
    flops: int
    optimizer: str

    @property
    def rate(self) -> float:
        """Tokens (or samples) a second and rank."""
        return self.captured.samples / self.seconds.total if self.seconds.total else 0.0

    @property
    def mfu(self) -> float:
        """Which part of the device's peak rate the model's FLOPs are."""
        dtypes = [group.dtype for group in self.captured.groups.values()]
        peak = max(self.policy.costs.device.rate(dtype) for dtype in dtypes)
        return self.flops / self.seconds.total / peak if self.seconds.total else 0.0

    @functools.cached_property
    def arena(self) -> ArenaPlan | None:
        """The arena that this plan would need with the option ``arena``: the largest of its graphs,
        which share one. None where nothing is gathered."""
        groups = self.captured.groups
        plans = [
            plan_arena(each.steps, each.facts, groups, each.keeping) for each in self.schedules
        ]
        return max((each for each in plans if each.size), key=lambda each: each.size, default=None)

    @property
    def kept(self) -> tuple[str, ...]:
        """Labels of the groups that stay unsharded between forward and backward."""
        names = self.schedules[0].keeping.kept if self.schedules else ()
        return tuple(self.captured.groups[name].label for name in names)


def predict(captured: Captured, policy: Policy, optimizer: str = "adamw") -> Prediction:
    """Plan the graphs of ``captured`` by ``policy``.

    Args:
        captured: a traced step.
        policy: what the schedules should be like; a budget in bytes is of all that a rank holds,
            optimizer state and main weights among it.
        optimizer: one of `OPTIMIZER_STATES`.

    Raises:
        PlanError: the budget holds not even one group at a time, or not all that is alive at once.
    """
    state = _state(captured, optimizer)
    scheduled = _within(policy, captured, state.total)
    groups = captured.groups
    try:
        scheduled.check_budget(groups)
    except ValueError as error:
        raise PlanError(
            f"the budget of {format_bytes(policy.budget_bytes or 0)} cannot hold this: of a rank's "
            f"state alone ({state.text()}) {error}"
        ) from error
    joint = captured.facts.joint
    keeping = Keeping() if joint is None else choose(joint, groups, scheduled)
    costs = _with_refresh(captured, policy.costs)
    schedules = tuple(
        _timed(plan(replace(facts, kept=keeping.kept), groups, scheduled, keeping), costs)
        for facts in captured.facts.graphs
    )
    memory = _memory(schedules, state)
    budget = policy.budget_bytes
    if budget is not None and memory.total > budget:
        raise PlanError(
            f"the budget of {format_bytes(budget)} cannot hold this: a step needs "
            f"{format_bytes(memory.total)} ({state.text()}, {format_bytes(memory.activations)} "
            f"activations, {format_bytes(memory.gathered + memory.packed)} gathered parameters and "
            "packed gradients); use --activation-checkpointing, a smaller --batch or --seq, more "
            "ranks on dp_inner, or another --mode"
        )
    seconds = _seconds(schedules, captured, policy.costs, optimizer)
    flops = 3 * _flops(captured.facts.graphs[0]) if captured.facts.graphs else 0
    return Prediction(captured, policy, schedules, memory, seconds, flops, optimizer)


def memory_budget_option(prediction: Prediction, size: int) -> int:
    """What ``options={"memory_budget": ...}`` must be for a budget of ``size`` bytes of all that a
    rank holds: the option counts no main weights and no optimizer state."""
    state = _state(prediction.captured, prediction.optimizer)
    return size - state.total + _counted(prediction.captured)


@dataclass(frozen=True)
class _State:
    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer

    def text(self) -> str:
        return (
            f"{format_bytes(self.weights)} weights, {format_bytes(self.gradients)} gradients, "
            f"{format_bytes(self.optimizer)} optimizer state"
        )


def _state(captured: Captured, optimizer: str) -> _State:
    sizes = captured.sizes.values()
    states = OPTIMIZER_STATES[optimizer] * _MAIN_BYTES
    return _State(
        weights=sum(each.weights for each in sizes),
        gradients=sum(each.gradients for each in sizes),
        optimizer=states * sum(each.main_elements for each in sizes),
    )


def _counted(captured: Captured) -> int:
    """What the scheduler counts as state: an even share of model weights and gradients."""
    return sum(group.state_bytes for group in captured.groups.values())


def _within(policy: Policy, captured: Captured, state: int) -> Policy:
    """``policy`` with a budget of what the scheduler counts."""
    if policy.budget_bytes is None:
        return policy
    left = policy.budget_bytes - state + _counted(captured)
    return replace(policy, memory_budget=max(left, 0))


def _timed(schedule: Schedule, costs: CostModel) -> Schedule:
    """``schedule`` with the times of ``costs``."""
    times = timeline(schedule.steps, schedule.facts, schedule.groups, costs)
    return replace(schedule, timeline=times)


@dataclass(frozen=True)
class _Refreshing(CostModel):
    """A cost model in which the first gather of a group after a step also refreshes it.

    Attributes:
        refresh: seconds of that, by group.
    """

    refresh: Mapping[str, float] | None = None

    def gather_seconds(self, groups: Sequence[GroupFacts]) -> float:
        more = sum((self.refresh or {}).get(group.name, 0.0) for group in groups)
        return super().gather_seconds(groups) + more


def _with_refresh(captured: Captured, costs: CostModel) -> CostModel:
    refresh = {
        name: refresh_seconds(captured, name, costs)
        for name, size in captured.sizes.items()
        if size.refresh_bytes
    }
    if not refresh:
        return costs
    own = {name: getattr(costs, name) for name in costs.__dataclass_fields__}
    return _Refreshing(**own, refresh=refresh)


def refresh_seconds(captured: Captured, name: str, costs: CostModel) -> float:
    """Seconds of the all-gather that brings a group's model weight up to date after a step."""
    size = captured.sizes[name]
    group = captured.groups[name]
    inner = group.mesh_shape[-1] if len(group.mesh_shape) > 1 else 1
    near = replace(costs, ranks_per_node=max(1, costs.ranks_per_node // inner))
    moved = replace(group, gather_bytes=size.refresh_bytes, mesh_shape=(size.refresh_ranks,))
    return CostModel.gather_seconds(near, [moved])


def _memory(schedules: Sequence[Schedule], state: _State) -> Memory:
    peaks = [schedule.memory for schedule in schedules]
    highest = max(peaks, key=lambda curve: curve.peak, default=None)
    at_peak = {} if highest is None else highest.at_peak
    return Memory(
        weights=state.weights,
        gradients=state.gradients,
        optimizer=state.optimizer,
        activations=at_peak.get("activations", 0),
        gathered=at_peak.get("gathered", 0),
        packed=at_peak.get("gradients", 0),
    )


def _seconds(
    schedules: Sequence[Schedule], captured: Captured, costs: CostModel, optimizer: str
) -> Seconds:
    times = [schedule.timeline for schedule in schedules]
    # Reads weight, gradient and state, writes weight and state; writes the model weight.
    touched = 3 + 2 * OPTIMIZER_STATES[optimizer]
    moved = sum(each.main_elements for each in captured.sizes.values()) * touched * _MAIN_BYTES
    return Seconds(
        forward=times[0].total if times else 0.0,
        backward=sum(each.total for each in times[1:]),
        optimizer=costs.copy_seconds(moved),
        compute=sum(each.compute for each in times),
        communication=sum(each.communication for each in times),
        exposed=sum(each.exposed for each in times),
    )


def _flops(facts: GraphFacts) -> int:
    return sum(node.flops for node in facts.nodes)
