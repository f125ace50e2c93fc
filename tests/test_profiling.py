"""Ranges in a profile name groups and parameters, in eager and in compiled runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.explaining import batch, compiled, fake_world, sharded_language_model


@pytest.fixture
def model() -> Iterator[torch.nn.Module]:
    with fake_world(2):
        yield sharded_language_model()


def ranges(run: Any) -> list[str]:
    """Names of our ranges in the order in which they begin."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run(*batch()).backward()
    events = sorted(recorded.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith("compile_fsdp.")]


@pytest.mark.parametrize("driver", ["eager", "compiled"])
def test_ranges_name_groups_and_parameters(driver: str, model: torch.nn.Module) -> None:
    run = model if driver == "eager" else compiled(model)
    run(*batch()).backward()
    found = ranges(run)
    names = {
        "root": "root (embedding.weight, head.weight)",
        "blocks.0": "blocks.0 (norm.weight, norm.bias, up.weight, +3)",
        "blocks.1": "blocks.1 (norm.weight, norm.bias, up.weight, +3)",
    }
    for verb in ("unshard", "wait", "reshard", "reduce_inner"):
        for name in names.values():
            assert f"compile_fsdp.{verb} {name}" in found, found
    unsharded = [name.split()[1] for name in found if ".unshard " in name]
    assert list(dict.fromkeys(unsharded)) == ["root", "blocks.0", "blocks.1"]


def test_nothing_is_recorded_when_nobody_profiles(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("a range was opened")

    monkeypatch.setattr(torch.profiler, "record_function", fail)
    model(*batch()).backward()
    with pytest.raises(AssertionError, match="a range was opened"):
        ranges(model)
