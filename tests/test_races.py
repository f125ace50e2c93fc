"""No stream races, in any mode; and whatever is taken away from the ordering shows."""

from __future__ import annotations

import functools
import math

import pytest

from compile_fsdp.runtime.happens_before import Record, races
from tests.distributed import run
from tests.recorded_scenarios import SCENARIOS, log_of


@functools.cache
def recorded(name: str) -> list[list[Record]]:
    """Every rank's log of a scenario."""
    return run(math.prod(SCENARIOS[name].shape), log_of, name)


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_races(name: str) -> None:
    for rank, log in enumerate(recorded(name)):
        found = races(log)
        assert not found, "\n".join([f"rank {rank}: {len(found)} races", *map(str, found)])
