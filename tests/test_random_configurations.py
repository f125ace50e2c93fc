"""Any configuration trains as one process does, bit for bit; and a broken library does not."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.configuration_strategies import spread
from tests.configurations import Configuration, ModuleSpec, ParameterSpec, snippet
from tests.distributed import RankFailure, run
from tests.faults import BROKEN, differences_when_broken
from tests.random_training import check

EAGER_CASES, COMPILED_CASES = 50, 10


@functools.cache
def eager_cases() -> list[Configuration]:
    """The same in every run, and not resembling one another."""
    return spread(EAGER_CASES, seed=1, drivers=("eager",))


@functools.cache
def compiled_cases() -> list[Configuration]:
    """As `eager_cases`, with Dynamo."""
    return spread(COMPILED_CASES, seed=2, drivers=("compiled", "compiled blocks", "unscheduled"))


@pytest.mark.parametrize("number", range(EAGER_CASES))
def test_eager_training_equals_one_process(number: int) -> None:
    check(eager_cases()[number])


@pytest.mark.parametrize("number", range(COMPILED_CASES))
def test_compiled_training_equals_one_process(number: int) -> None:
    check(compiled_cases()[number])


# Whether it would be noticed ------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", BROKEN)
def test_a_fault_of_the_library_is_noticed(how: str) -> None:
    for configuration in eager_cases():
        try:
            if any(run(configuration.ranks, differences_when_broken, how, configuration)):
                return
        except RankFailure as failure:
            # Found by the library itself, or by torch: not by waiting for another rank.
            assert "raised first" in str(failure)
            return
    pytest.fail(f"{EAGER_CASES} configurations train the same with the fault {how!r}")


# The printed script ---------------------------------------------------------------------------

TWO_RANKS = Configuration(
    ModuleSpec((ParameterSpec((5, 3)), ParameterSpec((7,), torch.bfloat16)), grad_scale=0.5),
    microbatches=2,
)


def run_snippet(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "snippet.py"
    script.write_text(text)
    # As the script's first line says, without relying on torchrun being on the path.
    command = text.splitlines()[0].removeprefix("# torchrun ").replace("snippet.py", str(script))
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command.split()],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
def test_the_printed_script_runs(tmp_path: Path) -> None:
    assert eval(repr(TWO_RANKS)) == TWO_RANKS
    result = run_snippet(snippet(TWO_RANKS), tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("as in one process") == 2


@pytest.mark.slow
def test_the_printed_script_fails_where_the_library_does(tmp_path: Path) -> None:
    text = snippet(TWO_RANKS).replace(
        "    run_alone(",
        "    from tests.faults import broken\n"
        "    with broken('grad_scale dropped'):\n"
        "        run_alone(",
    )
    result = run_snippet(text, tmp_path)
    assert result.returncode != 0
    assert "step 0: gradient of p0: found" in result.stdout, result.stderr
