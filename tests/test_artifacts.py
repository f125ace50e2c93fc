"""What ``TORCH_LOGS`` and ``TORCH_TRACE`` show of a compilation.

Asked of a fresh interpreter, since torch reads both when it is imported.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
from tests.explaining import batch, compiled, fake_world, sharded_language_model

with fake_world(2):
    compiled(sharded_language_model())(*batch()).backward()
"""


def run(**variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": path, **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder with the trace, and what was logged beside."""
    folder = tmp_path_factory.mktemp("trace")
    return folder, run(TORCH_TRACE=str(folder), TORCH_LOGS="+compile_fsdp").stderr


def artifacts(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Compilation, name and text of our artifacts in a trace: a line of JSON, then the text, each
    of whose lines begins with a tab."""
    (log,) = folder.glob("*.log")
    header: dict[str, object] = {}
    text: list[str] = []
    for line in [*log.read_text().splitlines(), "V end] {}"]:
        if line.startswith("\t"):
            text.append(line[1:])
            continue
        name = str(header.get("artifact", {}).get("name", ""))  # type: ignore[attr-defined]
        if name.startswith("compile_fsdp_"):
            compilation = f"{header.get('frame_id')}/{header.get('frame_compile_id')}"
            yield compilation, name, "\n".join(text)
        found = re.search(r"\] (\{.*\})$", line)
        header, text = json.loads(found[1]) if found else {}, []


def test_the_trace_has_schedules_and_graphs(traced: tuple[Path, str]) -> None:
    found = {name: (compilation, text) for compilation, name, text in artifacts(traced[0])}
    parts = ("schedule", "schedule_data", "communication", "graph_before", "graph_after")
    expected = {f"compile_fsdp_{kind}_{part}" for kind in ("forward", "backward") for part in parts}
    assert set(found) == expected
    assert {compilation for compilation, _ in found.values()} == {"0/0"}, "for tlparse to sort by"
    table = found["compile_fsdp_forward_schedule"][1]
    assert table.startswith("forward: 3 unshard") and "\n0: " in table
    assert "reduce_inner(" in found["compile_fsdp_backward_communication"][1]
    assert json.loads(found["compile_fsdp_backward_schedule_data"][1])["kind"] == "backward"
    assert "compile_fsdp.parameter(" in found["compile_fsdp_forward_graph_before"][1]
    assert "compile_fsdp.unshard(" in found["compile_fsdp_forward_graph_after"][1]


def test_the_log_has_a_line_for_each_graph_and_with_plus_the_reasons(
    traced: tuple[Path, str],
) -> None:
    detailed = traced[1]
    assert len(re.findall(r"(forward|backward): 3 unshard .* exposed", detailed)) == 2
    assert "no reader is left" in detailed


def test_the_log_without_plus_is_short() -> None:
    brief = run(TORCH_LOGS="compile_fsdp.passes").stderr
    assert len(re.findall(r"(forward|backward): 3 unshard .* exposed", brief)) == 2
    assert "no reader is left" not in brief


def test_tlparse_makes_files_of_them(traced: tuple[Path, str], tmp_path: Path) -> None:
    tlparse = shutil.which("tlparse") or shutil.which(
        "tlparse", path=str(Path(sys.executable).parent)
    )
    if tlparse is None:
        pytest.skip("tlparse is not installed")
    (log,) = traced[0].glob("*.log")
    out = tmp_path / "out"
    done = subprocess.run(
        [tlparse, str(log), "-o", str(out), "--no-browser"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    names = {path.name for path in out.rglob("compile_fsdp_*")}
    assert any(name.startswith("compile_fsdp_forward_schedule") for name in names), names
    assert any("backward_communication" in name for name in names), names
