"""``python -m compile_fsdp``: what it prints and writes, and one line for bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from compile_fsdp import Explanation
from compile_fsdp.cli.main import main
from compile_fsdp.passes.steps import format_bytes

TARGETS = """
import torch
from torch import nn
from compile_fsdp import fully_shard
from tests.models import LanguageModel

def batch():
    return torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 5, dtype=torch.long)

def build():
    return LanguageModel(blocks=3), batch()

def sharded(mesh):
    model = LanguageModel(blocks=3)
    fully_shard(model.blocks[0], mesh)
    fully_shard(model, mesh)
    return model, batch()

class Breaks(LanguageModel):
    def forward(self, tokens, targets):
        loss = super().forward(tokens, targets)
        print("loss")
        return loss

def breaks():
    return Breaks(), batch()

def wrong():
    return LanguageModel()

def reads():
    return LanguageModel(), batch(), {"scale": torch.ones(1).item()}
"""


@pytest.fixture(autouse=True)
def targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "targets_of_a_test.py").write_text(TARGETS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("targets_of_a_test", None)


def plan(target: str, *options: str) -> int:
    return main(["plan", f"targets_of_a_test:{target}", "--inner", "aot_eager", *options])


def test_a_plan_is_printed_and_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("build", "--mesh", "4x2", "--json", "plan.json", "--html", "plan.html") == 0
    out = capsys.readouterr().out
    for part in ("hsdp on 8 ranks", "blocks.0 ... blocks.2 (3)", "together", "exposed", "MFU"):
        assert part in out
    data = json.loads(Path("plan.json").read_text(encoding="utf-8"))
    assert (data["format"], data["mode"]) == ("compile_fsdp.plan", "hsdp")
    memory = data["memory"]
    arena = data["arena"]
    assert arena["size"] >= arena["bound"] >= memory["gathered"]
    assert f'{{"arena": true}}: one arena of {format_bytes(arena["size"])}, of which' in out
    assert memory["total"] == sum(size for name, size in memory.items() if name != "total")
    assert Path("plan.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_units_that_the_function_sharded_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("sharded", "--mesh", "2", "--json", "plan.json") == 0
    data = json.loads(Path("plan.json").read_text(encoding="utf-8"))
    assert sorted(group["label"] for group in data["groups"]) == ["blocks.0", "root"]


def test_explain_with_ranks_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", "targets_of_a_test:build", "--inner", "aot_eager"]
    assert main([*arguments, "--mesh", "2", "--json", "step.json"]) == 0
    assert "2 ranks" in capsys.readouterr().out
    explanation = Explanation.from_json(Path("step.json").read_text(encoding="utf-8"))
    assert [graph.kind for graph in explanation.graphs] == ["forward", "backward"]


def test_explain_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "targets_of_a_test:build", "--inner", "aot_eager"]) == 0
    out = capsys.readouterr().out
    assert "1 rank" in out and "graph 1: backward" in out
    assert not torch.distributed.is_initialized()


BAD = [
    (("nowhere:build",), "'nowhere' cannot be imported"),
    (("targets_of_a_test",), "expected MODULE:FUNCTION"),
    (("targets_of_a_test:missing",), "has no function 'missing'; functions: batch, build"),
    (("targets_of_a_test:wrong",), "returned (LanguageModel), expected (model, args)"),
    (("targets_of_a_test:reads",), "it must not read values of tensors"),
    (("targets_of_a_test:breaks",), "the model breaks its graph at"),
    (("hf:missing.json",), "no JSON file can be read there"),
    (("hf:lamb.json",), "knows no model_type 'lama'"),
    (("targets_of_a_test:build", "--mesh", "3x5"), "do not factor into nodes of 8"),
    (("targets_of_a_test:build", "--mesh", "many"), "expected OUTERxINNER"),
    (("targets_of_a_test:build", "--mode", "hsdp", "--mesh", "8"), "wants two axes"),
    (("targets_of_a_test:build", "--device", "h1000"), "unknown device 'h1000'; did you mean"),
    (("targets_of_a_test:build", "--interconnect", "wet"), "unknown link 'wet'"),
    (("targets_of_a_test:build", "--budget", "much"), "expected a number of bytes"),
    (("targets_of_a_test:build", "--budget", "60KiB"), "cannot hold this"),
    (("targets_of_a_test:build", "--html", "no/such/file.html"), "the folder does not exist"),
]


@pytest.mark.parametrize(("arguments", "expected"), BAD, ids=[bad[1][:30] for bad in BAD])
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("lamb.json").write_text('{"model_type": "lama"}', encoding="utf-8")
    mesh = () if "--mesh" in arguments else ("--mesh", "8x2")
    assert main(["plan", *arguments, *mesh, "--inner", "aot_eager"]) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if not line.startswith("...")]
    assert len(lines) == 1 and expected in lines[0], captured.err
    assert not captured.out
    assert not torch.distributed.is_initialized()


def test_wrong_usage_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "targets_of_a_test:build"])
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "examples:" in capsys.readouterr().out
