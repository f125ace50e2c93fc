"""What a person sees while it trains: a bar on a terminal, lines anywhere else."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

import torch


@dataclass(frozen=True)
class Report:
    """One line of measurements; `tokens_per_second` is over all ranks (0: not known yet)."""

    step: int
    loss: float
    learning_rate: float
    tokens_per_second: float
    peak_bytes: int

    def line(self) -> str:
        return f"loss {self.loss:6.3f}  lr {self.learning_rate:.1e}  {self._speed(9)}"

    def brief(self) -> str:
        """Short enough to stand beside a bar on 80 columns."""
        return f"loss {self.loss:.3f} {self._speed(7)}"

    def _speed(self, width: int) -> str:
        speed = f"{self.tokens_per_second:,.0f}" if self.tokens_per_second else "-"
        return f"{speed:>{width}} tokens/s  peak {self.peak_bytes / 2**20:,.0f} MiB"


class Progress(Protocol):
    """Shows reports; `advance` is called after every step."""

    def __enter__(self) -> Progress: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def advance(self) -> None: ...
    def report(self, report: Report) -> None: ...
    def note(self, text: str) -> None: ...


def make_progress(first_step: int, steps: int, *, shown: bool) -> Progress:
    """A bar where rich is installed and stdout is a terminal; nothing at all unless `shown`."""
    if not shown:
        return _Silent()
    if sys.stdout.isatty():
        try:
            return _bar(first_step, steps)
        except ImportError:
            pass  # rich is an extra: lines do as well
    return _Lines(steps)


class _Silent:
    """For all ranks but the first."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def advance(self) -> None:
        pass

    def report(self, report: Report) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class _Lines(_Silent):
    """A line for each report, flushed: a log is read while it grows."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __enter__(self) -> Progress:
        return self

    def report(self, report: Report) -> None:
        width = len(str(self.steps))
        print(f"step {report.step:{width}}/{self.steps}  {report.line()}", flush=True)

    def note(self, text: str) -> None:
        print(text, flush=True)


def _bar(first_step: int, steps: int) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    display = RichProgress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[columns]}"),
        TimeRemainingColumn(),
    )
    task = display.add_task("train", total=steps, completed=first_step, columns="first step")

    class Bar(_Silent):
        def __enter__(self) -> Progress:
            display.start()
            return self

        def __exit__(self, *_: object) -> None:
            display.stop()

        def advance(self) -> None:
            display.advance(task)

        def report(self, report: Report) -> None:
            display.update(task, columns=report.brief())

        def note(self, text: str) -> None:
            display.console.print(text, markup=False, highlight=False)

    return Bar()


@dataclass
class Throughput:
    """Tokens a second. The first step is not counted: it compiles."""

    tokens_per_step: int
    total_steps: int = 0
    total_seconds: float = 0.0
    _steps: int = 0
    _started: float | None = field(default=None)

    def step(self) -> None:
        """Call after every step."""
        if self._started is None:
            self._started = time.perf_counter()
        else:
            self._steps += 1

    def lap(self) -> float:
        """Tokens a second since the last lap; 0 before there is a counted step."""
        if self._started is None or self._steps == 0:
            return 0.0
        now = time.perf_counter()
        seconds, steps = now - self._started, self._steps
        self.total_steps += steps
        self.total_seconds += seconds
        self._started, self._steps = now, 0
        return steps * self.tokens_per_step / seconds

    def restart(self) -> None:
        """Leave what was done since the last lap (a checkpoint, say) out of the next one."""
        self._started = time.perf_counter()

    def mean(self) -> float:
        if not self.total_seconds:
            return 0.0
        return self.total_steps * self.tokens_per_step / self.total_seconds


def peak_bytes(device: torch.device) -> int:
    """Most memory used so far: allocated on a CUDA device, resident for a process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
