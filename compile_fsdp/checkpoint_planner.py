"""What DCP asks of a checkpoint: which rows each rank writes and reads, from which file.

A checkpoint maps keys to `Piece` (this rank's part of a tensor) and `Value` (any other object,
the same on every rank). DCP would derive the parts of a DTensor by itself, from private methods
of its placements; saying them here keeps checkpoints right whatever torch does to placements::

    key w, shape (5, 4)   rank 0  Piece(local (3, 4), offset (0, 0))
                          rank 1  Piece(local (2, 4), offset (3, 0))
                          rank 2  Piece(local (0, 4), offset (5, 0))     writes nothing

Files are plain DCP: ``torch.distributed.checkpoint.load`` reads them too.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from compile_fsdp.runtime.dbuffer import DBuffer
from compile_fsdp.runtime.modes import without_autograd
from compile_fsdp.runtime.parameter_group import (
    FsdpParameterGroup,
    get_containing_parameter_group,
)

from .checkpoint_folder import METADATA


@dataclass(frozen=True)
class Piece:
    """This rank's part of a tensor.

    Attributes:
        local: the elements it holds; may have none.
        shape: of the whole tensor.
        offset: where ``local`` begins in the whole tensor, one number for each dim.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Place and size in DCP's terms."""
        return ChunkStorageMetadata(torch.Size(self.offset), self.local.shape)

    @property
    def is_needless(self) -> bool:
        """Whether the piece is empty although the tensor is not."""
        return self.local.numel() == 0 and math.prod(self.shape) > 0


@dataclass
class Value:
    """An object that is saved as it is, and replaced by a load."""

    value: object


Entries = Mapping[str, Piece | Value]


class Locator:
    """Finds this rank's part of tensors: parameters of groups, other DTensors, plain tensors.

    Args:
        tensors: those that will be asked for and may belong to a parameter group.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        groups: dict[FsdpParameterGroup, None] = {}
        for tensor in tensors:
            group = get_containing_parameter_group(tensor)
            if group is not None:
                groups[group] = None
        self._places = {
            id(parameter.sharded): (group.main_weight, index)
            for group in groups
            for index, parameter in enumerate(group.parameters)
        }

    def piece_of(self, tensor: torch.Tensor) -> Piece:
        """The part of ``tensor`` on this rank, aliasing its memory.

        A plain tensor is taken to be the same on every rank.

        Raises:
            RuntimeError: a DTensor that DCP locates wrongly.
        """
        shape = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            return Piece(tensor.detach(), shape, (0,) * len(shape))
        if id(tensor) in self._places:
            return _piece_of_buffer(*self._places[id(tensor)])
        # DTensor's side of DCP's protocol for tensors that know their own chunks.
        chunk = tensor.__create_chunk_list__()[0]
        with torch.no_grad():
            local = tensor.to_local()
        if chunk.sizes != local.shape:
            raise RuntimeError(
                f"a DTensor of shape {shape} and placements {tensor.placements} should hold a "
                f"local part of shape {tuple(chunk.sizes)}, found {tuple(local.shape)}"
            )
        return Piece(local, shape, tuple(chunk.offsets))

    def placements_of(self, parameter: DTensor) -> Sequence[Placement]:
        """The placements that a parameter's group gave it.

        Not those of the parameter: what torch derives from a tensor (on 2.14 even by ``detach``)
        may have a plain ``Shard(0)``, which means other rows.
        """
        if id(parameter) not in self._places:
            return parameter.placements
        buffer, index = self._places[id(parameter)]
        return buffer.get_dtensor(index).placements

    def is_cut_by_rows(self, parameter: torch.Tensor) -> bool:
        """Whether ``parameter`` belongs to a group that shards it."""
        place = self._places.get(id(parameter))
        return place is not None and any(isinstance(each, Shard) for each in place[0].placements)


def _piece_of_buffer(buffer: DBuffer, index: int) -> Piece:
    """Tensor ``index`` of ``buffer``: its rows begin where the buffer's segment does."""
    shape = buffer.tensor_shapes[index]
    offset = [0] * len(shape)
    width = math.prod(shape[1:])
    if shape and width:
        before = max(buffer.segment[0] - buffer.layout.tensor_to_offset[index], 0)
        offset[0] = min(before // width, shape[0])
    return Piece(buffer.get_local_tensor(index), shape, tuple(offset))


class SaveEntries(DefaultSavePlanner):
    """Plans the writing of ``entries``; what several ranks hold alike is written by one.

    DCP's own state dict stays empty: it would log, copy and flatten it entry by entry.
    """

    def __init__(self, entries: Entries) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._entries = entries
        self._snapshot: dict[str, torch.Tensor | io.BytesIO] = {}

    def create_local_plan(self) -> SavePlan:
        """What this rank could write; the coordinator takes duplicates out."""
        items = []
        for key, entry in self._entries.items():
            if isinstance(entry, Value):
                items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
            elif not entry.is_needless:
                data = TensorWriteData(
                    entry.chunk,
                    TensorProperties.create_from_tensor(entry.local),
                    torch.Size(entry.shape),
                )
                index = MetadataIndex(key, entry.offset)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def snapshot(self, plan: SavePlan) -> None:
        """Copy what ``plan`` writes to host memory, and let go of the entries."""
        for item in plan.items:
            entry = self._entries[item.index.fqn]
            if isinstance(entry, Piece):
                with without_autograd():
                    local = torch.empty_like(entry.local, device="cpu").copy_(entry.local)
                self._snapshot[item.index.fqn] = local
            else:
                self._snapshot[item.index.fqn] = _pickle(entry.value)
        self._entries = {}

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor | io.BytesIO:
        """The tensor or the pickled object to write."""
        if index.fqn in self._snapshot:
            return self._snapshot[index.fqn]
        entry = self._entries[index.fqn]
        return entry.local if isinstance(entry, Piece) else _pickle(entry.value)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Nothing more to do: DCP's own would pickle bytes."""
        return object


class LoadEntries(DefaultLoadPlanner):
    """Plans reading into ``entries``: pieces in place, values by replacing them."""

    def __init__(self, entries: Entries) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._entries = entries

    def create_local_plan(self) -> LoadPlan:
        """The parts of saved chunks that cover this rank's pieces.

        Raises:
            RuntimeError: the checkpoint has no data for some of a piece's elements.
        """
        assert self.metadata is not None
        items: list[ReadItem] = []
        for key, entry in self._entries.items():
            saved = self.metadata.state_dict_metadata[key]
            if isinstance(entry, Value) or isinstance(saved, BytesStorageMetadata):
                items.append(_read_value(key))
            elif entry.local.numel():
                parts = create_read_items_for_chunk_list(key, saved, [entry.chunk])
                covered = sum(math.prod(part.lengths) for part in parts)
                if covered != entry.local.numel():
                    raise RuntimeError(
                        f"the checkpoint is damaged: expected {entry.local.numel()} elements of "
                        f"{key!r} for this rank, found {covered}; load another checkpoint"
                    )
                items.extend(parts)
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take a value in."""
        entry = self._entries[read_item.dest_index.fqn]
        assert isinstance(entry, Value)
        entry.value = _unpickle(value)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Where in a piece the data goes."""
        entry = self._entries[read_item.dest_index.fqn]
        assert isinstance(entry, Piece)
        return narrowed(entry.local, read_item.dest_offsets, read_item.lengths)


def _read_value(key: str) -> ReadItem:
    index, nothing = MetadataIndex(key), torch.Size((0,))
    return ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)


