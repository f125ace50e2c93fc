"""``python -m benchmarks``: run the parts, one table against the targets, JSON, charts.

Exit status 1 when something could not run; targets that are missed change nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .machine import about
from .results import Missing, Part, Settings, progress, table
from .targets import TARGETS, verdicts
from .workloads import SHAPES

PARTS = {
    "step": "step_time",
    "memory": "memory",
    "plan": "plan_against_truth",
    "host": "host_time",
    "compile": "compile_time",
    "planning": "planning_time",
    "copies": "copies",
    "simulation": "simulation",
}
"""Module by part; each has ``run(settings) -> Part``."""

CHARTS = ("step-time", "memory", "host-time", "compile-time", "simulation")
WRITTEN = ("results.json", "results.md", *(f"{name}.png" for name in CHARTS))

DESCRIPTION = """\
Measure compile_fsdp beside its peers, in one run, in turns, and compare with the targets.

  step        step time of all contenders, two gloo ranks, and the bound
  memory      peak live bytes in a step
  plan        the plan's peak, order and bytes beside a run
  host        host time of a step of 32 tiny blocks, fake process group
  compile     compile time, cold and warm, and the passes' share of it
  planning    passes over graphs of 80 blocks and of 40
  copies      copies of gradients and weights in a step, counted
  simulation  exposed communication of Llama-3-8B on 64 GPUs, by the cost model
"""


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", metavar="PART,...", type=_names_of(PARTS), default=tuple(PARTS), help="some parts"
    )
    parser.add_argument(
        "--workloads",
        metavar="NAME,...",
        type=_names_of(SHAPES),
        default=tuple(SHAPES),
        help=f"of {', '.join(SHAPES)}; all by default",
    )
    parser.add_argument("--steps", type=_positive, help="counted steps of each contender (20)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder (runs/bench)")
    parser.add_argument(
        "--quick", action="store_true", help="tiny models, few steps: only to see that it runs"
    )
    return parser.parse_args(arguments)


def _names_of(known: Mapping[str, object]) -> Any:
    def names(text: str) -> tuple[str, ...]:
        found = tuple(part.strip() for part in text.split(","))
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return found

    return names


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {number}")
    return number


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit status."""
    given = parse(sys.argv[1:] if arguments is None else arguments)
    settings = Settings(given.steps or (3 if given.quick else 20), given.quick, given.workloads)
    machine = about()
    given.out.mkdir(parents=True, exist_ok=True)
    for name in WRITTEN:  # whatever becomes of this run, no number of an older one stays
        (given.out / name).unlink(missing_ok=True)
    done = {name: attempt(name, settings) for name in given.only}
    rows = [row for row in _verdicts(done) if _asked_for(row[0], settings)]
    notes = [note for part in done.values() for note in part.problems]
    notes += _draw(done, given.out)
    report = {
        "machine": machine,
        "settings": vars(settings) | {"parts": given.only},
        "targets": [
            {"what": row[0], "target": row[1], "measured": row[2], "verdict": row[3]}
            for row in rows
        ],
        "could not run": notes,
        "parts": {name: part.data for name, part in done.items()},
    }
    path = given.out / "results.json"
    path.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
    (given.out / "results.md").write_text(_markdown(machine, settings, rows), encoding="utf-8")
    for part in done.values():
        print("\n\n".join(part.text), end="\n\n" if part.text else "")
    print(_heading(machine, settings))
    print(table(("what", "target", "measured", "verdict"), rows))
    for note in notes:
        print(f"could not run: {note}")
    progress(f"wrote {path}")
    return 1 if notes or any(row[3].startswith("could not run") for row in rows) else 0


def attempt(name: str, settings: Settings) -> Part:
    """Run one part; what it raises is its result."""
    try:
        run = importlib.import_module(f"{__package__}.{PARTS[name]}").run
        part: Part = run(settings)
        return part
    except Exception as error:  # another part may work
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        progress(f"{name} could not run: {why}")
        keys = [target.key for target in TARGETS if target.part == name]
        return Part(dict.fromkeys(keys, Missing(why)), problems=[f"{name}: {why}"])


def _verdicts(done: Mapping[str, Part]) -> list[tuple[str, str, str, str]]:
    measured = {key: value for part in done.values() for key, value in part.measured.items()}
    return [
        (
            target.what,
            target.aim,
            target.show(value) if isinstance(value, float | int) else "-",
            verdict,
        )
        for target, value, verdict in verdicts(tuple(done), measured)
    ]


def _asked_for(what: str, settings: Settings) -> bool:
    left_out = [name for name in SHAPES if name not in settings.workloads]
    return not any(what.endswith(f", {name}") for name in left_out)


def _draw(done: Mapping[str, Part], folder: Path) -> list[str]:
    charts = {name: bars for part in done.values() for name, bars in part.charts.items()}
    from .charts import draw

    try:
        for path in draw(charts, folder):
            progress(f"wrote {path}")
    except ImportError as error:
        return [f"charts: {error}; pip install 'compile_fsdp[bench]'"]
    return []


def _heading(machine: Mapping[str, Any], settings: Settings) -> str:
    quick = "QUICK RUN, NUMBERS MEAN NOTHING. " if settings.quick else ""
    return (
        f"{quick}{machine['date']}, torch {machine['torch']}, {machine['cpu']}, "
        f"{machine['cores']} cores, load {machine['load average at the start']:.1f}, "
        f"{settings.steps} counted steps"
    )


def _markdown(
    machine: Mapping[str, Any], settings: Settings, rows: list[tuple[str, str, str, str]]
) -> str:
    """The table for a page of the documentation."""
    lines = ["| what | target | measured | verdict |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return _heading(machine, settings) + "\n\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
