"""Bytes to train on: the standard library's sources, or a file or folder of the user's.

What a rank trains on in a step is a pure function of the seed, the step and the rank, so a
resumed run goes on exactly where the saved one would have.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lm.errors import InputError

MAX_BYTES = 256 * 2**20
SEPARATOR = b"\0"

# Tests, generated tables and bundled packages would teach the model little about the language.
_STDLIB_SKIPPED = frozenset(
    "dist-packages encodings ensurepip idlelib lib2to3 pydoc_data site-packages test tests "
    "turtledemo __pycache__".split()
)


@dataclass(frozen=True)
class Corpus:
    """Training and validation bytes, each a 1-D uint8 tensor on the CPU."""

    name: str
    train: Tensor
    validation: Tensor
    files: int
    digest: str


@dataclass(frozen=True)
class BatchShape:
    """How a step's sequences are divided: over ranks, then over microbatches."""

    batch: int
    length: int
    accumulate: int
    world_size: int

    @property
    def sequences_per_step(self) -> int:
        return self.batch * self.accumulate * self.world_size

    @property
    def tokens_per_step(self) -> int:
        return self.sequences_per_step * self.length


def load_corpus(path: Path | None, length: int) -> Corpus:
    """Read and split the data; `path=None` reads the standard library's sources.

    A twentieth is kept for validation: every twentieth file, or the end of a smaller number of
    files taken together. Raises InputError when there is too little for sequences of `length`.
    """
    files = _stdlib_files() if path is None else _user_files(path)
    name = "the standard library's sources" if path is None else str(path)
    option = name if path is None else f"--data {path}"
    documents = list(_read(files))
    if not documents:
        raise InputError(f"{option}: holds no bytes; give a file or a folder with text in it")
    train, validation = _split(documents)
    for part, data in (("training", train), ("validation", validation)):
        if len(data) <= length:
            raise InputError(
                f"{option}: {len(data)} bytes for {part} are too few for sequences of"
                f" {length}; give more data or a smaller --length"
            )
    digest = hashlib.blake2b(train, digest_size=16)
    digest.update(validation)
    return Corpus(name, _tensor(train), _tensor(validation), len(documents), digest.hexdigest())


def training_batch(
    corpus: Corpus, shape: BatchShape, *, seed: int, step: int, micro: int, rank: int
) -> tuple[Tensor, Tensor]:
    """Tokens and the tokens that follow them, each int64 (batch, length).

    Every rank draws the offsets of the whole step and takes its own.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    last = len(corpus.train) - shape.length
    offsets = torch.randint(last, (shape.sequences_per_step,), generator=generator)
    first = (micro * shape.world_size + rank) * shape.batch
    return _windows(corpus.train, offsets[first : first + shape.batch], shape.length)


def validation_batches(
    corpus: Corpus, shape: BatchShape, *, count: int, rank: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """`count` batches a rank, spread evenly over the validation bytes; the same in every run."""
    last = len(corpus.validation) - shape.length - 1
    total = count * shape.world_size * shape.batch
    offsets = torch.linspace(0, last, total, dtype=torch.float64).long()
    for mine in offsets.split(shape.batch)[rank :: shape.world_size]:
        yield _windows(corpus.validation, mine, shape.length)


def _windows(data: Tensor, offsets: Tensor, length: int) -> tuple[Tensor, Tensor]:
    windows = data[offsets[:, None] + torch.arange(length + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _tensor(data: bytearray) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)


def _split(documents: list[bytes]) -> tuple[bytearray, bytearray]:
    every = 20
    if len(documents) >= every:
        held_out = documents[every - 1 :: every]
        kept = [doc for index, doc in enumerate(documents) if index % every != every - 1]
        return bytearray(SEPARATOR.join(kept)), bytearray(SEPARATOR.join(held_out))
    whole = bytearray(SEPARATOR.join(documents))
    cut = len(whole) - len(whole) // every
    return whole[:cut], whole[cut:]


def _read(files: Iterable[Path]) -> Iterator[bytes]:
    """Contents of the files that are not empty, up to MAX_BYTES in all."""
    left = MAX_BYTES
    for file in files:
        try:
            with file.open("rb") as stream:
                content = stream.read(left)
        except OSError as error:
            raise InputError(
                f"--data: cannot read {file}: {error.strerror}; make it readable or leave it out"
            ) from error
        left -= len(content)
        if content:
            yield content
        if left == 0:
            return


def _user_files(path: Path) -> list[Path]:
    if not path.exists():
        raise InputError(f"--data {path}: no such file or folder; give one, or leave --data out")
    if not path.is_dir():
        return [path]
    return [file for file in _walk(path, frozenset({"__pycache__"})) if file.is_file()]


def _stdlib_files() -> list[Path]:
    folder = Path(sysconfig.get_path("stdlib"))
    files = [file for file in _walk(folder, _STDLIB_SKIPPED) if file.suffix == ".py"]
    if not files:
        raise InputError(f"no Python sources in {folder}; name your own text with --data")
    return files


def _walk(folder: Path, skipped: frozenset[str]) -> Iterator[Path]:
    """Files below the folder in a fixed order; hidden files and links to folders are left out."""

    def refuse(error: OSError) -> None:
        raise InputError(
            f"--data: cannot list {error.filename}: {error.strerror}; make it readable"
        ) from error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(f for f in folders if f not in skipped and not f.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(parent, name)
