"""Processes that are killed in the middle of something, and what is left of their partners."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Before each of these the file system is in a state that a crash can leave behind.
_EVENTS = {"open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.link", "fsync"}


def die_before_event(number: int, parent: Path) -> None:
    """Have this process killed before the ``number``-th change of files below ``parent``."""
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event not in _EVENTS or (event == "open" and not _writes(arguments, parent)):
            return
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        hook("fsync", ())
        real_fsync(descriptor)

    os.fsync = fsync
    sys.addaudithook(hook)


def _writes(arguments: tuple[Any, ...], parent: Path) -> bool:
    path, _, flags = arguments
    writable = bool(flags & (os.O_WRONLY | os.O_RDWR))
    return writable and str(path).startswith(str(parent))


def join_pair(rank: int, folder: Path) -> None:
    """Become ``rank`` of the two processes that work on ``folder``."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder.parent / 'store'}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=120),
    )


def run_pair(body: Callable[..., None], folder: Path, dying: int, *arguments: Any) -> None:
    """Run ``body(rank, folder, dying, *arguments)`` on two ranks.

    ``dying`` must be killed and the other must end well, sooner than `join_pair`'s time-out.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.tensor.debug", "torch._dynamo"])
    processes = [
        context.Process(target=body, args=(rank, folder, dying, *arguments)) for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode is not None, "hangs"
    assert processes[dying].exitcode == -signal.SIGKILL
    assert processes[1 - dying].exitcode == 0
