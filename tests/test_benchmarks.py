"""The benchmarks themselves: verdicts, what is said of a part that fails, processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import __main__ as bench
from benchmarks.ranks import Ranks, RanksFailed, World
from benchmarks.results import Missing, Part, Settings, ratio, table
from benchmarks.step_time import COMM, SHARE, Times, best_of, bound
from benchmarks.targets import TARGETS, Target
from benchmarks.workloads import Shape

SETTINGS = Settings(steps=1, quick=True, workloads=("latency", "comm", "compute"))


def test_a_ratio_is_the_median_of_pairs() -> None:
    """Not the ratio of medians: a slow moment meets both."""
    assert ratio([1.0, 20.0, 3.0], [2.0, 40.0, 3.0]) == 0.5


@pytest.mark.parametrize(
    ("unit", "value", "verdict"),
    [
        ("ratio", 0.5, "met"),
        ("ratio", 0.75, "missed by 50 %"),
        ("percent", 0.51, "missed by 1.0 % points"),
        ("ratio", Missing("no compiler"), "could not run: no compiler"),
        ("ratio", None, "could not run: nothing was measured"),
    ],
)
def test_verdicts(unit: str, value: float | Missing | None, verdict: str) -> None:
    assert Target("key", "step", "what", 0.5, unit).verdict(value) == verdict
    assert Target("key", "copies", "what", 0, "count").verdict(10) == "missed by 10"


def test_every_part_has_a_target_and_every_target_a_part() -> None:
    assert {target.part for target in TARGETS} == set(bench.PARTS)
    assert len({target.key for target in TARGETS}) == len(TARGETS)


def test_the_bound_is_the_sum_of_what_was_measured_in_the_same_round() -> None:
    times = {
        "unsharded": Times([9.0, 9.0], [1.0, 2.0]),
        COMM: Times([3.0, 3.0], [3.0, 3.0]),
        SHARE: Times([0.5, 0.25], [0.0, 0.0]),
    }
    assert bound(times) == Times([4.5, 5.25], [4.0, 5.0])
    assert bound({name: each for name, each in times.items() if name != COMM}) is None


def test_the_best_of_those_that_ran() -> None:
    times = {"a": Times([3.0]), "b": Times([2.0]), "c": Times([1.0])}
    assert best_of(times, ("a", "b", "not run")) == "b"
    assert best_of(times, ("not run",)) is None


def test_a_part_that_fails_says_so_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No number of an earlier run stays in the folder."""
    (tmp_path / "memory.png").write_text("old")
    monkeypatch.setitem(bench.PARTS, "host", "no_such_module")

    def fine(name: str, settings: Settings) -> Part:
        return attempt(name, settings) if name == "host" else Part({"passes scale": 2.0})

    attempt = bench.attempt
    monkeypatch.setattr(bench, "attempt", fine)
    assert bench.main(["--only", "host,planning", "--quick", "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "could not run: ModuleNotFoundError: No module named" in shown
    assert "QUICK RUN" in shown
    results = json.loads((tmp_path / "results.json").read_text())
    assert [row["verdict"][:13] for row in results["targets"]] == ["could not run", "met"]
    assert results["could not run"]
    assert "| met |" in (tmp_path / "results.md").read_text()
    assert not (tmp_path / "memory.png").exists()


@pytest.mark.parametrize("arguments", [["--only", "speed"], ["--steps", "0"], ["--workloads", ""]])
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.parse(arguments)
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_table() -> None:
    assert table(("a", "b"), [("long", "1")]) == "a     b\nlong  1"


def test_processes_answer_and_say_why_they_cannot() -> None:
    shape = Shape(width=8, blocks=1, batch=1, length=4)
    maker = "benchmarks.stepping:BareCollectives"
    with Ranks(World(2), maker, shape, True) as ranks:
        first, second = ranks.ask("turn", 2)
        assert len(first) == len(second) == 2 and first[0].passes > 0
        with pytest.raises(RanksFailed, match="rank 0, nothing: AttributeError"):
            ranks.ask("nothing")
    with pytest.raises(RanksFailed, match="rank 0, being set up: KeyError"):
        Ranks(World(8, "fake"), "benchmarks.stepping:TrainingSteps", "nobody", shape)
