"""The folders that Hugging Face libraries read: safetensors files and their index.

    folder/config.json                           of a Hugging Face model
    folder/model.safetensors                     one file, or ...
    folder/model-00001-of-00002.safetensors      ... several,
    folder/model.safetensors.index.json          and which of them has what

A file is the length of its header (8 bytes, little endian), the header (JSON: dtype, shape and
place of every tensor) and the tensors, one after the other. Files are written from their header on,
so that no more than one tensor must be in memory. No communication here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.float64: "F64",
}
"""What the format has, by torch's dtypes."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file: its name, full shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FilePlan:
    """A file to write: its name and its tensors, in the order of their data."""

    name: str
    tensors: tuple[TensorEntry, ...]

    def header(self) -> bytes:
        """What stands before the data; the data begins at a multiple of 8 bytes."""
        content: dict[str, object] = {"__metadata__": {"format": "pt"}}
        start = 0
        for tensor in self.tensors:
            content[tensor.name] = {
                "dtype": DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, start + tensor.nbytes],
            }
            start += tensor.nbytes
        text = json.dumps(content, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def plan_files(tensors: Sequence[TensorEntry], max_shard_bytes: int) -> list[FilePlan]:
    """Divide ``tensors`` into files of at most ``max_shard_bytes`` of data, in their order.

    A tensor that is larger has a file to itself. In a file the widest dtypes come first, so that
    every tensor is aligned for its dtype.
    """
    groups: list[list[TensorEntry]] = [[]]
    room = max_shard_bytes
    for tensor in tensors:
        if groups[-1] and tensor.nbytes > room:
            groups.append([])
            room = max_shard_bytes
        groups[-1].append(tensor)
        room -= tensor.nbytes
    names = [SINGLE]
    if len(groups) > 1:
        count = len(groups)
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    return [
        FilePlan(name, tuple(sorted(group, key=lambda each: -each.dtype.itemsize)))
        for name, group in zip(names, groups, strict=True)
    ]


def index_of(files: Iterable[FilePlan]) -> str:
    """The text of the index of several files."""
    tensors = [(tensor, file.name) for file in files for tensor in file.tensors]
    content = {
        "metadata": {
            "total_parameters": sum(math.prod(tensor.shape) for tensor, _ in tensors),
            "total_size": sum(tensor.nbytes for tensor, _ in tensors),
        },
        "weight_map": {tensor.name: name for tensor, name in sorted(tensors, key=_by_name)},
    }
    return json.dumps(content, indent=2) + "\n"


def is_weights_file(name: str) -> bool:
    """Whether an earlier export wrote ``name``, which holds or lists weights."""
    return name == INDEX or (name.startswith("model") and name.endswith(".safetensors"))


def _by_name(item: tuple[TensorEntry, str]) -> str:
    return item[0].name
