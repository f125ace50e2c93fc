"""No stream races in the modes that `tests.test_races` leaves out."""

from __future__ import annotations

import math

import pytest

from tests.distributed import run
from tests.recorded_scenarios import MORE_SCENARIOS, log_of
from tests.test_races import Summary, check


@pytest.mark.parametrize("name", MORE_SCENARIOS)
def test_nothing_races(name: str, summary: Summary) -> None:
    check(name, run(math.prod(MORE_SCENARIOS[name].shape), log_of, name), summary)
