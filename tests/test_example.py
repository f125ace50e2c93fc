"""examples/train_lm.py: its parts alone, then whole runs as a user starts them."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lm import checkpoints
from lm.data import BatchShape, Corpus, load_corpus, training_batch, validation_batches
from lm.errors import InputError
from lm.generate import generate, readable
from lm.model import Decoder, ModelConfig
from lm.options import parse_options
from train_lm import learning_rate, main

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_lm.py"
CONFIG = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2)


def make_text(folder: Path, files: int, size: int) -> Path:
    folder.mkdir(parents=True)
    for index in range(files):
        (folder / f"{index:03}.txt").write_bytes(bytes((index + i) % 256 for i in range(size)))
    return folder


# Data


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return load_corpus(make_text(tmp_path_factory.mktemp("data") / "text", 40, 200), 16)


def rank_batches(corpus: Corpus, shape: BatchShape, step: int) -> list[Tensor]:
    return [
        training_batch(corpus, shape, seed=3, step=step, micro=micro, rank=rank)[0]
        for micro in range(shape.accumulate)
        for rank in range(shape.world_size)
    ]


def test_a_step_trains_on_the_same_sequences_however_they_are_divided(corpus: Corpus) -> None:
    two_ranks = BatchShape(batch=2, length=16, accumulate=3, world_size=2)
    one_rank = BatchShape(batch=4, length=16, accumulate=3, world_size=1)
    together = torch.cat(rank_batches(corpus, two_ranks, step=5))
    assert torch.equal(together, torch.cat(rank_batches(corpus, one_rank, step=5)))
    assert not torch.equal(together, torch.cat(rank_batches(corpus, two_ranks, step=6)))


def test_targets_are_the_following_bytes(corpus: Corpus) -> None:
    shape = BatchShape(batch=2, length=16, accumulate=1, world_size=1)
    tokens, targets = training_batch(corpus, shape, seed=0, step=0, micro=0, rank=0)
    assert tokens.shape == targets.shape == (2, 16)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_validation_covers_the_held_out_bytes_once(corpus: Corpus) -> None:
    shape = BatchShape(batch=2, length=16, accumulate=1, world_size=2)
    firsts = [
        tuple(row.tolist())
        for rank in range(2)
        for tokens, _ in validation_batches(corpus, shape, count=3, rank=rank)
        for row in tokens
    ]
    assert len(firsts) == 12
    assert firsts[0] == tuple(corpus.validation[:16].tolist())


def test_every_twentieth_file_is_held_out(corpus: Corpus) -> None:
    assert corpus.files == 40
    assert len(corpus.validation) == 2 * 200 + 1  # two files and the byte between them


def test_one_binary_file_is_data_too(tmp_path: Path) -> None:
    file = tmp_path / "blob"
    file.write_bytes(bytes(range(256)) * 10)
    corpus = load_corpus(file, 64)
    assert (len(corpus.train), len(corpus.validation)) == (2432, 128)


def test_the_default_corpus_is_the_standard_library() -> None:
    corpus = load_corpus(None, 128)
    assert len(corpus.train) > 2**20
    assert b"import" in bytes(corpus.train[: 2**18].tolist())
    assert corpus.digest == load_corpus(None, 128).digest


# Model


def test_an_untrained_model_knows_nothing() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(256, (4, 32))
    loss = Decoder(CONFIG)(tokens, tokens.roll(-1, 1))
    assert loss.dtype == torch.float32
    assert abs(loss.item() - math.log(256)) < 0.1


def test_logits_do_not_depend_on_later_bytes() -> None:
    torch.manual_seed(0)
    model = Decoder(CONFIG)
    tokens = torch.randint(256, (1, 32))
    changed = tokens.clone()
    changed[:, 20:] = 7
    assert torch.equal(model(tokens)[:, :20], model(changed)[:, :20])


def test_sampling_gives_the_model_one_shape() -> None:
    shapes = set()

    def successor(tokens: Tensor) -> Tensor:
        """Certain that the byte after n is n + 1."""
        shapes.add(tuple(tokens.shape))
        return torch.nn.functional.one_hot((tokens + 1) % 256, 256).float() * 1e4

    device = torch.device("cpu")
    text = generate(successor, b"abc", count=12, length=8, device=device, seed=0)
    assert text == b"abcdefghijklmno"
    assert shapes == {(1, 8)}


def test_a_sample_can_be_printed() -> None:
    assert readable(b"def f():\n\t\xff\x00\x1b[0m") == "def f():\n\t...[0m"


def test_learning_rate_rises_then_falls_to_a_tenth() -> None:
    options = replace(parse_options([]), steps=100, warmup=10, learning_rate=1.0)
    rates = [learning_rate(options, step) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.1)


# Bad input


def fails(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> str:
    """The one line that a run with these arguments leaves on stderr."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line.removeprefix("train_lm: error: ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--stepz 3", "unrecognized arguments: --stepz 3; see --help"),
        ("--steps 0", "--steps 0: must be greater than 0"),
        ("--warmup -1", "--warmup -1: must not be negative"),
        ("--dtype fp8", "argument --dtype: invalid choice: 'fp8'"),
        ("--dim 30 --heads 6", "--dim 30: must be a multiple of twice --heads 6"),
        ("--heads 4 --kv-heads 3 --dim 64", "--heads 4: must be a multiple of --kv-heads 3"),
        ("--resume --fresh", "--resume and --fresh exclude each other"),
        ("--data nowhere", "--data nowhere: no such file or folder"),
        ("--data empty", "--data empty: holds no bytes; give a file or a folder"),
        ("--data empty/file", "--data empty/file: holds no bytes"),
        ("--data short --length 64", "--data short: 5 bytes for validation are too few"),
        ("--out short", "--out short: is not a folder"),
        ("--resume --out empty", "--resume: no checkpoint in empty; name the folder"),
        ("--json nowhere/x.json", "--json nowhere/x.json: no folder nowhere; make it first"),
    ],
)
def test_wrong_input_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "file").touch()
    (tmp_path / "short").write_bytes(b"x" * 100)
    before = sorted(tmp_path.rglob("*"))
    assert fails(capsys, arguments.split()).startswith(expected)
    assert sorted(tmp_path.rglob("*")) == before


