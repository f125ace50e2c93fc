"""export_safetensors: a sharded model as the folder of a Hugging Face model.

Rank 0 writes. Tensor by tensor it gets from each other rank the rows that it lacks::

    rank 0   own rows | from 1 | from 2 -> file      next tensor ...
    rank 1       rows ->  0                              rows -> 0
    rank 2                rows -> 0

so it has one whole tensor in host memory at a time, and the others a piece of one.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from .checkpoint_background import background
from .checkpoint_folder import CheckpointFolder
from .checkpoint_planner import Piece, narrowed
from .checkpoint_ranks import Ranks, explained
from .checkpoint_state import ModelState
from .safetensors_format import (
    DTYPES,
    INDEX,
    SINGLE,
    FilePlan,
    TensorEntry,
    index_of,
    is_weights_file,
    plan_files,
)
from .torch_internals import without_compile_wrapper

__all__ = ["export_safetensors"]

MAX_SHARD_BYTES = 5_000_000_000

# Where a piece begins in its tensor, and its shape.
_Place = tuple[tuple[int, ...], tuple[int, ...]]


def export_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the model's main weights and persistent buffers as ``folder`` for Hugging Face.

    Every rank calls this with the same arguments, between steps. Names are the model's FQNs; a
    tied tensor is written once, under the first of its names, and is tied again by who loads it.
    A Hugging Face model's ``config`` and ``generation_config`` are written too, so that
    ``from_pretrained(folder)`` loads the model. Files in ``folder`` that are not weights of an
    earlier export or a configuration are kept. As with `save_checkpoint`, the folder holds the
    earlier export until the new one is complete.

    Args:
        model: a sharded model, also one wrapped by ``torch.compile``; or a plain module.
        folder: where to; only rank 0 must see it.
        dtype: of the floating-point tensors in the files; None: as they are, which is the main
            weights' dtype.
        max_shard_bytes: the most data of one file. If everything fits into one, that is
            ``model.safetensors``, or else there is an index. A larger tensor has its own file.

    Raises:
        TypeError, ValueError: an argument is wrong, or something in the model has no place in
            such a file (extra state, a dtype that the format lacks).
        RuntimeError: writing failed.
    """
    background.wait()
    ranks = Ranks()
    export = ranks.together(lambda: _planned(model, folder, dtype, max_shard_bytes))
    ranks.agree({file.name: str(file.tensors) for file in export.files})
    through = Ranks(background.group())
    scratch: Path | None = None
    try:
        with explained(f"export_safetensors: {export.folder.path} could not be written"):
            scratch = ranks.first(export.folder.begin)
            export.write(scratch, through)
            ranks.first(lambda: export.publish(scratch))
    except BaseException:
        if ranks.rank == 0 and scratch is not None:
            export.folder.discard(scratch)
        raise


@dataclass(frozen=True)
class _Export:
    """What to write where, and what this rank has of it."""

    model: nn.Module
    folder: CheckpointFolder
    files: list[FilePlan]
    pieces: dict[str, Piece]

    def write(self, scratch: Path, ranks: Ranks) -> None:
        """Write the weights into ``scratch``, which rank 0 sees.

        Raises:
            RuntimeError: on every rank when rank 0 cannot write, or parts are missing.
        """
        routes, own = self._routes(ranks)
        output = _Output(scratch) if ranks.rank == 0 else None
        for file in self.files:
            if output is not None:
                output.start(file)
            for entry in file.tensors:
                if output is not None:
                    output.add(self._whole(entry, routes[entry.name], ranks))
                elif entry.name in own:
                    ranks.send_to_first(self._converted(entry))
        ranks.together(lambda: None if output is None else output.finish())

    def publish(self, scratch: Path) -> None:
        """Add index and configuration, and put ``scratch`` in its place."""
        if len(self.files) > 1:
            (scratch / INDEX).write_text(index_of(self.files), encoding="utf-8")
        _write_configuration(self.model, self.files, scratch)
        self.folder.commit(scratch)

    def _routes(self, ranks: Ranks) -> tuple[dict[str, dict[_Place, int]], frozenset[str]]:
        """On rank 0 which rank gives which part of each tensor; and what this rank gives.

        Of those that have the same part the first gives it.
        """
        places = {
            name: (piece.offset, tuple(piece.local.shape))
            for name, piece in self.pieces.items()
            if not piece.is_needless
        }
        routes: dict[str, dict[_Place, int]] = {}
        gives: list[set[str]] = [set() for _ in range(ranks.size)]
        for rank, theirs in enumerate(ranks.to_first(places)):
            for name, place in theirs.items():
                if routes.setdefault(name, {}).setdefault(place, rank) == rank:
                    gives[rank].add(name)
        ranks.together(lambda: self._check(routes) if ranks.rank == 0 else None)
        return routes, frozenset(ranks.from_first(gives))

    def _check(self, routes: dict[str, dict[_Place, int]]) -> None:
        for file in self.files:
            for entry in file.tensors:
                found = sum(math.prod(shape) for _, shape in routes[entry.name])
                if found != math.prod(entry.shape):
                    raise RuntimeError(
                        f"{entry.name!r}: expected ranks to hold its {math.prod(entry.shape)} "
                        f"elements once, found {found}; shard it with fully_shard"
                    )

    def _whole(self, entry: TensorEntry, parts: dict[_Place, int], ranks: Ranks) -> torch.Tensor:
        """The whole of a tensor, on rank 0, in host memory and contiguous."""
        whole = torch.empty(entry.shape, dtype=entry.dtype)
        for (offset, shape), rank in parts.items():
            target = narrowed(whole, offset, shape)
            if rank == ranks.rank:
                target.copy_(self.pieces[entry.name].local)
            elif target.is_contiguous() and target.numel():
                ranks.receive_from(rank, target)
            elif target.numel():
                received = torch.empty(shape, dtype=entry.dtype)
                ranks.receive_from(rank, received)
                target.copy_(received)
        return whole

    def _converted(self, entry: TensorEntry) -> torch.Tensor:
        """This rank's part of a tensor as it is sent."""
        return self.pieces[entry.name].local.to("cpu", entry.dtype).contiguous()


