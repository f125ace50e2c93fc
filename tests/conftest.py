"""What every test finds: one torch thread, the package importable, the ranks' processes ended."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch is imported: ranks share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if importlib.util.find_spec("compile_fsdp") is None:
    # Not installed and pytest was not started as ``python -m pytest`` in the repository.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from tests.distributed import shut_down


@pytest.fixture(scope="session", autouse=True)
def _session() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    shut_down()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1234)
