"""What a part of the benchmarks is given, and what it hands back."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        steps: counted steps of each contender.
        quick: small sizes and few repetitions: to see that everything runs.
        workloads: names of those to step through.
    """

    steps: int
    quick: bool
    workloads: tuple[str, ...]


@dataclass(frozen=True)
class Missing:
    """There is no number, and why."""

    why: str


@dataclass(frozen=True)
class Bars:
    """A chart: for each category a bar for each of several things.

    Attributes:
        title, unit: for people.
        categories: labels of groups of bars.
        bars: heights by thing, None where there is none.
        lines: heights of a mark across a category, by what it means.
    """

    title: str
    unit: str
    categories: tuple[str, ...]
    bars: dict[str, list[float | None]]
    lines: dict[str, list[float | None]] = field(default_factory=dict)


@dataclass
class Part:
    """What a part found.

    Attributes:
        measured: by key of a target.
        data: for the JSON file.
        text: tables for people.
        charts: by file name.
        problems: what could not run, for people.
    """

    measured: dict[str, float | Missing] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    text: list[str] = field(default_factory=list)
    charts: dict[str, Bars] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the ratios of pairs."""
    return median(a / b for a, b in zip(over, under, strict=True))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as they need to be: the first to the left, others to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


_started = time.monotonic()


def progress(text: str) -> None:
    """Say what is going on, on stderr."""
    print(f"[{time.monotonic() - _started:6.0f} s] {text}", file=sys.stderr, flush=True)
