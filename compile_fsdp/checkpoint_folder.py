"""CheckpointFolder: a folder that holds the earlier checkpoint or the new one, never a mixture.

    ckpt/                       the checkpoint
    .ckpt.saving-<token>/       a save in progress, or one that crashed
    .ckpt.replaced-<token>/     the earlier checkpoint, from the first rename to the end

A save writes beside the checkpoint and swaps by two renames::

    write .saving -> rename ckpt to .replaced -> rename .saving to ckpt -> remove .replaced
                                              ^
                             a crash here leaves no ckpt, and two complete folders

A reader that finds neither ckpt nor anything but that pair reads ``.saving``: the first rename
happens only when all of it is on disk. The next save finishes the swap and clears leftovers.

Every method that writes is for one process, whichever rank that is. No torch here.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

METADATA = ".metadata"
"""The file that DCP writes last; a folder without it is no checkpoint."""


def is_dcp_file(name: str) -> bool:
    """Whether DCP wrote the file ``name``."""
    return name == METADATA or name.endswith(".distcp")


class CheckpointFolder:
    """One checkpoint's folder.

    Args:
        path: where the checkpoint is, or will be. Links are followed, so that a link to a
            checkpoint stays a link.
        is_part: tells by its name whether a file is part of a checkpoint. Others are kept.
        markers: files of which a complete checkpoint has one.

    Raises:
        TypeError: ``path`` is no path.
        ValueError: ``path`` is the root of a file system or is a file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        is_part: Callable[[str], bool] = is_dcp_file,
        markers: tuple[str, ...] = (METADATA,),
    ) -> None:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"a checkpoint's dir must be a path, got {type(path).__name__}")
        self._is_part = is_part
        self._markers = markers
        self.path = Path(os.path.realpath(path))
        if not self.path.name:
            raise ValueError(f"{self.path} cannot hold a checkpoint itself; name a folder in it")
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file; a checkpoint is a folder, pass another path")

    # Reading ----------------------------------------------------------------------------------

    def readable(self) -> Path:
        """The folder to read the checkpoint from.

        Raises:
            FileNotFoundError: there is no checkpoint.
        """
        folder = self._interrupted_swap() or self.path
        if not folder.is_dir():
            raise FileNotFoundError(
                f"no checkpoint at {self.path}: expected a folder that save_checkpoint wrote, "
                "found nothing; check the path"
            )
        if not (folder / METADATA).is_file():
            found = sorted(entry.name for entry in folder.iterdir())
            listed = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
            raise FileNotFoundError(
                f"{folder} is not a checkpoint: expected a file {METADATA} in it, found "
                f"{listed or 'an empty folder'}; pass the folder that save_checkpoint wrote"
            )
        return folder

    # Writing ----------------------------------------------------------------------------------

    def begin(self) -> Path:
        """A new empty folder beside the checkpoint to write the next one into.

        Puts right what an interrupted save left behind first.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        interrupted = self._interrupted_swap()
        if interrupted is not None:
            interrupted.rename(self.path)
        for kind in ("saving", "replaced"):
            for leftover in self._siblings(kind).values():
                shutil.rmtree(leftover, ignore_errors=True)
        scratch = self._sibling("saving", secrets.token_hex(8))
        scratch.mkdir()
        return scratch

    def commit(self, scratch: Path) -> None:
        """Make ``scratch``, complete and on disk, the checkpoint.

        Files in the earlier folder that are not part of a checkpoint (a tokenizer beside the
        weights) are kept.
        """
        if self.path.exists():
            self._carry_over(scratch)
        _sync_folder(scratch)
        token = scratch.name.rpartition("-")[2]
        replaced = self._sibling("replaced", token)
        try:
            if self.path.exists():
                self.path.rename(replaced)
            scratch.rename(self.path)
        except BaseException:  # an interrupt by the user too
            if replaced.exists() and not self.path.exists():
                replaced.rename(self.path)
            raise
        _sync_folder(self.path.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    def discard(self, scratch: Path) -> None:
        """Remove ``scratch`` after a save that failed, unless it is what readers have now."""
        if scratch != self._interrupted_swap():
            shutil.rmtree(scratch, ignore_errors=True)

    # Names ------------------------------------------------------------------------------------

    def _sibling(self, kind: str, token: str) -> Path:
        return self.path.with_name(f".{self.path.name}.{kind}-{token}")

    def _siblings(self, kind: str) -> dict[str, Path]:
        """Folders of ``kind`` beside the checkpoint, by token."""
        pattern = re.compile(rf"\.{re.escape(self.path.name)}\.{kind}-([0-9a-f]{{16}})")
        found: dict[str, Path] = {}
        if self.path.parent.is_dir():
            for entry in self.path.parent.iterdir():
                match = pattern.fullmatch(entry.name)
                if match is not None:
                    found[match.group(1)] = entry
        return found

    def _interrupted_swap(self) -> Path | None:
        """The complete new folder when a save died between its two renames."""
        if self.path.exists():
            return None
        replaced = self._siblings("replaced")
        for token, scratch in self._siblings("saving").items():
            is_complete = any((scratch / marker).is_file() for marker in self._markers)
            if token in replaced and is_complete:
                return scratch
        return None

    def _carry_over(self, scratch: Path) -> None:
        new = {entry.name for entry in scratch.iterdir()}

        def not_kept(folder: str, names: list[str]) -> set[str]:
            if folder != str(self.path):
                return set()
            return {name for name in names if name in new or self._is_part(name)}

        shutil.copytree(
            str(self.path),
            scratch,
            symlinks=True,
            ignore=not_kept,
            copy_function=_link_or_copy,
            dirs_exist_ok=True,
        )


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target, follow_symlinks=False)


def _sync_folder(folder: Path) -> None:
    """Have the names in ``folder`` on disk before what follows; files are synced by who wrote."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems refuse to sync a folder
        pass
    finally:
        os.close(descriptor)
