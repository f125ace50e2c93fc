"""What a user may ask of the schedules, and how it is read from options.

Decisions must be the same on every rank, and no rank talks to another. So whatever orders, counts
or joins collectives is computed from these and nothing else:

- the groups' descriptions, but for what a rank holds of them;
- in which order a graph reads groups and produces their gradients;
- this policy, cost model included.

It is *not* computed from the sizes of activations, which follow a rank's batch, nor from where
between two reads a node stands, from the device that a rank finds, or from any clock. What
depends on those (places between two reads, modelled times and bytes, reasons) changes no order.

Two options lift this, because they cannot mean anything else, and say so: ``equal_shapes=True``,
and a ``memory_budget`` in bytes, which counts the activations of the graph. Both promise that every
rank compiles with equal shapes (symbolic sizes count with a fixed hint, so they are equal). With
``activation_bytes`` a budget in bytes needs no such promise.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .costs import CostModel, cost_model
from .facts import GroupFacts
from .steps import format_bytes

Budget = int | Literal["peak", "unlimited"]
Reshard = Literal["auto"] | bool | tuple[tuple[str, bool], ...]

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


@dataclass(frozen=True)
class Policy:
    """What a user asks of the schedules.

    Attributes:
        prefetch: how many groups ahead of their wait gathers are issued; 0 turns overlap off. None:
            each as far as modelled compute must reach to hide it, and at least one.
        memory_budget: what a rank may hold: shards and their gradients, unsharded parameters,
            gradients in flight and activations; not optimizer state. "peak": keep nothing between
            forward and backward that would raise the peak. "unlimited": keep everything.
        activation_bytes: what activations count as in a budget of bytes; None: what the graph has.
        reshard_after_forward: True: keep no group between forward and backward; False: keep all;
            "auto": as the budget allows. Pairs (pattern of module names, bool) decide for those
            they match, the last one that matches a group, and "auto" for the others.
        merge_below: bytes of buffers up to which neighbouring groups share a gather, or a
            reduction; 0: never. None: as far as the cost model says that copying costs less than a
            collective.
        arena: give every gathered buffer a planned place in one arena, and keep the runtime's other
            memory from step to step: after the first steps nothing is allocated.
        equal_shapes: a promise that every rank always compiles with equal shapes; prefetching then
            counts the graph's own FLOPs instead of `CostModel.tokens` rows a rank.
        costs: the cost model.

    Raises:
        ValueError: a value makes no sense, or two of them contradict each other.
    """

    prefetch: int | None = None
    memory_budget: Budget = "peak"
    activation_bytes: int | None = None
    reshard_after_forward: Reshard = "auto"
    merge_below: int | None = 0
    arena: bool = False
    equal_shapes: bool = False
    costs: CostModel = field(default_factory=lambda: cost_model("cpu"))

    def __post_init__(self) -> None:
        if self.prefetch is not None and self.prefetch < 0:
            raise ValueError(f"prefetch must be 0 or more groups, got {self.prefetch}")
        for name in ("activation_bytes", "merge_below"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must be 0 or more bytes, got {value}")
        if self.memory_budget == "unlimited" and self.reshard_after_forward is True:
            raise ValueError(
                "memory_budget='unlimited' keeps every group between forward and backward, "
                "reshard_after_forward=True none; drop one of the two"
            )
        if self.activation_bytes is not None and not isinstance(self.memory_budget, int):
            raise ValueError(
                f"activation_bytes is part of a memory_budget in bytes, which is "
                f"{self.memory_budget!r} here; give both or neither"
            )

    @property
    def budget_bytes(self) -> int | None:
        """The budget where it is a number."""
        return self.memory_budget if isinstance(self.memory_budget, int) else None

    def reshards(self, group: GroupFacts) -> bool | None:
        """What was asked of ``group``: release it after forward (True), keep it (False)?

        None: whatever is best.
        """
        asked = self.reshard_after_forward
        if isinstance(asked, bool):
            return asked
        if isinstance(asked, str):
            return None
        answers = [value for pattern, value in asked if matches(pattern, group.label)]
        return answers[-1] if answers else None

    def check_groups(self, labels: Iterable[str]) -> None:
        """Whether every pattern is about some group of a model.

        Raises:
            ValueError: a pattern matches none of ``labels``.
        """
        labels = list(labels)
        if isinstance(self.reshard_after_forward, bool | str) or not labels:
            return
        for pattern, _ in self.reshard_after_forward:
            if not any(matches(pattern, label) for label in labels):
                known = ", ".join(sorted({_module_of(label) for label in labels})[:8])
                raise ValueError(
                    f"option 'reshard_after_forward': no sharded module matches {pattern!r}; "
                    f"modules with parameters of their own: {known}"
                )

    def check_budget(self, groups: Mapping[str, GroupFacts]) -> None:
        """Whether one group at a time fits into the budget, shards and all.

        Raises:
            ValueError: not even that; says how much is needed.
        """
        if self.budget_bytes is None or not groups:
            return
        state = sum(group.state_bytes for group in groups.values())
        largest = max(groups.values(), key=lambda group: group.gather_bytes + group.reduce_bytes)
        needed = state + largest.gather_bytes + largest.reduce_bytes
        if self.budget_bytes < needed:
            raise ValueError(
                f"option 'memory_budget': {format_bytes(self.budget_bytes)} is less than the "
                f"{format_bytes(needed)} that training needs without any activation: "
                f"{format_bytes(state)} for shards and their gradients, "
                f"{format_bytes(largest.gather_bytes)} for the parameters of {largest.label!r} and "
                f"{format_bytes(largest.reduce_bytes)} for their gradients; raise the budget, or "
                "shard smaller modules"
            )


def matches(pattern: str, label: str) -> bool:
    """Whether a shell-style pattern matches the name of a group's module ("root" for the root)."""
    return fnmatch.fnmatchcase(_module_of(label), pattern)


