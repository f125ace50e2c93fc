"""save_checkpoint and load_checkpoint: sharded training state on disk, for any number of ranks.

The files are those of ``torch.distributed.checkpoint`` (DCP): every rank writes and reads its own
rows. What this adds is in `checkpoint_folder` (a crash never costs the earlier checkpoint),
`checkpoint_planner` (which rows a rank has; damage is noticed), `checkpoint_state` and
`checkpoint_optimizer` (names, and nothing is changed before everything was checked),
`checkpoint_save` and `checkpoint_background` (writing, also in a thread). Here is the order of
events, in which every step ends with all ranks agreeing that it went well (`checkpoint_ranks`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from .checkpoint_background import PendingSave, background
from .checkpoint_folder import CheckpointFolder
from .checkpoint_optimizer import OptimizerState
from .checkpoint_planner import (
    CheckedReader,
    LoadEntries,
    Piece,
    Value,
    check_sizes,
    read_metadata,
    read_value,
)
from .checkpoint_ranks import Ranks, explained
from .checkpoint_save import Save
from .checkpoint_state import DESCRIPTION, ModelState

__all__ = ["PendingSave", "async_save_checkpoint", "load_checkpoint", "save_checkpoint"]


def save_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    dir: str | os.PathLike[str],
) -> None:
    """Save main weights, persistent buffers and optimizer state as the checkpoint ``dir``.

    Every rank of the default process group calls this with the same arguments, between steps.
    The files appear in a folder beside ``dir`` that takes its place when it is complete: until
    then, and after a crash at any moment, ``dir`` loads as what it was before. Files in ``dir``
    that are not part of a checkpoint are kept. Buffers, and state that is not cut like its
    parameter, are the same on every rank and are taken from one.

    Args:
        model: a sharded model; also one wrapped by ``torch.compile``, or a plain module, without
            a process group too.
        optimizer: over (some of) the model's parameters; None saves the model alone.
        dir: a folder that all ranks see; made if needed.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``dir`` is a file, ranks pass different ones, or something in the model or
            the optimizer cannot be saved.
        RuntimeError: writing failed on some rank. All ranks raise; within the process group's
            timeout if a rank died.
    """
    background.wait()
    ranks = Ranks()
    folder, entries = _agreed(model, optimizer, dir, ranks)
    Save("save_checkpoint", folder, entries, ranks).complete(ranks)


def async_save_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    dir: str | os.PathLike[str],
) -> PendingSave:
    """As `save_checkpoint`, but return as soon as the values are safe from further training.

    What is saved are the values at the call: each rank copies what it is going to write to host
    memory (its own rows, and its share of what ranks hold alike), and a thread writes that while
    training goes on. The new checkpoint takes its place as a whole, at the end; until then, and
    when the process dies, ``dir`` loads as what it was before.

    The threads of the ranks talk through a gloo process group of their own, which the first call
    makes. One save runs at a time: another save or a load waits for it first. Ask for the result
    before ``destroy_process_group()``; a process that ends without waits for its thread.

    Args:
        model, optimizer, dir: as in `save_checkpoint`.

    Returns:
        A ``concurrent.futures.Future``: ``result()`` waits, and raises what `save_checkpoint`
        would have raised while writing, on every rank alike.

    Raises:
        TypeError, ValueError, RuntimeError: as `save_checkpoint`, for what shows before writing.
    """
    background.wait()
    ranks = Ranks()
    folder, entries = _agreed(model, optimizer, dir, ranks)
    own_ranks = Ranks(background.group())
    save = Save("async_save_checkpoint", folder, entries, ranks)
    save.snapshot(ranks)
    return background.start(lambda: save.complete(own_ranks))


def load_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    dir: str | os.PathLike[str],
    *,
    convert_dtypes: bool = False,
) -> None:
    """Load what `save_checkpoint` wrote, in place, whatever the numbers of ranks and the meshes.

    Every rank of the default process group calls this with the same arguments, between steps.
    Values come back bit for bit. If anything is wrong on any rank, all ranks raise and model and
    optimizer are as they were. The whole of what a rank loads is in host memory once, besides its
    place on the device.

    An optimizer gets state, step counts and options (learning rates and so on) back, also if it
    never stepped; it keeps its own choice of implementation (``foreach``, ``fused``,
    ``capturable``, ``differentiable``). Checkpoints hold pickled objects: load those you trust.

    Args:
        model: has the FQNs and shapes that were saved; sharded in any way, or plain.
        optimizer: of the kind that was saved, over the same parameters; None leaves the
            checkpoint's optimizer state alone.
        dir: the folder.
        convert_dtypes: convert parameters, buffers and optimizer state where the model has
            another dtype than the checkpoint, which is an error otherwise.

    Raises:
        TypeError: an argument has the wrong type.
        FileNotFoundError: ``dir`` does not exist or holds no checkpoint.
        ValueError: the checkpoint is of another model, dtype or optimizer, or has no optimizer
            state.
        RuntimeError: files are missing or damaged, or the model is in the middle of a step.
    """
    background.wait()
    ranks = Ranks()
    load = ranks.together(
        lambda: _plan_load(model, optimizer, dir, convert_dtypes, is_first=ranks.rank == 0)
    )
    ranks.agree({"dir": str(load.folder)})
    with explained(f"load_checkpoint: {load.folder} could not be read, nothing was loaded"):
        with _quiet():
            dcp_load(
                {},
                storage_reader=CheckedReader(load.folder, load.metadata),
                planner=LoadEntries(load.entries),
                no_dist=not ranks.distributed,
            )
        ranks.together(load.prepare)
    ranks.together(load.commit)


def _agreed(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    dir: str | os.PathLike[str],
    ranks: Ranks,
) -> tuple[CheckpointFolder, dict[str, Piece | Value]]:
    """What to save and where, of which all ranks have the same."""
    folder, entries = ranks.together(lambda: _what_to_save(model, optimizer, dir))
    ranks.agree({"dir": str(folder.path), **{key: _outline(entries[key]) for key in entries}})
    return folder, entries


def _what_to_save(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    dir: str | os.PathLike[str],
) -> tuple[CheckpointFolder, dict[str, Piece | Value]]:
    _check_types(model, optimizer)
    folder = CheckpointFolder(dir)
    model_state = ModelState(model)
    entries = model_state.entries()
    if optimizer is not None:
        entries.update(OptimizerState(model, optimizer, model_state.locator).entries())
    return folder, entries


def _outline(entry: Piece | Value) -> str:
    return f"a tensor of shape {entry.shape}" if isinstance(entry, Piece) else "an object"


@dataclass(frozen=True)
class _Load:
    """A load that was found possible."""

    folder: Path
    metadata: Metadata
    model: ModelState
    optimizer: OptimizerState | None
    entries: dict[str, Piece | Value]

    def prepare(self) -> None:
        self.model.prepare()
        if self.optimizer is not None:
            self.optimizer.prepare()

    def commit(self) -> None:
        self.model.commit()
        if self.optimizer is not None:
            self.optimizer.commit()


def _plan_load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    dir: str | os.PathLike[str],
    convert_dtypes: bool,
    *,
    is_first: bool,
) -> _Load:
    _check_types(model, optimizer)
    folder = CheckpointFolder(dir).readable()
    metadata = read_metadata(folder)
    model_state = ModelState(model)
    entries = model_state.plan(metadata, convert_dtypes=convert_dtypes)
    if is_first:
        check_sizes(folder, metadata)
    optimizer_state = None
    if optimizer is not None:
        optimizer_state = OptimizerState(model, optimizer, model_state.locator)
        if DESCRIPTION not in metadata.state_dict_metadata:
            raise ValueError(
                f"{folder} has no optimizer state: expected {DESCRIPTION!r}, found the model "
                "alone (it was saved with optimizer=None); pass optimizer=None to load that"
            )
        description = read_value(folder, metadata, DESCRIPTION)
        entries.update(optimizer_state.plan(metadata, description))
    return _Load(folder, metadata, model_state, optimizer_state, entries)


def _check_types(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer or None, got {type(optimizer).__name__}"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # Said when there is no process group, which is fine here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
