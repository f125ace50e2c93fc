"""Agreement: before a rank starts a collective it knows that the others start the same one.

Ranks whose programs differ would exchange the wrong data, crash inside gloo, or wait for ever. So
every collective of a process group is announced here first, by what it is (kind, parameter group,
gradients, size). An `Agreement` learns which collective follows which, and compares with the other
ranks, through the process group's store, only where that leaves a choice:

    what followed the last few collectives so far      this one              what it costs
    nothing yet (a first run)                          anything              one store operation
    always the same                                    the same              a dict lookup
    always the same                                    another               wait for every rank
    several things (train or evaluate, A or B)         anything              one store operation

A store operation puts a claim under the next number unless some rank has done so: then the two
are compared. Nobody waits, for a collective completes only when all ranks have started it, and a
rank that differs does not start. Where the ranks that agree would not look (the second row),
whoever differs waits until every rank says that it differs too.

A rank that is blocked in a collective looks into the store now and then: another's claim that it
passed without one, or the record of a rank that has given up, makes it raise as well. So each
error appears on every rank. None of this happens while compiling.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from .communication_errors import CommunicationError, likely_cause
from .torch_internals import is_fake_group, process_group_timeout

__all__ = [
    "TIMEOUT_VARIABLE",
    "Agreement",
    "Label",
    "Step",
    "agreement_of",
    "listed_gradients",
    "share_agreement",
]

TIMEOUT_VARIABLE = "COMPILE_FSDP_TIMEOUT"
"""Environment variable: seconds after which a rank gives up waiting for the others."""

# How many collectives tell where in its program a rank is. Longer contexts take longer to learn,
# shorter ones see a choice where a program has none.
_CONTEXT = 4
# Contexts that are remembered; a program whose choices never repeat must not fill the memory.
_MOST_CONTEXTS = 1 << 16
# Claims stay in the store for this many later ones. No rank is that far behind another.
_KEPT = 4096
_REMEMBERED = 1024
# Names that a message lists.
_MOST_NAMES = 6
# A blocked rank looks into the store after these many seconds, at first.
FIRST_LOOK = 0.25
_FIRST_POLL = 0.002


_END = "the end of a backward"


class Label(str):
    """The name of a parameter group for people, which also says what tells it from all others.

    Attributes:
        subject: what the collective is about: group, root, and which gradients.
    """

    __slots__ = ("subject",)
    subject: str

    def __new__(cls, label: str, subject: str) -> Label:
        """``label`` is the string itself."""
        self = super().__new__(cls, label)
        self.subject = subject
        return self

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str(self), self.subject


def listed_gradients(fqns: Sequence[str], indices: Sequence[int]) -> str:
    """Which of a group's gradients there are, in few words that differ for other gradients."""
    present = set(indices)
    absent = [fqn for index, fqn in enumerate(fqns) if index not in present]
    if not absent:
        return f"all {len(fqns)}"
    if len(absent) <= len(present):
        return f"all but {_shortened(absent)}"
    return f"only {_shortened([fqns[index] for index in sorted(present)])}"


def _shortened(names: Sequence[str]) -> str:
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
    return f"{', '.join(names[:_MOST_NAMES])} and {len(names) - _MOST_NAMES} more ({digest})"


class Step(NamedTuple):
    """One collective, as the ranks must agree on it."""

    kind: str
    subject: str
    elements: int
    dtype: torch.dtype | None

    @classmethod
    def end_of_backward(cls, model: str) -> Step:
        """No collective, but the news that no more gradients come."""
        return cls(_END, model, 0, None)

    @classmethod
    def of_call(cls, how: str, graph: str) -> Step:
        """No collective, but the way in which a graph runs, with all its collectives."""
        return cls(how, graph, 0, None)

    @classmethod
    def preparation(cls, what: str, detail: str) -> Step:
        """No collective, but something that all ranks do together."""
        return cls(what, detail, 0, None)

    @classmethod
    def of(cls, kind: str, label: str, full: torch.Tensor) -> Step:
        """The collective of this ``kind`` on the flat buffer ``full``."""
        return cls(kind, getattr(label, "subject", label), full.numel(), full.dtype)

    def __str__(self) -> str:
        if self.dtype is None:
            return f"{self.kind} {'through' if self.kind == _END else 'of'} {self.subject}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kind} of {self.subject or 'a buffer'} ({self.elements} x {dtype})"


@dataclass(frozen=True)
class _Claim:
    """What a rank says that it is about to do.

    Attributes:
        rank: global rank.
        position: how many collectives of the process group it has announced before.
        text: the collective.
    """

    rank: int
    position: int
    text: str

    def pack(self) -> str:
        return f"{self.rank}\n{self.position}\n{self.text}"

    @classmethod
    def unpack(cls, value: bytes) -> _Claim:
        rank, position, text = value.decode().split("\n", 2)
        return cls(int(rank), int(position), text)