def _module_of(label: str) -> str:
    """Several groups of one module are called "blocks.0" and "blocks.0[1]"."""
    return label.partition("[")[0]


def parse_policy(options: Mapping[str, Any], device: str = "cpu") -> Policy:
    """A policy from the user's options; those that are missing have their defaults.

    Args:
        options: by the names of `Policy`, but ``cost_model`` for the costs. Bytes may be given as
            ``"70GiB"``, a budget also as a fraction (float) of the cost model's device memory.
        device: type of the device that the model is on, for the default cost model. Ranks whose
            devices differ must decide alike, so it is not asked which one it is.

    Raises:
        ValueError: names the option, what was expected and what was found.
    """
    options = {name: value for name, value in options.items() if value is not None}
    costs = _costs(options.get("cost_model", "cpu" if device == "cpu" else "h100"))
    return Policy(
        prefetch=_prefetch(options.get("prefetch", "auto")),
        memory_budget=_budget(options.get("memory_budget", "peak"), costs),
        activation_bytes=_bytes_or_none("activation_bytes", options),
        reshard_after_forward=_reshard(options.get("reshard_after_forward", "auto")),
        merge_below=_merge_below(options.get("merge_below", 0)),
        arena=_flag("arena", options.get("arena", False)),
        equal_shapes=_flag("equal_shapes", options.get("equal_shapes", False)),
        costs=costs,
    )


def parse_bytes(name: str, value: object) -> int:
    """A number of bytes: an int, or a text such as "70GiB" or "1.5 MB".

    Raises:
        ValueError: names the option.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([a-zA-Z]*)\s*", str(value))
    if isinstance(value, str) and found and found[2].lower() in _UNITS:
        return int(float(found[1]) * _UNITS[found[2].lower()])
    raise _refused(name, 'a number of bytes, 0 or more, such as 1048576 or "70GiB"', value)


def _refused(name: str, expected: str, found: object) -> ValueError:
    return ValueError(f"option {name!r}: expected {expected}; got {found!r}")


def _costs(value: object) -> CostModel:
    if isinstance(value, CostModel):
        return value
    if not isinstance(value, str):
        raise _refused("cost_model", "a name such as 'h100+ib400', or a CostModel", value)
    try:
        return cost_model(value)
    except ValueError as error:
        raise ValueError(f"option 'cost_model': {error}") from None


def _prefetch(value: object) -> int | None:
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _refused("prefetch", "'auto' or a number of groups, 0 or more", value)
    return value


def _budget(value: object, costs: CostModel) -> Budget:
    if value == "peak":
        return "peak"
    if value == "unlimited":
        return "unlimited"
    if isinstance(value, float):
        if not 0 < value <= 1:
            raise _refused(
                "memory_budget", "a fraction of the device's memory in (0, 1], or bytes", value
            )
        if costs.device.memory is None:
            raise ValueError(
                f"option 'memory_budget': {value} is a fraction of the device's memory, which cost "
                f"model {costs.name!r} does not know; give bytes, or another cost_model"
            )
        return int(value * costs.device.memory)
    try:
        return parse_bytes("memory_budget", value)
    except ValueError:
        raise _refused(
            "memory_budget",
            "'peak', 'unlimited', bytes such as \"70GiB\", or a fraction of the device's memory",
            value,
        ) from None


def _reshard(value: object) -> Reshard:
    if value == "auto":
        return "auto"
    if isinstance(value, bool):
        return value
    if not isinstance(value, Mapping):
        raise _refused(
            "reshard_after_forward", "'auto', a bool, or {pattern of module names: bool}", value
        )
    for pattern, answer in value.items():
        if not isinstance(pattern, str) or not isinstance(answer, bool):
            raise _refused(
                "reshard_after_forward",
                "patterns (str) of module names with a bool each",
                {pattern: answer},
            )
    return tuple(value.items())


def _bytes_or_none(name: str, options: Mapping[str, Any]) -> int | None:
    return parse_bytes(name, options[name]) if name in options else None


def _merge_below(value: object) -> int | None:
    return None if value == "auto" else parse_bytes("merge_below", value)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refused(name, "a bool", value)
    return value
