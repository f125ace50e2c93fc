"""See what was compiled: `explain` one call of a model, or `capture` whatever runs.

print(compile_fsdp.explain(model, tokens, targets))

with compile_fsdp.capture() as seen:
    compiled(tokens, targets).backward()
seen.explanation.save("step.html")
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import nn

from .backend import CompileOptions, compile_fsdp, compile_graph
from .compilation import Compilation, graph_break, watched_by
from .describe import explanation_of
from .explanation import Explanation, GraphBreak
from .module import FsdpModule
from .torch_internals import (
    backend_of,
    compiled_in_place,
    compiling_aside,
    graph_breaks,
    without_compile_wrapper,
)
from .unchanged import unchanged


class Capture:
    """What runs while it is open; see `capture`."""

    def __init__(self) -> None:
        self._calls: dict[Compilation, int] = {}
        self._known_breaks = 0
        self._breaks: tuple[GraphBreak, ...] | None = None
        self._stack: ExitStack | None = None

    def __enter__(self) -> Capture:
        if self._stack is not None:
            raise RuntimeError(
                "this capture is open already; use one `with compile_fsdp.capture() as seen:` for "
                "each stretch of code (captures may be nested)"
            )
        self._known_breaks = len(graph_breaks())
        self._breaks = None
        self._stack = ExitStack()
        self._stack.enter_context(watched_by(self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._breaks = self._breaks_since_opened()
        if self._stack is not None:
            self._stack.close()
        self._stack = None

    def called(self, compilation: Compilation) -> None:
        """Compiled code runs (the backend calls this)."""
        self._calls[compilation] = self._calls.get(compilation, 0) + 1

    @property
    def explanation(self) -> Explanation:
        """What has run since the capture was opened, until now or until it was closed.

        Without any graph, its ``notes`` say what to do, and it is false.
        """
        breaks = self._breaks_since_opened() if self._breaks is None else self._breaks
        return explanation_of(self._calls, breaks)

    def _breaks_since_opened(self) -> tuple[GraphBreak, ...]:
        found = graph_breaks()
        # torch.compiler.reset() empties the list.
        start = self._known_breaks if self._known_breaks <= len(found) else 0
        return tuple(graph_break(*each) for each in found[start:])


def capture() -> Capture:
    """Watch the compiled code that runs in a ``with`` block.

    Models that are compiled already are seen as well: what was compiled is remembered with the
    code. A backward counts to the forward that it belongs to, so have both in the block. Captures
    may be nested, and each sees what runs inside of it, in its own thread or task.

    While a capture is open, what is compiled anew is compiled without compile caches: a graph
    that comes out of a cache is never seen by the passes.

    Returns:
        A context manager; its ``explanation`` is there inside of the block and afterwards.
    """
    return Capture()


def explain(model: nn.Module, /, *args: Any, **kwargs: Any) -> Explanation:
    """What ``torch.compile(model, backend="compile_fsdp")`` makes of one call, without doing it.

    The graphs are made and planned as for a first call, but Inductor writes no code: the forward
    runs once, operator by operator, and gathers each parameter where it is read. Backward graphs
    are planned and not run. Nothing of it stays: no gradients, no change of buffers, attributes or
    random number generators, no compiled code. It communicates, so **every rank must call it**.

    Args:
        model: a module that was sharded, or has sharded modules below it. What ``torch.compile``
            returned for the backend ``"compile_fsdp"`` is explained with its options; a module
            that is not compiled, with the default options.
        args, kwargs: for the model's forward. The mode counts: under ``torch.no_grad()`` it is an
            inference graph that is explained.

    Returns:
        The explanation.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: nothing at or below it is sharded, it was compiled for another backend, or it
            or a module below it was compiled in place by ``module.compile()``.
        Exception: what the model itself raises for these arguments.
    """
    module, settings = _settings(model)
    options = CompileOptions.parse(settings.pop("options", None))

    def explained(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return compile_graph(gm, inputs, options, plan_only=True)

    with capture() as seen, unchanged(module), compiling_aside() as aside:
        run = torch.compile(module, backend=explained, **settings, **aside)
        run(*args, **kwargs)
        return seen.explanation


def _settings(model: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    """The module to explain and the arguments of ``torch.compile`` to do it with."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"explain: model must be an nn.Module, got {type(model).__name__}; to see what a "
            "function does, call it inside of compile_fsdp.capture()"
        )
    compiled = backend_of(model)
    module = without_compile_wrapper(model)
    if not any(isinstance(each, FsdpModule) for each in module.modules()):
        raise ValueError(
            f"explain: nothing at or below this {type(module).__name__} is sharded, so there is no "
            "communication to explain; call fully_shard first"
        )
    for name, each in module.named_modules():
        if compiled_in_place(each):
            raise ValueError(
                f"explain: {name or 'the model'!r} was compiled in place by module.compile(), "
                "whose settings cannot be read back; call the model inside of "
                "compile_fsdp.capture() instead"
            )
    if compiled is None:
        return module, {}
    backend, settings = compiled
    if backend is not compile_fsdp:
        raise ValueError(
            f"explain: this {type(module).__name__} was compiled for the backend "
            f"{getattr(backend, '__name__', backend)!r}, which schedules no communication; use "
            'torch.compile(model, backend="compile_fsdp"), or pass the model itself'
        )
    return module, settings