def describe_checkpoint(out: Path, step: int, model: ModelConfig) -> Path:
    folder = out / f"step-{step:06d}"
    folder.mkdir(parents=True)
    sizes = {"dim": model.dim, "layers": model.layers, "heads": model.heads}
    description = {"format": 1, "step": step, "trajectory": {"seed": 0}}
    checkpoints.write_json(
        folder / "run.json", {**description, "model": {**sizes, "kv_heads": model.kv_heads}}
    )
    return folder


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = describe_checkpoint(tmp_path, 10, CONFIG)
    with pytest.raises(InputError) as caught:
        other = replace(CONFIG, layers=3)
        checkpoints.choose_checkpoint(tmp_path, other, resume=True, fresh=False)
    assert str(caught.value) == (
        f"--resume: {folder} holds another model: layers 2 (asked: 3);"
        " ask for the same sizes or use another --out"
    )


def test_two_runs_are_not_mixed_in_one_folder(tmp_path: Path) -> None:
    describe_checkpoint(tmp_path, 10, CONFIG)
    with pytest.raises(InputError, match=r"already holds checkpoints \(up to step 10\)"):
        checkpoints.choose_checkpoint(tmp_path, CONFIG, resume=False, fresh=False)


def test_the_newest_complete_checkpoint_is_chosen(tmp_path: Path) -> None:
    describe_checkpoint(tmp_path, 10, CONFIG)
    newest = describe_checkpoint(tmp_path, 20, CONFIG)
    (tmp_path / "step-000030").mkdir()  # saving was interrupted
    chosen = checkpoints.choose_checkpoint(tmp_path, CONFIG, resume=True, fresh=False)
    assert chosen is not None
    assert (chosen.folder, chosen.step) == (newest, 20)
    assert checkpoints.changed_settings(chosen, {"seed": 1}) == ["seed: 0 then, 1 now"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1, "step": 1}', '{"format": 9}'])
def test_a_broken_description_is_named(tmp_path: Path, content: str) -> None:
    path = describe_checkpoint(tmp_path, 10, CONFIG) / "run.json"
    path.write_text(content)
    with pytest.raises(InputError, match=r"run\.json: "):
        checkpoints.find_checkpoints(tmp_path)


