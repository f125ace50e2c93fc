"""Checkpoints of a run: one folder a step, each with a description that is written last.

    runs/lm/step-000200/            what save_checkpoint writes
    runs/lm/step-000200/run.json    the model's sizes, the step, what the losses follow from

A folder without run.json is one whose saving was interrupted; it is not looked at.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from compile_fsdp import load_checkpoint, save_checkpoint
from lm.errors import InputError
from lm.model import ModelConfig
from lm.processes import World

KEPT = 2
_DESCRIPTION = "run.json"
_FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, as its description tells."""

    folder: Path
    step: int
    model: ModelConfig
    trajectory: Mapping[str, object]


def find_checkpoints(out: Path) -> list[Checkpoint]:
    """The complete checkpoints in the folder, oldest first. Raises InputError for a broken one."""
    found = [_describe(path.parent) for path in out.glob(f"step-*/{_DESCRIPTION}")]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def choose_checkpoint(
    out: Path, model: ModelConfig, *, resume: bool, fresh: bool
) -> Checkpoint | None:
    """The checkpoint to go on from, None to start anew. Changes nothing on disk.

    Raises InputError when there is none to resume from, when it is of another model, and when
    starting anew would mix two runs in one folder.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out}: is not a folder; name one that is, or a new one")
    if fresh:
        return None
    checkpoints = find_checkpoints(out)
    if not resume:
        if checkpoints:
            raise InputError(
                f"--out {out}: already holds checkpoints (up to step {checkpoints[-1].step});"
                " --resume goes on from there, --fresh removes them, another --out keeps them"
            )
        return None
    if not checkpoints:
        raise InputError(
            f"--resume: no checkpoint in {out}; name the folder of the run with --out, or leave"
            " --resume out to start anew"
        )
    newest = checkpoints[-1]
    _check_model(newest, model)
    return newest


def changed_settings(checkpoint: Checkpoint, trajectory: Mapping[str, object]) -> list[str]:
    """What differs between the saved run and this one, one phrase each."""
    return [
        f"{name}: {checkpoint.trajectory.get(name)} then, {value} now"
        for name, value in trajectory.items()
        if checkpoint.trajectory.get(name) != value
    ]


def remove_checkpoints(out: Path) -> None:
    """Remove every step folder, complete or not."""
    for folder in out.glob("step-*"):
        shutil.rmtree(folder)


def save(
    world: World,
    out: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: ModelConfig,
    trajectory: Mapping[str, object],
) -> Path:
    """Save on all ranks; then the first describes it and removes all but the newest KEPT."""
    folder = out / f"step-{step:06d}"
    save_checkpoint(model, optimizer, folder)
    if world.rank == 0:
        description = {
            "format": _FORMAT,
            "step": step,
            "model": dataclasses.asdict(config),
            "trajectory": dict(trajectory),
        }
        write_json(folder / _DESCRIPTION, description)
        for old in find_checkpoints(out)[:-KEPT]:
            shutil.rmtree(old.folder)
    world.barrier()
    return folder


def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load model and optimizer in place, on all ranks.

    Raises InputError, on all ranks and with nothing changed, for files that are damaged or missing.
    """
    try:
        load_checkpoint(model, optimizer, checkpoint.folder)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"--resume: {checkpoint.folder} cannot be loaded: {reason}; remove it to go on from an"
            " earlier one, or use another --out"
        ) from error


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write so that a reader sees the old file or the new one, never a part."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def _describe(folder: Path) -> Checkpoint:
    path = folder / _DESCRIPTION
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise InputError(
                f"{path}: has format {content['format']}, this program reads {_FORMAT};"
                " use another --out"
            )
        model = ModelConfig(**content["model"])
        return Checkpoint(folder, int(content["step"]), model, dict(content["trajectory"]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{path}: is not a checkpoint's description ({error}); remove {folder} or use another"
            " --out"
        ) from error


def _check_model(checkpoint: Checkpoint, model: ModelConfig) -> None:
    saved, asked = dataclasses.asdict(checkpoint.model), dataclasses.asdict(model)
    different = [name for name in asked if saved[name] != asked[name]]
    if different:
        listed = ", ".join(f"{name} {saved[name]} (asked: {asked[name]})" for name in different)
        raise InputError(
            f"--resume: {checkpoint.folder} holds another model: {listed}; ask for the same sizes"
            " or use another --out"
        )
