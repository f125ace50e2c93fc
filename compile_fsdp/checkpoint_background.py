"""Background: saves that go on while training does, one at a time.

A thread writes. It talks to the other ranks' threads through a gloo process group that nobody
else uses, so its exchanges cannot mix with those of training, whatever the order in which ranks
get to them.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta

import torch.distributed as dist

_TIMEOUT = timedelta(minutes=30)


class PendingSave(Future[None]):
    """A save in the background; a ``concurrent.futures.Future``.

    ``result(timeout=None)`` waits for the new checkpoint to be in its place, or raises what went
    wrong, the same on every rank. ``done()`` does not wait. A save cannot be cancelled.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_asked = False
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is complete and in its place.

        Args:
            timeout: how long to wait, in seconds; None: until it is done.

        Raises:
            TimeoutError: it was not done by then; it goes on.
            RuntimeError: the save failed on some rank; the earlier checkpoint is as it was.
        """
        self._is_asked = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As `result`, but returns the error."""
        self._is_asked = True
        return super().exception(timeout)

    def __del__(self) -> None:
        if not self._is_asked and self.done() and (error := super().exception()) is not None:
            warnings.warn(
                f"a save in the background failed and nobody asked for its result(): {error}",
                RuntimeWarning,
                stacklevel=2,
            )


class Background:
    """Runs one save at a time; there is one for the process, whose thread and memory it uses."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
            weakref.WeakKeyDictionary()
        )

    def wait(self) -> None:
        """Return when no save is running; what became of it, its `PendingSave` tells."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def group(self) -> dist.ProcessGroup | None:
        """The process group that saves talk through; None without a default group.

        A collective, the first time: all ranks of the default group make it together.
        """
        default = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if default is None:
            return None
        if default not in self._groups:
            self._groups[default] = dist.new_group(
                backend="gloo", timeout=_TIMEOUT, group_desc="compile_fsdp_background_saves"
            )
        return self._groups[default]

    def start(self, job: Callable[[], None]) -> PendingSave:
        """Run ``job`` in a thread."""
        assert self._thread is None
        pending = PendingSave()
        # Not a daemon: a program that ends writes its last checkpoint first.
        self._thread = threading.Thread(
            target=_finish, args=(pending, job), name="compile_fsdp-save", daemon=False
        )
        self._thread.start()
        return pending


def _finish(pending: PendingSave, job: Callable[[], None]) -> None:
    error = _error_of(job)
    if error is None:
        pending.set_result(None)
    else:
        pending.set_exception(error)


def _error_of(job: Callable[[], None]) -> BaseException | None:
    """Apart from its caller, whose frame an error here must not keep alive with its future."""
    try:
        job()
    except BaseException as error:
        return error
    return None


background = Background()
"""The process's."""
