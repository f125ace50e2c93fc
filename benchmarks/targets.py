"""What is aimed at, a row each, and whether a number reaches it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .results import Missing


@dataclass(frozen=True)
class Target:
    """One row of the table.

    Attributes:
        key: under which a part reports its number.
        part: which part measures it.
        what: for people.
        limit: the number may not be above it.
        unit: "ratio", "percent" (the number is a fraction) or "count".
    """

    key: str
    part: str
    what: str
    limit: float
    unit: Literal["ratio", "percent", "count"] = "ratio"

    def show(self, value: float) -> str:
        """``value`` with its unit."""
        if self.unit == "percent":
            return f"{100 * value:.1f} %"
        return f"{value:.0f}" if self.unit == "count" else f"{value:.3f}"

    @property
    def aim(self) -> str:
        """The limit for people."""
        return "none" if self.unit == "count" and not self.limit else f"<= {self.show(self.limit)}"

    def verdict(self, value: float | Missing | None) -> str:
        """Met, missed by how much, or why there is no number."""
        if value is None:
            return "could not run: nothing was measured"
        if isinstance(value, Missing):
            return f"could not run: {value.why}"
        if value <= self.limit:
            return "met"
        if self.unit == "ratio":
            return f"missed by {100 * (value / self.limit - 1):.0f} %"
        points = " points" if self.unit == "percent" else ""
        return f"missed by {self.show(value - self.limit)}{points}"


def _steps() -> list[Target]:
    limits = {
        ("default", "FSDP2"): {"latency": 0.45, "comm": 0.70, "compute": 0.90},
        ("unlimited", "FSDP2"): {"latency": 0.40, "comm": 0.60, "compute": 0.85},
        ("default", "bound"): {"comm": 1.00, "compute": 1.00},
        ("unlimited", "bound"): {"comm": 0.90, "compute": 0.90},
    }
    return [
        Target(
            f"step {workload} {option} {against}",
            "step",
            f"step time / {against}, {option} options, {workload}",
            limit,
        )
        for (option, against), by_workload in limits.items()
        for workload, limit in by_workload.items()
    ]


def _memory() -> list[Target]:
    workloads = ("latency", "comm", "compute")
    return [
        *(
            Target(f"memory {name}", "memory", f"peak live bytes / FSDP2, {name}", 0.95)
            for name in workloads
        ),
        *(
            Target(
                f"plan {name}",
                "plan",
                f"peak live bytes: distance from the plan, {name}",
                0.05,
                "percent",
            )
            for name in workloads
        ),
    ]


TARGETS: tuple[Target, ...] = (
    *_steps(),
    *_memory(),
    Target("host", "host", "host time added to the unsharded model / what FSDP2 adds", 0.15),
    Target("passes share", "compile", "passes' share of compile time", 0.05, "percent"),
    Target("passes scale", "planning", "passes: a graph of 80 blocks / one of 40", 2.3),
    Target("cold", "compile", "cold compile / unsharded torch.compile", 1.20),
    Target("warm", "compile", "warm start (caches filled) / cold", 0.15),
    Target("gradient copies", "copies", "copies of weight gradients when packing", 0, "count"),
    Target("weight copies", "copies", "copies of weights when unsharding", 0, "count"),
    Target(
        "exposed",
        "simulation",
        "exposed communication, Llama-3-8B, 64 GPUs of 8 a node, bf16, simulated",
        0.03,
        "percent",
    ),
    Target("exposed FSDP2", "simulation", "the same / FSDP2's schedule", 1.0),
)
"""Every row, in the order of the table."""


def verdicts(
    parts: tuple[str, ...], measured: Mapping[str, float | Missing]
) -> list[tuple[Target, float | Missing | None, str]]:
    """The rows of ``parts``: target, number, verdict."""
    return [
        (target, measured.get(target.key), target.verdict(measured.get(target.key)))
        for target in TARGETS
        if target.part in parts
    ]
