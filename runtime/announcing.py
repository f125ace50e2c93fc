"""Collectives under way: announced to the other ranks, started, waited for, and errors named.

    announce   the ranks agree on what comes next (`compile_fsdp.runtime.agreement`)
    start      an error of the backend is named
    wait       on the host with one eye on the other ranks; on CUDA the stream waits, and what the
               backend finds out then (an aborted communicator) is named as well

With ``COMPILE_FSDP_LOG_COLLECTIVES=1`` in the environment each is a line on standard error, with
the number that NCCL's watchdog and its flight recorder have for it.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from .agreement import FIRST_LOOK, Agreement, Step, agreement_of
from .streams import Waitable
from .torch_internals import sequence_number

__all__ = ["LOG_VARIABLE", "Works", "in_agreement"]

LOG_VARIABLE = "COMPILE_FSDP_LOG_COLLECTIVES"
"""Environment variable: anything but 0 has every collective logged."""

_LAST_LOOK = 2.0

# Not this module's name: TORCH_LOGS="+compile_fsdp", which is for schedules, would switch it on.
_log = logging.getLogger("compile_fsdp.collectives")
_log.setLevel(logging.WARNING)
if os.environ.get(LOG_VARIABLE, "0") != "0":
    _log.setLevel(logging.DEBUG)
    _log.addHandler(logging.StreamHandler())


# At exit, for threads that a busy machine does not run at once.
_LAST_MOMENT = 0.2


@functools.cache
def _expect_exit() -> None:
    """Have gloo's threads let go of what they sent before the interpreter goes.

    They do it a moment after somebody has waited for it, and need the interpreter to. One that
    comes too late aborts the process, where the script has not destroyed its process groups.
    """

    def leave() -> None:
        if dist.is_initialized():
            time.sleep(_LAST_MOMENT)

    atexit.register(leave)


class Works:
    """Several works that are waited for together."""

    def __init__(self, works: Sequence[Waitable]) -> None:
        self.works = works

    def wait(self) -> None:
        """Wait for each."""
        for work in self.works:
            work.wait()


def in_agreement(
    start: Callable[[], Waitable | None],
    step: Step,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Callable[[], Waitable | None]:
    """``start``, as soon as the ranks of ``group`` agree on ``step``, with errors that name it.

    What it returns also notices, on the host, that ranks do not agree any more.
    """

    def agreed() -> Waitable | None:
        agreement = agreement_of(group)
        if agreement is None:
            return start()
        position = agreement.announce(step)
        try:
            work = start()
        except (RuntimeError, ValueError) as error:
            agreement.failed(step, error, group, what="start")
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s", _line(step, group))
        if work is None:
            return None
        if device.type == "cuda":
            return _DeviceWork(work, agreement, step, group)
        _expect_exit()
        works = work.works if isinstance(work, Works) else [work]
        watched = [
            _WatchedWork(cast(dist.Work, each), agreement, step, position, group) for each in works
        ]
        return watched[0] if len(watched) == 1 else Works(watched)

    return agreed


def _line(step: Step, group: dist.ProcessGroup) -> str:
    return f"process group {group.group_desc!r}, collective {sequence_number(group)}: {step}"


class _DeviceWork:
    """A work that the current stream waits for; the host does not."""

    def __init__(
        self, work: Waitable, agreement: Agreement, step: Step, group: dist.ProcessGroup
    ) -> None:
        self._work = work
        self._agreement = agreement
        self._step = step
        self._group = group

    def wait(self) -> None:
        """Order the work before what the current stream does next.

        Raises:
            CommunicationError: its communicator has failed.
        """
        try:
            self._work.wait()
        except RuntimeError as error:
            self._agreement.failed(self._step, error, self._group)


class _WatchedWork:
    """A work on the host that is waited for with one eye on the other ranks."""

    def __init__(
        self,
        work: dist.Work,
        agreement: Agreement,
        step: Step,
        position: int,
        group: dist.ProcessGroup,
    ) -> None:
        self._work = work
        self._agreement = agreement
        self._step = step
        self._position = position
        self._group = group

    def wait(self) -> None:
        """Wait until the work is done.

        Raises:
            CommunicationError: it failed, another rank does something else, or the time is over.
        """
        patience = _Patience(self._agreement.timeout)
        while True:
            try:
                self._work.wait(timedelta(seconds=patience.next_look()))
                return
            except RuntimeError as error:
                # A wait that ran out of time leaves the work as it was.
                if self._work.is_completed():
                    self._conclude(error)
                    return
                self._agreement.blocked(self._step, self._position, patience.waited)

    def _conclude(self, late: RuntimeError) -> None:
        """The work is over; ``late`` may only say that the wait was a moment too short."""
        try:
            self._work.wait()
        except RuntimeError:
            self._agreement.failed(self._step, late, self._group)


class _Patience:
    """How long somebody has been waiting, and when to look up next."""

    def __init__(self, timeout: float) -> None:
        self._began = time.monotonic()
        self._longest = min(_LAST_LOOK, timeout / 4)
        self._look = min(FIRST_LOOK, self._longest)

    @property
    def waited(self) -> float:
        return time.monotonic() - self._began

    def next_look(self) -> float:
        look, self._look = self._look, min(2 * self._look, self._longest)
        return look
