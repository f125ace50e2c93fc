"""import_safetensors: a sharded model gets the weights of a Hugging Face folder.

Each rank reads the headers of all files and the data of its own rows only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .checkpoint_background import background
from .checkpoint_planner import Piece
from .checkpoint_ranks import Ranks
from .checkpoint_state import ModelState
from .safetensors_format import DTYPES, INDEX, SINGLE

__all__ = ["import_safetensors"]

# How many names of one kind a message has.
_MOST_NAMES = 5

_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def import_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    rename: Callable[[str], str | None] | None = None,
) -> None:
    """Load the weights that ``save_pretrained`` or `export_safetensors` wrote, in place.

    Every rank calls this with the same arguments, between steps. A rank reads its own rows alone,
    and has them in host memory once, besides their place on the device. Floating-point values are
    converted to the main weights' dtype. Of a tied tensor one name is enough. If anything is wrong
    on any rank, all ranks raise and the model is as it was. An optimizer keeps its state.

    Args:
        model: has the FQNs and shapes of the files; sharded in any way (also after it was made on
            the meta device), or plain.
        folder: has ``model.safetensors``, or several files and ``model.safetensors.index.json``.
        rename: gives for a name in the files the model's, or None to leave that tensor out. The
            same on every rank.

    Raises:
        TypeError: an argument has the wrong type.
        FileNotFoundError: there are no such files.
        ImportError: the package safetensors is not installed.
        ValueError: names, shapes or dtypes are not the model's. The message has them.
        RuntimeError: a file is damaged, or the model is in the middle of a step.
    """
    background.wait()
    ranks = Ranks()
    state = ranks.together(lambda: _read(model, folder, rename))
    ranks.together(state.commit)


def _read(
    model: nn.Module,
    folder: str | os.PathLike[str],
    rename: Callable[[str], str | None] | None,
) -> ModelState:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"folder must be a path, got {type(folder).__name__}")
    state = ModelState(model)
    state.check_at_rest()
    pieces = state.pieces()
    with ExitStack() as stack:
        saved = _open_all(_files(Path(folder)), rename, stack)
        _check(state, pieces, saved, Path(folder))
        state.take({name: saved[name].read(pieces[name]) for name in saved})
    state.prepare()
    return state


@dataclass(frozen=True)
class _Saved:
    """A tensor in a file."""

    path: Path
    file: Any
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | str

    def read(self, target: Piece) -> Piece:
        """The rows that belong into ``target``, in new host memory and the file's dtype."""
        assert isinstance(self.dtype, torch.dtype)
        with torch.inference_mode(False):
            local = torch.empty(target.local.shape, dtype=self.dtype)
            if local.numel():
                with _explained(self.path, self.name):
                    local.copy_(self._rows(target).view(local.shape))
        return Piece(local, target.shape, target.offset)

    def _rows(self, target: Piece) -> torch.Tensor:
        if not self.shape:
            whole: torch.Tensor = self.file.get_tensor(self.name)
            return whole
        lengths = zip(target.offset, target.local.shape, strict=True)
        slices = tuple(slice(start, start + length) for start, length in lengths)
        rows: torch.Tensor = self.file.get_slice(self.name)[slices]
        return rows


def _files(folder: Path) -> list[Path]:
    """The files of weights in ``folder``."""
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        with _explained(index, "the index"):
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        paths = [folder / name for name in names]
    elif single.is_file():
        paths = [single]
    else:
        found = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
        listed = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
        raise FileNotFoundError(
            f"no weights at {folder}: expected {SINGLE} or {INDEX}, found {listed or 'nothing'}; "
            "pass the folder that save_pretrained or export_safetensors wrote"
        )
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: expected the file that {INDEX} names, found nothing; get it "
                "again"
            )
    return paths


def _open_all(
    paths: Iterable[Path], rename: Callable[[str], str | None] | None, stack: ExitStack
) -> dict[str, _Saved]:
    """The tensors of all files by the model's names; the files stay open as long as ``stack``."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            "import_safetensors needs the package safetensors, which is not installed: "
            "pip install 'compile_fsdp[safetensors]'"
        ) from error
    saved: dict[str, _Saved] = {}
    for path in paths:
        with _explained(path, "a safetensors file"):
            file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            names = list(file.keys())
        for name in names:
            fqn = name if rename is None else rename(name)
            if fqn is None:
                continue
            if fqn in saved:
                raise ValueError(
                    f"{path.parent} has {fqn!r} twice, as {saved[fqn].name!r} and {name!r}: "
                    "expected one; give the other another name, or None, in rename"
                )
            view = file.get_slice(name)
            dtype = _TORCH_DTYPES.get(view.get_dtype(), view.get_dtype())
            saved[fqn] = _Saved(path, file, name, tuple(view.get_shape()), dtype)
    return saved


def _check(
    state: ModelState, pieces: dict[str, Piece], saved: dict[str, _Saved], folder: Path
) -> None:
    """Raise ValueError with everything in which the files are not the model's."""
    problems = []
    missing = [
        names[0] for names in state.names_by_tensor() if not any(name in saved for name in names)
    ]
    missing += state.extra_names
    if missing:
        problems.append(f"expected {_listed(missing)}, which the files lack")
    unexpected = [name for name in saved if name not in pieces]
    if unexpected:
        problems.append(f"found {_listed(unexpected)}, which the model does not have")
    for name, found in saved.items():
        if name not in pieces:
            continue
        expected = pieces[name]
        if found.shape != expected.shape:
            problems.append(f"expected {name!r} of shape {expected.shape}, found {found.shape}")
        elif not _converts(found.dtype, expected.local.dtype):
            problems.append(f"expected {name!r} of {expected.local.dtype}, found {found.dtype}")
    if problems:
        more = len(problems) - _MOST_NAMES
        shown = "; ".join(problems[:_MOST_NAMES]) + (f"; and {more} more" if more > 0 else "")
        raise ValueError(
            f"{folder} is of another model: {shown}; build the model that was saved, or map names "
            "with rename="
        )


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    shown = ", ".join(map(repr, names[:_MOST_NAMES]))
    return shown + (f" and {more} more" if more > 0 else "")


def _converts(found: torch.dtype | str, expected: torch.dtype) -> bool:
    if not isinstance(found, torch.dtype):
        return False
    return found == expected or (found.is_floating_point and expected.is_floating_point)


@contextmanager
def _explained(path: Path, what: str) -> Iterator[None]:
    """Whatever goes wrong with a file is a RuntimeError with its name."""
    try:
        yield
    except Exception as error:  # SafetensorError, OSError, what a damaged JSON raises
        reason = " ".join(str(error).split())
        raise RuntimeError(
            f"{path} is damaged: expected {what}, found {type(error).__name__}: {reason}; get it "
            "again"
        ) from error
