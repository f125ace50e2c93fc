"""Compiled graphs whose runs are captured and repeated: CUDA graphs.

    call 1, 2    runs operator by operator, as without all this
    call 3       is captured: a CUDA graph with the computation and its communication
    call 4, ...  inputs are copied in, the CUDA graph is launched, results are copied out

A captured run repeats what it did, so it fits calls that start from an equal state of the host
(`HostState`) and have inputs of equal shapes; others are counted, captured and kept apart. What a
forward saves for its backward stays in the captured run's memory, so until that backward is over
(or given up) a second forward runs without a capture::

    forward  backward  forward  backward       replay  replay  replay  replay
    forward  forward   backward  backward      replay  normal  normal  replay

Which way a call takes follows from what the program does, never from time, and all ranks must take
the same one: they compare, as they do for each collective (``runtime/agreement.py``). A captured
run announces itself only, and not every collective in it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from compile_fsdp.passes.capturable import CaptureFacts
from compile_fsdp.passes.facts import GraphKind
from compile_fsdp.runtime.capture import GraphCapture, GraphPool, make_pool
from compile_fsdp.runtime.host_state import HostSide, HostState, Uncapturable

from .fully_shard import contexts_of
from .static_tensors import Lease, new_like, put_into

__all__ = [
    "MOST_CAPTURES",
    "WARM_UP_CALLS",
    "GraphRuns",
    "GraphedStep",
    "graph_runs",
    "release_graphs",
]

WARM_UP_CALLS = 2
"""Calls of a kind that run as ever before one is captured: what is made once (communicators,
autotuned kernels) must not be made within a capture."""

MOST_CAPTURES = 8
"""Captured runs of one graph; each keeps its results and activations in memory for ever."""

_MOST_KINDS = 64

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GraphRuns:
    """How the calls of one compiled graph went.

    Attributes:
        graph: which one: Dynamo's name for its compilation, and forward, backward or inference.
        captures: calls that were captured.
        replays: calls that repeated a captured one.
        normal: the other calls, by the reason why they ran as without CUDA graphs.
    """

    graph: str
    captures: int
    replays: int
    normal: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = [f"{self.captures} captured", f"{self.replays} replayed"]
        counts += [f"{count} normal ({reason})" for reason, count in self.normal.items()]
        return f"{self.graph}: {', '.join(counts)}"


@dataclass(frozen=True, eq=False)
class _CapturedRun:
    """One call that was captured.

    Attributes:
        number: of the captures of this graph.
        inputs: by position the memory that the inputs are copied into; None: used where they are.
        results: what it returned, in its own memory.
        after: what it left the host in; a text: why that cannot be put in place again.
    """

    capture: GraphCapture
    number: int
    inputs: tuple[torch.Tensor | None, ...]
    results: tuple[Any, ...]
    after: HostState | str


class GraphedStep:
    """The graphs of one compilation; a forward and its backward know of each other.

    Args:
        groups: names of the parameter groups that they read.
        device: of the parameters.
        name: Dynamo's name for the compilation.

    Raises:
        ValueError: the device has no CUDA graphs.
    """

    def __init__(self, groups: Sequence[str], device: torch.device, name: str) -> None:
        self.groups = tuple(groups)
        self.device_type = device.type
        self.pool: GraphPool = make_pool(device)
        self.lease = Lease()
        self._name = name
        self._graphs: list[_Graph] = []

    def take(self, facts: CaptureFacts, run: Callable[[list[Any]], Any]) -> Callable[..., Any]:
        """See `compile_fsdp.passes.pipeline.Captures`."""
        kind = _Backward if facts.kind is GraphKind.BACKWARD else _Forward
        graph = kind(self, facts, run)
        self._graphs.append(graph)
        # A function: AOTAutograd wants to set an attribute on it.
        return lambda arguments: graph.call(arguments)

    def release(self) -> None:
        """Forget all captured runs."""
        for graph in self._graphs:
            graph.release()
        self.lease = Lease()

    def runs(self) -> tuple[GraphRuns, ...]:
        """How the calls of each graph went so far."""
        return tuple(
            GraphRuns(
                f"{self._name} {each.facts.kind.value}".strip(),
                each.captures,
                each.replays,
                dict(each.normal),
            )
            for each in self._graphs
        )


class _Graph:
    """One graph: what was captured of it, and the way that each call takes.

    Attributes:
        captures, replays, normal: see `GraphRuns`.
    """

    def __init__(
        self, step: GraphedStep, facts: CaptureFacts, run: Callable[[list[Any]], Any]
    ) -> None:
        self.facts = facts
        self.captures = 0
        self.replays = 0
        self.normal: Counter[str] = Counter()
        self._step = step
        self._run = run
        self._captured: dict[Hashable, _CapturedRun] = {}
        self._arenas: tuple[int, ...] = ()
        self._calls: Counter[Hashable] = Counter()

    def release(self) -> None:
        """Forget what was captured."""
        self._captured.clear()

    def call(self, arguments: list[Any]) -> Any:
        """Run the graph, one way or another; clears ``arguments``."""
        inputs = list(arguments)
        arguments.clear()
        host = HostSide(self._step.groups)
        try:
            key = self._key(inputs, host)
        except Uncapturable as reason:
            host.agree("a run without a CUDA graph", self.facts.kind.value)
            self._count_normal(str(reason))
            return self._run(inputs)
        captured = self._captured.get(key)
        if captured is None:
            host.agree(f"the capture of CUDA graph {len(self._captured)}", self.facts.kind.value)
            captured = self._captured[key] = self._capture(inputs, host)
            self.captures += 1
        else:
            host.agree(f"a replay of CUDA graph {captured.number}", self.facts.kind.value)
            self._replay(captured, inputs, host)
            self.replays += 1
        return self._give_out(captured, inputs)

    def _key(self, inputs: Sequence[Any], host: HostSide) -> Hashable:
        """Which captured run this call repeats, or is to become.

        Raises:
            Uncapturable: neither.
        """
        if self.facts.refusal:
            raise Uncapturable(self.facts.refusal)
        if self._step.pool.is_busy():
            raise Uncapturable("somebody else is capturing")
        host.begin()
        kind = (tuple(map(_description, inputs)), host.state().key)
        self._warm_up(kind)
        self._check_lease(inputs)
        addresses = tuple(
            value.data_ptr()
            for value in (inputs[index] for index in self.facts.fixed)
            if isinstance(value, torch.Tensor)
        )
        if self._arenas != host.arenas:
            self._captured.clear()
            self._arenas = host.arenas
        key = (kind, addresses)
        known = self._captured.get(key)
        if known is not None and isinstance(known.after, str):
            raise Uncapturable(known.after)
        if key not in self._captured and len(self._captured) >= MOST_CAPTURES:
            raise Uncapturable(f"{MOST_CAPTURES} other kinds of calls are captured")
        return key

    def _warm_up(self, kind: Hashable) -> None:
        """Raise Uncapturable if this call is one of the first of its kind."""
        if kind not in self._calls and len(self._calls) >= _MOST_KINDS:
            raise Uncapturable("no two calls are alike")
        if self._calls[kind] < WARM_UP_CALLS:
            self._calls[kind] += 1
            raise Uncapturable("warm-up")

    def _check_lease(self, inputs: Sequence[Any]) -> None:
        raise NotImplementedError

    def _count_normal(self, reason: str) -> None:
        if reason not in self.normal and reason != "warm-up":
            _logger.warning(
                "a %s graph runs without CUDA graphs: %s", self.facts.kind.value, reason
            )
        self.normal[reason] += 1

    def _capture(self, inputs: list[Any], host: HostSide) -> _CapturedRun:
        memory = tuple(
            None if index in self.facts.fixed else new_like(value)
            for index, value in enumerate(inputs)
        )
        static = [
            self._in_place(value) if copy is None else put_into(copy, value)
            for value, copy in zip(inputs, memory, strict=True)
        ]
        host.settle()
        capture = self._step.pool.new()

        def work() -> tuple[Any, ...]:
            host.fork()
            results = self._run(list(static))
            host.settle()
            return tuple(results)

        try:
            results = capture.record(work)
        except BaseException as error:
            host.forget_events()
            error.add_note(
                f"while the {self.facts.kind.value} graph was captured as a CUDA graph; without "
                'the option "cudagraphs" it runs without'
            )
            raise
        host.fork()
        after: HostState | str
        try:
            after = host.state()
        except Uncapturable as reason:
            after = str(reason)
        return _CapturedRun(capture, len(self._captured), memory, results, after)

    def _in_place(self, value: Any) -> Any:
        return value

    def _replay(self, captured: _CapturedRun, inputs: Sequence[Any], host: HostSide) -> None:
        host.settle()
        for memory, value in zip(captured.inputs, inputs, strict=True):
            if memory is not None:
                put_into(memory, value)
        captured.capture.replay()
        host.fork()
        assert isinstance(captured.after, HostState)
        host.put(captured.after)

    def _give_out(self, captured: _CapturedRun, inputs: Sequence[Any]) -> list[Any]:
        """Copies of the results: the next call writes over them."""
        return [_copied(result) for result in captured.results]


class _Forward(_Graph):
    """A forward or inference graph."""

    def _check_lease(self, inputs: Sequence[Any]) -> None:
        if self._step.lease.is_running:
            raise Uncapturable("an earlier forward waits for its backward")

    def _give_out(self, captured: _CapturedRun, inputs: Sequence[Any]) -> list[Any]:
        """Copies of what the program sees; what is saved for backward where it is, on lease."""
        results = captured.results[: self.facts.results]
        fixed = [inputs[index] for index in self.facts.fixed]
        saved = self._step.lease.begin(captured.results[self.facts.results :], fixed)
        return [*map(_copied, results), *saved]


class _Backward(_Graph):
    """A backward graph, whose inputs but the tangents are what a captured forward has saved."""

    def _check_lease(self, inputs: Sequence[Any]) -> None:
        saved = [inputs[index] for index in self.facts.fixed]
        if not self._step.lease.covers(saved):
            raise Uncapturable("its forward ran without a CUDA graph")

    def _in_place(self, value: Any) -> Any:
        return self._step.lease.owner_of(value)


def _copied(result: Any) -> Any:
    return result.clone() if isinstance(result, torch.Tensor) else result


def _description(value: Any) -> Hashable:
    """What two calls must have in common in one input, its address apart."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if value is None or isinstance(value, int | float):
        return value
    raise Uncapturable(f"an input is a {type(value).__name__}")


def graph_runs(module: nn.Module) -> tuple[GraphRuns, ...]:
    """How often the compiled graphs of a sharded model were captured as CUDA graphs and repeated,
    and why calls ran without.

    Args:
        module: the sharded model, or what ``torch.compile`` returned for it.

    Returns:
        One record for each graph of each compilation with the option ``cudagraphs`` that is alive,
        in order of compilation; empty where there is none.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: nothing of it is sharded.
    """
    return tuple(runs for step in _steps_of(module, "graph_runs") for runs in step.runs())


def release_graphs(module: nn.Module) -> None:
    """Forget the CUDA graphs of a sharded model, and with them their memory.

    Later calls capture new ones. Call it before ``torch.distributed.destroy_process_group()``: NCCL
    waits there until no CUDA graph refers to a communicator any more.

    Args:
        module: the sharded model, or what ``torch.compile`` returned for it.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: nothing of it is sharded.
    """
    for step in _steps_of(module, "release_graphs"):
        step.release()


def _steps_of(module: nn.Module, caller: str) -> tuple[GraphedStep, ...]:
    contexts = contexts_of(module, caller)
    found = dict.fromkeys(step() for context in contexts for step in context.graphed_steps)
    return tuple(step for step in found if step is not None)
