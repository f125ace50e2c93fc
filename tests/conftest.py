"""What every test finds: one torch thread, the package importable, the ranks' processes ended."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Before torch is imported: ranks share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if importlib.util.find_spec("compile_fsdp") is None:
    # Not installed and pytest was not started as ``python -m pytest`` in the repository.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from tests.distributed import shut_down

if TYPE_CHECKING:
    from tests.modes import Mode


SLOW_FILES = frozenset(
    f"test_{name}"
    for name in (
        "agreement artifacts checkpoint_async checkpoint_crash checkpoint_matrix command_line "
        "copies dtensor_truth explain_page field_cases graphed_more hooks_and_penalties keep "
        "local_optimizers merging mishaps optimizers peft pieces plan_truth races_everywhere "
        "safetensors state_dict_functions unfreezing verify_mutations written_by_hand"
    ).split()
)
"""Long, and about one corner each: `make test` leaves them out, `make test-slow` and CI do not."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Let pyproject.toml set a time-out where pytest-timeout, which heeds it, is not installed."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds for a test; without pytest-timeout nobody counts them")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `SLOW_FILES`."""
    for item in items:
        if item.path.stem in SLOW_FILES:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def _session() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    shut_down()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1234)


class ModeReport:
    """A table of the placement modes that tests have found right, printed after the last test."""

    HEADER = ("mode", "P G O", "mesh", "layout", "driver", "difference", "graphs")

    def __init__(self) -> None:
        self._rows: list[tuple[str, ...]] = []

    def add(
        self,
        mode: Mode,
        shape: tuple[int, ...],
        layout: str,
        driver: str,
        difference: float,
        compilations: int,
    ) -> None:
        """Note one run. ``difference``: from one process, relative to the largest value."""
        mesh = " x ".join(map(str, shape))
        numbers = (f"{difference:.0e}", str(compilations or "-"))
        traffic = [self._counted(each) for each in (mode.first, mode.middle, mode.last)]
        self._rows.append((mode.name, mode.placements, mesh, layout, driver, *numbers, *traffic))

    @staticmethod
    def _counted(kinds: str) -> str:
        """ "AG AG RS" as "2 AG 1 RS"."""
        return " ".join(f"{n} {kind}" for kind, n in Counter(kinds.split()).items()) or "-"

    def lines(self) -> list[str]:
        """The table; nothing when no mode was tested."""
        if not self._rows:
            return []
        rows = [(*self.HEADER, "first microbatch", "middle", "last"), *self._rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


_MODE_REPORT = pytest.StashKey[ModeReport]()


@pytest.fixture
def mode_report(request: pytest.FixtureRequest) -> ModeReport:
    """Where a test of a placement mode notes what it found."""
    return request.config.stash.setdefault(_MODE_REPORT, ModeReport())


_SUMMARY = pytest.StashKey[dict[str, list[str]]]()


@pytest.fixture
def summary(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Called with a title and a line, has the line printed under the title after the last test."""

    def add(title: str, line: str) -> None:
        request.config.stash.setdefault(_SUMMARY, {}).setdefault(title, []).append(line)

    return add


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    lines = config.stash.setdefault(_MODE_REPORT, ModeReport()).lines()
    if lines:
        terminalreporter.section("placement modes")
        for line in lines:
            terminalreporter.write_line(line)
    for title, lines in config.stash.setdefault(_SUMMARY, {}).items():
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)
