"""Tests on real gloo processes that are started once and not once for each test.

    @distributed(2, 4)
    def test_gather() -> None:          # runs on every rank, in a world of 2, then in one of 4
        assert dist.get_world_size() in (2, 4)

    def ranks_sum(value: int) -> int: ...

    def test_in_the_parent() -> None:
        first, second = run(2, ranks_sum, 3)      # what each rank returned

A `Pool` keeps one process for each rank. A test body is a module-level function; it and its
arguments are pickled, so they must be importable by name. Every body finds a fresh default process
group of the world size it asked for, seeds set, and no compiled code, caches or gradients modes of
the body before it:

    parent   run(2, f)        run(4, g)              run(2, h)
    rank 0   [init f destroy] [init g destroy]       [init h destroy]
    rank 1   [init f destroy] [init g destroy]       [init h destroy]
    rank 2   -                [init g destroy]       -
    rank 3   -                [init g destroy]       -

An exception on any rank, a rank that dies and one that hangs past the time limit fail the test
with `RankFailure`, which holds every rank's traceback or stack. The processes are then replaced.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

__all__ = ["Pool", "RankFailure", "distributed", "forget", "run", "shut_down"]

DEFAULT_TIMEOUT = 120.0
SEED = 1234
# How long the other ranks may take to notice that one of them failed.
_GRACE = 5.0


class RankFailure(AssertionError):
    """A test body failed on at least one rank; the message has a section for each."""


@dataclass(frozen=True)
class _Task:
    """One test body on one rank."""

    number: int
    module: str
    qualname: str
    arguments: bytes
    rank: int
    world_size: int
    port: int
    timeout: float


@dataclass(frozen=True)
class _Outcome:
    """What became of a task: a pickled value, or text that says why there is none."""

    status: Literal["returned", "raised", "died", "hung"]
    payload: bytes = b""
    text: str = ""


def distributed(
    *world_sizes: int, timeout: float = DEFAULT_TIMEOUT
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test run on every rank of a world, once for each of ``world_sizes``.

    The body's own parameters are filled by pytest (parametrize, picklable fixtures). ``timeout``
    is in seconds. The body is still callable, on one rank, as the wrapper's ``body``.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def wrapper(world_size: int, **arguments: Any) -> None:
            run(world_size, body, timeout=timeout, **arguments)

        signature = inspect.signature(body)
        world = inspect.Parameter("world_size", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        # pytest fills what the signature names; the body need not name the world size.
        wrapper.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[world, *signature.parameters.values()]
        )
        wrapper.body = body  # type: ignore[attr-defined]
        mark = pytest.mark.parametrize("world_size", world_sizes, ids=lambda n: f"ranks{n}")
        decorated: Callable[..., None] = mark(wrapper)
        return decorated

    return decorate


def run(
    world_size: int,
    body: Callable[..., Any],
    *arguments: Any,
    timeout: float = DEFAULT_TIMEOUT,
    **keywords: Any,
) -> list[Any]:
    """Run ``body(*arguments, **keywords)`` on every rank of a fresh world.

    Args:
        world_size: Number of ranks.
        body: A module-level function (or a test decorated with `distributed`).
        timeout: Seconds until a rank that has not answered counts as hung.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankFailure: A rank raised, died or hung.
    """
    return _the_pool().run(world_size, body, arguments, keywords, timeout)


@functools.cache
def _the_pool() -> Pool:
    return Pool()


def shut_down() -> None:
    """End the session's processes, if there are any."""
    if _the_pool.cache_info().currsize:
        _the_pool().close()
        _the_pool.cache_clear()


class Pool:
    """Worker processes, one for each rank, started when a world first needs them."""

    def __init__(self) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # A server that imports torch once: a worker is a fork of it, which takes milliseconds.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch.distributed.tensor"])
        self._workers: list[_Worker] = []
        self._tasks = 0
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(
        self,
        world_size: int,
        body: Callable[..., Any],
        arguments: Sequence[Any],
        keywords: dict[str, Any],
        timeout: float,
    ) -> list[Any]:
        """See the function `run`."""
        while len(self._workers) < world_size:
            self._workers.append(_Worker(self._context, len(self._workers)))
        self._tasks += 1
        packed = pickle.dumps((tuple(arguments), keywords))
        workers = self._workers[:world_size]
        for rank, worker in enumerate(workers):
            worker.send(
                _Task(
                    self._tasks,
                    body.__module__,
                    body.__qualname__,
                    packed,
                    rank,
                    world_size,
                    self._store.port,
                    timeout,
                )
            )
        outcomes = self._collect(workers, timeout)
        if all(outcome.status == "returned" for outcome in outcomes.values()):
            return [pickle.loads(outcomes[rank].payload) for rank in range(world_size)]
        # A rank that failed in the middle of a collective leaves the others in an unknown state.
        self.close()
        raise RankFailure(_report(body, world_size, outcomes))

    def close(self) -> None:
        """End the workers; the next `run` starts new ones."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def _collect(self, workers: Sequence[_Worker], timeout: float) -> dict[int, _Outcome]:
        """Every rank's outcome, in the order in which they arrived."""
        outcomes: dict[int, _Outcome] = {}
        deadline = time.monotonic() + timeout
        while len(outcomes) < len(workers):
            pending = {
                worker.connection: rank
                for rank, worker in enumerate(workers)
                if rank not in outcomes
            }
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in pending.values():
                    outcomes[rank] = _Outcome("hung", text=workers[rank].stack())
                break
            for connection in ready:
                rank = pending[connection]
                outcomes[rank] = workers[rank].receive()
                if outcomes[rank].status != "returned":
                    deadline = min(deadline, time.monotonic() + _GRACE)
        return outcomes


