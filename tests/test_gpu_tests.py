"""The tests of tests/gpu without a GPU: all of them are skipped with the reason, and those that
need no CUDA pass on a CPU. In processes of their own: they have a process group of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def run_gpu_tests(*arguments: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    return result.stdout


def test_without_a_gpu_they_are_skipped_with_the_reason() -> None:
    output = run_gpu_tests(COMPILE_FSDP_GPU_TESTS_ON="cuda")
    assert re.search(r"\d+ skipped in", output), output
    assert f"torch {torch.__version__}" in output and "needs a CUDA GPU" in output


def test_some_of_those_that_need_no_cuda_pass_on_a_cpu() -> None:
    few = "not inductor and (zero3 or hsdp or microbatches or names or reading or language)"
    output = run_gpu_tests("-k", few, COMPILE_FSDP_GPU_TESTS_ON="cpu")
    assert re.search(r"\d{2} passed", output), output


@pytest.mark.slow
def test_all_that_need_no_cuda_pass_on_a_cpu() -> None:
    """Without Inductor, whose code for a CPU takes half a minute to compile."""
    output = run_gpu_tests("-k", "not inductor", COMPILE_FSDP_GPU_TESTS_ON="cpu")
    assert re.search(r"\d{2} passed", output), output
