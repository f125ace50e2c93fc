"""Processes that stay: one for each rank of a contender, told what to do over a pipe.

Every contender has processes of its own, as it would have for a user: no compiled code, allocator
or process group is shared. All but one wait at their pipe (without computing) while that one works,
so measuring A B A B ... costs nothing but memory.

    parent            ask(A)          ask(B)          ask(A)
    A, rank 0, 1      [ a step ]                      [ a step ]
    B, rank 0, 1                      [ a step ]
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import torch.distributed as dist

from compile_fsdp.torch_internals import init_fake_process_group

PATIENCE = 1800.0
"""Seconds until a rank that does not answer counts as lost: compiling takes minutes."""


class RanksFailed(RuntimeError):
    """A rank raised, died or did not answer; the message is for people."""


@dataclass(frozen=True)
class World:
    """What the processes of a contender are.

    Attributes:
        ranks: of the process group.
        backend: "gloo": a process for each rank. "fake": one process that believes to be rank 0;
            its collectives do nothing.
        environment: variables, set before anything is compiled.
    """

    ranks: int = 2
    backend: Literal["gloo", "fake"] = "gloo"
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        """How many there are."""
        return self.ranks if self.backend == "gloo" else 1


class Ranks:
    """The processes of one contender.

    Args:
        world: what they are.
        maker: ``"module:function"``, called in each process with ``arguments``; returns the object
            whose methods `ask` calls.

    Raises:
        RanksFailed: they could not be made.
    """

    def __init__(self, world: World, maker: str, *arguments: Any) -> None:
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        context = _context()
        port = free_port()
        packed = pickle.dumps((maker, arguments))
        for rank in range(world.processes):
            ours, theirs = context.Pipe()
            arguments_of_rank = (theirs, world, rank, port, packed, list(sys.path))
            process = context.Process(target=_serve, args=arguments_of_rank, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        try:
            self._collect("being set up")
        except RanksFailed:
            self.close()
            raise

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method in all processes at once; what each returned, in rank order.

        Raises:
            RanksFailed: one of them did not return.
        """
        for pipe in self._pipes:
            pipe.send((method, arguments))
        return self._collect(method)

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
        deadline = time.monotonic() + 5
        for process in self._processes:
            process.join(max(0.1, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collect(self, what: str) -> list[Any]:
        answers = []
        deadline = time.monotonic() + PATIENCE
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise RanksFailed(f"rank {rank} did not finish {what} in {PATIENCE:.0f} s")
            try:
                fine, answer = pipe.recv()
            except (EOFError, OSError) as error:
                raise RanksFailed(f"rank {rank} ended during {what}") from error
            if not fine:
                raise RanksFailed(f"rank {rank}, {what}: {answer}")
            answers.append(answer)
        return answers


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@functools.cache
def _context() -> Any:
    """A server that imports torch once; every process is a fork of it."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.tensor"])
    return context


# What follows runs in the processes.


def _serve(
    pipe: Connection, world: World, rank: int, port: int, packed: bytes, path: list[str]
) -> None:
    sys.path[:] = path
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its processes
    made: list[Any] = []

    def make() -> None:
        _prepare(world, rank, port)
        maker, arguments = pickle.loads(packed)
        module, _, name = maker.partition(":")
        made.append(getattr(importlib.import_module(module), name)(*arguments))

    if not _say(pipe, make):
        return
    while (asked := pipe.recv()) is not None:
        method, method_arguments = asked
        _say(pipe, functools.partial(_call, made[0], method, method_arguments))
    dist.destroy_process_group()


def _say(pipe: Connection, call: Any) -> bool:
    """Send what ``call`` returns, or that it raised."""
    try:
        pipe.send((True, call()))
    except Exception as error:
        traceback.print_exc()
        pipe.send((False, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"))
        return False
    return True


def _call(made: Any, method: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(made, method)(*arguments)


def _prepare(world: World, rank: int, port: int) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        TORCHINDUCTOR_COMPILE_THREADS="1",
        **world.environment,
    )
    torch.set_num_threads(1)
    # What a fake collective leaves in a buffer may be denormal, which computes slowly.
    torch.set_flush_denormal(True)
    if world.backend == "fake":
        init_fake_process_group(world.ranks)
    else:
        dist.init_process_group("gloo", rank=rank, world_size=world.ranks)