def narrowed(tensor: torch.Tensor, offsets: Iterable[int], lengths: Iterable[int]) -> torch.Tensor:
    """The part of ``tensor`` that begins at ``offsets`` and has ``lengths``; a view."""
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


class CheckedReader(FileSystemReader):
    """Reads a checkpoint's files and proves each part that it reads.

    DCP stores each part as a zip archive, whose checksums ``torch.load`` does not look at.
    """

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._folder = folder
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What `read_metadata` has read already."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what ``plan`` asks for.

        Raises:
            RuntimeError: a part is missing, cut short or altered.
        """
        for item in plan.items:
            with _opened(self._folder, self._metadata, item.storage_index) as raw:
                if item.type is LoadItemType.BYTE_IO:
                    planner.load_bytes(item, raw)
                    continue
                saved: torch.Tensor = torch.load(raw, map_location="cpu", weights_only=True)
                target = planner.resolve_tensor(item)
                target.copy_(narrowed(saved, item.storage_offsets, item.lengths))
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def read_metadata(folder: Path) -> Metadata:
    """The description of a checkpoint: keys, shapes, dtypes, and which file has what.

    Raises:
        RuntimeError: it cannot be understood.
    """
    try:
        with open(folder / METADATA, "rb") as file:
            metadata = pickle.load(file)
    except Exception as error:  # a damaged pickle raises anything
        raise _damaged(folder / METADATA, f"{type(error).__name__}: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise _damaged(folder / METADATA, f"found a {type(metadata).__name__}")
    return metadata


def check_sizes(folder: Path, metadata: Metadata) -> None:
    """Raise RuntimeError when a data file is missing or is shorter than it was written."""
    sizes: dict[str, int] = {}
    for index, part in metadata.storage_data.items():
        path = folder / part.relative_path
        if part.relative_path not in sizes:
            sizes[part.relative_path] = os.path.getsize(path) if path.is_file() else -1
        end, size = part.offset + part.length, sizes[part.relative_path]
        if end > size:
            found = "no such file" if size < 0 else f"{size}"
            raise _damaged(path, f"expected {end} bytes for {index.fqn!r}, found {found}")


def read_value(folder: Path, metadata: Metadata, key: str) -> Any:
    """The object that was saved as a `Value` under ``key``.

    Raises:
        RuntimeError: it is damaged.
    """
    with _opened(folder, metadata, MetadataIndex(key)) as raw:
        return _unpickle(raw)


def _pickle(value: object) -> io.BytesIO:
    raw = io.BytesIO()
    torch.save(value, raw)
    return raw


def _unpickle(raw: io.BytesIO) -> Any:
    return torch.load(raw, map_location="cpu", weights_only=False)


@contextmanager
def _opened(folder: Path, metadata: Metadata, index: MetadataIndex) -> Iterator[io.BytesIO]:
    """The bytes of one chunk or value, proven to be those that were written.

    Whatever goes wrong with them, inside the context too, is a RuntimeError with their name.
    """
    part = metadata.storage_data[index]
    path = folder / part.relative_path
    try:
        with open(path, "rb") as file:
            file.seek(part.offset)
            raw = io.BytesIO(file.read(part.length))
        if zipfile.ZipFile(raw).testzip() is not None:
            raise zipfile.BadZipFile("the checksum differs")
        raw.seek(0)
        yield raw
    except Exception as error:  # a damaged archive raises anything
        found = f"found {type(error).__name__}: {str(error).partition('. ')[0]}"
        raise _damaged(path, f"expected the data of {index.fqn!r}, {found}") from error


@contextmanager
def checksums() -> Iterator[None]:
    """Have ``torch.save`` store checksums, whatever the user chose for other files."""
    previous = get_crc32_options()
    set_crc32_options(True)
    try:
        yield
    finally:
        set_crc32_options(previous)


def _damaged(path: Path, reason: str) -> RuntimeError:
    line = " ".join(reason.split())
    return RuntimeError(f"{path} is damaged: {line}; load another checkpoint")
