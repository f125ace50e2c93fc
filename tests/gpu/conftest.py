"""Skips the GPU tests, with the reason, where there is no GPU, and gives them a process group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Streams that share one of the device's few connections wait for each other though nobody asked for
# it; tests that look for overlap want one for each. Read when CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import pytest

from tests.gpu.support import ON_CUDA, VARIABLE, missing_device, world

HERE = Path(__file__).resolve().parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run on the device that was asked for."""
    reason = missing_device()
    for item in items:
        if HERE not in item.path.parents:
            continue
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"{reason} ({VARIABLE}=cpu runs the others)"))
        elif not ON_CUDA and item.get_closest_marker("cuda_only"):
            item.add_marker(pytest.mark.skip(reason=f"needs a CUDA GPU, and {VARIABLE} is cpu"))


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of this process alone: NCCL on a GPU, gloo on a CPU."""
    with world():
        yield


@pytest.fixture(autouse=True)
def _without_compiled_code() -> Iterator[None]:
    """No compiled code, and so no recompilation, from one test to the next."""
    yield
    import torch

    torch.compiler.reset()
