"""Compilation: what one call of the backend compiled, kept as long as the compiled code.

The callable that the backend returns tells whoever watches that it is called, so that a capture
also sees models that were compiled long before it opened::

    capture            opens: it is in this context's tuple of watchers
    model(x)           compiled code runs: each watcher is told which compilation it belongs to
    backward()         needs to tell nobody: a compilation's backward graph is in its record, from
                       whatever thread it was compiled in
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from traceback import FrameSummary
from typing import Any, Protocol

from torch.fx import Graph, GraphModule

from compile_fsdp.passes.facts import GraphKind
from compile_fsdp.passes.listing import listing, user_line
from compile_fsdp.passes.policy import Policy
from compile_fsdp.passes.show import show
from compile_fsdp.passes.steps import Schedule
from compile_fsdp.runtime.group_info import GroupInfo

from .explanation import GraphBreak, ParameterGroup, WeightFormat
from .moves import parameter_group, weight_formats
from .torch_internals import compilation_in_progress, graph_break_of


class Watcher(Protocol):
    """Is told which compiled code runs."""

    def called(self, compilation: Compilation) -> None:
        """Code of ``compilation`` is about to run."""


_watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("compile_fsdp_watchers", default=())


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """``watcher`` is told about the compiled code that this context runs."""
    token = _watchers.set((*_watchers.get(), watcher))
    try:
        yield
    finally:
        _watchers.reset(token)


def is_watched() -> bool:
    """Whether anybody wants to see what is compiled now."""
    return bool(_watchers.get())


@dataclass(frozen=True)
class RewrittenGraph:
    """One graph that the passes rewrote.

    Attributes:
        kind: forward, backward or inference.
        schedule: what it follows now.
        before, after: the whole graph as text.
        communication: the rewritten graph, communication and its neighbours only.
    """

    kind: GraphKind
    schedule: Schedule
    before: str
    after: str
    communication: str


class Compilation:
    """The record of one call of the backend.

    Args:
        gm: the graph that Dynamo hands to the backend now.
        groups: the groups that it reads, by name.
        policy: by which its graphs are planned.

    Attributes:
        compile_id: Dynamo's name for it ("0/0").
        failed_guard: why code that was compiled before did not fit; None for a first compilation.
        where: the user's line that the graph starts with.
        graph_break: where and why Dynamo ended the graph; None where the program ended it.
        groups: the groups that it reads, in order of first read.
        formats: in what formats their parameters compute, where that was asked for.
        graphs: grows as graphs are rewritten: the backward graph often when it first runs.
    """

    def __init__(self, gm: GraphModule, groups: Mapping[str, GroupInfo], policy: Policy) -> None:
        self.policy = policy
        self.compile_id, self.failed_guard = compilation_in_progress()
        self.where = next(filter(None, map(user_line, gm.graph.nodes)), "")
        found = graph_break_of(gm)
        self.graph_break = None if found is None else graph_break(*found, self.compile_id)
        self.groups: tuple[ParameterGroup, ...] = tuple(
            parameter_group(info) for info in groups.values()
        )
        self.formats: tuple[WeightFormat, ...] = weight_formats(groups.values())
        self.graphs: list[RewrittenGraph] = []

    def observe(self, kind: GraphKind, before: str, schedule: Schedule, after: Graph) -> None:
        """A graph of it has been rewritten: an observer of the passes."""
        self.graphs.append(RewrittenGraph(kind, schedule, before, listing(after), show(after)))

    def announcing(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, telling whoever watches that this compilation's code is called."""

        def called(*args: Any) -> Any:
            for watcher in _watchers.get():
                watcher.called(self)
            return run(*args)

        return called


def graph_break(reason: str, frame: FrameSummary | None, compile_id: str = "") -> GraphBreak:
    """A graph break as an explanation shows it; ``frame`` is the user's line, if it is known."""
    if frame is None:
        return GraphBreak(reason, "", 0, "", "", compile_id)
    code = (frame.line or "").strip()
    return GraphBreak(reason, frame.filename, frame.lineno or 0, frame.name, code, compile_id)
