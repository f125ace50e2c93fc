"""save_checkpoint and load_checkpoint: sharded training state on disk, for any number of ranks.

The files are those of ``torch.distributed.checkpoint`` (DCP): every rank writes and reads its own
rows. What this adds is in four places: `checkpoint_folder` (a crash never costs the earlier
checkpoint), `checkpoint_planner` (which rows a rank has; damage is noticed), `checkpoint_state`
and `checkpoint_optimizer` (names, and nothing is changed before everything was checked). Here is
the order of events, in which every step ends with all ranks agreeing that it went well.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from .checkpoint_folder import CheckpointFolder
from .checkpoint_optimizer import OptimizerState
from .checkpoint_planner import (
    CheckedReader,
    LoadEntries,
    Piece,
    SaveEntries,
    Value,
    check_sizes,
    checksums,
    read_metadata,
    read_value,
)
from .checkpoint_state import DESCRIPTION, ModelState

__all__ = ["load_checkpoint", "save_checkpoint"]

T = TypeVar("T")


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
    ranks = _Ranks()
    folder, entries = ranks.together(lambda: _what_to_save(model, optimizer, dir))
    ranks.agree({"dir": str(folder.path), **{key: _outline(entries[key]) for key in entries}})
    scratch: Path | None = None
    try:
        with _explained(f"save_checkpoint: {folder.path} could not be written and is unchanged"):
            complete = scratch = ranks.first(folder.begin)
            with checksums(), _quiet():
                dcp_save(
                    {},
                    storage_writer=FileSystemWriter(scratch),
                    planner=SaveEntries(entries),
                    no_dist=not ranks.distributed,
                )
        with _explained(f"save_checkpoint: {folder.path} may or may not have been replaced"):
            ranks.first(lambda: folder.commit(complete))
    except BaseException:
        if ranks.rank == 0 and scratch is not None:
            folder.discard(scratch)
        raise


def load_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    dir: str | os.PathLike[str],
) -> None:
    """Load what `save_checkpoint` wrote, in place, whatever the numbers of ranks and the meshes.

    Every rank of the default process group calls this with the same arguments, between steps.
    Values come back bit for bit (converted where the model has another dtype). If anything is
    wrong on any rank, all ranks raise and model and optimizer are as they were. The whole of
    what a rank loads is in host memory once, besides its place on the device.

    An optimizer gets state, step counts and options (learning rates and so on) back, also if it
    never stepped; it keeps its own choice of implementation (``foreach``, ``fused``,
    ``capturable``, ``differentiable``). Checkpoints hold pickled objects: load those you trust.

    Args:
        model: has the FQNs and shapes that were saved; sharded in any way, or plain.
        optimizer: of the kind that was saved, over the same parameters; None leaves the
            checkpoint's optimizer state alone.
        dir: the folder.

    Raises:
        TypeError: an argument has the wrong type.
        FileNotFoundError: ``dir`` does not exist or holds no checkpoint.
        ValueError: the checkpoint is of another model or optimizer, or has no optimizer state.
        RuntimeError: files are missing or damaged, or the model is in the middle of a step.
    """
    ranks = _Ranks()
    load = ranks.together(lambda: _plan_load(model, optimizer, dir, is_first=ranks.rank == 0))
    ranks.agree({"dir": str(load.folder)})
    with _explained(f"load_checkpoint: {load.folder} could not be read, nothing was loaded"):
        with _quiet():
            dcp_load(
                {},
                storage_reader=CheckedReader(load.folder, load.metadata),
                planner=LoadEntries(load.entries),
                no_dist=not ranks.distributed,
            )
        ranks.together(load.prepare)
    ranks.together(load.commit)


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
    *,
    is_first: bool,
) -> _Load:
    _check_types(model, optimizer)
    folder = CheckpointFolder(dir).readable()
    metadata = read_metadata(folder)
    model_state = ModelState(model)
    entries = model_state.plan(metadata)
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


# Agreement between ranks ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Failure:
    """An exception, as one rank tells the others."""

    kind: type[Exception]
    message: str

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        for kind in _KINDS:
            if isinstance(error, kind):
                return cls(kind, " ".join(str(error).split()))
        return cls(RuntimeError, " ".join(f"{type(error).__name__}: {error}".split()))


_KINDS = (FileNotFoundError, ValueError, TypeError, RuntimeError)


class _Ranks:
    """The ranks of the default process group; this process alone when there is none."""

    def __init__(self) -> None:
        self.distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self.distributed else 0

    def together(self, step: Callable[[], T]) -> T:
        """Run ``step`` on every rank. If it fails on any, all raise the first one's error."""
        error: BaseException | None = None
        value: T | None = None
        try:
            value = step()
        except BaseException as caught:
            error = caught
        failures = self._gather(None if error is None else _Failure.of(error))
        if error is not None and not isinstance(error, Exception):
            raise error
        for rank, failure in enumerate(failures):
            if failure is not None:
                where = f" (on rank {rank})" if None in failures else ""
                raise failure.kind(f"{failure.message}{where}") from error
        return cast(T, value)

    def first(self, step: Callable[[], T]) -> T:
        """Run ``step`` on rank 0 and return its value on every rank, or raise on every rank."""
        value = self.together(lambda: step() if self.rank == 0 else None)
        return cast(T, self._gather(value)[0])

    def agree(self, values: Mapping[str, str]) -> None:
        """Raise ValueError on every rank when ``values`` are not the same on all of them."""
        digest = hashlib.sha256(repr(sorted(values.items())).encode()).digest()
        if len(set(self._gather(digest))) == 1:
            return
        everyone = self._gather(dict(values))
        for rank, other in enumerate(everyone):
            for name in sorted({*everyone[0], *other}):
                expected, found = everyone[0].get(name, "nothing"), other.get(name, "nothing")
                if expected != found:
                    raise ValueError(
                        f"ranks disagree on {name}: rank 0 has {expected}, rank {rank} has "
                        f"{found}; call with the same model, optimizer and dir on every rank"
                    )

    def _gather(self, value: T) -> list[T]:
        if not self.distributed:
            return [value]
        values: list[T | None] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return cast("list[T]", values)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn errors of DCP, of files and of communication into one that says what became of it."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        failure = _Failure.of(cause)
        raise failure.kind(f"{what}: {failure.message} (on rank {rank})") from error
    except (OSError, RuntimeError) as error:
        failure = _Failure.of(error)
        raise failure.kind(f"{what}: {failure.message}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # Said when there is no process group, which is fine here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