# Whole runs

SMALL = (
    "--dim 32 --layers 2 --heads 4 --kv-heads 2 --length 32 --batch 2 --accumulate 2 --steps 6"
    " --warmup 2 --checkpoint-every 3 --log-every 2 --sample-bytes 8 --validation-batches 2"
)


def test_one_process_and_a_damaged_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*SMALL.split(), "--eager", "--out", str(tmp_path)]
    assert main(arguments) == 0
    assert "sharded over 1 process on" in capsys.readouterr().out
    newest = tmp_path / "step-000006"
    data = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data.write_bytes(data.read_bytes()[:100])
    assert main([*arguments, "--resume"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"train_lm: error: --resume: {newest} cannot be loaded: ")
    assert error.count("\n") == 1


def torchrun(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A run on two CPU processes, as the README shows it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(EXAMPLE), *SMALL.split(), "--out", str(out), *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def metrics(out: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """What a run wrote with --json, and what it printed."""
    json_file = out.parent / f"{out.name}.json"
    result = torchrun(out, *arguments, "--json", str(json_file))
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(json_file.read_text()), result.stdout


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    out = tmp_path_factory.mktemp("runs") / "compiled"
    return out, *metrics(out, "--inner", "aot_eager")


def test_a_run_reports_saves_and_speaks(compiled: tuple[Path, dict[str, Any], str]) -> None:
    out, result, printed = compiled
    assert [step for step, _ in result["losses"]] == [1, 2, 3, 4, 5, 6]
    assert result["losses"][-1][1] < result["losses"][0][1]
    assert sorted(path.name for path in out.iterdir()) == ["step-000003", "step-000006"]
    assert printed.count("sharded over 2 processes on cpu, float32") == 1  # one rank speaks
    assert "step 6/6  loss" in printed
    assert "--- a sample, 8 bytes after the prompt ---\ndef " in printed


def test_eager_gives_the_same_losses(
    tmp_path: Path, compiled: tuple[Path, dict[str, Any], str]
) -> None:
    eager, _ = metrics(tmp_path / "eager", "--eager")
    assert eager["losses"] == compiled[1]["losses"]
    assert eager["validation_loss"] == compiled[1]["validation_loss"]


def test_a_resumed_run_repeats_the_whole_one(
    tmp_path: Path, compiled: tuple[Path, dict[str, Any], str]
) -> None:
    out, whole, _ = compiled
    shutil.copytree(out / "step-000003", tmp_path / "half" / "step-000003")
    resumed, printed = metrics(tmp_path / "half", "--eager", "--resume")
    assert "resumed from" in printed
    assert "will not repeat" not in printed
    assert resumed["losses"] == whole["losses"][3:]
    assert resumed["validation_loss"] == whole["validation_loss"]


@pytest.mark.slow
def test_mxfp8_follows_bf16(tmp_path: Path) -> None:
    """As in docs/mxfp8.md, smaller: there, means of 20 steps were at most 1.6 % apart."""
    longer = "--eager --dtype bf16 --dim 64 --length 64 --batch 8 --accumulate 1 --steps 80"
    kinds = {"bf16": (), "mxfp8": ("--mxfp8",)}
    results = {
        name: metrics(tmp_path / name, *longer.split(), "--warmup", "10", *extra)
        for name, extra in kinds.items()
    }
    assert "bfloat16, weights in MXFP8" in results["mxfp8"][1]
    first, last = (
        [sum(loss for _, loss in result["losses"][part]) / 20 for result, _ in results.values()]
        for part in (slice(0, 20), slice(60, 80))
    )
    assert last[0] < 0.9 * first[0], "it has learnt something"
    assert 0 < abs(last[1] - last[0]) < 0.03 * last[0]


def test_an_error_on_two_processes_is_told_once(tmp_path: Path) -> None:
    result = torchrun(tmp_path / "none", "--resume")
    assert result.returncode != 0
    assert result.stderr.count("train_lm: error:") == 1
    assert "exitcode  : 2" in result.stderr
    assert not (tmp_path / "none").exists()