_ADVICE = (
    "Every rank must use the same parameters in the same order. Where only gradients differ "
    "(experts of one block), compile_fsdp.zero_missing_gradients(model) lets a rank contribute "
    "zeros; modules that only some ranks use must not be units of their own: shard them together "
    "with their parent"
)


class Agreement:
    """What the ranks of one process group have agreed on, seen from this rank.

    Methods may be called from any thread.

    Args:
        group: the process group; more than one rank.
        timeout: seconds that a rank waits for the others.

    Attributes:
        timeout: the same.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self._store = PrefixStore("compile_fsdp/agreement", group.get_group_store())
        self._ranks = tuple(dist.get_process_group_ranks(group))
        self._rank = dist.get_rank()
        self.timeout = timeout
        self._lock = threading.RLock()
        self._numbers: dict[Step, int] = {}
        self._followed: dict[tuple[int, ...], dict[int, None]] = {}
        self._context: tuple[int, ...] = ()
        self._position = 0
        self._claims = 0
        self._recent: deque[int] = deque(maxlen=_REMEMBERED)
        self._failure = ""
        self._models = itertools.count()

    def number_model(self) -> int:
        """A number for another sharded model over these ranks: all shard in the same order."""
        return next(self._models)

    @property
    def claims(self) -> int:
        """How often this rank has compared with the others through the store."""
        return self._claims

    def announce(self, step: Step) -> int:
        """This rank starts ``step`` next; returns its position among all steps.

        Raises:
            CommunicationError: another rank starts something else, or has given up.
        """
        with self._lock:
            if self._failure:
                raise CommunicationError(self._failure)
            number = self._numbers.setdefault(step, len(self._numbers))
            known = self._followed.setdefault(self._context, {})
            if len(known) != 1 or number not in known:
                # Where no collective follows, nothing else would hold this rank back.
                self._claim(step, waits=len(known) == 1 or step.dtype is None)
                known[number] = None
                if len(self._followed) > _MOST_CONTEXTS:
                    self._followed.clear()
            self._context = (*self._context[1 - _CONTEXT :], number)
            self._recent.append(number)
            self._position += 1
            return self._position - 1

    def _claim(self, step: Step, *, waits: bool) -> None:
        number = self._claims
        self._claims += 1
        mine = _Claim(self._rank, self._position, str(step))
        try:
            first = _Claim.unpack(self._store.compare_set(str(number), "", mine.pack()))
            if number >= _KEPT and self._rank == self._ranks[0]:
                self._store.delete_key(str(number - _KEPT))
        except RuntimeError as error:
            self._lost_store(step, error)
        if (first.position, first.text) != (mine.position, mine.text):
            self._differ(first, mine)
        if waits:
            self._wait_for_all(number, step)

    def _wait_for_all(self, number: int, step: Step) -> None:
        """Return when every rank has made claim ``number``."""
        everyone = f"{number}/all"
        if self._store.add(f"{number}/count", 1) == len(self._ranks):
            self._store.set(everyone, "")
            return
        began, pause = time.monotonic(), _FIRST_POLL
        # Asked again and again: a wait in the store that runs out of time is logged as a fault.
        while not self._is_there(everyone, step):
            time.sleep(pause)
            pause = min(2 * pause, FIRST_LOOK)
            if pause == FIRST_LOOK:
                self._look(step, self._position, time.monotonic() - began)

    def _is_there(self, key: str, step: Step) -> bool:
        try:
            return self._store.check([key])
        except RuntimeError as error:
            self._lost_store(step, error)

    def blocked(self, step: Step, position: int, waited: float) -> None:
        """This rank has been waiting in ``step`` for ``waited`` seconds.

        Raises:
            CommunicationError: another rank does something else or has given up, or ``waited`` is
                too much.
        """
        with self._lock:
            self._look(step, position, waited)

    def failed(
        self,
        step: Step,
        error: BaseException,
        group: dist.ProcessGroup,
        *,
        what: str = "complete",
    ) -> NoReturn:
        """``step`` in ``group`` ended with ``error``, or could not start: say so to the others.

        Raises:
            CommunicationError: always.
        """
        with self._lock:
            if self._failure:
                raise CommunicationError(self._failure) from error
            self._stop(
                f"rank {self._rank} could not {what} the {step} with ranks "
                f"{_listed(self._ranks)} in process group {group.group_desc!r}: "
                f"{_first_line(error)}. {likely_cause(error)}",
                error,
            )

    def _look(self, step: Step, position: int, waited: float) -> None:
        if self._failure:
            raise CommunicationError(self._failure)
        stopped, claim = self._read_store(step, position)
        if stopped:
            self._give_up(stopped, step)
        if claim is not None and claim.position < self._position:
            # It saw a choice where this rank saw none, and has gone another way.
            age = self._position - claim.position
            passed = "something else"
            if age <= len(self._recent):
                passed = str(list(self._numbers)[self._recent[-age]])
            self._differ(claim, _Claim(self._rank, claim.position, passed))
        if waited >= self.timeout:
            self._stop(
                f"rank {self._rank} has waited {waited:.1f} s for the {step} with ranks "
                f"{_listed(self._ranks)}{self._absent(position)}. The time-out is that of the "
                f"process group, or {TIMEOUT_VARIABLE} (seconds)"
            )

    def _read_store(self, step: Step, position: int) -> tuple[str, _Claim | None]:
        """Why a rank has given up, if one has, and what another has claimed under the next number
        of this one; says where this rank is."""
        following = str(self._claims)
        try:
            if self._store.check(["stopped"]):
                return self._store.get("stopped").decode(), None
            self._store.set(f"at/{self._rank}", str(position))
            if self._store.check([following]):
                return "", _Claim.unpack(self._store.get(following))
            return "", None
        except RuntimeError as error:
            self._lost_store(step, error)

    def _absent(self, position: int) -> str:
        """Which ranks have not said that they wait as well."""
        absent = []
        for rank in self._ranks:
            key = f"at/{rank}"
            if not self._store.check([key]) or int(self._store.get(key)) < position:
                absent.append(rank)
        if not absent:
            return ""
        return f"; rank{'s' if len(absent) > 1 else ''} {_listed(absent)} did not come this far"

    def _differ(self, one: _Claim, other: _Claim) -> NoReturn:
        if one.position == other.position:
            where = f"as collective {one.position} of ranks {_listed(self._ranks)}"
        else:
            where = "at the same point of their communication"
        first, second = sorted((one, other), key=lambda claim: claim.rank)
        self._stop(
            f"ranks {first.rank} and {second.rank} differ {where}:\n"
            f"  rank {first.rank}: {first.text}\n"
            f"  rank {second.rank}: {second.text}\n{_ADVICE}"
        )

    def _stop(self, text: str, cause: BaseException | None = None) -> NoReturn:
        """Tell every rank to give up, unless another has, and give up."""
        try:
            recorded = self._store.compare_set("stopped", "", text).decode()
        except RuntimeError:
            recorded = text
        self._failure = recorded if recorded == text else f"{recorded}\n(rank {self._rank}: {text})"
        raise CommunicationError(self._failure) from cause

    def _give_up(self, text: str, step: Step) -> NoReturn:
        self._failure = f"{text}\n(rank {self._rank} was waiting for the {step})"
        raise CommunicationError(self._failure)

    def _lost_store(self, step: Step, error: BaseException) -> NoReturn:
        self._failure = (
            f"rank {self._rank} cannot reach the store of ranks {_listed(self._ranks)} at the "
            f"{step}: {_first_line(error)}. The process that holds the store (often rank 0) has "
            "ended; its own output says why"
        )
        raise CommunicationError(self._failure) from error


_agreements: weakref.WeakKeyDictionary[dist.ProcessGroup, Agreement | None] = (
    weakref.WeakKeyDictionary()
)


def agreement_of(group: dist.ProcessGroup) -> Agreement | None:
    """The agreement of ``group``'s ranks; None where there is nobody to agree with (one rank, or
    torch's fake backend)."""
    try:
        return _agreements[group]
    except KeyError:
        alone = group.size() == 1 or is_fake_group(group)
        agreement = None if alone else Agreement(group, _timeout_of(group))
        _agreements[group] = agreement
        return agreement


def share_agreement(group: dist.ProcessGroup, other: dist.ProcessGroup) -> None:
    """What ``group`` is about to do belongs to the same program as what ``other`` does, over the
    same ranks: one order is learnt for both, and the end of a backward counts for both."""
    _agreements[group] = agreement_of(other)


def _timeout_of(group: dist.ProcessGroup) -> float:
    value = os.environ.get(TIMEOUT_VARIABLE)
    if value is None:
        return process_group_timeout(group).total_seconds()
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise ValueError(f"{TIMEOUT_VARIABLE} must be a number of seconds above 0, got {value!r}")
    return seconds


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) > 16:
        return f"{ranks[0]} to {ranks[-1]} ({len(ranks)})"
    return ", ".join(map(str, ranks))


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0].split(". ", 1)[0]