class _Worker:
    """The parent's side of one worker process."""

    def __init__(self, context: Any, number: int) -> None:
        self.connection, theirs = context.Pipe()
        self._stacks = Path(tempfile.mkdtemp(prefix="ranks-")) / f"stack-{number}.txt"
        self._process = context.Process(
            target=_serve, args=(theirs, str(self._stacks), list(sys.path)), daemon=True
        )
        self._process.start()
        theirs.close()

    def send(self, task: _Task) -> None:
        # A worker that died since its last task is noticed by `receive`.
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(pickle.dumps(task))

    def receive(self) -> _Outcome:
        try:
            outcome: _Outcome = pickle.loads(self.connection.recv_bytes())
            return outcome
        except (EOFError, ConnectionResetError):
            self._process.join(_GRACE)
            return _Outcome("died", text=f"the process ended with code {self._process.exitcode}")

    def stack(self) -> str:
        """Where the threads of a worker that does not answer are."""
        if self._process.pid is None or not self._process.is_alive():
            return f"the process ended with code {self._process.exitcode}"
        os.kill(self._process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return self._stacks.read_text() if self._stacks.exists() else "(no stack)"

    def kill(self) -> None:
        self._process.kill()
        self._process.join(_GRACE)
        self.connection.close()
        with suppress(OSError):
            self._stacks.unlink(missing_ok=True)
            self._stacks.parent.rmdir()


def _report(body: Callable[..., Any], world_size: int, outcomes: dict[int, _Outcome]) -> str:
    failed = {rank: each for rank, each in outcomes.items() if each.status != "returned"}
    first = next(iter(failed))
    lines = [f"{body.__qualname__}: rank {first} of {world_size} {failed[first].status} first"]
    # Ranks mostly fail alike: one section for all that say the same.
    alike: dict[tuple[str, str], list[int]] = {}
    for rank, outcome in failed.items():
        alike.setdefault((outcome.status, outcome.text.rstrip()), []).append(rank)
    for (status, text), ranks in alike.items():
        lines += [f"---- rank {', '.join(map(str, sorted(ranks)))} {status}", text]
    returned = [rank for rank, each in outcomes.items() if each.status == "returned"]
    if returned:
        lines.append(f"---- ranks that returned: {returned}")
    return "\n".join(lines)


# What follows runs in the workers.


def _serve(connection: Connection, stack_file: str, path: list[str]) -> None:
    """A worker's life: task after task, until the parent closes the connection."""
    sys.path[:] = path
    # Interrupting the tests must not print a traceback of every worker; the parent ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A pool of compiler processes for each rank helps nobody on a small machine.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch.set_num_threads(1)
    # What is imported by now lives for ever: no collection needs to look at it.
    gc.freeze()
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        while True:
            try:
                task: _Task = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            connection.send_bytes(pickle.dumps(_attempt(task)))


def _attempt(task: _Task) -> _Outcome:
    try:
        value = _in_fresh_world(task)
        return _Outcome("returned", pickle.dumps(value))
    except BaseException:  # also pytest's Skipped and Failed, which are no Exceptions
        return _Outcome("raised", text=traceback.format_exc())


def _in_fresh_world(task: _Task) -> Any:
    function: Any = importlib.import_module(task.module)
    for name in task.qualname.split("."):
        function = getattr(function, name)
    body = getattr(function, "body", function)
    arguments, keywords = pickle.loads(task.arguments)
    random.seed(SEED)
    torch.manual_seed(SEED)
    os.environ.update(RANK=str(task.rank), WORLD_SIZE=str(task.world_size))
    limit = timedelta(seconds=task.timeout)
    store = TCPStore("127.0.0.1", task.port, is_master=False, timeout=limit)
    dist.init_process_group(
        "gloo",
        store=PrefixStore(f"world-{task.number}", store),
        rank=task.rank,
        world_size=task.world_size,
        timeout=limit,
    )
    try:
        # A body that sends nothing could end, and close connections, while others still connect.
        dist.barrier()
        return body(*arguments, **keywords)
    finally:
        forget()


def forget() -> None:
    """Undo what a body leaves behind in its process."""
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    # DTensor's caches hold meshes, and those the process groups of the world that ends. Equal
    # meshes of the next world would find them. (torch.distributed.tensor.debug has a function for
    # this, but importing it imports Dynamo and FSDP, which most tests do without.)
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    # Autograd keeps what a failed backward had left to do until this thread's next one, and with it
    # the model and its process groups: connections stay open, and a rank that waits for an answer
    # on one of them could not end its world.
    torch.ones((), requires_grad=True).backward()
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
