"""benchmarks/gpu_step.py on a CPU: candidates compute the same; what cannot run has no number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_step
from benchmarks.gpu_candidates import CANDIDATES, Job
from benchmarks.gpu_step import Row, in_one_line, ratio, summary, table
from benchmarks.workloads import Shape
from compile_fsdp.passes.hardware import DEVICES

ROOT = Path(__file__).resolve().parent.parent
TINY = ("--device", "cpu", "--inner", "aot_eager", "--steps", "2", "--warmup", "1")


def run_script(*arguments: str, ranks: int = 1) -> str:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    launcher = torchrun if ranks > 1 else []
    result = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "benchmarks" / "gpu_step.py"), *TINY, *arguments],
        # Not the repository: the script finds the package itself.
        cwd=ROOT.parent,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def results(path: Path) -> dict[str, dict[str, Any]]:
    found = json.loads(path.read_text(encoding="utf-8"))
    return {row["name"]: row for row in found["candidates"]}


def test_one_rank(tmp_path: Path) -> None:
    names = ("plain", "fsdp2", "ours-eager", "ours")
    output = run_script("--json", str(tmp_path / "x.json"), "--only", *names)
    rows = results(tmp_path / "x.json")
    assert tuple(rows) == names
    for name, row in rows.items():
        assert len(row["seconds"]) == 2 and not row["problem"]
        assert row["loss"] == pytest.approx(rows["plain"]["loss"], rel=1e-4), name
        assert name in output
    assert rows["plain"]["ratio_to_plain"] == 1.0
    assert rows["fsdp2"]["ratio_to_best_fsdp2"] == 1.0
    # A CPU's peak rate and its allocator's peak are known to nobody here.
    assert rows["ours"]["mfu"] is None and rows["ours"]["peak"] is None


@pytest.mark.slow
def test_two_ranks_and_bf16(tmp_path: Path) -> None:
    run_script("--dtype", "bf16", "--json", str(tmp_path / "x.json"), ranks=2)
    rows = results(tmp_path / "x.json")
    ran = [row for row in rows.values() if not row["problem"]]
    assert len(ran) >= len(CANDIDATES) - 1  # CUDA graphs need CUDA
    for row in ran:
        assert row["loss"] == pytest.approx(rows["plain"]["loss"], rel=2e-2), row["name"]


def job() -> Job:
    return Job(torch.device("cpu"), None, Shape(64, 2, 2, 16), 128, torch.float32, "inductor", True)


def test_what_cannot_run_has_no_number() -> None:
    rows = {
        "plain": Row("plain", [1.0, 2.0, 4.0], 1 << 30, 0.5),
        "fsdp2": Row("fsdp2", [2.0, 2.0, 2.0], 2 << 30, 0.5),
        "fsdp2-whole": Row("fsdp2-whole", [1.0, 1.0, 1.0], None, 0.5),
        "ours": Row("ours", problem="RuntimeError: out of memory"),
    }
    assert ratio(rows["plain"], rows["fsdp2"]) == 1.0
    lines = summary(rows, job(), 1e12)
    by_name = {line["name"]: line for line in lines}
    assert by_name["plain"]["ratio_to_best_fsdp2"] == 2.0
    assert by_name["plain"]["tokens_per_second"] == 16.0
    assert "tokens_per_second" not in by_name["ours"]
    text = table(lines)
    assert text[-1] == "ours         cannot run: RuntimeError: out of memory"
    assert text[1].split()[:2] == ["plain", "2000.00"]


def test_flops_of_a_token_are_those_of_the_formula() -> None:
    """Two blocks of 12 width ** 2 weights and 13 width of biases and norms, a norm, a head."""
    width = 64
    count = 2 * (12 * width**2 + 13 * width) + 2 * width + 128 * width
    assert gpu_step.flops_of_token(job()) == 6 * count + 12 * 2 * width * 16


def test_peaks_are_known_by_the_names_of_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    card = {"name": "NVIDIA H200"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card["name"])
    cuda = torch.device("cuda", 0)
    assert gpu_step.peak_rate(cuda, torch.bfloat16) == DEVICES["h200"][0]["bfloat16"]
    card["name"] = "NVIDIA A100-SXM4-80GB"
    assert gpu_step.peak_rate(cuda, torch.float32) == DEVICES["a100"][0]["float32"]
    card["name"] = "Some card of tomorrow"
    assert gpu_step.peak_rate(cuda, torch.float32) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--device", "cpu", "--width", "100"], "--width must be a multiple of 64"),
        (["--device", "cpu", "--steps", "0"], "expected 1 or more"),
        (["--device", "cpu", "--only", "nobody"], "invalid choice"),
    ],
)
def test_bad_arguments(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_step.arguments(given)
    assert message in capsys.readouterr().err


def test_without_a_gpu_or_matplotlib_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu_step.arguments([])
    assert "torch sees no CUDA GPU; --device cpu" in capsys.readouterr().err
    monkeypatch.setattr(gpu_step.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        gpu_step.arguments(["--device", "cpu", "--png", "x.png"])
    assert "--png needs matplotlib" in capsys.readouterr().err


def test_errors_are_told_in_one_line() -> None:
    error = RuntimeError("wrapped")
    error.__cause__ = ValueError("the reason\nand more")
    assert in_one_line(error) == "ValueError: the reason"
    by_dynamo: Any = RuntimeError("backend failed")
    by_dynamo.inner_exception = error
    assert in_one_line(by_dynamo) == "ValueError: the reason"
    assert in_one_line(KeyError()) == "KeyError: no message"