class _Output:
    """The files that rank 0 writes.

    After a failure it drops what it is given, so that no rank is left alone with what it sends;
    `finish` tells.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None
        self._failure: OSError | None = None

    def start(self, file: FilePlan) -> None:
        """Begin the next file."""
        with self._guarded():
            self._close()
            self._file = open(self._folder / file.name, "wb")
            self._file.write(file.header())

    def add(self, tensor: torch.Tensor) -> None:
        """Append the data of a contiguous tensor in host memory."""
        with self._guarded():
            if self._file is not None and tensor.numel():
                self._file.write(tensor.view(-1).view(torch.uint8).numpy().data)

    def finish(self) -> None:
        """Have everything on disk.

        Raises:
            OSError: something could not be written.
        """
        with self._guarded():
            self._close()
        if self._failure is not None:
            raise self._failure

    def _close(self) -> None:
        if self._file is not None:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file = None

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failure = self._failure or error
            self._file = None


def _planned(
    model: nn.Module,
    folder: str | os.PathLike[str],
    dtype: torch.dtype | None,
    max_shard_bytes: int,
) -> _Export:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating-point torch.dtype or None, got {dtype!r}")
    if not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be a positive int, got {max_shard_bytes!r}")
    target = CheckpointFolder(folder, is_part=is_weights_file, markers=(SINGLE, INDEX))
    state = ModelState(model)
    if state.extra_names:
        raise ValueError(
            f"the model has extra state {state.extra_names[0]!r}: expected tensors only, which is "
            "all that safetensors files hold; use save_checkpoint, or give the module none"
        )
    pieces = state.pieces()
    tensors = []
    for names in state.names_by_tensor():
        piece = pieces[names[0]]
        wanted = piece.local.dtype
        if dtype is not None and wanted.is_floating_point:
            wanted = dtype
        if wanted not in DTYPES:
            raise ValueError(
                f"{names[0]!r} is {wanted}: expected one of "
                f"{', '.join(str(each).removeprefix('torch.') for each in DTYPES)}, which is what "
                "safetensors files hold; use save_checkpoint"
            )
        tensors.append(TensorEntry(names[0], piece.shape, wanted))
    return _Export(model, target, plan_files(tensors, max_shard_bytes), pieces)


def _write_configuration(model: nn.Module, files: list[FilePlan], folder: Path) -> None:
    """What ``from_pretrained`` reads beside the weights, if the model is from Hugging Face."""
    model = without_compile_wrapper(model)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)
    if not hasattr(getattr(model, "config", None), "save_pretrained"):
        return
    config: Any = copy.deepcopy(model.config)
    original = getattr(type(model), "_fsdp_original_class", type(model))
    config.architectures = [original.__name__]
    dtypes = [entry.dtype for file in files for entry in file.tensors]
    floating = [each for each in dtypes if each.is_floating_point]
    if floating and hasattr(config, "dtype"):
        config.dtype = floating[0]
    config.save_pretrained(folder)
